"""The command lines of the scenarios, read by vLLM's own parser, and what is owned of it.

One child process does it: vLLM's imports take half a minute and leave nothing in here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import pdcluster_connector
from pdcluster_operator.api.rules.extra_args import CHECKED_FLAGS
from pdcluster_operator.api.spec.flags import OWNED_FLAGS, SHORT_NAMES

HERE = Path(__file__).parent
CHILD = """
import importlib.metadata, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from pdcluster_connector.launcher.vllm_shim import answer_for_vllm
answer_for_vllm()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
answer = {"read": [], "flags": {}}
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
print("ANSWER" + json.dumps(answer, default=str))
"""


@pytest.fixture(scope="module")
def vllm():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
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
    sources = [str(Path(package.__file__).parents[1]) for package in (pdcluster_connector,)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(sources)],
        input=json.dumps(list(lines.values())),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers, done.stderr[-3000:]
    answer = json.loads(answers[0].removeprefix("ANSWER"))
    return dict(zip(lines, answer["read"], strict=True)), answer["flags"]


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
