"""How many engines of which size fit on given GPUs, with the arithmetic as text. Pure.

The estimates take half of what data sheets promise, and say so. They choose a first manifest; only
a measurement on the cluster says what it does.
"""

import math
import re
from dataclasses import dataclass
from itertools import takewhile

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import did_you_mean
from pdcluster_operator.cli.model_shape import Shape

GB = 10**9
USED = 0.92
"""The share of a GPU's memory that vLLM 0.32 takes (``--gpu-memory-utilization``)."""
RESERVED = 4 * GB
"""Bytes of each GPU left for activations and CUDA graphs. vLLM measures them when it starts."""
LEAST_REQUESTS = 4
"""An engine has room for the KV of so many requests at least."""
MOST_REQUESTS = 256
"""How many requests a decode engine is counted with at most."""
SHARE = 0.5
BLOCK, POSTING = 16, 3e-6
"""Tokens of a descriptor, and seconds to post one: on an H100, 81,920 took 236 ms [make gpu]."""
DATA_SHEETS = {
    # type: (dense BF16 TFLOPS, memory bandwidth in TB/s), from the makers' data sheets
    "A100-40GB": (312, 1.555), "A100-80GB": (312, 2.039), "L4-24GB": (121, 0.3),
    "L40S-48GB": (362, 0.864), "H100-80GB": (989, 3.35), "H200-141GB": (989, 4.8),
    "B200-180GB": (2250, 7.7), "MI300X-192GB": (1307, 5.3), "MI325X-256GB": (1307, 6.0),
}  # fmt: skip
_GPU_TYPE = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*-(\d{1,4})GB", re.IGNORECASE)


class Impossible(Exception):  # noqa: N818 - says what holds
    """No manifest fits what was asked; the message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """What KV moves over.

    Attributes:
        gigabytes: GB/s that are assumed.
        said: what that number is.
        each_gpu: whether each GPU has this rate; otherwise an engine has.
        resource: of the RDMA device plugin; empty for none.
    """

    gigabytes: float
    said: str
    each_gpu: bool = True
    resource: str = ""


FABRICS = {
    "none": Fabric(1.0, "TCP between pods, assumed", each_gpu=False),
    "rdma": Fabric(48.0, "400 Gb/s for each GPU, nearly full", resource="rdma/ib"),
    "roce": Fabric(48.0, "400 Gb/s for each GPU, nearly full", resource="openshift.io/roce"),
    "efa": Fabric(24.0, "400 Gb/s for each GPU, half of it", resource="vpc.amazonaws.com/efa"),
    "nvlink": Fabric(300.0, "NVLink 4 within a node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for. Times are in seconds."""

    gpus: int
    gpu_type: str
    nodes: int
    fabric: Fabric
    prompt_tokens: int
    output_tokens: int
    ttft: float
    itl: float

    @property
    def tokens(self) -> int:
        """Of the longest request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def gpus_of_node(self) -> int:
        """GPUs of each node."""
        return self.gpus // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What fits.

    Attributes:
        tensor: the tensor parallel size of every engine.
        nodes: how many pods an engine has.
        prefill, decode: how many engines of each role.
        fabric_seconds: how long the KV of one prompt takes, with the posting.
        met: whether the estimates meet both targets; None without a data sheet.
        notes: the arithmetic, a sentence or a formula in each.
    """

    tensor: int
    nodes: int
    prefill: int
    decode: int
    fabric_seconds: float
    met: bool | None
    notes: tuple[str, ...]


def gpu_bytes(gpu_type: str) -> int:
    """Return the memory of a GPU as its name says it: ``H100-80GB`` has 80 x 10^9 bytes."""
    match = _GPU_TYPE.fullmatch(gpu_type)
    if match is None or int(match[1]) == 0:
        near = did_you_mean(gpu_type, DATA_SHEETS)
        raise Impossible(
            f"--gpu-type = {gpu_type[:40]}: is no name with the memory in it, such as H100-80GB"
            + (f". {near}" if near else "")
        )
    return int(match[1]) * GB


def size(shape: Shape, wish: Wish) -> Sizing:
    """Choose the smallest engines that fit and meet the targets; otherwise the smallest that fit.

    Raises:
        Impossible: nothing fits; or the numbers contradict each other.
    """
    memory = gpu_bytes(wish.gpu_type)
    if wish.gpus % wish.nodes:
        raise Impossible(
            f"--gpus = {wish.gpus}: {wish.nodes} nodes do not have equally many GPUs then; give "
            "the GPUs of all nodes together"
        )
    if shape.longest and wish.tokens > shape.longest:
        raise Impossible(
            f"--prompt-tokens + --output-tokens = {wish.tokens:,}: the model's longest context is "
            f"{shape.longest:,} tokens (max_position_embeddings); ask for fewer"
        )
    fitting = [one for one in _tensors(shape, wish) if _room(shape, wish, memory, one) > 0]
    enough = [one for one in fitting if places(wish, one) >= 2]
    if not enough:
        raise Impossible(_why_nothing_fits(shape, wish, memory, fitting))
    sized = [_sizing(shape, wish, memory, one) for one in enough]
    return next((one for one in sized if one.met), sized[0])


def _tensors(shape: Shape, wish: Wish) -> list[int]:
    """Return the tensor parallel sizes that split the heads, and fill GPUs of whole nodes."""
    powers = takewhile(lambda power: power <= wish.gpus, (1 << n for n in range(11)))
    node = wish.gpus_of_node
    return [one for one in powers if shape.heads % one == 0 and (one <= node or one % node == 0)]


def places(wish: Wish, tensor: int) -> int:
    """Return how many engines the nodes have room for. Each fills GPUs of one node, or nodes."""
    node = wish.gpus_of_node
    return wish.nodes * (node // tensor) if tensor <= node else wish.nodes // (tensor // node)


def _free(shape: Shape, memory: int, tensor: int) -> int:
    """Return the bytes of each GPU that are left for KV."""
    return int(memory * USED) - -(-shape.weights // tensor) - RESERVED


def _room(shape: Shape, wish: Wish, memory: int, tensor: int) -> int:
    """Return how many requests' KV an engine has room for; 0 for fewer than are needed."""
    found = _free(shape, memory, tensor) // (shape.kv_bytes_of_rank(tensor) * wish.tokens)
    return found if found >= LEAST_REQUESTS else 0


def _why_nothing_fits(shape: Shape, wish: Wish, memory: int, fitting: list[int]) -> str:
    if fitting:
        held = f"{counted(wish.nodes, 'node')} with {counted(wish.gpus_of_node, 'GPU')}"
        return (
            f"--gpus = {wish.gpus}: P/D needs two engines of {counted(fitting[0], 'GPU')} for this "
            f"model, and {held} have room for {places(wish, fitting[0])}; give more or larger "
            "GPUs, or take a smaller or quantized model"
        )
    most = max(_tensors(shape, wish))
    left = _gigabytes(max(0, _free(shape, memory, most)))
    needed = _gigabytes(LEAST_REQUESTS * wish.tokens * shape.kv_bytes_of_rank(most))
    return (
        f"--gpus = {wish.gpus}: on {counted(most, 'GPU')} of {memory // GB} GB, {left} of each are "
        f"left for KV beside weights of {_gigabytes(shape.weights)}, and {LEAST_REQUESTS} requests "
        f"of {wish.tokens:,} tokens need {needed}; give more or larger GPUs, shorter requests, or "
        "a smaller or quantized model"
    )


def _sizing(shape: Shape, wish: Wish, memory: int, tensor: int) -> Sizing:
    engines, room = places(wish, tensor), _room(shape, wish, memory, tensor)
    nodes = max(1, tensor // wish.gpus_of_node)
    kv_prompt = shape.kv_bytes * wish.prompt_tokens
    # With MLA, each rank reads all of it. Otherwise the ranks share it.
    lanes = tensor if wish.fabric.each_gpu and shape.kv_heads else 1
    moving = kv_prompt / (wish.fabric.gigabytes * GB * lanes)
    descriptors = shape.layers * math.ceil(wish.prompt_tokens / BLOCK)
    seconds = moving + descriptors * POSTING
    left = _gigabytes(_free(shape, memory, tensor))
    context = " (layers with a window need less)" if shape.sliding else ""
    together = f" x {lanes}" if lanes > 1 else ""
    notes = _items(f"""
- weights: {_gigabytes(shape.weights)} ({shape.weights_said})
- KV of a token: {shape.kv_formula} = {shape.kv_bytes:,} bytes
- KV of a prompt: {wish.prompt_tokens:,} tokens x {shape.kv_bytes:,} =
    {_gigabytes(kv_prompt)}{context}
- room for KV on a GPU: {memory // GB} GB x {USED} - {_gigabytes(shape.weights)} / {tensor} -
    {_gigabytes(RESERVED)} (activations, assumed) = {left}
- requests in it: {left} / ({shape.kv_bytes_of_rank(tensor):,} bytes x {wish.tokens:,} tokens) =
    {room}; the smallest tensor size with {LEAST_REQUESTS} or more is taken, and a larger one if
    the targets need it
- engines: {counted(wish.gpus, "GPU")} on {counted(wish.nodes, "node")} / {tensor} each = {engines}
- on the fabric: {_gigabytes(kv_prompt)} / ({wish.fabric.gigabytes:g} GB/s{together}) +
    {shape.layers} layers x {wish.prompt_tokens:,} / {BLOCK} descriptors x 3 us = {_time(seconds)}
    ({wish.fabric.said})""")
    sheet = {name.lower(): sheet for name, sheet in DATA_SHEETS.items()}.get(wish.gpu_type.lower())
    if sheet is None or shape.active is None:
        unknown = "the experts of a token" if sheet else f"the data sheet of {wish.gpu_type}"
        prefill, met = engines // 2, None
        notes.append(
            f"P:D = {prefill}:{engines - prefill}: half of the engines for each role, because "
            f"{unknown} is not known here, and so neither TTFT nor ITL can be estimated"
        )
    else:
        prefill, met = _ratio(shape, wish, tensor, (engines, room), sheet, seconds, notes)
    return Sizing(
        tensor=tensor, nodes=nodes, prefill=prefill, decode=engines - prefill,
        fabric_seconds=seconds, met=met, notes=tuple(notes),
    )  # fmt: skip


def _ratio(
    shape: Shape,
    wish: Wish,
    tensor: int,
    counts: tuple[int, int],
    sheet: tuple[float, float],
    fabric_seconds: float,
    notes: list[str],
) -> tuple[int, bool]:
    """Return how many prefill engines there should be, and whether the targets are met."""
    (engines, room), (teraflops, terabytes) = counts, sheet
    active = shape.active or 0
    prompt = 2 * active * wish.prompt_tokens / (tensor * teraflops * 1e12 * SHARE)
    ttft = prompt + fabric_seconds
    rate = tensor * terabytes * 1e12 * SHARE
    # A step reads the weights once, and the KV of each request. Ranks that share a KV head, or a
    # latent vector, read it each.
    kv_request = shape.kv_bytes_of_rank(tensor) * tensor * wish.tokens
    within = int((wish.itl * rate - shape.weights) // kv_request)
    together = max(1, min(room, MOST_REQUESTS, within))
    itl = (shape.weights + together * kv_request) / rate
    decoding = wish.output_tokens * itl / together
    prefill = min(engines - 1, max(1, round(engines * prompt / (prompt + decoding))))
    missed = [", which is NOT met" * (not held) for held in (ttft <= wish.ttft, itl <= wish.itl)]
    notes += _items(f"""
- a prompt on a prefill engine: 2 x {active / 1e9:.3g}e9 parameters x {wish.prompt_tokens:,} tokens
    / ({tensor} x {teraflops:g} TFLOPS x {SHARE}) = {_time(prompt)}
- TTFT without a queue: {_time(prompt)} + {_time(fabric_seconds)} = {_time(ttft)}; the target is
    {_time(wish.ttft)}{missed[0]}
- ITL: ({_gigabytes(shape.weights)} + {together} requests x {_gigabytes(kv_request)}) / ({tensor} x
    {terabytes:g} TB/s x {SHARE}) = {_time(itl)}; the target is {_time(wish.itl)}{missed[1]}
- a request costs a prefill engine {_time(prompt)}, and a decode engine {wish.output_tokens:,}
    tokens x {_time(itl)} / {together} together = {_time(decoding)}
- P:D = {prefill}:{engines - prefill}: {engines} engines in the ratio of these two times, and at
    least one of each""")
    return prefill, not any(missed)


def _items(text: str) -> list[str]:
    """Return the items of a list, each in one line."""
    return [" ".join(item.split()) for item in text.split("\n- ")[1:]]


def _gigabytes(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 2 else f"{count / 10**6:.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
