"""An API server that answers 503 to everything, in the middle of a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from api_gate import Gate
from operator_runs import Operator, at_rest, cluster, create, edit, get, until
from played_nodes import PlayedNodes
from real_api import RealApi
from watched_rollout import done, found, serves

from pdcluster_operator.api.object_names import engine_of

pytestmark = pytest.mark.cluster

TWO = {"replicas": 2}
CALLS_A_SECOND = 20
"""What one operator may ask of a server that refuses everything."""


@pytest.fixture
def gate(real: RealApi) -> Iterator[Gate]:
    gate = Gate(real)
    yield gate
    gate.close()


def uids(real: RealApi, namespace: str) -> set[str]:
    kinds = ("StatefulSet", "Pod", "Deployment", "Service", "ControllerRevision")
    return {one["metadata"]["uid"] for kind in kinds for one in found(real, namespace, kind)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=pytest.mark.soak)])
def test_a_rollout_ends_well_although_the_server_refuses_everything_for_a_while(
    real: RealApi, gate: Gate, namespace: str, seconds: float
) -> None:
    operator = Operator(
        real,
        "run",
        f"--namespace={namespace}",
        f"--authority-secret={namespace}/authority",
        "--allow-host-path-models",
    )
    operator._environment["KUBECONFIG"] = str(gate.kubeconfig(real))

    def explain() -> object:
        return get(real, namespace)["status"], operator.said()

    def ended() -> bool:
        operator.start_if_ended()
        return done(real, namespace)

    def rolled(block_size: int) -> int:
        """Change the pairing key; return the number of writes until all is at rest."""
        before = real.written
        assert edit(real, namespace, {"engine": {"blockSize": block_size}})[0] == 200
        until(ended, 240, explain)
        at_rest(real, operator)
        return len(real.writes(before))

    operator.start()
    try:
        with PlayedNodes(real, namespace):
            create(real, namespace, cluster(prefill=TWO, decode=TWO))
            until(ended, 120, explain)
            at_rest(real, operator)
            undisturbed = rolled(32)

            before = real.written
            assert edit(real, namespace, {"engine": {"blockSize": 64}})[0] == 200
            until(lambda: len(found(real, namespace, "StatefulSet")) > 4, 60, explain)
            gate.refuse()
            time.sleep(1)  # a call that was on its way ends
            there, written = uids(real, namespace), real.written
            asked = len(gate.refused)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                operator.start_if_ended()
                assert there <= uids(real, namespace), "something was deleted"
                time.sleep(0.5)
            calls = len(gate.refused) - asked
            assert real.written == written
            gate.open()

            def ended_and_served() -> bool:
                serves(real, namespace)
                return ended()

            until(ended_and_served, 240, explain)
            at_rest(real, operator)
            writes = len(real.writes(before))
            print(f"{calls} calls in {seconds} s, {writes} writes, undisturbed {undisturbed}")
            assert writes <= 2 * undisturbed
            assert calls <= CALLS_A_SECOND * seconds
            engines = [engine_of(one) for one in found(real, namespace, "StatefulSet")]
            assert len(engines) == 4
            assert len({(one.role, one.revision) for one in engines if one}) == 2
            conditions = get(real, namespace)["status"]["conditions"]
            assert {one["type"]: one["status"] for one in conditions} == {
                **{one["type"]: "True" for one in conditions},
                "Progressing": "False",
            }
            assert not [one for one in conditions if "ServiceUnavailable" in str(one)]
    finally:
        operator.stop()
