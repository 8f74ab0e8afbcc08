"""``pdcluster up``: runs a manifest on this machine, with the operator's own control loop.

It checks the manifest and the machine first. ``up_run`` does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from rich.console import Console
from rich.text import Text

from pdcluster_operator.adapters.connector_bundle import BuiltConnector, BundleError
from pdcluster_operator.api.findings import Findings, under
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.lint import print_findings
from pdcluster_operator.cli.manifest import read_cluster
from pdcluster_operator.cli.up_manifest import with_model, with_names
from pdcluster_operator.cli.up_run import UpOptions, UpRun
from pdcluster_operator.cli.view import View
from pdcluster_operator.local.cluster import (
    NOT_SIMULATED,
    POD_PORTS,
    LocalCluster,
    container_environment,
)
from pdcluster_operator.local.facts import gather
from pdcluster_operator.local.preflight import COMMAND_LINE, judge
from pdcluster_operator.local.runs import new_run_folder


def up(options: UpOptions) -> Exit:
    """Run until Ctrl-C, or until the one prompt is answered."""
    if sys.platform != "linux":
        raise UserError(
            f"local mode needs Linux, this is {sys.platform}: use a Linux machine or "
            "container, or a Kubernetes cluster",
            Exit.MACHINE,
        )
    console = Console(highlight=False)
    document = with_names(with_model(read_cluster(options.file), options.model_dir))
    cluster, findings = check_manifest(document, one_node=True)
    if not findings.ok:
        print_findings(console, options.file, findings)
        return Exit.MANIFEST
    for warning in findings.warnings:
        # --model-dir replaced the source, so a warning about the source is of no use.
        replaced = options.model_dir is not None and under(warning.path, "spec.model.source")
        if not replaced:
            console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    try:
        connector = BuiltConnector()
    except BundleError as error:
        raise UserError(str(error), Exit.MACHINE) from error
    facts = gather(document, cluster, connector.bundle(), container_environment(), POD_PORTS)
    lacks = judge(
        cluster, facts, once=options.once is not None, model_flag=options.model_dir is not None
    )
    if lacks:
        print_findings(console, f"{options.file} on this machine", Findings(tuple(lacks)))
        on_line = all(lack.rule in COMMAND_LINE for lack in lacks)
        return Exit.USAGE if on_line else Exit.MACHINE
    folder = new_run_folder(cluster.name)
    console.print(
        Text(f"running {cluster.namespace}/{cluster.name}; logs are below {folder}"), soft_wrap=True
    )
    console.print(Text(f"not simulated: {', '.join(NOT_SIMULATED)}", style="dim"), soft_wrap=True)
    with View(console, plain=options.plain) as view:
        logging.basicConfig(level=logging.WARNING, handlers=[_ToView(view)], force=True)
        run = UpRun(options, document, cluster, console, view)
        return asyncio.run(run.main(LocalCluster(folder, connector, view.say)))


class _ToView(logging.Handler):
    """The operator's own warnings, among the lines of the terminal."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.say(f"{record.levelname.lower()}: {record.getMessage()}")
