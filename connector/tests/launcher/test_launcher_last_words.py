"""The reason of an engine's death, from output of real vLLM 0.32 engines."""

from __future__ import annotations

import pytest
from launched import HERE

from pdcluster_connector.launcher.last_words import MAX_LINE, MAX_WORDS, LastLines, choose, death

REASONS = {
    "unknown-flag": "unrecognized arguments: --no-such-flag 3",
    "no-model-folder": "HFValidationError: Repo id must be in the form 'repo_name' or "
    "'namespace/repo_name': '/models/llama'.",
    "broken-config": "OSError: It looks like the config file at '/models/broken/config.json' is "
    "not a valid JSON file.",
    "no-weights": "RuntimeError: Cannot find any model weights with `/models/noweights`",
    "cut-weights": "SafetensorError: Error while deserializing header: incomplete metadata, file "
    "not fully covered",
    "two-workers-cut-weights": "SafetensorError: Error while deserializing header: incomplete",
    "busy-port": "OSError: [Errno 98] Address already in use",
    "model-length-too-long": "ValidationError: 1 validation error for ModelConfig: Value error, "
    "User-specified max_model_len (999999) is greater than the derived max_model_len",
    "kv-space-too-large": "ValueError: Available memory on node 0 (9.37/11.09 GiB) on kv cache "
    "allocation is less than requested memory for kv (2000.0 GiB). Decrease",
    "no-connector-module": "ModuleNotFoundError: No module named 'no_such_module'",
    "core-killed": "vLLM's process EngineCore was killed by SIGKILL",
    "worker-killed": "vLLM's process VllmWorker-0 died",
    "worker-segfault": "vLLM's process VllmWorker-0 ",
    "second-worker-killed": "vLLM's process VllmWorker-1 was killed by SIGKILL",
}


@pytest.mark.parametrize(("log", "reason"), REASONS.items())
def test_reason_of_a_real_death(log, reason):
    lines = (HERE / "logs" / f"{log}.log").read_text().splitlines()
    words = choose(lines)
    assert words is not None
    assert words.startswith(reason)


@pytest.mark.parametrize("log", ["healthy", "stopped"])
def test_a_healthy_engine_has_no_last_words(log):
    assert choose((HERE / "logs" / f"{log}.log").read_text().splitlines()) is None


def test_cause_wins_over_everything_that_follows_it():
    core = "(EngineCore pid=2) ERROR 11-21 03:58:19 [x.py:9] "
    died = "Worker proc VllmWorker-0 died unexpectedly (exit code: 1), shutting down executor."
    lines = [
        "(Worker_TP0 pid=3) ERROR 11-21 03:58:19 [x.py:9] ValueError: the cause",
        core + died,
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ]
    assert choose(lines) == "ValueError: the cause"
    assert choose(lines[1:]) == "vLLM's process VllmWorker-0 ended with exit code 1"
    assert choose(lines[2:]) == (
        "RuntimeError: Engine core initialization failed. See root cause above."
    )
    assert choose(lines[4:]) is None


def test_a_wrapper_that_quotes_its_cause():
    line = (
        "RuntimeError: Worker failed with error 'it's cold', please check the stack trace above "
        "for the root cause"
    )
    assert choose([line]) == "it's cold"


def test_native_ends():
    assert choose(["Fatal Python error: Segmentation fault"]) == "Segmentation fault"
    assert choose(["terminate called after throwing an instance of 'x'", "  what():  no GPU"]) == (
        "no GPU"
    )


def test_the_memory_is_bounded():
    lines = LastLines(limit=10)
    lines.add("ValueError: long ago")
    for _ in range(10):
        lines.add("noise")
    assert lines.words() is None
    lines.add("ValueError: " + "x" * 100_000)
    assert len(lines.words() or "") == MAX_LINE
    assert len(choose(["ValueError: " + "x" * 100_000]) or "") == MAX_WORDS


def test_nothing_said():
    assert choose([]) is None
    assert choose(["", "   ", "INFO: all is well"]) is None


def test_a_death_in_one_sentence():
    assert death(1, "ValueError: x", starved=False) == "ValueError: x"
    assert death(137, None, starved=False) == "the engine was killed by SIGKILL"
    assert death(139, "x", starved=False) == "the engine was killed by SIGSEGV; its last words: x"
    assert death(3, None, starved=False) == "the engine ended with code 3 and did not say why"
    assert death(255, None, starved=False) == "the engine ended with code 255 and did not say why"
    assert death(1, "EngineDeadError", starved=True).startswith("out of memory: the kernel killed")
