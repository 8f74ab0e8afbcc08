"""Every parser takes whatever comes: drawn inputs, and those that the fuzzer found."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fuzz import corpus_files
from fuzz.targets import TARGETS

SECONDS = int(os.environ.get("PDCLUSTER_FUZZ_SECONDS", "600"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)  # fmt: skip
each_target = pytest.mark.parametrize("target", sorted(TARGETS))


def test_a_machine_that_stands_still_fails_no_drawn_example() -> None:
    for profile in ("pdcluster", "fast", "soak"):
        limits = settings.get_profile(profile)
        assert limits.deadline is None
        assert HealthCheck.too_slow in limits.suppress_health_check


@each_target
def test_the_corpus(target: str) -> None:
    inputs = corpus_files.read(target)
    assert len(inputs) >= len(corpus_files.seeds(target)) > 0
    for raw in inputs:
        TARGETS[target](raw)


@each_target
@given(data=st.data())
def test_changed_inputs_of_the_corpus(target: str, data: st.DataObject) -> None:
    raw = data.draw(st.sampled_from(corpus_files.read(target)))
    at = data.draw(st.integers(0, len(raw)))
    length = data.draw(st.integers(0, 8))
    TARGETS[target](raw[:at] + data.draw(st.binary(max_size=8)) + raw[at + length :])


@pytest.mark.sampled
@each_target
@given(first=st.binary(min_size=1, max_size=1), value=VALUES)
def test_well_formed_values_of_any_type(target: str, first: bytes, value: object) -> None:
    TARGETS[target](first + msgspec.msgpack.encode(value))
    TARGETS[target](msgspec.json.encode(value))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@each_target
def test_fuzzing_finds_nothing(target: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "fuzz", target, "--seconds", str(SECONDS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(ended.stderr[-2000:])
    assert ended.returncode == 0
