from __future__ import annotations

import copy

import pytest
from operator_runs import cluster

from pdcluster_operator.api.rules.validate import check_manifest, review


def manifest(**spec):
    made = cluster(**spec)
    made["metadata"] |= {"namespace": "default", "uid": "1"}
    return made


GOOD = manifest()
BAD = manifest(
    prefill={"engine": {"blockSize": 16}},
    decode={"engine": {"blockSize": 32, "extraArgs": ["--port", "1"]}},
)


def judge(new, old=None, *, host_paths=True, mounted_certificates=True):
    return review(new, old, host_paths=host_paths, mounted_certificates=mounted_certificates)


def test_creation_is_judged_as_the_planner_judges():
    answer = judge(BAD)
    assert answer.errors == check_manifest(BAD)[1].errors
    assert len(answer.errors) >= 2, "all at once"
    assert not judge(GOOD).errors


def test_a_refusal_says_field_value_rule_and_remedy():
    message = judge(BAD).message
    for error in judge(BAD).errors:
        for part in (error.path, error.value, f"[{error.rule}]", error.remedy):
            assert part
            assert part in message


@pytest.mark.parametrize(("ports", "head"), [(1, "1 field is"), (2, "2 fields are")])
def test_a_refusal_says_how_many_fields_it_names(ports, head):
    flags = ["--port", "1"] * ports
    message = judge(manifest(engine={"extraArgs": flags})).message
    first, *lines = message.splitlines()
    assert first == f"{head} not acceptable:"
    assert len(lines) == ports


def test_what_is_legal_and_suspicious_is_a_warning():
    warnings = judge(GOOD).warnings
    assert any("NodeLocalModel" in line for line in warnings)
    assert all(len(line) <= 256 for line in warnings)


@pytest.mark.parametrize("length", [1, 500])
def test_a_warning_is_whole_as_far_as_the_api_server_takes_it(length):
    """It shows no more than 256 characters of each."""
    path = "/models/" + "x" * length
    spec = {"model": {"source": {"hostPath": {"path": path}}}}
    manifest = cluster("llama", **spec)
    whole = [str(one) for one in check_manifest(manifest, host_paths=True)[1].warnings]
    shown = review(manifest, None, host_paths=True).warnings
    assert any(len(line) > 256 for line in whole) is (length == 500)
    assert max(map(len, shown)) <= 256
    for line, text in zip(whole, shown, strict=True):
        assert text == line or (len(text) == 256 and text.endswith("…") and len(line) > 256)


def test_deletion_and_unchanged_specs_pass():
    assert not judge(None, BAD).errors
    labelled = copy.deepcopy(BAD)
    labelled["metadata"]["labels"] = {"team": "a"}
    assert not judge(labelled, BAD).errors
    same = copy.deepcopy(GOOD)
    same["metadata"]["labels"] = {"team": "a"}
    assert judge(GOOD).warnings
    assert judge(same, GOOD).warnings == (), "it was said when the spec was written"
    going = copy.deepcopy(BAD)
    going["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    going["spec"]["decode"]["replicas"] = -3
    assert judge({**going, "metadata": BAD["metadata"]}, BAD).errors
    assert not judge(going, BAD).errors


def test_an_update_answers_only_for_what_it_adds():
    scaled = copy.deepcopy(BAD)
    scaled["spec"]["decode"]["replicas"] = 3
    assert not judge(scaled, BAD).errors, "what was wrong before is no ground for refusal"
    worse = copy.deepcopy(scaled)
    worse["spec"]["prefill"]["engine"]["extraArgs"] = ["--tensor-parallel-size", "2"]
    added = judge(worse, BAD).errors
    assert [error.path for error in added] == ["spec.prefill.engine.extraArgs[0]"]
    assert judge(BAD, GOOD).errors == judge(BAD).errors, "in the same order"


def test_an_error_that_moves_in_its_list_is_not_new():
    before = manifest(engine={"extraArgs": ["--enforce-eager", "--port", "1"]})
    after = manifest(engine={"extraArgs": ["--port", "1"]})
    assert judge(before).errors
    assert not judge(after, before).errors


def test_two_equal_mistakes_that_stay_are_not_new():
    before = manifest(engine={"extraArgs": ["--port", "1", "--port", "1"]})
    after = copy.deepcopy(before)
    after["spec"]["decode"] = {"replicas": 3}
    assert len(judge(before).errors) == 2
    assert not judge(after, before).errors


def test_the_same_mistake_once_more_is_new():
    before = manifest(engine={"extraArgs": ["--port", "1"]})
    after = manifest(engine={"extraArgs": ["--port", "1", "--port", "1"]})
    assert len(judge(after).errors) > len(judge(before).errors)
    assert judge(after, before).errors


def test_another_wrong_value_is_new():
    other = copy.deepcopy(BAD)
    other["spec"]["decode"]["engine"]["blockSize"] = 64
    assert judge(other, BAD).errors


@pytest.mark.parametrize("spec", [None, 7, {}, {"model": 1}, {"prefill": []}])
def test_nonsense_is_refused_and_never_raises(spec):
    assert judge({**GOOD, "spec": spec}).errors


def test_mounted_certificates_need_an_operator_that_such_engines_trust():
    mount = {"name": "own", "mountPath": "/pdcluster-tls"}
    spec = {
        "containers": [{"name": "engine", "volumeMounts": [mount]}],
        "volumes": [{"name": "own", "secret": {"secretName": "engine"}}],
    }
    role = {"podTemplate": {"spec": spec}}
    new = manifest(transfer={"device": "CPU", "tls": "Mounted"}, prefill=role, decode=role)
    assert not judge(new).errors
    [error] = judge(new, mounted_certificates=False).errors
    assert (error.path, error.rule) == ("spec.transfer.tls", "MountedNotSupported")
    assert not judge(GOOD, mounted_certificates=False).errors


def test_folders_of_nodes_need_the_operators_word():
    answer = judge(GOOD, host_paths=False)
    assert [(e.path, e.rule) for e in answer.errors] == [
        ("spec.model.source.hostPath.path", "HostPathNotAdmitted")
    ]
    claim = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}}
    volume = {"name": "x", "hostPath": {"path": "/etc"}}
    template = {"spec": {"volumes": [{"name": "ok", "emptyDir": {}}, volume]}}
    sly = manifest(model=claim, decode={"podTemplate": template})
    assert [e.path for e in judge(sly, host_paths=False).errors] == [
        "spec.decode.podTemplate.spec.volumes[1].hostPath"
    ]
    assert not judge(sly, host_paths=True).errors


@pytest.mark.parametrize(("before", "after"), [("nobody", None), (None, "blue"), ("blue", "green")])
def test_who_comes_from_another_class_is_judged_as_if_it_were_new(before, after):
    """The webhook of the class before had other settings, or there was none."""

    def of(name):
        made = copy.deepcopy(BAD)
        return made if name is None else {**made, "spec": {**made["spec"], "operatorClass": name}}

    assert judge(of(after), of(before)).errors == judge(of(after)).errors


def test_more_than_sixteen_warnings_are_not_shown():
    names = [f"VLLM_NIXL_SIDE_CHANNEL_{number}" for number in range(20)]
    many = manifest(engine={"env": [{"name": name, "value": "x"} for name in names]})
    assert len(check_manifest(many)[1].warnings) > 20
    assert len(judge(many).warnings) == 16


def test_what_has_no_metadata_is_judged():
    assert judge({**BAD, "metadata": None}).errors
