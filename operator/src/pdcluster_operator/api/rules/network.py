"""Rules of the network: peers of NetworkPolicies, NIXL's backends, and RDMA."""

import ipaddress
from collections.abc import Iterator, Sequence

from pdcluster_connector.compat.supported import why_not
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec import pod_templates, resources, router_types, types
from pdcluster_operator.api.spec.router_types import SelectorOperator
from pdcluster_operator.api.spec.types import Device, Role

WITH_VALUES = (SelectorOperator.IN, SelectorOperator.NOT_IN)


def peer_errors(path: str, peers: Sequence[router_types.NetworkPeer]) -> Iterator[FieldError]:
    """Yield errors in a list of peers at ``path``."""
    for number, peer in enumerate(peers):
        here = f"{path}[{number}]"
        selectors = {"podSelector": peer.pod_selector, "namespaceSelector": peer.namespace_selector}
        chosen = any(selector is not None for selector in selectors.values())
        if chosen == (peer.ip_block is not None):
            yield FieldError(
                here,
                "",
                Rule.PEER_UNUSABLE,
                "needs podSelector, namespaceSelector or both, or ipBlock alone",
                "Select pods or a range of addresses; podSelector: {} selects all pods.",
            )
        for name, selector in selectors.items():
            if selector is not None:
                yield from _selector(f"{here}.{name}", selector)
        if peer.ip_block is not None:
            yield from _block(f"{here}.ipBlock", peer.ip_block)


def _selector(path: str, selector: router_types.LabelSelector) -> Iterator[FieldError]:
    for number, wanted in enumerate(selector.match_expressions):
        if (wanted.operator in WITH_VALUES) != bool(wanted.values):
            needs = "needs values" if wanted.operator in WITH_VALUES else "takes no values"
            yield FieldError(
                f"{path}.matchExpressions[{number}].values",
                ", ".join(wanted.values),
                Rule.PEER_UNUSABLE,
                f"operator {wanted.operator} {needs}",
                "Write In or NotIn with values, or Exists or DoesNotExist without values.",
            )


def _block(path: str, block: router_types.IpBlock) -> Iterator[FieldError]:
    whole = _network(block.cidr)
    if whole is None:
        yield _no_cidr(f"{path}.cidr", block.cidr)
    for number, cidr in enumerate(block.excluded):
        here, part = f"{path}.except[{number}]", _network(cidr)
        if part is None:
            yield _no_cidr(here, cidr)
        elif whole and (part.prefixlen <= whole.prefixlen or part.network_address not in whole):
            yield FieldError(
                here,
                cidr,
                Rule.PEER_UNUSABLE,
                f"is not a part of {block.cidr}",
                "Leave out only ranges that lie within cidr.",
            )


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _no_cidr(path: str, value: str) -> FieldError:
    message = "is not a range of addresses in CIDR form: first address, slash, prefix length"
    return FieldError(
        path, value, Rule.BAD_FORMAT, message, "Write for example 10.0.0.0/8 or fd00::/8."
    )


def backend_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield transport backends of NIXL that cannot carry KV."""
    for place, backend in enumerate(cluster.spec.transfer.backends):
        if why := why_not(backend):
            yield FieldError(
                f"spec.transfer.backends[{place}]",
                shown(backend),
                Rule.BACKEND_CARRIES_NOTHING,
                f"NIXL's {backend} {why}",
                "Use UCX, which carries RDMA, NVLink and TCP.",
            )


def rdma_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield a warning if engines span machines without RDMA: their KV goes over TCP."""
    transfer = cluster.spec.transfer
    if transfer.device is not Device.CUDA or transfer.rdma is not None:
        return
    for role in Role:
        spec = cluster.spec.role(role)
        _, overlay = pod_templates.engine_container(cluster, role)
        devices = {*spec.resources.limits, *pod_templates.amounts(overlay, "limits")}
        if spec.parallelism.nodes > 1 and all(
            resources.is_accelerator(name) for name in devices if "/" in name
        ):
            yield FieldError(
                "spec.transfer.rdma",
                "",
                Rule.NO_RDMA,
                f"the {role} engines span {spec.parallelism.nodes} pods and ask for no RDMA "
                "device: KV goes over TCP",
                "Name the RDMA resource of your nodes, e.g. rdma: {resource: rdma/ib}.",
                (f"spec.{role}.parallelism", f"spec.{role}.resources"),
            )
            return
