"""Rules of environment variables.

They are judged alike in engine.env and in pod templates. What containers of the user's own have is
theirs. Refused are those that the operator sets itself, and those with which vLLM does not start.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.supported import ANY_VERSION
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules import network
from pdcluster_operator.api.rules.pod_template import env_source_errors
from pdcluster_operator.api.spec import engine_types, pod_templates
from pdcluster_operator.api.spec.pod_templates import (
    ENGINE_CONTAINER,
    ROUTER_CONTAINER,
    as_list,
    as_mapping,
    engine_container,
    pod_spec,
)
from pdcluster_operator.api.spec.resolve import (
    downloads_by_job,
    engine_places,
    resolve_engine,
    workers_per_pod,
)
from pdcluster_operator.api.spec.resources import gpu_transports, parse_quantity
from pdcluster_operator.api.spec.types import Cluster, Device, Role

OWNED_PREFIX = "PDCLUSTER_"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a user gives the operator's containers.

    Attributes:
        path: of its entry in the spec.
        value: None if a Secret or the like has it.
        container: that has it: the engines' or the routers'.
        roles: whose engines have this value. A role's own wins, and a template's in any case.
    """

    path: str
    name: str
    value: str | None
    container: str
    roles: tuple[Role, ...]


def variables(cluster: Cluster) -> tuple[Variable, ...]:
    """Return the variables of all engine settings and of our containers in pod templates."""
    given = [
        Variable(f"{path}.env[{place}]", var.name, var.value, ENGINE_CONTAINER, _roles(path))
        for path, engine in engine_places(cluster)
        for place, var in enumerate(engine.env)
    ]
    for path, template, ours in pod_templates.pod_templates(cluster):
        for where, box in pod_templates.containers(template):
            if box.get("name") != ours or not where.startswith("spec.containers"):
                continue
            entries = map(pod_templates.as_mapping, pod_templates.as_list(box.get("env")))
            for place, entry in enumerate(entries):
                name, value = entry.get("name"), entry.get("value")
                if isinstance(name, str):
                    text = value if isinstance(value, str) else None
                    # Without a source, too, Kubernetes sets it to an empty text.
                    text = "" if value is None and not entry.get("valueFrom") else text
                    here = f"{path}.{where}.env[{place}]"
                    given.append(Variable(here, name, text, ours, _roles(path)))
    last = {(role, one.name): one for one in given for role in one.roles}
    return tuple(
        replace(one, roles=tuple(role for role in one.roles if last[role, one.name] is one))
        for one in given
    )


def _roles(path: str) -> tuple[Role, ...]:
    part = path.split(".")[1]
    return tuple(Role) if part == "engine" else tuple(role for role in Role if role == part)


def any_version(cluster: Cluster, role: Role) -> bool:
    """Whether a role's engines may try any version of vLLM."""
    named = (one for one in variables(cluster) if one.name == ANY_VERSION)
    return any(role in one.roles and one.value == "1" for one in named)


def variable_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables that are not allowed, or with which vLLM does not start."""
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            if (var.value is None) == (var.value_from is None):
                yield FieldError(
                    f"{path}.env[{place}]",
                    var.name,
                    Rule.EXACTLY_ONE,
                    "needs exactly one of value and valueFrom",
                    "Give one of them.",
                )
            yield from env_source_errors(f"{path}.env[{place}].valueFrom", var.value_from)
    ours = _owned_variables(cluster)
    on_gpus = cluster.spec.transfer.device is Device.CUDA
    for one in variables(cluster):
        # With ANY_VERSION a user lets the launcher start an unsupported version.
        prefixed = one.name.startswith(OWNED_PREFIX) and one.name != ANY_VERSION
        if prefixed or one.name in ours[one.container]:
            yield _owned_variable(one)
        value = (one.value or "").lower().replace(" ", "")
        if on_gpus and one.name.startswith("PYTORCH_") and "expandable_segments:true" in value:
            yield FieldError(
                f"{one.path}.value",
                shown(one.value),
                Rule.EXPANDABLE_SEGMENTS,
                "vLLM refuses expandable segments together with any KV connector",
                "Remove expandable_segments.",
                ("spec.transfer.device",),
            )


DEVICES = re.compile("(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES")
OFFLINE = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})
TOKEN_NAMES = frozenset({
    "HUGGINGFACE_TOKEN", "HUGGING_FACE_TOKEN", "HF_API_TOKEN", "HF_HUB_TOKEN",
    "HUGGINGFACEHUB_API_TOKEN", "HUGGINGFACE_HUB_TOKEN",
})  # fmt: skip
"""Names of variables that others read, and the Hub's library does not."""
SYSTEM = re.compile("/|/(usr(/local)?/)?(bin|sbin|lib|lib64)|/usr|/usr/local|/etc|/opt")
QUEUE_BYTES = 240 << 20  # of vLLM's queue in one engine (multiproc_executor: ten of 24 MiB)
IMAGE_HOME = "/root"  # in vLLM's image
IMAGE_CACHE = f"{IMAGE_HOME}/.cache"
IMAGE_USER = 2000  # of vLLM's image, with a home of its own (vLLM #40275)
OWN_IMAGE = re.compile(r"(.*/)?vllm/vllm-openai[:@].*")


def user_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield users and folders with which vLLM does not start: it writes to /tmp and to a cache."""
    for role in Role:
        engine, (path, box) = resolve_engine(cluster, role), engine_container(cluster, role)
        pod = as_mapping(pod_spec(cluster.spec.role(role).pod_template).get("securityContext"))
        own = as_mapping(box.get("securityContext"))
        needed = _written(cluster, role, box)
        mounted = map(as_mapping, as_list(box.get("volumeMounts")))
        mounts = {str(one.get("mountPath")).rstrip("/") for one in mounted}
        homes = re.compile(f"{IMAGE_HOME}|/home(/.*)?|.*/[.]cache.*")
        cached = IMAGE_CACHE not in needed or any(map(homes.fullmatch, mounts))
        held = mounts | ({IMAGE_CACHE} if cached else set())
        missing = [one for one in needed if one not in held]
        if own.get("readOnlyRootFilesystem") is True and missing:
            where = f"{path}.securityContext.readOnlyRootFilesystem"
            why = f"leaves vLLM no place to write at {' and '.join(missing)}"
            remedy = "Mount an emptyDir at /tmp and /root, or name folders in TMPDIR and HOME."
            yield _conflict(where, "true", why, remedy)
        if not OWN_IMAGE.fullmatch(str(box.get("image") or engine.image)):
            continue  # its user is not known
        user = own.get("runAsUser", pod.get("runAsUser"))
        for given, at in ((own, path), (pod, f"spec.{role}.podTemplate.spec")):
            where = f"{at}.securityContext"
            if given.get("runAsNonRoot") is True is own.get("runAsNonRoot", True) and user is None:
                why = "stops vLLM's image, whose user is root, unless OpenShift names another one"
                remedy = f"Write runAsUser: {IMAGE_USER} and runAsGroup: 0, which it knows."
                yield _conflict(f"{where}.runAsNonRoot", "true", why, remedy)
            number = given.get("runAsUser")
            if number == user and number not in (None, 0, IMAGE_USER) and not cached:
                why = "has / for HOME if the image does not know it, and no cache can be written"
                remedy = "Set HOME in spec.engine.env to a folder that this user may write to."
                yield _conflict(f"{where}.runAsUser", str(user), why, remedy)


def _written(cluster: Cluster, role: Role, box: Mapping[str, object]) -> list[str]:
    """Return the image's folders that vLLM writes to. Variables, also of envFrom, name others."""
    names = {one.name for one in variables(cluster) if role in one.roles}
    at = {"TMPDIR": "/tmp", "HOME": IMAGE_CACHE}  # noqa: S108
    return [] if box.get("envFrom") else [at[name] for name in at if name not in names]


def mount_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield mounts and volumes with which an engine does not start."""
    for role in Role:
        path, box = engine_container(cluster, role)
        needed = _written(cluster, role, box)
        for place, given in enumerate(as_list(box.get("volumeMounts"))):
            mount, where = as_mapping(given), f"{path}.volumeMounts[{place}]"
            folder = str(mount.get("mountPath")).rstrip("/") or "/"
            if SYSTEM.fullmatch(folder) and "subPath" not in mount:
                why = "hides what the image has in this folder, such as Python"
                remedy = "Mount it at a folder of its own."
                yield _conflict(f"{where}.mountPath", folder, why, remedy)
            elif mount.get("readOnly") and any(f"{n}/".startswith(f"{folder}/") for n in needed):
                why = f"leaves vLLM no place to write at {folder}"
                yield _conflict(f"{where}.readOnly", "true", why, "Mount it at another folder.")
        here = f"spec.{role}.podTemplate.spec"
        pod = pod_spec(cluster.spec.role(role).pod_template)
        if pod.get("setHostnameAsFQDN") is True:
            why = "is for names of 64 letters with their domain; the kubelet starts no longer ones"
            yield _conflict(f"{here}.setHostnameAsFQDN", "true", why, "Remove it.")
        for place, volume in enumerate(as_list(pod.get("volumes"))):
            given = as_mapping(as_mapping(volume).get("emptyDir")).get("sizeLimit")
            size = parse_quantity(str(given)) if as_mapping(volume).get("name") == "shm" else None
            parallel = resolve_engine(cluster, role).parallelism
            several = parallel.tensor * parallel.pipeline > 1
            if several and size is not None and size < QUEUE_BYTES:
                why = "is too small for /dev/shm: vLLM's processes of one engine alone need 240Mi"
                where = f"{here}.volumes[{place}].emptyDir.sizeLimit"
                yield _conflict(where, str(given), why, "Leave it out, or write 1Gi or more.")


def _conflict(path: str, value: str, message: str, remedy: str) -> FieldError:
    return FieldError(path, value, Rule.CONFLICTING_SETTINGS, message, remedy)


def _unseen(cluster: Cluster, one: Variable, names: frozenset[str]) -> Iterator[FieldError]:
    """Yield variables that hide the pod's GPUs, or the Hub without which nothing is found."""
    where, value, model = f"{one.path}.value", (one.value or "").strip(), cluster.spec.model
    on_gpus = (
        DEVICES.fullmatch(one.name)
        and value not in ("", "all")
        and "$(" not in value
        and cluster.spec.transfer.device is Device.CUDA
    )
    needed = [workers_per_pod(resolve_engine(cluster, role)) for role in one.roles if on_gpus]
    if (seen := value.count(",") + (value not in ("none", "void", "-1"))) < max(needed, default=0):
        why = f"leaves {counted(seen, 'GPU')} of the {max(needed)} that an engine's pod needs"
        remedy = f"Remove {one.name}: a pod sees just the GPUs that it has."
        yield FieldError(where, shown(value), Rule.GPU_COUNT_MISMATCH, why, remedy)
    hub = model.source.hugging_face if one.roles else None
    cold = hub and not model.cache.persistent_volume_claim
    known = names & {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    if one.name in TOKEN_NAMES and hub is not None and not (hub.token_secret_ref or known):
        why = "is no name that the Hub's library reads"
        remedy = "Name the Secret in spec.model.source.huggingFace.tokenSecretRef."
        yield _conflict(f"{one.path}.name", one.name, why, remedy)
    pods = [pod_spec(cluster.spec.role(role).pod_template) for role in one.roles]
    held = any(
        as_mapping(v).get("name") == "cache" for p in pods for v in as_list(p.get("volumes"))
    )
    cold = cold and not held and "HF_HUB_CACHE" not in names
    if one.name in OFFLINE and cold and value.lower() in ("1", "on", "yes", "true"):
        why = "keeps engines from downloading weights, and spec.model.cache names no claim of them"
        remedy = f"Remove {one.name}, or name a claim with the weights."
        yield _conflict(where, shown(value), why, remedy)


def _owned_variables(cluster: Cluster) -> dict[str, frozenset[str]]:
    """Return the variables that the operator sets in each of its containers."""
    hub, storage = cluster.spec.model.source.hugging_face, cluster.spec.model.source.object_storage
    weights = {"HF_HOME"} if hub is not None else set()
    if downloads_by_job(cluster):
        weights = {"HF_HUB_CACHE", "HF_HUB_OFFLINE"}
    if hub is not None and hub.token_secret_ref is not None:
        weights.add("HF_TOKEN")
    weights |= set(engine_types.ENDPOINTS if storage is not None else ())
    if storage is not None and storage.credentials_secret_ref is not None:
        weights |= {*engine_types.AMAZON_KEYS, "GOOGLE_APPLICATION_CREDENTIALS"}
    gate = {"PYTHONPATH"} if cluster.spec.router.api_key_secret_ref is not None else set()
    engine = {"POD_IP", "VLLM_HOST_IP", API_KEY_VARIABLE} | weights
    return {
        ENGINE_CONTAINER: frozenset(engine),
        ROUTER_CONTAINER: frozenset({API_KEY_VARIABLE} | gate),
    }


def _owned_variable(variable: Variable) -> FieldError:
    message = f"belongs to the operator, which sets it in every {variable.container}"
    remedy = "Remove it."
    if variable.name == API_KEY_VARIABLE:
        message = "belongs to the operator: the router and the canary must send the key too"
        remedy = "Name the Secret in spec.router.apiKeySecretRef."
    if variable.name in engine_types.ENDPOINTS:
        message = "belongs to the operator: both roles must read the weights from one store"
        remedy = "Name the store in spec.model.source.objectStorage.endpoint."
    where = f"{variable.path}.name"
    return FieldError(where, variable.name, Rule.OWNED_VARIABLE, message, remedy)


def transport_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables about the network with which engines on NVIDIA's GPUs do not start."""
    return (found for certain, found in _transports(cluster) if certain)


def _transports(cluster: Cluster) -> Iterator[tuple[bool, FieldError]]:
    given = variables(cluster)
    of_role = {
        role: [(one.path, one.name, one.value) for one in given if role in one.roles]
        # A ConfigMap or Secret of envFrom may have the other variables.
        for role in Role
        if not pod_templates.engine_container(cluster, role)[1].get("envFrom")
    }
    yield from dict.fromkeys(
        found for role in of_role.values() for found in network.nic_findings(role)
    )
    gpus = {role: gpu_transports(cluster, role) for role in Role}
    for one in given if "UCX" in cluster.spec.transfer.backends else ():
        needed = [gpus[role] for role in one.roles] or [frozenset[str]()]
        variable = (one.path, one.name, one.value)
        yield from network.transport_findings([variable], frozenset.intersection(*needed))


def variable_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables that UCX or vLLM accept, but that harm or have no effect here."""
    yield from (found for certain, found in _transports(cluster) if not certain)
    given = variables(cluster)
    names = frozenset(one.name for one in given)
    for one in given:
        yield from _unseen(cluster, one, names)
        if one.roles and one.name.startswith("VLLM_NIXL_SIDE_CHANNEL_"):
            yield FieldError(
                f"{one.path}.name",
                one.name,
                Rule.CONFLICTING_SETTINGS,
                "belongs to vLLM's stock connector and does nothing here",
                "Remove it.",
            )
