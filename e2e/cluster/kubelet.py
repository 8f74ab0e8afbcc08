"""The programs that run pods on the node: containerd, the kubelet, and kube-proxy for Services."""

from __future__ import annotations

import json
from typing import Any

from cluster import images, network
from cluster.daemons import Daemon, Programs
from cluster.places import Places


def containerd(places: Places, programs: Programs) -> Daemon:
    """It has its own root, state and socket, and does not touch a containerd of the host."""
    network.write_cni(places.settings / "cni", places.node / "addresses")
    settings = places.settings / "containerd.toml"
    # restrict_oom_score_adj: small virtual machines lack CAP_SYS_RESOURCE.
    settings.write_text(f"""\
version = 3
root = "{places.node}/containerd"
state = "{places.node}/containerd-state"
[grpc]
  address = "{places.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{places.node}/containerd-opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{images.POD}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{programs["ptp"].parent}"]
    conf_dir = "{places.settings}/cni"
""")
    return Daemon("containerd", (programs["containerd"], "--config", settings))


def kubelet(places: Places, programs: Programs) -> Daemon:
    """Evicts no pod and removes no image until the disk is full: no registry has the images."""
    (places.settings / "resolv.conf").write_text("")
    settings = places.settings / "kubelet.json"
    settings.write_text(json.dumps(_kubelet_settings(places), indent=2))
    return Daemon(
        "kubelet",
        (
            programs["kubelet"],
            f"--config={settings}",
            f"--kubeconfig={places.settings / 'kubelet.kubeconfig'}",
            f"--root-dir={places.node / 'kubelet'}",
            f"--cert-dir={places.keys}",
            f"--hostname-override={network.NODE_NAME}",
            f"--node-ip={network.NODE}",
        ),
    )


def _kubelet_settings(places: Places) -> dict[str, Any]:
    keys = places.keys
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{places.containerd_socket}",
        "tlsCertFile": str(keys / "kubelet.crt"),
        "tlsPrivateKeyFile": str(keys / "kubelet.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(keys / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [network.DNS_SERVICE],
        "clusterDomain": network.DOMAIN,
        "resolvConf": str(places.settings / "resolv.conf"),
        "makeIPTablesUtilChains": False,
        "healthzPort": 0,
        "maxOpenFiles": 20000,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "1%",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "podLogsDir": str(places.node / "pod-logs"),
        "volumePluginDir": str(places.node / "volume-plugins"),
        # How often pods get the new content of Secrets. The default is a minute.
        "syncFrequency": "2s",
    }


def kube_proxy(places: Places, programs: Programs) -> Daemon:
    """Uses nftables. The limits of connection tracking belong to the host, so it keeps them."""
    settings = places.settings / "kube-proxy.json"
    settings.write_text(json.dumps(_proxy_settings(places), indent=2))
    return Daemon("kube-proxy", (programs["kube-proxy"], f"--config={settings}"))


def _proxy_settings(places: Places) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": network.NODE_NAME,
        "clientConnection": {"kubeconfig": str(places.settings / "proxy.kubeconfig")},
        "clusterCIDR": str(network.PODS),
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
