"""Advice on what two real engines measured: vLLM 0.32 on CPU, one prefill and one decode engine.

``recorded_loads.json`` holds what their launchers told every 15 seconds, with a tiny model on two
slow cores that had other work. Each row is a minute: a pause, one client with short answers, twelve
clients with answers of 300 tokens, and a pause. The engines shared the cores, so these are no
measurements of speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scaling_model import goal

from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.plan.moments import Goal, Moment
from pdcluster_operator.plan.scaling.advice import Advice, Limit, Outlook, advise
from pdcluster_operator.plan.scaling.follow import role_load, transfer_load

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_loads.json").read_text())
CROWD = "twelve clients, short prompts and long answers"


def moments(wanted: tuple[int, int] = (1, 1)) -> list[tuple[str, Moment]]:
    found = []
    for row in ROWS:
        prefill, decode = (LoadReport(**row[role]) for role in ("prefill", "decode"))
        moment = Moment(
            at=row["at"],
            prefill=role_load([prefill]),
            decode=role_load([decode]),
            transfer=transfer_load([decode]),
            wanted=wanted,
            came=(1, 1),
            ready=(1, 1),
        )
        found.append((row["phase"], moment))
    return found


def advised(wanted: Goal) -> list[tuple[str, Advice]]:
    seen = moments()
    return [
        (phase, advise([moment for _, moment in seen[: n + 1]], wanted))
        for n, (phase, _) in enumerate(seen)
    ]


def test_engines_that_hold_the_targets_stay_as_they_are() -> None:
    for _, advice in advised(goal(ttft=2.0, itl=0.040)):
        assert (advice.prefill, advice.decode) == (1, 1)
        assert (advice.limit, advice.outlook) == (Limit.NONE, Outlook.MET)


def test_a_crowd_that_decode_answers_too_slowly_gets_decode_engines_and_no_prefill_engine() -> None:
    found = advised(goal(ttft=2.0, itl=0.008))
    assert {advice.decode for phase, advice in found if phase == CROWD} == {2}
    assert {advice.limit for phase, advice in found if phase == CROWD} == {Limit.DECODE}
    assert {advice.decode for phase, advice in found if phase == "one short client"} == {1}
    assert {advice.prefill for _, advice in found} == {1}


def test_a_target_below_what_one_request_takes_alone_is_said_to_be_unreachable() -> None:
    found = advised(goal(ttft=None, itl=0.003))
    lonely = [advice for phase, advice in found if phase == "one short client"]
    assert {advice.outlook for advice in lonely} == {Outlook.UNREACHABLE}


def test_shares_of_time_are_shares_and_grow_with_the_load() -> None:
    seen = moments()
    for _, moment in seen:
        assert 0 <= moment.prefill.busy <= 1
        assert 0 <= moment.decode.busy <= 1
        assert moment.transfer.busy(1) < 0.5
    by_phase = {phase: moment.decode.busy for phase, moment in seen}
    assert by_phase["idle again"] == 0
    assert by_phase["one short client"] < by_phase[CROWD]
