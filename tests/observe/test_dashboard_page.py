"""The page in a real browser: curves, a trajectory, colouring, filters, live changes, an export."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hostile_run import FORKED

from headrace.http.server import HttpServer
from headrace.observe.dashboard.app import Desk, create_app
from headrace.observe.dashboard.export import export_page
from headrace.observe.dashboard.source import RunSource
from headrace.observe.metrics import MetricsWriter
from headrace.rollout.record.ledger import Ledger

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytest.importorskip("playwright", reason="playwright is not installed (pip install -e '.[dev]')")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")

WAIT_MS = 8000


class Visit:
    """A page with everything that went wrong on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requested: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    async def lists(self, number: int) -> None:
        """The list comes to hold so many trajectories."""
        from playwright.async_api import expect

        await expect(self.page.locator(".rows li")).to_have_count(number, timeout=WAIT_MS)

    async def checked(self) -> None:
        """Nothing failed, and no text became code."""
        assert self.problems == []
        assert await self.page.evaluate("window.broken") is None
        wide = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "nothing sticks out sideways"


@pytest.fixture
async def visit() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )

        async def open_page(url: str, width: int = 1280) -> Visit:
            page = await browser.new_page(viewport={"width": width, "height": 900})
            visit = Visit(page)
            await page.goto(url)
            return visit

        yield open_page
        await browser.close()


@pytest.fixture
async def url(hostile_run: Path) -> AsyncIterator[str]:
    desk = Desk(lambda: RunSource(hostile_run))
    server = await HttpServer.start(create_app(desk, hosts=("127.0.0.1",)), name="dashboard")
    yield server.url
    await server.stop()
    desk.close()


async def test_a_person_looks_around(visit: Any, url: str) -> None:
    seen = await visit(url)
    page = seen.page
    await page.wait_for_selector(".card .big")
    assert await page.inner_text("h1") == "quickstart"
    await page.click("nav >> text=Learning")
    await page.wait_for_selector("figure:has-text('Task terminal') polyline.line.s0")
    assert await page.locator("figure:has-text('Task terminal') g.mark").count() == 4
    assert await page.locator("polygon.sure").count() >= 1, "rewards have intervals"
    chart = page.locator("figure:has-text('Entropy') svg.chart")
    await chart.focus()
    await page.keyboard.press("Home")
    assert "update 1" in await page.inner_text("figure:has-text('Entropy') .readout")
    await page.click("nav >> text=Timeline")
    await page.wait_for_selector("text=the trainer waited")
    await page.click("nav >> text=Health")
    await page.wait_for_selector("text=history_rewritten")

    await page.click("[aria-label='look at no_signal']")
    await page.wait_for_selector(".rows a")
    assert await page.input_value("select[name=failure]") == "no_signal"
    number = await page.inner_text("select[name=failure] option:checked")
    await page.wait_for_selector(f"text={number[len('no_signal (') : -1]} shown, all there are")

    await page.click("nav >> text=Trajectories")
    await page.select_option("select[name=task]", "maze")
    await seen.lists(6)
    await page.fill("input[name=text]", "STEP 4 <img")
    await seen.lists(1)
    await page.click(".rows a")
    await page.wait_for_selector(".tokens .tok")
    assert await page.locator(".tree li").count() == 6
    assert await page.locator(".tree .edge").count() == 4
    assert FORKED in page.url
    assert "task=maze" in page.url
    await page.wait_for_selector(".tok.m-pending.trains")
    for colouring, css in (("logprob", "p0"), ("version", "v1"), ("mask", "m-pending")):
        await page.check(f"input[name=colour][value={colouring}]")
        assert await page.locator(f".tokens .{css}").count() > 0
    await page.check("input[name=colour][value=version]")
    await page.focus(".tokens")
    for _ in range(12):
        await page.keyboard.press("ArrowDown")
    assert "weights v1" in await page.inner_text(".token-facts")
    await page.select_option(".token-view select", "2")
    await page.check("input[name=colour][value=mask]")
    await page.wait_for_selector(".tokens .m-elsewhere")
    await page.reload()
    await page.wait_for_selector(".tokens .tok")
    assert await page.is_checked("input[name=colour][value=mask]")
    assert await page.input_value("input[name=text]") == "STEP 4 <img"
    await seen.checked()


async def test_a_narrow_screen_shows_list_or_trajectory(visit: Any, url: str) -> None:
    seen = await visit(f"{url}/#/trajectories", width=390)
    page = seen.page
    await page.wait_for_selector(".rows a")
    await page.click(".rows a")
    await page.wait_for_selector(".tokens .tok")
    assert not await page.is_visible(".rows a")
    await page.click("text=Back to the list")
    await page.wait_for_selector(".rows a")
    assert not await page.is_visible(".tokens")
    await seen.checked()
    for view in ("overview", "learning", "timeline", "health"):
        await page.goto(f"{url}/#/{view}")
        await page.wait_for_selector(f"main.{view} section")
        await seen.checked()


async def test_changes_of_a_run_appear(visit: Any, url: str, hostile_run: Path) -> None:
    seen = await visit(f"{url}/#/learning")
    page = seen.page
    await page.wait_for_selector("figure:has-text('Entropy')")
    assert await page.locator("figure:has-text('Learning rate')").count() == 0
    with MetricsWriter(hostile_run, resume=True, sinks=[]) as rows:
        rows.log("rl", 13, {"learning_rate": 0.001})
        await page.wait_for_selector("figure:has-text('Learning rate')")
    await page.click("nav >> text=Trajectories")
    await page.wait_for_selector(".rows a")
    ledger = Ledger.resume(hostile_run)
    ledger.dispatch("late", "train", "late-group", "terminal", {"family": "late"}, ["late-1"])
    await page.click("text=Show the newest")
    await page.wait_for_selector(".rows a[data-id=late-1]")
    ledger.close()
    await seen.checked()


async def test_an_export_works_without_a_server(visit: Any, hostile_run: Path) -> None:
    target = hostile_run / "page.html"
    export_page(hostile_run, target, trajectories=40)
    seen = await visit(f"{target.as_uri()}#/trajectories?forked=true")
    page = seen.page
    await seen.lists(1)
    assert "40 of" in await page.inner_text("#state")
    await page.uncheck("input[name=forked]")
    await page.select_option("select[name=failure]", "session_time")
    await seen.lists(1)
    await page.click(".rows a")
    await page.wait_for_selector(".tokens .tok")
    await page.click("nav >> text=Learning")
    await page.wait_for_selector("polyline.line")
    assert [u for u in seen.requested if not u.startswith(("file:", "data:"))] == []
    await seen.checked()
