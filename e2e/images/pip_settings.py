"""This machine's pip settings for a build. They are a secret, so no layer keeps them."""

from __future__ import annotations

import configparser
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.commands import output

# The settings that say where packages come from. A build does not need the others.
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "cert")


@contextmanager
def pip_options(home: Path) -> Iterator[list[str]]:
    """Options of a build whose Dockerfile mounts the secret `pip` as /etc/pip.conf."""
    with tempfile.TemporaryDirectory(prefix="pip-", dir=home) as folder:
        settings = pip_settings()
        secret = Path(folder, "pip.conf")
        secret.write_text(written(settings))
        options = ["--secret", f"id=pip,src={secret}"]
        if authority := settings.get("cert"):
            # The certificate authority of a site's proxy; mounted, so that it stays out of layers.
            options += ["--volume", f"{authority}:{authority}:ro"]
        yield options


def pip_settings() -> dict[str, str]:
    """Where this machine's pip gets packages from, according to files and variables."""
    # The environment of the tests has no pip; the Python that it was made with has.
    python = Path(sys.base_prefix, "bin", "python3")
    listed = output(python, "-m", "pip", "config", "list") or output("pip3", "config", "list")
    # A variable wins over a file, so it comes last.
    lines = sorted(listed.splitlines(), key=lambda line: line.startswith(":env:"))
    found = {}
    for line in lines:
        scope, _, value = line.partition("=")
        key = scope.rpartition(".")[2]
        if key in PIP_SETTINGS:
            found[key] = value.strip("'\"")
    return found


def written(settings: dict[str, str]) -> str:
    """A pip.conf; interpolation is off, because an address may hold a percent sign."""
    parser = configparser.RawConfigParser()
    parser["global"] = settings
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()
