"""An API server, controllers, nodes and launchers around one PDCluster, to be handled roughly.

The operator's own reconciler, store and executor work on it. Everybody else acts in rounds, and
dice say what comes when. Anybody may change anything: the hands are in ``rough_hands.py``, and
``served_truth.py`` judges. A server-side apply keeps what others added to an object.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from msgspec import structs
from simulated_cluster import START, copied, manifest, verified_link

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinksReport
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, WATCHED, Kind, slim
from pdcluster_operator.adapters.api_server.namespace_leases import NamespaceLeases, _Claim
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import (
    CERTIFICATES_ANNOTATION,
    CERTIFICATES_HASH_ANNOTATION,
    CLUSTER_LABEL,
    ENGINE_LABEL,
    POD_INDEX_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    certificates_name,
    engine_of,
    labels_of,
    pairing_key_of,
    ticket_key_name,
)
from pdcluster_operator.plan.forecast.world import ready_engine, running
from pdcluster_operator.plan.name_conflicts import name_conflict, why_not_applied
from pdcluster_operator.plan.objects.ownership import controller_of, controller_uid
from pdcluster_operator.plan.rollout.wanted_children import USED_UP, refusal
from pdcluster_operator.plan.types import (
    ConnectorBundle,
    Delete,
    HeldCertificates,
    Place,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime.cluster_secrets import held_ticket_key, with_a_new_key
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Key
from pdcluster_operator.runtime.reconcile import Reconciler
from pdcluster_operator.runtime.store import Store

Manifest = dict[str, Any]
Identity = tuple[str, str]
Watched = Callable[[str, Identity], AbstractContextManager[None]]
NAME = "llama"
CLUSTER = ("PDCluster", NAME)
SCALER = ("PrefillScaler", NAME)
LEASE = ("Lease", "pdcluster-operator")
GRACE = 30.0
STRANGER = "stranger"  # UID of an owner that is not in the world, and stays
ROLES = ("prefill", "decode")
TELLING = (CLUSTER_LABEL, ROLE_LABEL, REVISION_LABEL, ENGINE_LABEL)  # whose a pod is
FORBIDDEN = "--kv-transfer-config={}"  # a flag that no spec may have
MOST_REPLICAS = 1000
ATOMIC = ("selector", "podSelector", "matchLabels")  # an apply replaces these as a whole


class Killed(BaseException):
    """The operator's process is gone; what it has begun is not finished."""


class World:
    """One PDCluster and all that is around it.

    Attributes:
        seconds: the API server's clock.
        skew: by how much a load balancer's page had another date, in seconds.
        refusals: the error that each write of a kind ends with.
        full: kinds of which no object can be created, because a quota is used up.
        routers: how many routers the spec asks for that was accepted last.
        clients: whom the spec lets in that was accepted last; empty for everybody.
        lives: how many more writes the operator's process makes; None for no end.
        sick: StatefulSets whose engines do not come up.
        stuck: pods that do not go, because their node is gone.
        last_writer: who wrote each object last, ``operator`` or ``hand``.
        past: each former content of each object.
        writes: what the operator wrote.
        hit: what others deleted or changed.
        error: how the last reconcile failed; empty if it did not.
        watched: surrounds each action of the operator and of the controllers.
    """

    monotonic = 1000.0  # of all worlds
    namespace = "default"
    simulated = True  # others may also do what this API server alone makes simple
    me = ""  # who holds the Lease

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.dice: Random | None = None
        self.seconds, self.skew = START, 0.0
        self.objects: dict[Identity, Manifest] = {}
        self.applied: dict[Identity, Manifest] = {}
        self.past: list[Manifest] = []
        self.last_writer: dict[Identity, str] = {}
        self.refusals: dict[str, ApiError] = {}
        self.full: set[str] = set()
        self.refused_template = ""
        self.lives: int | None = None
        self.routers, self.clients = 1, ()
        self.sick: set[str] = set()
        self.stuck: set[str] = set()
        self.verified: set[tuple[str, str]] = set()  # UIDs of the leading pods of each pair
        self.writes: list[str] = []
        self.hit: set[Identity] = set()
        self.error, self.me = "", "nobody"
        self.connector = connector_of(b"PK")
        self.version = 0
        self.watched: Watched = lambda *_: nullcontext()
        self.write(manifest(NAME, **copied(dict(spec))), by="hand")
        self.start()

    def twin(self) -> World:
        """Return a world that stands where this one stands, and goes its own way."""
        made = copy(self)
        made.objects, made.applied = copied(self.objects), copied(self.applied)
        made.past, made.last_writer = [*self.past], {**self.last_writer}
        made.refusals, made.full, made.sick, made.stuck = {}, set(), set(), set()
        made.verified, made.writes, made.hit = {*self.verified}, [], set()
        made.watched = lambda *_: nullcontext()
        made.start()
        return made

    # The API server.

    def write(self, wanted: Manifest, by: str) -> Manifest:
        """Create an object, or replace it, but for its status."""
        name = identity(wanted)
        live, made = self.objects.get(name), copied(wanted)
        self.version += 1
        metadata, old = made["metadata"], (live or {"metadata": {}})["metadata"]
        metadata["uid"] = old.get("uid") or f"uid-{self.version}"
        metadata.setdefault("namespace", self.namespace)
        metadata["creationTimestamp"] = old.get("creationTimestamp") or timestamp(self.seconds)
        changed = live is None or live.get("spec") != made.get("spec")
        metadata["generation"] = int(old.get("generation") or 0) + changed
        metadata["resourceVersion"] = str(self.version)
        made["status"] = (live or {}).get("status") or made.get("status") or {}
        self.objects[name] = made
        self.last_writer[name] = by
        if name[0] not in ("Pod", "PDCluster", "Lease"):
            self.past.append(copied(made))
        return copied(made)

    def remove(self, name: Identity) -> None:
        """Delete an object and what it owns. A pod takes its time to end."""
        live = self.objects[name]
        if name[0] == "Pod":
            if not live["metadata"].get("deletionTimestamp"):
                self.touch(name)["metadata"]["deletionTimestamp"] = timestamp(self.seconds + GRACE)
            return
        del self.objects[name]
        uid = live["metadata"]["uid"]
        for other in [n for n, one in self.objects.items() if controller_uid(one) == uid]:
            if other in self.objects:
                self.remove(other)

    def touch(self, name: Identity) -> Manifest:
        """Return an object to change in place: the watch shows it."""
        self.version += 1
        live = self.objects[name] = copied(self.objects[name])
        live["metadata"]["resourceVersion"] = str(self.version)
        return live

    def live(self, kind: str, name: str) -> Manifest | None:
        return copied(self.objects.get((kind, name)))

    def of_kind(self, *kinds: str) -> Iterator[Manifest]:
        return (one for (kind, _), one in sorted(self.objects.items()) if kind in kinds)

    @property
    def cluster(self) -> Manifest:
        return self.objects[CLUSTER]

    def is_ending(self) -> bool:
        """Whether somebody has deleted the PDCluster, and it is still there."""
        return bool(self.cluster["metadata"].get("deletionTimestamp"))

    @property
    def uid(self) -> str:
        return str(self.cluster["metadata"]["uid"])

    def edit(self, **spec: Any) -> None:
        """Change the PDCluster's spec; a field that is None goes."""
        cluster = copied(self.cluster)
        cluster["spec"] |= spec
        cluster["spec"] = {name: one for name, one in cluster["spec"].items() if one is not None}
        self.write(cluster, by="hand")

    def create_again(self, *, orphans: bool = False) -> None:
        """Somebody deletes the PDCluster and creates one of the same name and spec.

        Args:
            orphans: what it owned stays, and is nobody's.
        """
        broken, old = is_broken(self), self.objects.pop(CLUSTER)
        uid, spec = old["metadata"]["uid"], old["spec"]
        for name in [n for n, one in self.objects.items() if controller_uid(one) == uid]:
            if orphans:
                self.touch(name)["metadata"]["ownerReferences"] = []
            elif name in self.objects:
                self.remove(name)
        if broken:
            self.routers, self.clients = 0, ()
        self.write(manifest(NAME, **copied(spec)), by="hand")

    def condition(self, kind: str) -> Manifest:
        found = (self.cluster.get("status") or {}).get("conditions") or ()
        return next((one for one in found if one["type"] == kind), {})

    def _admit(self, kind: str, name: str = "") -> None:
        """Refuse a write, or end the operator in its place; ``name`` of an object to apply."""
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                raise Killed
        if kind in self.refusals:
            raise self.refusals[kind]
        if name and kind in self.full and (kind, name) not in self.objects:
            raise ApiError("Forbidden", f"{USED_UP}: no more of {kind}")

    def _apply(self, wanted: Manifest, uid: str) -> Manifest:
        name = identity(wanted)
        live = self.objects.get(name)
        theirs = live is not None and controller_uid(live) not in ("", controller_uid(wanted))
        other = live is not None and uid != live["metadata"]["uid"]
        # Two controllers are invalid, another UID is a conflict: so the adapter looks at it.
        why = why_not_applied(wanted, live) if theirs or other else None
        if why is not None:
            raise ApiError(why.reason, why.message)
        made = copied(wanted)
        if other and name[0] == "ControllerRevision":  # the adapter has looked at it
            made["data"] = copied(live["data"])
        if live is not None and name[0] in ("ControllerRevision", "ConfigMap"):
            assert live.get("data") == made.get("data", live.get("data")), f"{name} is immutable"
        if live is not None:
            made = merged(live, self.applied.get(name, {}), made)
        self.applied[name] = copied(wanted)
        self.writes.append(f"apply {' '.join(name)}")
        with self.watched("apply", name):
            return self.write(made, by="operator")

    # The operator's port.

    async def read(self, kind: str, namespace: str, name: str) -> Any:
        return self.live(kind, name)

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        return held_ticket_key(self._own_secret(ticket_key_name(NAME), uid))

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        return _held(self._own_secret(certificates_name(NAME), uid))

    def _own_secret(self, name: str, uid: str) -> Manifest | None:
        live = self.live("Secret", name)
        if live is not None and controller_uid(live) != uid:
            why = name_conflict("Secret", name)
            raise ApiError(why.reason, why.message)
        return live

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        self._admit(*identity(step.manifest))
        live = self.live("Secret", step.manifest["metadata"]["name"])
        if (why := why_not_applied(step.manifest, live)) is not None:
            raise ApiError(why.reason, why.message)
        if live is not None and not step.rotate and held_ticket_key(live) is not None:
            raise Conflict("the Secret is there already")
        self.writes.append("the ticket key")
        with self.watched("apply", identity(step.manifest)):
            self.write(
                {"apiVersion": "v1", "kind": "Secret", **with_a_new_key(step, live)}, "operator"
            )

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        self._admit("Secret", step.manifest["metadata"]["name"])
        metadata, data = copied(dict(step.manifest["metadata"])), dict.fromkeys(step.engines, "x")
        metadata["annotations"][CERTIFICATES_HASH_ANNOTATION] = json.dumps(data)
        named = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        return _held(self._apply(named, step.uid))

    async def apply(self, wanted: Mapping[str, Any], uid: str = "") -> Manifest:
        self._admit(*identity(wanted))
        return self._apply(dict(wanted), uid)

    async def try_out(self, step: TryOut) -> None:
        if self.refused_template:
            raise ApiError("TemplateRefused", self.refused_template)
        if "StatefulSet" in self.full and (why := refusal(step, "StatefulSet", USED_UP)):
            raise ApiError("TemplateRefused", why)

    async def delete(self, step: Delete) -> None:
        self._admit(step.kind)
        name = (step.kind, step.name)
        if (live := self.objects.get(name)) is None:
            return
        metadata = live["metadata"]
        if (step.uid, step.resource_version) != (metadata["uid"], metadata["resourceVersion"]):
            raise Conflict(f"{name} changed since it was read")
        self.writes.append(f"delete {' '.join(name)}")
        with self.watched("delete", name):
            self.remove(name)

    async def write_status(
        self, key: Key, uid: str, status: Any, version: str = "", kind: str = "PDCluster"
    ) -> None:
        if kind == "PrefillScaler":
            live = self.objects.get(SCALER)
            if live is not None and live["metadata"]["uid"] == uid:
                self.touch(SCALER)["status"] = copied(dict(status))
            return
        self._admit("PDCluster")
        if uid == self.uid:
            self.writes.append("status")
            self.touch(CLUSTER)["status"] = copied(dict(status))

    async def publish(self, cluster: Any, events: Any) -> None:
        list(events)

    # The operator.

    def start(self, *, killed: bool = False) -> None:
        """Start an operator: it remembers nothing.

        Args:
            killed: the one before has not given its Lease back.
        """
        self.lives = None
        if not killed:
            self._give_back()
        self.me = f"operator-{self.version}"
        self.version += 1
        self.leases = NamespaceLeases(
            cast("Any", Leases(self)), LEASE[1], self.me, clock=lambda: World.monotonic
        )
        self.claim = self.leases._claims[self.namespace] = _Claim(self.namespace)
        self.shown: dict[Identity, Manifest] = {}
        self.store = Store(lambda: World.monotonic)
        self.reconciler = Reconciler(
            store=self.store,
            api_server=self,
            monitor=self._launchers(),
            events=self,
            connector=self.connector,
            clock=lambda: self.seconds + self.skew,
            place=Place(),
            may_write=lambda key: self.leases.holds(key.namespace),
            queued=lambda: 0,
        )
        self.reconciler._secrets._clock = lambda: World.monotonic

    async def _hold(self) -> None:
        """Renew the Lease, or try to get it."""
        await self.leases._try(self.claim)

    def _give_back(self) -> None:
        if self.holder() == self.me:
            self.touch(LEASE)["spec"]["holderIdentity"] = ""

    def holder(self) -> str:
        """Who holds the Lease; empty for nobody."""
        spec = self.objects.get(LEASE, {"spec": {}})["spec"]
        return str(spec.get("holderIdentity") or "")

    def upgrade(self) -> None:
        """Start another version, which brings another connector."""
        self.connector = connector_of(self.connector.data + b"'")
        self.start()

    def _launchers(self) -> Any:
        def nothing(*_: object) -> None:
            return

        return SimpleNamespace(
            follow=nothing,
            assign=nothing,
            route=nothing,
            dismiss=nothing,
            forget=nothing,
            followed_seconds=lambda _: 1e9,
            all_heard=lambda _: True,
            engines=lambda _: self.engine_reports(),
            links=lambda _: self.link_reports(),
            loads=lambda _: {},
        )

    async def reconcile(self) -> None:
        """Let the operator look once. All watches have reported what there is."""
        self._report()
        if not (is_broken(self) or self.is_ending()):
            self.routers = routers_in(self.cluster["spec"])
            self.clients = (self.cluster["spec"].get("router") or {}).get("allowFrom") or ()
        await self._hold()
        self.error = ""
        try:
            await self.reconciler.reconcile(Key(self.namespace, NAME))
        except ApiError as error:
            self.error = f"{error.reason}: {error}"
        except Killed:
            self.error = "killed"
            self.start(killed=True)

    def _report(self) -> None:
        for child in list(self.of_kind("Deployment")):
            self._count_routers(child)
        seen = {name: one for name, one in self.objects.items() if is_watched(one)}
        for name, one in self.shown.items():
            if name not in seen or seen[name]["metadata"]["uid"] != one["metadata"]["uid"]:
                self.store.drop(slim(one, BY_NAME[name[0]]))
        for name, one in seen.items():
            if self.shown.get(name) is not one:
                self.store.put(slim(copied(one), BY_NAME[name[0]]))
        self.shown = seen

    # Everybody else.

    def turn(self, seconds: float = 5.0) -> None:
        """Controllers, kubelets and engines do what is to be done, each by chance or at once."""
        self.seconds += seconds
        World.monotonic += seconds
        for pod in list(self.of_kind("Pod")):
            self._kubelet(pod)
        uids = {one["metadata"]["uid"] for one in self.objects.values()}
        for name, one in list(self.objects.items()):
            if (owner := controller_uid(one)) and owner not in uids and owner != STRANGER:
                self.remove(name)  # by the garbage collector
        for child in list(self.of_kind("StatefulSet", "Deployment")):
            self._release_pods(child)
            if self._happens():
                (self._engine_pods if child["kind"] == "StatefulSet" else self._routers)(child)
        self._move_kv()

    def _move_kv(self) -> None:
        """Let pairs of engines find out that KV moves between them."""
        up = self.engines_up()
        uids = {name: self.objects["Pod", f"{name}-0"]["metadata"]["uid"] for name in up}
        for decode in (name for name, one in up.items() if one["role"] == "decode"):
            for prefill in (name for name, one in up.items() if one["role"] == "prefill"):
                if up[prefill]["key"] == up[decode]["key"] and self._happens():
                    self.verified.add((uids[prefill], uids[decode]))

    async def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.turn(seconds)

    async def flush(self) -> None:
        """Return when all that others did is done."""

    def _happens(self) -> bool:
        return self.dice is None or self.dice.random() < 0.7

    def _kubelet(self, pod: Manifest) -> None:
        name = identity(pod)
        if pod["metadata"].get("deletionTimestamp"):
            if name[1] not in self.stuck and self._happens():
                self._end_pod(name)
            return
        if not pod["status"].get("podIP") and self._has_secrets(pod) and self._happens():
            self._run_pod(name, running(f"10.0.{self.version % 200}.{len(self.objects) % 200}"))

    def _has_secrets(self, pod: Manifest) -> bool:
        """Whether what a pod mounts is there."""
        mounted = [volume.get("secret") for volume in pod["spec"].get("volumes") or ()]
        wanted = [one["secretName"] for one in mounted if one and not one.get("optional")]
        return all(("Secret", one) in self.objects for one in wanted)

    def _end_pod(self, name: Identity) -> None:
        del self.objects[name]

    def _run_pod(self, name: Identity, status: Manifest) -> None:
        live = self.touch(name)
        live["spec"]["nodeName"], live["status"] = "node", status

    def lags(self, child: Manifest) -> bool:
        """Whether a Deployment counts a pod that its selector does not match any more."""
        wanted, uid = child["spec"]["selector"]["matchLabels"].items(), child["metadata"]["uid"]
        own = [one for one in self.of_kind("Pod") if controller_uid(one) == uid]
        return not all(wanted <= (one["metadata"].get("labels") or {}).items() for one in own)

    def _release_pods(self, child: Manifest) -> None:
        """A controller lets go of the pods that its selector does not match any more."""
        wanted, uid = child["spec"]["selector"]["matchLabels"].items(), child["metadata"]["uid"]
        for pod in [one for one in self.of_kind("Pod") if controller_uid(one) == uid]:
            if not wanted <= (pod["metadata"].get("labels") or {}).items():
                self.touch(identity(pod))["metadata"]["ownerReferences"] = []

    def _engine_pods(self, child: Manifest) -> None:
        name, spec = child["metadata"]["name"], child["spec"]
        made_from = f"{name}-{zlib.crc32(json.dumps(spec['template'], sort_keys=True).encode()):x}"
        status = {
            "observedGeneration": child["metadata"]["generation"],
            "updateRevision": made_from,
        }
        if child["status"] != status:
            self.touch(("StatefulSet", name))["status"] = status
        uid = child["metadata"]["uid"]
        for node in range(spec["replicas"]):
            if ("Pod", f"{name}-{node}") not in self.objects:
                labels = {POD_INDEX_LABEL: str(node), "controller-revision-hash": made_from}
                self._pod(child, f"{name}-{node}", labels)
        for pod in [one for one in self.of_kind("Pod") if controller_uid(one) == uid]:
            if int(pod["metadata"]["name"].rpartition("-")[2]) >= spec["replicas"]:
                with self._of(child):
                    self.remove(identity(pod))

    def _routers(self, child: Manifest) -> None:
        """Roll a Deployment: new pods first, then the old ones go."""
        replicas = child["spec"]["replicas"]
        own, new, made_from = self._router_pods(child)
        for _ in range(replicas - len(new)):
            labels = {"pod-template-hash": made_from}
            self._pod(child, f"{child['metadata']['name']}-{made_from}-{self.version}", labels)
        surplus = new[replicas:]
        if len(new) >= replicas and all(map(is_up, new)):
            surplus += [one for one in own if one not in new]
        for pod in surplus:
            with self._of(child):
                self.remove(identity(pod))

    def _router_pods(self, child: Manifest) -> tuple[list[Manifest], list[Manifest], str]:
        """Return a Deployment's pods that stay, those of its template, and a hash of that."""
        text, uid = json.dumps(child["spec"]["template"], sort_keys=True), child["metadata"]["uid"]
        made_from = f"{zlib.crc32(text.encode()):x}"
        own = [
            one
            for one in self.of_kind("Pod")
            if controller_uid(one) == uid and not one["metadata"].get("deletionTimestamp")
        ]
        new = [
            one for one in own if one["metadata"]["labels"].get("pod-template-hash") == made_from
        ]
        return own, new, made_from

    def _count_routers(self, child: Manifest) -> None:
        own, new, _ = self._router_pods(child)
        status = {
            "observedGeneration": child["metadata"]["generation"],
            "replicas": len(own),
            "updatedReplicas": len(new),
            "availableReplicas": len([one for one in own if is_up(one)]),
        }
        if child["status"] != status:
            self.touch(identity(child))["status"] = status

    def _of(self, child: Manifest) -> AbstractContextManager[None]:
        """Surround what a controller does for an object that the operator wrote last."""
        ours = self.last_writer.get(identity(child)) == "operator"
        return self.watched("follow", identity(child)) if ours else nullcontext()

    def _pod(self, child: Manifest, name: str, labels: Mapping[str, str]) -> None:
        template = child["spec"]["template"]
        owner = {
            "apiVersion": child["apiVersion"],
            "kind": child["kind"],
            "name": child["metadata"]["name"],
            "uid": child["metadata"]["uid"],
            "controller": True,
        }
        metadata = {
            "name": name,
            "labels": {**template["metadata"]["labels"], **labels},
            "ownerReferences": [owner],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.write({**pod, "status": {"phase": "Pending"}}, by="controller")

    def engines_up(self) -> dict[str, dict[str, str]]:
        """Return role and pairing key of each engine that can serve, by StatefulSet's name."""
        found = {}
        for pod in self.of_kind("Pod"):
            labels = pod["metadata"].get("labels") or {}
            name = str(labels.get(ENGINE_LABEL, ""))
            ours = controller_of(pod).get("kind") == "StatefulSet"
            leads = pod["metadata"]["name"] == f"{name}-0"
            # Whatever its other labels say later: these two are the StatefulSet's selector.
            parts = name.removeprefix(f"{NAME}-").split("-")
            role = parts[0] if labels.get(CLUSTER_LABEL) == NAME else None
            if ours and leads and role in ROLES and name not in self.sick and is_up(pod):
                # An engine's key is in its arguments, whatever its labels say later.
                made = self.objects.get(("StatefulSet", name), pod)
                found[name] = {"role": role, "key": pairing_key_of(made)}
        return found

    def engine_reports(self) -> dict[str, EngineReport]:
        found = {}
        for name in self.engines_up():
            pod = self.objects["Pod", f"{name}-0"]
            engine = engine_of(pod)
            assert engine is not None
            found[engine.logical] = ready_engine(engine, pod["metadata"]["uid"])
        return found

    def link_reports(self) -> dict[str, LinksReport]:
        reports, found = self.engine_reports(), {}
        uids = {one.engine_id.rpartition("/")[2]: name for name, one in reports.items()}
        for name, one in reports.items():
            if one.role == "decode":
                mine = one.engine_id.rpartition("/")[2]
                sources = [uids[p] for p, d in sorted(self.verified) if d == mine and p in uids]
                rows = [verified_link(source, reports[source].engine_id) for source in sources]
                rows = [structs.replace(row, shards="1/1", bytes_per_second=5e9) for row in rows]
                found[name] = LinksReport(name, one.engine_id, tuple(rows))
        return found


class Leases:
    """The API server, as those see it who hold a Lease."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def read(self, path: str) -> Manifest | None:
        return self.world.live(*LEASE)

    async def call(self, verb: str, path: str, *, body: Manifest) -> None:
        live = self.world.objects.get(LEASE)
        now = None if live is None else live["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != now:
            raise Conflict("the Lease has been modified")
        assert body["spec"]["leaseTransitions"] < 2**31, "the API server refuses it"
        self.world.write(body, by="operator")


def connector_of(data: bytes) -> ConnectorBundle:
    return ConnectorBundle(hashlib.sha256(data).hexdigest(), data)


def identity(one: Mapping[str, Any]) -> Identity:
    return str(one["kind"]), str(one["metadata"]["name"])


def is_up(pod: Mapping[str, Any]) -> bool:
    """Whether a pod runs and is not about to end."""
    return bool(pod["status"].get("podIP")) and not pod["metadata"].get("deletionTimestamp")


def wanted(world: World, role: str) -> int:
    """How many engines of a role are asked for: a PrefillScaler decides about prefill."""
    spec = world.cluster["spec"]
    counts = {one: int((spec.get(one) or {}).get("replicas", 1)) for one in ROLES}
    scaler = world.objects.get(SCALER)
    if role == "decode" or scaler is None or scaler["metadata"].get("deletionTimestamp"):
        return counts[role]
    asked = scaler["spec"]["replicas"]
    least = math.ceil(scaler["spec"].get("minPercentOfDecode", 0) * counts["decode"] / 100)
    most = scaler["spec"].get("maxPercentOfDecode")
    most = asked if most is None else math.ceil(most * counts["decode"] / 100)
    return int(least if asked < least else min(asked, most))


def is_broken(world: World) -> bool:
    """Whether a spec is one that nobody may have, although no webhook has refused it."""
    flags = (world.cluster["spec"].get("engine") or {}).get("extraArgs") or ()
    return FORBIDDEN in flags or max(wanted(world, role) for role in ROLES) > MOST_REPLICAS


def routers_in(spec: Manifest) -> int:
    return int((spec.get("router") or {}).get("replicas", 1))


def owners_of(one: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return one["metadata"].get("ownerReferences") or ()


def is_strange(world: World, one: Mapping[str, Any]) -> bool:
    """Whether nothing that is there owns an object, or a pod says that it is another's."""
    owners = {ref.get("uid") for ref in owners_of(one)}
    makers = [other for other in world.objects.values() if other["metadata"]["uid"] in owners]
    if one["kind"] != "Pod":
        return not makers
    said = one["metadata"].get("labels") or {}
    meant = [labels_of(maker) for maker in makers]
    return not any(all(said.get(name) == labels.get(name) for name in TELLING) for labels in meant)


def is_watched(one: Mapping[str, Any]) -> bool:
    """Whether the watch of its kind, which has a label selector, shows an object."""
    kind: Kind | None = next((kind for kind in WATCHED if kind.name == one["kind"]), None)
    labels = one["metadata"].get("labels") or {}
    for term in kind.selector.split(",") if kind is not None and kind.selector else ():
        label, _, value = term.partition("=")
        if label not in labels or (value and labels[label] != value):
            return False
    return kind is not None


def merged(live: Any, before: Any, wanted: Any, field: str = "") -> Any:
    """Return what an apply makes of a live value: others' fields stay, omitted ones of ours go."""
    if field in ATOMIC or not (isinstance(live, Mapping) and isinstance(wanted, Mapping)):
        return wanted
    before = before if isinstance(before, Mapping) else {}
    kept = {name: one for name, one in live.items() if name in wanted or name not in before}
    return kept | {
        name: merged(live.get(name), before.get(name), one, name) for name, one in wanted.items()
    }


def _held(live: Manifest | None) -> HeldCertificates:
    """As the adapter says it: entries that are not as they were written last do not count."""
    if live is None:
        return HeldCertificates("authority")
    annotations, data = live["metadata"].get("annotations") or {}, live.get("data") or {}
    written = json.loads(annotations.get(CERTIFICATES_HASH_ANNOTATION, "{}"))
    engines = frozenset(name for name in written if name in data)
    issue = annotations.get(CERTIFICATES_ANNOTATION)
    return HeldCertificates("authority", issue or "", engines, live["metadata"]["uid"])
