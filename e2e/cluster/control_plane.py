"""etcd, the API server, the controller manager and the scheduler, as plain processes."""

from __future__ import annotations

from cluster import audit, network
from cluster.access import PORT
from cluster.daemons import Daemon, Programs
from cluster.places import Places

# etcd listens on the node's loopback only.
ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"

# Kubernetes serves PodGroups, and schedules by them, with this gate and its API turned on.
GANGS = "--feature-gates=GenericWorkload=true"
GANGS_API = "--runtime-config=scheduling.k8s.io/v1beta1=true"


def etcd(places: Places, programs: Programs) -> Daemon:
    """One member, without fsync, because nobody needs this cluster's state after a crash."""
    return Daemon(
        "etcd",
        (
            programs["etcd"],
            f"--data-dir={places.node / 'etcd'}",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={ETCD_PEER}",
            f"--initial-advertise-peer-urls={ETCD_PEER}",
            f"--initial-cluster=default={ETCD_PEER}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def api_server(places: Places, programs: Programs) -> Daemon:
    """With RBAC, with the kubelet's rights limited to its own node, with an audit log."""
    keys = places.keys
    return Daemon(
        "kube-apiserver",
        (
            programs["kube-apiserver"],
            f"--etcd-servers={ETCD}",
            f"--secure-port={PORT}",
            f"--advertise-address={network.NODE}",
            f"--tls-cert-file={keys / 'apiserver.crt'}",
            f"--tls-private-key-file={keys / 'apiserver.key'}",
            f"--client-ca-file={keys / 'ca.crt'}",
            f"--token-auth-file={keys / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-account-issuer=https://kubernetes.default.svc.{network.DOMAIN}",
            f"--service-account-key-file={keys / 'service-account.pub'}",
            f"--service-account-signing-key-file={keys / 'service-account.key'}",
            f"--service-cluster-ip-range={network.SERVICES}",
            f"--kubelet-certificate-authority={keys / 'ca.crt'}",
            f"--kubelet-client-certificate={keys / 'apiserver-client.crt'}",
            f"--kubelet-client-key={keys / 'apiserver-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            GANGS,
            GANGS_API,
            *audit.flags(places.settings / "audit-policy.json", places.audit_log),
        ),
    )


def controller_manager(places: Places, programs: Programs) -> Daemon:
    """With higher client limits: with the defaults, its controllers would start 4.5 s later."""
    return Daemon(
        "kube-controller-manager",
        (
            programs["kube-controller-manager"],
            f"--kubeconfig={places.settings / 'controller-manager.kubeconfig'}",
            "--use-service-account-credentials",
            f"--root-ca-file={places.keys / 'ca.crt'}",
            f"--service-account-private-key-file={places.keys / 'service-account.key'}",
            f"--cluster-signing-cert-file={places.keys / 'ca.crt'}",
            f"--cluster-signing-key-file={places.keys / 'ca.key'}",
            f"--flex-volume-plugin-dir={places.node / 'volume-plugins'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--node-monitor-grace-period=20s",
            GANGS,
        ),
    )


def scheduler(places: Places, programs: Programs) -> Daemon:
    return Daemon(
        "kube-scheduler",
        (
            programs["kube-scheduler"],
            f"--kubeconfig={places.settings / 'scheduler.kubeconfig'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            GANGS,
        ),
    )
