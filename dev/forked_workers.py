"""pytest's workers, forked from one process that has imported the product and its libraries.

`python dev/forked_workers.py 8 --dist worksteal …` is `python -m pytest -n 8 --dist worksteal …`,
but no worker takes its own CPU second for these imports. pytest is imported by the workers: it has
to see how its plugins and the tests are imported. Linux only, for its descriptors of processes.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys


def stand_in(name: str, program: str) -> int:
    """Hand the input and output of this process to a new worker; end as it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        host.connect(f"\0{name}")
        socket.send_fds(host, [program.encode()], [0, 1, 2])
        os.close(0)
        os.close(1)
        return int(host.recv(100) or b"1")


def import_all() -> None:
    """Import what pure tests import: all of the product but what needs vLLM."""
    for package in ("pdcluster_operator", "pdcluster_connector"):
        folders = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folders, f"{package}.", onerror=lambda _: None):
            if ".vllm" not in module.name and not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def main() -> str:
    """Run pytest and fork its workers. Returns in these alone: what each is to execute."""
    name = f"pdcluster-workers-{os.getpid()}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{name}")
    listening.listen(64)
    spec = f"{sys.argv[1]}*popen//python={sys.executable} -S {__file__} {name}"
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "--tx", spec, *sys.argv[2:]])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest gets it too, and ends the workers
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a worker would copy all that was imported
    ends = os.pidfd_open(tests.pid)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([ends, listening, *running], [], [])[0]:
            if ready is listening:
                asking = listening.accept()[0]
                program, descriptors, _, _ = socket.recv_fds(asking, 1 << 16, 3)
                if (pid := os.fork()) == 0:
                    for one in (listening, asking, *(other for _, other in running.values())):
                        one.detach()  # closed in the next lines, and by nobody else later
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                    os.closerange(3, 256)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    return program.decode()
                for descriptor in descriptors:
                    os.close(descriptor)
                running[os.pidfd_open(pid)] = pid, asking
            elif ready == ends:
                sys.exit(tests.wait())
            else:
                pid, asking = running.pop(ready)
                with asking:
                    asking.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(ready)


if __name__ == "__main__":
    if sys.argv[2:4] == ["-u", "-c"]:
        sys.exit(stand_in(sys.argv[1], sys.argv[-1]))
    PROGRAM = main()
    sys.argv = ["-c"]
    sys.path[0] = ""
    del __file__
    exec(compile(PROGRAM, "<string>", "exec", dont_inherit=True))  # as `python -c` does
