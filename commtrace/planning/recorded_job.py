"""The job of a recorded run, from the sizes that its ranks recorded.

>>> recorded_job(load_run("commtrace-runs/latest")).layout.tp  # doctest: +SKIP
2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.trace.run import RankTrace, Run

_Sizes = TypeVar("_Sizes", Model, Layout)

_DIMENSIONS: Final = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "ep": "ep", "expert-tp": "expert_tp"}
"""Fields of a layout by the dimensions of a rank."""


class RecordedJob(NamedTuple):
    """A job of Megatron-core that was recorded."""

    model: Model
    layout: Layout
    notes: tuple[str, ...]


def has_megatron_sizes(run: Run) -> bool:
    return _rank_with(run, "model") is not None


def recorded_job(run: Run) -> RecordedJob:
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
    left_out = topology.get("not_planned", [])
    notes = (f"The numbers depend on {', '.join(left_out)}, which a plan does not understand yet.",) if left_out else ()
    return RecordedJob(_converted(run, topology.get("model", {}), Model), _converted(run, layout, Layout), notes)


def _rank_with(run: Run, fact: str) -> RankTrace | None:
    """Return the first rank that recorded a fact."""
    return next((trace for _, trace in sorted(run.ranks.items()) if fact in trace.topology), None)


def _converted(run: Run, values: Mapping[str, object], kind: type[_Sizes]) -> _Sizes:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:  # with the message of ours, if sizes contradict one another
        raise ConfigurationError(f"{run.path}: the recorded sizes do not fit together: {error}") from error
