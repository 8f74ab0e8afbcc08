"""``python3 connector.pyz``: checks, starts the engine, serves its state, and ends with it."""

import os
import sys
from pathlib import Path
from typing import Final, NoReturn

import pdcluster_connector
from pdcluster_connector.launcher import installed_versions, say
from pdcluster_connector.launcher.arguments import ArgumentError, EngineCommand, engine_command
from pdcluster_connector.launcher.before_start import Port, problems
from pdcluster_connector.launcher.options import Options, UsageError, parse
from pdcluster_connector.listening import every_address

EX_USAGE: Final = 2
EX_CONFIG: Final = 78
_MAX_TERMINATION_LOG: Final = 4000


def main() -> NoReturn:
    """Run the launcher with the process's command line; exits with the engine's code."""
    arguments = sys.argv[1:]
    try:
        options = parse(arguments)
        command = engine_command(
            options.vllm,
            engine_id=options.engine.engine,
            role=options.role,
            every_address=every_address(),
        )
    except (UsageError, ArgumentError) as error:
        _last_words(_termination_log(arguments), str(error))
        sys.exit(EX_USAGE)
    sys.exit(_run(options, command))


def _run(options: Options, command: EngineCommand) -> int:
    found = installed_versions.installed()
    say(f"{installed_versions.one_line(found)}; {options.role} engine {options.engine.engine}")
    own = [Port(options.host, options.port, "the launcher", "pass another --port before --")]
    if options.metrics_port and command.is_leader:
        remedy = "pass another --metrics-port before --"
        own.append(Port(options.host, options.metrics_port, "the metrics page", remedy))
    if wrong := problems(command, found, os.environ, own):
        _last_words(options.termination_log, "\n".join(wrong))
        return EX_CONFIG
    # Imported late: a wrong command line is answered at once.
    import asyncio

    from pdcluster_connector import listening
    from pdcluster_connector.certificate_files import Tls, TlsError
    from pdcluster_connector.launcher.supervisor import Supervisor

    try:
        tls = Tls(command.tls, options.engine.engine) if command.tls else None
    except TlsError as error:
        _last_words(options.termination_log, str(error))
        return EX_CONFIG
    listening.allow_many_connections()
    # The folder or zip file that holds this package, for vLLM's processes to import from.
    package = Path(os.path.abspath(pdcluster_connector.__file__)).parent.parent
    supervisor = Supervisor(options, command, found, package, tls)
    code, reason = asyncio.run(supervisor.run())
    if reason:
        _last_words(options.termination_log, reason)
    return code


def _last_words(log: Path, reason: str) -> None:
    for line in reason.splitlines():
        say(line)
    # In a pod, the kubelet has made this file. Elsewhere nobody reads it, unless the caller has
    # made it.
    if log.exists():
        try:
            log.write_text(reason.encode()[:_MAX_TERMINATION_LOG].decode(errors="ignore") + "\n")
        except OSError as error:
            say(f"cannot write {log}: {error.strerror}")


def _termination_log(arguments: list[str]) -> Path:
    """``--termination-log`` of a command line that could not be parsed."""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--termination-log":
            return Path(value if equals else "".join(arguments[index + 1 : index + 2]))
    return Path("/dev/termination-log")
