"""Writes one of the chart's Grafana dashboards: ``python -m dev.dashboards pdcluster``.

``$namespace`` and ``$cluster`` are a PDCluster's, which the reader chooses. docs/metrics.md
describes the metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from dev.dashboard_panels import (
    Graph,
    Now,
    Panels,
    Rows,
    build,
    mean,
    per_second,
    quantile,
    variable,
)
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from pdcluster_connector.protocol.prompt_outcomes import NOT_DUE

# Of engines and routers, by the labels that their monitor gives them; and of the operator.
OURS = 'namespace="$namespace",pdcluster_dev_cluster="$cluster"'
PREFILL = f'{OURS},pdcluster_dev_role="prefill"'
DECODE = f'{OURS},pdcluster_dev_role="decode"'
NAMED = 'cluster_namespace="$namespace",cluster="$cluster"'
NO_FAULT = "|".join(sorted(NOT_DUE))

TRANSFER = mean("pdcluster_kv_receive_seconds", f'{DECODE},phase="total"')
FIRST_OF_DECODE = mean("vllm:time_to_first_token_seconds", DECODE)
LINK = ("prefill", "pdcluster_dev_engine")
LINK_BYTES = per_second("pdcluster_kv_link_bytes_total", OURS, *LINK)
LINK_SECONDS = per_second("pdcluster_kv_link_transfer_seconds_total", OURS, *LINK)
ALL_PROMPTS = per_second(
    "pdcluster_kv_prompts_total", f'{DECODE},reason!~"{NO_FAULT}"', "pdcluster_dev_cluster"
)
LOCAL_PROMPTS = per_second(
    "pdcluster_kv_prompts_total",
    f'{DECODE},outcome=~"local|recomputed",reason!~"{NO_FAULT}"',
    *("pdcluster_dev_cluster", "reason"),
)

PDCLUSTER: Panels = {
    "State and rollout": (
        Rows(
            "Conditions",
            "What is not as it should be has its reason here. docs/troubleshooting.md has a "
            "line for each reason, with the next command. Progressing is False when all is done.",
            f"pdcluster_condition{{{NAMED}}} == 1",
            ("condition", "status", "reason"),
        ),
        Graph(
            "Engines",
            "Engines that are ready, and those that are wanted or still leave.",
            "none",
            {"{{role}} {{state}}": f"sum by (role, state) (pdcluster_engines{{{NAMED}}})"},
        ),
        Graph(
            "Rollout",
            "The reason of Progressing: Replacing while a change goes on, Complete when it is "
            "done, and why it waits for somebody otherwise.",
            "none",
            {
                "{{reason}}": "sum by (reason) "
                f'(pdcluster_condition{{{NAMED},condition="Progressing"}})'
            },
            stacked=True,
        ),
    ),
    "Time to the first token": (
        Graph(
            "Time to the first token, by phase",
            "Means. Queue and prefill: in the prefill engine. Hand-over: from its ticket until "
            "decode claims the lease, through router and client. Transfer: until the KV is "
            "there and proven. Decode: from then on until the first token.",
            "s",
            {
                "queue": mean("vllm:request_queue_time_seconds", PREFILL),
                "prefill": mean("vllm:request_prefill_time_seconds", PREFILL),
                "hand-over": mean("pdcluster_kv_handover_seconds", PREFILL),
                "transfer": TRANSFER,
                "decode": f"clamp_min({FIRST_OF_DECODE} - {TRANSFER}, 0)",
            },
            stacked=True,
            width=12,
        ),
        Graph(
            "Transfer, by phase",
            "Means of one rank. handshake: until there is a connection. post: until all reads "
            "are posted. transfer: until all data is there, posting included. fence: until it "
            "is proven.",
            "s",
            {"{{phase}}": mean("pdcluster_kv_receive_seconds", DECODE, "phase")},
            width=12,
        ),
        Graph(
            "Slow requests",
            "The time that 99 of 100 requests stay below.",
            "s",
            {
                "prefill, whole request": quantile(
                    0.99, "vllm:e2e_request_latency_seconds", PREFILL
                ),
                "hand-over": quantile(0.99, "pdcluster_kv_handover_seconds", PREFILL),
                "transfer": quantile(
                    0.99, "pdcluster_kv_receive_seconds", f'{DECODE},phase="total"'
                ),
                "decode, first token": quantile(0.99, "vllm:time_to_first_token_seconds", DECODE),
            },
            width=12,
        ),
        Graph(
            "Time between tokens",
            "In decode engines.",
            "s",
            {
                "mean": mean("vllm:inter_token_latency_seconds", DECODE),
                "99 of 100": quantile(0.99, "vllm:inter_token_latency_seconds", DECODE),
            },
            width=12,
        ),
    ),
    "Links": (
        Graph(
            "Bytes a second, by link",
            "KV that decode engines read from each prefill engine.",
            "Bps",
            {"{{prefill}} → {{pdcluster_dev_engine}}": LINK_BYTES},
            width=12,
        ),
        Graph(
            "Bandwidth of a receive, by link",
            "Bytes divided by the time of transfers. Where several run at once, the link moves "
            "more. One link far below the others has another path, for example TCP.",
            "Bps",
            {"{{prefill}} → {{pdcluster_dev_engine}}": f"{LINK_BYTES} / {LINK_SECONDS}"},
            width=12,
        ),
    ),
    "Leases": (
        Graph(
            "Leases held",
            "Finished prompts whose KV a prefill engine keeps until decode has read it.",
            "none",
            {
                "{{pdcluster_dev_engine}}": "sum by (pdcluster_dev_engine) "
                f"(pdcluster_kv_leases_held{{{PREFILL}}})"
            },
        ),
        Graph(
            "Leases that expire",
            "KV that no decode engine read in time: decode is too slow, or the client left.",
            "cps",
            {
                "{{pdcluster_dev_engine}}": per_second(
                    "pdcluster_kv_leases_expired_total", PREFILL, "pdcluster_dev_engine"
                )
            },
        ),
        Graph(
            "KV cache in use",
            "Of each engine. In prefill engines, leases keep blocks in it.",
            "percentunit",
            {
                "{{pdcluster_dev_engine}}": "max by (pdcluster_dev_engine) "
                f"(vllm:kv_cache_usage_perc{{{OURS}}})"
            },
        ),
    ),
    "Failures": (
        Graph(
            "Prompts, by what became of their transfer",
            "transferred: the KV came from prefill. local: decode computed it. recomputed: decode "
            "computed it after its transfer failed. failed: the client got an error.",
            "reqps",
            {"{{outcome}}": per_second("pdcluster_kv_prompts_total", DECODE, "outcome")},
            stacked=True,
        ),
        Graph(
            "Receives that fail, by reason",
            "Of each rank. docs/troubleshooting.md has a line for each reason.",
            "cps",
            {"{{reason}}": per_second("pdcluster_kv_failures_total", DECODE, "reason")},
        ),
        Graph(
            "Faults of the connector, by method",
            "Exceptions that the connector caught. Each is a fault to report, but for "
            "finished:NoLeaseWord: too many leases were held.",
            "cps",
            {"{{method}}": per_second("pdcluster_kv_step_faults_total", OURS, "method")},
        ),
    ),
    "Prompts that decode computes itself": (
        Graph(
            "Share of prompts, by reason",
            "Prompts that decode computed although prefill should have. The answers are right, "
            "so nobody else notices.",
            "percentunit",
            {
                "{{reason}}": f"{LOCAL_PROMPTS} / on (pdcluster_dev_cluster) group_left "
                f"{ALL_PROMPTS}"
            },
            stacked=True,
        ),
        Graph(
            "Tokens of such prompts, by reason",
            "What they cost decode.",
            "cps",
            {"{{reason}}": per_second("pdcluster_kv_local_prompt_tokens_total", DECODE, "reason")},
        ),
        Graph(
            "Such prompts that wait",
            "They wait while other requests generate.",
            "none",
            {"waiting": f"sum(pdcluster_kv_local_prompts_waiting{{{DECODE}}})"},
        ),
    ),
    "Prefill and decode in balance": (
        Graph(
            "Requests that wait",
            "They wait in the role that has too few engines. In decode, also for KV.",
            "none",
            {
                "{{pdcluster_dev_role}}": "sum by (pdcluster_dev_role) "
                f"(vllm:num_requests_waiting{{{OURS}}})"
            },
            width=6,
        ),
        Graph(
            "Requests that are computed",
            "",
            "none",
            {
                "{{pdcluster_dev_role}}": "sum by (pdcluster_dev_role) "
                f"(vllm:num_requests_running{{{OURS}}})"
            },
            width=6,
        ),
        Graph(
            "Tokens a second",
            "Prompt tokens of prefill engines, generated tokens of decode engines.",
            "cps",
            {
                "prefill": per_second("vllm:prompt_tokens_total", PREFILL),
                "decode": per_second("vllm:generation_tokens_total", DECODE),
            },
            width=6,
        ),
        Graph(
            "Requests to the routers",
            "",
            "reqps",
            {"{{route}}": per_second("vllm_router_pd_requests_total", OURS, "route")},
            width=6,
        ),
    ),
}

OPERATOR: Panels = {
    "PDClusters": (
        Now("PDClusters", "That the operator knows.", "none", "sum(pdcluster_clusters)", width=4),
        Now(
            "Not Ready",
            "PDClusters whose condition Ready is not True.",
            "none",
            "sum(pdcluster_not_ready_clusters)",
            width=4,
        ),
        Rows(
            "Who is not Ready, and why",
            "The first 200 by name. docs/troubleshooting.md has a line for each reason.",
            "pdcluster_not_ready == 1",
            ("cluster_namespace", "cluster", "reason"),
        ),
        Graph(
            "Prompts that decode computes itself",
            "The 10 PDClusters with the largest share of their latest prompts.",
            "percentunit",
            {
                "{{cluster_namespace}}/{{cluster}}": "topk(10, max by "
                "(cluster_namespace, cluster) (pdcluster_local_prefill_share))"
            },
        ),
    ),
    "The operator": (
        Graph(
            "PDClusters that wait for a worker",
            "If it never comes down to 0, the operator does not keep up.",
            "none",
            {"waiting": "max(pdcluster_queue_depth)"},
        ),
        Graph(
            "Reconciles",
            "What failed is tried again.",
            "cps",
            {"{{outcome}}": per_second("pdcluster_reconciles_total", "", "outcome")},
        ),
        Graph(
            "Time of a reconcile",
            "",
            "s",
            {
                "mean": mean("pdcluster_reconcile_seconds", ""),
                "99 of 100": quantile(0.99, "pdcluster_reconcile_seconds", ""),
            },
        ),
    ),
    "The API server": (
        Graph(
            "Calls, by answer",
            "Code 0 is no answer.",
            "reqps",
            {"{{code}}": per_second("pdcluster_api_calls_total", "", "code")},
            width=6,
        ),
        Graph(
            "Writes, by kind",
            "At rest, the operator writes its Leases only.",
            "reqps",
            {
                "{{method}} {{resource}}": per_second(
                    "pdcluster_api_calls_total", 'method!="GET"', "method", "resource"
                )
            },
            width=6,
        ),
        Graph(
            "Time of a call",
            "What 99 of 100 calls stay below. A GET may be a watch.",
            "s",
            {"{{method}}": quantile(0.99, "pdcluster_api_seconds", "", "method")},
            width=6,
        ),
        Rows(
            "Namespaces in which nothing is done",
            "The operator could not list all of their objects since it started. Usually it "
            "lacks the rights.",
            "pdcluster_unlisted_namespace == 1",
            ("cluster_namespace",),
            width=6,
        ),
    ),
    "The webhook": (
        Graph(
            "Reviews",
            "",
            "reqps",
            {
                "{{operation}} {{outcome}}": per_second(
                    "pdcluster_webhook_reviews_total", "", "operation", "outcome"
                )
            },
        ),
        Graph(
            "Refusals, by rule",
            "docs/rules.md describes each rule.",
            "reqps",
            {"{{rule}}": per_second("pdcluster_webhook_refusals_total", "", "rule")},
        ),
        Now(
            "Until the certificate expires",
            "The operator renews it months before.",
            "s",
            "min(pdcluster_webhook_certificate_expiry_seconds > 0) - time()",
        ),
    ),
}


def boards() -> Mapping[str, dashboard.Dashboard]:
    """Return every dashboard by its name."""
    known = "pdcluster_kv_received_bytes_total"
    ours = build(
        "pdcluster",
        "PDCluster",
        "One PDCluster: its state, its requests and the path of its KV.",
        PDCLUSTER,
    )
    ours.with_variable(variable("namespace", "Namespace", f"label_values({known}, namespace)"))
    of_namespace = f'{known}{{namespace="$namespace"}}'
    ours.with_variable(
        variable("cluster", "PDCluster", f"label_values({of_namespace}, pdcluster_dev_cluster)")
    )
    operator = build(
        "pdcluster-operator",
        "PDCluster operator",
        "The operator, its webhook, and all PDClusters.",
        OPERATOR,
    )
    return {"pdcluster": ours, "operator": operator}


if __name__ == "__main__":
    made = boards()[sys.argv[1]].build()
    sys.stdout.write(JSONEncoder(sort_keys=True, indent=1).encode(made) + "\n")
