"""How long a step takes in another layout, and what memory it needs: measured parts put together anew."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from commtrace.planning.communication import GRADIENT_NORM, Traffic, stage_traffic
from commtrace.planning.layout import Layout, groups
from commtrace.planning.memory import stage_memory
from commtrace.planning.parameters import stage_parameters
from commtrace.search.candidates import fitting_model
from commtrace.search.costs import PartTimes, RunCosts, recomputed_ns
from commtrace.search.links import Links, Place
from commtrace.search.megatron import megatron_arguments
from commtrace.search.pipeline_time import ChunkTimes, pipeline_ns, shortest_pipeline_ns
from commtrace.trace.json_values import JsonObject, to_json

_MOST_GROUPS_LOOKED_AT = 64


class StepTime(NamedTuple):
    """The parts of a step, ns; they follow one another."""

    pipeline_ns: int  # forwards, backwards and what they send
    gradients_ns: int  # what is sent once in a step and not hidden
    optimizer_ns: int
    rest_ns: int  # of the recorded step, beyond these parts: data loading, and what the prediction does not explain

    @property
    def step_ns(self) -> int:
        return sum(self)


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
class Prediction:
    """A layout with its step time and memory."""

    layout: Layout
    time: StepTime
    peak_bytes: int  # of the fullest stage
    assumptions: Assumptions

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions in words."""
        return self.assumptions.phrases

    def to_json(self) -> JsonObject:
        return {
            "layout": to_json(self.layout),
            "step_ns": self.time.step_ns,
            "parts_ns": to_json(self.time),
            "peak_bytes": self.peak_bytes,
            "assumed": list(self.assumed),
            "arguments": list(megatron_arguments(self.layout)),
        }


@dataclass(frozen=True)
class Predictor:
    """Predicts layouts from the costs of a run.

    Work of a microbatch is taken to be proportional to its size and to be divided evenly by tensor and context
    parallel ranks; communication to have the bandwidth that was measured.
    """

    costs: RunCosts
    gpus_per_node: int  # of the layouts that are predicted
    links: Links  # likewise
    _parts: dict[Layout, PartTimes] = field(default_factory=dict)
    _roles: dict[Layout, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def like(cls, costs: RunCosts) -> Predictor:
        """Return a predictor for the nodes and the network of the run."""
        return cls(costs, costs.gpus_per_node, costs.links)

    @cached_property
    def reproduced(self) -> StepTime:
        """The recorded run itself, as it is predicted; the rest is what that leaves of the measured step."""
        time = Predictor.like(self.costs)._time(self.costs.layout, rest_ns=0)
        return time._replace(rest_ns=self.costs.step_ns - time.step_ns)

    @property
    def error(self) -> float:
        """The predicted step of the run without the rest, over the measured one, minus 1."""
        return -self.reproduced.rest_ns / self.costs.step_ns

    @property
    def rest_ns(self) -> int:
        """What the parts do not explain of the recorded step; it is taken to be there in every layout."""
        return max(self.reproduced.rest_ns, 0)

    @property
    def uncertainty(self) -> float:
        """The larger of that error and the scatter of the recorded steps; what is assumed comes on top."""
        return max(abs(self.error), self.costs.step_scatter)

    def shortest_ns(self, layout: Layout) -> int:
        """Return a time below which the layout cannot be.

        Raises:
            ConfigurationError: a bandwidth that it needs was not measured.
        """
        return shortest_pipeline_ns(self._stages(layout), layout.microbatches)

    def fits(self, layout: Layout, memory_bytes: int) -> bool:
        """Return whether the peak of every stage is within ``memory_bytes``; the likely fullest stages are first."""
        model = fitting_model(self.costs.model, layout.tp)
        order = dict.fromkeys((0, layout.pp - 1, *range(layout.pp)))
        return all(stage_memory(model, layout, stage).peak_bytes <= memory_bytes for stage in order)

    def predict(self, layout: Layout) -> Prediction:
        """Return the step time and the memory of a layout.

        Raises:
            ConfigurationError: a bandwidth that it needs was not measured.
        """
        model = fitting_model(self.costs.model, layout.tp)
        return Prediction(
            layout=layout,
            time=self._time(layout, self.rest_ns),
            peak_bytes=max(stage_memory(model, layout, stage).peak_bytes for stage in range(layout.pp)),
            assumptions=self.assumptions(layout),
        )

    def assumed(self, layout: Layout) -> tuple[str, ...]:
        """Return in words what the run did not measure of a layout."""
        return self.assumptions(layout).phrases

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
        lacking = [role for role in sending if not has(Place(role, self._reaches_over_nodes(layout, role)))]
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

    def _time(self, layout: Layout, rest_ns: int) -> StepTime:
        model = fitting_model(self.costs.model, layout.tp)
        in_step = [
            [row for row in stage_traffic(model, layout, stage) if row.when == "step"] for stage in range(layout.pp)
        ]
        return StepTime(
            pipeline_ns=pipeline_ns(self._stages(layout), layout.microbatches, self._messages_ns(layout)),
            gradients_ns=round(max(sum(self._traffic_ns(layout, row) for row in rows) for rows in in_step)),
            optimizer_ns=round(self.costs.optimizer_ns * self._optimized(layout) / self._optimized(self.costs.layout)),
            rest_ns=rest_ns,
        )

    def _optimized(self, layout: Layout) -> float:
        """Return the parameters that the optimizer of the fullest rank updates."""
        model = fitting_model(self.costs.model, layout.tp)
        copies = (layout.data_copies, layout.expert_data_copies) if layout.distributed_optimizer else (1, 1)
        stages = [stage_parameters(model, layout, stage) for stage in range(layout.pp)]
        return max(sum(one.elements / copies[one.is_expert] for one in stage) for stage in stages)

    def _stages(self, layout: Layout) -> list[list[ChunkTimes]]:
        parts = self._part_times(layout)
        last = layout.pp * layout.chunks - 1
        stages = []
        for stage in range(layout.pp):
            numbers = [chunk * layout.pp + stage for chunk in range(layout.chunks)]
            layers = [len(chunk) for chunk in layout.stage_layers(self.costs.model, stage)]
            stages.append(
                [
                    parts.chunk(count, is_first=number == 0, is_last=number == last)
                    for number, count in zip(numbers, layers, strict=True)
                ]
            )
        return stages

    def _part_times(self, layout: Layout) -> PartTimes:
        """Return the parts in a layout, with communication; layouts that divide alike share them."""
        key = replace(layout, pp=1, chunks=1, first_stage_layers=0, last_stage_layers=0, microbatches=1)
        if key not in self._parts:
            self._parts[key] = self._new_part_times(layout)
        return self._parts[key]

    def _new_part_times(self, layout: Layout) -> PartTimes:
        run, measured = self.costs.layout, self.costs.parts
        scale = layout.microbatch * run.tp * run.cp / (run.microbatch * layout.tp * layout.cp)
        again_ns = recomputed_ns(measured.layer, self.costs.model, layout.recompute)
        layer = measured.layer._replace(backward_ns=measured.layer.backward_ns + again_ns)
        sent = self._sent_in_parts(layout)
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

    def _messages_ns(self, layout: Layout) -> list[int]:
        if layout.pp == 1:
            return []
        model = fitting_model(self.costs.model, layout.tp)
        row = next(row for row in stage_traffic(model, layout, 1) if row.role == "pp" and row.operation == "recv")
        return [round(self._traffic_ns(layout, replace(row, count=1)))] * layout.pp

    def _traffic_ns(self, layout: Layout, row: Traffic) -> float:
        if row.group_size == 1:
            return 0.0
        exposed = 1.0 if row.role == "pp" else self.links.exposed_share(row.role)
        return exposed * self.links.ns(row, self._reaches_over_nodes(layout, row.role))

    def _reaches_over_nodes(self, layout: Layout, role: str) -> bool:
        looked_at = islice(groups(layout, role), _MOST_GROUPS_LOOKED_AT)
        return any(len({rank // self.gpus_per_node for rank in group}) > 1 for group in looked_at)


def _differ(name: str, run: Layout, layout: Layout) -> bool:
    return bool(getattr(run, name) != getattr(layout, name))
