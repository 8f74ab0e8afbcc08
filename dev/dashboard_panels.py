"""What ``dev/dashboards.py`` makes Grafana dashboards of: kinds of panels, and queries.

The Grafana Foundation SDK makes the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as options, dashboard as schema
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = schema.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Graph:
    """Lines over time. ``queries`` are by their legend; ``unit`` is one of Grafana's."""

    title: str
    about: str
    unit: str
    queries: Mapping[str, str]
    stacked: bool = False
    width: int = 8

    def build(self) -> timeseries.Panel:
        """Return the panel."""
        panel = (
            timeseries.Panel()
            .unit(self.unit)
            .min(0)
            .show_points(options.VisibilityMode.NEVER)
            .fill_opacity(30 if self.stacked else 5)
            .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
            .legend(
                common.VizLegendOptions()
                .display_mode(options.LegendDisplayMode.LIST)
                .placement(options.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
        )
        if self.stacked:
            panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
        for number, (legend, expr) in enumerate(self.queries.items()):
            query = prometheus.Dataquery().expr(expr).legend_format(legend)
            panel.with_target(query.ref_id(chr(ord("A") + number)))
        return panel


@dataclass(frozen=True)
class Now:
    """One number: what a query gives now."""

    title: str
    about: str
    unit: str
    expr: str
    width: int = 8

    def build(self) -> stat.Panel:
        """Return the panel."""
        query = prometheus.Dataquery().expr(self.expr).instant().ref_id("A")
        reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
        return stat.Panel().unit(self.unit).reduce_options(reduced).with_target(query)


@dataclass(frozen=True)
class Rows:
    """A table: one row for each series that a query gives now, with these labels."""

    title: str
    about: str
    expr: str
    labels: tuple[str, ...]
    width: int = 8

    def build(self) -> table.Panel:
        """Return the panel."""
        query = prometheus.Dataquery().expr(self.expr).instant().ref_id("A")
        wanted = schema.DataTransformerConfig(
            id_val="filterFieldsByName", options={"include": {"names": list(self.labels)}}
        )
        target = query.format(PromQueryFormat.TABLE)
        return table.Panel().with_target(target).with_transformation(wanted)


Panels = Mapping[str, tuple[Graph | Now | Rows, ...]]
"""The panels of each row, by its title."""


def per_second(metric: str, selector: str, *labels: str) -> str:
    """Return the rate of a counter, summed up by labels."""
    return f"sum by ({', '.join(labels)}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def mean(histogram: str, selector: str, *labels: str) -> str:
    """Return the mean of what a histogram observed."""
    total, count = (
        per_second(f"{histogram}_{part}", selector, *labels) for part in ("sum", "count")
    )
    return f"{total} / {count}"


def quantile(share: float, histogram: str, selector: str, *labels: str) -> str:
    """Return a quantile of what a histogram observed."""
    return (
        f"histogram_quantile({share}, {per_second(f'{histogram}_bucket', selector, 'le', *labels)})"
    )


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of the label's values."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(schema.VariableSort.ALPHABETICAL_ASC)
    )


def build(uid: str, title: str, about: str, rows: Panels) -> dashboard.Dashboard:
    """Return a dashboard with these rows. A row is 24 wide, and each panel 8 high."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["pdcluster", "vllm"])
        .editable()
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    number = 0
    for row, panels in rows.items():
        made.with_row(dashboard.Row(row))
        for panel in panels:
            number += 1
            shown = panel.build().title(panel.title).description(panel.about)
            made.with_panel(shown.id(number).datasource(SOURCE).span(panel.width).height(8))
    return made
