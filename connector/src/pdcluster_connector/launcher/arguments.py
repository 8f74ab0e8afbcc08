"""The command line of ``vllm serve`` as the launcher reads and rewrites it. Pure.

The launcher reads only the flags that it has to know. Every other argument passes unchanged.
vLLM accepts ``--flag value`` and ``--flag=value``, and underscores instead of dashes. If a flag is
given twice, the last one counts.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdcluster_connector.certificate_files import TlsFiles, tls_files
from pdcluster_connector.launcher import inside_vllm
from pdcluster_connector.plan.rank_pairs import node_of_data_rank
from pdcluster_connector.protocol.host_port import EVERY_ADDRESS
from pdcluster_connector.protocol.launcher_documents import MAX_SIDE_CHANNELS

CONNECTOR_FLAG: Final = "--kv-transfer-config"
KV_FAILURES: Final = "pdcluster_connector.vllm.client_errors.KVFailures"
KV_ROLE: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_SEVERAL: Final = "MultiConnector"
_OFFLOADING: Final = "OffloadingConnector"
_OFFLOADERS: Final = (_OFFLOADING, "SimpleCPUOffloadConnector")

_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
}


class ArgumentError(ValueError):
    """The engine's command line cannot be used. The message names the argument and a remedy."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What the launcher knows of the engine that it starts.

    Attributes:
        arguments: for ``vllm serve``: the model first, ``engine_id`` filled in.
        model: folder or repository of the weights.
        host: address that the OpenAI API binds to; empty is every address.
        port: its port.
        side_channel_host: address that the connector's side channel binds and advertises.
        side_channel_port: its port; a data-parallel rank adds its number.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        data: data-parallel size.
        nodes: pods that this engine spans.
        node_rank: this pod's place among them; 0 is the leader.
        leader: ``--master-addr``, the leader's address for its followers.
        block_tokens: ``--block-size``, or None where vLLM chooses.
        max_tokens: ``--max-model-len``, or None where the model's config decides.
        load_format: ``--load-format``.
        tls: files of this engine's certificate; None without TLS.
        recomputes: whether vLLM computes a prompt whose KV did not come.
        backends: NIXL's transport backends.
        offload_folder: where vLLM's offloading connector makes a file that is named by the engine
            id, which has a slash in it; empty without that connector.
    """

    arguments: tuple[str, ...]
    model: str
    host: str
    port: int
    side_channel_host: str
    side_channel_port: int
    tensor: int
    pipeline: int
    data: int
    nodes: int
    node_rank: int
    leader: str
    block_tokens: int | None
    max_tokens: int | None
    load_format: str
    tls: TlsFiles | None
    recomputes: bool
    backends: tuple[str, ...]
    offload_folder: str

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks whose schedulers run in this pod."""
        return tuple(
            rank
            for rank in range(self.data)
            if node_of_data_rank(rank, self.data, self.nodes) == self.node_rank
        )

    @property
    def is_leader(self) -> bool:
        """Whether this pod holds the API, the scheduler and the engine's identity."""
        return self.node_rank == 0


def engine_command(
    arguments: Sequence[str], *, engine_id: str, role: str, every_address: str = ""
) -> EngineCommand:
    """Read ``vllm serve``'s arguments and write ``engine_id`` into the connector's JSON.

    Args:
        arguments: everything after ``--`` on the launcher's command line.
        engine_id: ``logical/incarnation``, the same in every rank.
        role: ``prefill`` or ``decode``.
        every_address: what vLLM binds to instead of 0.0.0.0, which is only IPv4; empty changes
            nothing.

    Raises:
        ArgumentError: the connector's JSON is missing, malformed or of the other role, the model
            is missing, or an argument that must be a number is not one.
    """
    words = list(arguments)
    flags = _flags(words)
    config, where = _transfer_config(words, flags)
    ours, others = _connectors(config, role)
    _check_role(ours, role)
    config["engine_id"] = engine_id
    extra = _extra(ours)
    words += ["--middleware", inside_vllm.DOOR]
    if role == "decode":
        words += ["--middleware", KV_FAILURES]
    if extra.get("show_internal_names") is not True:
        words += ["--middleware", inside_vllm.PLAIN_REQUEST_IDS]
    if flags.get("--node-rank", "0") != "0" and "--headless" not in flags:
        # A follower runs no server. Add at the end, so no index moves. vLLM uses the last flag.
        servers = ["--api-server-count", "0"] if "--api-server-count" in flags else []
        words += [*servers, "--headless"]
    host = flags.get("--host", "")
    if every_address and host in EVERY_ADDRESS:
        host = every_address
        words += ["--host", host]
    text = json.dumps(config, separators=(",", ":"), ensure_ascii=False)
    index, inline = where
    words[index] = f"{CONNECTOR_FLAG}={text}" if inline else text
    model = _model(words, flags)
    length = flags.get("--max-model-len", "")
    data = _number(flags, "--data-parallel-size", 1, high=MAX_SIDE_CHANNELS)
    return EngineCommand(
        arguments=tuple(words),
        model=model,
        host=host,
        port=_number(flags, "--port", 8000, high=65535),
        side_channel_host=str(extra.get("side_channel_host", "127.0.0.1")),
        side_channel_port=_port(extra.get("side_channel_port", 5600), data),
        tensor=_number(flags, "--tensor-parallel-size", 1),
        pipeline=_number(flags, "--pipeline-parallel-size", 1),
        data=data,
        nodes=_number(flags, "--nnodes", 1),
        node_rank=_number(flags, "--node-rank", 0, low=0),
        leader=flags.get("--master-addr", "127.0.0.1"),
        block_tokens=_number(flags, "--block-size", 0, low=0) or None,
        # vLLM also accepts 32k, 1M and auto here. The launcher needs only a plain number.
        max_tokens=int(length) if length.isdecimal() else None,
        load_format=flags.get("--load-format", "auto"),
        tls=_tls(extra),
        recomputes=config.get("kv_load_failure_policy") == "recompute",
        backends=_backends(extra.get("backends")),
        offload_folder=f"/dev/shm/vllm_offload_{engine_id.rpartition('/')[0]}"  # noqa: S108
        if _OFFLOADING in others
        else "",
    )


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Flag (long, with dashes) -> value; the last of two, as in vLLM's parser."""
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name.replace("_", "-"))
        if not name.startswith("--"):
            continue
        if equals:
            found[name] = value
        else:
            follows = words[index + 1] if index + 1 < len(words) else ""
            found[name] = "" if follows.startswith("--") else follows
    return found


def _transfer_config(
    words: Sequence[str], flags: Iterable[str]
) -> tuple[dict[str, Any], tuple[int, bool]]:
    """Find the connector's JSON and where it stands: (index of the word, written with ``=``)."""
    if any(flag.startswith(f"{CONNECTOR_FLAG}.") for flag in flags):
        raise ArgumentError(f"{CONNECTOR_FLAG} must be one JSON object, not dotted flags")
    places = [
        (index, "=" in word)
        for index, word in enumerate(words)
        if word.partition("=")[0].replace("_", "-") == CONNECTOR_FLAG
    ]
    if len(places) != 1:
        found = "is missing" if not places else "is given more than once"
        raise ArgumentError(
            f'{CONNECTOR_FLAG} {found}; pass it once: {{"kv_connector":"PDClusterConnector",'
            '"kv_connector_module_path":"pdcluster_connector.vllm.connector",'
            '"kv_role":"kv_producer"}'
        )
    index, inline = places[0]
    if not inline:
        index += 1
    word = words[index] if index < len(words) else ""
    text = word.partition("=")[2] if inline else word
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{CONNECTOR_FLAG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{CONNECTOR_FLAG} must be a JSON object, not {text[:80]!r}")
    return config, (index, inline)


def _connectors(config: dict[str, Any], role: str) -> tuple[dict[str, Any], list[str]]:
    """Return our connector's JSON, and the names of the others beside it in a MultiConnector."""
    if config.get("kv_connector") != _SEVERAL:
        return config, []
    children = _extra(config).get("connectors")
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise ArgumentError(f"{CONNECTOR_FLAG}: connectors of {_SEVERAL} must be JSON objects")
    names = [str(child.get("kv_connector")) for child in children]
    if names[:1] != ["PDClusterConnector"]:
        raise ArgumentError(
            f"{CONNECTOR_FLAG}: PDClusterConnector must be the first of {_SEVERAL}'s connectors, "
            f"not {names[0] if names else 'missing'}; vLLM loads from the first one that has KV"
        )
    barred = [name for name in _OFFLOADERS if f'"{name}"' in json.dumps(children)]
    if role == "decode" and barred:
        raise ArgumentError(
            f"{CONNECTOR_FLAG}: a decode engine cannot have the {barred[0]}: it does not see the "
            "blocks that KV from prefill is written to, and would keep that KV as the KV of other "
            "prompts (vLLM's issue 46951); give it to the prefill engine alone"
        )
    if config.get("kv_role") != "kv_both":
        raise ArgumentError(
            f"{CONNECTOR_FLAG}: kv_role of {_SEVERAL} is {config.get('kv_role')!r}, but must be "
            "'kv_both': else vLLM may load KV into blocks that a step still writes to; "
            "PDClusterConnector among its connectors keeps its own kv_role"
        )
    return children[0], names[1:]


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ArgumentError(f"{CONNECTOR_FLAG}: kv_connector_extra_config must be a JSON object")
    return extra


def _check_role(config: dict[str, Any], role: str) -> None:
    given, wanted = config.get("kv_role"), KV_ROLE[role]
    if given not in {wanted, "kv_both"}:
        raise ArgumentError(
            f"{CONNECTOR_FLAG}: kv_role is {given!r}, but --role {role} needs {wanted!r}"
        )


def _model(words: Sequence[str], flags: dict[str, str]) -> str:
    model = flags.get("--model") or (words[0] if words and not words[0].startswith("-") else "")
    if not model:
        raise ArgumentError("the model is missing; it is the first argument after --")
    return model


def _number(
    flags: dict[str, str], name: str, default: int, *, low: int = 1, high: int = 1_000_000
) -> int:
    text = flags.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ArgumentError(f"{name} is {text!r}; it must be a number from {low} to {high}")
    return int(text)


def _backends(value: object) -> tuple[str, ...]:
    """Return the names; the connector refuses what is no list of them."""
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _tls(extra: dict[str, Any]) -> TlsFiles | None:
    if "tls" not in extra:
        return None
    try:
        return tls_files(extra["tls"])
    except ValueError as error:
        raise ArgumentError(f"{CONNECTOR_FLAG}: tls: {extra['tls']!r} {error}") from None


def _port(value: object, data: int) -> int:
    last = 65536 - data  # rank N listens on this port + N
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= last:
        ranks = f" with {data} data-parallel ranks" if data > 1 else ""
        raise ArgumentError(
            f"{CONNECTOR_FLAG}: side_channel_port is {value!r}; use 1 to {last}{ranks}"
        )
    return value
