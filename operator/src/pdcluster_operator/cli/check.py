"""``pdcluster check``: one prompt through prefill and decode, and what became of its KV."""

import asyncio
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.protocol.api_key import headers
from pdcluster_connector.protocol.prompt_outcomes import LOCAL_PARAMETER
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.api.object_names import ENGINE_METRICS_PORT, HTTP_PORT, ROUTER_PORT, short
from pdcluster_operator.api.remedies import find, next_step
from pdcluster_operator.cli import answers, check_facts as facts, engine_metrics, once, output
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import Command, Target, in_context, positive, target_or_run
from pdcluster_operator.cli.connection import with_cluster
from pdcluster_operator.cli.engine_metrics import Page
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.reach import Pod, Reach, Serving, find_serving
from pdcluster_operator.runtime.interfaces import Key

DETAILS = """\
Sends one prompt through a router of the PDCluster, and the same prompt to the decode engine alone.
Prints where the KV cache went, how long each phase took, and whether both answers have the same
tokens. Without PROMPT, it sends an English text of several blocks. A PROMPT of - is read from
standard input.

Neither request finds anything in a prefix cache: each has a salt of its own (cache_salt).

The phases are the engines' own, from their metrics. If other requests end meanwhile, the numbers
are means over all of them, and the output says so.

On a Kubernetes cluster, the command forwards ports as kubectl port-forward does. You need the
verb create on pods/portforward, beside get and list on pods and services. If the PDCluster asks for
an API key (spec.router.apiKeySecretRef), set PDCLUSTER_API_KEY to it.

Exit codes: 0 KV moved, and the tokens are right; 3 no router or engine is ready; 4 a request
failed, or the tokens are wrong; 5 the KV cache did not move.
"""
EXAMPLES = (
    ("pdcluster check llama", "is it P/D at all, and is it right"),
    ("pdcluster check tiny --local", "the same for a run of pdcluster up"),
    ("pdcluster check llama - < prompt.txt", "a long prompt of yours"),
)
MAX_PROMPT = 4 << 20
MOST_ENGINES = 16
"""Metrics of so many engines a role are read. With more, phases are left out."""
SETTLE_SECONDS = 5.0
LOOK_SECONDS = 0.1


@click.command(cls=Command, document=facts.Check, help=DETAILS, examples=EXAMPLES)
@target_or_run
@click.argument("prompt", metavar="[PROMPT]", required=False)
@click.option(
    "--max-tokens",
    type=positive,
    default=16,
    metavar="N",
    help="tokens to generate and to compare (default 16)",
)
def check(target: Target, prompt: str | None, max_tokens: int, output: str) -> Exit:
    """Send one prompt."""
    text = None if prompt is None else read_prompt(prompt)
    return with_cluster(target, run, text, max_tokens, output, local=target.local)


def read_prompt(given: str) -> str:
    """Return the prompt; ``-`` is standard input.

    Raises:
        UserError: it is empty, too long, or no text.
    """
    text = given
    if given == "-":
        data = sys.stdin.buffer.read(MAX_PROMPT + 1)
        if len(data) > MAX_PROMPT:
            raise UserError(f"the prompt has more than {MAX_PROMPT >> 20} MiB", Exit.USAGE)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"the prompt on standard input is no UTF-8: {error}", Exit.USAGE
            ) from error
    if not text:
        raise UserError("the prompt is empty: give some text, or leave it out", Exit.USAGE)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt has bytes that are no UTF-8", Exit.USAGE) from error
    return text


async def run(
    client: KubeClient, key: Key, prompt: str | None, max_tokens: int, form: str, *, local: bool
) -> Exit:
    """Send the prompt, print what is found, and judge it."""
    serving = await find_serving(client, key, local=local)
    if prompt is None:
        engine = serving.cluster.spec.engine
        prompt = facts.default_prompt(engine.block_size, engine.max_model_len, max_tokens)
    async with Reach(client, key.namespace, local=local) as reach:
        try:
            found = await Prompt(serving, reach, prompt, max_tokens).send()
        except UserError as error:
            raise UserError(reach.explain(str(error)), error.exit) from error
    result = judge(key, found, local=local, context=client.context)
    output.show(form, result, lambda console: show(console, result))
    return exit_of(result)


class Prompt:
    """One prompt on its way through the engines that serve."""

    def __init__(self, serving: Serving, reach: Reach, prompt: str, max_tokens: int) -> None:
        self._serving, self._reach = serving, reach
        self._prompt, self._max_tokens = prompt, max_tokens

    async def send(self) -> facts.Check:
        """Send it through the router, and to decode alone.

        Raises:
            UserError: a request failed, or nothing is ready.
        """
        serving = self._serving
        router = await self._reach.url(serving.router(), ROUTER_PORT)
        if not serving.decode:
            raise serving.not_ready("decode engine")
        timeout = aiohttp.ClientTimeout(total=once.TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            before = await self._pages(http)
            began = time.monotonic()
            ours = await self._generate(http, router)
            whole = time.monotonic() - began
            after = await self._settled(http, before)
            prefill, decode = (_read_twice(before[role], after[role]) for role in before)
            if not ours.path and len(decode[0]) < len(serving.decode):
                raise UserError(
                    "nothing says whether KV moved: the answer has no kv_path, and the metrics of "
                    f"{len(serving.decode) - len(decode[0])} of {len(serving.decode)} decode "
                    "engines were not read; see the engines' logs, and send the prompt again",
                    Exit.REQUEST_FAILED,
                )
            received = engine_metrics.received(*map(_sum, decode))
            seen = (engine_metrics.busy(*prefill), engine_metrics.busy(*decode))
            path = facts.kv_path(ours.path, received, *seen)
            engine = next((pod for pod in serving.decode if pod.engine == path.decode), None)
            engine = engine or serving.decode[0]
            api = await self._reach.url(engine, HTTP_PORT)
            alone = await self._generate(http, api, {"kv_transfer_params": {LOCAL_PARAMETER: True}})
        tokens = len(ours.tokens)
        return facts.Check(
            name=serving.cluster.name,
            namespace=serving.cluster.namespace,
            verdict="",
            kv_moved=facts.moved(path),
            prompt_characters=len(self._prompt),
            prompt_tokens=ours.prompt_tokens,
            answer=ours.text,
            answer_tokens=tokens,
            kv_path=path,
            phases=facts.phases(whole, _both(prefill), _both(decode), tokens),
            comparison=facts.compare(ours, alone, engine.engine),
        )

    async def _generate(
        self, http: aiohttp.ClientSession, url: str, more: Mapping[str, Any] | None = None
    ) -> facts.Generation:
        body = {
            "model": self._serving.cluster.served_name,
            "prompt": self._prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "logprobs": facts.LOGPROBS,
            "return_token_ids": True,
            # No prefix cache has the prompt then: a hit would compare an answer with itself.
            "cache_salt": secrets.token_hex(16),
            **(more or {}),
        }
        sent = headers(self._serving.key)
        return facts.generation(await once.post(http, f"{url}/v1/completions", body, sent))

    async def _pages(self, http: aiohttp.ClientSession) -> dict[str, dict[str, Page]]:
        """Return what the metrics of each engine say, by role and engine."""
        pages: dict[str, dict[str, Page]] = {}
        for role, pods in (("prefill", self._serving.prefill), ("decode", self._serving.decode)):
            read = pods if len(pods) <= MOST_ENGINES else ()
            texts = await asyncio.gather(*(self._page(http, pod) for pod in read))
            pages[role] = {
                pod.engine: engine_metrics.read_page(text)
                for pod, text in zip(read, texts, strict=True)
                if text is not None
            }
        return pages

    async def _page(self, http: aiohttp.ClientSession, pod: Pod) -> str | None:
        return await once.metrics(http, await self._reach.url(pod, ENGINE_METRICS_PORT))

    async def _settled(
        self, http: aiohttp.ClientSession, before: dict[str, dict[str, Page]]
    ) -> dict[str, dict[str, Page]]:
        """Return the pages once both roles have counted the request, or after five seconds."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            after = await self._pages(http)
            counted_by_all = all(
                not before[role] or engine_metrics.busy(before[role], after[role])
                for role in before
            )
            if counted_by_all or time.monotonic() > deadline:
                return after
            await asyncio.sleep(LOOK_SECONDS)


def _read_twice(
    before: dict[str, Page], after: dict[str, Page]
) -> tuple[dict[str, Page], dict[str, Page]]:
    """Leave out engines of one page: the difference would be all that they ever counted."""
    both = before.keys() & after.keys()
    return {one: before[one] for one in before if one in both}, {one: after[one] for one in both}


def _sum(pages: Mapping[str, Page]) -> Page:
    return engine_metrics.added(pages.values())


def _both(pages: Sequence[Mapping[str, Page]]) -> tuple[Page, Page]:
    before, after = map(_sum, pages)
    return before, after


def judge(
    key: Key, found: facts.Check, *, local: bool = False, context: str | None = None
) -> facts.Check:
    """Add the verdict and the next command."""
    path, compared = found.kv_path, found.comparison
    if not found.kv_moved:
        reason = path.reason or path.outcome
        known = find(reason)
        why = f" {known.cause}" if known else ""
        found.verdict = f"KV did not move ({reason}): decode computed the prompt itself.{why}"
        command = next_step(reason, key.name, key.namespace, local=local) if known else ""
        found.next = in_context(command, context)
        return found
    way = f"KV moved from {_short(path.prefill, 'prefill')} to {_short(path.decode, 'decode')}"
    if compared.equal or compared.explained_by_rounding:
        same = "the same tokens" if compared.equal else "tokens that differ by rounding only"
        found.verdict = f"{way}, and decode alone generates {same}"
        return found
    found.verdict = f"{way}, but decode alone generates other tokens"
    if known := find("TokensDiffer"):
        found.verdict = f"{found.verdict}. {known.cause} {known.remedy}"
    command = next_step("TokensDiffer", key.name, key.namespace, local=local)
    found.next = in_context(command, context)
    return found


def exit_of(found: facts.Check) -> Exit:
    """Return how the command ends."""
    if not found.kv_moved:
        return Exit.KV_DID_NOT_MOVE
    right = found.comparison.equal or found.comparison.explained_by_rounding
    return Exit.DONE if right else Exit.REQUEST_FAILED


def show(console: Console, found: facts.Check) -> None:
    """Print the result for people."""
    path = found.kv_path
    right = exit_of(found) is Exit.DONE
    console.print(
        Text(f"{found.namespace}/{found.name}: {found.verdict}", "green" if right else "red")
    )
    length = f"{found.prompt_characters:,} characters, {counted(found.prompt_tokens, 'token')}"
    console.print(Text(f"\nprompt:  {length}"))
    console.print(Text(f"answer:  {found.answer!r} ({counted(found.answer_tokens, 'token')})"))
    said = once.words_of_path(
        f"{_short(path.prefill, 'prefill')} -> {_short(path.decode, 'decode')}",
        answers.Path(
            outcome=path.outcome,
            reason=path.reason,
            blocks=path.blocks,
            tokens=path.tokens,
            bytes=path.bytes,
            seconds=path.seconds,
        ),
    )
    console.print(Text(f"KV path: {said}"))
    console.print(Text(f"tokens:  {facts.words_of(found.comparison)}\n"))
    table = Columns("PHASE", "     MS")
    for phase in found.phases:
        mean = "" if phase.mean_of == 1 else f"  mean of {phase.mean_of} requests"
        table.add(facts.PHASES[phase.name], f"{phase.milliseconds:7.1f}{mean}")
    console.print(table)
    if found.next:
        console.print(Text(f"\nnext: {found.next}", "bold"))


def _short(engine: str, role: str) -> str:
    return short(engine) if engine else role
