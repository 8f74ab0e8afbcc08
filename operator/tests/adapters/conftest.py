"""Real processes of ours against a real API server; nothing is simulated but nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from operator_runs import Operator, until
from real_api import RealApi, add_crds, running_api
from rights import CERTIFICATE_RULES, RBAC, SUBJECT, WATCHED_RULES

numbers = itertools.count(1)


@pytest.fixture(scope="session")
def real() -> Iterator[RealApi]:
    """A control plane with our CRDs, whose user `operator` has no rights yet."""
    with running_api() as api:
        add_crds(api)
        yield api


@pytest.fixture
def namespace(real: RealApi) -> str:
    """A namespace in which the user `operator` has the rights of the chart's namespaced mode."""
    return new_namespace(real)


def new_namespace(real: RealApi) -> str:
    """Create a namespace with these rights; return its name."""
    name = f"test-{next(numbers)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    assert real.call("POST", "/api/v1/namespaces", body)[0] == 201
    allow(real, name, [*WATCHED_RULES, CERTIFICATE_RULES[0]])
    return name


def allow(real: RealApi, namespace: str, rules: list[dict], name: str = "operator") -> None:
    """Bind a Role with these rules to the user `operator`; returns when they are in force."""
    path = f"{RBAC}/namespaces/{namespace}"
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    status, answer = real.call("POST", f"{path}/roles", {**kind, "kind": "Role", "rules": rules})
    assert status == 201, answer
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    binding = {**kind, "kind": "RoleBinding", "roleRef": role, "subjects": SUBJECT}
    assert real.call("POST", f"{path}/rolebindings", binding)[0] == 201
    may(real, rules[0], namespace)


def may(real: RealApi, rule: dict, namespace: str = "") -> None:
    """Wait until the user `operator` may do this: the API server reads new roles a moment later."""
    resource, _, subresource = rule["resources"][0].partition("/")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": "operator",
            "resourceAttributes": {
                "namespace": namespace,
                "verb": rule["verbs"][0],
                "group": rule["apiGroups"][0],
                "resource": resource,
                "subresource": subresource,
            },
        },
    }

    def answer() -> dict:
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return real.call("POST", path, review)[1]["status"]

    until(lambda: answer()["allowed"], 60, answer)


@pytest.fixture
def operator(real: RealApi, namespace: str) -> Iterator[Operator]:
    """The operator's process over one namespace; not started yet."""
    process = Operator(
        real,
        "run",
        f"--authority-secret={namespace}/authority",
        f"--namespace={namespace}",
        "--allow-host-path-models",
    )
    yield process
    process.stop()
