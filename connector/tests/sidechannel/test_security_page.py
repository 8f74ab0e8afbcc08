"""docs/security.md: its commands make certificates that engines accept, and its tests exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from loopback_engines import SHAPE, connect, shards_of

from pdcluster_connector.certificate_files import Tls, TlsFiles
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.sidechannel.server import SideChannelServer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()
PREFILL, DECODE = "my.llama.prefill.a.0/1", "my.llama.decode.a.0/1"


def test_the_commands_make_certificates_that_serve(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)

    def tls(engine_id: str) -> Tls:
        folder = tmp_path / engine_id.partition("/")[0]
        files = TlsFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
        return Tls(files, engine_id)

    server = SideChannelServer(
        "127.0.0.1", 0, PREFILL, SHAPE, shards=shards_of(PREFILL), tls=tls(PREFILL)
    )
    server.start()
    book = PeerBook(DECODE, SHAPE, (0, 0), tls(DECODE))
    book.start()
    try:
        assert isinstance(connect(book, server.port, PREFILL).wait(), EngineMetadata)
    finally:
        book.close()
        server.stop()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+/tests/[\w/]+\.py)`", PAGE))))
def test_every_test_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).is_file()
