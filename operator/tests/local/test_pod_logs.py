from __future__ import annotations

from pathlib import Path

from pdcluster_operator.local import pod_logs
from pdcluster_operator.local.pod_logs import Part, PodLogs, why


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


async def read(logs: PodLogs, **part: object) -> list[str]:
    return [line.decode() async for line in logs.lines("pod", Part(**part))]  # type: ignore[arg-type]


async def test_each_line_has_the_time_of_the_look_that_found_it(tmp_path: Path) -> None:
    log, clock = tmp_path / "container.log", Clock()
    logs = PodLogs(lambda: {"pod": log}, clock)
    for line in ("first\n", "second\n", "third, lon"):
        with log.open("a") as file:
            file.write(line)
        logs.look()
        clock.now += 10
    with log.open("a") as file:
        file.write("ger\n")
    assert await read(logs, timestamps=True) == [
        "2023-11-14T22:13:20.000000Z first\n",
        "2023-11-14T22:13:30.000000Z second\n",
        "2023-11-14T22:13:50.000000Z third, longer\n",
    ]
    assert await read(logs, since=clock.now - 25) == ["second\n", "third, longer\n"]
    assert await read(logs, since=clock.now - 25, tail=1) == ["third, longer\n"]
    assert await read(logs, since=0.0) == ["first\n", "second\n", "third, longer\n"]


async def test_looks_are_bounded(tmp_path: Path, monkeypatch: object) -> None:
    log, clock = tmp_path / "container.log", Clock()
    logs = PodLogs(lambda: {"pod": log}, clock)
    for _ in range(pod_logs.MOST_LOOKS * 2 + 10):
        with log.open("a") as file:
            file.write("x\n")
        logs.look()
        clock.now += 1
    [looks] = logs._looks.values()
    assert len(looks) <= pod_logs.MOST_LOOKS
    assert looks[-1].size == log.stat().st_size
    assert await read(logs, since=clock.now - 3) == ["x\n"] * 3
    log.unlink()
    logs.look()
    assert logs._looks == {}


async def test_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "container.log"
    lines = [f"{number} {'x' * (number % 700)}\n" for number in range(2000)]
    log.write_text("".join(lines))
    logs = PodLogs(lambda: {"pod": log})
    for tail in (0, 1, 2, 500, 1999, 2000, 2001):
        assert await read(logs, tail=tail) == (lines[-tail:] if tail else [])
    log.write_text("".join(lines) + "no line feed")
    assert await read(logs, tail=2) == [lines[-1], "no line feed\n"]


DEATH = r"""
INFO 11-27 05:00:00 [utils.py:1] args: an error of no interest
(APIServer pid=7) INFO 11-27 05:00:01 [core.py:1] loading
(EngineCore pid=8) ERROR 11-27 05:00:02 [core.py:880] EngineCore failed to start.
(EngineCore pid=8) ERROR 11-27 05:00:02 [core.py:880] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-27 05:00:02 [core.py:880]   File "/x/core.py", line 9, in run
(EngineCore pid=8) ERROR 11-27 05:00:02 [core.py:880]     raise ValueError("no layer lm_head")
(EngineCore pid=8) ERROR 11-27 05:00:02 [core.py:880] ValueError: no layer lm_head
(EngineCore pid=8) Traceback (most recent call last):
(EngineCore pid=8)   File "/x/core.py", line 9, in run
(EngineCore pid=8)     raise ValueError("no layer lm_head")
(EngineCore pid=8) ValueError: no layer lm_head
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_lines_that_say_why_are_those_without_frames_and_repetitions(tmp_path: Path) -> None:
    log = tmp_path / "container.log"
    assert why(log) == []
    log.write_text("x\n" * 50_000 + DEATH)
    assert why(log) == [
        "EngineCore failed to start.",
        "ValueError: no layer lm_head",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    log.write_text("loading\n  deeper\nready\n")
    assert why(log) == ["loading", "ready"], "without an error, its last lines"
