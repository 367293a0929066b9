"""The console in a real browser, on the real model: what the pages show is what the engine has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, async_playwright

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.console.lesson import Lesson
from kvorum.cluster.console.routes import console_routes
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.http import create_app
from kvtest.served import embedded_model_served
from kvtest.servers import http_server
from kvtest.stack import DEFAULT_INFO, running_stack
from kvtest.waiting import eventually

pytestmark = pytest.mark.model

CHROMIUM = shutil.which("chromium")
# Without its own traffic, which goes nowhere here.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CONFIG = ClusterConfig(cache_manager=False)
PROMPT = "The miller had three sons, and when he died the eldest got the mill. " * 4
# Keeps what the stream sends, to compare what is drawn with.
KEEP_EVENTS = """
const parse = JSON.parse;
window.seen = [];
JSON.parse = (text) => { const value = parse(text); if (value?.cluster) window.seen = [value]; return value; };
"""


@cache
def the_lesson() -> Lesson:
    return Lesson()


class Problems(list[str]):
    """What the browser complained of."""


async def teach(name: str, arguments: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = await asyncio.to_thread(getattr(the_lesson(), name), **arguments)
    return found


@contextlib.asynccontextmanager
async def browsing(frontend: Frontend) -> AsyncIterator[tuple[Page, httpx.AsyncClient, Problems]]:
    """Serve a router's console, and open it in a browser."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Debian's package chromium")
    app = create_app(frontend)
    app.include_router(console_routes(frontend, teach))
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(http_server(app))
        limits = httpx.Limits(max_connections=400)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, limits=limits))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        stack.push_async_callback(browser.close)
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        problems = Problems()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.add_init_script(KEEP_EVENTS)
        await page.goto(f"{url}/console")
        yield page, client, problems


@contextlib.asynccontextmanager
async def open_console() -> AsyncIterator[tuple[Page, httpx.AsyncClient, Problems]]:
    """Start an engine with the real model, a router in front of it, and a browser on the console."""
    async with embedded_model_served() as served, browsing(served.frontend) as console:
        yield console


def in_the_browser(test: Callable[[Page, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_console() as (page, client, problems):
            await test(page, client)
            assert problems == []

    asyncio.run(main())


async def ask(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 160, "ignore_eos": True, "temperature": 0} | fields
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_under_load_pages_move_and_evicted_tokens_are_struck_out_as_the_pool_has_it() -> None:
    async def test(page: Page, client: httpx.AsyncClient) -> None:
        # Long enough to be there still when the page has drawn several looks, however slowly it does.
        h2o = {"policy": "h2o", "kv_budget": 32}
        bodies: list[dict[str, object]] = [{"kvorum": h2o}, {"prompt": "Once"}]
        asked = [asyncio.create_task(ask(client, **body, max_tokens=900)) for body in bodies]
        await page.wait_for_function(POOL_HAS_MOVED)
        await page.keyboard.press("3")
        await page.get_by_role("option").filter(has_text="h2o").click()
        await page.wait_for_selector(".tok.gone[data-position]")
        await asyncio.gather(*asked)
        await page.wait_for_function("() => window.seen[0].sequence === null")
        await page.get_by_text("This sequence is over").wait_for()
        struck = len(await page.evaluate(f"() => {STRUCK}"))
        # The last one that is evicted keeps its slot until the next token takes it.
        evicted = struck + await page.locator(".tok.victim[data-position]").count()
        await page.get_by_text(f"{evicted} evicted per head").wait_for()
        # What was seen last may lie some tokens before the end; each evicts one.
        assert 0 < struck < evicted <= asked[0].result()["kvorum"]["kv_tokens_evicted"]

    in_the_browser(test)


def test_what_is_struck_out_is_what_no_slot_holds() -> None:
    async def test(page: Page, client: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(ask(client, kvorum={"policy": "h2o_avg", "kv_budget": 48}, max_tokens=4000))
        await page.keyboard.press("3")
        await page.get_by_role("option").filter(has_text="h2o_avg").click()
        await page.wait_for_selector(".tok[data-position]")
        await page.keyboard.press("]")
        await page.keyboard.press(".")
        await page.wait_for_selector(".tok.gone[data-position]")
        for _ in range(3):
            drawn, expected = await page.evaluate(COMPARE)
            assert drawn == expected
            assert drawn
            await page.wait_for_timeout(500)
        assert await page.locator("button.kv[aria-pressed=true]").text_content() == "KV 1"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    in_the_browser(test)


POOL_HAS_MOVED = """() => {
  const pool = document.querySelector("[data-testid=pool]");
  if (pool) (window.pools ??= new Set()).add(pool.textContent);
  return window.pools?.size > 3;
}"""
# Positions of the tokens that are struck out.
STRUCK = "[...document.querySelectorAll('.tok.gone[data-position]')].map((each) => Number(each.dataset.position))"
# Waits until the frame after an event is drawn; returns what is struck out, and what it must be.
COMPARE = """() => new Promise((resolve) => {
  const last = window.seen[0];
  const check = () => {
    if (window.seen[0] === last || !window.seen[0].sequence?.slots) return setTimeout(check, 5);
    const now = window.seen[0].sequence;
    requestAnimationFrame(() => requestAnimationFrame(() => {
      if (window.seen[0].sequence !== now) return check(); // what is drawn may be the next look already
      const struck = STRUCK;
      const held = new Set(now.slots.positions);
      const written = Array.from({ length: now.num_written }, (_, position) => position);
      resolve([struck, written.filter((position) => !held.has(position))]);
    }));
  };
  check();
})""".replace("STRUCK", STRUCK)


def test_what_the_lessons_count_is_what_the_model_does() -> None:
    async def test(page: Page, client: httpx.AsyncClient) -> None:
        await page.keyboard.press("4")
        await page.get_by_text("32 of 77 tokens are kept").wait_for(timeout=60_000)
        lesson = the_lesson()
        costs = lesson.caching()["costs"]
        for step, cost in enumerate(costs[:4]):
            computed = [
                await page.get_by_test_id(name).locator(".cell.now").count() for name in ("with-cache", "without-cache")
            ]
            assert computed == [cost["projections_with_cache"], cost["projections_without"]], f"token {step + 1}"
            await page.get_by_role("button", name="next token").click()
        expected = lesson.evictions(budget=32, layer=0, kv_head=0)
        struck = page.get_by_test_id("tale").locator(".gone")
        assert await struck.count() == len(expected["texts"]) - 1 - len(expected["kept"])
        pages = lesson.pages()["steps"][0]
        drawn = await page.get_by_test_id("pages").locator("div").all_text_contents()
        assert drawn == [
            "".join(names) or ("▒" if block in pages["cached"] else "") for block, names in enumerate(pages["holders"])
        ]

    in_the_browser(test)


def test_themes_and_keys_work_without_a_mouse() -> None:
    async def test(page: Page, client: httpx.AsyncClient) -> None:
        theme = "document.documentElement.dataset.theme"
        first = await page.evaluate(theme)
        await page.keyboard.press("t")
        assert await page.evaluate(theme) != first
        await page.keyboard.press("2")
        await page.get_by_text("runs without the cache manager").wait_for()
        await page.keyboard.press("3")
        await page.get_by_role("searchbox").wait_for()
        await page.keyboard.press("/")
        await page.keyboard.type("nothing like it")
        assert await page.get_by_role("option").count() == 0
        await page.keyboard.press("Escape")
        await page.keyboard.press("?")
        await page.locator("#help-dialog").wait_for()

    in_the_browser(test)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["1", "3"])
def test_a_minute_under_two_hundred_sequences_does_not_make_the_tab_grow(view: str) -> None:
    info = replace(DEFAULT_INFO, num_blocks=4000, max_num_seqs=200, max_num_waiting=200)

    async def main() -> None:
        async with (
            running_stack(CONFIG, info=info, step_delay_s=0.05) as stack,
            contextlib.AsyncExitStack() as open_pages,
        ):
            page, client, problems = await open_pages.enter_async_context(browsing(stack.frontend))

            async def ask_on(number: int) -> None:
                while True:
                    # A kept connection may be closed at the moment that it is used again.
                    with contextlib.suppress(httpx.ReadError):
                        await client.post("/v1/completions", json={"prompt": f"{number} " * 20, "max_tokens": 300})

            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(ask_on(number)) for number in range(200)]
                await eventually(lambda: stack.host.engine.stats().num_running == 200)
                await page.keyboard.press(view)
                heap = await page.context.new_cdp_session(page)
                sizes = []
                for _ in range(6):
                    await page.wait_for_timeout(10_000)
                    await heap.send("HeapProfiler.collectGarbage")
                    sizes.append((await heap.send("Runtime.getHeapUsage"))["usedSize"])
                for task in asking:
                    task.cancel()
            # After the first ten seconds everything that is kept has been kept once; what the charts add is small.
            assert max(sizes[1:]) < 1.25 * sizes[0] + 2e6, sizes
            assert problems == []

    asyncio.run(main())
