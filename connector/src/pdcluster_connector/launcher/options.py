"""The launcher's own command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from pdcluster_connector import __version__
from pdcluster_connector.protocol.engine_id import EngineId, new_engine_id

RUNNER: Final = "pdcluster_connector.launcher.vllm_shim"

_DESCRIPTION: Final = """\
Start one vLLM engine of a PDCluster and look after it.

Everything after -- goes to `vllm serve`: the model first, then its flags. The launcher
gives the engine its identity (it writes engine_id into --kv-transfer-config), checks
what would make the start fail, passes output and signals on, and answers over HTTP
whether the engine is ready and whether KV moves between it and its peers.
"""

_EPILOG: Final = """\
example:
  python3 connector.pyz --engine default.llama.prefill.7f9c4.0 --role prefill -- \\
    /models/llama --port 8000 --kv-transfer-config '{
      "kv_connector": "PDClusterConnector",
      "kv_connector_module_path": "pdcluster_connector.vllm.connector",
      "kv_role": "kv_producer"}'

while it runs:
  curl localhost:5590/readyz           state of the engine: 200 when it may get requests
  curl localhost:5590/v1/links         links to prefill engines (decode only)
  curl -X POST localhost:5590/v1/drain no new requests; those under way finish

signals:
  SIGTERM or SIGINT drains the engine, then stops it; a second one kills it at once.

exit code:
  the engine's own; 128 + n when signal n ended it; 1 when it ended with 0 and nobody had
  told it to end; 2 for a wrong command line; 78 when a check before the start failed. The
  reason is on stderr and in --termination-log.

environment:
  VLLM_API_KEY              the key that the engine's API asks for; the launcher sends it too
  PDCLUSTER_ANY_VERSION=1   start also with a vLLM or NIXL outside of the supported range
"""


class UsageError(Exception):
    """The launcher's command line is wrong. The message says what and how to correct it."""


@dataclass(frozen=True, slots=True)
class Options:
    """The launcher's command line.

    Attributes:
        engine: the engine's id, with an incarnation that is new for each start.
        role: ``prefill`` or ``decode``.
        host: address of the launcher's HTTP interface.
        port: its port.
        metrics_port: port of the engine's metrics alone; 0 for none.
        termination_log: the file for the reason of the engine's end.
        drain_seconds: how long a stop waits for requests and leases.
        stop_seconds: how long the engine may take to end before it is killed.
        runner: Python module that takes ``vllm serve``'s arguments.
        vllm: those arguments.
    """

    engine: EngineId
    role: str
    host: str
    port: int
    metrics_port: int
    termination_log: Path
    drain_seconds: float
    stop_seconds: float
    runner: str
    vllm: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; raises UsageError, and SystemExit for ``--help``."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    parser = _Parser(
        prog="connector.pyz",
        usage="python3 connector.pyz --engine ID --role prefill|decode [options] -- MODEL [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engine", required=True, metavar="ID", help="namespace.cluster.role.revision.index")
    add("--role", required=True, choices=("prefill", "decode"), help="what this engine does")
    add("--host", default="0.0.0.0", help="address of the launcher's HTTP interface (%(default)s)")  # noqa: S104
    add("--port", type=_port, default=5590, help="its port (%(default)s)")
    add(
        "--metrics-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="also serve the engine's metrics, and nothing else, on this port (not served)",
    )
    add(
        "--termination-log",
        type=Path,
        default=Path("/dev/termination-log"),
        metavar="PATH",
        help="file for the reason of the engine's end, if the file exists (%(default)s)",
    )
    add(
        "--drain-seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long a stop waits for requests and leases (%(default)g)",
    )
    add(
        "--stop-seconds",
        type=_seconds,
        default=20.0,
        metavar="S",
        help="how long the engine may take to end after that (%(default)g)",
    )
    add("--runner", default=RUNNER, metavar="MODULE", help="module that runs vLLM (%(default)s)")
    add("--version", action="version", version=f"pdcluster {__version__}")
    known = parser.parse_args(words[:cut])
    if cut == len(words):
        raise UsageError("the engine's arguments are missing: add -- MODEL [flags of vllm serve]")
    try:
        known.engine = new_engine_id(known.engine)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Options(**vars(known), vllm=tuple(words[cut + 1 :]))


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value
