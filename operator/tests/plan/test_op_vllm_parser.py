"""The command lines of the scenarios, read by vLLM's own parser, and what is owned of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from vllm_child import ask

import pdcluster_operator
from pdcluster_operator.api.rules.extra_args import CHECKED_FLAGS
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.flags import FLAG_VALUES, OWNED_FLAGS, SHORT_NAMES

HERE = Path(__file__).parent
# Words after the model, and what vLLM's parser takes them for: True where it refuses them.
REFUSED = {
    ("--max-num-seqs 128",): True,
    ("--seed", "1", "--max-num-seqs 128"): True,
    ("--max-num-seqs",): True,
    ("--max-num-seqs", "--seed", "1"): True,
    ("--max-num-seqs", "1", "2"): True,
    ("--max-num-seqs=1", "2"): True,
    ("--enforce-eager", "true"): True,
    ("--enforce-eager=true",): True,
    ("--enforce-eager ",): True,
    ("-sc.method", "ngram", "x"): True,
    ("--allowed-media-domains",): True,
    ("--max-num-seqs", "128"): False,
    ("--max_num_seqs=128",): False,
    ("--no-enforce-eager",): False,
    ("-O3", "--seed", "-1"): False,
    ("--chat-template", "-- {{ messages }}"): False,
    ("--chat-template", "--x y"): False,
    ("--allowed-media-domains", "a", "b"): False,
    ("--device-memory-utilization", "0.5"): False,
    ("-sc.method", "ngram", "--speculative-config.num_speculative_tokens=3"): False,
    ("--generation-config", "a b=c -d"): False,
}  # fmt: skip
# vLLM refuses these too, but another version may know them, so that admission only warns.
UNKNOWN = (
    ("--max-nmu-seqs", "1"), ("--max-num", "1"), ("--no-disable-log-stats",), ("--enable-magic",),
    ("--no-max-num-seqs", "1"),
)  # fmt: skip
# vLLM reads these as the flag that they begin.
BEGUN = (("--max-num-seq", "1"), ("--max-logp", "2"))
WORDS = [*REFUSED, *UNKNOWN, *BEGUN]
VALUES = (
    "", "None", "none", "auto", "1", "-1", "0.5", "8k", "1K", "1.5k", "1_000", " 7", "1e3", "inf",
    "0x10", "true", "a,b", "{}", '{"a": 1}', "[]", "[1]",
)  # fmt: skip
CHILD = """
import importlib.metadata, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from pdcluster_connector.launcher.vllm_shim import answer_for_vllm
answer_for_vllm()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
from importlib.metadata import version
from dev.vllm_flags import render
answer = {"read": [], "flags": {}, "table": render(parser, version("vllm")), "refused": []}
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    answer["read"].append({name: getattr(args, name, None) for name in (
        "model_tag", "tensor_parallel_size", "block_size", "enable_prefix_caching", "nnodes",
        "data_parallel_size", "api_server_count",
        "node_rank", "max_model_len", "kv_cache_dtype", "revision", "host", "port",
        "served_model_name", "max_num_seqs", "seed", "distributed_executor_backend")})
    answer["read"][-1]["kv"] = args.kv_transfer_config.kv_connector_module_path
for action in parser._actions:
    for name in action.option_strings:
        answer["flags"][name] = action.option_strings[0]
for words in json.loads(sys.argv[2]):
    try:
        parser.parse_args(["model", *words])
        answer["refused"].append(False)
    except SystemExit:
        answer["refused"].append(True)
taken = answer["taken"] = []
for name, action in parser._option_string_actions.items():
    for value in json.loads(sys.argv[3]) if action.nargs is None else ():
        try:
            parser._check_value(action, parser._get_value(action, value))
            taken.append([name, value])
        except Exception:
            pass
print("ANSWER" + json.dumps(answer, default=str))
"""


@pytest.fixture(scope="module")
def vllm():
    lines = {}
    for golden in sorted((HERE / "golden").glob("*.yaml")):
        for document in yaml.safe_load_all(golden.read_text()):
            child = document.get("apply", {})
            if child.get("kind") == "StatefulSet":
                words = child["spec"]["template"]["spec"]["containers"][0]["args"]
                words = words[words.index("--") + 1 :]
                words = [w.replace("$(PDCLUSTER_NODE_RANK)", "1") for w in words]
                lines[f"{golden.stem}/{child['metadata']['name']}"] = words
    overlaid = [name for name, words in lines.items() if words == ["/other"]]
    for name in overlaid:
        del lines[name]
    answer = ask(CHILD, list(lines.values()), json.dumps(WORDS), json.dumps(VALUES))
    return dict(zip(lines, answer["read"], strict=True)), answer["flags"], answer


@pytest.mark.vllm
def test_vllm_reads_what_the_scenarios_mean(vllm):
    read = {name.rpartition("-")[0].rpartition("-")[0]: args for name, args in vllm[0].items()}
    assert all(args["kv"] == "pdcluster_connector.vllm.connector" for args in read.values())
    assert all((args["host"], args["port"]) == ("0.0.0.0", 8000) for args in read.values())
    tiny = read["tiny-cpu/tiny-prefill"]
    assert (tiny["model_tag"], tiny["block_size"], tiny["max_model_len"]) == (
        "/models/model", 16, 1024,
    )  # fmt: skip
    assert tiny["enable_prefix_caching"] is True
    big = read["two-nodes/big-prefill"]
    assert (big["tensor_parallel_size"], big["nnodes"], big["node_rank"]) == (16, 2, 1)
    assert big["distributed_executor_backend"] == "mp"
    assert big["served_model_name"] == ["big-model"]
    wide = read["data-parallel/wide-prefill"]
    assert (wide["tensor_parallel_size"], wide["data_parallel_size"]) == (2, 4)
    assert (wide["nnodes"], wide["node_rank"], wide["api_server_count"]) == (2, 1, 1)
    hub = read["hugging-face/hub-prefill"]
    assert (hub["model_tag"], hub["kv_cache_dtype"]) == ("example/llama-8b", "bfloat16")
    assert hub["revision"].startswith("0123")
    assert (hub["enable_prefix_caching"], hub["max_num_seqs"], hub["seed"]) == (False, 8, 1)
    assert read["hugging-face/hub-decode"]["max_num_seqs"] == 64


@pytest.mark.vllm
def test_our_picture_of_vllms_flags_is_true(vllm):
    flags = vllm[1]
    # --model and --config are taken by `vllm serve` before this parser sees them.
    missing = {flag for flag in OWNED_FLAGS if flag not in flags} - {"--model", "--config"}
    assert not missing
    for short, long in SHORT_NAMES.items():
        assert flags.get(short, long) in (short, long), (short, flags[short])
        # vLLM rewrites -O before its parser sees it.
        assert short in flags or short == "-O", short
    known_shorts = {flag for flag in flags if not flag.startswith("--")} - {"-h"}
    assert known_shorts <= set(SHORT_NAMES), "a short name that could carry an owned flag"
    # An abbreviation is refused; no whole flag of vLLM may be taken for one.
    for flag in flags:
        checked = CHECKED_FLAGS.union(OWNED_FLAGS)
        whole = flag in checked or not any(name.startswith(flag) for name in checked)
        assert whole or not flag.startswith("--"), flag


@pytest.mark.vllm
def test_the_table_of_flags_is_vllms_own(vllm):
    table = Path(pdcluster_operator.api.spec.flags.__file__).with_name("vllm_flags.txt")
    assert table.read_text() == vllm[2]["table"], "run python -m dev.vllm_flags"


@pytest.mark.vllm
def test_no_value_that_vllm_reads_is_refused(vllm):
    known = {one for one in FLAG_VALUES if not one.endswith("memory-utilization")}  # up to 1
    taken = [(name, value) for name, value in vllm[2]["taken"] if name in known]
    assert len(taken) > 300
    found = {words: [str(one.rule) for one in judged(words).errors] for words in taken}
    assert [words for words, rules in found.items() if "UnreadableFlag" in rules] == []


@pytest.mark.vllm
def test_vllm_refuses_what_admission_refuses(vllm):
    refused = dict(zip(WORDS, vllm[2]["refused"], strict=True))
    assert refused == REFUSED | dict.fromkeys(UNKNOWN, True) | dict.fromkeys(BEGUN, False)


@pytest.mark.parametrize("words", WORDS)
def test_admission_refuses_what_vllm_certainly_refuses_and_warns_of_the_rest(words):
    found = judged(words)
    assert (not found.ok) is REFUSED.get(words, False), found
    warned = {str(one.rule) for one in found.warnings} & {"UnknownFlag", "UnreadableFlag"}
    assert warned == ({"UnknownFlag"} if words in (*UNKNOWN, *BEGUN) else set())
    # An image of another release, or of a version that nobody can see, may take other values.
    for image in ("docker.io/vllm/vllm-openai:v0.33.0", "registry.example/vllm:custom"):
        other = judged(words, image)
        assert other.ok or " " in words[0], other.errors
        rules = {str(one.rule) for one in (*other.errors, *other.warnings)}
        said = {str(one.rule) for one in (*found.errors, *found.warnings)}
        assert rules >= said


def test_a_flag_is_corrected_by_its_words():
    def said(*words):
        found = judged(words)
        one = next(f for f in (*found.errors, *found.warnings) if str(f.rule).endswith("Flag"))
        return one.path.removeprefix("spec.engine.extraArgs"), one.message, one.remedy

    path, _, remedy = said("--seed", "1", "--max-num-seqs 128")
    assert (path, remedy) == (
        "[2]", 'Write each as a word of its own: "--max-num-seqs", "128".',
    )  # fmt: skip
    (unknown,) = (one for one in judged(UNKNOWN[0]).warnings if one.value.startswith("--max-nmu"))
    assert unknown.rule == "UnknownFlag"
    assert "Did you mean --max-num-seqs?" in unknown.remedy
    assert "reads --max-num-seq as --max-num-seqs" in said("--max-num-seq", "1")[1]
    assert "--max-num-batched-tokens" in said("--max-num", "1")[2]
    assert "has no form with --no-" in said("--no-max-num-seqs", "1")[1]
    assert said("--seed", "1", "--max-num-seqs")[0] == "[2]"
    assert said("--enforce-eager=true")[2] == "Write the flag alone."


def judged(words, image="docker.io/vllm/vllm-openai:v0.32.0"):
    return check_manifest(
        {
            "apiVersion": "pdcluster.dev/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "x"},
            "spec": {
                "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
                "engine": {"image": image, "extraArgs": list(words)},
            },
        }
    )[1]
