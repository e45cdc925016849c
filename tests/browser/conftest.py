"""A real browser. Its tests are skipped where playwright or Debian's chromium is not installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.browser.reader import VIEWPORT, Reader

CHROMIUM: Final = os.environ.get("CHROMIUM", "") or shutil.which("chromium") or ""

FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Closed after the last test of this folder: a Chromium that nobody uses still takes 3 % of a core."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium: apt-get install chromium, or name it in CHROMIUM")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def _reader(browser: Any) -> Iterator[Reader]:
    page = browser.new_page(viewport=VIEWPORT)
    yield Reader(page)
    page.close()


@pytest.fixture
def reader(_reader: Reader) -> Iterator[Reader]:
    """A reader with an empty page: one for all tests of a module, because a new page takes longer than a report."""
    yield _reader
    _reader.leave()
