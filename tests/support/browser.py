"""A real Chromium for tests of the web page: one for all tests of a process, each of which has its own storage in it."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from playwright.async_api import Browser, ConsoleMessage, Error, Page, async_playwright, expect

from harness.browser import find_browser

PATIENCE_MS = 60_000
"""Within which the page shows what a test waits for, on a slow machine."""


def browser_path() -> str:
    """Skips the test where there is no Chromium, unless MARLAAS_TEST_BROWSER=required."""
    if found := find_browser():
        return found
    reason = "no Chromium on the PATH: install one (Debian: apt install chromium) to test the web page"
    if os.environ.get("MARLAAS_TEST_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Tab:
    """One tab, and what went wrong in it."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list[str])

    async def go(self, address: str) -> None:
        """Shows the view of an address behind `#`."""
        await self.page.goto(f"{self.url}/#{address}")

    async def enter(self, key: str) -> None:
        """Opens the page, and types the key."""
        await self.page.goto(f"{self.url}/")
        await self.page.fill("#key", key)
        await self.page.press("#key", "Enter")
        await self.page.wait_for_selector("main h1")

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def fail(self, error: Error) -> None:
        self.errors.append(str(error))


@asynccontextmanager
async def started() -> AsyncGenerator[Browser]:
    path = browser_path()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def browsing(browser: Browser, url: str) -> AsyncGenerator[Tab]:
    """A tab without a key, in a window that keeps nothing."""
    page = await browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    tab = Tab(page, url)
    page.on("console", tab.hear)
    page.on("pageerror", tab.fail)
    yield tab
    await page.context.close()
