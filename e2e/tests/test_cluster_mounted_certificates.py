"""Engines whose certificates a user mounts: they serve, and new files restart nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster_access import Proxy
from cluster_install import Installation, certificate_secret
from cluster_run import ClusterRun, manifest, running
from kv_load import moved, text

from cluster.session import Cluster
from pdcluster_connector.protocol.engine_id import role_name

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

KUBELET_SECONDS = 300.0
ROLES = ("prefill", "decode")


def mounting(secret: str) -> dict[str, Any]:
    """A role whose engines mount a Secret's certificate."""
    mounts = [{"name": "own", "mountPath": "/pdcluster-tls", "readOnly": True}]
    return {
        "podTemplate": {
            "spec": {
                "containers": [{"name": "engine", "volumeMounts": mounts}],
                "volumes": [{"name": "own", "secret": {"secretName": secret}}],
            }
        }
    }


def give_certificates(run: ClusterRun, operator: Installation, days: int) -> None:
    for role in ROLES:
        name = role_name(f"{run.namespace}.{run.name}.{role}.any.0/1")
        secret = certificate_secret(operator.of_users, f"own-{role}", name, days)
        run.kubectl("apply", "--filename=-", stdin=json.dumps(secret))


def test_engines_serve_with_certificates_of_the_user_and_take_up_new_ones(
    cluster: Cluster, proxy: Proxy, operator: Installation
) -> None:
    with running(cluster, proxy, None, "mounted") as run:
        give_certificates(run, operator, days=10)
        roles = {role: mounting(f"own-{role}") for role in ROLES}
        run.apply(manifest("mounted", transfer={"tls": "Mounted"}, **roles))
        run.wait_ready()
        moved(run, text(60, 81_000))
        before = run.status()["transfer"]
        assert before["certificates"] == "Mounted"
        secrets = run.kubectl("get", "secrets", "--output=name").split()
        assert "secret/mounted-certificates" not in secrets, "the operator makes none"
        pods = [run.restarts(role) for role in ROLES]

        give_certificates(run, operator, days=20)

        def in_use() -> bool:
            """Whether no engine uses its first certificate any more."""
            return bool(run.status()["transfer"].get("notAfter", "") > before["notAfter"])

        took = run.wait("use of the new certificates", in_use, KUBELET_SECONDS)
        print(f"new certificates in use after {took:.0f} s")
        moved(run, text(60, 82_000))
        assert [run.restarts(role) for role in ROLES] == pods
        run.wait_ready()
