"""Runs the commands of the documentation's stories, and puts what they print, and their pictures, into the pages.

    python -m tools.stories                      # all of them
    python -m tools.stories slow-rank bubble     # docs/slow-rank.md, docs/bubble.md

A story is a page whose console blocks can be typed one after another. What the last command of a block printed stands
behind it, in a block of text below one of these comments:

* ``<!-- output -->``: all of it.
* ``<!-- output: 12 lines -->``: its first lines.
* ``<!-- output: "Pipeline:" to "Causes" -->``: from the line that begins so to the one before the line that begins so;
  without the first: from the beginning.

``<!-- background -->`` above a console block starts a job that runs until the page ends, and waits until it hangs or
has trained for a while. A picture ``images/NAME.png`` is taken of the report ``NAME.html`` that the commands write.
Pictures need playwright and a Chromium; the story of the link needs the right to make network namespaces.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools.pictures import IMAGES, pictures_of_reports

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
STORIES: Final = ("slow-rank", "slow-link", "bubble", "hang")
"""Pages of the documentation, by their names."""

_BLOCK: Final = re.compile(
    r"^(?P<background><!-- background -->\n)?```console\n(?P<commands>.*?)^```\n"
    r"(?P<gap>\n<!-- output(?P<which>[^>]*) -->\n)?(?:(?<=-->\n)```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_SECONDS_IN_BACKGROUND: Final = 35
"""Long enough for four ranks to start, train for 40 steps, and stand still for 15 s, on two cores."""


class StoryError(Exception):
    """A command of a story failed, or did not print what its page shows."""


def main(names: list[str]) -> None:
    """Write the pages of these stories anew, or of all."""
    for name in names or STORIES:
        page = DOCS / f"{name}.md"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            page.write_text(told(page.read_text(), Path(folder)))
            reports = {file: IMAGES / f"{file.stem}.png" for file in Path(folder).glob("*.html")}
            pictures_of_reports(reports)
        print(page)


def told(page: str, folder: Path) -> str:
    """Return a page with what its commands print in ``folder``."""
    pieces, end = [], 0
    with _jobs_in_background(folder) as start:
        for block in _BLOCK.finditer(page):
            printed = ""
            for command in commands(block["commands"]):
                printed = start(command) if block["background"] else execute(command, folder)
            pieces += [page[end : block.start()], block[0]]
            if block["gap"]:
                text = excerpt(printed, block["which"])
                pieces[-1] = block[0][: block.end("gap") - block.start()] + f"```text\n{text}```\n"
            end = block.end()
    return "".join([*pieces, page[end:]])


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a console block."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield line.removeprefix("$ ")


def execute(command: str, folder: Path) -> str:
    """Run a command of a page and return what it printed on stdout."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300
    )
    # `doctor` and `compare` exit with 1 if they have found something.
    if done.returncode not in (0, 1) or (done.returncode and not done.stdout):
        raise StoryError(f"{command} exits with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout.replace(f"{folder}/", "")


@contextmanager
def _jobs_in_background(folder: Path) -> Iterator[Callable[[str], str]]:
    jobs: list[subprocess.Popen[bytes]] = []

    def start(command: str) -> str:
        print(f"$ {command} &", flush=True)
        jobs.append(
            subprocess.Popen(
                shlex.split(command), cwd=folder, env=_environment(), start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        time.sleep(_SECONDS_IN_BACKGROUND)
        return ""

    try:
        yield start
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGINT)
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    return {**own, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def excerpt(printed: str, which: str) -> str:
    """Return the lines that a comment asks for."""
    lines = [line.rstrip() for line in printed.splitlines()]
    if match := re.fullmatch(r": (\d+) lines", which):
        lines = lines[: int(match[1])]
    elif match := re.fullmatch(r':(?: "(.*)")? to "(.*)"', which):
        first = _place(lines, match[1] or "", 0)
        lines = lines[first : _place(lines, match[2], first + 1)]
    elif which:
        raise StoryError(f"no such excerpt: {which}")
    return "\n".join(lines).strip("\n") + "\n"


def _place(lines: list[str], beginning: str, first: int) -> int:
    for place, line in enumerate(lines[first:], start=first):
        if line.startswith(beginning):
            return place
    raise StoryError(f"no line begins with {beginning!r}:\n" + "\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
