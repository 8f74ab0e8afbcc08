"""The operator speaks with engines whose certificates a user mounts: real handshakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from authority import Authority
from pdcluster_connector import certificate_files
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, EngineId, role_name
from pdcluster_connector.protocol.launcher_documents import EngineReport, LinksReport
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.adapters.engines_http import EnginesHttp
from pdcluster_operator.api.spec.types import Certificates, Role
from pdcluster_operator.plan.launchers import Target
from pdcluster_operator.runtime.interfaces import LauncherError

ENGINE = EngineId("ns.tiny.decode.aaaaa.0", "00000000000000dd")
OWN, _ = EngineAuthority.new(time.time())


def ask(
    folder: Path,
    authority: Authority,
    identity: Path | None,
    *,
    served_as: str = "",
) -> tuple[EngineReport, LinksReport]:
    """Ask a launcher, whose files name its role, for its state and its links."""
    files = authority.files(folder / "engine", ENGINE.engine, by_role=True)
    tls = Tls(files, ENGINE.engine)
    config = '{"kv_role":"kv_consumer"}'
    command = engine_command(
        ["m", "--kv-transfer-config", config], engine_id=ENGINE.engine, role="decode"
    )
    readiness = Readiness(ENGINE, "decode", command, {})
    server = LauncherServer(readiness, LinkTable((1, 1)), "secret", lambda: None, None, tls)

    async def run() -> tuple[EngineReport, LinksReport]:
        await server.start("127.0.0.1", 0)
        url = f"https://127.0.0.1:{server._guard.listener.getsockname()[1]}"
        engine = served_as or ENGINE.logical
        target = Target(engine, Role.DECODE, url, "1/0", Certificates.MOUNTED)
        try:
            async with EnginesHttp(OWN, identity=identity) as engines:
                changes = await engines.changes(target, "", wait=False)
                assert changes.readyz is not None
                assert changes.links is not None
                return changes.readyz, changes.links
        finally:
            await server.stop()

    return asyncio.run(run())


def operator_of(authority: Authority, folder: Path, name: str = OPERATOR_NAME) -> Path:
    authority.files(folder, "operator", name=name)
    return folder


def test_the_operator_and_an_engine_of_the_users_authority_know_each_other(tmp_path: Path) -> None:
    authority = Authority("the user's CA")
    report, links = ask(tmp_path, authority, operator_of(authority, tmp_path / "operator"))
    assert report.engine == links.engine == ENGINE.logical
    assert report.certificate_expires is not None
    assert report.certificate_expires > time.time()


def test_the_operator_speaks_with_no_other_role_and_no_other_authority(tmp_path: Path) -> None:
    authority = Authority("the user's CA")
    identity = operator_of(authority, tmp_path / "operator")
    with pytest.raises(LauncherError, match=r"[Hh]ostname mismatch"):
        ask(tmp_path, authority, identity, served_as="ns.tiny.prefill.aaaaa.0")
    with pytest.raises(LauncherError, match=r"[Hh]ostname mismatch"):
        ask(tmp_path, authority, identity, served_as="ns.other.decode.aaaaa.0")
    with pytest.raises(LauncherError, match="certificate"):
        ask(tmp_path, Authority("another CA"), identity)


def test_an_engine_takes_orders_from_the_operators_name_alone(tmp_path: Path) -> None:
    authority = Authority("the user's CA")
    stranger = role_name("ns.tiny.prefill.aaaaa.0/1")
    with pytest.raises(LauncherError, match="is for the operator"):
        ask(tmp_path, authority, operator_of(authority, tmp_path / "operator", stranger))


def test_without_files_the_reason_names_the_folder(tmp_path: Path) -> None:
    authority = Authority("the user's CA")
    with pytest.raises(LauncherError, match="has no certificate"):
        ask(tmp_path, authority, None)
    with pytest.raises(LauncherError, match=r"missing holds no usable.*operator\.pdcluster\.dev"):
        ask(tmp_path, authority, tmp_path / "missing")


def test_new_files_are_taken_up_and_spoiled_ones_are_not(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    now = [0.0]
    old.files(tmp_path, "operator", name=OPERATOR_NAME)
    engines = EnginesHttp(OWN, lambda: now[0], tmp_path)
    first = engines.mounted_context()
    new.files(tmp_path, "operator", name=OPERATOR_NAME, trusting=(old,))
    assert engines.mounted_context() is first, "files are looked at once in a while"
    now[0] -= 3600  # somebody has set the clock right
    second = engines.mounted_context()
    assert second is not first
    assert len(second.get_ca_certs()) == 2
    (tmp_path / "tls.crt").write_text("spoiled")
    now[0] += certificate_files.LOOK_SECONDS
    assert engines.mounted_context() is second
    with pytest.raises(LauncherError, match="holds no usable"):
        EnginesHttp(OWN, identity=tmp_path).mounted_context()
