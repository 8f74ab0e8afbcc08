"""Rules of images and weights: versions, moving tags and branches, differences between roles.

Whoever may mount a folder of a node can read it, so an operator may forbid hostPath.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.supported import ANY_VERSION, SUPPORTED, supported, text_of
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules import model as models
from pdcluster_operator.api.rules.variables import any_version, variables
from pdcluster_operator.api.rules.whole_pods import REPLACEABLE, WEIGHTS
from pdcluster_operator.api.spec import engine_types, pod_templates, resolve, router_types, types
from pdcluster_operator.api.spec.types import Cluster, Role

# Tags that name another image tomorrow.
MOVING_TAGS = frozenset({"latest", "nightly", "main", "master", "edge", "dev", "stable"})
# vLLM's own images, also in a mirror: their tags are vLLM's releases.
RELEASED = re.compile(r"(.*/)?vllm/vllm-openai(-[a-z0-9]+)*")
OTHERS = re.compile("sglang|/nim/|text-generation-inference|tensorrt|triton|lmdeploy|ollama")
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})(\.\d.*|[^.\d].*)?")


@dataclass(frozen=True, slots=True)
class Image:
    """An image reference in its parts.

    Attributes:
        repository: with its registry, without tag and digest.
        tag: ``latest`` where neither a tag nor a digest is written; empty beside a digest alone.
        digest: what pins the image for good; empty without.
    """

    repository: str
    tag: str
    digest: str

    @property
    def release(self) -> tuple[int, int] | None:
        """The release (major, minor) in the tag; None if the tag is no release."""
        match = _RELEASE.fullmatch(self.tag)
        return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an engine's image is named. With ``strict`` a version out of the range is refused."""

    path: str
    reference: str
    strict: bool


def parse_image(reference: str) -> Image:
    """Take an image reference apart: ``registry:5000/vllm/vllm-openai:v0.32.0@sha256:…``."""
    name, _, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    base, _, tag = last.partition(":")
    return Image(folder + slash + base, tag or ("" if digest else "latest"), digest)


# github.com/distribution/reference v0.6.0, regexp.go, with the digests of go-digest v1.0.0.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_DOMAIN = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_DIGEST = r"sha(?:256:[a-f0-9]{64}|384:[a-f0-9]{96}|512:[a-f0-9]{128})"
REFERENCE = re.compile(
    rf"(?![a-f0-9]{{64}}$)((?:{_DOMAIN}/)?{_PART}(?:/{_PART})*)(?::\w[\w.-]{{0,127}})?(?:@{_DIGEST})?",
    re.ASCII,
)
LONGEST_NAME = 255
LONGEST_REFERENCE = LONGEST_NAME + 1 + 128 + 1 + len("sha512:") + 128


def reference_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield images that no node could pull, because they are no image references."""
    for path, text in _references(cluster):
        if not text or not isinstance(text, str):
            continue
        match = REFERENCE.fullmatch(text) if len(text) <= LONGEST_REFERENCE else None
        if match is None or len(match[1]) > LONGEST_NAME:
            scheme, slashes, _ = text.rpartition("://")
            yield FieldError(
                path,
                shown(text),
                Rule.BAD_FORMAT,
                "is not the name of an image: [registry/]name[:tag][@sha256:digest], the name in "
                "lower case, without a scheme such as https://",
                f"Leave out {shown(scheme + slashes)}."
                if slashes
                else "Write for example registry.example/team/vllm:v0.32.0.",
            )


def _references(cluster: types.Cluster) -> Iterator[tuple[str, object]]:
    """Yield (path, image) of every image; the image is empty or no text where none is given."""
    for path, engine in resolve.engine_places(cluster):
        yield f"{path}.image", engine.image
    yield "spec.router.image", cluster.spec.router.image
    yield "spec.router.sidecarImage", cluster.spec.router.sidecar_image
    if (oci := cluster.spec.model.source.oci) is not None:
        yield "spec.model.source.oci.image", oci.image
    for path, template, _ in pod_templates.pod_templates(cluster):
        for place, entry in pod_templates.containers(template):
            yield f"{path}.{place}.image", entry.get("image")
        for place, volume in pod_templates.mappings(template, "volumes"):
            image = pod_templates.as_mapping(volume.get("image"))
            yield f"{path}.{place}.image.reference", image.get("reference")


def image_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield images of the vLLM project with a release that this connector does not support."""
    for place in dict.fromkeys(_place(cluster, role) for role in Role):
        if place.strict and RELEASED.fullmatch(parse_image(place.reference).repository):
            yield from _version(place)


def image_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield images that may hold another vLLM than is meant, or differ between the roles."""
    places = {role: _place(cluster, role) for role in Role}
    for place in dict.fromkeys(places.values()):
        image = parse_image(place.reference)
        vllm = "vllm" in image.repository.rpartition("/")[2]
        if vllm and not (place.strict and RELEASED.fullmatch(image.repository)):
            yield from _version(place)
        yield from _moving(place.path, place.reference)
        if OTHERS.search(place.reference) and "vllm" not in place.reference:
            why = "holds another server by its name, and engines need vLLM with NIXL"
            remedy = "Use an image of vLLM, such as docker.io/vllm/vllm-openai:v0.32.0."
            yield FieldError(place.path, place.reference, Reason.VERSION_UNSUPPORTED, why, remedy)
    router = cluster.spec.router
    # The default tag moves too, because no release of the router is published (docs/images.md). A
    # warning about our own default would appear for every manifest.
    if router.pods and router.image != router_types.Router().image:
        yield from _moving("spec.router.image", router.image)
    if router.type is router_types.RouterType.LLMD:
        yield from _moving("spec.router.sidecarImage", router.sidecar_image)
    prefill, decode = places[Role.PREFILL], places[Role.DECODE]
    if prefill.reference != decode.reference:
        own, other = (prefill, decode) if decode.path == "spec.engine.image" else (decode, prefill)
        yield FieldError(
            own.path,
            shown(f"prefill {prefill.reference}, decode {decode.reference}"),
            Rule.IMAGES_DIFFER,
            "another version of vLLM may order the bytes of its KV cache differently",
            "Use one image for both roles, in spec.engine.image.",
            (other.path,),
        )


def _place(cluster: types.Cluster, role: Role) -> _Place:
    """Return where a role's image is named. A pod template wins."""
    engine = resolve.resolve_engine(cluster, role)
    strict = not any_version(cluster, role)
    path, overlay = pod_templates.engine_container(cluster, role)
    image = overlay.get("image")
    if isinstance(image, str) and image:
        return _Place(f"{path}.image", image, strict)
    own = cluster.spec.role(role).engine.image
    return _Place(f"spec.{role}.engine.image" if own else "spec.engine.image", engine.image, strict)


def releases(cluster: types.Cluster) -> dict[Role, str]:
    """Return the release in the tag of each role's vLLM image, as ``0.32``; empty for others."""
    images = {role: parse_image(_place(cluster, role).reference) for role in Role}
    return {
        role: text_of(image.release)
        if image.release and RELEASED.fullmatch(image.repository)
        else ""
        for role, image in images.items()
    }


def _version(place: _Place) -> Iterator[FieldError]:
    image = parse_image(place.reference)
    release = image.release
    if release is None or supported("vllm", release):
        return
    if release[0] and not RELEASED.fullmatch(image.repository):
        return  # a numbering of somebody else: vLLM's own begins with 0
    low, high = map(text_of, SUPPORTED["vllm"])
    known = (
        "its tag says" if RELEASED.fullmatch(image.repository) else "if its tag is vLLM's, it is"
    )
    yield FieldError(
        place.path,
        shown(place.reference),
        Reason.VERSION_UNSUPPORTED,
        f"{known} vLLM {text_of(release)}; this connector works with vLLM >= {low}, < {high}",
        f"Use such an image, or try it with {ANY_VERSION}=1 in engine.env."
        if place.strict
        else f"Use such an image, and remove {ANY_VERSION}.",
    )


def _moving(path: str, reference: str) -> Iterator[FieldError]:
    image = parse_image(reference)
    if image.tag in MOVING_TAGS and not image.digest:
        example = "a release" if path.startswith("spec.router.") else "a release, such as v0.32.0,"
        yield FieldError(
            path,
            shown(reference),
            Rule.IMAGE_NOT_PINNED,
            f"the tag {image.tag} moves: pods on different nodes may run different images",
            f"Name {example} or a digest.",
        )


# Branches that Hugging Face repositories are kept on.
BRANCHES = frozenset({"main", "master"})


STREAMED = frozenset({"auto", "runai_streamer", "runai_streamer_sharded", "modelexpress"})
"""Values of --load-format with which vLLM reads object storage (vLLM 0.32 config/vllm.py)."""


def weight_errors(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield settings that do not fit where the weights come from."""
    model = cluster.spec.model
    if model.source.hugging_face and model.cache.downloaded_by is engine_types.Downloader.JOB:
        yield from dict.fromkeys(models.download_errors(cluster))
    storage = model.source.object_storage
    if storage is None:
        return
    path = "spec.model.source.objectStorage"
    if storage.endpoint is not None and storage.uri.startswith("gs://"):
        yield FieldError(
            f"{path}.endpoint",
            shown(storage.endpoint),
            Rule.CONFLICTING_SETTINGS,
            f"is for stores that speak S3, but {path}.uri is {shown(storage.uri)}",
            "Remove it, or write an s3:// uri.",
            (f"{path}.uri",),
        )
    for role in Role:
        flag = resolve.resolve_engine(cluster, role).last("--load-format")
        if flag is not None and flag.value not in STREAMED:
            yield FieldError(
                resolve.flag_path(cluster, role, flag.name),
                shown(" ".join(flag.words)),
                Rule.CONFLICTING_SETTINGS,
                f"reads no object storage, where {path}.uri says that the weights are",
                "Remove it: vLLM then takes runai_streamer.",
                (f"{path}.uri",),
            )


def weight_warnings(cluster: types.Cluster) -> Iterator[FieldError]:
    """Yield weights that may change between two starts, and a cache that is not used."""
    model = cluster.spec.model
    if model.source.oci is not None:
        image = parse_image(model.source.oci.image)
        if image.tag in MOVING_TAGS and not image.digest:
            yield FieldError(
                "spec.model.source.oci.image",
                shown(model.source.oci.image),
                Rule.WEIGHTS_NOT_PINNED,
                f"the tag {image.tag} moves: an engine that starts later may load other weights, "
                "and is then refused by its peers",
                "Name a digest, or a tag that stays.",
            )
    if model.source.hugging_face is not None:
        yield from _not_pinned(cluster, model.source.hugging_face.revision)
        for role in Role:
            yield from _unused_caches(cluster, role)
    elif model.cache != engine_types.ModelCache():
        yield FieldError(
            "spec.model.cache",
            "",
            Rule.CACHE_UNUSED,
            "is ignored: only weights of source.huggingFace are downloaded",
            "Remove it.",
            ("spec.model.source",),
        )


def _unused_caches(cluster: types.Cluster, role: Role) -> Iterator[FieldError]:
    """Yield mounts of the image's own cache folder, from which nothing is read."""
    words = [one.value or "" for one in variables(cluster) if role in one.roles]
    words += resolve.resolve_engine(cluster, role).extra_args
    path, box = pod_templates.engine_container(cluster, role)
    for place, mount in enumerate(pod_templates.as_list(box.get("volumeMounts"))):
        folder = str(pod_templates.as_mapping(mount).get("mountPath")).rstrip("/")
        if "/.cache/huggingface/" in f"{folder}/" and not any(folder in word for word in words):
            yield FieldError(
                f"{path}.volumeMounts[{place}].mountPath",
                folder,
                Rule.CACHE_UNUSED,
                f"is not used: weights are downloaded to {resolve.CACHE_FOLDER}",
                "Name the claim in spec.model.cache, or the folder in the variable HF_HUB_CACHE.",
                ("spec.model.source",),
            )


def _not_pinned(cluster: types.Cluster, revision: str | None) -> Iterator[FieldError]:
    for role in Role:
        flag = resolve.resolve_engine(cluster, role).last("--revision")
        named = flag.value if flag is not None else revision
        if named is None or named in BRANCHES:
            yield FieldError(
                "spec.model.source.huggingFace.revision",
                named or "",
                Rule.WEIGHTS_NOT_PINNED,
                "a branch moves: an engine that starts later may load other weights, and is "
                "then refused by its peers",
                "Name a commit, or a tag that stays.",
                ("spec.model.source",),
            )
            return


HOST_PATH_REMEDY = (
    "Use a persistentVolumeClaim, or let the operator admit folders of the nodes "
    "(--allow-host-path, the chart's operator.allowHostPathPrefixes)."
)


def host_path_errors(cluster: Cluster, admitted: Collection[str] = ()) -> Iterator[FieldError]:
    """Yield every place where a spec mounts a folder of the node that is not admitted.

    Args:
        admitted: folders whose contents may be mounted, too. They may only be read: in a folder
            that a pod may write, it can make a link to any other folder of the node.
    """
    source = cluster.spec.model.source.host_path
    if source is not None and not is_below(source.path, admitted):
        yield _host_path("spec.model.source.hostPath.path", source.path, admitted)
    for path, template, ours in pod_templates.pod_templates(cluster):
        engine = ours == pod_templates.ENGINE_CONTAINER
        read = {WEIGHTS} if engine and source is not None else set()
        for place, volume in pod_templates.mappings(template, "volumes"):
            given, name = volume.get("hostPath"), str(volume.get("name"))
            read.discard(name)  # it replaces the operator's
            if given is None:
                continue
            if not is_below(pod_templates.as_mapping(given).get("path"), admitted):
                yield _host_path(f"{path}.{place}.hostPath", given, admitted)
            elif engine and name in REPLACEABLE:
                message = "is a volume that the engine writes to, and it could make links there"
                yield _writable(f"{path}.{place}.name", name, message, "Choose another name.")
            else:
                read.add(name)
        for place, container in pod_templates.containers(template):
            for number, mount in enumerate(pod_templates.as_list(container.get("volumeMounts"))):
                given = pod_templates.as_mapping(mount)
                folder, own = given.get("mountPath"), engine and container.get("name") == ours
                own = own and folder == resolve.MODEL_FOLDER
                name = str(given.get("name") or (WEIGHTS if own else ""))
                # Laid over the operator's own mount, a mount of the same volume stays read-only.
                if name in read and given.get("readOnly", own and name == WEIGHTS) is not True:
                    message = "is not true, and a pod could make links to other folders of the node"
                    where = f"{path}.{place}.volumeMounts[{number}].readOnly"
                    value = shown(given.get("readOnly"))
                    yield _writable(where, value, message, "Write readOnly: true.")


def _writable(path: str, value: str, message: str, remedy: str) -> FieldError:
    return FieldError(path, value, Rule.HOST_PATH_NOT_ADMITTED, message, remedy)


def _host_path(path: str, value: object, admitted: Collection[str]) -> FieldError:
    message = "mounts a folder of the node, which this operator does not admit"
    device = str(pod_templates.as_mapping(value).get("path", "")).startswith("/dev/")
    ask = "Ask for the device by a resource, as spec.transfer.rdma does."
    below = f"Use a folder in {' or '.join(list(admitted)[:10])}. Or: " if admitted else ""
    remedy = ask if device else f"{below}{HOST_PATH_REMEDY}"
    return FieldError(path, shown(value), Rule.HOST_PATH_NOT_ADMITTED, message, remedy)


def node_local_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield a warning about a model in a folder, which every node must have."""
    if cluster.spec.model.source.host_path is not None:
        yield FieldError(
            "spec.model.source.hostPath.path",
            cluster.spec.model.source.host_path.path,
            Rule.NODE_LOCAL_MODEL,
            "the folder must exist on every node that an engine may run on",
            "Use a persistentVolumeClaim on a cluster of several nodes.",
        )


def is_below(path: object, folders: Iterable[str]) -> bool:
    """Whether a path is one of the folders or leads into it, by whole names and without ``..``."""
    names = _names(path)
    above = (_names(folder) for folder in folders)
    return names is not None and any(one is not None and names[: len(one)] == one for one in above)


def _names(path: object) -> list[str] | None:
    """Return the names in an absolute path; None for any other."""
    if not isinstance(path, str) or not path.startswith("/"):
        return None
    names = [name for name in path.split("/") if name not in ("", ".")]
    return None if ".." in names else names
