"""Calls commands on damaged inputs, in a process that may take 1 GB more than it has, and 30 s for each.

Inputs are numbered; damage and command follow from the number and the seed, so ``python -m tests.fuzz.runner NUMBER``
shows one of them again.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import typer.testing
from typer.testing import CliRunner

from commtrace.cli import main as main_module
from commtrace.cli.main import app
from tests.fuzz.doors import DOORS, Command, Door

MOST_BYTES: Final = 1 << 30
MOST_SECONDS: Final = 30
_EXIT_CODES: Final = (0, 1, 2, 3)
_MEMORY: Final = Path("/dev/shm")
"""Each input is some twenty files, there for some milliseconds: a disk takes as long for them as the commands do."""
_VOLATILE: Final = frozenset({"now_ns", "age_ns", "path", "id", "took_ns", "problems"})


class Failure(NamedTuple):
    """What an input did that none may do."""

    number: int
    door: str
    use: str
    why: str


class Workshop:
    """Intact inputs, made once, and the folder in which damaged ones lie for a moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._intact: dict[str, Path] = {}
        self._expected: dict[str, Any] = {}

    def intact(self, door: Door) -> Path:
        if door.name not in self._intact:
            folder = self.folder / f"intact-{len(self._intact)}"
            folder.mkdir()
            door.make(folder)
            self._intact[door.name] = folder
        return self._intact[door.name]

    @contextmanager
    def damaged(self, door: Door, random: Random) -> Iterator[tuple[Path, bool]]:
        folder = self.folder / "damaged"
        shutil.copytree(self.intact(door), folder, symlinks=True)
        try:
            yield folder, door.damage(folder, random)
        finally:
            shutil.rmtree(folder)

    def expected(self, door: Door, command: Command) -> Any:
        """What the same command says of the intact input."""
        key = f"{door.name} {command[0]}"
        if key not in self._expected:
            intact = self.intact(door)
            words = [word.replace(str(self.folder / "damaged"), str(intact)) for word in command]
            self._expected[key] = json.loads(CliRunner().invoke(app, words).stdout)
        return self._expected[key]


def try_input(number: int, seed: int, workshop: Workshop) -> list[Failure]:
    """Damage one input, call one command on it, and say what it did that it must not do."""
    door = DOORS[number % len(DOORS)]
    random_ = Random(f"{seed}-{number}")
    with workshop.damaged(door, random_) as (folder, keeps_word):
        use = random_.choice(door.uses(folder))
        signal.alarm(MOST_SECONDS)
        try:
            whys = _called(use, workshop, door, keeps_word)
            if isinstance(use, list) and use[0] == "import" and (folder / "imported").exists() and not whys:
                for then in (["summary", str(folder / "imported"), "--json"], ["doctor", str(folder / "imported")]):
                    whys += [f"{then[0]} of what was imported: {why}" for why in _called(then, workshop, door, False)]
        finally:
            signal.alarm(0)
    words = " ".join(use) if isinstance(use, list) else repr(use)
    return [Failure(number, door.name, words.replace(str(folder), "…"), why) for why in whys]


def _called(use: Any, workshop: Workshop, door: Door, keeps_word: bool) -> list[str]:
    if not isinstance(use, list):
        try:
            use()
        except (ValueError, OSError):
            return []
        except BaseException:
            return [traceback.format_exc()]
        return []
    result = CliRunner().invoke(app, use)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return ["".join(traceback.format_exception(result.exception))]
    found = []
    if result.exit_code not in _EXIT_CODES:
        found.append(f"exit code {result.exit_code}")
    output = result.output
    if "Traceback (most recent call last)" in output:
        found.append(f"a traceback: {output[-2000:]}")
    # CSV for another program, not for a terminal, has what was recorded.
    shown = result.stderr if "csv" in use else output
    if not shown.replace("\n", "").isprintable():
        wrong = {character for character in shown if not character.isprintable() and character != "\n"}
        found.append(f"control characters {wrong!r} in {shown[:2000]!r}")
    if use[0] == "summary" and "--json" in use and result.exit_code == 0:
        told = json.loads(result.stdout)
        if keeps_word and "--steps" not in use:
            expected = workshop.expected(door, use)
            says_so = told["state"] != expected["state"] or not set(told["problems"]) <= set(expected["problems"])
            if not says_so and _stable(told) != _stable(expected):
                found.append("other numbers, and no problem")
    return found


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(one) for key, one in value.items() if key not in _VOLATILE}
    return [_stable(one) for one in value] if isinstance(value, list) else value


def run_inputs(numbers: range, seed: int, workers: int) -> list[Failure]:
    """Try inputs in so many processes; one that a process dies of is a failure, and another process goes on."""
    context = get_context("spawn")
    failures: list[Failure] = []
    parts = [[*numbers[at::workers]] for at in range(workers)]
    running: dict[Any, tuple[Connection, list[int]]] = {}
    for part in parts:
        _start(context, part, seed, running)
    while running:
        process, (messages, rest) = next(iter(running.items()))
        del running[process]
        while rest:
            if not messages.poll(2 * MOST_SECONDS):
                process.kill()
                failures.append(Failure(rest[0], DOORS[rest[0] % len(DOORS)].name, "", "did not end"))
                break
            try:
                failures += messages.recv()
            except EOFError:
                process.join()
                why = f"the process ended with {process.exitcode}"
                failures.append(Failure(rest[0], DOORS[rest[0] % len(DOORS)].name, "", why))
                break
            del rest[0]
        process.join()
        messages.close()
        if rest:
            _start(context, rest[1:], seed, running)
    return failures


def _start(context: Any, numbers: list[int], seed: int, running: dict[Any, tuple[Connection, list[int]]]) -> None:
    if not numbers:
        return
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(numbers, seed, theirs))
    process.start()
    theirs.close()
    running[process] = (ours, list(numbers))


def _work(numbers: list[int], seed: int, messages: Connection) -> None:
    signal.signal(signal.SIGALRM, _too_long)
    # Else commands are made anew for each call, which takes as long as many an input.
    testing: Any = typer.testing  # it caches nothing itself
    testing._get_command = functools.cache(testing._get_command)
    main_module.load_command = functools.cache(main_module.load_command)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        workshop = Workshop(Path(folder))
        for door in DOORS:  # before memory is limited: what is made and imported here counts to nobody
            workshop.intact(door)
        limit = _address_space() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in numbers:
            try:
                messages.send(try_input(number, seed, workshop))
            except BaseException:
                messages.send([Failure(number, DOORS[number % len(DOORS)].name, "", traceback.format_exc())])
    messages.close()
    os._exit(0)


def _too_long(signum: int, frame: Any) -> None:
    raise TimeoutError(f"took longer than {MOST_SECONDS} s")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main() -> None:
    """Try some inputs: ``python -m tests.fuzz.runner FIRST [END] [SEED]``."""
    first = int(sys.argv[1])
    end = int(sys.argv[2]) if len(sys.argv) > 2 else first + 1
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    failures = run_inputs(range(first, end), seed, min(2, end - first))
    by_line: dict[str, list[Failure]] = {}
    for failure in failures:
        lines = [line for line in failure.why.splitlines() if line.strip()]
        where = [line.strip() for line in lines if "/commtrace/" in line or "/exporters/" in line][-1:]
        by_line.setdefault(" | ".join([*where, *lines[-1:]])[:300], []).append(failure)
    for line, own in sorted(by_line.items(), key=lambda item: -len(item[1])):
        print(f"{len(own):5} {line}\n      e.g. {own[0].number} {own[0].door}: {own[0].use}")
    if end - first == 1:
        for failure in failures:
            print(failure.why)
    print(f"{end - first} inputs, {len(failures)} failures")


if __name__ == "__main__":
    main()
