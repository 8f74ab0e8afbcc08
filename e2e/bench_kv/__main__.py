"""`make bench`: our connector beside vLLM's NixlConnector and raw NIXL, held against thresholds.

The parts: moves (connectors alone, in engines that compute nothing), lists (of a large peer),
in-process (engines of one process each) and served (whole engines).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("moves", "lists", "in-process", "served")
SECONDS = 900


def say(text: str) -> None:
    """Tell a person how far it is."""
    print(f"bench: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the table; return 1 if a number is outside its bound."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--rounds", type=int, default=0, help="of each row, instead of its own")
    parser.add_argument("--output", type=Path, help="file that gets the numbers, one line a run")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="file of the phases")
    parser.add_argument(
        "--checkout", type=Path, help="an older version of this repository, served beside"
    )
    parser.add_argument(
        "--checkout-without-tls", action="store_true", help="the older one knows no certificates"
    )
    parser.add_argument(
        "--calm", action="store_true", help="NixlConnector with a progress thread that waits, too"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end, too
    if options.part:
        print(json.dumps(_measured(options)))
        return 0
    if options.rounds < 0:
        parser.error(f"--rounds {options.rounds}: write 1 or more")
    unknown = set(parts := options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts {options.parts}: {', '.join(sorted(unknown))} is none of"
                     f" {', '.join(PARTS)}")  # fmt: skip
    found: dict[str, Any] = {
        "commit": _commit(), "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
        "load": [round(os.getloadavg()[0], 1)],
    }  # fmt: skip
    for part in parts:
        found |= _in_a_process(part)
        found["load"].append(round(os.getloadavg()[0], 1))
    from bench_kv import report, thresholds

    print(report.table(found), flush=True)
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(json.dumps(found) + "\n")
    if options.picture is not None and "phases" in found:
        options.picture.write_text(report.svg(found["phases"]))
    missed = thresholds.missed(found)
    for line in missed:
        say(line)
    return int(bool(missed))


def _in_a_process(part: str) -> dict[str, Any]:
    """Measure one part in a process of its own: each imports what the other must not have."""
    command = [sys.executable, "-m", "bench_kv", *sys.argv[1:], "--part", part]
    environment = {**os.environ, "UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "WARN"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{part} took longer than {SECONDS} s") from None
        finally:
            process.terminate()  # if it still runs, it ends its engines
    if process.returncode:
        raise SystemExit(f"{part} could not be measured")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    numbers: dict[str, Any] = json.loads(lines[-1])
    return numbers


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    rounds = {"rounds": options.rounds} if options.rounds else {}
    if options.part == "moves":
        from bench_kv import moves

        kinds = [*moves.ARMS, *([moves.CALM] if options.calm else [])]
        return moves.measure(moves.Size(**rounds), say, kinds)
    if options.part == "lists":
        from bench_kv import lists

        return lists.measure(**rounds)
    from bench_kv import as_served, in_process, served

    arms = [*as_served.ARMS, *([served.CALM] if options.calm else [])]
    if options.part == "in-process":
        return in_process.measure(arms, as_served.Size(**rounds), say)
    if options.checkout is not None:
        arms.append(served.older(options.checkout, tls=not options.checkout_without_tls))
    return as_served.measure(arms, as_served.Size(**rounds), say)


def _commit() -> str:
    """Return the commit that was measured; with ``-dirty`` if files differ from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
