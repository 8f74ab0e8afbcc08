"""A connector bundle that is no vLLM: a launcher's and an engine's HTTP in one small program.

It obeys files in ``PDFAKE`` (an environment variable of the manifest): ``die`` makes it end
with that file's text as its last words, ``slow`` keeps it from being ready, ``strip`` makes
it keep kv_path to itself.
"""

from __future__ import annotations

import hashlib
import io
import textwrap
import zipfile

from pdcluster_operator.plan.types import ConnectorBundle

PROGRAM = textwrap.dedent("""
    import http.server, json, os, pathlib, signal, ssl, subprocess, sys, threading, time, zlib
    import urllib.parse
    words = sys.argv[1:]
    cut = words.index("--")
    mine, vllm = words[:cut], words[cut + 1:]
    option = lambda name, of=mine: of[of.index(name) + 1]
    engine, role = option("--engine"), option("--role")
    host, config = option("--host"), json.loads(option("--kv-transfer-config", vllm))
    folder = pathlib.Path(os.environ["PDFAKE"])
    me = engine + "/" + os.urandom(8).hex()
    child = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"],
                             start_new_session=True)          # as vLLM's engine core is
    open(vllm[0] + "/config.json").close()                    # the model's mount
    peers, received = {"peers": []}, 0
    flag = lambda name: (folder / name).exists()
    print("loading", engine, flush=True)
    if flag("die"):
        sys.exit((folder / "die").read_text())

    def readyz():
        ready = not flag("slow")
        return {"ready": ready, "engine": engine, "engine_id": me, "role": role,
                "state": "Ready" if ready else "LoadingWeights",
                "message": "" if ready else "shard 1 of 2", "versions": {},
                "side_channel": host + ":5600", "api": f"http://{host}:8000"}

    def state():
        links = [{"prefill": p["engine"], "prefill_engine_id": p["engine_id"],
                  "state": "Established", "shards": "1/1", "bytes_per_second": 2e9,
                  "canary": {"state": "Passed", "bytes": 4096}} for p in peers["peers"]]
        known = {"readyz": readyz(), "links": {"engine": engine, "engine_id": me, "links": links}}
        return {"revision": str(zlib.crc32(json.dumps(known).encode())), **known}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args): pass
        def answer(self, document, status=200):
            body = (document if isinstance(document, str) else json.dumps(document)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def body(self):
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        def do_GET(self):
            if self.path == "/readyz":
                report = readyz()
                self.answer(report, 200 if report["ready"] else 503)
            elif self.path.startswith("/v1/changes"):
                asked = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))
                until = time.monotonic() + float(asked["wait"])
                while (found := state())["revision"] == asked.get("seen"):
                    if time.monotonic() > until:
                        break
                    time.sleep(0.05)
                self.answer(found)
            elif self.path == "/metrics":
                self.answer(f'pdcluster_kv_received_bytes_total{{engine="0"}} {received}\\n')
            elif self.path == "/v1/models":
                self.answer({"object": "list", "data": [
                    {"id": option("--served-model-name", vllm), "object": "model"}]})
            else:
                self.answer({})
        def do_PUT(self):
            peers.update(self.body())
            (folder / "peers.json").write_text(json.dumps(peers))
            self.answer({})
        def do_POST(self):
            global received
            body = self.body()
            given = body.get("kv_transfer_params") or {}
            out = {"id": "x", "object": "text_completion", "created": 1, "model": body.get("model"),
                   "usage": {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11},
                   "choices": [{"index": 0, "text": " and then", "finish_reason": "length"}]}
            if role == "prefill":
                out["kv_transfer_params"] = {"do_remote_prefill": True, "do_remote_decode": False,
                    "remote_engine_id": me, "remote_block_ids": [[0]], "remote_host": host,
                    "remote_port": 5600, "ticket": "t"}
            else:
                moved = bool(given.get("do_remote_prefill"))
                received += 8192 * moved
                if not flag("strip"):
                    out["kv_transfer_params"] = {"kv_path": {
                        "prefill": given.get("remote_engine_id"), "decode": me, "tokens": 8,
                        "blocks": 1, "bytes": 8192 * moved, "seconds": 0.001,
                        "outcome": "transferred" if moved else "local"}}
            self.answer(out)

    servers = [http.server.ThreadingHTTPServer((host, port), Handler) for port in (5590, 8000)]
    if tls := config["kv_connector_extra_config"].get("tls"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls["certificate"], tls["key"])
        servers[0].socket = context.wrap_socket(servers[0].socket, server_side=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        if flag("crash"):
            sys.exit((folder / "crash").read_text())
        time.sleep(0.05)
""")


def fake_connector() -> ConnectorBundle:
    """Return that program, as the connector is packed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), PROGRAM)
    data = buffer.getvalue()
    return ConnectorBundle(hashlib.sha256(data).hexdigest(), data)
