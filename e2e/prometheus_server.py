"""Prometheus and promtool: those on PATH, else those of Debian's package, in the cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import yaml

from cluster.locks import alone
from cluster.places import cache_folder
from loopback import free_port
from waiting import until

PROGRAMS = ("prometheus", "promtool")


@cache
def program(name: str) -> Path:
    """Return the path of one of PROGRAMS. The package is unpacked, which needs no root."""
    if found := shutil.which(name):
        return Path(found)
    folder = cache_folder() / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / "lock", "unpacks Debian's package prometheus"):
        if not (folder / "complete").exists():
            _unpack(folder)
            (folder / "complete").touch()
    return folder / "usr" / "bin" / name


def _unpack(folder: Path) -> None:
    said = "there is no apt-get"
    download = ["apt-get", "download", "prometheus"]
    with tempfile.TemporaryDirectory() as place:
        for command in (download, ["apt-get", "update", "--quiet=2"], download):
            if shutil.which("apt-get"):
                said = subprocess.run(
                    command, cwd=place, capture_output=True, text=True, check=False
                ).stderr
            if packages := list(Path(place).glob("*.deb")):
                subprocess.run(["dpkg", "-x", packages[0], folder], check=True)
                return
    raise AssertionError(f"install prometheus and promtool: {said.strip()[-500:]}")


def promtool(*words: str | Path) -> str:
    """Run promtool; return what it said. Fails with that if it finds a fault."""
    done = subprocess.run(
        [program("promtool"), *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A Prometheus that scrapes every three seconds. Use as a context manager.

    Args:
        folder: for its data and its log.
        targets: the labels of each target, by its host:port.
        rules: files of rules, which it evaluates as often.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, Mapping[str, str]], rules: Sequence[Path] = ()
    ) -> None:
        self._folder, self._targets, self._rules = folder, targets, rules

    def __enter__(self) -> Self:
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        scraped = [{"targets": [at], "labels": dict(of)} for at, of in self._targets.items()]
        config = {
            # On a busy machine, an engine's page may take more than a second.
            "global": dict.fromkeys(
                ("scrape_interval", "scrape_timeout", "evaluation_interval"), "3s"
            ),
            "rule_files": [str(path) for path in self._rules],
            "scrape_configs": [{"job_name": "pdcluster", "static_configs": scraped}],
        }
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = self._folder / "prometheus.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            until("Prometheus", self._is_ready, 60, self.log.read_text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
        except OSError:
            return False
        return True

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of Prometheus' API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def samples(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples that an expression has now."""
        return list(self.ask("query", query=expression)["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule, with how its last evaluation went and the alerts that it has."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def alerts_of(self, name: str) -> list[dict[str, Any]]:
        """Return the alerts of a rule that are pending or firing."""
        return [alert for rule in self.rules() if rule["name"] == name for alert in rule["alerts"]]

    def wait_for_samples(
        self, queries: Mapping[str, str], meanwhile: Callable[[], object], seconds: float = 120
    ) -> float:
        """Return the seconds until each query has had samples; on failure, name those without."""
        left = dict(queries)

        def none_left() -> bool:
            meanwhile()
            for where in [where for where, query in left.items() if self.samples(query)]:
                del left[where]
            return not left

        shown = partial(json.dumps, left, indent=1)
        return until("samples of some queries", none_left, seconds, shown)

    def wait_for(self, what: str, holds: Callable[[], Any], seconds: float = 60) -> None:
        """Wait until something holds; on failure, show the targets."""
        until(what, holds, seconds, lambda: json.dumps(self.ask("targets"), indent=1)[-5000:])
