"""Takes the pictures of the documentation: ``python -m tools.pictures``. Needs playwright and a Chromium."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"

_SIZE: Final[ViewportSize] = {"width": 1440, "height": 900}
_MS_TO_DRAW: Final = 500

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
    """Write docs/images but for those of stories and of Grafana."""
    with tempfile.TemporaryDirectory() as folder, open_chromium() as browser:
        run = Path(folder, "gpt")
        _commtrace("synth", "-o", str(run), *JOB, *FAULT)
        _take_report(browser, run)
        _take_viewer(browser, run)
        _take_terminal(browser, "top", str(run), "--once")
        _take_tensorboard(browser, Path(folder, "trained"))


def _take_report(browser: Browser, run: Path) -> None:
    """Take the report of a simulated job in which rank 5 is slow, and its heat map over the steps."""
    report = run.with_suffix(".html")
    _commtrace("report", str(run), "-o", str(report))
    page = _open(browser, report)
    page.screenshot(path=IMAGES / "report.png")
    page.click("#views [data-view='heat-map']")
    page.select_option("#heat-map-rows", "rank")
    page.select_option("#heat-map-columns", "step")
    page.locator("#heat-map-section").screenshot(path=IMAGES / "heat_map.png")


def _take_viewer(browser: Browser, run: Path) -> None:
    """Take the view What if in the page of ``commtrace view``."""
    server = subprocess.Popen([sys.executable, "-m", "commtrace", "view", str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
        page = browser.new_page(viewport=_SIZE)
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        page.click("#views [data-view='what-if']")
        page.locator("#what-if select").nth(2).select_option(index=1)  # slow ranks as fast as their peers
        page.click("#what-if >> text=Predict")
        page.wait_for_timeout(10 * _MS_TO_DRAW)
        page.screenshot(path=IMAGES / "view.png", clip={"x": 0, "y": 0, "width": _SIZE["width"], "height": 560})
    finally:
        server.terminate()
        server.wait()


def _take_terminal(browser: Browser, command: str, *arguments: str) -> None:
    """Take what a command prints in colours, in a terminal of 100 columns."""
    width = 100
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text.from_ansi(_commtrace(command, *arguments, FORCE_COLOR="1", COLUMNS=str(width))), soft_wrap=True)
    page = browser.new_page(viewport={"width": 900, "height": 200})
    page.set_content(console.export_html(theme=MONOKAI, code_format=_TERMINAL))
    page.locator("pre").screenshot(path=IMAGES / f"{command}.png")


_TERMINAL: Final = (
    "<style>{stylesheet} pre {{ color: {foreground}; background: {background}; padding: 12px; margin: 0; "
    "display: inline-block; font: 13px/1.35 'DejaVu Sans Mono', monospace }}</style><pre>{code}</pre>"
)


def _take_tensorboard(browser: Browser, run: Path) -> None:
    """Take TensorBoard with the curves of a small job that trains on this machine, rank 2 of it slowly."""
    script = str(IMAGES.parents[1] / "examples" / "stories" / "slow_rank.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    training = [*torchrun, script, "--slow-rank", "2", "--steps", "300"]
    _commtrace("run", "-o", str(run), "--export", "tensorboard,monitor", "--", *training, OMP_NUM_THREADS="1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        page = browser.new_page(viewport=_SIZE)
        page.goto(f"http://127.0.0.1:{port}/?tagFilter=straggler%7Crank_0.*(step%7Cexposed)#timeseries")
        page.wait_for_selector("card-view", timeout=60_000)
        page.click("button:has-text('Settings')")  # closes them
        page.wait_for_timeout(10 * _MS_TO_DRAW)
        page.screenshot(path=IMAGES / "tensorboard.png")
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _commtrace(*arguments: str, **environment: str) -> str:
    """Run a command of commtrace and return what it prints."""
    command = [sys.executable, "-m", "commtrace", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return done.stdout


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
    page = browser.new_page(viewport=_SIZE)
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(_MS_TO_DRAW)  # The timeline is drawn in the next frames.
    return page


if __name__ == "__main__":
    main()
