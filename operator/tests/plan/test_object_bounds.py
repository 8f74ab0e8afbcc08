"""No object of an accepted spec reaches a bound of the API server: the largest ones are rendered.

``etcd`` takes 1.5 MiB of an object, with the names of the fields that a client has set, and 256 KiB
are the most of all its annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.findings import Rule
from pdcluster_operator.api.object_names import ROTATE_TICKET_KEY_ANNOTATION, EngineName
from pdcluster_operator.api.rules.resources import MOST_BYTES
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan import renewals
from pdcluster_operator.plan.types import WriteCertificates, WriteTicketKey

MOST_STORED = 1536 << 10
MOST_ANNOTATED = 256 << 10
KEYS = {"env": ("name",), "containers": ("name",), "ports": ("containerPort", "protocol")}
"""Lists of which API servers note each item, by the fields that identify one. There are more."""


def noted(value: Any, field: str = "", *, free: bool = False) -> Any:
    """Return what an API server stores of who has set a value, in the format ``FieldsV1``."""
    if isinstance(value, dict):
        return {f"f:{name}": noted(part, name, free=free) for name, part in value.items()}
    if isinstance(value, list) and field in KEYS and not free:
        default = {"protocol": "TCP"}
        return {
            "k:" + json.dumps({key: item.get(key, default.get(key)) for key in KEYS[field]}): {
                ".": {},
                **noted(item),
            }
            for item in value
        }
    return {}


def stored(child: dict[str, Any]) -> int:
    """Return how many bytes of an object are stored, with what controllers add to it."""
    free = child["kind"] == "ControllerRevision"
    parts = {name: part for name, part in child.items() if name != "metadata"}
    return len(json.dumps(child)) + len(json.dumps(noted(parts, free=free))) + (16 << 10)


def annotations(child: dict[str, Any]) -> Iterator[int]:
    template = (child.get("spec") or {}).get("template") or {}
    for metadata in (child["metadata"], template.get("metadata") or {}):
        yield sum(len(k) + len(v) for k, v in (metadata.get("annotations") or {}).items())


def filled(part: str, field: str, kind: str, size: int) -> dict[str, Any]:
    """Return a spec whose field has so many bytes of JSON of one kind."""
    number = range(size)

    def cut(items: Any) -> list[Any]:
        found, left = [], size - 512
        for item in items:
            left -= len(json.dumps(item)) + (6 if isinstance(item, str) else 2)
            if left < 0:
                break
            found.append(item)
        return found

    long = "x" * (size - 512)
    ours = "router" if part == "router" else "engine"
    value: Any = {
        "text": {"spec": {"containers": [{"name": ours, "workingDir": long}]}},
        "note": {"metadata": {"annotations": {"a": long}}},
        "notes": {"metadata": {"annotations": dict.fromkeys(cut(f"{n}aaaa" for n in number), "")}},
        "variables": {
            "spec": {
                "containers": [
                    {"name": ours, "env": cut({"name": f"A{n}", "value": ""} for n in number)}
                ]
            }
        },
        "ports": {
            "spec": {
                "containers": [
                    {"name": ours, "ports": cut({"containerPort": 9000 + n} for n in number)}
                ]
            }
        },
        "peers": cut(
            {"podSelector": {"matchLabels": {f"a{n}.{m}": "" for m in range(32)}}}
            for n in range(32)
        ),
        "words": {"extraArgs": cut("--x" + "y" * 16_000 for _ in range(128))},
    }[kind]
    return {part: {field: value}}


LARGEST = [
    ("prefill", "podTemplate", "text"),
    ("prefill", "podTemplate", "note"),
    ("decode", "podTemplate", "notes"),
    ("prefill", "podTemplate", "variables"),
    ("decode", "podTemplate", "ports"),
    ("router", "podTemplate", "text"),
    ("router", "podTemplate", "note"),
    ("router", "podTemplate", "variables"),
    ("router", "allowFrom", "peers"),
    ("prefill", "engine", "words"),
]


def limit(part: str) -> int:
    return next(
        most for prefix, (most, _) in MOST_BYTES.items() if f"spec.{part}.".startswith(prefix)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("part", "field", "kind"), LARGEST)
def test_the_largest_spec_makes_objects_that_api_servers_take(
    part: str, field: str, kind: str
) -> None:
    cluster = manifest(**filled(part, field, kind, limit(part)))
    assert [one for one in check_manifest(cluster)[1].errors if one.rule == Rule.TOO_LARGE] == []
    world = SimulatedCluster(cluster)
    assert check_manifest(cluster)[1].errors == ()
    world.step()
    found = {name: stored(child) for name, child in world.children.items()}
    assert {name: size for name, size in found.items() if size > MOST_STORED} == {}
    for name, child in world.children.items():
        assert max(annotations(child)) < MOST_ANNOTATED, name


@pytest.mark.parametrize(
    ("part", "field", "kind"), [one for one in LARGEST if one[1] != "allowFrom"]
)
def test_a_larger_one_is_refused_with_its_largest_field(part: str, field: str, kind: str) -> None:
    """The list of peers cannot be that long: other rules bound it."""
    given = filled(part, field, kind, limit(part) + 16_500)
    spec = {**given, "monitoring": {"scrapeFrom": [{"podSelector": {}}]}}
    errors = [e for e in check_manifest(manifest(**spec))[1].errors if e.rule == Rule.TOO_LARGE]
    assert {error.path for error in errors} == {f"spec.{part}.{field}"}
    assert f"{limit(part):,} are allowed" in errors[0].message
    assert "mount it" in errors[0].remedy


def test_many_fields_of_a_spec_count_together() -> None:
    half = filled("prefill", "podTemplate", "text", limit("prefill") // 2)
    both = {**half, "decode": {"podTemplate": half["prefill"]["podTemplate"]}}
    assert check_manifest(manifest(**half))[1].errors == ()
    assert check_manifest(manifest(**both))[1].errors == ()
    both["engine"] = {"extraArgs": ["--x" + "y" * 2000]}
    [error] = check_manifest(manifest(**both))[1].errors
    assert error.rule == Rule.TOO_LARGE


def test_certificates_are_for_engines_that_exist_before_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Recreate, new engines wait until the old ones are gone, and all have other names."""
    monkeypatch.setattr(renewals, "MOST_CERTIFICATES", 3)
    secured = {"device": "CPU", "tls": "Enabled"}
    world = SimulatedCluster(manifest(rollout={"type": "Recreate"}, transfer=secured))
    world.bring_up()
    old = world.certificates.engines
    assert len(old) == 2
    world.edit(engine={"blockSize": 32})
    for _ in range(40):
        running = {name.partition("-")[2] for kind, name in world.children if kind == "StatefulSet"}
        for step in world.step().steps:
            if isinstance(step, WriteCertificates):
                assert len(step.engines) <= 3
                assert running <= step.engines.keys()
        world.others_act()
    assert world.condition("Ready")["status"] == "True"
    assert not old & world.certificates.engines
    assert len(world.certificates.engines) == 2


def test_new_engines_of_both_roles_get_the_certificates_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If those of one role got all, there would be no pair, and the rollout would never end."""
    monkeypatch.setattr(renewals, "MOST_CERTIFICATES", 10)
    observed = SimulatedCluster(manifest(transfer={"device": "CPU", "tls": "Enabled"})).observed()
    cluster = parse_cluster(observed.cluster).cluster
    wanted = [
        EngineName("default", "llama", role, "abc", index) for role in Role for index in range(20)
    ]
    step = renewals.certificates_step(observed, cluster, wanted, 0.0)
    assert step is not None
    assert {role: sum(f"{role}-" in name for name in step.engines) for role in Role} == {
        Role.PREFILL: 5,
        Role.DECODE: 5,
    }


def test_a_rotation_that_is_asked_for_in_many_words_fits_beside_other_annotations() -> None:
    world = SimulatedCluster(manifest())
    world.settle()
    for words in ("x" * 262_000, "x" * 261_999 + "y"):
        world.cluster["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: words}
        [step] = world.plan().steps
        assert isinstance(step, WriteTicketKey)
        assert step.rotate
        assert max(annotations(dict(step.manifest))) < 2048
        assert world.settle().steps == ()


def test_the_number_of_a_revision_fits_into_its_field() -> None:
    """Another client may have written the largest one."""
    world = SimulatedCluster(manifest())
    world.bring_up()
    for (kind, _), child in world.children.items():
        if kind == "ControllerRevision":
            child["revision"] = 2**63 - 1
    world.edit(engine={"blockSize": 32})
    for _ in range(20):
        world.step()
        world.others_act()
    numbers = {
        c["revision"] for (kind, _), c in world.children.items() if kind == "ControllerRevision"
    }
    assert max(numbers) == 2**63 - 1
    assert world.settle().steps == ()
