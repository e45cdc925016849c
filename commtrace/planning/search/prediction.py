"""How long a step takes in another layout, and what memory it needs: measured parts put together anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from commtrace.analysis.prediction.assumptions import CONFIDENCE, MISSED, SCATTER, UncertaintyPart
from commtrace.analysis.prediction.changes import Changes
from commtrace.errors import ConfigurationError
from commtrace.planning.communication import GRADIENT_NORM, Traffic, stage_traffic
from commtrace.planning.layout import Layout, groups
from commtrace.planning.memory import stage_memory
from commtrace.planning.model import Model
from commtrace.planning.parameters import stage_parameters
from commtrace.planning.pipeline_time import PAIRS, ChunkTimes, Gaps, shortest_pipeline_ns
from commtrace.planning.search.candidates import fitting_model
from commtrace.planning.search.costs import MessageTimes, PartTimes, RunCosts, recomputed_ns, schedule_ns
from commtrace.planning.search.links import Links, RoleReach
from commtrace.planning.search.megatron import megatron_arguments
from commtrace.trace.json_values import JsonObject, to_json

_MOST_GROUPS_LOOKED_AT = 64

_NOT_IN_A_LAYER = frozenset({"pp", "dp", "dp-cp", "expert-dp", "ep-dp", "embedding", "mp", "world"})
"""Roles that send between stages, or once in a step."""


class StepTime(NamedTuple):
    """The parts of a step, ns; they follow one another."""

    pipeline_ns: int  # forwards, backwards and what they send
    gradients_ns: int  # what is sent once in a step and not hidden
    optimizer_ns: int
    rest_ns: int  # of the recorded step, beyond these parts, and what its model does not explain of it

    @property
    def step_ns(self) -> int:
        return sum(self)


class Answer(NamedTuple):
    """What the model of a run says of the run's own layout."""

    step_ns: int
    uncertainty: tuple[UncertaintyPart, ...]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """In what a layout differs from what was measured."""

    sizes: tuple[str, ...] = ()  # of a microbatch's work, such as "tp 4"
    borrowed_roles: tuple[str, ...] = ()  # that are taken to have the bandwidth of another one
    baseline_roles: tuple[str, ...] = ()  # whose times are those of the baseline

    @property
    def phrases(self) -> tuple[str, ...]:
        """All of them in words, as they are printed."""
        borrowed = (f"bandwidth of {role}" for role in self.borrowed_roles)
        return (*self.sizes, *borrowed, *(f"{role} of the baseline" for role in self.baseline_roles))


@dataclass(frozen=True, slots=True)
class PredictedLayout:
    """A layout with its step time and memory."""

    layout: Layout
    time: StepTime
    peak_bytes: int  # of the fullest stage
    assumptions: Assumptions
    uncertainty: tuple[UncertaintyPart, ...]  # the parts of ±; what is assumed of the work comes on top

    @property
    def uncertainty_ns(self) -> float:
        """Return the ± of the step: the sum of its parts."""
        return math.fsum(part.ns for part in self.uncertainty)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions in words."""
        return self.assumptions.phrases

    def to_json(self) -> JsonObject:
        return {
            "layout": to_json(self.layout),
            "step_ns": self.time.step_ns,
            "uncertainty_ns": round(self.uncertainty_ns),
            "uncertainty": [{"cause": part.cause, "ns": round(part.ns)} for part in self.uncertainty],
            "parts_ns": to_json(self.time),
            "peak_bytes": self.peak_bytes,
            "assumed": list(self.assumed),
            "arguments": list(megatron_arguments(self.layout)),
        }


@dataclass(frozen=True)
class Predictor:
    """Predicts layouts from the costs of a run.

    The model of the run's steps answers for the layout that the run has, with any number of microbatches. Others are
    put together anew: work of a microbatch is taken to be proportional to its size and to be divided evenly by tensor
    and context parallel ranks; communication to have the bandwidth that was measured.
    """

    costs: RunCosts
    gpus_per_node: int  # of the layouts that are predicted
    links: Links  # likewise
    _parts: dict[Layout, PartTimes] = field(default_factory=dict)
    _roles: dict[Layout, tuple[str, ...]] = field(default_factory=dict)
    _answers: dict[int, Answer | None] = field(default_factory=dict)

    @classmethod
    def like(cls, costs: RunCosts) -> Predictor:
        """Return a predictor for the nodes and the network of the run."""
        return cls(costs, costs.gpus_per_node, costs.links)

    @cached_property
    def reproduced(self) -> StepTime:
        """The recorded step in its parts."""
        return Predictor.like(self.costs)._time(self.costs.layout)

    @property
    def error(self) -> float:
        """The step that the model of the run makes of its parts, over the measured one, minus 1."""
        return self.costs.modelled_ns / self.costs.step_ns - 1

    @cached_property
    def rest_ns(self) -> int:
        """What the recorded step has beyond pipeline, gradients and optimizer; it is taken to be in every layout."""
        costs, run = self.costs, Predictor.like(self.costs)
        once_ns = run._gradients_ns(costs.layout) + costs.optimizer_ns
        if costs.tail_ns is None:
            return costs.step_ns - costs.modelled_ns
        return costs.tail_ns + costs.step_ns - costs.modelled_ns - once_ns

    @property
    def uncertainty(self) -> float:
        """The ± of the recorded step as a share of it; what is assumed of another layout comes on top."""
        return math.fsum(part.ns for part in self._spreads(self.costs.step_ns)) / self.costs.step_ns

    def shortest_ns(self, layout: Layout) -> int:
        """Return a time below which the predicted step of the layout cannot be.

        Raises:
            ConfigurationError: a bandwidth that it needs was not measured.
        """
        if self._answer(layout) is not None:
            return 0
        return math.floor(
            shortest_pipeline_ns(self._stages(layout), layout.microbatches) * min(self.costs.stretch, 1.0)
        )

    def fits(self, layout: Layout, memory_bytes: int) -> bool:
        """Return whether the peak of every stage is within ``memory_bytes``; the likely fullest stages are first."""
        model = fitting_model(self.costs.model, layout.tp)
        order = dict.fromkeys((0, layout.pp - 1, *range(layout.pp)))
        return all(stage_memory(model, layout, stage).peak_bytes <= memory_bytes for stage in order)

    def predict(self, layout: Layout) -> PredictedLayout:
        """Return the step time and the memory of a layout.

        Raises:
            ConfigurationError: a bandwidth that it needs was not measured.
        """
        model = fitting_model(self.costs.model, layout.tp)
        answer, time = self._answer(layout), self._time(layout)
        assumptions = self.assumptions(layout)
        return PredictedLayout(
            layout=layout,
            time=time,
            peak_bytes=max(stage_memory(model, layout, stage).peak_bytes for stage in range(layout.pp)),
            assumptions=assumptions,
            uncertainty=(*self._spreads(time.step_ns), *self._spreads_of(layout, time.step_ns, assumptions))
            if answer is None
            else answer.uncertainty,
        )

    def _answer(self, layout: Layout) -> Answer | None:
        """Return what the model of the run says of its own layout with other microbatches; None if it cannot say."""
        run, steps = self.costs.layout, self.costs.steps
        if steps is None or replace(layout, microbatches=run.microbatches) != run or not self._keeps_links():
            return None
        if layout.microbatches not in self._answers:
            try:
                answer = steps.predict(Changes(microbatches=layout.microbatches)).prediction
            except ConfigurationError:  # such as a schedule that has no name
                self._answers[layout.microbatches] = None
            else:
                self._answers[layout.microbatches] = Answer(round(answer.predicted_ns), answer.uncertainty)
        return self._answers[layout.microbatches]

    def _keeps_links(self, but: frozenset[str] = frozenset()) -> bool:
        """Return whether the nodes are those of the run, and its bandwidths, but those of some roles."""
        run = self.costs.links.bandwidths
        changed = {reach.role for reach, bandwidth in run.items() if self.links.bandwidths.get(reach) != bandwidth}
        return self.gpus_per_node == self.costs.gpus_per_node and changed <= but

    @property
    def _roles_but_the_pipeline(self) -> frozenset[str]:
        return frozenset(reach.role for reach in self.costs.links.bandwidths) - {"pp"}

    def _spreads(self, step_ns: float) -> tuple[UncertaintyPart, ...]:
        """Return the parts of ± that every step of so many ns has, as :class:`~...predict.Prediction` has them.

        What the model misses of the run itself, and two standard errors of the measured steps. If the step grows, so do
        they.
        """
        costs = self.costs
        growth = max(1.0, step_ns / costs.step_ns)
        spreads = [UncertaintyPart(MISSED, abs(costs.step_ns - costs.modelled_ns) * growth)]
        if costs.num_steps > 1:
            spreads.append(
                UncertaintyPart(SCATTER, CONFIDENCE * costs.deviation_ns / math.sqrt(costs.num_steps) * growth)
            )
        return tuple(spreads)

    def _spreads_of(self, layout: Layout, step_ns: float, assumptions: Assumptions) -> Iterator[UncertaintyPart]:
        """Yield what the step moves by if each borrowed bandwidth is the slowest or the fastest of the same reach."""
        for role in assumptions.borrowed_roles:
            reach = self._reaches_over_nodes(layout, role)
            others = [
                replace(self, links=links, _parts={})
                for links in self.links.borrowing_otherwise(RoleReach(role, reach))
            ]
            if not others:
                continue
            if role in _NOT_IN_A_LAYER and role != "pp":
                own_ns = self._gradients_ns(layout)
                yield UncertaintyPart(
                    f"bandwidth of {role}", max(abs(each._gradients_ns(layout) - own_ns) for each in others)
                )
            else:
                moved = max(abs(each._time(layout).step_ns - step_ns) for each in others)
                yield UncertaintyPart(f"bandwidth of {role}", moved)

    def assumptions(self, layout: Layout) -> Assumptions:
        """Return what the run did not measure of a layout."""
        run = self.costs.layout
        changed = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep") if _differ(name, run, layout)]
        if layout.microbatch != run.microbatch:
            changed.append(f"microbatch {layout.microbatch}")
        if layout.recompute != run.recompute:
            changed.append(f"recompute {layout.recompute}")
        has = self.links.has
        sending = self._sending_roles(layout)
        lacking = [role for role in sending if not has(RoleReach(role, self._reaches_over_nodes(layout, role)))]
        in_baseline = [role for role in lacking if self._in_baseline(layout, role)]
        borrowed = [role for role in lacking if role not in in_baseline]
        return Assumptions(tuple(changed), tuple(borrowed), tuple(in_baseline))

    def _sending_roles(self, layout: Layout) -> tuple[str, ...]:
        """Return the roles whose groups send, but those that reduce only the norm of gradients, each once.

        Layouts of the same groups share them.
        """
        alike = replace(
            layout, chunks=1, first_stage_layers=0, last_stage_layers=0, microbatch=1, microbatches=1, recompute="none"
        )
        if alike not in self._roles:
            rows = self._rows_at_the_ends(layout)
            sending = (row.role for row in rows if row.group_size > 1 and row.what != GRADIENT_NORM)
            self._roles[alike] = tuple(dict.fromkeys(sending))
        return self._roles[alike]

    def _rows_at_the_ends(self, layout: Layout) -> list[Traffic]:
        """Return the communication of the first and the last stage; between them are no other roles."""
        model = fitting_model(self.costs.model, layout.tp)
        return [row for stage in sorted({0, layout.pp - 1}) for row in stage_traffic(model, layout, stage)]

    def _in_baseline(self, layout: Layout, role: str) -> bool:
        """Return whether the baseline has all calls of a role on the first and the last stage."""
        if self.links.baseline is None:
            return False
        reaches = self._reaches_over_nodes(layout, role)
        rows = self._rows_at_the_ends(layout)
        return all(self.links.in_baseline(row, reaches) for row in rows if row.role == role)

    def _time(self, layout: Layout) -> StepTime:
        gradients_ns = self._gradients_ns(layout)
        costs = self.costs
        optimizer_ns = round(costs.optimizer_ns * self._optimized(layout) / self._optimized(costs.layout))
        rest_ns = max(self.rest_ns, -gradients_ns - optimizer_ns)
        if (answer := self._answer(layout)) is not None:
            return StepTime(answer.step_ns - gradients_ns - optimizer_ns - rest_ns, gradients_ns, optimizer_ns, rest_ns)
        return StepTime(self._pipeline_ns(layout), gradients_ns, optimizer_ns, rest_ns)

    def _gradients_ns(self, layout: Layout) -> int:
        model = fitting_model(self.costs.model, layout.tp)
        in_step = [
            [row for row in stage_traffic(model, layout, stage) if row.when == "step"] for stage in range(layout.pp)
        ]
        return round(max(sum(self._traffic_ns(layout, row) for row in rows) for rows in in_step))

    def _pipeline_ns(self, layout: Layout) -> int:
        stages = self._stages(layout)
        phase_ns = schedule_ns(stages, layout.microbatches, self._messages(layout), self._gaps(layout))
        return round(phase_ns * self.costs.stretch)

    def _gaps(self, layout: Layout) -> list[Gaps]:
        """Return the gaps of each stage: those of the run's stages, or what these have in the mean."""
        gaps = list(self.costs.gaps)
        if not gaps or layout.pp == len(gaps):
            return gaps
        between = {pair: fmean(gap.between_ns[pair] for gap in gaps) for pair in PAIRS}
        later_ns = fmean(gap.head_ns for gap in gaps[1:] or gaps)
        return [Gaps(later_ns if stage else gaps[0].head_ns, between) for stage in range(layout.pp)]

    def _optimized(self, layout: Layout) -> float:
        """Return the parameters that the optimizer of the fullest rank updates."""
        model = fitting_model(self.costs.model, layout.tp)
        copies = (layout.data_copies, layout.expert_data_copies) if layout.distributed_optimizer else (1, 1)
        stages = [stage_parameters(model, layout, stage) for stage in range(layout.pp)]
        return max(sum(part.elements / copies[part.is_expert] for part in stage) for stage in stages)

    def _stages(self, layout: Layout) -> Sequence[Sequence[ChunkTimes]]:
        run, costs = self.costs.layout, self.costs
        is_as_in_run = bool(costs.stages) and layout.pp == run.pp and self._has_the_work_of_the_run(layout)
        divided = ("chunks", "first_stage_layers", "last_stage_layers", "recompute")
        if is_as_in_run and not any(_differ(name, run, layout) for name in divided):
            return costs.stages
        of_all = self._part_times(layout)
        last = layout.pp * layout.chunks - 1
        stages = []
        for stage in range(layout.pp):
            parts = of_all
            if is_as_in_run:  # the layers of a slow stage stay slow
                parts = of_all._replace(layer=_recomputing(costs.layers[stage], costs.model, layout.recompute))
            numbers = [chunk * layout.pp + stage for chunk in range(layout.chunks)]
            layers = [len(chunk) for chunk in layout.stage_layers(costs.model, stage)]
            stages.append(
                [
                    parts.chunk(count, is_first=number == 0, is_last=number == last)
                    for number, count in zip(numbers, layers, strict=True)
                ]
            )
        return stages

    def _has_the_work_of_the_run(self, layout: Layout) -> bool:
        """Return whether a layer works and communicates as it does in the run, over the same network."""
        names = ("tp", "cp", "ep", "expert_tp", "microbatch", "sequence_parallel")
        return self._keeps_links(_NOT_IN_A_LAYER) and not any(
            _differ(name, self.costs.layout, layout) for name in names
        )

    def _part_times(self, layout: Layout) -> PartTimes:
        """Return the parts in a layout, with communication; layouts that divide alike share them."""
        key = replace(layout, pp=1, chunks=1, first_stage_layers=0, last_stage_layers=0, microbatches=1)
        if key not in self._parts:
            self._parts[key] = self._new_part_times(layout)
        return self._parts[key]

    def _new_part_times(self, layout: Layout) -> PartTimes:
        run, measured, scale = self.costs.layout, self.costs.with_communication, 1.0
        sent = [(0.0, 0.0)] * 3
        if measured is None or not self._has_the_work_of_the_run(layout):
            measured = self.costs.parts
            scale = layout.microbatch * run.tp * run.cp / (run.microbatch * layout.tp * layout.cp)
            sent = self._sent_in_parts(layout)
        layer = _recomputing(measured.layer, self.costs.model, layout.recompute)
        parts = []
        for times, (forward_ns, backward_ns) in zip((layer, measured.embedding, measured.output), sent, strict=True):
            parts.append(
                ChunkTimes(round(times.forward_ns * scale + forward_ns), round(times.backward_ns * scale + backward_ns))
            )
        return PartTimes(*parts)

    def _sent_in_parts(self, layout: Layout) -> list[tuple[float, float]]:
        """Return the times of communication in forward and backward: of a layer, the embedding and the output layer.

        A model of three layers on three stages has one layer and nothing else in the middle. A receive is the time of
        its send: the ring of context parallel ranks sends one block while it receives the other.
        """
        model = replace(fitting_model(self.costs.model, layout.tp), layers=3)
        small = replace(layout, pp=3, chunks=1, first_stage_layers=0, last_stage_layers=0, microbatches=1)
        whole = []
        for stage in range(3):
            rows = [row for row in stage_traffic(model, small, stage) if row.role != "pp" and row.operation != "recv"]
            whole.append(
                [
                    sum(self._traffic_ns(layout, row) for row in rows if row.when == when)
                    for when in ("forward", "backward")
                ]
            )
        first, layer, last = whole
        return [
            (layer[0], layer[1]),
            (max(first[0] - layer[0], 0.0), max(first[1] - layer[1], 0.0)),
            (max(last[0] - layer[0], 0.0), max(last[1] - layer[1], 0.0)),
        ]

    def _messages(self, layout: Layout) -> MessageTimes:
        """Return how messages pass: as in the run if they go as far, as many times as long as they have more bytes."""
        if layout.pp == 1:
            return MessageTimes()
        costs, of_run = self.costs, self.costs.messages
        row = self._message(layout)
        if of_run is None:
            return MessageTimes(self._traffic_ns(layout, row))
        reaches = self._reaches_over_nodes
        if self._keeps_links(self._roles_but_the_pipeline) and reaches(layout, "pp") == reaches(costs.layout, "pp"):
            larger = row.tensor_bytes / self._message(costs.layout).tensor_bytes
            return replace(of_run, transfer_ns=of_run.transfer_ns * larger)
        return replace(of_run, transfer_ns=self._traffic_ns(layout, row))

    def _message(self, layout: Layout) -> Traffic:
        """Return one message between two stages."""
        model = fitting_model(self.costs.model, layout.tp)
        rows = stage_traffic(model, layout, 1)
        return replace(next(row for row in rows if row.role == "pp" and row.operation == "recv"), count=1)

    def _traffic_ns(self, layout: Layout, row: Traffic) -> float:
        if row.group_size == 1:
            return 0.0
        exposed = 1.0 if row.role == "pp" else self.links.exposed_share(row.role)
        return exposed * self.links.ns(row, self._reaches_over_nodes(layout, row.role))

    def _reaches_over_nodes(self, layout: Layout, role: str) -> bool:
        looked_at = islice(groups(layout, role), _MOST_GROUPS_LOOKED_AT)
        return any(len({rank // self.gpus_per_node for rank in group}) > 1 for group in looked_at)


def _recomputing(layer: ChunkTimes, model: Model, recompute: str) -> ChunkTimes:
    """Return the times of a layer whose backward repeats so much of its forward."""
    return layer._replace(backward_ns=layer.backward_ns + recomputed_ns(layer, model, recompute))


def _differ(name: str, run: Layout, layout: Layout) -> bool:
    return bool(getattr(run, name) != getattr(layout, name))
