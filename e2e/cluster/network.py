"""Addresses, and the wires between host, node and pods.

A veth pair joins the host and the node. The CNI plugin `ptp` joins the node and each pod with
another pair. Everything is routed. Only the addresses of Services are translated. So a forwarding
rule in the node sees the pods' own addresses, which NetworkPolicy needs, and neither iptables nor a
bridge is needed.
"""

from __future__ import annotations

import ipaddress
import json
import time
from pathlib import Path

from cluster.commands import output, run
from cluster.report import ClusterError

NODE_NAME = "node-1"
LINK = ipaddress.ip_network("10.240.0.0/30")
HOST, NODE = (str(address) for address in LINK.hosts())
PODS = ipaddress.ip_network("10.244.0.0/24")
SERVICES = ipaddress.ip_network("10.96.0.0/16")
API_SERVICE = str(SERVICES[1])
DNS_SERVICE = str(SERVICES[10])
DOMAIN = "cluster.local"
HOST_LINK, NODE_LINK = "pdcluster0", "pdcluster1"
# Smaller than any wire that it may run over.
MTU = 1400


def check_free() -> None:
    """Raises ClusterError if the host already has a route to one of our networks."""
    for route in json.loads(output("ip", "-j", "-4", "route", "show") or "[]"):
        if route["dst"] == "default" or route.get("dev") == HOST_LINK:
            continue
        taken = ipaddress.ip_network(route["dst"], strict=False)
        for ours in (LINK, PODS, SERVICES):
            if taken.overlaps(ours):
                raise ClusterError(
                    f"this machine routes {taken} to {route.get('dev')}, and the cluster needs "
                    f"{ours}: end that network, or set KUBECONFIG to a cluster that you have"
                )


def join_host(node_pid: int) -> None:
    """On the host: make the pair, give its other end to the node, route pods and Services."""
    other_end = f"name {NODE_LINK} mtu {MTU} netns {node_pid}"
    _ip(f"link add {HOST_LINK} mtu {MTU} type veth peer {other_end}")
    _ip(f"address add {HOST}/{LINK.prefixlen} dev {HOST_LINK}")
    _ip(f"link set {HOST_LINK} up")
    for network in (PODS, SERVICES):
        _ip(f"route add {network} via {NODE}")


def leave_host() -> None:
    """On the host, after the node's end: remove its link now. The kernel may take seconds."""
    if _exists(HOST_LINK):
        # No error if the link is already gone.
        output("ip", "link", "delete", HOST_LINK)


def join_node(patience: float = 60.0) -> None:
    """In the node: take the pair's other end as soon as the host has made it."""
    _ip("link set lo up")
    end = time.monotonic() + patience
    while not _exists(NODE_LINK):
        if time.monotonic() > end:
            raise ClusterError(f"the host made no {NODE_LINK} within {patience:.0f} s")
        time.sleep(0.01)
    _ip(f"address add {NODE}/{LINK.prefixlen} dev {NODE_LINK}")
    _ip(f"link set {NODE_LINK} up")
    _ip(f"route add default via {HOST}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def write_cni(folder: Path, leases: Path) -> None:
    """The pods' network as containerd reads it. host-local keeps the addresses in `leases`."""
    folder.mkdir()
    addresses = {
        "type": "host-local",
        "dataDir": str(leases),
        "ranges": [[{"subnet": str(PODS)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [{"type": "ptp", "mtu": MTU, "ipam": addresses}]
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
    (folder / "10-pods.conflist").write_text(json.dumps(network, indent=2))


def _exists(link: str) -> bool:
    # Not /sys, which shows the links of the namespace that it was mounted in.
    return (Path("/proc/sys/net/ipv4/conf") / link).exists()


def _ip(arguments: str) -> None:
    run("ip", *arguments.split())
