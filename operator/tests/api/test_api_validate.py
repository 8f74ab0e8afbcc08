"""Rules across fields, and whether the two roles can exchange KV."""

from __future__ import annotations

import json

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.rules.extra_args import TYPED_FLAGS
from pdcluster_operator.api.spec.flags import parse_flags


def manifest(**spec):
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": {"hostPath": {"path": "/models/x"}}}, **spec},
    }


def findings(**spec):
    return check_manifest(manifest(**spec))[1]


def error(path, **spec):
    found = {e.path: e for e in findings(**spec).errors}
    assert path in found, {p: str(e) for p, e in found.items()}
    assert found[path].remedy
    return found[path]


def args(*words):
    return {"engine": {"extraArgs": list(words)}}


def test_a_plain_spec_is_accepted_as_far_as_it_tells():
    found = findings()
    assert found.ok
    assert {"block_size", "layers"} <= set(found.unchecked)
    # The same words on both sides leave nothing open about the block size.
    assert "block_size" not in findings(engine={"blockSize": 16}).unchecked


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (
            "PrefixCachingHeterogeneousBlocks",
            {"prefill": {"engine": {"blockSize": 16}}, "decode": {"engine": {"blockSize": 32}}},
        ),
        (
            "PrefixCachingHeterogeneousBlocks",
            {"engine": {"blockSize": 16}, "prefill": args("--no-enable-prefix-caching"),
             "decode": {"engine": {"extraArgs": ["--block_size=32"], "prefixCaching": "Enabled"}}},
        ),
    ],
)  # fmt: skip
def test_different_block_sizes_are_refused_by_the_compat_rule(rule, spec):
    found = findings(**spec)
    (refused,) = [e for e in found.errors if e.rule == rule]
    assert "16" in refused.value
    assert "32" in refused.value
    assert refused.path.startswith("spec.decode.engine.")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("field", "shared", "own"),
    [("blockSize", 16, 32), ("kvCacheDtype", "fp8", "fp8_e5m2")],
)
def test_a_pair_that_is_refused_names_the_field_of_the_role_that_differs(role, field, shared, own):
    found = findings(engine={field: shared}, **{role: {"engine": {field: own}}})
    (refused,) = found.errors
    assert refused.path == f"spec.{role}.engine.{field}"
    assert refused.related == (f"spec.engine.{field}",)


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        ("BlockInteriorOpaque", {"engine": {"attentionBackend": "CPU_ATTN"}}),
        ("PrefixCachingHeterogeneousBlocks", {"engine": {"attentionBackend": "SOME_NEW_ATTN"}}),
        (
            "PrefixCachingHeterogeneousBlocks",
            {"engine": {"attentionBackend": "FLASH_ATTN",
                        "extraArgs": ["--mamba-ssm-cache-dtype", "float32"]}},
        ),
        ("PrefixCachingHeterogeneousBlocks", {"engine": {"attentionBackend": "FLASH_ATTN"}}),
    ],
)  # fmt: skip
def test_different_block_sizes_are_refused_whatever_else_the_spec_says(rule, spec):
    """Prefix caching is on, and no field says what layers the model has."""
    sizes = {"prefill": {"engine": {"blockSize": 544}}, "decode": {"engine": {"blockSize": 1008}}}
    found = findings(**spec, **sizes)
    (refused,) = found.errors
    assert refused.rule == rule
    assert "attentionBackend" not in refused.remedy


@pytest.mark.parametrize("size", ["1008", "1_008", "+1008", " 1008 "])
def test_a_block_size_is_seen_however_python_reads_it(size):
    found = findings(engine={"blockSize": 544}, decode=args("--block-size", size))
    rules = {error.rule for error in found.errors}
    assert {"PrefixCachingHeterogeneousBlocks", "ConflictingSettings"} >= rules
    assert "PrefixCachingHeterogeneousBlocks" in rules
    assert findings(decode=args("-dcp", "1_0")).errors[0].rule == "ContextParallelUnsupported"


@pytest.mark.parametrize("cached", ["prefill", "decode"])
def test_prefix_caching_on_one_role_is_enough_for_the_refusal(cached):
    engine = {"attentionBackend": "FLASH_ATTN", "prefixCaching": "Disabled"}
    roles = {"prefill": {"engine": {"blockSize": 544}}, "decode": {"engine": {"blockSize": 1008}}}
    assert findings(engine=engine, **roles).ok, "without it the handshake decides"
    roles[cached]["engine"]["prefixCaching"] = "Enabled"
    (refused,) = findings(engine=engine, **roles).errors
    assert refused.rule == "PrefixCachingHeterogeneousBlocks"


def test_without_prefix_caching_the_blocks_of_a_hybrid_may_differ():
    hybrid = {"blockSize": 16, "prefixCaching": "Disabled",
              "extraArgs": ["--mamba-ssm-cache-dtype", "float32"]}  # fmt: skip
    found = findings(engine=hybrid, decode={"engine": {"blockSize": 32}})
    assert found.ok
    assert "token_sliceable" in found.unchecked, "the handshake decides"


@pytest.mark.parametrize(
    ("prefill", "decode", "values"),
    [
        (args("--model", "/models/a"), args(), ("/models/a", "/models/model")),
        (args("--model=/models/a"), args("--model=/models/b"), ("/models/a", "/models/b")),
        (args("--hf-overrides", '{"num_hidden_layers": 2}'), args(), ("num_hidden_layers",)),
        (args("--hf_overrides.rope_theta", "1"), args(), ("rope_theta",)),
        (args("--revision", "main"), args("--revision", "v2"), ("main", "v2")),
        (args("-q", "fp8"), args(), ("fp8",)),
    ],
)
def test_another_model_on_one_role_is_refused_naming_both(prefill, decode, values):
    found = findings(prefill=prefill, decode=decode)
    (refused,) = [e for e in found.errors if e.rule == "ModelMismatch"]
    for value in values:
        assert value in refused.value
    assert "extraArgs" in refused.path


def spec(**said):
    return args("--speculative-config", json.dumps({"num_speculative_tokens": 3, **said}))


@pytest.mark.parametrize(
    ("prefill", "decode", "values"),
    [
        (spec(model="/e/a"), spec(model="/e/b"), ("prefill /e/a,", "decode /e/b")),
        (spec(model="o/e", method="eagle3"), args("--spec-model", "o/f"), ("o/e", "o/f")),
        (spec(model="o/e"), spec(model="o/e", revision="v2"), ("o/e --revision v2",)),
        (args("-sc.model", "o/e", "--speculative-config.method", "eagle"),
         args("--speculative_config.model=o/f"), ("o/e", "o/f")),
        (args("-sc", '{"model": "o/g"}', "-sc.model", "o/e"), spec(model="o/g"), ("o/e", "o/g")),
        (args("--spec-model=o/e", "--spec-method", "mtp"), spec(model="o/f"), ("o/e", "o/f")),
    ],
)  # fmt: skip
def test_another_draft_model_on_one_role_is_refused_naming_both(prefill, decode, values):
    (refused,) = findings(prefill=prefill, decode=decode).errors
    assert refused.rule == "ModelMismatch"
    assert "the draft model differs" in refused.message
    for value in values:
        assert value in refused.message
    assert (refused.path, refused.related[0]) == (
        "spec.decode.engine.extraArgs", "spec.prefill.engine.extraArgs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (spec(model="o/e"), spec(model="o/e", num_speculative_tokens=5)),
        (spec(model="o/e", method="medusa"), spec(model="o/f", method="medusa")),
        (args(), spec(method="ngram", prompt_lookup_max=2)),
        (spec(method="ngram"), spec(model="ngram")),
        (args(), spec(model="o/e", method="eagle3")),  # the handshake compares the layers
        (spec(model="o/e"), spec(model="o/f", method=["eagle"])),
        (spec(model="o/e"), args("--speculative-config", "7")),
    ],
)
def test_draft_models_that_a_spec_does_not_contradict_are_accepted(prefill, decode):
    found = findings(prefill=prefill, decode=decode)
    assert found.ok, found.errors
    assert "draft" not in found.unchecked


HYBRID = ("--mamba-block-size", "16")


@pytest.mark.parametrize(
    ("prefill", "decode", "path"),
    [
        (args(), spec(model="o/e", method="eagle3"), "spec.decode.engine.extraArgs"),
        (spec(method="mtp"), args(), "spec.prefill.engine.extraArgs"),
        (args(), args("-sc", '{"model": "o/e"}'), "spec.decode.engine.extraArgs"),
        (args(), args("--speculative-config.method", "mtp"), "spec.decode.engine.extraArgs"),
        (args("--spec-model=o/e"), spec(method="ngram"), "spec.prefill.engine.extraArgs"),
        (args(*HYBRID), args(*HYBRID, "-sc.method", "ngram"), "spec.decode.engine.extraArgs"),
        (args(), spec(method="ngram"), None),
        (args(), spec(method="suffix"), None),
        (spec(model="o/m", method="medusa"), args(), None),
        (args(), spec(model="my.module.Proposer"), None),
        (args(), args("--speculative-config", "{"), None),
        (args(), spec(method=["eagle"]), None),
        (spec(model="o/e", method="eagle"), spec(method="mtp"), None),
        (args(), args(), None),
    ],
)
def test_drafts_with_kv_on_one_role_alone_are_warned_of(prefill, decode, path):
    found = findings(prefill=prefill, decode=decode)
    said = [one for one in found.warnings if one.rule == "SetOnOneRole"]
    assert [one.path for one in said] == ([] if path is None else [path])
    for one in said:
        assert "LayerMismatch" in one.message
        shared = prefill if "prefill" in path else decode
        both = findings(engine=shared["engine"])
        assert both.ok
        assert "SetOnOneRole" not in {one.rule for one in both.warnings}, "the way out"


@pytest.mark.parametrize(
    ("prefill", "decode", "name"),
    [
        (args("--tokenizer", "o/t"), args(), "--tokenizer"),
        (args(), args("--tokenizer=o/t"), "--tokenizer"),
        (args("--tokenizer", "o/t"), args("--tokenizer", "o/u"), "--tokenizer"),
        (args(), args("--chat-template", "/t.jinja"), "--chat-template"),
        (args("--mm-processor-kwargs.fps", "2"), args(), "--mm-processor-kwargs"),
        (args("--tokenizer", "o/t"), args("--tokenizer=o/t"), None),
        (args(), args("--tokenizer", "/models/model"), None),
        (args("--mm-processor-kwargs", '{"fps":2}'), args("--mm-processor-kwargs", '{"fps": 2}'),
         None),
    ],
)  # fmt: skip
def test_flags_that_make_other_tokens_of_a_prompt_are_set_alike(prefill, decode, name):
    folder = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    found = findings(prefill=prefill, decode=decode, model=folder)
    said = [(one.value, one.path) for one in found.warnings if one.rule == "SetOnOneRole"]
    role = "decode" if decode["engine"]["extraArgs"] else "prefill"
    assert said == ([] if name is None else [(name, f"spec.{role}.engine.extraArgs")])
    assert found.ok


@pytest.mark.parametrize("flag", ["--kv-cache-dtype=fp8_e5m2", "--dtype=float"])
def test_a_role_is_named_if_one_of_its_flags_can_say_the_value(flag):
    [refused] = findings(prefill=args(flag), decode=args("--dtype=half")).errors
    named = (refused.path, *refused.related)
    assert named[:2] == ("spec.decode.engine.extraArgs", "spec.prefill.engine.extraArgs")


def test_data_parallel_sizes_may_differ():
    wide = {"parallelism": {"data": 4, "nodes": 2}}
    for spec in ({"prefill": wide}, {"decode": wide}, {"prefill": wide, "decode": wide}):
        assert findings(**spec).ok


def test_equal_model_flags_on_both_roles_are_fine():
    both = args("--hf-overrides", '{"a": 1}')
    assert findings(prefill=both, decode=both).ok


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"decode": {"parallelism": {"data": 2, "tensor": 2, "nodes": 4}}}, "LayoutUnsupported"),
        ({"prefill": args("-dcp", "2")}, "ContextParallelUnsupported"),
        ({"engine": {"kvCacheDtype": "int4_per_token_head"}}, "LayoutUnsupported"),
        ({"decode": args("--kv-cache-dtype", "turboquant_k8v4")}, "LayoutUnsupported"),
        ({"engine": {"kvCacheDtype": "fp8"}, "decode": {"engine": {"kvCacheDtype": "fp8_e5m2"}}},
         "KVDtypeMismatch"),
        ({"decode": args("--kv-cache-dtype", "float16"), "prefill": args("--dtype", "float32")},
         "KVDtypeMismatch"),
    ],
)  # fmt: skip
def test_what_the_connector_does_not_carry_is_refused_by_name(spec, rule):
    assert rule in {e.rule for e in findings(**spec).errors}


def layout_errors(layout, **spec):
    found = findings(transfer={"kvLayout": layout}, **spec).errors
    return [(error.path, error.rule, error.message) for error in found]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"attentionBackend": "CPU_ATTN"}, "CPU_ATTN, which has LBHNC, not BHLNC"),
        ({"extraArgs": ["--attention-backend", "B12X"]}, "B12X, which has LBHNC and BLHNC, not"),
        ({"env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "HND"}]}, "KV in LBHNC, not in BHLNC"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_layout_that_a_named_backend_does_not_have_is_refused(engine, said, role):
    [(path, rule, message)] = [
        one for one in layout_errors("BHLNC", **{role: {"engine": engine}}) if "kvLayout" in one[0]
    ]
    assert (path, rule) == ("spec.transfer.kvLayout", "LayoutUnsupported")
    assert f"{role} has {said}" in message


@pytest.mark.parametrize("layout", ["Auto", "LBHNC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("backend", [None, "FLASH_ATTN", "FLASHINFER", "FLASHMLA"])
def test_any_layout_is_accepted_where_the_backend_may_have_it(layout, backend):
    assert layout_errors(layout, engine={"attentionBackend": backend} if backend else {}) == []


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_a_kv_cache_type_that_is_carried_waits_for_the_handshake(dtype):
    """Its scales are in the checkpoint, of which a spec says nothing."""
    assert findings(engine={"kvCacheDtype": dtype}).ok


def test_two_names_of_one_kv_cache_type_are_one():
    roles = {"prefill": "fp8", "decode": "fp8_e4m3"}
    assert findings(**{role: {"engine": {"kvCacheDtype": name}} for role, name in roles.items()}).ok


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config={}"],
        ["--kv-transfer-config.kv_role", "kv_both"],
        ["--kv-transfer", "{}"],
        ["-tp", "2"],
        ["-tp=2"],
        ["--tensor-parallel-size", "2"],
        ["--tensor", "2"],
        ["-n2"],
        ["-asc", "2"],
        ["-r", "1"],
        ["--headless"],
        ["--api-key", "x"],
        ["--api-k=x"],
        ["--no-headless"],
        ["--port", "1"],
        ["--host=x"],
        ["--config", "file.yaml"],
        ["--served-model-name", "x"],
        ["--distributed-executor-backend", "ray"],
        ["-t", "2"],
        ["-as", "2"],
        ["--kv-offloading-size", "8"],
        ["--ssl-certfile", "/tls/tls.crt"],
        ["--grpc"],
    ],
)
def test_owned_flags_are_refused_however_they_are_written(words):
    found = error("spec.engine.extraArgs[2]", engine={"extraArgs": ["--seed", "1", *words]})
    assert found.rule == "OwnedFlag"
    assert found.value == " ".join(words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--port=1", "--port belongs to the operator"),
        ("--grp", "--grp belongs to the operator (it abbreviates --grpc)"),
    ],
)
def test_an_abbreviated_owned_flag_is_told_which_one_it_is(word, said):
    assert error("spec.engine.extraArgs[0]", engine={"extraArgs": [word]}).message == said


def test_decode_alone_may_speculate():
    words = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    assert findings(decode={"engine": {"extraArgs": words}}).ok


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "-1"],
        ["--allow", "x"],
        ["--max-model-len", "8"],
        ["-O3"],
        ["-ep"],
        ["--x", "-.5"],
    ],
)
def test_free_flags_pass(words):
    assert findings(engine={"extraArgs": words}).ok


def test_a_lone_hyphen_is_a_value():
    """argparse, too, takes it for one: many programs read standard input then."""
    assert findings(engine={"extraArgs": ["--chat-template", "-"]}).ok
    flags = parse_flags(("--chat-template", "-", "-x"))
    assert [(flag.name, flag.values) for flag in flags] == [("--chat-template", ("-",)), ("-x", ())]


@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        (("--x=1",), "--x", ("1",)),
        (("--x=",), "--x", ("",)),
        (("--x", "1"), "--x", ("1",)),
        (("-n2",), "--nnodes", ("2",)),
        (("-n=2",), "--nnodes", ("2",)),
        (("-n2", "3"), "--nnodes", ("2", "3")),
        (("-n", "2"), "--nnodes", ("2",)),
        (("--no-x",), "--x", ()),
        (("--x=a", "b"), "--x", ("a", "b")),
    ],
)
def test_a_value_may_stand_behind_its_flag_or_in_the_same_word(words, name, values):
    [flag] = parse_flags(words)
    assert (flag.name, flag.values, flag.place) == (name, values, 0)
    assert flag.negated is words[0].startswith("--no-")


@pytest.mark.parametrize(
    "words",
    [
        ["--block-siz", "1008"],
        ["--block_siz=1008"],
        ["--enable-prefix-c"],
        ["--no-enable-prefix-c"],
        ["--revis", "abc"],
        ["--dt", "float32"],
    ],
)
def test_a_beginning_of_a_flag_that_rules_read_is_refused(words):
    found = error("spec.decode.engine.extraArgs[0]", decode={"engine": {"extraArgs": words}})
    assert found.rule == "UnreadableFlag"
    assert "abbreviates" in found.message


@pytest.mark.parametrize("name", sorted(TYPED_FLAGS))
def test_a_beginning_of_a_flag_that_a_field_sets_is_refused(name):
    found = error("spec.engine.extraArgs[0]", engine={"extraArgs": [name[:-1], "7"]})
    assert found.rule == "UnreadableFlag"


def test_prefix_caching_cannot_come_back_in_short_beside_different_block_sizes():
    engine = {"prefixCaching": "Disabled", "attentionBackend": "FLASH_ATTN"}
    roles = {"prefill": {"engine": {"blockSize": 544}}, "decode": {"engine": {"blockSize": 1008}}}
    assert findings(engine=engine, **roles).ok
    assert not findings(engine={**engine, "extraArgs": ["--enable-prefix-c"]}, **roles).ok


def test_a_key_that_only_the_engines_know_is_refused_in_a_pod_template_too():
    container = {"name": "engine", "env": [{"name": "VLLM_API_KEY", "value": "x"}]}
    template = {"spec": {"containers": [container]}}
    path = "spec.decode.podTemplate.spec.containers[0].env[0].name"
    found = error(path, decode={"podTemplate": template})
    assert found.rule == "OwnedVariable"
    assert "apiKeySecretRef" in found.remedy
    container["env"] = [{"name": "OTHER", "value": "x"}]
    sidecar = {"name": "proxy", "image": "x", "env": [{"name": "VLLM_API_KEY", "value": "x"}]}
    template = {"spec": {"containers": [sidecar, container]}}
    assert findings(decode={"podTemplate": template}).ok, "a sidecar may have a key of its own"


def test_a_value_that_the_kubelet_replaces_is_not_judged():
    env = [{"name": "SEED", "value": "7"}]
    assert findings(engine={"extraArgs": ["--seed", "$(SEED)"], "env": env}).ok
    found = error("spec.engine.extraArgs[0]", engine={"extraArgs": ["--seed", "x"]})
    assert found.message == "--seed must be a whole number"


def test_a_word_that_belongs_to_no_flag():
    assert error("spec.engine.extraArgs[0]", engine={"extraArgs": ["my-model"]}).rule == (
        "UnreadableFlag"
    )
    assert error("spec.engine.extraArgs[1]", engine={"extraArgs": ["-ep", "--", "x"]}).rule == (
        "UnreadableFlag"
    )


@pytest.mark.parametrize("name", ["POD_IP", "VLLM_HOST_IP", "PDCLUSTER_ANYTHING"])
def test_owned_variables_are_refused(name):
    found = error("spec.decode.engine.env[0].name",
                  decode={"engine": {"env": [{"name": name, "value": "x"}]}})  # fmt: skip
    assert found.rule == "OwnedVariable"
    assert found.remedy == "Remove it."


def test_the_cache_variable_belongs_to_the_operator_only_for_downloads():
    env = {"env": [{"name": "HF_HOME", "value": "/x"}]}
    assert findings(engine=env).ok
    hub = {"source": {"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "t"}}}}
    error("spec.engine.env[0].name", model=hub, engine=env)
    token = {"env": [{"name": "HF_TOKEN", "value": "t"}]}
    error("spec.engine.env[0].name", model=hub, engine=token)
    public = {"source": {"huggingFace": {"repo": "a/b"}}}
    assert findings(model=public, engine=token).ok, "the operator sets no token"


@pytest.mark.parametrize("var", [{"name": "A"}, {"name": "A", "value": "", "valueFrom": {}}])
def test_a_variable_has_one_source(var):
    assert error("spec.engine.env[0]", engine={"env": [var]}).rule == "ExactlyOne"


def test_a_flag_may_not_contradict_a_field():
    found = error("spec.decode.engine.extraArgs", engine={"maxModelLen": 1024},
                  decode=args("--max-model-len", "2048"))  # fmt: skip
    assert found.rule == "ConflictingSettings"
    assert "1024" in found.message
    assert findings(engine={"maxModelLen": 1024}, decode=args("--max-model-len", "1024")).ok


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("blockSize", 16, "--block-size"),
        ("kvCacheDtype", "fp8", "--kv-cache-dtype"),
        ("maxModelLen", 16, "--max-model-len"),
        ("attentionBackend", "FLASH_ATTN", "--attention-backend"),
    ],
)
def test_each_field_that_has_a_flag_may_not_be_contradicted(role, field, value, flag):
    def said(word):
        own = {"extraArgs": ["--seed", "1", flag, word]}
        found = findings(engine={field: value}, **{role: {"engine": own}}).errors
        return {(str(one.rule), one.path) for one in found if flag in one.remedy}

    assert said(str(value)) == set()
    assert said("32") == {("ConflictingSettings", f"spec.{role}.engine.extraArgs")}


def test_the_shared_flag_that_a_role_replaces_contradicts_nothing():
    shared = {"extraArgs": ["--max-model-len", "1", "--seed", "1"]}
    role = {"engine": {"extraArgs": ["--max_model_len=2048"], "maxModelLen": 2048}}
    assert findings(engine=shared, prefill=role, decode=role).ok


def test_gpus_must_equal_the_workers_of_a_pod():
    role = {"parallelism": {"tensor": 16, "nodes": 2}, "resources": {"limits": {"amd.com/gpu": 4}}}
    found = error("spec.prefill.resources.limits.amd.com/gpu", prefill=role)
    assert found.rule == "GpuCountMismatch"
    assert "8" in found.message
    role["resources"]["limits"] = {"amd.com/gpu": "8"}
    assert findings(prefill=role).ok


def test_workers_spread_evenly_and_links_are_bounded():
    role = {"parallelism": {"tensor": 3, "nodes": 2}}
    torn = error("spec.decode.parallelism.nodes", decode=role)
    assert (torn.rule, torn.value) == ("NodesDivideWorkers", "2")
    assert torn.message == (
        "tensor 3 x pipeline 1 x data 1 = 3 workers cannot be spread evenly over 2 pods"
    )
    found = error("spec.decode.replicas", prefill={"replicas": 100}, decode={"replicas": 41})
    assert found.rule == "TooManyLinks"
    wide = {"replicas": 2, "parallelism": {"data": 513}}
    found = error("spec.prefill.parallelism.data", prefill=wide)
    assert (found.rule, found.value) == ("TooManyLinks", "513")
    assert "1026 side channels" in found.message
    huge = {"parallelism": {"tensor": 1024, "pipeline": 256}}
    assert error("spec.decode.parallelism", decode=huge).rule == "OutOfRange"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_error_of_the_parallel_sizes_names_the_role_at_fault(role):
    (other,) = {"prefill", "decode"} - {role}
    torn = {"parallelism": {"data": 2, "tensor": 2, "nodes": 4}}
    for data in (1, 2, 8):  # the other role's engines are well, be they smaller or larger
        found = findings(**{role: torn, other: {"parallelism": {"data": data}}}).errors
        assert [error.path for error in found] == [f"spec.{role}.parallelism.data"]
        assert role in found[0].message
        assert other not in found[0].message
    both = {role: torn, other: {"parallelism": {**torn["parallelism"], "data": 4, "nodes": 8}}}
    assert findings(**both).errors[0].path == f"spec.{other}.parallelism.data", "the larger one"


@pytest.mark.parametrize(
    ("prefill", "decode", "accepted"),
    [(64, 64, True), (1000, 4, True), (241, 17, False), (17, 241, False), (1000, 5, False)],
)
def test_exactly_as_many_links_as_allowed_are_accepted(prefill, decode, accepted):
    found = findings(prefill={"replicas": prefill}, decode={"replicas": decode})
    assert ("TooManyLinks" not in {error.rule for error in found.errors}) is accepted
    assert found.ok is accepted


@pytest.mark.parametrize(("replicas", "data", "accepted"), [(2, 512, True), (1, 1024, True),
                                                            (5, 205, False)])  # fmt: skip
def test_exactly_as_many_side_channels_as_allowed_are_accepted(replicas, data, accepted):
    found = findings(prefill={"replicas": replicas, "parallelism": {"data": data}})
    assert found.ok is accepted


@pytest.mark.parametrize(
    ("tensor", "pipeline", "accepted"), [(64, 64, True), (65, 64, False), (241, 17, False)]
)
def test_exactly_as_many_workers_of_an_engine_as_allowed_are_accepted(tensor, pipeline, accepted):
    found = findings(decode={"parallelism": {"tensor": tensor, "pipeline": pipeline}})
    out_of_range = {error.path for error in found.errors if error.rule == "OutOfRange"}
    assert out_of_range == (set() if accepted else {"spec.decode.parallelism"})


def warnings(**spec):
    found = findings(**spec)
    assert found.ok, [str(e) for e in found.errors]
    return {w.rule: w for w in found.warnings}


def env(name, value):
    return {"env": [{"name": name, "value": value}]}


def test_traps_are_warned_of():
    stock = warnings(engine=env("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0"))["ConflictingSettings"]
    assert (stock.path, stock.value) == ("spec.engine.env[0].name", "VLLM_NIXL_SIDE_CHANNEL_HOST")
    assert "ConflictingSettings" not in warnings(engine=env("VLLM_LOGGING_LEVEL", "DEBUG"))
    assert "NodeLocalModel" in warnings()
    assert "NothingToPair" in warnings(decode={"replicas": 0})


def test_expandable_segments_are_refused_where_vllm_refuses_them():
    setting = env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    assert error("spec.engine.env[0].value", engine=setting).rule == "ExpandableSegments"
    assert findings(engine=setting, transfer={"device": "CPU"}).ok
    assert findings(engine=env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")).ok
    assert findings(engine=env("NOTE", "expandable_segments:True")).ok, "nothing reads it"


@pytest.mark.parametrize("name", ["UCX_TLS", "PYTORCH_CUDA_ALLOC_CONF"])
def test_of_a_value_that_is_elsewhere_nothing_is_said(name):
    source = {"configMapKeyRef": {"name": "settings", "key": "it"}}
    found = findings(engine={"env": [{"name": name, "valueFrom": source}]})
    assert found.ok
    assert "TransportWithoutCuda" not in {warning.rule for warning in found.warnings}


def test_an_eager_pipeline_is_refused_where_it_would_end_the_engine():
    eager = {"extraArgs": ["--enforce-eager"]}
    stages = {"parallelism": {"pipeline": 2}}
    cpu = {"device": "CPU"}
    own = error("spec.prefill.engine.extraArgs", prefill={**stages, "engine": eager}, transfer=cpu)
    assert own.rule == "EagerPipeline"
    assert "--compilation-config" in own.remedy
    shared = error("spec.engine.extraArgs", engine=eager, decode=stages, transfer=cpu)
    assert shared.rule == "EagerPipeline"
    assert findings(engine=eager, prefill=stages, decode=stages).ok, "GPUs have graphs"
    assert findings(engine=eager, transfer=cpu).ok
    undone = {**stages, "engine": {"extraArgs": ["--no-enforce-eager"]}}
    assert findings(engine=eager, prefill=undone, transfer=cpu).ok


@pytest.mark.parametrize("backend", ["GDS", "GPUNETIO"])
def test_a_backend_that_moves_nothing_between_engines_is_refused_and_the_other_one_named(backend):
    found = error("spec.transfer.backends[1]", transfer={"backends": ["UCX", backend]})
    assert (found.rule, found.value) == ("NotAllowed", backend)
    assert found.message == "must be one of UCX, LIBFABRIC"
    assert findings(transfer={"backends": ["UCX"]}).ok


def test_two_backends_are_refused_because_nixl_would_choose():
    found = error("spec.transfer.backends", transfer={"backends": ["LIBFABRIC", "UCX"]})
    assert (found.rule, found.value) == ("ConflictingSettings", "LIBFABRIC, UCX")
    assert found.remedy == "Write one of them: backends: [LIBFABRIC]."
    assert findings(transfer={"backends": ["LIBFABRIC", "LIBFABRIC"]}).ok


def test_with_libfabric_no_rule_speaks_of_ucx():
    tls = {"env": [{"name": "UCX_TLS", "value": "rc"}]}
    assert not findings(engine=tls).ok
    assert findings(engine=tls, transfer={"backends": ["LIBFABRIC"]}).ok
    node = {"podTemplate": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "one"}}}}
    assert "NoRdma" in warnings(prefill=node, decode=node)
    libfabric = {"backends": ["LIBFABRIC"]}
    assert "NoRdma" not in warnings(prefill=node, decode=node, transfer=libfabric)


@pytest.mark.parametrize("field", ["args", "command"])
def test_an_overlay_of_arguments_bypasses_the_rules_and_says_so(field):
    overlay = {
        "spec": {
            "containers": [
                {"name": "x", "image": "x", field: ["--its-own"]},
                {"name": "engine", field: ["--foo"]},
            ]
        }
    }
    (warned,) = [
        warning
        for warning in warnings(decode={"podTemplate": overlay}).values()
        if warning.rule == "ArgumentsOverlaid"
    ]
    assert warned.path == f"spec.decode.podTemplate.spec.containers[1].{field}"
    overlay["spec"]["containers"][1]["name"] = "router"
    routers = warnings(router={"podTemplate": overlay})["ArgumentsOverlaid"]
    assert routers.path == f"spec.router.podTemplate.spec.containers[1].{field}"
    harmless = {"spec": {"containers": [{"name": "engine", "imagePullPolicy": "Never"}]}}
    assert "ArgumentsOverlaid" not in warnings(decode={"podTemplate": harmless})


@pytest.mark.parametrize(
    ("junk", "place"),
    [
        ({"spec": []}, ".spec"),
        ({"spec": {"containers": {}}}, ".spec.containers"),
        ({"spec": {"containers": [1]}}, ".spec.containers[0]"),
    ],
)
def test_an_overlay_of_any_shape_is_survived_and_refused(junk, place):
    (found,) = findings(decode={"podTemplate": junk}).errors
    assert (found.path, found.rule) == (f"spec.decode.podTemplate{place}", "WrongType")


def image(reference):
    return {"engine": {"image": reference}}


def flag(field, value, *words):
    return {"engine": {field: value, "extraArgs": list(words)}}


def memory(kind):
    pod = {"spec": {"resources": {kind: {"memory": "64Gi"}}}}
    return {role: {"podTemplate": pod} for role in ("prefill", "decode")}


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        ("VersionUnsupported", image("mirror.example/hub/vllm/vllm-openai:v0.3.9"),
         image("lmcache/vllm-openai:v0.3.9")),
        ("VersionUnsupported", image("vllm/vllm-openai-cpu:v0.7.0"),
         image("nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.0")),
        ("GpuCountMismatch", {"decode": {"resources": {"limits": {"nvidia.com/gpu": 100}}}},
         {"decode": {"resources": {"limits": {"koordinator.sh/gpu": 100}}}}),
        ("TransportWithoutCuda", {"engine": {"env": [{"name": "UCX_TLS", "value": "tcp"}]}},
         {"engine": {"env": [{"name": "UCX_TLS", "value": "$(TR)"}]}}),
        ("ConflictingSettings", flag("kvCacheDtype", "fp8_e5m2", "--kv-cache-dtype", "fp8"),
         flag("kvCacheDtype", "fp8_e4m3", "--kv-cache-dtype", "fp8")),
        ("ConflictingSettings", flag("maxModelLen", 8000, "--max-model-len=8K"),
         flag("maxModelLen", 8000, "--max-model-len=8k")),
        ("ConflictingSettings", flag("maxModelLen", 1500, "--max-model-len", "1_501"),
         flag("maxModelLen", 1500, "--max-model-len", "1.5k")),
        ("ConflictingSettings", flag("maxModelLen", 8192, "--max-model-len", "auto"),
         flag("maxModelLen", 8192, "--max-model-len", "8_192")),
        ("ConflictingSettings", flag("attentionBackend", "FLASH_ATTN", "--attention-backend", "x"),
         flag("attentionBackend", "FLASH_ATTN", "--attention-backend", "flash_attn")),
    ],
)  # fmt: skip
def test_what_vllm_and_kubernetes_read_alike_is_not_refused(rule, wrong, right):
    assert rule in {error.rule for error in findings(**wrong).errors}
    assert rule not in {error.rule for error in findings(**right).errors}


def test_a_tag_of_somebody_elses_image_is_only_perhaps_the_release_of_vllm():
    [said] = [one for one in findings(**image("lmcache/vllm-openai:v0.3.9")).warnings
              if one.rule == "VersionUnsupported"]  # fmt: skip
    assert said.message.startswith("if its tag is vLLM's, it is vLLM 0.3; ")


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_memory_of_the_whole_pod_is_memory(kind):
    assert "NoMemoryRequest" in {one.rule for one in findings().warnings}
    assert "NoMemoryRequest" not in {one.rule for one in findings(**memory(kind)).warnings}
