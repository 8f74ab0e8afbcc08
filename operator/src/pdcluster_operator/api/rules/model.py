"""Rules about a model: what a Job may download, and what its ``config.json`` says.

``config.json`` says how engines can split the model, and the longest request. Whoever judges a
manifest reads the ConfigMap of ``spec.model.configMapRef``, and says what was
found. Nothing that is wrong with it refuses a manifest: engines do not read it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape, LayerKind, LayerShape, Memory
from pdcluster_connector.compat.supported import CHOSEN_BLOCK, MOST_BLOCK
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules.variables import variables
from pdcluster_operator.api.spec import model_config as configs, pod_templates
from pdcluster_operator.api.spec.fields import ConfigMapKeyRef
from pdcluster_operator.api.spec.flags import Flag
from pdcluster_operator.api.spec.model_config import FoundConfig, Model
from pdcluster_operator.api.spec.resolve import (
    DRAFT_FLAGS,
    Engine,
    engine_shape,
    flag_path,
    resolve_engine,
    speculation,
)
from pdcluster_operator.api.spec.types import Cluster, KvLayout, Role

REPLACED = ("--model", "--hf-overrides", "--hf-config-path")
"""Flags that give vLLM another config than the one of the model's folder."""
MODELSCOPE = "VLLM_USE_MODELSCOPE"
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
REF = "spec.model.configMapRef"
BLOCK, LARGE, PROMPT = 16, 64, 1000
"""Tokens of a block if no backend is named, of a larger one, and of the prompt counted."""


def model_of(cluster: Cluster, found: FoundConfig) -> tuple[Model | None, tuple[FieldError, ...]]:
    """Return what is known of the cluster's model, and why it is not all.

    Args:
        found: what was found for its config.json.
    """
    ref, engines = cluster.spec.model.config_map_ref, [resolve_engine(cluster, one) for one in Role]
    kv_dtype = engine_shape(cluster, engines[0]).kv_dtype
    if found.config is not None:
        return configs.read_model(found.config, kv_dtype), ()
    if ref is None:
        return None, ()
    config = _text_in(cluster, ref, found)
    if isinstance(config, FieldError):
        return None, (config,)
    try:
        model = configs.read_model(configs.read_text(config), kv_dtype)
    except configs.UnknownModel as error:
        remedy = "Put the config.json of a language model there, as Hugging Face has it."
        return None, (_doubt(ref, error.what, remedy, ".key"),)
    flag = next((one.head for role in engines for one in role.flags if one.head in REPLACED), "")
    why = f"{flag} gives the engines another config" if flag else model.untold
    if not why:
        return model, ()
    remedy = "The engines check its layers when they connect."
    return replace(model, layers=None), (_doubt(ref, why, remedy),)


def _text_in(cluster: Cluster, ref: ConfigMapKeyRef, found: FoundConfig) -> str | FieldError:
    """Return the text of the key in a ConfigMap, or what is wrong with the ConfigMap."""
    file = "config.json" if ref.key == "config.json" else f"{ref.key}=config.json"
    command = f"kubectl create configmap {ref.name} -n {cluster.namespace} --from-file={file}"
    if found.unread:
        message = f"could not be read ({shown(found.unread)})"
        return _doubt(ref, message, "Let the operator and its webhook get ConfigMaps there.")
    if found.config_map is None:
        message = f"there is no such ConfigMap in namespace {cluster.namespace}"
        return _doubt(ref, message, f"Create it: run `{command}`.")
    if ref.key in found.config_map:
        return found.config_map[ref.key]
    there = shown(", ".join(sorted(found.config_map)) or "none")
    message = f"the ConfigMap {ref.name} has no such key of text; it has {there}"
    return _doubt(ref, message, f"Name another key, or run `{command}`.", ".key")


def _doubt(ref: ConfigMapKeyRef, why: str, remedy: str, part: str = ".name") -> FieldError:
    value, message = getattr(ref, part[1:]), f"{why}; the model is not checked as a whole"
    return FieldError(f"{REF}{part}", value, Rule.MODEL_NOT_CHECKED, message, remedy, (REF,))


def moves(cluster: Cluster, model: Model) -> str:
    """Return what of this model moves for a prompt, or why it cannot be told."""
    engine = resolve_engine(cluster, Role.PREFILL)
    if model.layers is None or is_replaced(engine):
        why = "" if is_replaced(engine) else f": {model.untold}"
        return f"The model's config.json does not say how its layers keep their KV{why}."
    found = [_block(engine_shape(cluster, resolve_engine(cluster, one)), model) for one in Role]
    block, large = gcd(*(one for one, _, _ in found)), min(LARGE, *(most for _, most, _ in found))
    usual = "" if all(said for _, _, said in found) else " (as most attention backends have them)"
    pieces, whole = _pieces(model.layers, block), -(-PROMPT // block)
    alike = len({(layer.kind, layer.window) for layer in model.layers}) == 1  # one group of blocks
    joins = alike and model.layers[0].kind is not LayerKind.MAMBA and not model.layers[0].window
    others = f", {_pieces(model.layers, large):,} in blocks of {large}" if block < large else ""
    if joins and cluster.spec.transfer.kv_layout in (KvLayout.BLHNC, KvLayout.BHLNC):
        pieces, others = whole, ""
    elif joins:
        others += f", {whole:,} with spec.transfer.kvLayout BLHNC"
    return (
        f"The model has {counted(len(model.layers), 'layer')} with KV or states: "
        f"{model.kv_bytes(1):,} bytes for one token, {model.kv_bytes(PROMPT):,} for {PROMPT:,}. "
        f"Where both roles split it alike, these are about {pieces:,} descriptors in blocks of "
        f"{block} tokens{usual}{others}."
    )


def _block(shape: EngineShape, model: Model) -> tuple[int, int, bool]:
    """Return the tokens of an engine's blocks, of its largest ones, and whether it is known."""
    mla = any(layer.kind is LayerKind.MLA for layer in model.layers or ())
    of_cpu = {(Memory.DRAM, True): "CPU_MLA", (Memory.DRAM, False): "CPU_ATTN"}
    backend = shape.backend or of_cpu.get((shape.memory or Memory.VRAM, mla), "")
    size = shape.block_size or CHOSEN_BLOCK.get(backend, BLOCK)
    most = MOST_BLOCK.get(backend, max(size, LARGE))
    return min(size, most), most, bool(shape.block_size or backend)


def _pieces(layers: Iterable[LayerShape], block: int) -> int:
    """Return the descriptors of a prompt, where each layer lies apart."""
    return sum(
        1 if layer.kind is LayerKind.MAMBA else -(-min(PROMPT, layer.window or PROMPT) // block)
        for layer in layers
    )


def is_replaced(engine: Engine) -> bool:
    """Whether flags give the engines another config."""
    return any(flag.head in REPLACED for flag in engine.flags)


def model_errors(cluster: Cluster, model: Model) -> Iterator[FieldError]:
    """Yield what vLLM refuses after it has read the config: half a minute after the start."""
    for role in Role:
        engine, parallel = resolve_engine(cluster, role), cluster.spec.role(role).parallelism
        if is_replaced(engine):
            continue
        path = f"spec.{role}.parallelism"
        if model.heads % parallel.tensor:
            yield FieldError(
                f"{path}.tensor",
                str(parallel.tensor),
                Reason.LAYOUT_UNSUPPORTED,
                f"the model's {model.heads} attention heads cannot be spread evenly over "
                f"{parallel.tensor} ranks",
                f"Choose a tensor parallel size that divides {model.heads}.",
            )
        if parallel.pipeline > model.depth:
            yield FieldError(
                f"{path}.pipeline",
                str(parallel.pipeline),
                Rule.OUT_OF_RANGE,
                f"the model has {model.depth} layers, and each stage needs one",
                f"Use at most {model.depth} stages.",
            )
        yield from _too_long(cluster, role, engine, model)


def _too_long(cluster: Cluster, role: Role, engine: Engine, model: Model) -> Iterator[FieldError]:
    wanted = engine.max_model_len or 0
    if not model.longest < wanted or not model.longest:
        return
    if any(one.name == LONGER and (one.value or "").lower() in {"1", "true"} for one in engine.env):
        return
    own = cluster.spec.role(role).engine.max_model_len is not None
    yield FieldError(
        f"spec.{role}.engine.maxModelLen" if own else "spec.engine.maxModelLen",
        str(wanted),
        Rule.OUT_OF_RANGE,
        f"the model's config.json allows {model.longest:,} tokens, and vLLM does not start with "
        "more",
        f"Set at most {model.longest}, or {LONGER}=1 in env if the model is known to take more.",
    )


OTHER_FILES = (
    "--revision", "--tokenizer", "--tokenizer-revision", "--code-revision", "--hf-config-path",
    "--generation-config", "--lora-modules", "--download-dir",
)  # fmt: skip
"""Flags that make an engine read what no Job has downloaded."""
ADAPTER = re.compile(r'[^={]+=(.*)|.*"path"\s*:\s*"([^"]*)".*', re.DOTALL)
"""A word of --lora-modules, NAME=PATH or a JSON object, with its path."""
JOB = "spec.model.cache.downloadedBy"
CACHE = "cache"
"""The volume of the claim."""


def download_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what a Job cannot download, and what engines without the Hub cannot find.

    It is for a cluster whose weights a Job is to download from the Hub.
    """
    remedy = "Name a claim, or leave downloadedBy out."
    if cluster.spec.model.cache.persistent_volume_claim is None:
        where = "spec.model.cache.persistentVolumeClaim"
        why = f"is missing, and {JOB} is Job: the Job downloads into a claim that engines mount"
        yield FieldError(where, "", Rule.REQUIRED, why, remedy, (JOB,))
        return
    why = f"is not what the Job of {JOB} downloads, and these engines do not ask the Hub"
    remedy = "Remove it, or let the engines download: leave downloadedBy out."
    for one in variables(cluster):
        text = "1" if one.value is None else one.value
        if one.name == MODELSCOPE and text.strip().lower() in ("1", "true"):
            where, value = f"{one.path}.value", shown(one.value)
            yield FieldError(where, value, Rule.CONFLICTING_SETTINGS, why, remedy, (JOB,))
    for role in Role:
        for place, volume in pod_templates.mappings(
            cluster.spec.role(role).pod_template, "volumes"
        ):
            if (name := volume.get("name")) == CACHE:
                where = f"spec.{role}.podTemplate.{place}.name"
                lost, other = "replaces the claim with the weights", "Choose another name."
                yield FieldError(where, name, Rule.CONFLICTING_SETTINGS, lost, other, (JOB,))
        engine = resolve_engine(cluster, role)
        for name, word in _other_files(engine):
            where, value = flag_path(cluster, role, name), shown(f"{name} {word}")
            yield FieldError(where, value, Rule.CONFLICTING_SETTINGS, why, remedy, (JOB,))


def _other_files(engine: Engine) -> Iterator[tuple[str, str]]:
    """Yield (flag, word) of repositories, revisions and folders that the Job did not fill."""
    for flag in filter(None, map(engine.last, OTHER_FILES)):
        own = {engine.model}
        if flag.name.endswith("-revision"):
            own = {engine.model_revision or "main"}
        elif flag.name == "--generation-config":
            own |= {"auto", "vllm"}
        for word in _named(flag):
            mounted = word.startswith(("/", "~")) and flag.name != "--download-dir"
            if word not in (*own, "", "None") and "$(" not in word and not mounted:
                yield flag.name, word
    draft = speculation(engine).get("model")
    if isinstance(draft, str) and "/" in draft[1:] and draft[0] != "/" and draft != engine.model:
        yield next(flag.name for flag in engine.flags if flag.head in DRAFT_FLAGS), draft


def _named(flag: Flag) -> list[str]:
    if flag.name != "--lora-modules":
        return [flag.value]
    adapters = [match for word in flag.values if (match := ADAPTER.fullmatch(word))]
    return [match[1] or match[2] for match in adapters if match[1] or match[2]]
