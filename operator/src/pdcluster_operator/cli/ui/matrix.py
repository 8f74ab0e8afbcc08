"""The P×D matrix, as the status of a PDCluster tells it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, find_condition, seconds
from pdcluster_operator.api.object_names import engine_of, pairing_key_of
from pdcluster_operator.cli.ui import model
from pdcluster_operator.cli.ui.model import Engine, Facts, Link, Mark, Matrix
from pdcluster_operator.plan.observed.links import sample_pairs
from pdcluster_operator.plan.observed.pods import status_of, text_of

MOST_SIDE = 64
"""Rows, and columns, that are shown."""
MOST_ROWS = 256
WIDE = 8
"""Up to so many decode engines, a cell has room for a number."""
TONES = {"Established": "good", "Failed": "bad", "Pending": "busy"}
ORDER = {"bad": 0, "busy": 1, "quiet": 2, "good": 3}

Pair = tuple[Engine, Engine]


def matrix_of(facts: Facts, engines: Sequence[Engine]) -> Matrix:
    """Return the matrix of the engines that the spec wants."""
    wanted = [one for one in engines if one.state.word != "Leaving"]
    prefill, decode = (
        [one for one in wanted if one.role == role] for role in ("prefill", "decode")
    )
    links = {
        (p.name, d.name): _link(facts, (p, d), wanted) for p, d in _kept(facts, prefill, decode)
    }
    rows, columns = prefill[:MOST_SIDE], decode[:MOST_SIDE]
    listed = sorted(links.values(), key=lambda link: ORDER[link.state.tone])
    counts = {
        "prefill engines": len(prefill) - MOST_SIDE,
        "decode engines": len(decode) - MOST_SIDE,
        "links in the list": len(listed) - MOST_ROWS,
    }
    name = partial(_label, wanted)
    return Matrix(
        columns=tuple(map(name, columns)),
        rows=tuple((name(p), tuple(links.get((p.name, d.name)) for d in columns)) for p in rows),
        links=tuple(listed[:MOST_ROWS]),
        total=len(listed),
        hidden=", ".join(f"{left} {what}" for what, left in counts.items() if left > 0),
        wide=len(columns) <= WIDE,
    )


def _kept(facts: Facts, prefill: Sequence[Engine], decode: Sequence[Engine]) -> Iterator[Pair]:
    """Yield the pairs between which a link is kept: those of one pairing key, or a sample."""
    keys = {
        engine.stateful_set: (pairing_key_of(pod), engine.logical)
        for pod in facts.pods
        if (engine := engine_of(pod)) is not None
    }
    known = [[one for one in side if one.name in keys] for side in (prefill, decode)]
    for key in sorted({keys[one.name][0] for side in known for one in side}):
        ours = [{keys[o.name][1]: o for o in side if keys[o.name][0] == key} for side in known]
        sample = sample_pairs(tuple(ours[0]), tuple(ours[1]))
        for p, d in product(*ours):
            if p in sample[d]:
                yield ours[0][p], ours[1][d]


def _link(facts: Facts, pair: Pair, engines: Sequence[Engine]) -> Link:
    """Return a link as the status has it. An older operator tells only which links failed."""
    prefill, decode = pair
    status = status_of(facts.cluster)
    make = partial(Link, _label(engines, prefill), _label(engines, decode))
    told, failed = (_of(pair, status.get(part)) for part in ("linkStates", "failedLinks"))
    reason, message = (text_of(failed.get(part)) for part in ("reason", "message"))
    if told:
        state = text_of(told.get("state"))
        late, megabytes = seconds(told.get("lastProofTime")), told.get("megabytesPerSecond")
        descriptors = told.get("descriptors")
        return make(
            Mark("No KV moved", "bad")
            if reason and state != "Failed"
            else Mark(state, TONES.get(state, "quiet")),
            reason or text_of(told.get("reason")),
            message,
            gigabytes=megabytes / 1000 if isinstance(megabytes, int) else 0.0,
            canary=text_of(told.get("canary")),
            descriptors=descriptors if isinstance(descriptors, int) else 0,
            proven=late or seconds(told.get("verifiedTime")),
            late=late is not None,
        )
    if failed:
        return make(Mark("Failed", "bad"), reason, message)
    for engine in pair:
        if engine.state.tone != "good":
            words = f"{engine.short} is not ready: {engine.state.word}"
            return make(Mark("Pending", "busy"), "WaitingForEngines", words)
    established = find_condition(status, ConditionType.KV_LINKS_ESTABLISHED)
    good = established.get("status") == "True"
    return make(Mark("Established", "good") if good else Mark("Unknown", "quiet"))


def _of(pair: Pair, listed: object) -> Mapping[str, Any]:
    """Return the entry of a pair in a list of the status; empty if it has none."""
    names = pair[0].name, pair[1].name
    entries = model.entries(listed)
    return next((one for one in entries if (one.get("prefill"), one.get("decode")) == names), {})


def _label(engines: Sequence[Engine], engine: Engine) -> str:
    """Return an engine's short name, with its revision if the role has several."""
    several = len({one.revision for one in engines if one.role == engine.role}) > 1
    return f"{engine.short} {engine.revision}" if several else engine.short
