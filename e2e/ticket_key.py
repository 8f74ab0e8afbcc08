"""A ticket key for tests, which are no secret: the engines of a test share it."""

from __future__ import annotations

from pathlib import Path

from pdcluster_connector.sidechannel.ticket_key_file import parse_keys

KEY_FILE = str(Path(__file__).with_name("not-secret.key"))
KEYS = parse_keys(Path(KEY_FILE).read_bytes())
