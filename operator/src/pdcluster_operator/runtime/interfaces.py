"""The interfaces through which the control loop reads and writes everything outside of it.

Also the errors that their calls raise, and the key by which a PDCluster is known.

``adapters`` implements them for a cluster: with HTTP to the API server and to launchers.
``local`` implements them with memory and with processes of this machine.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from pdcluster_connector.protocol.launcher_documents import ChangesReport, PeersDocument
from pdcluster_operator.api.object_names import KIND
from pdcluster_operator.plan import launchers, types
from pdcluster_operator.plan.types import Manifest


class Key(NamedTuple):
    """A PDCluster, by name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ApiError(Exception):
    """A refused or failed API call.

    Attributes:
        reason: CamelCase, as it stands in a condition.
        passing: the next reconcile starts from the newer object; the status does not say it.
    """

    passing = False
    lacks = True  # a step that creates an object may have been left out

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def refuses(self) -> bool:
        """Whether the API server does not take the object as it is."""
        return self.reason in ("Invalid", "Forbidden", "BadRequest")

    @property
    def is_outage(self) -> bool:
        """Whether nobody refused: the server, or what it asks, does not answer or has no time."""
        return _OUTAGE.fullmatch(self.reason) is not None


_OUTAGE = re.compile(
    "ApiServerUnreachable|InternalError|ServerTimeout|ServiceUnavailable|Timeout|TooManyRequests"
    "|Http429|Http5.."
)


class NamedError(ApiError):
    """An answer that callers handle by its class, whose name is the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(type(self).__name__, message)


class Conflict(NamedError):  # noqa: N818 - the API server's own name for it
    """The object changed since it was read: a UID or resourceVersion precondition failed."""

    passing = True


class Invalid(NamedError):  # noqa: N818 - the API server's own name for it
    """The object can never be accepted as it is."""


class NamespaceTerminating(NamedError):  # noqa: N818 - the API server's own name for it
    """Nothing can be created in the namespace any more, because it is being deleted."""


class LauncherError(Exception):
    """A launcher did not answer, or with something else than what was requested."""


class ApiServer(Protocol):
    """Writes, and the reads that no watch can serve. Failures are :class:`ApiError`."""

    async def read(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object as the server has it now; None if there is none."""

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        """Return what the cluster's Secret says beside its keys.

        None if there is none, or if somebody changed its keys; then it is written again.
        Raises NameConflict when an object that the cluster ``uid`` does not own has its name.
        """

    async def write_ticket_key(self, step: types.WriteTicketKey) -> None:
        """Mint a key and write it; keep the first key of a Secret that is there as the second.

        A Secret that came or changed meanwhile is a Conflict.
        """

    async def read_certificates(self, key: Key, uid: str) -> types.HeldCertificates:
        """Return what the Secret with the engines' certificates says beside their keys.

        Raises NameConflict when an object that the cluster ``uid`` does not own has its name.
        """

    async def write_certificates(self, step: types.WriteCertificates) -> types.HeldCertificates:
        """Sign the certificates and write them; return what the Secret says then."""

    async def apply(self, manifest: Manifest, uid: str = "") -> Manifest:
        """Server-side apply with our field manager; return the object as it is then.

        Args:
            uid: of the live object that is changed. Without it the object is created; one that is
                there already is looked at before it is changed.
        """

    async def try_out(self, step: types.TryOut) -> None:
        """Let the server judge without writing. Raises TemplateRefused if it refuses."""

    async def delete(self, step: types.Delete) -> None:
        """Delete with UID and resourceVersion preconditions; an absent object is no error."""

    async def write_status(
        self, key: Key, uid: str, status: Manifest, version: str = "", kind: str = KIND
    ) -> None:
        """Replace the status of a cluster or its PrefillScaler, if it is still that object.

        Args:
            version: resourceVersion of the object as it was seen. While it is the latest, the
                object need not be read.
        """

    async def scale(self, key: Key, step: types.Scale) -> None:
        """Set a number of engines by the subresource scale. Raises Conflict if it changed since."""


class Launchers(Protocol):
    """The launchers' HTTP. A call ends within its adapter's short timeout if it does not wait.

    If the target's URL is HTTPS, the launcher has to show the certificate of the target's engine.
    """

    async def changes(self, target: launchers.Target, seen: str, *, wait: bool) -> ChangesReport:
        """``GET /v1/changes``: the state of a launcher if its revision is not ``seen``.

        Raises :class:`LauncherError`.

        Args:
            wait: whether to wait for a while until something changes. If nothing does, the revision
                that is returned is ``seen``.
        """

    async def put_peers(self, target: launchers.Target, document: PeersDocument) -> None:
        """``PUT /v1/peers`` of a decode engine. Raises :class:`LauncherError`."""

    async def tell_routed(self, target: launchers.Target, *, routed: bool) -> None:
        """``PUT`` or ``DELETE /v1/routed``: whether routers may send the engine requests.

        Raises :class:`LauncherError`.
        """


class EventSink(Protocol):
    """Kubernetes events, or lines in a terminal."""

    async def publish(self, cluster: Manifest, events: Iterable[types.Event]) -> None:
        """Publish events. One that is lost is no error.

        Raises:
            NamespaceTerminating: no event can be published there any more.
        """
