"""List the runs of a directory with their verdicts, and keep new verdicts.

>>> listed = list_runs(Path("commtrace-runs"), now_ns=time.time_ns())          # doctest: +SKIP
>>> [(one.directory, one.facts.state) for one in listed.runs if one.facts]     # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from commtrace.analysis.clocks.time_of_day import iso_utc_if_known
from commtrace.analysis.hangs.job_end import RUNNING
from commtrace.errors import CommtraceError, RunNotFoundError, TraceFormatError
from commtrace.history.facts import RunFacts, facts_of, fingerprint, read_facts
from commtrace.history.store import HistoryError, RunHistory, StoredRun
from commtrace.history.verdicts import ANALYSIS, RunVerdict, verdict_of_monitor
from commtrace.trace.files.jobs import nested_worlds
from commtrace.trace.files.locate import find_run_directory, rank_directories
from commtrace.trace.inputs import printable
from commtrace.trace.json_values import JsonObject, fields_to_json, to_json
from commtrace.trace.processes import AskProcess, unknown_process
from commtrace.trace.run import Run

UNREADABLE: Final = "unreadable"
"""The state of a folder without a readable run."""

_NO_RANKS: Final = "It holds no recorded run (no rank-NNNNN folders)."


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A folder in a directory of runs."""

    directory: str  # its name; ``a/world-2`` for a further world in the directory of a run
    facts: RunFacts | None  # None without a readable run
    verdict: RunVerdict | None = None  # on the newest attempt, of an analysis rather than of the monitor
    problems: tuple[str, ...] = ()  # of its files

    @property
    def state(self) -> str:
        return self.facts.state if self.facts is not None else UNREADABLE

    def to_json(self) -> JsonObject:
        return {
            "directory": self.directory,
            "state": self.state,
            "facts": None if self.facts is None else _facts_to_json(self.facts),
            "verdict": None if self.verdict is None else _verdict_to_json(self.verdict),
            "problems": self.problems,
        }


def _facts_to_json(facts: RunFacts) -> JsonObject:
    parts = fields_to_json(facts)
    for name in ("session", "started_ns", "ended_ns", "state", "problems"):
        del parts[name]
    return {
        **parts,
        "started_utc": iso_utc_if_known(facts.started_ns),
        "ended_utc": iso_utc_if_known(facts.ended_ns),
        "duration_ns": facts.duration_ns,
        "steps": facts.steps,
    }


def _verdict_to_json(verdict: RunVerdict) -> JsonObject:
    parts = fields_to_json(verdict)
    del parts["judged_ns"]
    return {**parts, "judged_utc": iso_utc_if_known(verdict.judged_ns), "text": verdict.text}


@dataclass(frozen=True, slots=True)
class RunList:
    """The runs of a directory."""

    path: Path
    runs: tuple[ListedRun, ...]  # by start, after folders without a readable run
    entries: tuple[StoredRun, ...]  # including runs that were deleted
    problems: tuple[str, ...] = ()  # of the history file

    def to_json(self) -> JsonObject:
        """Return the output of ``commtrace list --json`` (docs/json/list.schema.json)."""
        return {"path": str(self.path), "runs": to_json(self.runs), "problems": self.problems}


def list_runs(directory: Path, *, now_ns: int, ask: AskProcess = unknown_process) -> RunList:
    """List the runs in a directory; runs that have ended are read again only if their files changed.

    Args:
        now_ns: epoch ns, to judge running jobs.
        ask: for the process that recorded a rank.

    Raises:
        RunNotFoundError: it is no directory, holds nothing, or is itself a run.
    """
    around, folders = _folders(directory)
    history, problems = RunHistory(around), []
    known: list[StoredRun] = []
    try:
        known = history.entries()
    except HistoryError as error:
        problems.append(str(error))
    newest = {entry.directory: entry for entry in known}
    seen: list[StoredRun] = []
    unreadable: dict[str, str] = {}
    notes: dict[str, str] = {}
    for folder in folders:
        name = _name(folder, around)
        try:
            now = fingerprint(folder) if rank_directories(folder) else ""
            before = newest.get(name)
            if not now:
                unreadable[name] = _NO_RANKS
            elif before is None or before.fingerprint != now or before.facts.state == RUNNING:
                seen.append(_seen(folder, name, now, notes, now_ns, ask))
        except (CommtraceError, OSError) as error:
            unreadable[name] = printable(str(error))
    entries = history.joined(known, seen)
    if seen and not problems:
        try:
            entries = history.keep(seen)
        except HistoryError as error:
            problems.append(str(error))
    here = {entry.directory: entry for entry in entries}
    runs = [
        _listed(here[name], notes.get(name))
        for name in (_name(folder, around) for folder in folders)
        if name in here and name not in unreadable
    ]
    runs.sort(key=lambda run: (run.facts.started_ns or 0 if run.facts else 0, run.directory))
    broken = [ListedRun(name, None, None, (why,)) for name, why in sorted(unreadable.items())]
    return RunList(directory, (*broken, *runs), tuple(entries), tuple(problems))


def remember(run: Path | Run, verdict: RunVerdict | None, *, now_ns: int, ask: AskProcess = unknown_process) -> None:
    """Keep a verdict in the history file; None keeps only the monitor's, from the run's files.

    Raises:
        CommtraceError, OSError: the file cannot be written, or the run cannot be read any more.
    """
    directory = (run.path if isinstance(run, Run) else find_run_directory(run)).resolve()
    now = fingerprint(directory)
    facts = facts_of(run, now_ns=now_ns, ask=ask) if isinstance(run, Run) else None
    around = directory.parent
    if around.parent != around and rank_directories(around):  # it is a further world in the directory of a run
        around = around.parent
    seen = _seen(directory, _name(directory, around), now, {}, now_ns, ask, facts)
    RunHistory(around).keep([replace(seen, verdicts=(*seen.verdicts, *([verdict] if verdict is not None else [])))])


def _folders(directory: Path) -> tuple[Path, list[Path]]:
    """Return the directory of the history, and the runs; those of a run with further worlds in it are these worlds."""
    if directory.is_file():
        raise RunNotFoundError(f"{directory} is a file; pass a directory of runs.")
    if not directory.is_dir():
        raise RunNotFoundError(f"{directory}: no such directory. Pass the directory that holds the runs.")
    if rank_directories(directory) and (worlds := nested_worlds(directory)):
        whole = directory.absolute()
        return whole.parent, [whole, *(whole / world.name for world in worlds)]
    if rank_directories(directory):
        raise RunNotFoundError(
            f"{directory} is one run; pass the directory around it, {directory.absolute().parent}, or read it with: "
            f"commtrace summary {directory}"
        )
    # A link to a run beside it, such as `latest`, is no further run.
    folders = [
        child
        for child in directory.iterdir()
        if child.is_dir() and not child.name.startswith(".") and not _links_to_sibling(child)
    ]
    if not any(map(rank_directories, folders)):
        raise RunNotFoundError(f"{directory} holds no recorded run.")
    nested = [world for folder in folders if rank_directories(folder) for world in nested_worlds(folder)]
    return directory, sorted([*folders, *nested])


def _name(folder: Path, directory: Path) -> str:
    return printable(folder.relative_to(directory).as_posix())


def _links_to_sibling(child: Path) -> bool:
    return child.is_symlink() and child.resolve().parent == child.parent.resolve()


def _seen(
    folder: Path,
    name: str,
    now: str,
    notes: dict[str, str],
    now_ns: int,
    ask: AskProcess,
    facts: RunFacts | None = None,
) -> StoredRun:
    facts = facts or read_facts(folder, now_ns=now_ns, ask=ask)
    verdicts: tuple[RunVerdict, ...] = ()
    try:
        verdict = verdict_of_monitor(folder, facts.attempt)
        verdicts = (verdict,) if verdict is not None else ()
    except TraceFormatError as error:
        notes[name] = str(error)
    return StoredRun(name, now, facts, facts.hosts, verdicts)


def _listed(entry: StoredRun, note: str | None) -> ListedRun:
    problems = (*entry.facts.problems, *([note] if note else []))
    return ListedRun(entry.directory, entry.facts, _of_attempt(entry.verdicts, entry.facts.attempt), problems)


def _of_attempt(verdicts: Sequence[RunVerdict], attempt: int) -> RunVerdict | None:
    by_source = {verdict.source: verdict for verdict in verdicts if verdict.attempt == attempt}
    return by_source.get(ANALYSIS) or next(iter(by_source.values()), None)
