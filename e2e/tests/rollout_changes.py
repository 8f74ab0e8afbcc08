"""A PDCluster is changed under load, and what clients got is judged."""

from __future__ import annotations

import json
import shutil
from itertools import dropwhile
from pathlib import Path
from typing import Any

from client_account import Account, Sent
from cluster_run import ClusterRun
from local_run import condition
from rollout_record import Record

from cluster.session import Cluster
from images.for_cluster import load_engine_image
from models.tiny import model_path

ROLL_SECONDS = 1600.0  # two engines after each other, on busy cores
CHANGES = ("env", "blockSize", "leaseSeconds", "image", "model", "router image")


def change(what: str, how: str, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return the change to a spec.

    ``how`` the engines are replaced chooses the value, so that the next way is a change as well.
    """
    number = ("Surge", "Recreate", "Replace").index(how)
    if what in ("image", "router image"):
        image = load_engine_image(cluster, what.replace(" ", "-") + str(number))
        return {"engine" if what == "image" else "router": {"image": image}}
    if what == "model":  # the same weights, so that the answers can be compared
        path = shutil.copytree(model_path("llama"), folder / "model")
        return {"model": {"source": {"hostPath": {"path": str(path)}}}}
    env = [{"name": "A_VARIABLE", "value": how}]
    changes = {
        "env": {"decode": {"engine": {"env": env}}},
        "blockSize": {"engine": {"blockSize": (64, 128, 64)[number]}},
        "leaseSeconds": {"transfer": {"leaseSeconds": (40, 50, 40)[number]}},
    }
    return changes[what]


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
    """Wait until of the short requests that begin from now on, the last ten are answered."""
    now = account.now()

    def answered() -> bool:
        later = [one for one in _since(account, now) if not one.stream]
        return len(later) >= 10 and not any(one.wrong for one in later[-10:])

    run.wait("answers", answered, 120)


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
        # Its pods are ready, but each node hears of that in its own time.
        wait_for_answers(run, account)
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


def served_in_the_end(account: Account, seen: Record) -> None:
    """After the change, no request fails once one was answered.

    The pods are ready, but each node hears of that in its own time. Until then requests may fail.
    """
    [rest] = [moment for moment, what in seen.marks if what == "at rest"]
    served = list(dropwhile(lambda one: one.wrong, _since(account, rest)))
    assert served
    assert [one for one in served if one.wrong] == []


def _since(account: Account, moment: float) -> list[Sent]:
    """Return what was sent after a moment and has ended, in the order of its begin."""
    later = [one for one in list(account.sent) if one.began > moment]
    return sorted(later, key=lambda one: one.began)


def uids(run: ClusterRun) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}
