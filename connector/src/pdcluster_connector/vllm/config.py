"""Typed options of the connector: what ``kv_connector_extra_config`` may hold.

Everything wrong is reported at once, when the engine starts, with the key, the value and the
remedy: a typo that is silently ignored would only be noticed when a transfer misbehaves.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pdcluster_connector.certificate_files import TlsFiles, tls_files
from pdcluster_connector.compat import supported
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages, prompt_outcomes
from pdcluster_connector.sidechannel.ticket_key_file import MAKE_A_KEY_FILE

MAX_LEASE_SECONDS: Final = 3600.0
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*"})  # noqa: S104  refused, not bound


class ConfigError(ValueError):
    """The connector's configuration is wrong. The message lists every mistake."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of one engine.

    Attributes:
        side_channel_host: address that the side channel binds and advertises.
        side_channel_port: its port; a data-parallel engine adds its rank.
        lease_seconds: how long a prefill engine keeps a finished request's blocks unasked.
        drain_deadline_seconds: how long a failed receive may hold its blocks in quarantine.
        transfer_stall_seconds: how long a receive may have transfers under way of which none lands.
        allow_insecure: permits a side channel without TLS on other than loopback addresses, and
            tickets without a signature where there is no ticket_key_file.
        backends: NIXL's transport backends.
        num_threads: NIXL's threads that post the reads of a decode engine; 0 for none of its own.
        backend_options: further options of NIXL's backends: (backend, option, value).
        show_internal_names: answers to clients name the engines that their KV moved between.
        ticket_key_file: file with the keys that sign tickets; empty for none.
        ticket_audience: which engines may use this engine's tickets; equal on both sides.
        tls: files for mutual TLS on the side channel; None for plain HTTP.
        kv_layout: the order of KV in memory to ask vLLM for; empty for the stock connector's.
        local_tokens_per_step: prompt tokens that a decode engine computes itself in a mean engine
            step while other requests generate; 0 for no limit.
        router_may_skip_prefill: a request without ``kv_transfer_params`` is a decision of the
            router, and no fault of its own.
    """

    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 5600
    lease_seconds: float = messages.LEASE_SECONDS
    drain_deadline_seconds: float = 30.0
    transfer_stall_seconds: float = 300.0
    allow_insecure: bool = False
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 4  # as the stock connector
    backend_options: tuple[tuple[str, str, str], ...] = ()
    show_internal_names: bool = False
    ticket_key_file: str = ""
    ticket_audience: str = ""
    tls: TlsFiles | None = None
    kv_layout: str = ""
    local_tokens_per_step: int = prompt_outcomes.TOKENS_PER_STEP
    router_may_skip_prefill: bool = False


def parse_options(extra: Mapping[str, Any], data_parallel_rank: int = 0) -> ConnectorOptions:
    """Options from ``kv_connector_extra_config``; raises :class:`ConfigError`."""
    known = list(ConnectorOptions.__dataclass_fields__)
    problems: list[str] = []
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            problems.append(f"{key}: unknown key; did you mean {near[0]}?")

    given: dict[str, Any] = {}
    for name in known:
        if name in extra:
            try:
                given[name] = _READERS[name](extra[name])
            except ValueError as error:
                problems.append(f"{name}: {extra[name]!r} {error}")
    options = ConnectorOptions(**given)
    port = options.side_channel_port + data_parallel_rank
    options = replace(options, side_channel_port=port)
    if "ticket_key_file" not in extra and not options.allow_insecure:
        problems.append(
            "ticket_key_file: missing: without a key, decode cannot tell a true ticket from a "
            f"forged one; make a key with {MAKE_A_KEY_FILE} and name FILE here, the same for the "
            "prefill and the decode engine (or set allow_insecure: true where every client is "
            "trusted)"
        )
    if port > 65535:
        problems.append(
            f"side_channel_port: {port} with data-parallel rank "
            f"{data_parallel_rank} added is over 65535"
        )
    if problems:
        raise ConfigError("kv_connector_extra_config of PDClusterConnector: " + "; ".join(problems))
    return options


def refuse_unsupported(vllm_config: Any, device: str) -> None:
    """Raise :class:`ConfigError` for what no connector option can make work.

    vLLM's own guards for context parallelism look for the stock connector's name, and those for
    sleep begin with 0.33. ``device`` is the type of device that the engine runs on, as vLLM's
    platform names it.
    """
    parallel = vllm_config.parallel_config
    problems = []
    backend = parallel.distributed_executor_backend
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "")
    if "ray" in name.lower():
        problems.append(
            "distributed_executor_backend: PDClusterConnector does not run under Ray, whose "
            "workers get neither the connector's path nor the engine's identity; use "
            "--distributed-executor-backend mp (with --nnodes for several nodes)"
        )
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, field, 1)
        if size > 1:
            problems.append(
                f"{field}: {size}: {Reason.CONTEXT_PARALLEL_UNSUPPORTED}: it spreads one "
                "sequence's tokens over ranks; run with size 1"
            )
    model = vllm_config.model_config
    given = {
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--enable-cumem-allocator": model.enable_cumem_allocator,
    }
    flag = next((flag for flag, on in given.items() if on), None)  # the first sets the second too
    if flag is not None:
        field = flag.removeprefix("--").replace("-", "_")
        problems.append(f"{field}: True: it {supported.REFUSED_FLAGS[flag]}; remove {flag}")
    images = model.multimodal_config
    cached = vllm_config.cache_config.enable_prefix_caching or model.is_encoder_decoder
    if images and not (cached or images.language_model_only or images.mm_processor_cache_gb):
        problems.append(
            f"mm_processor_cache_gb: 0: {supported.IMAGES_NUMBERED}; remove "
            "--mm-processor-cache-gb, or use --enable-prefix-caching"
        )
    lets_in = images and getattr(images, "allow_missing_mm_embeddings", False)
    if (
        lets_in
        and not images.language_model_only
        and not vllm_config.kv_transfer_config.is_kv_consumer
    ):
        problems.append(
            "kv_role of MultiConnector: 'kv_both': vLLM then takes images without their data, "
            "which a prefill engine needs; remove the other connectors, or add "
            "--language-model-only"
        )
    buffer_device = vllm_config.kv_transfer_config.kv_buffer_device
    if buffer_device != device:
        problems.append(
            f"kv_buffer_device: {buffer_device!r}: KV is read from where the engine keeps it, on "
            f"{device}, and there is no buffer in other memory; remove kv_buffer_device from "
            f"--kv-transfer-config, or set it to {device!r}"
        )
    if problems:
        raise ConfigError("PDClusterConnector cannot run in this engine: " + "; ".join(problems))


def _host(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 255:
        raise ValueError("is not a host name or address")
    if value in _WILDCARDS:
        raise ValueError(
            "cannot be advertised to peers; give the address they reach, e.g. the pod's"
        )
    return value


def _checked(kind: type, why: str, allows: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a reader of values of this type; a bool is no number."""

    def read(value: Any) -> Any:
        is_of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_of_kind or not allows(value):
            raise ValueError(why)
        return value

    return read


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a number of seconds")
    if not 1 <= value <= MAX_LEASE_SECONDS:
        raise ValueError(f"is not between 1 and {MAX_LEASE_SECONDS:.0f} seconds")
    return float(value)


def _backends(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError('is not a list of NIXL backends, such as ["UCX"]')
    for name in value:
        if why := supported.why_not(name):
            raise ValueError(f"names {name[:64]}, which {why}; use UCX or LIBFABRIC")
    if len({*value}) > 1:
        raise ValueError("names two backends: NIXL would choose for each transfer; use one")
    return tuple(value)


def _backend_options(value: Any) -> tuple[tuple[str, str, str], ...]:
    if not isinstance(value, dict) or not all(isinstance(given, dict) for given in value.values()):
        raise ValueError(
            'does not map backends to options, as {"UCX": {"device_list": "mlx5_0"}} does'
        )
    found = []
    for backend, given in value.items():
        for name, setting in given.items():
            if why := supported.wrong_option(backend, name, setting):
                raise ValueError(f"holds {backend[:64]}.{name[:64]}, which {why}")
            found.append((backend, name, str(setting)))
    return tuple(found)


def _whole(most: int) -> Callable[[Any], Any]:
    return _checked(int, f"is not a whole number from 0 to {most}", lambda n: 0 <= n <= most)


_flag = _checked(bool, "is neither true nor false", lambda _: True)
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "side_channel_host": _host,
    "side_channel_port": _checked(
        int, "is not a port from 1 to 65535", lambda port: 1 <= port <= 65535
    ),
    "lease_seconds": _seconds,
    "drain_deadline_seconds": _seconds,
    "transfer_stall_seconds": _seconds,
    "allow_insecure": _flag,
    "backends": _backends,
    "num_threads": _whole(supported.MAX_THREADS),
    "backend_options": _backend_options,
    "show_internal_names": _flag,
    "ticket_key_file": _checked(
        str, "is not the absolute path of a file", lambda path: path[:1] == "/" and len(path) < 4097
    ),
    "ticket_audience": _checked(
        str, "is not a text of at most 512 characters", lambda text: len(text) <= 512
    ),
    "tls": tls_files,
    "kv_layout": _checked(
        str, f"is none of {', '.join(supported.LAYOUTS)}", lambda name: name in supported.LAYOUTS
    ),
    "local_tokens_per_step": _whole(prompt_outcomes.MOST_TOKENS_PER_STEP),
    "router_may_skip_prefill": _flag,
}
