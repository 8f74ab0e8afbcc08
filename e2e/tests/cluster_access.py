"""The API server on a local port, and plain HTTP requests, through it or directly."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from typing import Any, Self

from reply import Reply

from cluster.session import Cluster
from connecting import ATTEMPT_SECONDS, connected


class Proxy:
    """`kubectl proxy`: the API server on a local port, with the rights of the kubeconfig."""

    def __init__(self, cluster: Cluster) -> None:
        self._process = subprocess.Popen(
            [
                str(cluster.programs["kubectl"]),
                f"--kubeconfig={cluster.kubeconfig}",
                "proxy",
                "--port=0",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(re.findall(r":(\d+)$", self._process.stdout.readline())[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def get(self, path: str) -> dict[str, Any] | None:
        """An object of the API server; None when there is none."""
        reply = ask("127.0.0.1", self.port, "GET", path)
        if reply.status == 404:
            return None
        assert reply.status == 200, reply.text
        return dict(reply.document)


def refuses(host: str, port: int) -> bool:
    """Whether a connection is refused. Silence is no refusal: it may be a NetworkPolicy's."""
    try:
        connected(host, port, ATTEMPT_SECONDS).close()
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def ask(
    host: str, port: int, method: str, path: str, body: object = None, seconds: float = 120
) -> Reply:
    """Send one HTTP request, without a proxy; raises OSError if there is no answer."""
    connection = connected(host, port, seconds)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return Reply(answer.status, answer.read())
    except http.client.HTTPException as error:
        raise OSError(f"{host}:{port} broke off: {error!r}") from error
    finally:
        connection.close()
