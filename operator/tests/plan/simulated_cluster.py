"""A cluster of plain dicts: applies plans, makes pods, lets launchers speak.

It plays the API server, the controllers and the launchers as far as the planner can see
them, and takes no part in any decision.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable
from copy import copy, deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar
from zlib import crc32

import pytest
from hypothesis import settings
from msgspec import structs

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    LinkReport,
    LinksReport,
    LinkState,
    PromptsReport,
)
from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.conditions import Verdict, timestamp
from pdcluster_operator.api.object_names import (
    CERTIFICATES_ANNOTATION,
    ROLE_LABEL,
    ROTATE_TICKET_KEY_ANNOTATION,
    engine_of,
)
from pdcluster_operator.plan.builders import engine_objects
from pdcluster_operator.plan.connectors import is_shared_connector
from pdcluster_operator.plan.forecast.world import ready_engine, running
from pdcluster_operator.plan.memo import Memo
from pdcluster_operator.plan.moments import Moment
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.rollout import targets
from pdcluster_operator.plan.status.progress import with_failure
from pdcluster_operator.plan.types import (
    Apply,
    ConnectorBundle,
    HeldCertificates,
    Observed,
    Plan,
    Step,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
    needs,
    stages,
)

GRACE = 30  # seconds that a pod has to end
START = 1_800_000_000.0
CHECKED = settings().max_examples  # percent of what memos return: 25 in `make fast`
CONNECTOR = ConnectorBundle("c0ffee" + "0" * 58, b"PK-not-really-a-zip")


def manifest(name: str = "llama", **spec: Any) -> dict[str, Any]:
    spec.setdefault("model", {"source": {"hostPath": {"path": "/models/tiny"}}})
    spec.setdefault("transfer", {"device": "CPU"})
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": name, "namespace": "default", "uid": "uid-0", "generation": 1},
        "spec": spec,
    }


def verified_link(prefill: str, engine_id: str) -> LinkReport:
    """Return what a decode launcher reports of a link whose canary moved 4,096 bytes."""
    canary = CanaryReport(CanaryState.PASSED, 4096)
    return LinkReport(prefill, engine_id, LinkState.ESTABLISHED, canary=canary)


def copied(value: Any) -> Any:
    """Copy what an API server would send anew; copy.deepcopy takes five times as long."""
    if type(value) is dict:
        return {key: part if type(part) is str else copied(part) for key, part in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)([copied(part) for part in value])
    return value


def kept(kind: str, live: dict[str, Any]) -> dict[str, Any]:
    """Return an object as the store keeps it."""
    # But for connectors: theirs are not what their names say.
    return live if kind == "ConfigMap" else slim(live, BY_NAME[kind])


class CheckedMemo(Memo):
    """A memo that computes again what it remembers, to see that a memo changes no plan.

    That is half of the work of planning. So `make fast` computes a quarter again, as it draws a
    quarter of the random examples: always the first result of each function in a file of tests.
    """

    checked: ClassVar[set[tuple[str, Hashable]]] = set()  # file and function

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def get(self, name: Hashable, inputs: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        computed = []

        def compute_new(*inputs: Any) -> Any:
            computed.append(compute(*inputs))
            return computed[0]

        result = super().get(name, inputs, compute_new)
        self._asked += 1
        if not computed and self._is_drawn(name):
            assert result == compute(*inputs), f"{name} depends on more than its inputs"
        return result

    def _is_drawn(self, name: Hashable) -> bool:
        file, _, _ = os.environ["PYTEST_CURRENT_TEST"].partition("::")
        function = name[0] if isinstance(name, tuple) else name
        if (file, function) not in self.checked:
            self.checked.add((file, function))
            return True
        return crc32(f"{name} {self._asked}".encode()) % 100 < CHECKED


class SimulatedCluster:
    def __init__(self, cluster: dict[str, Any]) -> None:
        self.cluster = copied(cluster)
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.shared: dict[str, dict[str, Any]] = {}  # ConfigMaps of the whole namespace, by name
        self.pods: dict[str, dict[str, Any]] = {}
        self.engines: dict[str, EngineReport] = {}
        self.links: dict[str, LinksReport] = {}
        self.connector = CONNECTOR
        self.now = START
        self.counter = 0
        self.ticket_key: str | None = None
        self.certificates = HeldCertificates("authority")
        self.scaler: dict[str, Any] | None = None
        self.loads: dict[str, LoadReport] = {}
        self.moments: tuple[Moment, ...] = ()
        self.memo = CheckedMemo()
        self.refused = ""
        self.refuses: Callable[[Step], bool] = lambda _: False
        self.looks: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self.unread: Verdict | None = None
        self.downloads = True  # whether a Job ends well as soon as it is made

    def observed(self) -> Observed:
        return Observed(
            copied(self.cluster),
            tuple(self._look(key, child) for key, child in self.children.items()),
            tuple(self._look(("Pod", name), pod) for name, pod in self.pods.items()),
            dict(self.engines),
            dict(self.links),
            self.connector,
            self.ticket_key,
            self.certificates,
            scaler=copied(self.scaler),
            connectors=tuple(copied(list(self.shared.values()))),
            unread=self.unread is not None,
            loads=dict(self.loads),
            moments=self.moments,
        )

    def _look(self, name: tuple[str, str], live: dict[str, Any]) -> dict[str, Any]:
        """Return an object as the store keeps it: the same one until it changes."""
        look = self.looks.get(name)
        if look is None or look[0] != live:
            copy = copied(live)
            look = self.looks[name] = (copy, kept(name[0], copy))
        return look[1]

    def plan(self) -> Plan:
        plan, why = make_plan(self.observed(), self.now, self.memo), self.unread
        if why is None:
            return plan
        # The reconciler says so.
        status = with_failure(plan.status, self.cluster, why.reason, why.message, self.now)
        return replace(plan, status=status)

    def step(self) -> Plan:
        """Plan, carry out, write the status."""
        plan = self.plan()
        failed: list[Step] = []  # the executor says so in the status
        for stage in stages(plan.steps):
            out = [one for one in stage if any(needs(one, other) for other in failed)]
            failed += out
            for step in [one for one in stage if one not in out]:
                if (isinstance(step, TryOut) and self.refused) or self.refuses(step):
                    failed.append(step)
                else:
                    self.perform(step)
        self.cluster["status"] = copied(dict(plan.status))
        for condition in plan.status["conditions"]:
            message = condition["message"]
            assert message == message.strip(" :;,"), f"a part is missing: {condition}"
        self.moments = plan.moments
        for scale in plan.scales:
            if scale.kind == "PDCluster":
                self.edit(decode={**self.cluster["spec"]["decode"], "replicas": scale.replicas})
            elif self.scaler is not None:
                self.scaler["spec"]["replicas"] = scale.replicas
        if plan.scaler is not None and self.scaler is not None:
            self.scaler["status"] = copied(dict(plan.scaler.status))
        self.now += 1
        return plan

    def settle(self) -> Plan:
        """Step until nothing is left to do."""
        for _ in range(20):
            plan = self.step()
            if not plan.steps and not plan.scales:
                return plan
        raise AssertionError(f"still not settled: {plan.steps}")

    def perform(self, step: Step) -> None:
        if isinstance(step, WriteTicketKey):
            assert step.rotate == (self.ticket_key is not None)
            rotation = step.manifest["metadata"]["annotations"][ROTATE_TICKET_KEY_ANNOTATION]
            self.ticket_key = rotation
            return
        if isinstance(step, WriteCertificates):
            issue = step.manifest["metadata"]["annotations"][CERTIFICATES_ANNOTATION]
            held = replace(self.certificates, issue=issue, engines=frozenset(step.engines))
            assert held != self.certificates, "nothing to write"
            self.certificates = held
            return
        if isinstance(step, Apply | TryOut):
            self._apply(copied(dict(step.manifest)))
            return
        if step.kind == "Pod":
            del self.pods[step.name]
            return
        child = self.children[step.kind, step.name]
        assert child["metadata"]["uid"] == step.uid
        assert child["metadata"]["resourceVersion"] == step.resource_version
        del self.children[step.kind, step.name]
        if step.kind == "StatefulSet":
            for name in [n for n, pod in self.pods.items() if engine_of(pod) == engine_of(child)]:
                ends = timestamp(self.now + GRACE)
                self.pods[name]["metadata"].setdefault("deletionTimestamp", ends)

    def _apply(self, wanted: dict[str, Any]) -> None:
        self.counter += 1
        key = (wanted["kind"], wanted["metadata"]["name"])
        new = {"metadata": {"uid": f"uid-{self.counter}"}}
        if is_shared_connector(wanted):
            old = self.shared.get(key[1], new)
        else:
            old = self.children.get(key, new)
        # As the API server does it.
        assert wanted.get("data") == old.get("data", wanted.get("data")), f"{key} is immutable"
        wanted["metadata"]["uid"] = old["metadata"]["uid"]
        wanted["metadata"]["resourceVersion"] = str(self.counter)
        # What an API server adds of its own.
        wanted["metadata"]["managedFields"] = [{"manager": "pdcluster-operator"}]
        if is_shared_connector(wanted):
            self.shared[key[1]] = wanted
            return
        wanted.setdefault("status", old.get("status", {}))
        if key[0] == "Job" and self.downloads:
            wanted["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.children[key] = wanted

    def reap(self) -> None:
        """Remove pods that were being deleted."""
        self.pods = {
            name: pod
            for name, pod in self.pods.items()
            if not pod["metadata"].get("deletionTimestamp")
        }

    def make_pods(self) -> None:
        """Do the controllers' work: every wanted pod exists, none has a container yet."""
        for (kind, name), child in self.children.items():
            if kind != "StatefulSet":
                continue
            for node in range(child["spec"]["replicas"]):
                pod = f"{name}-{node}"
                if pod not in self.pods:
                    self.counter += 1
                    labels = dict(child["spec"]["template"]["metadata"]["labels"])
                    self.pods[pod] = {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {
                            "name": pod,
                            "namespace": "default",
                            "uid": f"pod-{self.counter}",
                            "resourceVersion": str(self.counter),
                            "labels": labels,
                        },
                        "spec": copied(child["spec"]["template"]["spec"]),
                        "status": {"phase": "Pending"},
                    }

    def run_pods(self) -> None:
        """Do the scheduler's work and the kubelet's: every pod has a node, runs and is ready."""
        self.make_pods()
        for number, pod in enumerate(self.pods.values()):
            pod["spec"].setdefault("nodeName", "node")
            pod["status"] = running(f"10.0.0.{number + 1}")

    def leaders(self, role: str) -> list[Any]:
        names = [
            engine_of(child)
            for (kind, _), child in sorted(self.children.items())
            if kind == "StatefulSet" and child["metadata"]["labels"][ROLE_LABEL] == role
        ]
        return [name for name in names if name is not None]

    def speak(self) -> None:
        """Let every launcher report a ready engine."""
        for role in ("prefill", "decode"):
            for name in self.leaders(role):
                self.engines[name.logical] = ready_engine(name, "0123456789abcdef")

    def link(self, **changes: Any) -> None:
        """Let every decode launcher report established links with passed canaries."""
        for decode in self.leaders("decode"):
            measured: dict[str, Any] = {"shards": "1/1", "bytes_per_second": 5e9, **changes}
            rows = [
                structs.replace(
                    verified_link(prefill.logical, self.engines[prefill.logical].engine_id),
                    **measured,
                )
                for prefill in self.leaders("prefill")
            ]
            self.links[decode.logical] = LinksReport(decode.logical, "any", tuple(rows))

    def count_prompts(self, prompts: int, local: int = 0, cause: str = "NoTicket") -> None:
        """Let every decode launcher report the prompts of its last minutes."""
        told = PromptsReport(prompts, local, cause)
        for decode, links in self.links.items():
            self.links[decode] = structs.replace(links, prompts=told)

    def route(self) -> None:
        """Let the router's Deployment have a ready pod."""
        for (kind, _), child in self.children.items():
            if kind == "Deployment":
                wanted = child["spec"]["replicas"]
                child["status"] = {"availableReplicas": wanted, "updatedReplicas": wanted}

    def others_act(self) -> None:
        """Pods that go are gone, new ones run, links come and routers follow."""
        self.reap()
        self.run_pods()
        self.speak()
        self.link()
        self.route()

    def bring_up(self) -> Plan:
        """From nothing to Ready."""
        self.step()
        self.run_pods()
        self.speak()
        self.step()
        self.link()
        self.route()
        return self.settle()

    def twin(self) -> SimulatedCluster:
        """Return a cluster that stands where this one stands, and goes its own way."""
        made = copy(self)
        made.cluster, made.scaler = copied(self.cluster), copied(self.scaler)
        made.children, made.shared = copied(self.children), copied(self.shared)
        made.pods, made.engines, made.links = copied(self.pods), {**self.engines}, {**self.links}
        made.looks = {}
        made.memo = CheckedMemo()
        made.memo._held = {**self.memo._held}
        return made

    def edit(self, **spec: Any) -> None:
        self.cluster["spec"].update(spec)
        self.cluster["metadata"]["generation"] += 1

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.cluster["status"]["conditions"] if c["type"] == kind)


def render_other_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator render engines' pods as a later version would."""
    built = engine_objects.build_engine_pod

    def build(*arguments: Any) -> dict[str, Any]:
        pod = deepcopy(built(*arguments))
        pod["spec"]["containers"][0]["args"].insert(0, "--of-a-later-version")
        return pod

    monkeypatch.setattr(targets, "build_engine_pod", build)


def brought_up(**spec: Any) -> SimulatedCluster:
    """Return a cluster with this spec that was brought up from nothing.

    A test that changes how the operator plans has to do this later, or brings up its own cluster:
    a cluster of this spec may have been brought up before.
    """
    return _brought_up(json.dumps(spec)).twin()


@lru_cache(64)
def _brought_up(spec: str) -> SimulatedCluster:
    """Once for all tests that begin so: half of what most of them take."""
    world = SimulatedCluster(manifest(**json.loads(spec)))
    world.bring_up()
    return world
