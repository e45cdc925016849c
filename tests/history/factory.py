"""Runs, verdicts and entries for the tests of the history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commtrace.analysis.hangs.job_end import ENDED
from commtrace.findings.finding import Member
from commtrace.history.facts import RunFacts
from commtrace.history.store import StoredRun
from commtrace.history.verdicts import ANALYSIS, Named, RunVerdict
from commtrace.trace.json_values import fields_to_json
from tests.live.findings import slow_finding
from tests.trace.rows import mark, steps, write_rank

BEGIN_NS = 1_700_000_000_000_000_000
"""2023-11-14 22:13:20 UTC, the anchor of the ranks that ``write_rank`` writes."""


def write_run(directory: Path, *, hosts: tuple[str, ...] = ("alpha",), end: Any = None, **changes: Any) -> Path:
    """Write eight steps of one rank per host; without ``end``, closed cleanly."""
    for rank, host in enumerate(hosts):
        rows = [*steps(0, 8), mark("end", end or {})]
        write_rank(directory, rows, **{"rank": rank, "world_size": len(hosts), "host": host, "node": host, **changes})
    return directory


def facts(run: str = "r1", **changes: Any) -> RunFacts:
    fields: dict[str, Any] = {
        "run": run,
        "attempt": 0,
        "session": 1_000,
        "started_ns": BEGIN_NS,
        "ended_ns": BEGIN_NS + 10**9,
        "world_size": 2,
        "ranks_recorded": 2,
        "hosts": ("alpha", "beta"),
        "first_step": 0,
        "last_step": 7,
        "step_ns": 100,
        "state": ENDED,
        "ending": "",
        "problems": (),
    }
    return RunFacts(**{**fields, **changes})


def named(host: str = "beta", cause: str = "compute", cost: float | None = 3.0) -> Named:
    return Named(f"rank 1 on {host}", "ranks", cause, cost, "", (1,), (host,))


def verdict(*found: Named, source: str = ANALYSIS, **changes: Any) -> RunVerdict:
    fields = {"by": "summary", "attempt": 0, "judged_ns": BEGIN_NS, "last_step": 7, **changes}
    return RunVerdict(source=source, named=found, **fields)


def entry(directory: str = "one", *verdicts: RunVerdict, **changes: Any) -> StoredRun:
    own = facts(**{"run": directory, **changes})
    return StoredRun(directory, "f", own, own.hosts, verdicts)


def write_monitor(directory: Path, *lines: Any, **status: Any) -> None:
    """Write ``monitor.json``, and ``monitor.jsonl`` with these events."""
    (directory / "monitor.json").write_text(
        json.dumps({"time_ns": 1_700_000_005_500_000_000, "last_step": 7, **status})
    )
    (directory / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def live(host: str = "beta", cause: str = "compute", **changes: Any) -> dict[str, Any]:
    """Return a slow rank as the monitor writes it."""
    who = {"who": f"rank 1 on {host}", "hosts": (host,), "members": (Member(1, host, 2.5e6),)}
    return fields_to_json(slow_finding(1, **{"cause": cause, "cost_ns": 2.5e6, **who, **changes}))
