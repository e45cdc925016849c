"""The place of a rank in its job, and facts of its framework and recording: the mark ``topology``.

The bounds of the fields are those that :mod:`commtrace.trace.marks` checks.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from commtrace.trace.bounds import Count, Number, Size, Step, Time, Word
from commtrace.trace.inputs import MOST_RANKS

Sizes = Annotated[dict[Word, Size], Meta(max_length=64)]
Facts = Annotated[dict[Word, bool | Count | Word], Meta(max_length=64)]
Elements = Annotated[list[Count], Meta(max_length=65_536)]


class Device(TypedDict):
    name: Word
    uuid: Word


class Recording(TypedDict, total=False):
    """Options that leave something out, unless at their default."""

    steps: Word
    sample: Count
    keep_steps: Count
    keep_bytes: Count
    skip_roles: Annotated[list[Word], Meta(max_length=256)]


class RecordingEngine(TypedDict):
    """What recorded: ``native`` or ``python``."""

    name: Word
    reason: Word  # why it is not native; empty if it is


class Iterations(TypedDict):
    """How often optimizers step in the steps that were found, if some hold more than one iteration."""

    first: Count  # iterations of the first step
    fewest: Count  # and of the later ones; 0 if there are none
    most: Count
    updates: Annotated[dict[Word, Annotated[list[Count], Meta(min_length=2, max_length=2)]], Meta(max_length=64)]
    """The fewest and the most updates in a step by an optimizer of each class."""


# Several are merged, such as {"coordinates": {"tp": 0}, "parallel": {"tp": 2}}. invisible_paths: {name: "active" or
# "loaded"}; first_step: of the process; step_numbers: their source if the program counts its steps.
class Topology(TypedDict, total=False):
    """The place of a rank in the job, and facts of its framework and recording."""

    coordinates: Sizes
    parallel: Sizes
    framework: Annotated[dict[Word, Word], Meta(max_length=64)]
    device: Device
    recording: Recording
    engine: RecordingEngine
    invisible_paths: Annotated[dict[Word, Word], Meta(max_length=4096)]
    not_visible: Annotated[list[Word], Meta(max_length=4096)]  # by older recorders
    launcher: Word  # "ray", which ends its processes by killing them; of no others
    process_start_ns: Time
    ranks_per_node: Size
    first_step: Step
    step_numbers: Word
    iterations: Iterations
    schedule: Word
    stages: Size
    chunks: Size
    microbatches: Number
    zero_stage: Size
    model: Facts  # by the names of commtrace.planning.model.Model
    layout: Facts  # by those of commtrace.planning.layout.Layout that are not among the sizes above
    not_planned: Annotated[list[Word], Meta(max_length=64)]  # options that a plan does not know
    zero: Facts  # by the names of commtrace.planning.layout.ZeroOptions
    parameter_elements: Elements  # of every parameter tensor that is trained, in the order of the model
    parameter_groups: Elements  # the optimizer's group of each; none if there is one
    stage_indices: Annotated[list[Size], Meta(max_length=MOST_RANKS)]
    without_times: bool
    whatif: Annotated[dict[Word, Count], Meta(max_length=256)]


def without_place(topology: Topology) -> Topology:
    """Return a topology without coordinates and sizes, which a trace has in fields of its own."""
    facts = topology.copy()
    facts.pop("coordinates", None)
    facts.pop("parallel", None)
    return facts
