"""The part of docs/api.md about the reasons of conditions: what each means, and where to look."""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster_connector.compat.reasons import Reason as Kv
from pdcluster_operator.api.conditions import StatusReason as R

WAIT = "Wait."
POD = "`kubectl describe pod` of the engine that the message names."
LOGS = "The message; `kubectl logs` of that pod."
BOTH_LOGS = "`kubectl logs` of both engines."

# (what holds, where it sends you)
REASONS: Mapping[R, tuple[str, str]] = {
    R.PARTIALLY_CHECKED: (
        "The spec breaks no rule that can be checked now. The engines check the rest later.",
        "",
    ),
    R.NOT_ACCEPTED: ("The spec breaks a rule.", "The condition Accepted names it."),
    R.ENGINES_READY: ("All wanted engines of the role are ready.", ""),
    R.SCALED_TO_ZERO: (
        "No engine of a role is wanted. This is no failure, but no request is served.",
        "`replicas` of both roles.",
    ),
    R.PODS_MISSING: (
        "A pod of an engine does not exist.",
        "Events of the engine's StatefulSet: a quota or an admission webhook may refuse the pod.",
    ),
    R.UNSCHEDULABLE: ("No node has room for a pod.", f"{POD} GPUs, memory, RDMA devices, taints."),
    R.SCHEDULING_GATED: (
        "A pod has a scheduling gate. Kueue sets one until it admits the pod.",
        "`kubectl describe` of the Workload that the message names: mostly, the quota is used up.",
    ),
    R.IMAGE_UNAVAILABLE: ("The node cannot pull an image.", "The image's name, and pull secrets."),
    R.POD_CONFIG_ERROR: (
        "The kubelet cannot start the container.",
        f"{POD} A Secret or ConfigMap may be missing.",
    ),
    R.CONTAINER_CREATING: ("The kubelet prepares the container.", POD),
    R.STARTING: (
        "The engine's process starts, or starts again.",
        f"{WAIT} If it repeats: {LOGS.lower()}",
    ),
    R.LOADING_WEIGHTS: ("The engine downloads or loads weights.", WAIT),
    R.WARMING_UP: ("The engine measures memory, compiles and warms up.", WAIT),
    R.DRAINING: ("The engine ends: it takes no new requests.", WAIT),
    R.ENGINE_FAILED: ("The engine's process ended.", LOGS),
    R.LAUNCHER_UNREACHABLE: (
        "The pod is ready, but its launcher does not answer the operator.",
        "The operator's log says why. Look at NetworkPolicies of others, and at the certificates.",
    ),
    R.LINKS_ESTABLISHED: ("Every link is established.", ""),
    R.LINKS_PENDING: ("A link is being made.", WAIT),
    R.WAITING_FOR_ENGINES: (
        "An engine of the pair is not ready.",
        "The conditions PrefillReady and DecodeReady.",
    ),
    R.NO_PAIRS: ("There is no pair of engines.", "`replicas` of both roles."),
    R.CANARY_PASSED: ("KV was seen to move over every link.", ""),
    R.CANARY_PENDING: (
        "No canary request has passed since the link was made.",
        "Wait. If engines are busy for long, or refuse the request, the message says how.",
    ),
    R.BANDWIDTH_SUFFICIENT: ("Every link is as fast as was asked for.", ""),
    R.BANDWIDTH_UNMEASURED: ("Not every link is established and measured yet.", WAIT),
    R.NO_THRESHOLD: ("No bandwidth is asked for, so none is judged.", ""),
    R.PROBABLE_TCP_FALLBACK: (
        "A link is slower than was asked for: RDMA is probably not in use.",
        "[operations.md](operations.md): RDMA devices of the pods, UCX settings.",
    ),
    R.LOCAL_PREFILL: (
        "A decode engine computes more prompts by itself than `verification.maxLocalShare` allows.",
        "The message names the cause. [operations.md](operations.md) says what helps.",
    ),
    R.SERVING: ("A verified pair of engines serves clients.", ""),
    R.NO_VERIFIED_PAIR: ("No pair of engines is verified.", "The condition KVPathVerified."),
    R.NOT_SEEN_YET: (
        "The operator has not written a status. With many new PDClusters, that takes a minute.",
        "If it stays: whether the operator runs, and its `--namespace` and class.",
    ),
    R.ROUTER_UNAVAILABLE: ("No router pod is ready.", "The router's pods."),
    R.ROUTER_REPLACING: (
        "A router serves, but not every router pod is new and ready.",
        "The message, and the router's pods.",
    ),
    R.REPLACING: ("Engines of an older revision still exist.", WAIT),
    R.COMPLETE: ("Nothing is left to do.", ""),
    R.PAUSED: ("A change waits, because `rollout.paused` is set.", "`spec.rollout.paused`."),
    R.INSUFFICIENT_CAPACITY: (
        "Replace finds no engine that can make room for a new one. The old engines serve on.",
        "`spec.rollout.type`, and the replicas of both roles.",
    ),
    R.TEMPLATE_REFUSED: (
        "The API server refuses what new engines are made from. The old ones serve on.",
        "The message has the API server's words: a field, a policy, a quota, or Pod Security.",
    ),
    R.PROGRESS_DEADLINE_EXCEEDED: (
        "The cluster was not Ready in time.",
        "Ready says what it waits for; `spec.rollout.progressDeadlineSeconds` is the time.",
    ),
    R.REASON_UNREADABLE: (
        "A launcher or the API server gave a reason that is no word, or a very long one.",
        "The message, and the logs of the engine that it names.",
    ),
    R.REWRITTEN: (
        "An event: something else, such as a mutating webhook, changes what is applied.",
        "The event names the fields. Exclude the object from the webhook if engines do not run.",
    ),
    R.READY: ("What the spec wants is there and verified.", ""),
}

# What happens on the KV path; rules.md has the reasons that are rules.
OBSERVED: Mapping[Kv, tuple[str, str]] = {
    Kv.SIDE_CHANNEL_UNREACHABLE: (
        "Decode cannot reach prefill's side channel.",
        "NetworkPolicies of others, and the network between the nodes.",
    ),
    Kv.AUTHENTICATION_FAILED: ("The peer did not prove who it is.", BOTH_LOGS),
    Kv.PROTOCOL_VERSION_MISMATCH: (
        "The two connectors speak no common version.",
        "The same connector on both roles.",
    ),
    Kv.VERSION_UNSUPPORTED: (
        "The image's vLLM or NIXL is outside of the supported range.",
        "`image` of spec.engine.",
    ),
    Kv.ENGINE_ID_INCONSISTENT: ("The ranks of one engine disagree about its id.", BOTH_LOGS),
    Kv.SHARD_MISSING: ("A rank of the prefill engine did not tell its memory.", BOTH_LOGS),
    Kv.BACKEND_ERROR: ("NIXL or UCX reports an error.", BOTH_LOGS),
    Kv.PROBE_CORRUPTED: ("A test read found wrong bytes.", "RDMA devices and drivers."),
    Kv.TRANSFER_STALLED: (
        "A read of KV does not end. None of a request's reads landed in five minutes, for example.",
        "The network for KV: it can be cut while the side channel works.",
    ),
    Kv.PEER_RESTARTED: ("The prefill engine started again.", WAIT),
    Kv.LEASE_EXPIRED: ("Prefill gave the KV up before it was read.", "`leaseSeconds`."),
    Kv.LEASE_LOST: (
        "The lease was over when the data had landed, or when decode asked for it.",
        "Nothing wrong was served. Send each ticket once; raise `leaseSeconds` if it is often so.",
    ),
    Kv.LEASE_CLAIMED: (
        "Another decode engine had claimed the lease of this ticket.",
        "Send each ticket to one decode engine.",
    ),
    Kv.TICKET_INVALID: ("The ticket does not fit the prompt or the engine.", "The router."),
    Kv.UNSIGNED: (
        "The ticket has no signature, and decode has a ticket key.",
        "The Secret `NAME-ticket-key` in the pods of prefill; who sent the request.",
    ),
    Kv.FORGED: (
        "The ticket was changed on its way, or signed with a key that decode does not have.",
        "Who sent the request; the Secret `NAME-ticket-key` in the pods of both roles.",
    ),
    Kv.AUDIENCE_MISMATCH: (
        "The ticket is meant for the engines of another cluster or pairing key.",
        "The router: it must not mix engines.",
    ),
    Kv.COVERAGE_INCOMPLETE: ("Prefill's blocks do not hold all that decode needs.", BOTH_LOGS),
    Kv.CANARY_FAILED: ("The answer to the canary request shows that no KV moved.", "The message."),
}


def reasons_part() -> str:
    """Return the section of reasons as Markdown."""
    head = "| reason | what holds | where to look |\n|---|---|---|"
    parts = [
        "### Reasons\n",
        head,
        *(_row(reason.value, *REASONS[reason]) for reason in R),
        "\nWhat happens on the KV path has these reasons, or a rule of [rules.md](rules.md):\n",
        head,
        *(_row(reason.value, *words) for reason, words in OBSERVED.items()),
        "",
    ]
    return "\n".join(parts)


def _row(reason: str, holds: str, look: str) -> str:
    return f"| `{reason}` | {holds} | {look} |"
