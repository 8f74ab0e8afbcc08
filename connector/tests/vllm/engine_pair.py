"""Pairs of real engines, and what their connectors are told."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from fork_host import Answer, Engine

from authority import Authority
from loopback import free_port
from ticket_key import KEY_FILE

_incarnations = itertools.count(1)
# Longer than this machine stands still, and than a test waits until a lease is given back.
LEASE_SECONDS = 200.0
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def connector_config(
    role: str,
    policy: str = "fail",
    *,
    secured: tuple[Authority, Path] | None = None,
    by_role: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """A kv-transfer-config as local mode writes it: answers say what the KV path did, and why.

    ``secured``: who signs the engine's certificate, and the folder that holds the files.
    ``by_role``: the certificate names the role, as those that users mount do.
    """
    extra.setdefault("side_channel_port", free_port())
    extra.setdefault("lease_seconds", LEASE_SECONDS)
    extra.setdefault("show_internal_names", True)
    extra.setdefault("ticket_key_file", KEY_FILE)
    engine_id = f"test.c.{ROLES[role]}.r.0/{next(_incarnations):016x}"
    if secured is not None:
        authority, folder = secured
        files = authority.files(folder / engine_id, engine_id, by_role=by_role)
        paths = {"ca": files.ca, "certificate": files.certificate, "key": files.key}
        extra["tls"] = {name: str(path) for name, path in paths.items()}
        extra["tls"]["names"] = "roles" if by_role else "engines"
    return {
        "kv_connector": "PDClusterConnector",
        "kv_connector_module_path": "pdcluster_connector.vllm.connector",
        "kv_role": role,
        "engine_id": engine_id,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that differ from block to block and from seed to seed."""
    return [3 + (seed * 131 + i * (7 + seed) + i * i // 5) % 250 for i in range(length)]


class Pair:
    """A prefill and a decode engine, and what a router does with them."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode

    def ticket(self, prompt: list[int], salt: str | None = None) -> dict[str, Any]:
        """Run the prefill; returns the parameters for decode."""
        answer = self.prefill.generate(prompt, 1, {"do_remote_decode": True}, salt)
        assert answer.params is not None
        return answer.params

    def generate(self, prompt: list[int], max_tokens: int = 16, salt: str | None = None) -> Answer:
        """Prefill on one engine, decode on the other."""
        return self.decode.generate(prompt, max_tokens, self.ticket(prompt, salt), salt)

    def moves_soon(self, prompt: list[int], expected: list[int], salt: str) -> None:
        """KV moves, if not at once: a lease of seconds can end while the machine stands still.

        No answer is wrong meanwhile.
        """
        deadline = time.monotonic() + 120
        for number in itertools.count():
            answer = self.generate(prompt, len(expected), f"{salt} {number}")
            assert answer.tokens == expected or answer.finish_reason == "error"
            if answer.path.get("outcome") == "transferred":
                return
            assert time.monotonic() < deadline, answer.path

    def check_nothing_held(self) -> None:
        """No request and no block is left in either engine."""
        nothing_held(self.prefill, self.decode)
        for engine in (self.prefill, self.decode):
            assert engine.free_blocks() == 255, "256 less the null block"


def nothing_held(*engines: Engine) -> None:
    """Wait until no engine has a request or a lease; releases travel by themselves."""
    deadline = time.monotonic() + 120
    while held := [engine.held() for engine in engines if engine.held()]:
        assert time.monotonic() < deadline, held
        time.sleep(0.02)


def leases_expired(prefill: Engine) -> float:
    """How many leases have ended by themselves, and were not given back."""
    return prefill.metrics().get("pdcluster_kv_leases_expired_total", 0.0)
