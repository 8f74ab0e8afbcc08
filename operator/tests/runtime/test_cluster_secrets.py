"""Secrets are read as rarely as possible, and again once they may have changed."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.spec.model_config import FoundConfig
from pdcluster_operator.plan.types import (
    HeldCertificates,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime.cluster_secrets import SECRET_SECONDS, ClusterSecrets
from pdcluster_operator.runtime.control_loop import RESYNC_SECONDS
from pdcluster_operator.runtime.interfaces import ApiError, Key

KEY = Key("ns", "tiny")


class Api:
    """Two Secrets, and a record of what was read."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.held: str | None = None
        self.certificates = HeldCertificates("authority")
        self.config_map: dict[str, Any] | None = None
        self.fail: set[str] = set()

    async def read(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.reads.append(f"{kind} {namespace}/{name}")
        if kind in self.fail:
            raise ApiError("Forbidden", "configmaps is forbidden")
        return self.config_map

    async def read_ticket_key(self, key: Key, uid: str) -> str | None:
        self.reads.append("secret")
        return self.held

    async def write_ticket_key(self, step: WriteTicketKey) -> None:
        if "Secret" in self.fail:
            raise ApiError("Forbidden", "Secret")
        self.held = "1"

    async def read_certificates(self, key: Key, uid: str) -> HeldCertificates:
        self.reads.append("certificates")
        return self.certificates

    async def write_certificates(self, step: WriteCertificates) -> HeldCertificates:
        if "certificates" in self.fail:
            raise ApiError("Forbidden", "certificates")
        self.certificates = HeldCertificates("authority", "1", frozenset(step.engines))
        return self.certificates


def secrets_of(api: Api, now: list[float] | None = None) -> ClusterSecrets:
    moment = now or [0.0]
    return ClusterSecrets(api, lambda: moment[0])  # type: ignore[arg-type]


def secret() -> WriteTicketKey:
    metadata = {
        "annotations": {"pdcluster.dev/rotate-ticket-key": "1"},
        "ownerReferences": [{"uid": "c"}],
    }
    return WriteTicketKey({"kind": "Secret", "metadata": metadata}, rotate=False, why="a test")


async def test_a_secret_is_read_again_only_after_a_while_or_for_another_cluster() -> None:
    api, now = Api(), [0.0]
    secrets = secrets_of(api, now)
    for _ in range(2):
        assert await secrets.ticket_key(KEY, "c") is None
    assert len(api.reads) == 2, "what is missing is looked for each time"
    await secrets.write_ticket_key(KEY, secret())
    api.reads.clear()
    assert await secrets.ticket_key(KEY, "c") == "1"
    assert api.reads == [], "it is what we wrote"
    now[0] += 239.0
    assert await secrets.ticket_key(KEY, "c") == "1"
    assert api.reads == []
    now[0] += 1.0
    assert SECRET_SECONDS < RESYNC_SECONDS, "the next look at all clusters reads it"
    api.held = None
    assert await secrets.ticket_key(KEY, "c") is None, "somebody deleted it"
    api.held = "1"
    for uid in ("c", "c", "another", "another"):
        await secrets.ticket_key(KEY, uid)
    assert len(api.reads) == 3


async def test_a_secret_that_could_not_be_written_is_not_known() -> None:
    api = Api()
    secrets = secrets_of(api)
    api.held = "0"
    assert await secrets.ticket_key(KEY, "c") == "0"
    api.fail = {"Secret"}
    with pytest.raises(ApiError):
        await secrets.write_ticket_key(KEY, secret())
    api.reads.clear()
    await secrets.ticket_key(KEY, "c")
    assert api.reads == ["secret"]


def certificates() -> WriteCertificates:
    metadata = {"name": "tiny-certificates"}
    secret = {"kind": "Secret", "metadata": metadata}
    return WriteCertificates(secret, {"prefill-a-0": "ns.tiny.prefill.a.0"}, 0.0, 1.0, "a test")


async def test_certificates_are_read_once_in_a_while_also_where_there_are_none() -> None:
    api, now = Api(), [0.0]
    secrets = secrets_of(api, now)
    for _ in range(3):
        assert await secrets.certificates(KEY, "c") == HeldCertificates("authority")
    assert api.reads == ["certificates"]
    await secrets.certificates(KEY, "another")
    now[0] += SECRET_SECONDS
    await secrets.certificates(KEY, "another")
    assert len(api.reads) == 3


async def test_certificates_are_read_again_once_they_are_written_or_could_not_be() -> None:
    api = Api()
    secrets = secrets_of(api)
    await secrets.certificates(KEY, "c")
    await secrets.write_certificates(KEY, certificates())
    assert (await secrets.certificates(KEY, "c")).engines == {"prefill-a-0"}
    api.certificates, api.fail = HeldCertificates("authority"), {"certificates"}
    with pytest.raises(ApiError):
        await secrets.write_certificates(KEY, certificates())
    assert (await secrets.certificates(KEY, "c")).issue is None


async def test_nothing_is_read_for_a_new_cluster_once_it_is_known_what_no_secret_means() -> None:
    api = Api()
    secrets = secrets_of(api)
    api.certificates = HeldCertificates("authority", "1", frozenset({"prefill-a-0"}))
    await secrets.certificates(Key("ns", "secured"), "s")
    api.certificates = HeldCertificates("authority")
    assert await secrets.certificates(KEY, "c", new=True) == api.certificates
    assert await secrets.ticket_key(KEY, "c", new=True) is None
    assert api.reads == ["certificates"] * 2, "those of another cluster say nothing of this one"
    assert await secrets.certificates(Key("ns", "next"), "n", new=True) == api.certificates
    assert len(api.reads) == 2


async def test_certificates_that_were_just_written_are_not_read() -> None:
    api = Api()
    secrets = secrets_of(api)
    await secrets.certificates(KEY, "c")
    await secrets.write_certificates(KEY, certificates())
    api.reads.clear()
    assert (await secrets.certificates(KEY, "c")).issue == "1"
    assert api.reads == []


async def test_after_another_operator_may_have_written_everything_is_read_again() -> None:
    api = Api()
    api.held, api.certificates = "1", HeldCertificates("authority", "1")
    secrets = secrets_of(api)
    for _ in range(2):
        await secrets.ticket_key(KEY, "c")
        await secrets.certificates(KEY, "c")
    assert api.reads == ["secret", "certificates"]
    secrets.forget(KEY)
    await secrets.ticket_key(KEY, "c")
    await secrets.certificates(KEY, "c")
    assert api.reads == ["secret", "certificates"] * 2


def served(generation: int = 1, **ref: str) -> dict[str, Any]:
    """Return a PDCluster, with a reference to a ConfigMap if any is given."""
    model = {"configMapRef": ref} if ref else {}
    return {"metadata": {"uid": "c", "generation": generation}, "spec": {"model": model}}


async def test_a_config_map_is_read_again_after_a_change_of_the_spec_or_a_while() -> None:
    api, now = Api(), [0.0]
    secrets = secrets_of(api, now)
    assert await secrets.model_config(KEY, served()) is None
    assert api.reads == [], "nothing is read for a spec that names none"
    api.config_map = {"data": {"config.json": "1", "other": "2"}}
    found = FoundConfig(config_map={"config.json": "1", "other": ""})
    for moment, generation in ((0.0, 1), (239.0, 1), (239.0, 2), (240.0, 2), (479.0, 2)):
        now[0] = moment
        assert await secrets.model_config(KEY, served(generation, name="llama")) == found
    assert api.reads == ["ConfigMap ns/llama"] * 3, "at first, for generation 2, and after 240 s"
    api.config_map = None
    now[0] = 719.0
    assert await secrets.model_config(KEY, served(2, name="llama")) == FoundConfig()


async def test_what_was_read_before_counts_while_the_config_map_cannot_be_read() -> None:
    api, now = Api(), [0.0]
    secrets = secrets_of(api, now)
    api.fail = {"ConfigMap"}
    unread = FoundConfig(unread="configmaps is forbidden")
    for _ in range(2):
        assert await secrets.model_config(KEY, served(name="llama")) == unread
    assert len(api.reads) == 2, "it is tried again"
    api.fail, api.config_map = set(), {"data": {"config.json": "1"}}
    found = await secrets.model_config(KEY, served(name="llama"))
    api.fail, now[0] = {"ConfigMap"}, 300.0
    assert await secrets.model_config(KEY, served(name="llama")) == found
    assert await secrets.model_config(KEY, served(2, name="llama")) == found
    assert await secrets.model_config(KEY, served(3, name="other")) == unread, "another ConfigMap"
    secrets.forget(KEY)
    assert await secrets.model_config(KEY, served(name="llama")) == unread
