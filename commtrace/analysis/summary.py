"""Everything that ``commtrace summary`` says, as one dictionary of plain values.

>>> summary = summarise("commtrace-runs/my-run", steps="10:20")  # doctest: +SKIP
>>> summary["verdict"]                                           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.communication import communication_table
from commtrace.analysis.coverage import find_coverage
from commtrace.analysis.problems import find_problems
from commtrace.analysis.rank_means import rank_means
from commtrace.analysis.verdict import verdict
from commtrace.errors import CommtraceError
from commtrace.trace.run import Run


def summarise(source: str | Path | Run, steps: str | None = None) -> dict[str, Any]:
    """Where the time of a run went.

    Args:
        source: a run directory or a loaded run.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``. Without, all complete steps but the first (the warm-up).

    Returns:
        Values that JSON can hold, never NaN: ``run``, ``alignment``, ``ranks`` (means per step), ``communication``,
        ``pipeline`` (None without one), ``stragglers``, ``coverage``, ``verdict`` and ``problems``.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed.
    """
    return summarise_analysis(analyse(source, steps))


def summarise_analysis(analysis: Analysis) -> dict[str, Any]:
    """The same, of a run that was analysed already."""
    run, matches = analysis.run, analysis.matches
    communication = communication_table(run, matches, analysis.partition, analysis.roles)
    ranks = rank_means(run, analysis.partition)
    problems = find_problems(analysis, communication)
    pipeline, stragglers = _pipeline_and_stragglers(analysis, problems)
    return {
        "run": _identity(analysis),
        "alignment": analysis.alignment.to_json(),
        "ranks": [rank.to_json() for rank in ranks],
        "communication": [row.to_json() for row in communication],
        "pipeline": pipeline,
        "stragglers": stragglers,
        "coverage": find_coverage(run, analysis.roles).to_json(),
        "verdict": verdict(ranks, stragglers),
        "problems": problems,
    }


def _pipeline_and_stragglers(
    analysis: Analysis, problems: list[str]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Both need a schedule that can be replayed; one that cannot be is a problem to tell, not the end."""
    if not analysis.steps.used:
        return None, []
    try:
        pipeline = _call("pipeline", "reconstruct_pipeline", analysis)
        stragglers = _call("straggler", "find_stragglers", analysis) or []
    except CommtraceError as error:
        problems.append(f"Pipeline and stragglers were not analysed: {error}")
        return None, []
    return pipeline and pipeline.to_json(), [straggler.to_json() for straggler in stragglers]


def _call(module: str, function: str, analysis: Analysis) -> Any:
    """A later stage of the analysis; None in a build without it."""
    name = f"commtrace.analysis.{module}"
    if find_spec(name) is None:
        return None
    return getattr(import_module(name), function)(analysis.run, analysis.matches)


def _identity(analysis: Analysis) -> dict[str, Any]:
    run, metadata = analysis.recorded, analysis.recorded.any_metadata
    parallel: dict[str, int] = {}
    topology: dict[str, Any] = {}
    for trace in run.ranks.values():
        parallel.update(trace.parallel)
        topology.update(trace.topology)
    return {
        "id": metadata.run_id,
        "attempt": metadata.attempt,
        "path": str(run.path),
        "world_size": run.world_size,
        "ranks_recorded": len(run.ranks),
        "hosts": list(dict.fromkeys(trace.metadata.node for trace in run.ranks.values())),
        "steps": analysis.steps.to_json(),
        "backend": metadata.backend,
        "device": metadata.device,
        "versions": dict(metadata.versions),
        "framework": topology.get("framework"),
        "parallel": parallel,
    }
