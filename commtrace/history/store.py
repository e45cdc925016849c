"""Keep verdicts on runs, also deleted ones, in a SQLite database beside the runs.

Several writers are safe: each change is one short transaction. There is no write-ahead log, which fails on network file
systems.

>>> history = RunHistory(Path("commtrace-runs"))                # doctest: +SKIP
>>> [entry.facts.run for entry in history.entries()]            # doctest: +SKIP
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from commtrace.errors import CommtraceError
from commtrace.history.facts import RunFacts
from commtrace.history.verdicts import RunVerdict
from commtrace.trace.inputs import printable_json
from commtrace.trace.json_values import to_json

FILE_NAME: Final = "commtrace-history.sqlite"

_APPLICATION: Final = 0x434F4D4D
_VERSION: Final = 1
_SECONDS_TO_WAIT: Final = 2.0
_ONE_LAUNCH_NS: Final = 60_000_000_000
"""Ranks of a job begin within seconds; a rank whose files come later may turn out to be the first."""

_TABLES: Final = (
    "CREATE TABLE runs (id INTEGER PRIMARY KEY, directory TEXT NOT NULL, fingerprint TEXT NOT NULL, "
    "hosts TEXT NOT NULL, facts TEXT NOT NULL)",
    "CREATE TABLE verdicts (run INTEGER NOT NULL REFERENCES runs (id), attempt INTEGER NOT NULL, "
    "source TEXT NOT NULL, verdict TEXT NOT NULL, PRIMARY KEY (run, attempt, source))",
)
_NUMBERS: Final = (f"PRAGMA application_id = {_APPLICATION}", f"PRAGMA user_version = {_VERSION}")

_T = TypeVar("_T")


class HistoryError(CommtraceError):
    """The file cannot be read or written; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A job and the verdicts on it."""

    directory: str  # name of its run directory, which may be gone
    fingerprint: str  # of its files when the facts were read
    facts: RunFacts  # of its newest attempt
    hosts: tuple[str, ...]  # of all attempts
    verdicts: tuple[RunVerdict, ...] = ()  # by attempt and source, each the newest one
    id: int | None = None  # in the file; None before it is kept


def is_same_launch(first: RunFacts, second: RunFacts) -> bool:
    """Return whether both were read from files of the same attempt of the same job."""
    return (first.run, first.attempt) == (second.run, second.attempt) and abs(
        first.session - second.session
    ) <= _ONE_LAUNCH_NS


class RunHistory:
    """The history of the runs in a directory; its file is made by the first :meth:`keep`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / FILE_NAME

    def entries(self) -> list[StoredRun]:
        """Return all entries, none without a file; raise HistoryError if it cannot be read."""
        if not self._is_there():
            return []
        with self._opened("ro") as connection:
            return _read(connection)

    def keep(self, seen: Sequence[StoredRun]) -> list[StoredRun]:
        """Add or update entries, and return all of them; raise HistoryError if the file cannot be written."""
        self._is_there()
        with self._opened("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in (*_TABLES, *_NUMBERS):
                    connection.execute(statement)
            known = self.joined(_read(connection), seen)
            kept = [entry for entry in known if any(entry.directory == new.directory for new in seen)]
            for entry in kept:
                _write(connection, entry)
            connection.execute("COMMIT")
            return _read(connection)

    def joined(self, known: Sequence[StoredRun], seen: Sequence[StoredRun]) -> list[StoredRun]:
        """Return the known entries, updated by the seen ones."""
        entries = list(known)
        for new in seen:
            at = next((at for at, entry in enumerate(entries) if self._is_same_job(entry, new)), None)
            if at is None:
                entries.append(new)
                continue
            before = entries[at]
            is_restart = new.facts.attempt > before.facts.attempt
            verdicts = {(verdict.attempt, verdict.source): verdict for verdict in (*before.verdicts, *new.verdicts)}
            hosts = dict.fromkeys([*(before.hosts if is_restart else ()), *new.hosts])
            entries[at] = replace(new, hosts=tuple(hosts), verdicts=tuple(verdicts.values()), id=before.id)
        return entries

    def _is_same_job(self, before: StoredRun, now: StoredRun) -> bool:
        """Return whether two entries are of one job: in one directory, or in one that was renamed since."""
        if before.directory != now.directory and (self._directory / before.directory).is_dir():
            return False
        is_restart = now.facts.run == before.facts.run and now.facts.attempt > before.facts.attempt
        return is_restart or is_same_launch(before.facts, now.facts)

    def _is_there(self) -> bool:
        """Return whether the file exists; raise HistoryError if something else has its name."""
        try:
            if self.path.is_file():
                return True
            if not (self.path.exists() or self.path.is_symlink()):
                return False
        except OSError as error:
            raise HistoryError(f"{self.path}: {error.strerror}") from error
        raise HistoryError(f"{self.path} is no file. Move it away: verdicts on runs are kept under this name.")

    @contextmanager
    def _opened(self, mode: str) -> Iterator[sqlite3.Connection]:
        connection = None
        try:
            address = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(address, _SECONDS_TO_WAIT, isolation_level=None, uri=True)
            connection.execute("PRAGMA trusted_schema = OFF")
            self._check(connection)
            yield connection
        except sqlite3.Error as error:
            raise HistoryError(f"{self.path}: {_explained(error)}") from error
        finally:
            if connection is not None:
                connection.close()

    def _check(self, connection: sqlite3.Connection) -> None:
        tables = {name for (name,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if not tables:
            return
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application == _APPLICATION and version > _VERSION:
            raise HistoryError(
                f"{self.path} has format {version}; this commtrace reads up to {_VERSION}. "
                "Update it: pip install --upgrade commtrace"
            )
        if application != _APPLICATION or tables != set(_TABLES):
            raise HistoryError(f"{self.path} is a database of another program. Move it away.")


def _explained(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text or "locking" in text:
        return f"{text}. Another process writes to it, or its file system has no locks."
    if "readonly" in text or "unable to open" in text:
        return f"{text}. Is the directory writable?"
    return f"{text}. If it is damaged, delete it: runs that are still there are read again."


def _read(connection: sqlite3.Connection) -> list[StoredRun]:
    verdicts: dict[int, list[RunVerdict]] = {}
    for run, text in connection.execute("SELECT run, verdict FROM verdicts ORDER BY run, attempt, source"):
        verdicts.setdefault(run, []).append(_decoded(text, RunVerdict))
    return [
        StoredRun(
            str(directory),
            str(fingerprint),
            _decoded(facts, RunFacts),
            tuple(_decoded(hosts, list[str])),
            tuple(verdicts.get(number, ())),
            number,
        )
        for number, directory, fingerprint, hosts, facts in connection.execute(
            "SELECT id, directory, fingerprint, hosts, facts FROM runs ORDER BY id"
        )
    ]


def _write(connection: sqlite3.Connection, entry: StoredRun) -> None:
    columns = (entry.directory, entry.fingerprint, _encoded(entry.hosts), _encoded(entry.facts))
    if entry.id is None:
        cursor = connection.execute(
            "INSERT INTO runs (directory, fingerprint, hosts, facts) VALUES (?, ?, ?, ?)", columns
        )
        number = cursor.lastrowid
    else:
        number = entry.id
        connection.execute(
            "UPDATE runs SET directory = ?, fingerprint = ?, hosts = ?, facts = ? WHERE id = ?", (*columns, number)
        )
    for verdict in entry.verdicts:
        connection.execute(
            "INSERT OR REPLACE INTO verdicts (run, attempt, source, verdict) VALUES (?, ?, ?, ?)",
            (number, verdict.attempt, verdict.source, _encoded(verdict)),
        )


def _encoded(value: object) -> str:
    return json.dumps(to_json(value), allow_nan=False)


def _decoded(text: object, kind: type[_T]) -> _T:
    """Decode a column; SQLite allows any type of value in any column."""
    try:
        if not isinstance(text, str):
            raise ValueError("no text")
        return printable_json(text, kind)
    except ValueError as error:
        raise sqlite3.DatabaseError(f"a row is not what commtrace keeps ({error})") from error
