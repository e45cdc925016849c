"""Takes the pictures of the documentation: ``python -m tools.pictures``. Needs playwright and a Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"

JOB: Final = (
    "--pp",
    "4",
    "--dp",
    "2",
    "--microbatches",
    "8",
    "--layers",
    "32",
    "--num-steps",
    "20",
    "--gpus-per-host",
    "4",
)
FAULT: Final = ("--fault", "slow-rank=5:1.35")


def main() -> None:
    """Write docs/images: the report of a simulated job in which rank 5 is slow, and its heat map over the steps."""
    with tempfile.TemporaryDirectory() as folder, open_chromium() as browser:
        run, report = f"{folder}/gpt", Path(folder, "report.html")
        for arguments in (["synth", "-o", run, *JOB, *FAULT], ["report", run, "-o", str(report)]):
            subprocess.run([sys.executable, "-m", "commtrace", *arguments], check=True, stdout=subprocess.DEVNULL)
        page = _open(browser, report)
        page.screenshot(path=IMAGES / "report.png")
        page.click("#views [data-view='heat-map']")
        page.select_option("#heat-map-rows", "rank")
        page.select_option("#heat-map-columns", "step")
        page.locator("#heat-map-section").screenshot(path=IMAGES / "heat_map.png")


def pictures_of_reports(pictures: Mapping[Path, Path]) -> None:
    """Take a picture of the first screen of each report."""
    with open_chromium() as browser:
        for report, picture in pictures.items():
            _open(browser, report).screenshot(path=picture)


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """Yield the browser that takes the pictures."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def _open(browser: Browser, report: Path) -> Page:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(500)  # The timeline is drawn in the next frames.
    return page


if __name__ == "__main__":
    main()
