"""Rules of the network: peers of NetworkPolicies, what stands in front of engines, and RDMA."""

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.object_names import ROLE_LABEL
from pdcluster_operator.api.spec import pod_templates, resources, router_types, types
from pdcluster_operator.api.spec.fields import as_manifest, camel
from pdcluster_operator.api.spec.resolve import engine_places
from pdcluster_operator.api.spec.router_types import Router, RouterType, SelectorOperator
from pdcluster_operator.api.spec.types import Role

WITH_VALUES = (SelectorOperator.IN, SelectorOperator.NOT_IN)
OF_EVERY_TYPE = frozenset({"type", "api_key_secret_ref", "allow_from"})
OF_LLMD = frozenset({"sidecar_image"})


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


MULTUS = "k8s.v1.cni.cncf.io/networks"


def pod_network_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield pods that cannot look up engines' names, and networks that replace those of rdma."""
    rdma = cluster.spec.transfer.rdma
    for path, template, ours in pod_templates.pod_templates(cluster):
        spec = pod_templates.pod_spec(template)
        role = next((one for one in Role if path == f"spec.{one}.podTemplate"), None)
        # A router names all engines. The pods of one engine name its first pod.
        looks_up = role is None or cluster.spec.role(role).parallelism.nodes > 1
        policy = spec.get("dnsPolicy") or "ClusterFirst"
        by_node = policy == "Default" or (
            policy == "ClusterFirst" and spec.get("hostNetwork") is True
        )
        named = pod_templates.as_mapping(spec.get("dnsConfig")).get("nameservers")
        if looks_up and by_node and not named:
            yield FieldError(
                f"{path}.spec.{'dnsPolicy' if spec.get('dnsPolicy') else 'hostNetwork'}",
                policy if spec.get("dnsPolicy") else "true",
                Rule.CONFLICTING_SETTINGS,
                f"has these {ours}s ask the node's DNS, which does not know the names of pods",
                "Write dnsPolicy: ClusterFirstWithHostNet.",
            )
        metadata = pod_templates.as_mapping(pod_templates.as_mapping(template).get("metadata"))
        networks = pod_templates.as_mapping(metadata.get("annotations")).get(MULTUS)
        if role and rdma is not None and rdma.networks and networks is not None:
            yield FieldError(
                f"{path}.metadata.annotations.{MULTUS}",
                shown(networks),
                Rule.CONFLICTING_SETTINGS,
                "replaces the networks of spec.transfer.rdma.networks, which RDMA needs",
                "Write all networks into one of them.",
                ("spec.transfer.rdma.networks",),
            )


def router_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield fields that do nothing with this type of router."""
    router, untouched = cluster.spec.router, Router()
    for field in fields(Router):
        owner = RouterType.LLMD if field.name in OF_LLMD else RouterType.VLLM_ROUTER
        value = getattr(router, field.name)
        if field.name in OF_EVERY_TYPE or owner is router.type:
            continue
        # `replicas: 0` says with every type that no pod of vllm-router is wanted.
        if value == getattr(untouched, field.name) or (field.name == "replicas" and not value):
            continue
        yield FieldError(
            f"spec.router.{camel(field.name)}",
            shown(as_manifest(value)),
            Rule.ROUTER_FIELD_UNUSED,
            f"does nothing with spec.router.type {router.type.value}: it is of {owner.value}",
            f"Remove it, or set spec.router.type to {owner.value}.",
            ("spec.router.type",),
        )


def service_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield fields that do nothing with the Service's type, and ranges that are none."""
    service, here = cluster.spec.router.service, "spec.router.service"
    if service is None:
        return
    for name, kinds in router_types.SERVICE_FIELDS.items():
        if (value := getattr(service, name)) and service.type not in kinds:
            yield FieldError(
                f"{here}.{camel(name)}",
                shown(as_manifest(value)),
                Rule.ROUTER_FIELD_UNUSED,
                f"does nothing with {here}.type {service.type.value}",
                f"Remove it, or set {here}.type to {' or '.join(sorted(kinds))}.",
                (f"{here}.type",),
            )
    for place, cidr in enumerate(service.load_balancer_source_ranges):
        if _network(cidr) is None:
            yield _no_cidr(f"{here}.loadBalancerSourceRanges[{place}]", cidr)


def service_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield a router that everybody outside of the cluster may use, or nobody outside."""
    router = cluster.spec.router
    service, here = router.service, "spec.router.service"
    if service is None or service.type is router_types.ServiceType.CLUSTER_IP or not router.pods:
        return
    if router.allow_from and not any(peer.ip_block for peer in router.allow_from):
        yield FieldError(
            f"{here}.type",
            service.type.value,
            Rule.ROUTER_FIELD_UNUSED,
            "no client outside of the cluster gets in: spec.router.allowFrom names only pods",
            "Add an ipBlock to allowFrom, with the addresses that docs/routers.md names.",
            ("spec.router.allowFrom", here),
        )
    peers = [peer.ip_block.cidr if peer.ip_block else "" for peer in router.allow_from or ()]
    limits = peers, service.load_balancer_source_ranges  # none with a range of all addresses
    limited = any(one and all(c.rstrip("0")[-1:] != "/" for c in one) for one in limits)
    if router.api_key_secret_ref or limited:
        return
    yield FieldError(
        f"{here}.type",
        service.type.value,
        Rule.ROUTER_EXPOSED,
        "everybody who reaches this Service from outside may send prompts, without a key",
        "Name a Secret in spec.router.apiKeySecretRef.",
        ("spec.router.apiKeySecretRef", "spec.router.allowFrom", here),
    )


def sidecar_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield a sidecar that everybody may tell where to send prompts."""
    router = cluster.spec.router
    if router.type is RouterType.LLMD and router.allow_from is None:
        yield FieldError(
            "spec.router.allowFrom",
            "",
            Rule.SIDECAR_OPEN,
            "everybody may reach the sidecars, which send prompts to the address in a header",
            "Name the pods of llm-d's gateway and endpoint picker.",
        )


def backend_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield two different backends: NIXL would take one of them for each transfer."""
    backends = list(dict.fromkeys(cluster.spec.transfer.backends))
    if len(backends) > 1:
        yield FieldError(
            "spec.transfer.backends",
            ", ".join(backends),
            Rule.CONFLICTING_SETTINGS,
            "names two backends, and NIXL would choose between them for each transfer",
            f"Write one of them: backends: [{backends[0]}].",
        )


def device_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield GPUs where engines run on CPUs, or in the place of RDMA devices."""
    rdma, rule = cluster.spec.transfer.rdma, Rule.CONFLICTING_SETTINGS
    if rdma is not None and resources.is_accelerator(rdma.resource):
        message = "is a resource of accelerators, and not of RDMA devices"
        remedy = "Name the resource of your RDMA device plugin, e.g. rdma/ib."
        where = "spec.transfer.rdma.resource"
        yield FieldError(where, rdma.resource, rule, message, remedy)
    for role in Role if cluster.spec.transfer.device is types.Device.CPU else ():
        given = resources.device_limits(cluster, role)
        for name in filter(resources.is_accelerator, given):
            if str(given[name]) not in ("0", "None"):
                why = f"is for engines that run on CPUs, and the {role} engines have {name}"
                remedy = f"Remove {name}, or spec.transfer.device for GPUs of NVIDIA or AMD."
                yield FieldError("spec.transfer.device", "CPU", rule, why, remedy)


def rdma_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield a warning if engines span machines without RDMA: their KV goes over TCP."""
    transfer = cluster.spec.transfer
    if transfer.rdma is not None:
        return
    for role in Role:
        spec = cluster.spec.role(role)
        known = resources.gpu_transports(cluster, role) and not _may_have_rdma(cluster, role)
        if spec.parallelism.nodes > 1 and known:
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


HOSTNAME = "kubernetes.io/hostname"


def nvlink_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield a warning if both roles are put on one node, but their GPUs cannot share NVLink.

    UCX's cuda_ipc refuses a peer of another PID namespace (cuda_ipc_iface.c).
    """
    specs = [pod_templates.pod_spec(cluster.spec.role(role).pod_template) for role in Role]
    reached = cluster.spec.transfer.rdma is not None or any(
        _may_have_rdma(cluster, role) or resources.gpu_transports(cluster, role) != {"cuda"}
        for role in Role
    )
    chosen = types.Backend.UCX not in cluster.spec.transfer.backends or any(
        var.name == "UCX_TLS" for _, one in engine_places(cluster) for var in one.env
    )
    shared = all(spec.get("hostPID") is True for spec in specs)
    field = "" if reached or chosen or shared else _put_together(*specs)
    if field:
        yield FieldError(
            f"spec.decode.podTemplate.spec.{field}",
            "",
            Rule.NO_RDMA,
            "puts both roles on one node, but UCX shares NVLink only within one PID namespace: KV "
            "goes over TCP, 0.55 GB/s instead of 99 on one H100",
            "Name an RDMA resource in spec.transfer.rdma, or set hostPID as docs/operations.md "
            "says. For TCP, set UCX_TLS=tcp,cuda_copy.",
            ("spec.transfer.rdma", "spec.prefill.podTemplate", "spec.transfer.device"),
        )


def _put_together(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> str:
    """Return the field of decode that names prefill's node or its pods; empty without one."""
    mapping = pod_templates.as_mapping
    if prefill.get("nodeName") and prefill["nodeName"] == decode.get("nodeName"):
        return "nodeName"
    ours, theirs = (mapping(one.get("nodeSelector")).get(HOSTNAME) for one in (prefill, decode))
    if ours and ours == theirs:
        return "nodeSelector"
    wanted = mapping(mapping(decode.get("affinity")).get("podAffinity"))
    for term in pod_templates.as_list(wanted.get("requiredDuringSchedulingIgnoredDuringExecution")):
        labels = mapping(mapping(mapping(term).get("labelSelector")).get("matchLabels"))
        beside = labels.get(ROLE_LABEL) == Role.PREFILL.value
        if beside and mapping(term).get("topologyKey") == HOSTNAME:
            return "affinity.podAffinity"
    return ""


def _may_have_rdma(cluster: types.Cluster, role: Role) -> bool:
    """Whether a role's engines may have RDMA devices that ``spec.transfer.rdma`` does not name.

    A claim may be for NICs, and a privileged container sees all devices of its node.
    """
    limits = resources.device_limits(cluster, role)
    security = pod_templates.engine_container(cluster, role)[1].get("securityContext")
    return (
        any("/" in name and not resources.is_accelerator(name) for name in limits)
        or bool(resources.claims(cluster, role))
        or pod_templates.as_mapping(security).get("privileged") is True
    )


Variable = tuple[str, str, str | None]
"""Path of its entry, name, and value; None if a Secret or the like has the value."""


def transport_findings(
    variables: Iterable[Variable], gpus: Collection[str]
) -> Iterator[tuple[bool, FieldError]]:
    """Yield (whether engines certainly do not start, the finding) for each UCX_TLS without GPUs.

    UCX compares the names as they are written, blanks too, and takes ``all`` only if it stands
    alone. Of the transports that its names ``cuda``, ``rocm`` and ``ze`` stand for, only the one
    that ends with ``_copy`` finds out that an address is GPU memory (ucp_tl_aliases in
    ucp_context.c; detect_mem_types). NIXL 1.5 ends the engine if there are NVIDIA GPUs and no such
    transport.

    Args:
        gpus: whose transports may be needed, as ``gpu_transports`` returns them.
    """
    for path, name, value in variables:
        if name != "UCX_TLS" or value is None or "$(" in value or not gpus:
            continue
        denied, names = value.startswith("^"), value.removeprefix("^").split(",")
        listed = {gpu for gpu in gpus if {gpu, f"{gpu}_copy", f"\\{gpu}_copy"} & {*names}}
        if value == "all" or (listed != {*gpus} if denied else listed):
            continue
        ways = " or ".join(f"{gpu}_copy" for gpu in sorted(gpus))
        certain = {*gpus} == {"cuda"}
        ends = ", and NIXL ends the engine at its start" if certain else ""
        yield (
            certain,
            FieldError(
                f"{path}.value",
                shown(value),
                Rule.TRANSPORT_WITHOUT_CUDA,
                f"without {ways} UCX takes GPU memory for host memory{ends}",
                "Remove UCX_TLS: UCX then chooses the fastest transport that works."
                + ("" if denied else f" Or add {ways} to it, without blanks."),
                ("spec.transfer.device", "spec.transfer.backends"),
            ),
        )


NIC_VARIABLES = ("VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_NIC_SELECTION_VARS")
"""vLLM gives each rank the NIC of its GPU with both (v1/executor/vllm_net_devices.py)."""


def nic_findings(variables: Iterable[Variable]) -> Iterator[tuple[bool, FieldError]]:
    """Yield (whether engines certainly do not start, the finding) about the NICs of one role.

    vLLM refuses one of ``NIC_VARIABLES`` alone. It writes a rank's NIC before what a variable that
    the second one names has already, so that the rank uses those NICs, too.
    """
    given = {name: (path, value or "") for path, name, value in variables if value != ""}
    alone = [name for name in NIC_VARIABLES if name in given]
    if len(alone) == 1:
        [other] = {*NIC_VARIABLES} - {*alone}
        yield (
            True,
            FieldError(
                f"{given[alone[0]][0]}.name",
                alone[0],
                Rule.CONFLICTING_SETTINGS,
                f"vLLM ends at its start with {alone[0]} and without {other}",
                f"Add {other}, or remove {alone[0]}.",
            ),
        )
    for word in given[NIC_VARIABLES[1]][1].split(",") if len(alone) == len(NIC_VARIABLES) else ():
        name = word.partition(":")[0].strip()
        if name in given:
            yield (
                False,
                FieldError(
                    f"{given[name][0]}.value",
                    shown(given[name][1]),
                    Rule.CONFLICTING_SETTINGS,
                    f"each rank uses these NICs beside that of {NIC_VARIABLES[0]}",
                    f"Remove {name}: vLLM sets it for each rank.",
                ),
            )
