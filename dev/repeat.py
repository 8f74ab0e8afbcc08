"""Run the pure tests many times under load, and name every test that failed.

    make repeat                      20 runs, 4 of them at a time
    make repeat RUNS=40 COPIES=2
    make repeat TESTS="connector/tests/launcher -k drain"
    make repeat JITTER=1        threads and processes are stalled at random (dev/jitter.py)

A test that fails only now and then fails here. Each run has two workers, so 4 runs at a time
are a load of 8. With ``JITTER``, a number, run N has the seed JITTER + N - 1. The output of each
run stays in a folder, whose path is printed first. The exit code is 0 only if no test failed in any
run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="pdcluster-repeat-"))
    print(f"{options.runs} runs, {options.copies} at a time; output in {folder}", flush=True)
    words = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-q", *options.words]
    if options.jitter is not None:
        words = ["-p", "jitter", *words]

    def run(number: int) -> list[str]:
        began, log = time.monotonic(), folder / f"run-{number}.txt"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "pytest", *words]
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(options.jitter, number),
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
        text = log.read_text(errors="replace")
        # A run that ends without naming a test, such as a crash, is a fault, too.
        found = [] if code == 0 else FAULTS.findall(text) or [f"exit code {code}, see {log}"]
        seconds = time.monotonic() - began
        print(f"run {number}: {text.strip().splitlines()[-1]} ({seconds:.0f} s)", flush=True)
        return found

    with ThreadPoolExecutor(options.copies) as pool:
        faults = [found for found in pool.map(run, range(1, options.runs + 1)) if found]
    for test, count in Counter(test for found in faults for test in set(found)).most_common():
        print(f"{count} of {options.runs}: {test}")
    print(f"{options.runs - len(faults)} of {options.runs} runs without a failure")
    return 1 if faults else 0


def environment(jitter: int | None, number: int) -> dict[str, str]:
    """What run ``number`` sees; with jitter also its seed, and where the plugin is."""
    if jitter is None:
        return dict(os.environ)
    path = f"{ROOT / 'dev'}{os.pathsep}{os.environ['PYTHONPATH']}"
    return {**os.environ, "PYTHONPATH": path, "PDCLUSTER_JITTER": str(jitter + number - 1)}


def arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--runs", type=int, default=20, help="how many runs (default: 20)")
    parser.add_argument("--copies", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--jitter", type=int, help="stall the tests; the seed of the first run")
    parser.add_argument("words", nargs="*", help="further words for pytest, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
