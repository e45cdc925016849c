"""Takes the pictures of the documentation: ``python -m tools.pictures``. Needs playwright and a Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

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
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run, report = f"{folder}/gpt", Path(folder, "report.html")
        for arguments in (["synth", "-o", run, *JOB, *FAULT], ["report", run, "-o", str(report)]):
            subprocess.run([sys.executable, "-m", "commtrace", *arguments], check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(500)  # The timeline is drawn in the next frames.
        page.screenshot(path=IMAGES / "report.png")
        page.click("#views [data-view='heat-map']")
        page.select_option("#heat-map-rows", "rank")
        page.select_option("#heat-map-columns", "step")
        page.locator("#heat-map-section").screenshot(path=IMAGES / "heat_map.png")
        browser.close()


if __name__ == "__main__":
    main()
