"""The plan: what a model in a layout will hold and send, by stage and in the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from commtrace.planning.communication import Traffic, stage_traffic, total_bytes
from commtrace.planning.layout import Layout, PlannedJob, groups
from commtrace.planning.memory import Memory, stage_memory
from commtrace.planning.model import Model
from commtrace.planning.parameters import model_parameters, stage_elements
from commtrace.planning.zero import planned_zero_job, zero_traffic
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.schedule import Bubble, bubble

_ROLES: Final = (
    "tp", "cp", "dp-cp", "dp", "pp", "embedding", "ep", "expert-tp", "tp-ep", "expert-dp", "mp", "dist-opt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A pipeline stage. All of its ranks hold and send the same."""

    stage: int
    ranks: range
    layers: tuple[range, ...]  # of each model chunk
    parameters: int  # of each rank
    memory: Memory
    traffic: tuple[Traffic, ...]

    def to_json(self) -> JsonObject:
        return {
            "stage": self.stage,
            "ranks": list(self.ranks),
            "layers": [list(chunk) for chunk in self.layers],
            "parameters": self.parameters,
            "memory": self.memory.to_json(),
            "traffic": to_json(self.traffic),
        }


class RoleTotal(NamedTuple):
    """The communication of all ranks in process groups of one role, in one iteration."""

    role: str
    calls: int  # on all ranks; a message counts where it is sent
    tensor_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A model in a layout."""

    model: Model
    layout: Layout
    parameters: int  # of the model; a tied embedding counts once
    bubble: Bubble
    stages: tuple[StagePlan, ...]
    notes: tuple[str, ...]  # what the numbers leave out, in sentences

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks need most memory."""
        return max(self.stages, key=lambda stage: stage.memory.peak_bytes)

    def role_totals(self) -> tuple[RoleTotal, ...]:
        """Return the communication of the cluster by role."""
        totals = []
        for role in _ROLES:
            calls = tensor_bytes = wire_bytes = 0
            for stage in self.stages:
                rows = [row for row in stage.traffic if row.role == role]
                tensor, wire = total_bytes(rows)
                calls += len(stage.ranks) * sum(row.count for row in rows if row.operation != "recv")
                tensor_bytes += len(stage.ranks) * tensor
                wire_bytes += len(stage.ranks) * wire
            if calls:
                totals.append(RoleTotal(role, calls, tensor_bytes, wire_bytes))
        return tuple(totals)

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the process groups by role."""
        used = {row.role for stage in self.stages for row in stage.traffic}
        return {role: tuple(groups(self.layout, role)) for role in _ROLES if role in used}

    def to_json(self) -> JsonObject:
        return {
            "parameters": self.parameters,
            "world_size": self.layout.world_size,
            "bubble": to_json(self.bubble),
            "stages": to_json(self.stages),
            "communication": to_json(self.role_totals()),
            "groups": to_json(self.groups()),
            "notes": to_json(self.notes),
            "model": to_json(self.model),
            "layout": to_json(self.layout),
        }


def make_plan(model: Model, layout: Layout, notes: tuple[str, ...] = ()) -> Plan:
    """Return what ``model`` in ``layout`` will hold and send.

    Args:
        notes: What is known to be left out already.

    Raises:
        ConfigurationError: the model cannot be divided in this way.
    """
    layout.check(model)
    return Plan(
        model=model,
        layout=layout,
        parameters=model_parameters(model, layout),
        bubble=_ideal_bubble(layout),
        stages=tuple(_plan_stage(model, layout, stage) for stage in range(layout.pp)),
        notes=(*notes, *plan_notes(model, layout)),
    )


def plan_job(job: PlannedJob) -> Plan:
    """Return what a job will hold and send. Raise ConfigurationError if its model cannot be divided in this way."""
    return make_plan(job.model, job.layout, job.notes)


def _ideal_bubble(layout: Layout) -> Bubble:
    ideal = bubble(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
    assert ideal is not None, "1F1B and its interleaved form have a formula"
    return ideal


def _plan_stage(model: Model, layout: Layout, stage: int) -> StagePlan:
    return StagePlan(
        stage=stage,
        ranks=layout.stage_ranks(stage),
        layers=layout.stage_layers(model, stage),
        parameters=sum(stage_elements(model, layout, stage)),
        memory=stage_memory(model, layout, stage),
        traffic=_traffic(model, layout, stage),
    )


def _traffic(model: Model, layout: Layout, stage: int) -> tuple[Traffic, ...]:
    if layout.zero_stage is None:
        return stage_traffic(model, layout, stage)
    return zero_traffic(planned_zero_job(model, layout)) if layout.is_data_parallel else ()


def plan_notes(model: Model, layout: Layout) -> Iterator[str]:
    """Yield what the numbers of a layout leave out or take for granted, in sentences."""
    if layout.zero_stage is not None:
        if layout.is_data_parallel:
            yield "Buckets hold tensors in Megatron-core's sizes and order; another model's are cut elsewhere."
        else:
            yield "The communication of DeepSpeed is known for data parallelism only: here only memory is computed."
    if layout.zero_stage == 3:
        yield "Parameters that ZeRO 3 has gathered (up to stage3_max_live_parameters) are not in the peak."
    if model.experts:
        yield "Tokens are taken to be divided evenly between experts; uneven routing takes more memory and time."
    if model.experts and layout.expert_tp * layout.ep > 1 and layout.expert_dispatcher == "other":
        yield "Only the communication of the all-to-all token dispatcher is known: what experts exchange is left out."
    if layout.cp > 1 and layout.cp_communication == "other":
        yield "Only ring and all-to-all context parallelism are known: the communication of cp is left out."
