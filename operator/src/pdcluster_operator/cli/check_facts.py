"""What ``pdcluster check`` finds: one prompt's way, its phases, and whether its tokens are right.

Pure: it judges answers and metrics that others have read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdcluster_operator.api.object_names import short
from pdcluster_operator.cli import engine_metrics as metrics
from pdcluster_operator.cli.answers import Answer, Path
from pdcluster_operator.cli.engine_metrics import Mean, Page

NEAR = 0.2
"""By how much log-probabilities differ because of rounding: bfloat16 has 8 bits, so a logit of 20
is known to 0.08. Two tokens that are so close may change places."""
LOGPROBS = 5
"""How many candidates a token has in an answer."""
SENTENCE = (
    "Fact {n}: the prefill engine computes the keys and values of block {n}, and the decode engine "
    "reads them over the network before it generates the first token of its answer. "
)
QUESTION = "Question: which of the two engines computed the KV cache of this prompt? Answer:"
USUAL_BLOCK = 128
"""vLLM's block on CPU, the largest of its defaults."""
BLOCKS = 3
MOST_TIMES = 1e6
"""More likely than that is all the same to a reader."""
LETTERS = 5
"""So many letters a token has at most, in English and with usual tokenizers, on average."""


class KVPath(msgspec.Struct, rename="camel", kw_only=True):
    """Where the KV of the prompt went. Engines are named by their ids, if they are known."""

    prefill: str
    decode: str
    outcome: str
    reason: str
    blocks: int
    tokens: int
    bytes: int
    seconds: float
    gigabytes_per_second: float | None


PHASES = {
    "whole": "whole request",
    "prefill": "prefill engine",
    "prefillWaits": "  waits for its turn",
    "prefillComputes": "  computes the prompt",
    "decode": "decode engine",
    "kvReceive": "  receives the KV",
    "kvConnect": "    connects to a new peer",
    "kvRead": "    reads it",
    "kvPost": "      posts all reads",
    "kvCheck": "    checks the lease",
    "firstToken": "  until the first token",
    "furtherTokens": "  generates the others",
    "routerAndNetwork": "router and network",
}
"""Phases, and how people read them. One that is indented is a part of the one above."""


class Phase(msgspec.Struct, rename="camel", kw_only=True):
    """One phase of the request. ``mean_of``: how many requests the number is a mean of.

    With 1, it is this request's own. It is more if others ended meanwhile.
    """

    name: str
    milliseconds: float
    mean_of: int = 1


class Comparison(msgspec.Struct, rename="camel", kw_only=True):
    """The tokens, compared with those of the decode engine alone.

    ``logprob_difference`` is the largest one of a candidate that both have at the same place, as
    long as the tokens before are equal.
    ``gap``: by how much decode alone prefers its own token at the first difference; null if the
    other one was not among its five best.
    """

    engine: str
    equal: bool
    compared: int
    first_difference: int | None = None
    logprob_difference: float | None = None
    gap: float | None = None
    explained_by_rounding: bool = False


class Check(msgspec.Struct, rename="camel", kw_only=True):
    """The whole result."""

    name: str
    namespace: str
    verdict: str
    kv_moved: bool
    prompt_characters: int
    prompt_tokens: int
    answer: str
    answer_tokens: int
    kv_path: KVPath
    phases: list[Phase]
    comparison: Comparison
    next: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one answer generated.

    Attributes:
        tokens: token ids, or texts of tokens from an engine that gives no ids.
        logprobs: of each token, None where the engine gives none; empty if there are none.
        best: of each token, the log-probabilities of the best candidates by their texts.
        texts: the text of each token.
    """

    text: str
    tokens: tuple[Any, ...]
    logprobs: tuple[float | None, ...]
    best: tuple[Mapping[str, float], ...]
    texts: tuple[str, ...]
    prompt_tokens: int
    path: Path


def default_prompt(block: int | None, limit: int | None, tokens: int) -> str:
    """Return a text of several blocks of KV.

    Args:
        block: tokens in a block; None if the spec leaves it open.
        limit: the most tokens of prompt and answer; None if the spec leaves it open.
        tokens: of the answer.
    """
    letters = LETTERS * (BLOCKS * (block or USUAL_BLOCK) + 1)
    if limit is not None:  # no usual tokenizer makes more tokens than letters
        letters = min(letters, limit - tokens - 1)
    text = ""
    while len(text) + len(QUESTION) < letters:
        text += SENTENCE.format(n=text.count("Fact") + 1)
    return (text[: max(0, letters - len(QUESTION))] + QUESTION)[: max(1, letters)]


def generation(answer: Answer) -> Generation:
    """Return what an answer of `/v1/completions` generated; whatever is missing is empty."""
    choice, told = answer.choice, answer.choice.logprobs
    texts = tuple((told and told.tokens) or ())
    return Generation(
        text=choice.text or "",
        tokens=tuple(choice.token_ids or texts),
        logprobs=tuple((told and told.token_logprobs) or ()),
        best=tuple(one or {} for one in (told and told.top_logprobs) or ()),
        texts=texts,
        prompt_tokens=(answer.usage and answer.usage.prompt_tokens) or 0,
        path=answer.path,
    )


def kv_path(path: Path, received: int, prefill: Sequence[str], decode: Sequence[str]) -> KVPath:
    """Return the way of the KV.

    Args:
        path: what decode's answer says; without the engines' names unless the manifest shows them.
        received: bytes that decode engines counted meanwhile.
        prefill, decode: the engines on which a request ended meanwhile. If there is one, it was it.
    """
    size = path.get("bytes") or 0 if path else received
    seconds = path.get("seconds") or 0.0
    return KVPath(
        prefill=_engine(path.get("prefill"), prefill),
        decode=_engine(path.get("decode"), decode),
        outcome=path.get("outcome") or ("transferred" if received else "unknown"),
        reason=path.get("reason") or "",
        blocks=path.get("blocks") or 0,
        tokens=path.get("tokens") or 0,
        bytes=size,
        seconds=seconds,
        gigabytes_per_second=round(size / seconds / 1e9, 4) if seconds >= 1e-9 and size else None,
    )


def _engine(named: str | None, seen: Sequence[str]) -> str:
    if named:
        return named.partition("/")[0]
    return seen[0] if len(seen) == 1 else ""


def moved(path: KVPath) -> bool:
    """Whether KV came from prefill."""
    return path.outcome == "transferred" and path.bytes > 0


def phases(
    whole: float, prefill: tuple[Page, Page], decode: tuple[Page, Page], answer_tokens: int
) -> list[Phase]:
    """Return the phases of a request in the order in which they are printed.

    Args:
        whole: seconds from the request to the answer, as this command saw it.
        prefill, decode: the pages of all engines of a role, before and after.
    """
    found = [Phase(name="whole", milliseconds=_ms(whole))]

    def add(name: str, mean: Mean | None) -> Mean | None:
        if mean is not None:
            found.append(Phase(name=name, milliseconds=_ms(mean.seconds), mean_of=mean.count))
        return mean

    ours = add("prefill", metrics.between(*prefill, metrics.REQUEST_SECONDS))
    add("prefillWaits", metrics.between(*prefill, metrics.QUEUE_SECONDS))
    add("prefillComputes", metrics.between(*prefill, metrics.PREFILL_SECONDS))
    theirs = add("decode", metrics.between(*decode, metrics.REQUEST_SECONDS))
    requests = theirs.count if theirs else 0
    for phase, name in (
        ("total", "kvReceive"),
        ("handshake", "kvConnect"),
        ("transfer", "kvRead"),
        ("post", "kvPost"),
        ("fence", "kvCheck"),
    ):
        if mean := metrics.between(*decode, metrics.RECEIVE_SECONDS, phase):
            add(name, Mean(mean.seconds, max(1, requests)))
    add("firstToken", metrics.between(*decode, metrics.FIRST_SECONDS))
    if answer_tokens > 1:
        add("furtherTokens", metrics.between(*decode, metrics.DECODE_SECONDS))
    if ours and theirs and ours.count == theirs.count == 1:
        left = max(0.0, whole - ours.seconds - theirs.seconds)
        found.append(Phase(name="routerAndNetwork", milliseconds=_ms(left)))
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def compare(ours: Generation, alone: Generation, engine: str) -> Comparison:
    """Compare what prefill and decode generated together with what decode generates alone."""
    mine, other = ours.tokens or (ours.text,), alone.tokens or (alone.text,)
    pairs = zip(mine, other, strict=False)
    first = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
    if first is None and len(mine) != len(other):
        first = min(len(mine), len(other))
    told = Comparison(
        engine=engine,
        equal=first is None,
        compared=max(len(mine), len(other)),
        first_difference=first,
        logprob_difference=_difference(ours, alone, len(mine) if first is None else first + 1),
    )
    if first is not None:
        told.gap = _gap(ours, alone, first)
        far = (told.gap, told.logprob_difference)
        told.explained_by_rounding = all(one is not None and one <= NEAR for one in far)
    return told


def _difference(ours: Generation, alone: Generation, places: int) -> float | None:
    pairs = list(zip(ours.best, alone.best, strict=False))[:places]
    found = (
        abs(one[text] - other[text]) for one, other in pairs for text in one.keys() & other.keys()
    )
    return max(found, default=None)


def _gap(ours: Generation, alone: Generation, at: int) -> float | None:
    if at >= min(len(alone.best), len(ours.texts), len(alone.logprobs)):
        return None
    own, other = alone.logprobs[at], alone.best[at].get(ours.texts[at])
    return None if own is None or other is None else own - other


def words_of(comparison: Comparison) -> str:
    """Return the comparison in one or two sentences."""
    engine = f"{short(comparison.engine)} alone" if comparison.engine else "decode alone"
    if comparison.equal:
        far = comparison.logprob_difference
        differ = "" if far is None else f"; log-probabilities differ by {far:.4f} at most"
        differ += ", which is more than rounding explains" if far and far > NEAR else ""
        return f"equal to those of {engine}: {comparison.compared} of {comparison.compared}{differ}"
    at = (comparison.first_difference or 0) + 1
    begin = f"{engine} generates another token at place {at} of {comparison.compared}"
    if comparison.explained_by_rounding and comparison.gap is not None:
        times = math.exp(comparison.gap)
        return (
            f"{begin}, but it takes both for nearly as likely ({times:.2f} to 1). Engines that "
            "compute a prompt in other pieces round otherwise; that explains it"
        )
    if comparison.gap is None:
        why = f"it does not take the other one for one of the {LOGPROBS} most likely"
    elif comparison.gap > NEAR:
        most = comparison.gap > math.log(MOST_TIMES)
        often = "more than a million" if most else f"{math.exp(comparison.gap):.1f}"
        why = f"it takes its own for {often} times as likely"
    elif comparison.logprob_difference is None:
        why = "their log-probabilities cannot be compared"
    else:
        why = f"log-probabilities differ by up to {comparison.logprob_difference:.2f}"
    return f"{begin}: {why}, which rounding does not explain"
