"""``pdcluster bench``: P/D against the same engines aggregated, by vLLM's own client."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import click
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol.prompt_outcomes import LOCAL_PARAMETER, is_fault
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.api.object_names import ENGINE_METRICS_PORT, HTTP_PORT, ROUTER_PORT
from pdcluster_operator.cli import bench_figures as figures, engine_metrics, once, output
from pdcluster_operator.cli.bench_figures import AGGREGATED, PD, number_text
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import Command, Target, duration, positive, target_or_run
from pdcluster_operator.cli.connection import with_cluster
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.reach import Reach, Serving, find_serving
from pdcluster_operator.runtime.interfaces import Key

DETAILS = """\
Measures the time to the first token (TTFT), the time between two tokens (ITL) and the throughput,
with the client of `vllm bench serve`. vLLM has to be installed in the Python of this command. It
runs two arms in turn, round by round:

- P/D: the requests go through a router.

- aggregated: the same number of requests, shared out among all engines of both roles. Each engine
computes prompts and generates tokens, and no KV moves.

Prompts are random token ids, so no prefix cache has them. A round that warms up is not counted. The
table has the median of the rounds, and the lowest and the highest round.

The load is real: do not run this beside requests that matter. It ends with the command, also on
Ctrl-C. On a Kubernetes cluster the requests go through forwarded ports, as with `pdcluster check`,
which adds its own time to both arms: compare the arms there, and measure in a pod of the cluster
for numbers to publish.

Exit codes: 3 no router or engine is ready; 4 requests failed, or
an engine's metrics were not read; 5 the KV cache of P/D did not move;
6 vLLM is missing.
"""
EXAMPLES = (
    ("pdcluster bench llama", "a first look"),
    ("pdcluster bench llama --rate 8 --input-tokens 4096", "8 requests a second, long prompts"),
    ("pdcluster bench tiny --local --picture bench.svg", "on this machine, with a picture"),
)
CLIENT = "pdcluster_operator.cli.bench_client"
INSTALL = "install it in this Python (pip install vllm), or run the command where vLLM is"
LINE = 256 << 20
"""The most bytes of one run's result: 10,000 requests of 1,000 tokens."""
MOST = {"requests": 10_000, "rounds": 50, "input-tokens": 1_000_000, "output-tokens": 100_000}
SUFFIXES = (".svg", ".png")
KEY_OF_THE_CLIENT = "OPENAI_API_KEY"
"""The variable in which vLLM's client expects an API key."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent in each round of each arm. ``rate``: requests a second; None for no limit."""

    requests: int
    rounds: int
    concurrency: int
    rate: float | None
    input_tokens: int
    output_tokens: int
    seconds: float


def pictures(_: click.Context, __: click.Parameter, files: tuple[str, ...]) -> tuple[Path, ...]:
    """Check the names of the pictures before anything is sent."""
    for path in map(Path, files):
        if path.suffix not in SUFFIXES:
            raise click.BadParameter(f"{path}: the name has to end with .svg or .png")
        if not path.parent.is_dir():
            raise click.BadParameter(f"{path}: there is no folder {path.parent}")
    return tuple(map(Path, files))


@click.command(cls=Command, document=figures.Bench, help=DETAILS, examples=EXAMPLES)
@target_or_run
@click.option("--requests", type=positive, default=32, help="of a round of an arm (default 32)")
@click.option("--rounds", type=positive, default=3, help="of each arm (default 3)")
@click.option("--concurrency", type=positive, default=8, help="requests at once (default 8)")
@click.option("--rate", type=float, help="requests a second (default: no limit)")
@click.option("--input-tokens", type=positive, default=512, help="of a prompt (default 512)")
@click.option("--output-tokens", type=positive, default=32, help="of an answer (default 32)")
@click.option(
    "--max-time",
    type=duration,
    default="10m",
    metavar="DURATION",
    help="stop after this time, and report the rounds that are complete (default 10m)",
)
@click.option(
    "--picture",
    "pictures",
    multiple=True,
    callback=pictures,
    metavar="FILE",
    help="draw the result: FILE.svg or FILE.png; may be given twice",
)
def bench(
    target: Target, pictures: tuple[Path, ...], output: str, max_time: float, **numbers: Any
) -> Exit:
    """Measure."""
    for name, most in MOST.items():
        if numbers[name.replace("-", "_")] > most:
            raise UserError(f"--{name} may be at most {most:,}", Exit.USAGE)
    rate = numbers["rate"]
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"--rate {rate} is not a number above 0", Exit.USAGE)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"vLLM is missing: {INSTALL}", Exit.MACHINE)
    load = Load(seconds=max_time, **numbers)
    return with_cluster(target, run, load, pictures, output, local=target.local)


async def run(
    client: KubeClient,
    key: Key,
    load: Load,
    files: Sequence[Path],
    form: str,
    *,
    local: bool,
) -> Exit:
    """Send the load, and print what was measured."""
    serving = await find_serving(client, key, local=local)
    _check_length(serving, load)
    async with Reach(client, key.namespace, local=local) as reach:
        plan, engines = await make_plan(serving, reach, load)
        before = await _outcomes(serving, reach)
        told, problem = await carry_out(plan, serving.key, load.seconds)
        after = await _outcomes(serving, reach)
        unreached = reach.problem()
    arms = [
        figures.arm(name, engines, [one for one in told if one["arm"] == name and one["round"]])
        for name in figures.ARMS
    ]
    errors = [one["error"] for one in told if one["error"]]
    measured = [one for one in arms if one is not None]
    if len(measured) < len(arms):
        why = problem or unreached or next(iter(errors), "no round was complete")
        raise UserError(f"nothing was measured: {why}", Exit.REQUEST_FAILED)
    found = figures.Bench(
        name=key.name,
        namespace=key.namespace,
        way="direct" if local else "port-forward",
        vllm=told[0]["vllm"],
        rounds=min(len(one.ttft.rounds) for one in measured),
        requests=load.requests,
        concurrency=plan["runs"][-1]["concurrency"],
        rate=load.rate,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        arms=measured,
        prompts=None if before is None or after is None else dict(after - before),
        problem=problem or (errors and unreached) or next(iter(errors), ""),
    )
    for file in files:
        _draw(file, found)
    output.show(form, found, lambda console: show(console, found))
    return exit_of(found)


def _check_length(serving: Serving, load: Load) -> None:
    limit = serving.cluster.spec.engine.max_model_len
    if limit is not None and load.input_tokens + load.output_tokens > limit:
        raise UserError(
            f"--input-tokens {load.input_tokens} and --output-tokens {load.output_tokens} are more "
            f"than spec.engine.maxModelLen {limit}: ask for fewer",
            Exit.USAGE,
        )


async def make_plan(serving: Serving, reach: Reach, load: Load) -> tuple[dict[str, Any], int]:
    """Return what the client has to do, and how many engines serve.

    Raises:
        UserError: an engine of a role or a router is not ready.
    """
    router = await reach.url(serving.router(), ROUTER_PORT)
    for role, pods in (("prefill", serving.prefill), ("decode", serving.decode)):
        if not pods:
            raise serving.not_ready(f"{role} engine")
    engines = [await reach.url(pod, HTTP_PORT) for pod in (*serving.prefill, *serving.decode)]
    alone = {"kv_transfer_params": {LOCAL_PARAMETER: True}}
    bodies: list[Any] = [{}] * len(serving.prefill) + [alone] * len(serving.decode)
    arms: dict[str, list[tuple[str, Any]]] = {
        PD: [(router, {})],
        AGGREGATED: list(zip(engines, bodies, strict=True)),
    }
    load = replace(load, concurrency=max(load.concurrency, len(engines)))
    runs = [
        _run(name, number, arms[name], load)
        for number in range(load.rounds + 1)  # round 0 warms up
        for name in (figures.ARMS if number % 2 else reversed(figures.ARMS))
    ]
    model = serving.cluster.served_name
    lengths = {"inputTokens": load.input_tokens, "outputTokens": load.output_tokens}
    return {"model": model, **lengths, "runs": runs}, len(engines)


def _run(
    name: str, number: int, targets: Sequence[tuple[str, dict[str, Any]]], load: Load
) -> dict[str, Any]:
    """Share the load of one run out among its targets."""
    requests = shares(load.requests if number else 2 * len(targets), len(targets))
    concurrency = shares(load.concurrency, len(targets))
    told = [
        {
            "url": url,
            "body": body,
            "requests": count,
            "concurrency": at_once,
            "rate": load.rate and load.rate * count / sum(requests),
        }
        for (url, body), count, at_once in zip(targets, requests, concurrency, strict=True)
        if count
    ]
    return {"arm": name, "round": number, "concurrency": sum(concurrency), "targets": told}


def shares(whole: int, parts: int) -> list[int]:
    """Return ``parts`` whole numbers that differ by one at most, with this sum."""
    each, more = divmod(whole, parts)
    return [each + (number < more) for number in range(parts)]


async def carry_out(
    plan: dict[str, Any], key: str | None, seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Let the client send everything; return its results, and why it ended early.

    The client ends with this call, whatever ends it.
    """
    told: list[dict[str, Any]] = []
    environment = {**os.environ, "NO_PROXY": "*"}
    environment.pop(KEY_OF_THE_CLIENT, None)
    if key is not None:
        environment[KEY_OF_THE_CLIENT] = key
    with tempfile.TemporaryFile() as log:
        try:
            async with asyncio.timeout(seconds), _client(environment, log) as process:
                asked, answers = process
                asked.write(json.dumps(plan).encode() + b"\n")
                await asked.drain()
                while len(told) < len(plan["runs"]):
                    line = await answers.readline()
                    if not line:
                        return told, f"vLLM's client ended: {_last_line(log)}"
                    told.append(json.loads(line))
        except TimeoutError:
            return told, f"stopped after {seconds:.0f} s (--max-time)"
        except ConnectionError:
            return told, f"vLLM's client ended: {_last_line(log)}"
    return told, ""


@asynccontextmanager
async def _client(
    environment: dict[str, str], log: BinaryIO
) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """Start the client; give its standard input and output. It ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLIENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=environment,
        limit=LINE,
        start_new_session=True,  # the terminal's Ctrl-C is for this command, which ends it
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("both are pipes")
    try:
        yield process.stdin, process.stdout
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _last_line(log: BinaryIO) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


async def _outcomes(serving: Serving, reach: Reach) -> Counter[str] | None:
    """Return how many prompts decode engines have counted, by outcome and reason.

    None if the metrics of one were not read.
    """
    total: Counter[str] = Counter()
    urls = [await reach.url(pod, ENGINE_METRICS_PORT) for pod in serving.decode]
    async with aiohttp.ClientSession() as http:
        texts = await asyncio.gather(*(once.metrics(http, url) for url in urls))
    for text in texts:
        if text is None:
            return None
        total += engine_metrics.read_outcomes(text)
    return total


def _draw(file: Path, found: figures.Bench) -> None:
    shapes = figures.picture(found)
    try:
        data = figures.png(shapes) if file.suffix == ".png" else figures.svg(shapes).encode()
        file.write_bytes(data)
    except (ImportError, OSError) as error:
        raise UserError(f"the picture {file} was not written: {error}", Exit.MACHINE) from error


def not_moved(found: figures.Bench) -> int:
    """Return how many prompts decode computed although prefill should have."""
    return sum(
        count
        for name, count in (found.prompts or {}).items()
        if is_fault(*name.partition("/")[::2])
    )


def exit_of(found: figures.Bench) -> Exit:
    """Return how the command ends."""
    if found.prompts is None or any(arm.failed for arm in found.arms):
        return Exit.REQUEST_FAILED
    moved = found.prompts.get("transferred", 0)
    return Exit.DONE if moved and not not_moved(found) else Exit.KV_DID_NOT_MOVE


def show(console: Console, found: figures.Bench) -> None:
    """Print the result for people."""
    rate = "as fast as they are answered" if found.rate is None else f"{found.rate:g} a second"
    console.print(
        Text(
            f"{found.namespace}/{found.name}: {found.requests} requests a round, {rate}, "
            f"{found.concurrency} at once at most; {found.input_tokens} tokens in, "
            f"{found.output_tokens} out; {counted(found.rounds, 'round')}\n"
        )
    )
    table = Columns("FIGURE", *(one.name.upper() for one in found.arms))
    table.add("TTFT, ms", *(words(one.ttft) for one in found.arms))
    table.add("ITL, ms", *(words(one.itl) for one in found.arms))
    table.add("tokens a second", *(words(one.throughput) for one in found.arms))
    table.add("TTFT p99, ms", *(number_text(one.ttft_p99) for one in found.arms))
    table.add("ITL p99, ms", *(number_text(one.itl_p99) for one in found.arms))
    table.add("engines", *(str(one.engines) for one in found.arms))
    table.add("failed", *(f"{one.failed} of {one.requests}" for one in found.arms))
    console.print(table)
    counts = sorted((found.prompts or {}).items())
    outcomes = ", ".join(f"{count:,} {name}" for name, count in counts) or "none"
    if found.prompts is None:
        outcomes = "not known, because the metrics of a decode engine were not read"
    console.print(Text(f"\nprompts on decode engines: {outcomes}"))
    if found.way != "direct":
        console.print(
            Text("the requests went through forwarded ports, which take time in both arms")
        )
    if bad := not_moved(found):
        console.print(Text(f"error: KV did not move for {bad:,} prompts", "red"))
    if found.problem:
        console.print(Text(f"not complete: {found.problem}", "yellow"))


def words(one: figures.Spread) -> str:
    """Return a figure with the lowest and the highest round."""
    low, high = number_text(one.low), number_text(one.high)
    return f"{number_text(one.median)} ({low}-{high})"
