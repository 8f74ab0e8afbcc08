"""``pdcluster links``: every link between prefill and decode engines, as a picture and as rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.api.conditions import seconds
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Role, Verification
from pdcluster_operator.cli import output as outputs, status as status_command, status_facts
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.commands import Command, Target, target_or_run
from pdcluster_operator.cli.connection import with_cluster
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.plan.observed.pods import text_of
from pdcluster_operator.plan.status.link_states import PROOF_STANDS_SECONDS
from pdcluster_operator.runtime.interfaces import Key

DETAILS = """\
Draws prefill engines as rows and decode engines as columns. A link is verified if decode has read
prefill's memory, and the KV of a real request (a canary) was seen to move.

GB/s was measured when the link was established. PROOF says how long ago KV was last seen to move,
at most: canaries are sent every verification.canary.intervalSeconds, and busy engines may be late.
DESCRIPTORS says how many pieces NIXL moves for a prompt of 1,000 tokens on one worker: fewer are
better.

Exit codes: 0 every link is verified; 3 one is not, or no operator works on it.
"""
EXAMPLES = (
    ("pdcluster links llama", "all links of a PDCluster"),
    ("pdcluster links tiny --local", "of a pdcluster up on this machine"),
)


class Look(msgspec.Struct, frozen=True):
    """How a link is drawn."""

    glyph: str
    letter: str  # where the output cannot show the glyph
    style: str
    means: str


LOOKS = {
    "Verified": Look("●", "V", "green", "verified"),
    "Established": Look("◐", "E", "yellow", "established, no canary yet"),
    "CanaryFailed": Look("◑", "C", "red", "established, but the canary moved no KV"),
    "Pending": Look("○", "p", "yellow", "pending"),
    "Failed": Look("✗", "F", "bold red", "failed"),
    "Unknown": Look("?", "?", "yellow", "unknown: the decode engine's launcher is silent"),
    "NotKept": Look("·", ".", "dim", "no link is kept between these"),
}


class Link(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One link.

    Attributes:
        state: Verified, Established, CanaryFailed, Pending, Failed or Unknown.
        gigabytes_per_second: as measured when it was established; 0 if it was not.
        descriptors: for 1,000 tokens; 0 if it is not known.
        proof_seconds: how long ago KV was last seen to move, at most; None if it was not.
    """

    prefill: str
    decode: str
    state: str
    reason: str = ""
    message: str = ""
    gigabytes_per_second: float = msgspec.field(default=0.0, name="gigabytesPerSecond")
    descriptors: int = 0
    proof_seconds: int | None = msgspec.field(default=None, name="proofSeconds")


class Links(msgspec.Struct, kw_only=True):
    """All links of a PDCluster.

    Attributes:
        not_shown: how many links the status leaves out.
    """

    name: str
    namespace: str
    summary: str
    prefill: list[str]
    decode: list[str]
    links: list[Link]
    not_shown: int = msgspec.field(name="notShown")
    diagnosis: list[str]


@click.command("links", cls=Command, document=Links, help=DETAILS, examples=EXAMPLES)
@target_or_run
def links(target: Target, output: str) -> Exit:
    """Show the links of one PDCluster."""
    return with_cluster(target, show, output, local=target.local)


async def show(client: KubeClient, key: Key, output: str, *, local: bool) -> Exit:
    """Print the links."""
    found = await status_command.read(client, key, local=local)
    facts = links_of(found)
    outputs.show(output, facts, lambda console: print_links(console, facts))
    verified = all(link.state == "Verified" for link in facts.links) and not facts.not_shown
    old = status_facts.status_of(found).operator.works is False
    return Exit.DONE if facts.links and verified and not old else Exit.NOT_READY


def links_of(found: status_facts.Objects) -> Links:
    """Return what the status says of the links."""
    whole, status = status_facts.status_of(found), as_mapping(found.cluster.get("status"))
    parsed = parse_cluster(found.cluster)  # an operator may be stricter than the CRD
    checks = Verification() if parsed.errors else parsed.cluster.spec.verification
    # Without an operator, nobody writes down which KV moves.
    stopped = whole.operator.works is False
    interval = float("inf") if stopped else checks.canary.interval_seconds
    failed = {
        (one.get("prefill"), one.get("decode")): one
        for one in map(as_mapping, status.get("failedLinks") or ())
    }
    made = [
        _link(one, failed.get((one.get("prefill"), one.get("decode")), {}), interval, found.now)
        for one in map(as_mapping, status.get("linkStates") or ())
    ]
    total = text_of(status.get("links")).partition("/")[2]
    left = max(0, int(total) - len(made)) if total.isdecimal() else 0
    engines: dict[str, list[str]] = {role.value: [] for role in Role}
    for role in engines:
        listed = [one.name for one in whole.engines if one.role == role and one.wanted]
        linked = (getattr(link, role) for link in made)
        engines[role] = list(dict.fromkeys((*listed, *linked)))
    verified = sum(link.state == "Verified" for link in made)
    said = f"{verified} of {counted(len(made) + left, 'link')} verified"
    if not made and left:
        said = f"{text_of(status.get('links'))} links established; an older operator wrote no more"
    elif not made:
        said = f"no link yet: {whole.summary}"
    old = "; no operator works on it, so this may be old" if stopped else ""
    return Links(
        name=whole.name,
        namespace=whole.namespace,
        summary=f"{whole.name}: {said}{old}",
        prefill=engines[Role.PREFILL.value],
        decode=engines[Role.DECODE.value],
        links=made,
        not_shown=left,
        diagnosis=whole.diagnosis,
    )


def _link(entry: Mapping[str, Any], failed: Mapping[str, Any], interval: float, now: float) -> Link:
    state, canary = text_of(entry.get("state")), entry.get("canary")
    if state == "Established":
        state = {"Passed": "Verified", "Failed": "CanaryFailed"}.get(str(canary), state)
    return Link(
        prefill=text_of(entry.get("prefill")),
        decode=text_of(entry.get("decode")),
        state=state if state in LOOKS else "Unknown",
        reason=text_of(entry.get("reason")) or text_of(failed.get("reason")),
        message=text_of(failed.get("message")) or text_of(entry.get("message")),
        gigabytes_per_second=int(entry.get("megabytesPerSecond") or 0) / 1000,
        descriptors=int(entry.get("descriptors") or 0),
        proof_seconds=_proof(entry, interval, now),
    )


def _proof(entry: Mapping[str, Any], interval: float, now: float) -> int | None:
    """Return how long ago KV was last seen to move, at most."""
    since, last = (seconds(entry.get(one)) for one in ("verifiedTime", "lastProofTime"))
    if last is not None:
        return max(0, int(now - last))
    if since is None:
        return None
    return max(0, int(min(now - since, interval + PROOF_STANDS_SECONDS)))


def print_links(console: Console, facts: Links) -> None:
    """Print the picture, its legend and a row a link."""
    console.print(Text(facts.summary, "bold"))
    for line in facts.diagnosis:
        console.print(Text(line, "bold"))
    if facts.links:
        console.print()
        console.print(Matrix(facts))
        console.print()
        console.print(_rows(facts))
    if facts.not_shown and facts.links:
        console.print(Text(f"{counted(facts.not_shown, 'more link')}: not in the status", "dim"))


class Matrix:
    """The picture. If the terminal is narrow, its columns are drawn in several blocks."""

    def __init__(self, facts: Links) -> None:
        self._facts = facts
        self._states = {(link.prefill, link.decode): link.state for link in facts.links}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one :class:`rich.text.Text` a line."""
        rows, columns = _labels(self._facts.prefill), _labels(self._facts.decode)
        left = max([len("prefill"), *map(len, rows)])
        cell = max(map(len, columns), default=1) + 1
        width = options.max_width if console.is_terminal else 10_000
        each = max(1, (width - left - 1) // cell)
        plain = "utf" not in (console.encoding or "").lower()
        used: dict[str, None] = {}
        for start in range(0, len(columns), each):
            block = range(start, min(start + each, len(columns)))
            yield Text(f"{'':{left}}  decode", "dim")
            heads = "".join(f" {columns[n]:>{cell - 1}}" for n in block)
            yield Text(f"{'prefill':{left}} ", "dim").append(heads, "bold not dim")
            for prefill, label in zip(self._facts.prefill, rows, strict=True):
                line = Text(f"{label:{left}} ", "bold")
                for n in block:
                    state = self._states.get((prefill, self._facts.decode[n]), "NotKept")
                    used[state] = None
                    look = LOOKS[state]
                    drawn = look.letter if plain else look.glyph
                    line.append(f" {drawn:>{cell - 1}}", f"not bold {look.style}")
                yield line
        for state in (one for one in LOOKS if one in used):
            look = LOOKS[state]
            mark = f"{look.letter if plain else look.glyph} "
            yield Text(mark, look.style).append(look.means, "not bold dim default")


def _labels(names: Sequence[str]) -> list[str]:
    """Return short names: the index of an engine; with its revision if there are several."""
    parts = [name.rsplit("-", 2) for name in names]
    several = len({part[-2] for part in parts if len(part) == 3}) > 1
    return ["-".join(part[-2:] if several else part[-1:]) for part in parts]


def _rows(facts: Links) -> Columns:
    table = Columns("PREFILL", "DECODE", "STATE", "GB/s", "PROOF", "DESCRIPTORS", "REASON")
    order = list(LOOKS)[::-1]
    for link in sorted(facts.links, key=lambda one: order.index(one.state)):
        table.add(*_cells(link))
    return table


def _cells(link: Link) -> Iterator[str | Text]:
    yield link.prefill
    yield link.decode
    yield Text(link.state, LOOKS[link.state].style)
    yield f"{link.gigabytes_per_second:.3g}" if link.gigabytes_per_second else ""
    age = link.proof_seconds
    yield "" if age is None else f"< {status_facts.duration(max(1, age))}"
    yield f"{link.descriptors:,}" if link.descriptors else ""
    yield ": ".join(filter(None, (link.reason, link.message)))
