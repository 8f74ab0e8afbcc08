"""`pdcluster ui` on a real API server, with the operator as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from operator_runs import Operator, cluster, create, until
from played_nodes import PlayedNodes
from real_api import TOKEN, RealApi

pytestmark = pytest.mark.cluster


@contextmanager
def command(real: RealApi, user: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "KUBECONFIG": str(real.kubeconfig(user, TOKEN)),
        "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pdcluster_operator", "ui", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Browser:
    """Opens what the command printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[-\w]{40,}/", self.url), self.url
        self.first = self.get(self.url)

    def get(self, url: str = "") -> str:
        if url.startswith("/"):
            url = self.url.removesuffix("/") + url
        with urllib.request.urlopen(url) as answer:
            return str(answer.read().decode())


@pytest.mark.timeout(600)
def test_the_page_of_a_cluster_that_comes_up(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    with command(real, "admin", "none", "-n", namespace) as process:
        assert process.wait(60) == 4
        assert process.stdout is not None
        assert process.stdout.read().startswith(
            f'error: there is no PDCluster "none" in namespace "{namespace}"'
        )
    operator.start()
    create(real, namespace, cluster())
    with command(real, "admin", "tiny", "-n", namespace) as process:
        page = Browser(process)
        path = f"/c/{namespace}/tiny"

        def serves() -> str:
            html = page.get(path)
            # At first it says "nobody knows whether tiny serves: ". Events come after the status,
            # by a field selector that only a real API server has.
            told = ">tiny serves: " in html and re.search(r"<strong>tiny</strong> \w+: ", html)
            return html if told else ""

        with PlayedNodes(real, namespace):
            html = until(serves, 240, lambda: page.get(path))
        for words in ("prefill/0", "decode/0", "LinksEstablished", "became True: Ready"):
            assert words in html
        assert "The engines' metrics cannot be read" in html, "there is no kubelet"
        assert f'{path}">tiny</a>' in page.get("/clusters")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout is not None
        assert process.stdout.read() == "Ctrl-C ends it.\n"
        with pytest.raises(urllib.error.URLError):
            page.get(path)
