"""What others do to a PDCluster and to its objects, between any two steps of the operator.

Each hand returns what it did, in words, or nothing if there was nothing to do it to.
"""

from __future__ import annotations

from random import Random

from rough_world import (
    CLUSTER,
    FORBIDDEN,
    LEASE,
    NAME,
    SCALER,
    STRANGER,
    Identity,
    Manifest,
    World,
    copied,
    is_strange,
    wanted,
)

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import (
    ACCEPTED_ANNOTATION,
    API_VERSION,
    ROTATE_TICKET_KEY_ANNOTATION,
)
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Invalid

YEAR = 365 * 86_400.0
REFUSALS = (
    Invalid("the object is invalid"),
    Conflict("the object has been modified"),
    ApiError("Forbidden", "exceeded quota"),
    ApiError("RequestEntityTooLarge", "the request is too large"),
    ApiError("TooManyRequests", "too many requests"),
)
KINDS = (
    "StatefulSet",
    "Deployment",
    "Service",
    "ServiceAccount",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ControllerRevision",
    "Secret",
    "ConfigMap",
)
IMMUTABLE = ("ConfigMap", "ControllerRevision")
NAMED = tuple(kind for kind in KINDS if kind not in IMMUTABLE)
OWNER = {"apiVersion": "example.com/v1", "kind": "Other", "name": "x", "uid": STRANGER}
ENV = tuple([{"name": "A", "value": str(number)}] for number in range(3))
MOST_ENGINES = 9  # of a role, in the end
CLIENTS = [{"podSelector": {"matchLabels": {"app": "client"}}}]
FORGED = (  # peers that cannot be read, in well-formed JSON
    '{"router":{"allowFrom":7}}',
    '{"router":{"allowFrom":["client"]}}',
    '{"router":{"allowfrom":[]}}',
    '{"router":{}}',
    '{"rooter":{"allowFrom":[]}}',
)
SCALES = (0, 1, 2, 3, 4, MOST_ENGINES, 100_000)


class Hands:
    """All that others may do; dice choose."""

    def __init__(self, world: World, dice: Random) -> None:
        self.world, self.dice = world, dice
        self.specs: list[Manifest] = []

    def act(self) -> str:
        hands = (
            *[self.delete, self.change_spec, self.scale] * 2,
            self.disown,
            self.relabel,
            self.restore,
            self.refuse,
            self.allow,
            self.kill,
            self.restart,
            self.upgrade,
            self.clock,
            self.evict,
            self.lose_node,
            self.sicken,
            self.heal,
            self.bend,
            self.take_name,
            self.release,
            self.pause,
            self.break_spec,
            self.revert_spec,
            self.rotate,
            self.lose_status,
        )
        simulated = (
            self.add_scaler,
            self.end_scaler,
            self.create_again,
            self.end_cluster,
            self.name_clients,
            self.forge_clients,
            self.bend_lease,
        )
        self.specs.append(spec_of(self.world))
        return self.dice.choice((*hands, *(simulated if self.world.simulated else ())))()

    def delete(self) -> str:
        if (name := self._some(*KINDS)) is None:
            return ""
        self.world.remove(name)
        return f"delete {name}"

    def disown(self) -> str:
        if (name := self._some(*KINDS)) is None:
            return ""
        owners = self.dice.choice(([], [{**OWNER, "controller": True}]))
        self._by_hand(name)["metadata"]["ownerReferences"] = owners
        return f"{name} is of {owners}"

    def relabel(self) -> str:
        if (name := self._some(*KINDS, "Pod")) is None:
            return ""
        labels = self.world.objects[name]["metadata"].get("labels") or {}
        if not labels:
            return ""
        label, value = self.dice.choice(sorted(labels)), self.dice.choice((None, "other"))
        changed = {**labels, label: value}
        if value is None:
            del changed[label]
        self._by_hand(name)["metadata"]["labels"] = changed
        return f"{name}: {label} is {value}"

    def restore(self) -> str:
        """Put an object back as it was at some time: without its status, perhaps as a new one."""
        if not self.world.past:
            return ""
        old = copied(self.dice.choice(self.world.past))
        old.pop("status", None)
        name = (old["kind"], old["metadata"]["name"])
        live = self.world.objects.get(name)
        if live is not None and name[0] in IMMUTABLE:
            return ""  # the API server lets nobody change these
        if live is not None:
            old["metadata"]["ownerReferences"] = live["metadata"].get("ownerReferences") or []
        self.world.hit.add(name)
        self.world.write(old, by="hand")
        return f"restore {name}"

    def refuse(self) -> str:
        kind, error = self.dice.choice((*KINDS, "PDCluster")), self.dice.choice(REFUSALS)
        if kind == "StatefulSet" and self.dice.random() < 0.5:
            self.world.refused_template = "a policy refuses the pod"
            return "new templates are refused"
        if kind != "PDCluster" and self.dice.random() < 0.3:
            self.world.full.add(kind)
            return f"no more of {kind} can be created"
        self.world.refusals[kind] = error
        return f"{kind} is refused: {error.reason}"

    def allow(self) -> str:
        self.world.refusals.clear()
        self.world.full.clear()
        self.world.refused_template = ""
        return "nothing is refused"

    def kill(self) -> str:
        self.world.lives = self.dice.randrange(6)
        return f"the operator ends after {self.world.lives} writes"

    def restart(self) -> str:
        self.world.start()
        return "the operator is started again"

    def upgrade(self) -> str:
        self.world.upgrade()
        return "another version is started"

    def clock(self) -> str:
        self.world.skew = self.dice.choice((-YEAR, YEAR, 0.0, 0.0))
        return f"the date is off by {self.world.skew}"

    def evict(self) -> str:
        if (name := self._some("Pod")) is None:
            return ""
        self.world.remove(name)
        return f"evict {name}"

    def lose_node(self) -> str:
        if (name := self._some("Pod")) is None:
            return ""
        self.world.remove(name)
        self.world.stuck.add(name[1])
        return f"the node of {name} is gone"

    def sicken(self) -> str:
        if (name := self._some("StatefulSet")) is None:
            return ""
        self.world.sick.add(name[1])
        return f"{name} does not run"

    def heal(self) -> str:
        self.world.sick.clear()
        return "all engines run"

    def bend(self) -> str:
        """Change what an object does."""
        if (name := self._some(*(kind for kind in KINDS if kind != "ConfigMap"))) is None:
            return ""
        kind, live = name[0], self._by_hand(name)
        spec = live.get("spec") or {}
        if kind == "Service":
            spec["selector"] = {**(spec.get("selector") or {}), "app": "other"}
        elif kind in ("Deployment", "StatefulSet"):
            replicas = self.dice.choice((0, 2 if kind == "StatefulSet" else 3, None))
            if replicas is None:  # as kubectl rollout restart does it
                notes = spec["template"]["metadata"].setdefault("annotations", {})
                notes["kubectl.kubernetes.io/restartedAt"] = timestamp(self.world.seconds)
            else:
                spec["replicas"] = replicas
            live["metadata"]["generation"] += 1
        elif kind == "PodDisruptionBudget":
            spec["selector"] = {"matchLabels": {"app": "other"}}
        elif kind == "NetworkPolicy":
            spec["podSelector"] = self.dice.choice(({}, {"matchLabels": {"app": "other"}}))
        elif kind == "ServiceAccount":
            live["automountServiceAccountToken"] = True
        elif kind == "ControllerRevision":
            live["revision"] = self.dice.randrange(1, 9)
        else:
            live["data"] = {}
        return f"bend {name}"

    def release(self) -> str:
        """An engine carries the mark of one that was released, from another clock."""
        if (name := self._some("StatefulSet")) is None:
            return ""
        moment = timestamp(self.world.seconds + self.dice.choice((-YEAR, -60.0, YEAR)))
        live = self._by_hand(name)
        marks = {"pdcluster.dev/released-at": moment, "pdcluster.dev/released-because": "clock"}
        live["metadata"]["annotations"] = {**live["metadata"].get("annotations", {}), **marks}
        return f"{name} is marked as released at {moment}"

    def take_name(self) -> str:
        """A stranger's object takes the place of one of ours."""
        if (name := self._some(*NAMED)) is None:
            return ""
        old = copied(self.world.objects[name])
        self.world.remove(name)
        metadata = {"name": name[1], "labels": old["metadata"].get("labels") or {}}
        self.world.write({**old, "metadata": metadata, "status": {}}, by="hand")
        return f"a stranger's {name}"

    def change_spec(self) -> str:
        choice = self.dice.randrange(6)
        if choice == 0:
            block = self.dice.choice((16, 32, 64))
            self.world.edit(engine={"blockSize": block})
            return f"blockSize {block}"
        if choice == 1:
            how = self.dice.choice(("Surge", "Replace", "Recreate"))
            self._edit_part("rollout", type=how)
            return how
        if choice == 2:
            routers = self.dice.randrange(3)
            self._edit_part("router", replicas=routers)
            return f"{routers} routers"
        if choice == 3:
            renew = str(self.dice.randrange(3))
            self._edit_part("rollout", renew=renew)
            return f"renew {renew}"
        role, env = self.dice.choice(("prefill", "decode")), self.dice.choice(ENV)
        self._edit_part(role, engine={"env": env})
        return f"{role}: {env}"

    def scale(self) -> str:
        role, replicas = self.dice.choice(("prefill", "decode")), self.dice.choice(SCALES)
        self._edit_part(role, replicas=replicas)
        return f"{role}: {replicas} replicas"

    def pause(self) -> str:
        paused = self.dice.random() < 0.5
        self._edit_part("rollout", paused=paused)
        return f"paused: {paused}"

    def break_spec(self) -> str:
        """The spec is refused by no webhook, and broken, until somebody mends it."""
        engine = self.world.cluster["spec"].get("engine") or {}
        broken = "extraArgs" not in engine
        self._mend_spec()
        if broken:
            self._edit_part("engine", extraArgs=[FORBIDDEN])
        return f"the spec is broken: {broken}"

    def revert_spec(self) -> str:
        self.world.edit(**dict.fromkeys(self.world.cluster["spec"]) | self.dice.choice(self.specs))
        return f"the spec is again {spec_of(self.world)}"

    def rotate(self) -> str:
        """Somebody asks for a new ticket key."""
        notes = {ROTATE_TICKET_KEY_ANNOTATION: str(self.dice.randrange(9))}
        self.world.touch(CLUSTER)["metadata"]["annotations"] = notes
        return "a new ticket key"

    def lose_status(self) -> str:
        """A backup that is restored has no status."""
        self.world.touch(CLUSTER)["status"] = {}
        return "the status is lost"

    def add_scaler(self) -> str:
        """A PrefillScaler is created or changed; sometimes one of another name."""
        name = self.dice.choice((NAME, NAME, NAME, "other"))
        spec = {"replicas": self.dice.choice(SCALES)}
        shares = {"minPercentOfDecode": 50, "maxPercentOfDecode": 150}
        spec |= {name: one for name, one in shares.items() if self.dice.random() < 0.3}
        metadata = {"name": name}
        made = {"apiVersion": API_VERSION, "kind": SCALER[0], "metadata": metadata, "spec": spec}
        self.world.write(made, by="hand")
        return f"PrefillScaler {name}: {spec}"

    def end_scaler(self) -> str:
        """A PrefillScaler is deleted; sometimes a finalizer keeps it."""
        if SCALER not in self.world.objects:
            return ""
        if self.dice.random() < 0.5:
            moment = timestamp(self.world.seconds)
            self.world.touch(SCALER)["metadata"]["deletionTimestamp"] = moment
            return "the PrefillScaler is about to go"
        self.world.remove(SCALER)
        return "the PrefillScaler is deleted"

    def create_again(self) -> str:
        orphans = self.dice.random() < 0.3
        self.world.create_again(orphans=orphans)
        return f"the PDCluster is created again; its objects are orphans: {orphans}"

    def end_cluster(self) -> str:
        """The PDCluster is deleted, and waits for its objects or for a stranger's finalizer."""
        metadata = self.world.touch(CLUSTER)["metadata"]
        metadata["finalizers"] = [self.dice.choice(("foregroundDeletion", "example.com/other"))]
        metadata["deletionTimestamp"] = timestamp(self.world.seconds)
        return f"the PDCluster is about to go: {metadata['finalizers']}"

    def name_clients(self) -> str:
        """Somebody says whom routers let in, or no longer."""
        clients = self.dice.choice((CLIENTS, None))
        self._edit_part("router", allowFrom=clients)
        return f"clients: {clients}"

    def forge_clients(self) -> str:
        """Somebody makes the accepted clients unreadable."""
        name = ("ServiceAccount", f"{NAME}-pods")
        if name not in self.world.objects:
            return ""
        forged = self.dice.choice(FORGED)
        self._by_hand(name)["metadata"]["annotations"] = {ACCEPTED_ANNOTATION: forged}
        return f"{name}: {forged}"

    def bend_lease(self) -> str:
        """The Lease is deleted, taken by a stranger who never renews it, or has odd values."""
        if LEASE not in self.world.objects:
            return ""
        if self.dice.random() < 0.2:
            self.world.remove(LEASE)
            return "the Lease is deleted"
        taken = {"holderIdentity": "x", "leaseDurationSeconds": self.dice.choice((1, 30, 120))}
        future = {"renewTime": timestamp(self.world.seconds + YEAR)}
        empty = {"holderIdentity": None, "leaseDurationSeconds": None, "leaseTransitions": None}
        odd = self.dice.choice((taken, future, empty, {"leaseTransitions": 2**31 - 1}))
        self.world.touch(LEASE)["spec"] |= odd
        return f"the Lease has {odd}"

    def stop(self, *, mend: bool) -> None:
        """Others stop: nothing is refused, nodes are back, and the spec is one that can be had.

        Args:
            mend: whether objects of others, that are in the way, are deleted.
        """
        world = self.world
        self.allow()
        self.heal()
        world.skew, world.lives = 0.0, None
        world.stuck.clear()
        if world.is_ending():
            world.create_again()
        if SCALER in world.objects:
            world.remove(SCALER)
            if self.dice.random() < 0.5:
                self.add_scaler()
        if SCALER in world.objects:
            world.touch(SCALER)["spec"] = {"replicas": self.dice.randint(1, MOST_ENGINES)}
        self._edit_part("rollout", paused=False)
        for role in ("prefill", "decode"):
            replicas = wanted(world, role)
            self._edit_part(role, replicas=min(MOST_ENGINES, max(1, replicas)))
        self._mend_spec()
        kinds = (*(kind for kind in KINDS if kind != "ConfigMap"), "Pod")
        for name in [n for n in world.objects if mend and n[0] in kinds]:
            if name in world.objects and is_strange(world, world.objects[name]):
                world.remove(name)

    def _mend_spec(self) -> None:
        engine = self.world.cluster["spec"].get("engine") or {}
        kept = {name: one for name, one in engine.items() if name != "extraArgs"}
        self.world.edit(engine=kept or None)

    def _edit_part(self, part: str, **fields: object) -> None:
        self.world.edit(**{part: {**(self.world.cluster["spec"].get(part) or {}), **fields}})

    def _some(self, *kinds: str) -> Identity | None:
        found = [name for name in sorted(self.world.objects) if name[0] in kinds]
        if not found:
            return None
        name = self.dice.choice(found)
        self.world.hit.add(name)
        return name

    def _by_hand(self, name: Identity) -> Manifest:
        self.world.last_writer[name] = "hand"
        return self.world.touch(name)


def spec_of(world: World) -> Manifest:
    """The PDCluster's spec, to make a fresh one of it; a PrefillScaler's number is in it."""
    spec = copied(world.objects[CLUSTER]["spec"])
    if SCALER in world.objects:
        spec["prefill"] = {**(spec.get("prefill") or {}), "replicas": wanted(world, "prefill")}
    return spec
