"""A headless Chromium, logged in to the laptop's Airflow. There is one laptop fixture, in ``tests/e2e``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, StorageState, expect, sync_playwright

from local.laptop import Laptop
from tests.browser.pages import log_in

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
#: No GPU, no sandbox (root in a container has none), and no traffic of the browser's own.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, headless=True)
        yield browser
        browser.close()


def open_context(browser: Browser, **arguments: Any) -> BrowserContext:
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, **arguments)
    context.set_default_timeout(PATIENCE_MS)
    return context


@pytest.fixture
def stranger(browser: Browser) -> Iterator[Page]:
    """A page of somebody who is not logged in."""
    context = open_context(browser)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def session(browser: Browser, laptop: Laptop) -> StorageState:
    """The cookies of user ``admin``, so that one login serves all tests."""
    assert laptop.airflow is not None
    context = open_context(browser)
    log_in(context.new_page(), laptop.airflow.url, "admin", laptop.airflow.password)
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def page(browser: Browser, session: StorageState) -> Iterator[Page]:
    """A page that is logged in as ``admin``."""
    context = open_context(browser, storage_state=session)
    yield context.new_page()
    context.close()
