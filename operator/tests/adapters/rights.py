"""The rights of the operator under test: those that the chart gives, and not one more."""

from __future__ import annotations

RBAC = "/apis/rbac.authorization.k8s.io/v1"
READ = ["get", "list", "watch"]
APPLY = [*READ, "create", "patch", "delete"]
WATCHED_RULES = [
    {"apiGroups": ["pdcluster.dev"], "resources": ["pdclusters", "prefillscalers"], "verbs": READ},
    {
        "apiGroups": ["pdcluster.dev"],
        "resources": ["pdclusters/status", "prefillscalers/status"],
        "verbs": ["patch"],
    },
    {
        "apiGroups": ["pdcluster.dev"],
        "resources": ["pdclusters/scale", "prefillscalers/scale"],
        "verbs": ["patch"],
    },
    {"apiGroups": ["pdcluster.dev"], "resources": ["pdclusters/finalizers"], "verbs": ["update"]},
    {
        "apiGroups": ["apps"],
        "resources": ["statefulsets", "deployments", "controllerrevisions"],
        "verbs": APPLY,
    },
    {"apiGroups": ["apps"], "resources": ["replicasets"], "verbs": ["get"]},
    {
        "apiGroups": [""],
        "resources": ["services", "configmaps", "serviceaccounts"],
        "verbs": APPLY,
    },
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": APPLY},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": APPLY},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": APPLY},
    {"apiGroups": ["scheduling.k8s.io"], "resources": ["podgroups"], "verbs": APPLY},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": [*READ, "create"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["pdcluster-operator", "pdcluster-operator-blue"],
        "verbs": ["get", "update"],
    },
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
]
CERTIFICATE_RULES = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "patch"]},
    {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["validatingwebhookconfigurations"],
        "verbs": ["get", "patch"],
    },
]
SUBJECT = [{"kind": "User", "name": "operator", "apiGroup": "rbac.authorization.k8s.io"}]
