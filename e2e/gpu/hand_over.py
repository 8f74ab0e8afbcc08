"""Real vLLM engines on one device: P→D with PDClusterConnector, beside stock and one engine alone.

A part is one group of engines that share the device, each in a process of its own: a prefill and a
decode engine of each connector, and one engine alone, whose tokens are the expected ones.

Prompts are one token longer than whole blocks. The engine alone serves each prompt twice. The
second time it finds all whole blocks in its prefix cache and computes one token, as a decode engine
does. So the tokens have to be equal, also where a kernel rounds the last token of a long prompt in
another way than a single token.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import PREFILL_DEVICE
from gpu.engines import Answer, Engine
from loopback import free_port
from models import tiny

KEY_FILE = str(Path(__file__).resolve().parent.parent / "not-secret.key")
TOKENS = 16
SIDE_BY_SIDE = 16
GET = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}


@dataclass(frozen=True)
class Size:
    """A model's shape, and the lengths of the prompts; ``repeats`` of each are timed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    lengths: tuple[int, ...]
    repeats: int
    cache_gib: float

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, in whole blocks."""
        return (max(self.lengths) + TOKENS) // 32 * 32 + 32


# By device and --small. The first has the KV of Llama-8B, 128 KiB a token, and fewer weights.
SIZES = {
    ("cuda", False): Size(32, 1024, 32, 8, 128, (513, 2049, 8193, 16385), 7, 6.0),
    ("cuda", True): Size(8, 1024, 32, 8, 128, (513, 8193), 3, 2.0),
    ("cpu", False): Size(4, 256, 8, 4, 32, (65, 513), 3, 0.25),
    ("cpu", True): Size(4, 256, 8, 4, 32, (65, 257), 1, 0.125),
}


@dataclass(frozen=True)
class Connector:
    """One connector for a prefill and a decode engine.

    Attributes:
        wanted: ``kv_transfer_params`` of the prefill request.
        environment: variables of both engines.
    """

    wanted: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


STOCK_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Ours sets GET itself. Without it and without NVLink, UCX copies through host memory.
CONNECTORS = {
    "ours": Connector({"do_remote_decode": True}),
    "stock": Connector(STOCK_WANTED, GET),
    "stock, UCX's own settings": Connector(STOCK_WANTED),
}


@dataclass(frozen=True)
class Group:
    """What the engines of one part have in common, and the connectors that are compared.

    ``decode`` is the layout and the block size of decode engines, where they have others.
    """

    backend: str | None = "FLASH_ATTN"
    runner: int = 2
    layout: str | None = "LBHNC"
    connectors: tuple[str, ...] = ("ours",)
    graphs: bool = False
    kv_dtype: str = "auto"
    decode: tuple[str, int] | None = None


GROUPS = {
    "cuda": {
        "vllm": Group(connectors=tuple(CONNECTORS)),
        "vllm-BHLNC": Group(layout="BHLNC", connectors=("ours", "stock")),
        "vllm-BLHNC": Group(layout="BLHNC"),
        "vllm-LBNHC": Group(layout="LBNHC"),
        "vllm-runner1": Group(runner=1),
        "vllm-triton": Group(backend="TRITON_ATTN"),
        "vllm-graphs": Group(graphs=True),
        "vllm-mixed": Group(decode=("BHLNC", 32)),
        "vllm-fp8-heads": Group(backend="TRITON_ATTN", kv_dtype="fp8_per_token_head"),
    },
    "cpu": {
        "vllm": Group(backend=None, runner=1, layout=None, connectors=("ours", "stock")),
    },
}


@dataclass
class Way:
    """One way to serve a prompt, and what was measured; seconds by length of the prompt.

    Attributes:
        serve: returns when the request began, when its decode leg began, and the answer.
        paths: the connector's record of each request, ``None`` where it makes none.
    """

    name: str
    serve: Callable[[list[int]], tuple[float, float, Answer]]
    first: dict[int, list[float]] = field(default_factory=dict)
    decode_leg: dict[int, list[float]] = field(default_factory=dict)
    each_token: dict[int, list[float]] = field(default_factory=dict)
    paths: list[dict[str, Any] | None] = field(default_factory=list)
    equal: int = 0
    different: int = 0


def run_part(name: str, device: str, folder: Path, *, small: bool) -> bool:
    """Run one part and print it; return whether all engines started and all tokens were equal."""
    kind = device.partition(":")[0]
    return Bench(GROUPS[kind][name], kind, SIZES[kind, small], folder).run()


def make_model(folder: Path, size: Size) -> Path:
    """Write a random Llama whose greedy tokens depend on all KV; see ``models.tiny``."""
    name = f"llama-{size.layers}x{size.kv_heads}x{size.head}"
    overrides = {
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "max_position_embeddings": 32768,
    }
    tiny.RECIPES[name] = tiny.Recipe("LlamaConfig", overrides=overrides)
    return tiny.model_path(name, folder)


class Bench:
    """The engines of one group."""

    def __init__(self, group: Group, device: str, size: Size, folder: Path) -> None:
        self._group = group
        self._device = device
        self._size = size
        self._folder = folder
        self._model = make_model(folder, size)
        self._engines: dict[str, Engine] = {}
        self._right = True
        self.ways: list[Way] = []

    def run(self) -> bool:
        """Start the engines, measure, print and end them; return whether all was right."""
        print(f"{self._group}\n\n{self._size}\n", flush=True)
        began = time.monotonic()
        self._engines["alone"] = self.engine("alone", None, {})
        for name in self._group.connectors:
            for role in ("prefill", "decode"):
                make = self._ours if name == "ours" else self._stock
                environment = CONNECTORS[name].environment
                self._engines[f"{name} {role}"] = self.engine(
                    f"{name} {role}", make(role), environment
                )
        try:
            for name, engine in self._engines.items():
                print(f"* {name}: {engine.ready()}", flush=True)
            print(f"* all started after {time.monotonic() - began:.0f} s", flush=True)
            self._measure()
        except RuntimeError as error:
            self._right = False
            print(f"\n```\n{str(error)[-4000:]}\n```", flush=True)
        finally:
            for engine in self._engines.values():
                engine.stop()
        return self._right

    def _measure(self) -> None:
        self.ways = [Way("one engine", self._alone)]
        for name in self._group.connectors:
            self.ways.append(Way(name, self._through_both(name)))
        for length in self._size.lengths:
            for repeat in range(self._size.repeats + 1):
                self._round(length, repeat)
        print("\n".join(_table(self.ways)), flush=True)
        for name in self._group.connectors:
            self._side_by_side(name)
        for role in ("prefill", "decode"):
            engine = self._engines[f"ours {role}"]
            if lines := engine.log_lines("cuda_ipc", "cuda_copy", "ERROR"):
                print(f"\n{engine.name}, its last lines of UCX's paths and of errors:\n")
                print("\n".join(f"    {line}" for line in lines))
        metrics = self._engines["ours decode"].metrics()
        print(f"\nours decode, metrics:\n\n    {json.dumps(metrics)}")

    def _alone(self, prompt: list[int]) -> tuple[float, float, Answer]:
        began = time.monotonic()
        return began, began, self._engines["alone"].run(prompt, TOKENS)

    def _through_both(self, name: str) -> Callable[[list[int]], tuple[float, float, Answer]]:
        """Return what serves a prompt through prefill and decode, as a router does."""
        prefill, decode = self._engines[f"{name} prefill"], self._engines[f"{name} decode"]

        def serve(prompt: list[int]) -> tuple[float, float, Answer]:
            began = time.monotonic()
            ticket = prefill.run(prompt, 1, dict(CONNECTORS[name].wanted))
            middle = time.monotonic()
            if not ticket.params:
                raise RuntimeError(f"{prefill.name} gave no ticket: {ticket}")
            return began, middle, decode.run(prompt, TOKENS, ticket.params)

        return serve

    def _round(self, length: int, repeat: int) -> None:
        """Serve one prompt in all ways; the first repeat of a length only warms up."""
        prompt = self.prompt(length, repeat)
        expected: list[int] = []
        for way in self.ways:
            began, middle, answer = way.serve(prompt)
            if not expected:
                expected = way.serve(prompt)[2].tokens  # see the top of this file
            else:
                self._compare(way, length, answer, expected, show=repeat == 0)
            if repeat:
                way.first.setdefault(length, []).append(answer.first - began)
                way.decode_leg.setdefault(length, []).append(answer.first - middle)
                each = (answer.end - answer.first) / (TOKENS - 1)
                way.each_token.setdefault(length, []).append(each)

    def _compare(
        self, way: Way, length: int, answer: Answer, expected: list[int], *, show: bool
    ) -> None:
        path = (answer.params or {}).get("kv_path")
        way.paths.append(path)
        if answer.tokens == expected:
            way.equal += 1
        else:
            way.different += 1
            self._right = False
            print(f"* {way.name}, {length} tokens: {answer} is not {expected}", flush=True)
        if way.name == "ours":
            self._right &= path is not None and path["outcome"] == "transferred"
            if show:
                print(f"* {way.name}, {length} tokens, first request: {json.dumps(path)}")

    def prompt(self, length: int, number: int) -> list[int]:
        """Return a random prompt that has no block in common with others."""
        source = random.Random(f"{length}/{number}")
        return [source.randrange(3, 259) for _ in range(length)]

    def _side_by_side(self, name: str) -> None:
        """Serve many prompts at once. Batches round otherwise, so tokens are not compared."""
        prefill, decode = self._engines[f"{name} prefill"], self._engines[f"{name} decode"]
        length = self._size.lengths[1]
        prompts = [self.prompt(length, 1000 + number) for number in range(SIDE_BY_SIDE)]
        began = time.monotonic()
        asked = [prefill.submit(prompt, 1, dict(CONNECTORS[name].wanted)) for prompt in prompts]
        sent = [
            decode.submit(prompt, TOKENS, prefill.answer(request).params)
            for request, prompt in zip(asked, prompts, strict=True)
        ]
        answers = [decode.answer(request) for request in sent]
        last = max(answer.first for answer in answers) - began
        reasons = sorted({str(answer.reason) for answer in answers})
        self._right &= reasons == ["length"]
        print(
            f"\n{name}: {SIDE_BY_SIDE} prompts of {length} tokens side by side: all first tokens "
            f"after {last * 1e3:.0f} ms; ended by {', '.join(reasons)}", flush=True,
        )  # fmt: skip

    def engine(
        self, name: str, connector: dict[str, Any] | None, environment: dict[str, str]
    ) -> Engine:
        """Start an engine; ``name`` ends with its role if it has one."""
        on_gpu = self._device == "cuda"
        layout, block = self._group.layout, 16 if on_gpu else 32
        if self._group.decode and name.endswith("decode"):
            layout, block = self._group.decode
        options: dict[str, Any] = {
            "model": str(self._model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16" if on_gpu else "float32",
            "enforce_eager": not self._group.graphs,
            "block_size": block,
            "kv_cache_dtype": self._group.kv_dtype,
            "max_model_len": self._size.longest,
            "max_num_batched_tokens": self._size.longest,
            "kv_cache_memory_bytes": int(self._size.cache_gib * 2**30),
            "disable_log_stats": False,
        }
        if on_gpu:
            options["gpu_memory_utilization"] = 0.1  # vLLM wants so much to be free at its start
        if self._group.backend:
            options["attention_config"] = {"backend": self._group.backend}
        if connector:
            options["kv_transfer_config"] = {
                "kv_buffer_device": self._device,
                "kv_load_failure_policy": "fail",
                **connector,
            }
        settings = {
            **environment,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": str(self._group.runner - 1),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which is not there in every installation
            "HF_HUB_OFFLINE": "1",
            "UCX_PROTO_INFO": "y",
        }
        if layout:
            settings["VLLM_KV_CACHE_LAYOUT"] = layout
        if name.endswith("prefill") and (other := os.environ.get(PREFILL_DEVICE)):
            settings["CUDA_VISIBLE_DEVICES"] = other.partition(":")[2]
        if not on_gpu:
            settings |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        return Engine(name, self._folder, settings, options)

    def _ours(self, role: str) -> dict[str, Any]:
        return {
            "kv_connector": "PDClusterConnector",
            "kv_connector_module_path": "pdcluster_connector.vllm.connector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "engine_id": f"gpu.c.{role}.r.0/{random.getrandbits(64):016x}",
            "kv_connector_extra_config": {
                "side_channel_port": free_port(),
                "lease_seconds": 60.0,
                "show_internal_names": True,
                "ticket_key_file": KEY_FILE,
            },
        }

    def _stock(self, role: str) -> dict[str, Any]:
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "engine_id": f"stock-{role}-{random.getrandbits(64):x}",
        }


def _table(ways: list[Way]) -> list[str]:
    lines = [
        "",
        "| way | tokens | TTFT ms, median (least–most) | decode's leg | ms a token | equal |",
        "|---|---|---|---|---|---|",
    ]
    for way in ways:
        compared = way.equal + way.different
        equal = f"{way.equal} of {compared}" if compared else "–"
        for length, seconds in way.first.items():
            legs, tokens = way.decode_leg[length], way.each_token[length]
            lines.append(
                f"| {way.name} | {length} | {statistics.median(seconds) * 1e3:.1f} "
                f"({min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f}) "
                f"| {statistics.median(legs) * 1e3:.1f} "
                f"| {statistics.median(tokens) * 1e3:.2f} | {equal} |"
            )
    return lines
