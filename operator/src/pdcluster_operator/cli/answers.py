"""What a router or an engine answers to a completion, as far as a command reads it. Pure.

Fields that are missing or null are empty. Any other wrong shape is refused here, so that no later
step meets it.
"""

from typing import Annotated, TypedDict

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
LogProbability = Annotated[float, msgspec.Meta(ge=-1e5, le=1)]
"""vLLM says -9999 for minus infinity."""


class Path(TypedDict, total=False):
    """Where the KV of the prompt went, as the decode engine says."""

    outcome: str | None
    reason: str | None
    prefill: str | None
    decode: str | None
    blocks: Count | None
    tokens: Count | None
    bytes: Count | None
    seconds: Seconds | None


class _Parameters(msgspec.Struct):
    kv_path: Path | None = None


class _LogProbabilities(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[LogProbability | None] | None = None
    top_logprobs: list[dict[str, LogProbability] | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[Count] | None = None
    logprobs: _LogProbabilities | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Answer(msgspec.Struct):
    """The answer.

    Attributes:
        kv_transfer_params: only the decode engine's own; a router may remove them.
    """

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    kv_transfer_params: _Parameters | None = None

    @property
    def choice(self) -> _Choice:
        """The first choice."""
        return self.choices[0] if self.choices else _Choice()

    @property
    def path(self) -> Path:
        """The way of the KV; empty if the answer does not say it."""
        return (self.kv_transfer_params and self.kv_transfer_params.kv_path) or Path()


def read_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        ValueError: it is not JSON, or not an answer; the text says where.
    """
    try:
        return msgspec.json.decode(data, type=Answer)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
