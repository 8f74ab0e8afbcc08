"""The two Secrets of a PDCluster, its ticket keys and its certificates, read and written.

And what else is read for one PDCluster and not watched: the ConfigMap with its model's config.json.

Secrets are neither listed nor watched, because the operator has no right to do so. What a Secret
says is remembered for four minutes. With 36 PDClusters that are created at once
(``operator/tests/runtime/test_crowd.py``), there were 0.03 reads for each of them with this memory,
and 12.7 without it. The gate of the benchmark allows 1.6, one of which is of a router's ReplicaSet.
The keys themselves are never remembered.
"""

import base64
import binascii
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from pdcluster_operator.api.object_names import TICKET_KEY_HASH_ANNOTATION
from pdcluster_operator.api.spec.model_config import FoundConfig, found_in, named_config_map
from pdcluster_operator.plan import renewals, types
from pdcluster_operator.plan.builders.secrets import TICKET_KEY_FILE
from pdcluster_operator.runtime.interfaces import ApiError, ApiServer, Key

SECRET_SECONDS = 240.0
"""How long what a Secret says is remembered. Then it is read again, and a deletion is noticed.

It is shorter than the resync period, so each resync reads the Secrets of each cluster.
"""
TICKET_KEY, CERTIFICATES, MODEL_CONFIG = "ticket key", "certificates", "model config"
# As the connector's ``sidechannel/ticket_key_file.py`` asks for.
KEY_BYTES, MOST_KEYS = 32, 2
_KEY = re.compile("(?:[0-9a-fA-F]{2}){32,128}")


class _Remembered(NamedTuple):
    uid: str
    content: Any
    since: float


class ClusterSecrets:
    """Reads and writes the Secrets of all clusters, and remembers what they say."""

    def __init__(self, api_server: ApiServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._api_server = api_server
        self._clock = clock
        self._known: dict[tuple[Key, str], _Remembered] = {}
        self._no_certificates: types.HeldCertificates | None = None

    async def ticket_key(self, key: Key, uid: str, *, new: bool = False) -> str | None:
        """Return what the cluster's Secret says beside its keys; see ``ApiServer.read_ticket_key``.

        Args:
            uid: of the PDCluster.
            new: the cluster has no children yet, so the Secret is not read. The operator only
                creates it, and the API server refuses that if there is one. The next plan sees
                children, and then the Secret is read.
        """
        content: str | None = self._recall(key, TICKET_KEY, uid)
        if content is None and not new:
            content = await self._api_server.read_ticket_key(key, uid)
            self._remember(key, TICKET_KEY, uid, content)
        return content

    async def certificates(
        self, key: Key, uid: str, *, new: bool = False
    ) -> types.HeldCertificates:
        """Return what the Secret with the certificates says; see ``ApiServer.read_certificates``.

        That there is no such Secret is also remembered, because most clusters never have one.

        Args:
            uid: of the PDCluster.
            new: the cluster has no children yet, so no engine has a certificate.
        """
        held: types.HeldCertificates | None = self._recall(key, CERTIFICATES, uid)
        if held is None:
            held = self._no_certificates if new else None
            held = held or await self._api_server.read_certificates(key, uid)
            self._remember(key, CERTIFICATES, uid, held)
        if held.issue is None:
            self._no_certificates = held
        return held

    async def model_config(self, key: Key, cluster: types.Manifest) -> FoundConfig | None:
        """Return what the ConfigMap of ``spec.model.configMapRef`` says; None if there is no ref.

        It is read after each change of the spec, and once in four minutes. If it cannot be read,
        what was read before stands: a change that it forbids must not pass because of an outage.
        """
        name, field = named_config_map(cluster)
        if not name:
            self._known.pop((key, MODEL_CONFIG), None)
            return None
        of = f"{cluster['metadata']['uid']} {name} {field}"
        version = f"{of} {cluster['metadata'].get('generation')}"
        found: FoundConfig | None = self._recall(key, MODEL_CONFIG, version)
        if found is None:
            try:
                live = await self._api_server.read("ConfigMap", key.namespace, name)
            except ApiError as error:
                known = self._known.get((key, MODEL_CONFIG))
                if known is not None and known.uid.startswith(f"{of} "):
                    return cast("FoundConfig", known.content)
                return FoundConfig(unread=str(error))
            found = found_in(live, field)
            self._remember(key, MODEL_CONFIG, version, found)
        return found

    async def write_ticket_key(self, key: Key, step: types.WriteTicketKey) -> None:
        """Carry out a step; see ``ApiServer.write_ticket_key``."""
        self._known.pop((key, TICKET_KEY), None)  # if the write fails, nobody knows what is there
        await self._api_server.write_ticket_key(step)
        uid = str(step.manifest["metadata"]["ownerReferences"][0]["uid"])
        self._remember(key, TICKET_KEY, uid, renewals.rotation_of(step.manifest))

    async def write_certificates(self, key: Key, step: types.WriteCertificates) -> None:
        """Carry out a step; see ``ApiServer.write_certificates``."""
        known = self._known.pop((key, CERTIFICATES), None)
        held = await self._api_server.write_certificates(step)
        if known is not None:
            self._remember(key, CERTIFICATES, known.uid, held)

    def forget(self, key: Key) -> None:
        """Forget the Secrets of a cluster that is gone, or that another operator may change."""
        for kind in (TICKET_KEY, CERTIFICATES, MODEL_CONFIG):
            self._known.pop((key, kind), None)

    def _recall(self, key: Key, kind: str, uid: str) -> Any:
        known = self._known.get((key, kind))
        if known is None or known.uid != uid or self._clock() - known.since >= SECRET_SECONDS:
            return None
        return known.content

    def _remember(self, key: Key, kind: str, uid: str, content: object) -> None:
        self._known[key, kind] = _Remembered(uid, content, self._clock())


def with_a_new_key(step: types.WriteTicketKey, live: types.Manifest | None) -> dict[str, Any]:
    """Return the Secret with a new random key first, and the first key of ``live`` second."""
    keys = [secrets.token_hex(KEY_BYTES), *_keys_in(live)[:1]]
    text = "".join(f"{key}\n" for key in keys)
    metadata = step.manifest["metadata"]
    annotations = {**metadata["annotations"], TICKET_KEY_HASH_ANNOTATION: _hash(keys)}
    data = {TICKET_KEY_FILE: base64.b64encode(text.encode()).decode()}
    return {**step.manifest, "metadata": {**metadata, "annotations": annotations}, "data": data}


def held_ticket_key(live: types.Manifest | None) -> str | None:
    """Return which rotation a live Secret is of; None without one that holds what was written.

    The Secret of an operator of 0.1.0 has no hash. It has to hold keys that engines can use.
    """
    keys = _keys_in(live)
    if live is None or not keys:
        return None
    noted = (live["metadata"].get("annotations") or {}).get(TICKET_KEY_HASH_ANNOTATION)
    return renewals.rotation_of(live) if noted in (None, _hash(keys)) else None


def _keys_in(live: types.Manifest | None) -> list[str]:
    """Return the keys of a Secret; none if engines could not use them as they are."""
    encoded = ((live or {}).get("data") or {}).get(TICKET_KEY_FILE) or ""
    try:
        keys = base64.b64decode(encoded, validate=True).decode("ascii").split()
    except (binascii.Error, UnicodeDecodeError):  # somebody else wrote it
        return []
    return keys if len(keys) <= MOST_KEYS and all(map(_KEY.fullmatch, keys)) else []


def _hash(keys: Iterable[str]) -> str:
    """Return a short hash of keys. They are random, so it tells nothing of them."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
