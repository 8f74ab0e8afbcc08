"""Access to the API server: one token and one kubeconfig for each of the node's programs.

Every program has a user of its own, so the audit log says who wrote what.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cluster import network

PORT = 6443
SERVER = f"https://{network.NODE}:{PORT}"
ADMIN = "admin"


@dataclass(frozen=True)
class User:
    """A name as RBAC and the audit log know it, and the groups that give it its rights."""

    name: str
    groups: tuple[str, ...] = ()


USERS = {
    ADMIN: User("admin", ("system:masters",)),
    "controller-manager": User("system:kube-controller-manager"),
    "scheduler": User("system:kube-scheduler"),
    "proxy": User("system:kube-proxy"),
    "kubelet": User(f"system:node:{network.NODE_NAME}", ("system:nodes",)),
    # It only reads, but it does so before anyone can apply a role for it.
    "policy": User("network-policy", ("system:masters",)),
}


def write_access(keys: Path, settings: Path) -> None:
    """Write `tokens.csv` for the API server, and `settings/ROLE.kubeconfig` for each user."""
    authority = base64.b64encode((keys / "ca.crt").read_bytes()).decode()
    rows = []
    for role, user in USERS.items():
        token = secrets.token_hex(16)
        groups = f',"{",".join(user.groups)}"' if user.groups else ""
        rows.append(f"{token},{user.name},{user.name}{groups}\n")
        write_secret(settings / f"{role}.kubeconfig", kubeconfig(user.name, token, authority))
    write_secret(keys / "tokens.csv", "".join(rows))


def kubeconfig(user: str, token: str, authority: str) -> str:
    """A kubeconfig in JSON, which is YAML too; `authority` is the CA's certificate in base64."""
    cluster = {"server": SERVER, "certificate-authority-data": authority}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pdcluster-test",
        "clusters": [{"name": "pdcluster-test", "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [
            {"name": "pdcluster-test", "context": {"cluster": "pdcluster-test", "user": user}}
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read, from its first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
