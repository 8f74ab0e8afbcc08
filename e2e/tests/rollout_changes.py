"""A PDCluster is changed under load, and what clients got is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from client_account import Account
from cluster_run import ClusterRun
from local_run import condition
from rollout_record import Record

ROLL_SECONDS = 1600.0  # two engines after each other, on busy cores


def patch(run: ClusterRun, spec: dict[str, Any]) -> None:
    run.kubectl("patch", "pdc", run.name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def at_rest(run: ClusterRun) -> bool:
    """Whether what was asked for is done, to the last pod."""
    found = run.get() or {}
    status = found.get("status") or {}
    seen = status.get("observedGeneration") == found["metadata"]["generation"]
    done = condition(status, "Progressing")["reason"] == "Complete"
    ready = condition(status, "Ready")["status"] == "True"
    ending = any("deletionTimestamp" in pod["metadata"] for pod in run.pods())
    return seen and done and ready and not ending


def wait_for_rest(run: ClusterRun, seconds: float = ROLL_SECONDS) -> float:
    return run.wait("rest", lambda: at_rest(run), seconds)


def wait_for_answers(run: ClusterRun, account: Account) -> None:
    run.wait("answers", lambda: len(account.sent) > 10, 120)


def changed(
    run: ClusterRun, what: str, spec: dict[str, Any], seed: int, folder: Path
) -> tuple[Account, Record]:
    """Change the spec under load. Returns when all is at rest again."""
    wait_for_rest(run)
    with Account(run, seed) as account, Record(run, account) as seen:
        wait_for_answers(run, account)
        seen.mark(what)
        patch(run, spec)
        took = wait_for_rest(run)
        seen.mark("at rest")
    told(run, f"{what}: {took:.0f} s", account, seen, folder)
    return account, seen


def told(run: ClusterRun, what: str, account: Account, seen: Record, folder: Path) -> None:
    """Print what clients got. What they got was right, and no link is between two pairing keys."""
    path = folder / f"{what.partition(':')[0].replace(' ', '-').replace(',', '')}.json"
    seen.write(path)
    print(f"{what}; {account.said()}; {path}", *account.failed[:10], sep="\n")
    assert seen.crossed == []
    good = [one for one in account.sent if not one.wrong]
    for one in (*good[:: max(1, len(good) // 20)], *[one for one in good if one.stream][:1]):
        reply = run.complete(one.prompt, role="prefill", tokens=one.tokens, ignore_eos=one.stream)
        assert reply.completion == one.answer, one.prompt


def no_outage(account: Account, seen: Record) -> None:
    assert account.failed == []
    assert seen.fewest_endpoints >= 1


def uids(run: ClusterRun) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}
