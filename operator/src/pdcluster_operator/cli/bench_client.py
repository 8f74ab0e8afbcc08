"""The program that `pdcluster bench` starts: vLLM's own benchmark client, for several runs in turn.

It is a process of its own because importing vLLM takes seconds and prints lines. It reads a plan as
one line of JSON on standard input, and writes one line of JSON a run on standard output. When
standard input ends, it ends, too: no load is left behind, however `pdcluster bench` ended. vLLM
drops a request whose connection is gone.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

MODULE = "vllm.benchmarks.serve"
TOKEN_IDS = 10, 256
"""Nearly every vocabulary has these, and its special tokens are mostly the first ones."""
MOST_ERROR = 300


def main() -> int:
    """Carry out the plan."""
    plan = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with contextlib.redirect_stdout(sys.stderr):  # what vLLM prints for people
        client = importlib.import_module(MODULE)
        plan["vllm"] = importlib.import_module("vllm").__version__
        asyncio.run(_carry_out(client, plan, results))
    return 0


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(1)


async def _carry_out(client: Any, plan: dict[str, Any], results: TextIO) -> None:
    for run in plan["runs"]:
        told = await asyncio.gather(
            *(client.benchmark(**arguments(client, plan, target)) for target in run["targets"])
        )
        named = {"arm": run["arm"], "round": run["round"], "vllm": plan["vllm"]}
        print(json.dumps({**joined(told), **named}), file=results)
        results.flush()


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what matters of the results of targets that ran side by side. Times are seconds."""
    good = [
        (one["ttfts"][n], one["itls"][n], one["output_lens"][n])
        for one in told
        for n, error in enumerate(one["errors"])
        if not error
    ]
    errors = [error for one in told for error in one["errors"] if error]
    return {
        "seconds": max(one["duration"] for one in told),
        "ttfts": [ttft for ttft, _, _ in good],
        "itls": [gap for _, gaps, _ in good for gap in gaps],
        "tokens": sum(tokens for *_, tokens in good),
        "failed": len(errors),
        "error": errors[0].strip().splitlines()[-1][:MOST_ERROR] if errors else "",
    }


def arguments(client: Any, plan: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM's `benchmark` is called with.

    Raises:
        TypeError: this version of vLLM takes other parameters.
    """
    prompts = [
        client.SampleRequest(
            prompt=ids, prompt_len=len(ids), expected_output_len=plan["outputTokens"]
        )
        for ids in _prompts(plan["inputTokens"], target["requests"])
    ]
    given: dict[str, Any] = {
        "task_type": client.TaskType.GENERATION,
        "endpoint_type": "openai",
        "api_url": f"{target['url']}/v1/completions",
        "base_url": target["url"],
        "model_id": plan["model"],
        "model_name": plan["model"],
        "tokenizer": None,  # prompts are token ids, and engines count what they generate
        "input_requests": prompts,
        "logprobs": None,
        "request_rate": target["rate"] or float("inf"),
        "burstiness": 1.0,
        "disable_tqdm": True,
        "num_warmups": 0,
        "profile": False,
        "selected_percentile_metrics": [],
        "selected_percentiles": [99.0],
        "ignore_eos": True,
        "goodput_config_dict": {},
        "max_concurrency": target["concurrency"],
        "lora_modules": None,
        "extra_headers": None,
        "extra_body": {"temperature": 0, **target["body"]},
        "ready_check_timeout_sec": 0,
    }
    inspect.signature(client.benchmark).bind(**given)
    return given


def _prompts(tokens: int, count: int) -> Iterator[list[int]]:
    """Yield random prompts: no prefix cache has them."""
    draw = random.SystemRandom()
    for _ in range(count):
        yield [draw.randrange(*TOKEN_IDS) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(main())
