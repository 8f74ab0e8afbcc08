"""What ``advise`` judges: what a user wants, and what the engines did at each moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest number of engines of a role."""

    least: int
    most: int

    def clamp(self, number: int) -> int:
        """Return the nearest number that is allowed."""
        return max(self.least, min(number, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a user wants.

    Attributes:
        ttft: the mean time to the first token, in seconds; None if it does not matter.
        itl: the mean time between two tokens of an answer, in seconds; None as above.
        ratio: the smallest and the largest share of prefill, in percent of the decode engines, as
            a PrefillScaler has them; None for no bound. Rounded up.
    """

    prefill: Bounds
    decode: Bounds
    ttft: float | None = None
    itl: float | None = None
    ratio: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """What the measured engines of one role did, all together.

    Attributes:
        engines: how many were measured: those that are ready and have served for a while.
        busy: sum of the shares of time in which they worked; ``engines`` if all always did.
        tokens: a second: prompt tokens of prefill engines, generated tokens of decode engines.
        requests: first tokens a second.
        first_token: mean seconds from a request's arrival at the engine to its first token.
        gap: mean seconds between two tokens; 0 if there were none.
        running: mean number of requests in work.
        waiting: mean number of requests that wait for room, without those whose KV is on its way.
        kv: sum of the shares of their KV caches that are in use.
    """

    engines: int = 0
    busy: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    first_token: float = 0.0
    gap: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0

    @property
    def velocity(self) -> float:
        """Tokens a second of one engine while it works; 0 if none worked."""
        return self.tokens / self.busy if self.busy > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLoad:
    """What the measured decode engines received.

    Attributes:
        rate: bytes a second, all together.
        seconds: mean duration of a receive.
        in_flight: mean number of receives at the same time.
    """

    rate: float = 0.0
    seconds: float = 0.0
    in_flight: float = 0.0

    @property
    def velocity(self) -> float:
        """Bytes a second of one link while it carries KV; 0 if none did."""
        return self.rate / self.in_flight if self.in_flight > 0 else 0.0

    def busy(self, engines: int) -> float:
        """Return the share of time in which the link of one of so many engines carries KV.

        A link is shared by its receives. The mean number of receives in such a queue is
        ``busy / (1 - busy)``.
        """
        each = self.in_flight / max(1, engines)
        return each / (1.0 + each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One look at a PDCluster.

    Attributes:
        at: when, in seconds of a clock that does not go back.
        wanted: (prefill, decode) engines that its objects ask for.
        came: (prefill, decode) engines of those that run, also if they still load their weights, or
            if their launchers cannot be reached.
        ready: (prefill, decode) engines of those that serve.
        asked: (prefill, decode) engines that the advice before this moment asked for, where the
            operator carries it out; None where somebody else does.
        rolling: engines are being replaced.
    """

    at: float
    prefill: RoleLoad
    decode: RoleLoad
    transfer: TransferLoad = TransferLoad()
    wanted: tuple[int, int]
    came: tuple[int, int]
    ready: tuple[int, int]
    asked: tuple[int, int] | None = None
    rolling: bool = False

    @property
    def first_token(self) -> float:
        """Mean seconds to the first token of a client: both engines of a request."""
        return self.prefill.first_token + self.decode.first_token
