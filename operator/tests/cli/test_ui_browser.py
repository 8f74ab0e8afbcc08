"""The page of `pdcluster ui` in a real browser: live, on a phone, without scripts, and for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shown_page import ShownPage, opened
from ui_objects import HOSTILE, UNREACHABLE, cluster, condition, engines, links, pod

import browser
from pdcluster_operator.runtime.interfaces import Key

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

pytestmark = [pytest.mark.process, pytest.mark.needs("browser")]

FAULTS = Path(__file__).with_name("accessibility.js").read_text()
PHONE = {"width": 360, "height": 740}


@pytest.fixture
async def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ShownPage]:
    async with opened(tmp_path, monkeypatch, Key("llm", "llama")) as shown:
        yield shown


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser.running() as chromium:
        yield chromium


async def visit(context: BrowserContext, shown: ShownPage, said: list[str]) -> Page:
    """Open the page and wait until it is live. What the console says is an error of ours."""
    page = await context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
    await page.goto(shown.ui.url)
    await page.wait_for_selector("#live[data-state=live]")
    return page


def trouble(shown: ShownPage) -> None:
    """Make it a large cluster with every kind of state, and hostile words."""
    broken = [
        condition("Ready", "False", "SideChannelUnreachable", UNREACHABLE),
        condition("DecodeReady", "False", "EngineFailed", HOSTILE),
        condition("KVPathVerified", "Unknown", "CanaryPending", "x" * 900),
    ]
    told = cluster(3, 12, broken, **links(3, 12, p0d1="SideChannelUnreachable"))
    told["status"]["engines"][4] |= {"state": "LoadingWeights", "message": HOSTILE}
    told["status"]["linkStates"][2]["state"] = "Pending"
    told["status"]["linkStates"][3]["state"] = "Unknown"
    for name in (*engines("prefill", 3), *engines("decode", 12)):
        shown.put(pod(name))
    shown.put(told)


async def test_in_a_real_browser(shown: ShownPage, chromium: Browser) -> None:
    said: list[str] = []
    context = await chromium.new_context(
        color_scheme="dark", viewport={"width": 1280, "height": 900}
    )
    page = await visit(context, shown, said)
    assert await page.context.cookies() == [], "every port of the machine would get them"

    # A change arrives without a reload, and neither closes what is open nor takes the focus.
    await page.evaluate("window.sameDocument = true")
    await page.locator("summary").click()
    trouble(shown)
    await page.wait_for_selector("text=Serves, not Ready")
    await page.wait_for_selector(".matrix td.bad")
    assert await page.evaluate("window.sameDocument")
    assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert await page.locator("details").get_attribute("open") is not None
    assert "onerror=alert(1)" in await page.inner_text("main")

    for scheme in ("dark", "light"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert await page.evaluate(FAULTS) == [], scheme

    # A keyboard reaches everything, in the order of the page.
    await page.reload()
    await page.wait_for_selector("#live[data-state=live]")
    order = []
    for _ in range(6):
        await page.keyboard.press("Tab")
        order.append(await page.evaluate(PLACE))
    tops = [place for _, place, _ in order]
    assert order[0][0] == "Skip to the content"
    assert tops[1:] == sorted(tops[1:]), order
    assert all(outline for _, _, outline in order), order

    await page.goto(f"{shown.base}/clusters")
    await page.wait_for_selector("#live[data-state=live]")
    assert await page.evaluate(FAULTS) == []
    await page.click("text=llama")
    assert page.url.endswith("/c/llm/llama")

    await page.wait_for_selector("#live[data-state=live]")
    assert said == []
    await shown.ui.__aexit__()
    await page.wait_for_selector("#live[data-state=lost]")
    assert "not live" in await page.inner_text("#live")


PLACE = """() => {
  const one = document.activeElement, box = one.getBoundingClientRect();
  const style = getComputedStyle(one);
  return [one.textContent.trim().slice(0, 40), [...document.querySelectorAll("*")].indexOf(one),
          style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""


async def test_on_a_phone_and_without_scripts(shown: ShownPage, chromium: Browser) -> None:
    trouble(shown)
    said: list[str] = []
    phone = await chromium.new_context(viewport=PHONE, color_scheme="dark", has_touch=True)
    page = await visit(phone, shown, said)
    width = "[document.documentElement.scrollWidth, window.innerWidth]"
    assert await page.evaluate(width) == [360, 360]
    assert await page.evaluate(FAULTS) == []
    assert said == []

    plain = await chromium.new_context(viewport=PHONE, java_script_enabled=False)
    page = await plain.new_page()
    await page.goto(shown.ui.url)
    text = await page.inner_text("main")
    for words in (
        "Serves, not Ready",
        UNREACHABLE,
        "pdcluster logs llama --local",
        "decode/11",
        "Timeline",
    ):
        assert words in text
    assert '<meta http-equiv="refresh" content="5">' in await page.content()
    assert await page.inner_text("#live") == "as of the last load"
