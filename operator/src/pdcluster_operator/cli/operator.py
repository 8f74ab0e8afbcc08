"""``pdcluster-operator run`` and ``pdcluster-operator webhook``: the processes of a cluster."""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdcluster_operator.cli.exits import Exit

log = logging.getLogger(__name__)

SOMETHING_FAILED = 1
PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``pdcluster-operator``.

    An option is stored under its field's name in ``OperatorOptions`` or ``WebhookOptions``. The
    field has the default of an option that is left out.
    """
    root = argparse.ArgumentParser(
        "pdcluster-operator", description="The operator of PDClusters, and its admission webhook."
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="reconcile PDClusters", argument_default=argparse.SUPPRESS
    )
    run.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAME",
        help="namespace to watch; may be given several times (default: all namespaces)",
    )
    run.add_argument(
        "--authority-secret",
        type=_pair,
        dest="authority",
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
        metavar="N",
        help="wait at least N seconds between two requests to one launcher (default 1)",
    )
    run.add_argument(
        "--operator-class",
        metavar="NAME",
        help="work only on PDClusters whose spec.operatorClass is NAME (default: on those "
        "without one)",
    )
    run.add_argument(
        "--sweep-seconds",
        type=float,
        metavar="SECONDS",
        help="time between two lists of all objects (default 300)",
    )
    run.add_argument(
        "--keep-connector-seconds",
        type=float,
        metavar="SECONDS",
        help="how long a namespace keeps a connector that nothing mounts any more (default 600)",
    )
    run.add_argument(
        "--engine-certificate-folder",
        type=Path,
        dest="engine_certificate",
        metavar="DIR",
        help="folder with ca.crt, tls.crt and tls.key; the operator shows this certificate to "
        "engines with spec.transfer.tls: Mounted; without the folder, it refuses such PDClusters",
    )
    webhook = commands.add_parser(
        "webhook", help="answer admission reviews", argument_default=argparse.SUPPRESS
    )
    webhook.add_argument(
        "--certificate-folder",
        type=Path,
        required=True,
        dest="folder",
        metavar="DIR",
        help="folder with tls.crt and tls.key; they are read again when they change",
    )
    webhook.add_argument("--port", type=int, help="port for admission reviews (default 9443)")
    webhook.add_argument(
        "--admit-mounted-certificates",
        action="store_true",
        dest="mounted_certificates",
        help="admit spec.transfer.tls: Mounted; the operator needs --engine-certificate-folder",
    )
    for command in (run, webhook):
        command.add_argument(
            "--allow-host-path-models",
            action="store_true",
            dest="host_path_models",
            help="admit folders of the nodes; whoever may create a PDCluster can then read them",
        )
        command.add_argument(
            "--allow-host-path",
            action="append",
            type=_folder,
            dest="host_path_prefixes",
            metavar="DIR",
            help="admit this folder of the nodes and what is in it, to be read; may be repeated",
        )
        command.add_argument(
            "--health-port", type=int, help="port for health checks (default 8081)"
        )
        command.add_argument("--metrics-port", type=int, help="port for metrics (default 8080)")
        command.add_argument("--host", help="address to listen on (default: all)")
        command.add_argument(
            "--log-level", choices=("debug", "info", "warning", "error"), default="info"
        )
        command.add_argument("--log-format", choices=("json", "plain"), default="plain")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    root = parser()
    given = vars(root.parse_args(arguments))
    command, level, form = (given.pop(name) for name in ("command", "log_level", "log_format"))
    parts = ("webhook_configuration", "webhook_service", "webhook_secret")
    place = [given.pop(name) for name in parts if name in given]
    if len(place) not in (0, len(parts)):
        root.error("--webhook-configuration, --webhook-service and --webhook-secret go together")

    set_up_logs(level, form)
    for name in ("namespaces", "host_path_prefixes"):
        given |= {name: tuple(given[name])} if name in given else {}
    try:
        asyncio.run(_operator(given, place) if command == "run" else _webhook(given))
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except Exception as error:
        # Kubernetes starts the process again. Nothing is lost: all state is in the API server.
        log.error("stopped: %s", error, exc_info=level == "debug")
        return SOMETHING_FAILED
    return int(Exit.DONE)


def _operator(given: dict[str, Any], place: list[Any]) -> Coroutine[Any, Any, None]:
    from pdcluster_operator.adapters.operator_process import OperatorOptions
    from pdcluster_operator.adapters.own_secrets import WebhookPlace
    from pdcluster_operator.handlers import run_operator

    webhook = WebhookPlace(*place) if place else None
    return run_operator(OperatorOptions(webhook=webhook, **given), asyncio.Event())


def _webhook(given: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from pdcluster_operator.adapters.webhook_process import WebhookOptions
    from pdcluster_operator.handlers import run_webhook

    return run_webhook(WebhookOptions(**given), asyncio.Event())


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


def _folder(text: str) -> str:
    from pdcluster_operator.api.rules.images_and_weights import is_below

    if not is_below(text, ["/"]) or not text.strip("/."):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the absolute path of a folder, without '..'; "
            "--allow-host-path-models admits all folders"
        )
    return text


def _pair(text: str) -> tuple[str, str]:
    namespace, separator, name = text.partition("/")
    if not separator or not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


if __name__ == "__main__":
    sys.exit(main())
