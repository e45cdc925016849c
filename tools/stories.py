"""Runs the commands of the documentation's stories, and puts what they print, and their pictures, into the pages.

    python -m tools.stories                      # all of them
    python -m tools.stories slow-rank bubble     # docs/slow-rank.md, docs/bubble.md

A story is a page whose console blocks can be typed one after another. What the last command of a block printed stands
behind it, in a block of text below one of these comments:

* ``<!-- output -->``: all of it.
* ``<!-- output: 12 lines -->``: its first lines.
* ``<!-- output: "Pipeline:" to "Causes" -->``: from the line that begins so to the one before the line that begins so;
  without the first: from the beginning.

``<!-- background -->`` above a console block starts a job that runs until the page ends; ``<!-- until: WORDS -->``
repeats a command until it prints these words. A picture ``images/NAME.png`` is the first screen of the report
``NAME.html`` that the commands write.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tools.pictures import IMAGES, pictures_of_reports

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
STORIES: Final = ("slow-rank", "slow-link", "bubble", "hang")
FIRST_MINUTES: Final = ("first-megatron", "first-deepspeed", "first-pytorch")
"""Pages of the documentation, by their names."""

_BLOCK: Final = re.compile(
    r"^(?:<!-- (?:(?P<background>background)|until: (?P<until>.*)) -->\n)?```console\n(?P<commands>.*?)^```\n"
    r"(?P<gap>\n<!-- output(?P<which>[^>]*) -->\n)?(?:(?<=-->\n)```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_SECONDS: Final = 300
"""The most that a command may take, and a job in the background until it has come where its story wants it."""


class StoryError(Exception):
    """A command of a story failed, or did not print what its page shows."""


def main(names: list[str]) -> None:
    """Write the pages of these stories anew, or of all."""
    for name in names or (*STORIES, *FIRST_MINUTES):
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
                if block["background"]:
                    start(command)
                else:
                    printed = execute_until(block["until"] or "", command, folder)
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


def execute_until(words: str, command: str, folder: Path) -> str:
    """Run a command again and again until it prints these words; once, if there are none."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            printed = execute(command, folder)
            if words in printed:
                return printed
            failure = StoryError(f"{command} does not print {words!r}:\n{printed}")
        except StoryError as error:  # such as: there is no run yet
            failure = error
        if not words or time.monotonic() > deadline:
            raise failure
        time.sleep(5)


def execute(command: str, folder: Path) -> str:
    """Run a command of a page and return what it printed on stdout."""
    print(f"$ {command}", flush=True)
    job = _start(command, folder, subprocess.PIPE)
    try:
        stdout, stderr = job.communicate(timeout=_SECONDS)
    finally:
        _kill(job)
    # `doctor` and `compare` exit with 1 if they have found something; it is told on stdout, an error on stderr.
    if job.returncode not in (0, 1) or (job.returncode == 1 and not stdout):
        raise StoryError(f"{command} exits with {job.returncode}:\n{stdout}\n{stderr}")
    return stdout.replace(f"{folder}/", "")


@contextmanager
def _jobs_in_background(folder: Path) -> Iterator[Callable[[str], None]]:
    jobs: list[subprocess.Popen[str]] = []

    def start(command: str) -> None:
        print(f"$ {command} &", flush=True)
        jobs.append(_start(command, folder, subprocess.DEVNULL))

    try:
        yield start
    finally:
        for job in jobs:
            _kill(job)


def _start(command: str, folder: Path, output: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shlex.split(command), cwd=folder, env=_environment(), start_new_session=True, text=True,
        stdout=output, stderr=output,
    )  # fmt: skip


def _kill(job: subprocess.Popen[str]) -> None:
    """End what is left of a command; nothing is, if it has ended well."""
    if job.poll() is None:
        job.terminate()  # torchrun ends its ranks, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            job.wait(60)
    with suppress(ProcessLookupError):
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
