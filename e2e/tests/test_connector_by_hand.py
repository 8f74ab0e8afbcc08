"""docs/connector.md: two engines and a router, without an operator."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from by_hand import ROOT, engines, router_and_request, snippet, transfer_configs

import machine
from pdcluster_connector.vllm.config import parse_options

CPU, GPU = "On a CPU", "On two GPUs"
SECONDS = 600
# Another process of this machine may listen on the ports that a reader has free.
OWN_NETWORK = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
PARSE = """
import json, sys
import pdcluster_connector.launcher.vllm_shim
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    config = args.kv_transfer_config
    print("PORT", args.port, config.kv_role, config.kv_connector_module_path)
"""


@pytest.mark.local
@pytest.mark.timeout(SECONDS + 200)
def test_the_snippet_for_a_cpu_moves_kv() -> None:
    unshared = machine.unshared("--net") if os.geteuid() == 0 and shutil.which("ip") else ()
    command = [*unshared, *(OWN_NETWORK if unshared else ()), "bash", "-c", snippet(CPU)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        said = f"{done.stdout}\n{done.stderr}\n{last_words()}"
        answer = json.loads(done.stdout or "{}")
        assert answer.get("usage", {}).get("completion_tokens") == 16, said
        assert answer["kv_transfer_params"]["kv_path"]["bytes"] > 0, said
        _, alive = psutil.wait_procs(started_here(), timeout=120)
        assert alive == [], said
    finally:
        for process in started_here():
            process.kill()


def last_words() -> str:
    """The end of the logs that the snippet writes."""
    logs = [Path(f"/tmp/{name}.log") for name in ("prefill", "decode", "router")]
    return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs if log.exists())


def started_here() -> list[psutil.Process]:
    """The snippet's engines and router that still run."""
    marks = ("pdcluster_connector.launcher.vllm_shim", "vllm-router")
    found = []
    for process in psutil.process_iter():
        try:
            words, folder = process.cmdline(), process.cwd()
        except psutil.Error:
            continue
        if folder == str(ROOT) and any(word.endswith(mark) for word in words for mark in marks):
            found.append(process)
    return found


@pytest.mark.parametrize("heading", [CPU, GPU])
def test_a_snippet_is_shell_and_its_options_are_known_to_the_connector(heading: str) -> None:
    text = snippet(heading)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    prefill, decode = transfer_configs(text)
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    options = [parse_options(c.get("kv_connector_extra_config", {})) for c in (prefill, decode)]
    assert len({option.side_channel_port for option in options}) == 2
    for config in (prefill, decode):
        assert importlib.util.find_spec(config["kv_connector_module_path"]) is not None


def test_both_snippets_differ_in_how_engines_start_alone() -> None:
    cpu, gpu = snippet(CPU), snippet(GPU)
    assert transfer_configs(cpu) == transfer_configs(gpu)
    assert router_and_request(cpu) == router_and_request(gpu)


def test_on_gpus_each_engine_has_one_of_its_own_and_pip_knows_the_extra() -> None:
    text = snippet(GPU)
    devices = re.findall(r'^CUDA_VISIBLE_DEVICES=(\d) "\$\{SERVE\[@\]\}"', text, re.MULTILINE)
    assert devices == ["0", "1"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [install] = [line for line in text.splitlines() if line.startswith("pip install")]
    [extra] = [word[2:-1] for word in shlex.split(install) if word.startswith(".[")]
    assert extra in project["optional-dependencies"]


@pytest.mark.vllm
def test_vllms_own_parser_takes_the_flags_for_gpus() -> None:
    lines = [words[2:] for words in engines(snippet(GPU)) if words[:2] == ["vllm", "serve"]]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "connector" / "src")},
    )
    module = "pdcluster_connector.vllm.connector"
    said = [line for line in done.stdout.splitlines() if line.startswith("PORT")]
    assert said == [
        f"PORT 8001 kv_producer {module}",
        f"PORT 8002 kv_consumer {module}",
    ], done.stderr[-3000:]
