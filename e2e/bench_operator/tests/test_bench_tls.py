"""The simulated launchers speak TLS as real ones do, with what the operator wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from bench_operator.certificates import Certificates
from bench_operator.launchers import Launcher, server
from pdcluster_connector.protocol.launcher_documents import PeersDocument
from pdcluster_operator.adapters.engine_authority import EngineAuthority, with_certificates
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.plan.types import WriteCertificates
from pdcluster_operator.runtime.interfaces import LauncherError

ENGINE, OTHER = "bench.c-1.prefill.7f9c4.0", "bench.c-1.decode.7f9c4.0"
NOW = int(time.time())
EXPIRES = NOW + 3600
AUTHORITY, _ = EngineAuthority.new(NOW)
ANOTHER, _ = EngineAuthority.new(NOW)


def secret(authority: EngineAuthority, *engines: str) -> dict[str, Any]:
    entries = {one.split(".", 2)[2].replace(".", "-"): one for one in engines}
    manifest = {"metadata": {"annotations": {}}}
    step = WriteCertificates(manifest, entries, NOW - 60, EXPIRES, "new")
    return with_certificates(step, authority)


def asked(
    certificates: Certificates,
    ask: Callable[[EnginesHttp, Target], Awaitable[Any]],
    *,
    operator: EngineAuthority = AUTHORITY,
) -> Any:
    """Return what the launcher of ENGINE answers to an operator."""

    async def run() -> Any:
        pod = TestServer(server({"127.0.0.1": Launcher(ENGINE, certificates)}, lambda: False))
        await pod.start_server(ssl=certificates.context())
        try:
            async with EnginesHttp(operator) as engines:
                url = f"https://127.0.0.1:{pod.port}"
                return await ask(engines, Target(ENGINE, Role.PREFILL, url, "1/0"))
        finally:
            await pod.close()

    return asyncio.run(run())


def news(engines: EnginesHttp, target: Target) -> Awaitable[Any]:
    return engines.changes(target, "", wait=False)


async def ready(engines: EnginesHttp, target: Target) -> str:
    """What the engine says of its state: it is not ready."""
    try:
        return (await engines._call("GET", target, "/readyz")).decode()
    except LauncherError as error:
        if "answers 503" not in str(error):
            raise
        return str(error)


def test_an_engine_has_the_certificate_of_the_operators_secret() -> None:
    certificates = Certificates()
    certificates.take(secret(AUTHORITY, ENGINE))
    assert asked(certificates, news).readyz.certificate_expires == EXPIRES


def test_an_engine_that_is_added_gets_a_certificate_and_the_others_keep_their_context() -> None:
    certificates = Certificates()
    certificates.take(secret(AUTHORITY, ENGINE))
    before = dict(certificates.contexts)
    certificates.take(secret(AUTHORITY, ENGINE, OTHER))
    assert len(certificates.contexts) == 2
    assert before.items() <= certificates.contexts.items()


def test_without_a_certificate_there_is_no_connection() -> None:
    certificates = Certificates()
    certificates.take(secret(AUTHORITY, OTHER))
    with pytest.raises(LauncherError, match="Cannot connect"):
        asked(certificates, ready)


def test_the_operator_of_another_authority_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end refuses the other. The second time, the operator trusts this server."""
    certificates = Certificates()
    certificates.take(secret(AUTHORITY, ENGINE))
    with pytest.raises(LauncherError):
        asked(certificates, ready, operator=ANOTHER)
    monkeypatch.setattr(ANOTHER, "pem", AUTHORITY.pem)
    with pytest.raises(LauncherError):
        asked(certificates, ready, operator=ANOTHER)


def test_another_name_than_the_operators_may_ask_for_the_state_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificates = Certificates()
    certificates.take(secret(AUTHORITY, ENGINE))
    monkeypatch.setattr("pdcluster_operator.adapters.engines_http.OPERATOR_NAME", "somebody.else")
    assert ENGINE in asked(certificates, ready)
    with pytest.raises(LauncherError, match="403"):
        asked(certificates, lambda engines, target: engines.put_peers(target, PeersDocument(0, ())))
