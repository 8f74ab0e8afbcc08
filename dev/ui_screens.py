"""Take the pictures of `pdcluster ui` in docs/pictures, from real engines on this machine.

    python dev/ui_screens.py [--keep]

It runs examples/tiny-cpu.yaml with two engines of each role, sends prompts for a minute, and looks
at the page with Chromium. ``--keep`` leaves the run until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml
from PIL import Image

import browser
from models.tiny import model_path

ROOT = Path(__file__).resolve().parent.parent
SCREENS = ROOT / "docs/pictures"
START_SECONDS, LOAD_SECONDS = 420.0, 90.0
COLOURS = 96
MEMORY = "1536Mi"
"""Of an engine: four of them fit beside other work."""
MOST_BYTES = 200_000
VIEWS = {
    "ui-desktop.png": {"viewport": {"width": 1240, "height": 900}, "color_scheme": "dark"},
    "ui-phone.png": {
        "viewport": {"width": 360, "height": 780},
        "color_scheme": "dark",
        "device_scale_factor": 2,
    },
}


def started(folder: Path) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start `pdcluster up --ui`; return it, the page's address and the endpoint."""
    manifest = yaml.safe_load((ROOT / "examples/tiny-cpu.yaml").read_text())
    for role in ("prefill", "decode"):
        manifest["spec"][role]["replicas"] = 2
        manifest["spec"][role]["resources"] = {"requests": {"memory": MEMORY}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(manifest))
    output = folder / "output"
    words = ["up", "--plain", "--ui", "--model-dir", str(model_path("llama"))]
    with output.open("wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "pdcluster_operator", *words, str(folder / "cluster.yaml")],
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + START_SECONDS
    while "Ctrl-C stops it" not in (said := output.read_text()):
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise SystemExit(said)
        time.sleep(1)
    print(said)
    [page], [endpoint] = (
        re.findall(rf"{word}: (http://\S+)", said) for word in ("page", "endpoint")
    )
    return run, page, endpoint


def ask(endpoint: str, number: int) -> None:
    words = " ".join(f"token {number} {place}" for place in range(40))
    body = {"model": "tiny", "prompt": words, "max_tokens": 16}
    request = urllib.request.Request(
        f"{endpoint}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).read()


async def load(endpoint: str) -> None:
    """Send prompts until cancelled, now more of them and now fewer."""
    number = 0
    while True:
        together = 1 + abs(number // 6 % 8 - 4)
        numbers = range(number, number + together)
        await asyncio.gather(*(asyncio.to_thread(ask, endpoint, one) for one in numbers))
        number += together


async def look(url: str, endpoint: str) -> None:
    SCREENS.mkdir(exist_ok=True)
    async with browser.running() as chromium:
        sending = asyncio.create_task(load(endpoint))
        contexts = {name: await chromium.new_context(**view) for name, view in VIEWS.items()}  # type: ignore[arg-type]
        pages = {name: await context.new_page() for name, context in contexts.items()}
        for page in pages.values():
            await page.goto(url)
            await page.wait_for_selector("#live[data-state=live]")
        await asyncio.sleep(LOAD_SECONDS)
        for name, page in pages.items():
            file = SCREENS / name
            whole = name != "ui-phone.png"
            await page.screenshot(path=file, full_page=whole)
            with Image.open(file) as image:
                image.quantize(COLOURS).save(file, optimize=True)
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")
            if file.stat().st_size > MOST_BYTES:
                raise SystemExit(f"{name} has more than {MOST_BYTES:,} bytes")
        sending.cancel()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, page, endpoint = started(Path(folder))
        try:
            asyncio.run(look(page, endpoint))
            if "--keep" in sys.argv[1:]:
                with contextlib.suppress(KeyboardInterrupt):
                    run.wait()
        finally:
            if run.poll() is None:
                os.kill(run.pid, signal.SIGINT)
            print(f"`pdcluster up` ended with {run.wait(120)}")


if __name__ == "__main__":
    main()
