"""An agent of the real NIXL. No other module imports nixl.

One thread calls an agent. nixl's lock mode is RW all the same, because nixl's progress thread runs
at the same time. Errors are raised outside of ``except`` blocks: a chained traceback would keep
nixl's agent alive, and only the end of the agent stops a DMA.
"""

# ruff: noqa: D102 - the methods are documented in AgentInterface

import ctypes
import gc
import importlib
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import (
    AgentSurvivedError,
    Dlist,
    Handle,
    Indices,
    NixlError,
    NixlErrorKind,
)
from pdcluster_connector.plan import descriptors, geometry

T = TypeVar("T")
logger = logging.getLogger(__name__)

_ALL = frozenset(NixlErrorKind)
_GONE = frozenset({NixlErrorKind.DISCONNECTED})
_ENDED = frozenset({NixlErrorKind.DISCONNECTED, NixlErrorKind.TRANSPORT})


def _load_nixl(*, rocm: bool = False) -> Any:
    """Return nixl's Python API: first the wheel of this platform, as vLLM chooses it."""
    failed: ImportError | None = None
    for name in ("nixl_rocm", "nixl") if rocm else ("nixl", "nixl_rocm"):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            failed = failed or error
    raise NixlError(
        NixlErrorKind.INVALID,
        f"nixl cannot be imported ({failed}); install nixl, or use an image that holds it",
    ) from failed


def progress_delay(backends: Sequence[str], *, serves_gpu: bool = False) -> int:
    """Return how many microseconds an agent's progress thread waits while nothing happens.

    UCX's thread waits in poll() for events of its transports, and this is only its timeout, in
    whole milliseconds. A reader polls its transfers itself. Over TCP, the peer's thread answers it,
    and even with 100 ms no read was slower. [docs/benchmarks.md] Not measured, so left:

    * memory of a GPU that is read over TCP: whether UCX's copies to the host wake the thread;
    * LIBFABRIC: its thread sleeps, and nothing else finds out that a read has ended.
    """
    return 100 if "LIBFABRIC" in backends else 1_000 if serves_gpu else 10_000


SPLIT_BATCH_SIZE = 256
"""Descriptors that one of NIXL's threads posts at once.

With NIXL's own 1,024, a transfer of as many is posted by one thread while the others wait. On an
H100, 81,920 descriptors over four threads took 404 ms so, and 236 ms with 256. [make gpu]
"""

UCX_DEFAULTS = {
    # By default, UCX waits for the connection while a peer is added. If the network drops the
    # packets, it waits two minutes, and nothing is read from other peers. [measured, UCX over TCP]
    "UCX_TCP_CONN_NB": "y",
    # By default, UCX keeps registrations of freed memory without a limit. vLLM sets the same value
    # when it imports NIXL. UCX reads it once, when NIXL is loaded.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # If less than 16 MiB of /dev/shm are left, UCX makes no more buffers there. By default it then
    # takes other memory for an interface that is already open, and crashes (openucx/ucx #11732).
    "UCX_POSIX_ALLOC": "md",
    # A decode engine pulls. Where UCX finds no NVLink, it takes cuda_ipc for PUT alone by default,
    # and GET goes over TCP: 0.5 GB/s instead of 99 between two processes on one H100. [measured]
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
}
_LEAST_SHM = "UCX_POSIX_SHM_MIN_SIZE"


@contextmanager
def _waiting_progress_thread(api: Any, delay: int) -> Iterator[None]:
    """Let the agent's progress thread wait ``delay`` microseconds while it has nothing to do.

    nixl 1.5's Python API fixes the delay at 0: each idle agent then spins on a core.
    """
    bindings = api.nixlBind
    original = bindings.nixlAgentConfig

    class Config(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


class NixlAgent:
    """One agent of the real nixl."""

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        backend_options: Sequence[tuple[str, str, str]] = (),
        rocm: bool = False,
        serves_gpu: bool = False,
    ) -> None:
        """Make an agent.

        Args:
            name: the agent's, to which a random part is added.
            backends: NIXL backends; those that this nixl lacks are left out.
            num_threads: threads of the agent's own that post large transfers.
            backend_options: (backend, option, value) (``compat/supported.py``).
            rocm: whether this is an AMD GPU's platform, which has a wheel of its own.
            serves_gpu: whether peers read memory of a GPU from it.
        """
        for variable, value in UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        api = _load_nixl(rocm=rocm)
        self._wheel = Path(api.__file__).parent
        # Peers tell agents apart by name, so a rebuilt agent needs a new one.
        self.name = f"{name}#{secrets.token_hex(4)}"
        self._registrations: list[Any] = []
        self._open: set[Dlist | Handle] = set()
        self._kinds = _error_kinds(
            importlib.import_module(api.__name__.replace("_api", "_bindings"))
        )
        config = api.nixl_agent_config(
            backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        with _waiting_progress_thread(api, progress_delay(backends, serves_gpu=serves_gpu)):
            self._agent: Any = self._call(lambda: api.nixl_agent(self.name, config))
        for backend in [name for name in backends if name in self._agent.plugin_list]:
            options = {option: value for of, option, value in backend_options if of == backend}
            if num_threads:
                options["num_threads"] = str(num_threads)
                options.setdefault("split_batch_size", str(SPLIT_BATCH_SIZE))
            self._create(backend, options)
        if not self._agent.backends:
            raise NixlError(NixlErrorKind.INVALID, f"nixl has no backend of {list(backends)}")

    def register(self, ranges: Sequence[geometry.MemoryRange]) -> None:
        for memory in Memory:
            rows = [(r.address, r.length, r.device, "") for r in ranges if r.memory is memory]
            if rows:
                register = partial(self._agent.register_memory, rows, memory.value)
                self._registrations.append(self._call(register))

    def metadata(self) -> bytes:
        return bytes(self._call(self._agent.get_agent_metadata))

    def add_peer(self, metadata: bytes) -> str:
        name = self._call(lambda: self._agent.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        self._call(lambda: self._agent.remove_remote_agent(name))

    def prepare(self, peer: str | None, rows: descriptors.Rows, memory: Memory) -> Dlist:
        agent = "NIXL_INIT_AGENT" if peer is None else peer
        native = self._call(lambda: self._agent.prep_xfer_dlist(agent, rows, memory.value))
        dlist = Dlist(native, peer)
        self._open.add(dlist)
        return dlist

    def read(
        self, local: Dlist, local_indices: Indices, remote: Dlist, remote_indices: Indices
    ) -> Handle:
        native = self._call(
            lambda: self._agent.make_prepped_xfer(
                "READ", local.native, local_indices, remote.native, remote_indices
            )
        )
        handle = Handle(native)
        self._open.add(handle)  # also if posting fails: nixl may hold a part of it
        # If posting fails, a part may be under way, except when the peer is gone.
        status = self._call(lambda: self._agent.transfer(native), ending=_GONE)
        if status == "ERR":
            raise NixlError(NixlErrorKind.TRANSPORT, "posting the transfer failed", flying=True)
        return handle

    def state(self, handle: Handle) -> Literal["DONE", "PROC"]:
        status = self._call(lambda: self._agent.check_xfer_state(handle.native), ending=_ENDED)
        if status == "ERR":
            raise NixlError(NixlErrorKind.TRANSPORT, "the transport failed the transfer")
        return "DONE" if status == "DONE" else "PROC"

    def release(self, handle: Handle) -> None:
        self._call(handle.native.release)
        self._drop(handle)

    def release_dlist(self, dlist: Dlist) -> None:
        self._call(dlist.native.release)
        self._drop(dlist)

    def close(self) -> None:
        if self._agent is None:
            return
        alive = weakref.ref(self._agent.agent)
        # An error of what follows changes nothing: the end of the agent frees all of it.
        for item in sorted(self._open, key=lambda item: isinstance(item, Dlist)):  # handles first
            with suppress(NixlError):
                self._call(item.native.release)
            self._drop(item)
        while self._registrations:
            with suppress(NixlError):
                self._call(partial(self._agent.deregister_memory, self._registrations.pop()))
        self._agent = None
        if alive() is not None:
            gc.collect()
        if alive() is not None:
            raise AgentSurvivedError(
                NixlErrorKind.INTERNAL, f"something still holds nixl agent {self.name}", flying=True
            )

    def _create(self, backend: str, options: dict[str, str]) -> None:
        """Create a backend. UCX's workers take 4 MiB of /dev/shm each, while there is room."""
        create = partial(self._agent.create_backend, backend, options)
        failed = ""
        try:
            self._call(create)
        except NixlError as error:
            again = error.kind is NixlErrorKind.TRANSPORT and _LEAST_SHM not in os.environ
            if backend == "UCX" and not again:
                raise
            failed = str(error)
        if failed and backend != "UCX":
            raise NixlError(NixlErrorKind.INVALID, _why_not(self._wheel, backend, failed))
        if failed:
            # As if /dev/shm were too small. Peers are read by UCX's other transports.
            os.environ[_LEAST_SHM] = "inf"
            try:
                self._call(create)
            finally:
                del os.environ[_LEAST_SHM]
            logger.warning("%s uses no /dev/shm; with it: %s", self.name, failed)

    def _drop(self, item: Dlist | Handle) -> None:
        """Drop nixl's own object, which would keep the agent alive."""
        item.native = None
        self._open.discard(item)

    def _call(self, function: Callable[[], T], *, ending: Container[NixlErrorKind] = _ALL) -> T:
        """Call nixl. Errors of the kinds in ``ending`` mean that no transfer is under way."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - every failure of nixl becomes a NixlError
            kind = self._kinds.get(type(error), NixlErrorKind.INTERNAL)
            message = f"nixl: {type(error).__name__}: {error}"
        raise NixlError(kind, message, flying=kind not in ending)


def _why_not(wheel: Path, backend: str, failed: str) -> str:
    """Return why NIXL makes no backend. NIXL keeps the linker's reason to itself."""
    folder = wheel.with_name(f".{wheel.name}.mesonpy.libs")
    try:
        ctypes.CDLL(str(folder / "plugins" / f"libplugin_{backend}.so"))
    except OSError as error:
        failed = str(error)
    return (
        f"NIXL makes no backend {backend} ({failed}); it needs a libfabric that fits this NIXL, a "
        "network device in the pod, and a provider that FI_PROVIDER does not exclude"
    )


def _error_kinds(bindings: Any) -> dict[type[BaseException], NixlErrorKind]:
    """Map the exception classes of this nixl. They differ between versions, so go by name."""
    names = {
        "nixlRemoteDisconnectError": NixlErrorKind.DISCONNECTED,
        "nixlBackendError": NixlErrorKind.TRANSPORT,
        "nixlCancelledError": NixlErrorKind.TRANSPORT,
        "nixlNotFoundError": NixlErrorKind.LOST,
        "nixlInvalidParamError": NixlErrorKind.INVALID,
        "nixlMismatchError": NixlErrorKind.INVALID,
        "nixlNotAllowedError": NixlErrorKind.INVALID,
    }
    kinds = {
        getattr(bindings, name): kind for name, kind in names.items() if hasattr(bindings, name)
    }
    return {**kinds, TypeError: NixlErrorKind.INVALID, ValueError: NixlErrorKind.INVALID}
