"""The job of a recorded run, from the sizes that its ranks recorded.

>>> recorded_job(load_run("commtrace-runs/latest")).layout.tp  # doctest: +SKIP
2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final, NamedTuple, TypeVar

import msgspec

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout, PlannedJob, ZeroOptions
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan
from commtrace.planning.zero import ZeroJob
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.topology import Topology

_Sizes = TypeVar("_Sizes", Model, Layout, ZeroOptions)
_SWITCHES: Final = {field.name for field in fields(ZeroOptions) if field.type == "bool"}

_MODEL_SIZES: Final = (
    "layers", "hidden", "heads", "query_groups", "head_size", "ffn", "sequence", "vocabulary", "experts",
)  # fmt: skip
_LAYOUT_SIZES: Final = (
    "tp", "pp", "dp", "cp", "ep", "chunks", "microbatch", "microbatches", "sequence_parallel", "distributed_optimizer",
    "zero_stage", "parameter_bytes", "gradient_bytes",
)  # fmt: skip
"""What two jobs have in common if they are the same."""

_DIMENSIONS: Final = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "ep": "ep", "expert-tp": "expert_tp"}
"""Fields of a layout by the dimensions of a rank."""


class RecordedZeroJob(NamedTuple):
    """A job of DeepSpeed that was recorded."""

    job: ZeroJob
    ranks: tuple[int, ...]
    notes: tuple[str, ...]


def recorded_zero_job(run: Run) -> RecordedZeroJob | None:
    """Return the job of a run of DeepSpeed whose ranks are all data parallel; None for any other run.

    Raises:
        ConfigurationError: its sizes contradict one another.
    """
    trace = _rank_with(run, "parameter_elements")
    if trace is None or trace.parallel.get("dp") != trace.metadata.world_size:
        return None
    topology, facts = trace.topology, dict(trace.topology.get("zero", {}))
    sizes = {name: int(facts.pop(name, 2)) for name in ("parameter_bytes", "gradient_bytes")}
    elements, groups = topology.get("parameter_elements", []), topology.get("parameter_groups", [])
    if groups and len(groups) != len(elements):
        raise ConfigurationError(f"{run.path}: {len(elements)} parameters and {len(groups)} groups were recorded")
    options = {name: bool(facts[name]) if name in _SWITCHES else value for name, value in facts.items()}
    job = ZeroJob(
        stage=topology.get("zero_stage", 0),
        elements=tuple(elements),
        ranks=trace.metadata.world_size,
        microbatches=topology.get("microbatches", 1),
        options=_converted(run, options, ZeroOptions),
        groups=tuple(groups),
        **sizes,
    )
    return RecordedZeroJob(job, tuple(range(job.ranks)), _left_out(topology))


def has_sizes(run: Run) -> bool:
    """Return whether the sizes of the model were recorded."""
    return _rank_with(run, "model") is not None


def recorded_job(run: Run) -> PlannedJob:
    """Return the model and the layout of a run.

    Raises:
        ConfigurationError: they were not recorded, or contradict one another.
    """
    trace = _rank_with(run, "model")
    if trace is None:
        raise ConfigurationError(
            f"{run.path}: the sizes of its model were not recorded, which is done for the GPT of Megatron-core and for "
            "DeepSpeed. Give the job: its command after --, or a YAML or JSON file"
        )
    topology = trace.topology
    sizes = {field: trace.parallel[name] for name, field in _DIMENSIONS.items() if name in trace.parallel}
    layout = {
        **topology.get("layout", {}),
        **sizes,
        "chunks": topology.get("chunks", 1),
        "microbatches": topology.get("microbatches", 1),
    }
    model = _converted(run, topology.get("model", {}), Model)
    return PlannedJob(model, _converted(run, layout, Layout), _left_out(topology))


def job_differences(run: Run, plan: Plan) -> tuple[str, ...]:
    """Return each recorded size of a run that a plan has not, in words: ``tp 2 instead of 4``."""
    planned = {
        **{name: getattr(plan.model, name) for name in _MODEL_SIZES},
        **{name: getattr(plan.layout, name) for name in _LAYOUT_SIZES},
    }
    return tuple(
        f"{name} {_word(size)} instead of {_word(planned[name])}"
        for name, size in _recorded_sizes(run).items()
        if name in planned and size != planned[name]
    )


def _recorded_sizes(run: Run) -> dict[str, object]:
    """Return what a run recorded of its model and layout, by the names of their fields."""
    try:
        if has_sizes(run):
            job = recorded_job(run)
            sizes = {name: getattr(job.model, name) for name in _MODEL_SIZES}
            return {**sizes, **{name: getattr(job.layout, name) for name in _LAYOUT_SIZES}}
        zero = recorded_zero_job(run)
    except ConfigurationError:  # sizes that contradict one another are no sizes
        return {}
    if zero is not None:
        return {"dp": zero.job.ranks, "microbatches": zero.job.microbatches, "zero_stage": zero.job.stage}
    trace = next(iter(run.ranks.values()))
    return {field: trace.parallel[name] for name, field in _DIMENSIONS.items() if name in trace.parallel}


def _word(size: object) -> str:
    return f"{size:,}" if type(size) is int else str(size).lower()


def _left_out(topology: Topology) -> tuple[str, ...]:
    names = topology.get("not_planned", [])
    return (f"The numbers depend on {', '.join(names)}, which a plan does not understand yet.",) if names else ()


def _rank_with(run: Run, fact: str) -> RankTrace | None:
    """Return the first rank that recorded a fact."""
    return next((trace for _, trace in sorted(run.ranks.items()) if fact in trace.topology), None)


def _converted(run: Run, values: Mapping[str, object], kind: type[_Sizes]) -> _Sizes:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:  # with the message of ours, if sizes contradict one another
        raise ConfigurationError(f"{run.path}: the recorded sizes do not fit together: {error}") from error
