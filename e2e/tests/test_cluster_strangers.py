"""Strangers: a pod of the namespace, with the labels of engines and a certificate of another one.

Our NetworkPolicy lets it in, so only the certificates keep it from KV.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from client_pod import client
from cluster_run import ClusterRun
from kv_load import moved, text

from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, engine_name
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.api.object_names import CLUSTER_LABEL, LAUNCHER_PORT, ROLE_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HOUR = 3600.0
STRANGERS = ("nobody", "another CA", "expired", "other cluster", "wrong role")
# Prints the status of each request, or 0 if the server ended the connection.
ASK = """
import base64, http.client, json, ssl, sys, tempfile
asked = json.load(sys.stdin)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
if asked["pem"]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(asked["pem"].encode())
        file.flush()
        context.load_cert_chain(file.name)
said = []
for port, method, path, body in asked["requests"]:
    connection = http.client.HTTPSConnection(asked["host"], port, timeout=60, context=context)
    try:
        connection.request(method, path, base64.b64decode(body))
        said.append(connection.getresponse().status)
    except (OSError, http.client.HTTPException):
        said.append(0)
    connection.close()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def stranger(tiny: ClusterRun) -> Iterator[str]:
    tiny.wait_ready()
    image = tiny.pods("router")[0]["spec"]["containers"][0]["image"]
    labels = {CLUSTER_LABEL: tiny.name, ROLE_LABEL: "decode"}
    pod = client("stranger", image, **labels)
    tiny.kubectl("apply", "--filename=-", stdin=json.dumps(pod))
    try:
        tiny.kubectl("wait", "--for=condition=Ready", "pod/stranger", "--timeout=180s")
        yield "stranger"
    finally:
        tiny.kubectl("delete", "pod", "stranger", "--force", "--grace-period=0")


def said(run: ClusterRun, claimed: str, pem: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """What prefill's side channel and launcher answer to who claims to be ``claimed``."""
    [prefill] = run.pods("prefill")
    shake = messages.HandshakeRequest(
        (messages.PROTOCOL_OLDEST, messages.PROTOCOL_NEWEST), claimed, EngineShape()
    )
    lease = messages.LeaseRequest(run.engine_id("prefill"), claimed, renewals=(("r", 1),))
    side_channel: dict[str, tuple[str, bytes]] = {
        "/v1/handshake": ("POST", messages.encode(shake)),
        "/v1/leases": ("POST", messages.encode(lease)),
    }
    launcher: dict[str, tuple[str, bytes]] = {
        "/v1/links": ("GET", b""),
        "/v1/rendezvous": ("GET", b""),
        "/v1/peers": ("PUT", b'{"generation":1,"peers":[]}'),
        "/v1/reports": ("POST", b"{}"),
        "/v1/drain": ("POST", b""),
        "/v1/routed": ("PUT", b""),
    }
    requests = [
        (port, method, path, base64.b64encode(body).decode())
        for port, paths in ((5600, side_channel), (LAUNCHER_PORT, launcher))
        for path, (method, body) in paths.items()
    ]
    asked: dict[str, Any] = {
        "host": prefill["status"]["podIP"],
        "pem": pem.decode(),
        "requests": requests,
    }
    words = ("exec", "--stdin", "stranger", "--", "python3", "-c", ASK)
    codes = dict(
        zip(
            (path for _, _, path, _ in requests),
            json.loads(run.kubectl(*words, stdin=json.dumps(asked))),
            strict=True,
        )
    )
    print(claimed, codes)
    return (
        {path: codes[path] for path in side_channel},
        {path: codes[path] for path in launcher},
    )


def pem_of(authority: EngineAuthority, name: str, start: float, end: float) -> bytes:
    signed = authority.sign(name, time.time() + start, time.time() + end)
    return signed.certificate + signed.key


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_get_no_metadata_no_kv_and_no_drain(
    tiny: ClusterRun, stranger: str, authority: EngineAuthority, who: str
) -> None:
    decode = tiny.engine_id("decode")
    claimed = {
        "other cluster": f"{tiny.namespace}.other.decode.aaaaa.0/1",
        "wrong role": f"{tiny.namespace}.{tiny.name}.prefill.aaaaa.7/1",
    }.get(who, decode)
    name = engine_name(claimed)
    pem = {
        "nobody": b"",
        "another CA": pem_of(EngineAuthority.new(time.time())[0], name, -HOUR, HOUR),
        "expired": pem_of(authority, name, -2 * HOUR, -HOUR),
    }.get(who) or (b"" if who == "nobody" else pem_of(authority, name, -HOUR, HOUR))
    before = tiny.restarts("prefill")
    side_channel, launcher = said(tiny, claimed, pem)
    known = who in ("other cluster", "wrong role")
    assert set(side_channel.values()) == {403 if known else 0}
    without = 403 if known or who == "nobody" else 0
    assert set(launcher.values()) == {without}
    assert tiny.restarts("prefill") == before
    tiny.wait_ready()
    moved(tiny, text(60, 9000 + STRANGERS.index(who)))


def test_the_same_requests_are_answered_to_who_is_known(
    tiny: ClusterRun, stranger: str, authority: EngineAuthority
) -> None:
    """Without this, the test above would also pass where nothing listens."""
    decode = tiny.engine_id("decode")
    side_channel, launcher = said(tiny, decode, pem_of(authority, engine_name(decode), -HOUR, HOUR))
    assert side_channel == {"/v1/handshake": 409, "/v1/leases": 200}, "409: an empty shape"
    assert set(launcher.values()) == {403}, "another engine is no operator"
    _, launcher = said(tiny, decode, pem_of(authority, OPERATOR_NAME, -HOUR, HOUR))
    assert launcher == {
        "/v1/links": 200,
        "/v1/rendezvous": 404,
        "/v1/peers": 204,
        "/v1/reports": 401,
        "/v1/drain": 202,
        "/v1/routed": 204,
    }
    tiny.kubectl("delete", "pod", tiny.pod("prefill"), "--force", "--grace-period=0")
    tiny.wait("restart", lambda: tiny.condition("Ready")["status"] != "True", 60)
    tiny.wait_ready()
