"""What the launcher starts instead of vLLM in tests: a real process, told how to behave.

``STAND_IN`` is a ``;``-separated list: ``serve``, ``say:TEXT``, ``err:TEXT``, ``exit:CODE``,
``signal:N``, ``children``, ``deaf`` (ignores SIGTERM), ``slow:SECONDS`` or ``busy:SECONDS``, and
``slow:FILE`` or ``busy:FILE`` (as long as it exists), ``prompts:REASON=NUMBER`` (counts as a
decode engine),
``log:FILE``, ``hungry`` (takes memory until it ends), ``core:DOING`` (waits for a process
EngineCore that is ``idle``, ``hungry`` or ``stopped``, and fails as vLLM's API server does).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pdcluster_connector.launcher.inside_vllm import report_deaths


class Handler(BaseHTTPRequestHandler):
    busy_until = 0.0
    busy_with: Path | None = None
    prompts = ""

    def do_GET(self) -> None:
        held = self.busy_with is not None and self.busy_with.exists()
        busy = float(held or time.monotonic() < self.busy_until)
        text = f'vllm:num_requests_running{{engine="0"}} {busy}\npdcluster_kv_leases_held {busy}\n'
        text += self.prompts
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode() if self.path == "/metrics" else b"")

    def log_message(self, *_: object) -> None:
        pass


def serve(arguments: list[str]) -> None:
    heeds = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if heeds:
        # Waited for, not handled: Python runs a handler only once the main thread wakes up, and
        # the kernel may give the signal to another one.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if "--headless" not in arguments:
        port = int(arguments[arguments.index("--port") + 1])
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if heeds:
        signal.sigwait({signal.SIGTERM})
        os._exit(0)
    time.sleep(600)


def start_children() -> list[int]:
    """A child, one that left the process group, and one whose parent is gone."""
    forever = [sys.executable, "-c", "import time; time.sleep(600)"]
    orphan = f"import subprocess; print(subprocess.Popen({forever}, stdout=-3).pid)"
    parent = subprocess.run(
        [sys.executable, "-c", orphan], stdout=subprocess.PIPE, check=True, text=True
    )
    return [
        subprocess.Popen(forever).pid,
        subprocess.Popen(forever, start_new_session=True).pid,
        int(parent.stdout),
    ]


def be_slow(value: str) -> None:
    if not value.startswith("/"):
        time.sleep(float(value))
        return
    while Path(value).exists():
        time.sleep(0.05)


def be_busy(value: str) -> None:
    if value.startswith("/"):
        Handler.busy_with = Path(value)
    else:
        Handler.busy_until = time.monotonic() + float(value)


def count_prompts(value: str) -> None:
    """Say that the two ranks of an engine computed prompts, and that ten came from prefill."""
    reason, _, number = value.partition("=")
    name, moved = "pdcluster_kv_prompts_total", 'outcome="transferred",reason=""'
    local = f'outcome="local",reason="{reason}"'
    Handler.prompts = (
        f'{name}{{engine="0",{moved}}} 10.0\n'
        f'{name}{{engine="0",{local}}} 1.0\n'
        f'{name}{{engine="1",{local}}} {int(number) - 1}\n'
    )


def idle() -> None:
    time.sleep(600)


def hungry(_: str = "") -> None:
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))


def wait_for_core(doing: str) -> None:
    import multiprocessing  # late: few tests need it

    report_deaths()
    work = hungry if doing == "hungry" else idle
    core = multiprocessing.get_context("spawn").Process(target=work, name="EngineCore")
    core.start()
    print(f"core {core.pid}", flush=True)
    if doing == "stopped":
        core.terminate()
    core.join()
    place = "ERROR 11-21 04:00:14 [async_llm.py:906]"
    print(f"(APIServer pid=1) {place} AsyncLLM output_handler failed.", file=sys.stderr, flush=True)
    sys.exit(1)


ENDS = {"core": wait_for_core, "hungry": hungry, "serve": lambda _: serve(sys.argv[1:])}


STATES = {"busy": be_busy, "prompts": count_prompts}


def take(step: str) -> None:
    name, _, value = step.partition(":")
    if name in ENDS:
        ENDS[name](value)
    elif name == "say":
        print(value, flush=True)
    elif name == "err":
        print(value, file=sys.stderr, flush=True)
    elif name == "log":
        sys.stdout.write(Path(value).read_text())
        sys.stdout.flush()
    elif name == "exit":
        sys.exit(int(value))
    elif name == "signal":
        os.kill(os.getpid(), int(value))
    elif name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "slow":
        be_slow(value)
    elif name in STATES:
        STATES[name](value)


def main() -> None:
    steps = os.environ["STAND_IN"].split(";")
    about = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "children": start_children() if "children" in steps else [],
    }
    print(json.dumps(about), flush=True)
    for step in steps:
        take(step)


if __name__ == "__main__":
    main()
