"""The reason of an engine's death, from output of real vLLM 0.32 engines."""

from __future__ import annotations

import signal

import pytest
from launched import HERE

from pdcluster_connector.launcher.engine.last_words import MAX_WORDS, choose, death
from pdcluster_connector.launcher.inside_vllm import obituary

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


def test_the_reason_is_bounded():
    assert len(choose(["ValueError: " + "x" * 100_000]) or "") == MAX_WORDS


def test_nothing_said():
    assert choose([]) is None
    assert choose(["", "   ", "INFO: all is well"]) is None


CORE_KILLED = "pdcluster: " + obituary("EngineCore", 77, signal.SIGKILL)
HANDLER = (
    "(APIServer pid=1) ERROR 11-21 04:00:14 [async_llm.py:906] AsyncLLM output_handler failed."
)


def test_a_process_that_was_killed_is_named_whatever_else_was_said():
    old = "(APIServer pid=1) ERROR 11-21 03:58:19 [x.py:9] ValueError: of a request an hour ago"
    words = "vLLM's process EngineCore was killed by SIGKILL"
    assert choose([HANDLER]) == "AsyncLLM output_handler failed."
    assert choose([old, HANDLER, CORE_KILLED]) == words
    assert choose([CORE_KILLED, old, HANDLER]) == words
    assert choose([f"(EngineCore pid=5) {CORE_KILLED}"]) == words


def test_a_cause_of_its_own_wins_over_any_other_signal():
    aborted = "pdcluster: " + obituary("VllmWorker-1", 77, signal.SIGABRT)
    cause = ["terminate called after throwing an instance of 'x'", "  what():  no GPU"]
    assert choose([*cause, aborted]) == "no GPU"
    assert choose([HANDLER, aborted]) == "vLLM's process VllmWorker-1 was killed by SIGABRT"


def test_a_death_in_one_sentence():
    def told(code: int, words: str | None) -> str:
        return death(code, words, out_of_memory=False)

    assert told(1, "ValueError: x") == "ValueError: x"
    assert told(137, None) == "vLLM's API server was killed by SIGKILL"
    assert told(139, "x") == "vLLM's API server was killed by SIGSEGV; its last words: x"
    assert told(3, None) == "the engine ended with code 3 and did not say why"
    assert told(255, None) == "the engine ended with code 255 and did not say why"


def test_out_of_memory_names_the_process_that_the_kernel_killed():
    def told(code: int, words: str | None) -> str:
        return death(code, words, out_of_memory=True, process="vLLM's headless server")

    core = choose([HANDLER, CORE_KILLED])
    assert told(1, core).startswith(
        "out of memory: the kernel killed vLLM's process EngineCore; raise the memory limit, or "
    )
    assert told(137, None).startswith("out of memory: the kernel killed vLLM's headless server; ")
    # Another program of the same cgroup was killed; this engine ended by itself.
    assert told(1, "ValueError: x") == "ValueError: x"
    assert told(139, None) == "vLLM's headless server was killed by SIGSEGV"


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=1) WARNING 11-21 03:58:19 [x.py:9] "])
@pytest.mark.parametrize("what", ["sub process python", "remaining process EngineCore"])
def test_what_vllm_itself_ended_is_no_cause(prefix, what):
    """While vLLM ends a hung engine core, the core may still tell of its workers."""
    died = f"pdcluster: {obituary('VllmWorker-0', 71, signal.SIGKILL)}"
    forced = f"{prefix}[shutdown] Process manager: force killing {what} pid 71"
    assert choose(["RuntimeError: the cause", forced, died]) == "RuntimeError: the cause"
    assert choose(["RuntimeError: the cause", died, forced]) == "RuntimeError: the cause"
    other = forced.replace("71", "7")
    killed = "vLLM's process VllmWorker-0 was killed by SIGKILL"
    assert choose(["RuntimeError: a wrapper", other, died]) == killed
