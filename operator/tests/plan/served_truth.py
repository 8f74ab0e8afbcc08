"""What is true of a PDCluster, from its pods and objects alone; nothing of the planner is asked.

A pair serves if clients reach it: the Service selects a router's pod that is ready and lists both
engines, both run, and KV was seen to move between them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from rough_world import (
    CLUSTER,
    NAME,
    Identity,
    World,
    copied,
    is_broken,
    is_strange,
    is_up,
    owners_of,
    routers_in,
    wanted,
)

LABEL = "pdcluster.dev/"
OWN_KINDS = (
    "StatefulSet",
    "Deployment",
    "Service",
    "ServiceAccount",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Secret",
)
Pair = tuple[str, str]


def is_ours(world: World, one: Mapping[str, Any]) -> bool:
    """Whether the PDCluster controls an object."""
    owners = owners_of(one)
    return any(ref.get("controller") and ref.get("uid") == world.uid for ref in owners)


def verified_pairs(world: World) -> set[Pair]:
    """The pairs of engines that run and moved KV, by their StatefulSets' names."""
    sets = {name: one for (kind, name), one in world.objects.items() if kind == "StatefulSet"}
    up = [name for name in world.engines_up() if name in sets and is_ours(world, sets[name])]
    uids = {world.objects["Pod", f"{name}-0"]["metadata"]["uid"]: name for name in up}
    found = {(uids.get(p, ""), uids.get(d, "")) for p, d in world.verified}
    return {pair for pair in found if all(pair)}


def served_pairs(world: World) -> set[Pair]:
    """The verified pairs that clients reach."""
    pairs = verified_pairs(world)
    if wanted_routers(world) == 0:
        return pairs
    service = world.objects.get(("Service", f"{NAME}-router"))
    if service is None or not is_ours(world, service):
        return set()
    selector = service["spec"].get("selector") or {}
    found: set[Pair] = set()
    for pod in world.of_kind("Pod"):
        if selector and selector.items() <= pod["metadata"]["labels"].items() and is_up(pod):
            words = {word for one in pod["spec"]["containers"] for word in one.get("args") or ()}
            urls = {url(world, name): name for pair in pairs for name in pair}
            known = {urls[word] for word in words & urls.keys()}
            found |= {pair for pair in pairs if known.issuperset(pair)}
    return found


def is_rolling(world: World) -> bool:
    """Whether routers are being replaced: nobody sees which engines the older pods know.

    Or a controller has not seen yet that a pod is none of its own any more.
    """
    return any(
        one["status"].get("updatedReplicas", 0) < one["status"].get("replicas", 0)
        or one["status"].get("observedGeneration") != one["metadata"]["generation"]
        or world.lags(one)
        for one in world.of_kind("Deployment")
    )


def url(world: World, name: str) -> str:
    return f"http://{name}-0.{name}.{world.namespace}.svc:8000"


def wanted_routers(world: World) -> int:
    spec = world.cluster["spec"]
    return world.routers if is_broken(world) else routers_in(spec)


class Judge:
    """Watches what the operator does, and what it says.

    Attributes:
        found: what is wrong.
        counts: how often each rule was asked.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        self.made = {one["metadata"]["uid"] for one in world.objects.values()}  # by the operator
        self.known: dict[Identity, set[Pair]] = {}
        world.watched = self.watched

    @contextmanager
    def watched(self, what: str, name: Identity) -> Iterator[None]:
        """Judge one action of the operator, or what a controller makes of it."""
        world = self.world
        before, live = self._served(), world.objects.get(name)
        if what == "follow":  # what became of the pairs that there were at the operator's write
            before &= self.known.get(name, before)
        else:
            self.known[name] = verified_pairs(world)
        strange = live is not None and not self._may_be_touched(live)
        yield
        after = self._served()
        self.counts["actions"] += 1
        if live is None and name in world.objects:
            self.made.add(world.objects[name]["metadata"]["uid"])
        if what != "follow" and world.is_ending():
            self.found.append(f"{what} of {name} for a PDCluster that is being deleted")
        if what != "follow" and world.holder() != world.me:
            self.found.append(f"{what} of {name}, and {world.holder()} holds the Lease")
        if what == "apply" and name[0] == "NetworkPolicy":
            self._fenced(world.objects[name])
        if strange and what != "follow":
            self.found.append(f"{what} of {name}, which is not of this PDCluster")
        if before and self._must_serve():
            self.counts["served"] += 1
            if not after:
                self.found.append(f"{what} of {name} ended the last pair that served: {before}")
        if before != after and self._must_serve():
            self._budget(what, name, before, after)

    def _served(self) -> set[Pair]:
        """The pairs that clients reach, and of which nobody else has just scaled one to nothing."""
        world = self.world

        def is_scaled_down(name: str) -> bool:
            live = ("StatefulSet", name)
            none = world.objects[live]["spec"]["replicas"] == 0
            return none and world.last_writer.get(live) == "hand"

        return {pair for pair in served_pairs(world) if not any(map(is_scaled_down, pair))}

    def _fenced(self, policy: Mapping[str, Any]) -> None:
        """A policy that the operator writes lets in nobody whom no accepted spec named."""
        self.counts["fences"] += 1
        rules = policy["spec"]["ingress"]
        peers = [one.get("from") for one in rules if policy["metadata"]["name"].endswith("router")]
        if self.world.clients and not all(peers):
            self.found.append(f"{policy['metadata']['name']} lets in everybody")

    def _budget(self, what: str, name: Identity, before: set[Pair], after: set[Pair]) -> None:
        """An engine that serves is ended only if as many as the spec asks for serve without it."""
        spare = 1 if self._rollout().get("type") == "Replace" else 0
        for number, role in enumerate(("prefill", "decode")):
            was, now = ({pair[number] for pair in pairs} for pairs in (before, after))
            ended = {one for one in was - now if not self._is_up(one)}
            least = wanted(self.world, role) - spare
            if ended and len(now) < min(least, len(was)):
                self.found.append(
                    f"{what} of {name} ended {sorted(ended)}: {len(now)} of {least} {role} serve"
                )

    def _is_up(self, name: str) -> bool:
        return name in self.world.engines_up()

    def _rollout(self) -> Mapping[str, Any]:
        return self.world.cluster["spec"].get("rollout") or {}

    def _must_serve(self) -> bool:
        if self._rollout().get("type") == "Recreate":
            return False
        return all(wanted(self.world, role) > 0 for role in ("prefill", "decode"))

    def _may_be_touched(self, live: Mapping[str, Any]) -> bool:
        """Whether an object is of this PDCluster, or an orphan that the operator has made."""
        if live["kind"] == "ConfigMap":
            return True  # shared, and judged by its content
        owners = owners_of(live)
        if live["kind"] == "Pod":
            return any(ref.get("uid") in self.made for ref in owners)
        return is_ours(self.world, live) or (not owners and live["metadata"]["uid"] in self.made)

    def says(self, seen: World) -> None:
        """Compare the status with what the operator saw when it planned, and with what is now.

        Args:
            seen: the world as it was then. What the operator mends at once is no lie.
        """
        status = self.world.cluster.get("status") or {}
        true = {one["type"] for one in status.get("conditions") or () if one["status"] == "True"}
        self.counts["statuses"] += 1
        if "Available" in true and not any(
            served_pairs(one) or is_rolling(one) for one in (seen, self.world)
        ):
            self.found.append("Available is True, and no pair serves")
        if "Accepted" in true and is_broken(seen) and is_broken(self.world):
            self.found.append("Accepted is True, and the spec is broken")
        if "Ready" in true and not any(map(self.world.lags, self.world.of_kind("Deployment"))):
            self.counts["ready"] += 1
            before, after = set(lacking(seen)), set(lacking(self.world))
            self.found += [f"Ready is True, but {what}" for what in sorted(before & after)]

    def ends_well(self, fresh: World) -> None:
        """Others have stopped: all is as in a fresh cluster, or a reason names what is wrong."""
        world, ready = self.world, self.world.condition("Ready")
        progress = world.condition("Progressing")
        if (
            progress.get("reason") == "InsufficientCapacity"
            and self._rollout()["type"] == "Replace"
        ):
            self.counts["no room"] += 1
            return
        strangers = [
            name
            for name, one in sorted(world.objects.items())
            if is_strange(world, one)
            and (
                name[0] in (*OWN_KINDS, "ControllerRevision")
                or (
                    name[0] == "Pod"
                    and ("StatefulSet", name[1].rpartition("-")[0]) in world.objects
                )
            )
        ]
        if strangers:
            self.counts["strangers stay"] += 1
            said = json.dumps(world.cluster["status"]["conditions"])
            names = [name.rpartition("-")[0] if kind == "Pod" else name for kind, name in strangers]
            named = any(name in said for name in names)
            # Of several conflicts, one is named, and it may be that of a shared connector.
            if ready.get("status") != "True" and not named and '"NameConflict"' not in said:
                self.found.append(f"not Ready, and no condition names {strangers}: {said}")
            return
        self.counts["as fresh"] += 1
        if ready.get("status") != "True":
            said = f"{ready.get('message')} {progress.get('message')}"
            lost = [
                name for name in re.findall(CONNECTOR, said) if ("ConfigMap", name) in world.hit
            ]
            if lost:
                self.counts["connectors lost"] += 1
            else:
                self.found.append(f"not Ready: {ready}; {progress}")
            return
        now, then = content(world), content(fresh)
        more, less = sorted((now - then).elements()), sorted((then - now).elements())
        for one, other in zip_longest(more, less, fillvalue=""):
            same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            start = max(0, same - 60)
            self.found.append(f"unlike fresh: {one[:40]} {one[start:]} is not {other[start:]}")


def lacking(world: World) -> Iterator[str]:
    """Yield what the spec wants and is not there, or not verified."""
    pairs = served_pairs(world)
    ours = {name for (_, name), one in world.objects.items() if is_ours(world, one)}
    for number, role in enumerate(("prefill", "decode")):
        up = world.engines_up().items()
        there = {name for name, one in up if one["role"] == role and name in ours}
        if len(there) != wanted(world, role):
            yield f"{len(there)} of {wanted(world, role)} {role} engines run"
        elif not there <= {pair[number] for pair in pairs}:
            yield f"{sorted(there)} are not all served"
        for name in there:
            yield from _made_otherwise(world, role, name)
    pods = (pod for pod in world.of_kind("Pod") if f"{NAME}-router-" in pod["metadata"]["name"])
    routers = sum(map(is_up, pods))
    if routers < wanted_routers(world):
        yield f"{routers} of {wanted_routers(world)} routers run"
    # A Secret is read once in four minutes.
    for kind in ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "Service"):
        if not any(is_ours(world, one) for one in world.of_kind(kind)):
            yield f"there is no {kind}"


def _made_otherwise(world: World, role: str, name: str) -> Iterator[str]:
    """Yield how an engine's pod is not what the spec says."""
    spec, pod = world.cluster["spec"], world.objects["Pod", f"{name}-0"]
    env = (spec.get(role) or {}).get("engine", {}).get("env", [])
    block = (spec.get("engine") or {}).get("blockSize")
    engine = next(one for one in pod["spec"]["containers"] if one["name"] == "engine")
    has = {one["name"]: one.get("value") for one in engine.get("env") or ()}.get("A")
    if has != next((one["value"] for one in env if one["name"] == "A"), None):
        yield f"{name} has the environment {has}"
    if block and f"--block-size {block} " not in " ".join(engine["args"]):
        yield f"{name} has not the block size {block}"


CONNECTOR = "pdcluster-connector-[0-9a-f]{16}"
VARYING = (
    (re.compile(rf"{NAME}([-.])(prefill|decode)([-.])[a-z0-9]{{5}}[-.]\d+"), rf"{NAME}\1\2\3N"),
    (re.compile(r"(prefill|decode)-[a-z0-9]{5}-\d+\.(crt|key)"), r"\1.\2"),
    (re.compile(CONNECTOR), "pdcluster-connector"),
    (re.compile(r'"annotations": \{"kubectl[^}]*}, '), ""),  # as kubectl rollout restart leaves it
    (re.compile(r'"10\.96\.[0-9.]+"'), '"address"'),
    (re.compile(rf'"{LABEL}revision": "[a-z0-9]*"'), '"revision"'),
)


def content(world: World) -> Counter[str]:
    """Every object of the PDCluster, without the engines' numbers and without stored revisions."""
    found: Counter[str] = Counter()
    for (kind, name), one in world.objects.items():
        if kind in OWN_KINDS and is_ours(world, one) and _is_found(world, one):
            text = f"{kind} {name} {json.dumps(one.get('spec'), sort_keys=True)}"
            text = text.replace(world.namespace, "default")
            for pattern, word in VARYING:
                text = pattern.sub(word, text)
            found[text] += 1
    return found


def _is_found(world: World, one: Mapping[str, Any]) -> bool:
    """Whether the operator can see an object that it may not want any more.

    What has lost the label by which objects are watched is found through its pods. Without pods it
    does nothing, and it goes with the PDCluster. If it is wanted, it gets the label back.
    """
    labels = one["metadata"].get("labels") or {}
    makers = {ref["uid"] for pod in world.of_kind("Pod") for ref in owners_of(pod)}
    watched = one["kind"] != "Secret"  # a Secret is read by its name
    return not watched or f"{LABEL}cluster" in labels or one["metadata"]["uid"] in makers


def as_seen(world: World) -> Any:
    """Return the world as it is now, for :meth:`Judge.says`."""
    seen = object.__new__(World)
    seen.objects, seen.sick = dict(world.objects), set(world.sick)
    seen.verified, seen.seconds = set(world.verified), world.seconds
    seen.namespace, seen.routers = world.namespace, world.routers
    seen.objects[CLUSTER] = copied(world.cluster)
    return seen
