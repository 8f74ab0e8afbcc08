"""A headless Chromium for tests and pictures of `pdcluster ui`: this machine's, or Debian's.

``python -m browser`` prints its path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from cluster.packages import ensure_packages
from cluster.report import ClusterError

if TYPE_CHECKING:
    from playwright.async_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def path() -> str:
    """Return the path of a browser; Debian's is installed if there is none and this user may.

    Raises:
        ClusterError: there is none, and none can be installed.
    """
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    ensure_packages({"chromium": "chromium"})
    return shutil.which("chromium") or "chromium"


def problem() -> str:
    """Return why there is no browser; empty if there is one."""
    try:
        path()
    except ClusterError as error:
        return str(error)
    return ""


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Browser]:
    """Start it, and end it with its processes."""
    from playwright.async_api import async_playwright

    # Chromium's sandbox refuses root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path(), args=options)
        try:
            yield browser
        finally:
            await browser.close()


if __name__ == "__main__":
    print(path())
