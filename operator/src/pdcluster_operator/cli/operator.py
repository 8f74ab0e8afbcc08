"""``pdcluster-operator run`` and ``pdcluster-operator webhook``: the processes of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdcluster_operator.cli.exits import Exit

log = logging.getLogger(__name__)

SOMETHING_FAILED = 1
PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``pdcluster-operator``."""
    root = argparse.ArgumentParser(
        "pdcluster-operator", description="The operator of PDClusters, and its admission webhook."
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="reconcile PDClusters")
    run.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="namespace to watch; may be given several times (default: all namespaces)",
    )
    run.add_argument(
        "--authority-secret",
        type=_pair,
        metavar="NAMESPACE/NAME",
        help="Secret with the CA of all engines' certificates; its key is made at the first start "
        "(default: a CA for as long as the process runs)",
    )
    run.add_argument(
        "--webhook-configuration",
        metavar="NAME",
        help="make and renew the webhook's certificate, and write its CA into this "
        "ValidatingWebhookConfiguration",
    )
    run.add_argument(
        "--webhook-service",
        type=_pair,
        metavar="NAMESPACE/NAME",
        help="Service of the webhook, for whose name the certificate is made",
    )
    run.add_argument(
        "--webhook-secret",
        type=_pair,
        metavar="NAMESPACE/NAME",
        help="Secret in which the certificate is stored",
    )
    run.add_argument(
        "--launcher-poll-seconds",
        type=float,
        default=1.0,
        metavar="N",
        help="wait at least N seconds between two requests to one launcher (default 1)",
    )
    run.add_argument(
        "--operator-class",
        default="",
        metavar="NAME",
        help="work only on PDClusters whose spec.operatorClass is NAME (default: on those "
        "without one)",
    )
    run.add_argument(
        "--sweep-seconds",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time between two lists of all objects (default 300)",
    )
    run.add_argument(
        "--keep-connector-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a namespace keeps a connector that nothing mounts any more (default 600)",
    )
    run.add_argument(
        "--engine-certificate-folder",
        type=Path,
        metavar="DIR",
        help="folder with ca.crt, tls.crt and tls.key; the operator shows this certificate to "
        "engines with spec.transfer.tls: Mounted; without the folder, it refuses such PDClusters",
    )
    webhook = commands.add_parser("webhook", help="answer admission reviews")
    webhook.add_argument(
        "--certificate-folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with tls.crt and tls.key; they are read again when they change",
    )
    webhook.add_argument(
        "--port", type=int, default=9443, help="port for admission reviews (default 9443)"
    )
    webhook.add_argument(
        "--admit-mounted-certificates",
        action="store_true",
        help="admit spec.transfer.tls: Mounted; the operator needs --engine-certificate-folder",
    )
    for command in (run, webhook):
        command.add_argument(
            "--allow-host-path-models",
            action="store_true",
            help="admit folders of the nodes; whoever may create a PDCluster can then read them",
        )
        command.add_argument(
            "--health-port", type=int, default=8081, help="port for health checks (default 8081)"
        )
        command.add_argument(
            "--metrics-port", type=int, default=8080, help="port for metrics (default 8080)"
        )
        command.add_argument(
            "--host",
            default="0.0.0.0",  # noqa: S104 - a pod's own network
            help="address to listen on (default: all)",
        )
        command.add_argument(
            "--log-level", choices=("debug", "info", "warning", "error"), default="info"
        )
        command.add_argument("--log-format", choices=("json", "plain"), default="plain")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    root = parser()
    options = root.parse_args(arguments)
    parts = ("webhook_configuration", "webhook_service", "webhook_secret")
    given = [getattr(options, part, None) is not None for part in parts]
    if any(given) and not all(given):
        root.error("--webhook-configuration, --webhook-service and --webhook-secret go together")

    set_up_logs(options.log_level, options.log_format)
    work = _operator(options) if options.command == "run" else _webhook(options)
    try:
        asyncio.run(_until_signal(work))
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except Exception as error:
        # Kubernetes starts the process again. Nothing is lost: all state is in the API server.
        log.error("stopped: %s", error, exc_info=options.log_level == "debug")
        return SOMETHING_FAILED
    return int(Exit.DONE)


Work = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


def _operator(options: argparse.Namespace) -> Work:
    from pdcluster_operator.adapters.operator_process import OperatorOptions
    from pdcluster_operator.adapters.own_secrets import WebhookPlace
    from pdcluster_operator.handlers import run_operator

    place = None
    if options.webhook_configuration is not None:
        place = WebhookPlace(
            options.webhook_configuration, options.webhook_service, options.webhook_secret
        )
    chosen = OperatorOptions(
        authority=options.authority_secret,
        namespaces=tuple(options.namespace),
        host_path_models=options.allow_host_path_models,
        webhook=place,
        host=options.host,
        health_port=options.health_port,
        metrics_port=options.metrics_port,
        sweep_seconds=options.sweep_seconds,
        launcher_poll_seconds=options.launcher_poll_seconds,
        operator_class=options.operator_class,
        engine_certificate=options.engine_certificate_folder,
        keep_connector_seconds=options.keep_connector_seconds,
    )
    return lambda stop: run_operator(chosen, stop)


def _webhook(options: argparse.Namespace) -> Work:
    from pdcluster_operator.adapters.webhook_process import WebhookOptions
    from pdcluster_operator.handlers import run_webhook

    chosen = WebhookOptions(
        folder=options.certificate_folder,
        host_path_models=options.allow_host_path_models,
        mounted_certificates=options.admit_mounted_certificates,
        host=options.host,
        port=options.port,
        health_port=options.health_port,
        metrics_port=options.metrics_port,
    )
    return lambda stop: run_webhook(chosen, stop)


async def _until_signal(work: Work) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The adapter sets handlers of its own once it runs. They end it the same way.
        loop.add_signal_handler(number, stop.set)
    await work(stop)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str, form: str) -> None:
    """Send every logger's lines to stderr; ``form`` is json or plain."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _pair(text: str) -> tuple[str, str]:
    namespace, separator, name = text.partition("/")
    if not separator or not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


if __name__ == "__main__":
    sys.exit(main())
