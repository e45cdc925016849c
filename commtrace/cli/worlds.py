"""A directory that holds the worlds of one job: what commands print of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.hangs.job_end import end_words
from commtrace.cli.output import UNKNOWN, duration, text_table
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.findings.formatting import format_duration
from commtrace.history.facts import RunFacts, read_facts
from commtrace.recording.installation import own_command
from commtrace.trace.files.jobs import World, read_world, worlds_in
from commtrace.trace.files.locate import find_run_directory
from commtrace.trace.inputs import printable
from commtrace.trace.json_values import JsonObject
from commtrace.trace.processes import process_state


def worlds_of_job(runs: Sequence[Path]) -> list[World]:
    """Return the worlds if a job's directory was given, or those of different worlds; none for one run."""
    if len(runs) == 1:
        return worlds_in(runs[0])
    try:
        worlds = [world for run in runs if (world := read_world(find_run_directory(run))) is not None]
    except RunNotFoundError:
        return []
    are_several = len({world.metadata.world for world in worlds}) == len(worlds) == len(runs)
    return worlds if are_several else []


def job_verdict(worlds: Sequence[World]) -> str:
    """Return ``Job slurm-4711: 2 worlds, 2 + 4 ranks.``"""
    sizes = " + ".join(str(world.num_ranks) for world in worlds)
    names = {world.metadata.job for world in worlds}
    job = f"Job {names.pop()}" if len(names) == 1 else "A job"
    return printable(f"{job}: {len(worlds)} worlds, {sizes} ranks.")


def job_to_json(worlds: Sequence[World]) -> JsonObject:
    """Return what ``commtrace summary --json`` prints of a job."""
    now_ns = time.time_ns()
    listed: list[JsonObject] = []
    for world in worlds:
        facts, problem = _facts(world, now_ns)
        listed.append(
            {
                "path": str(world.path),
                "run_id": world.metadata.run_id,
                "world": world.metadata.world,
                "world_size": world.metadata.world_size,
                "ranks_recorded": world.num_ranks,
                "state": None if facts is None else facts.state,
                "problem": problem,
                "joined_with": sorted(world.joined - {world.metadata.world}),
            }
        )
    return {"verdict": job_verdict(worlds), "worlds": listed}


def print_job(console: Console, worlds: Sequence[World]) -> None:
    """Print the worlds, and the command that reads each of them."""
    now_ns = time.time_ns()
    console.print(f"[bold]{escape(job_verdict(worlds))}[/]\n")
    table = text_table(["run"], ["ranks", "hosts", "lasted", "steps", "step"])
    table.add_column("ended", overflow="fold")
    problems = []
    for world in worlds:
        facts, problem = _facts(world, now_ns)
        name = printable(world.path.name)
        if facts is None:
            problems.append(f"{name}: {problem}")
            continue
        table.add_row(*map(escape, _row(name, facts)))
    console.print(table)
    for problem in problems:
        console.print(f"[yellow]![/] {escape(problem)}")
    console.print("\nEach world has ranks, steps and groups of its own. Read each by itself:")
    for world in worlds:
        following = f"{own_command()} summary {shlex.quote(printable(str(world.path)))}"
        console.print(f"  {escape(following)}", soft_wrap=True)


def _facts(world: World, now_ns: int) -> tuple[RunFacts | None, str]:
    try:
        return read_facts(world.path, now_ns=now_ns, ask=process_state), ""
    except (CommtraceError, OSError) as error:
        return None, printable(str(error))


def _row(name: str, facts: RunFacts) -> list[str]:
    ranks = str(facts.world_size)
    if facts.ranks_recorded != facts.world_size:
        ranks = f"{facts.ranks_recorded} of {facts.world_size}"
    return [
        name,
        ranks,
        str(len(facts.hosts)),
        UNKNOWN if facts.duration_ns is None else format_duration(facts.duration_ns),
        UNKNOWN if facts.steps is None else str(facts.steps),
        duration(facts.step_ns),
        end_words(facts.state, facts.ending),
    ]
