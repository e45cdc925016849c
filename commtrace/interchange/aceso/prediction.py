"""What Aceso predicts for a configuration, to its last digit, and what we predict from the same measurements.

Aceso's rules are those of search/aceso_cost_model.py in https://github.com/microsoft/SuperScaler, branch Aceso. They
are reproduced with their oddities, which :data:`LEFT_OUT` and the comments name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.configuration import AcesoConfiguration, AcesoStage, PlacedOperator
from commtrace.interchange.aceso.profile import AcesoProfile, OperatorCost
from commtrace.planning.pipeline_time import ChunkTimes, pipeline_ns
from commtrace.trace.json_values import JsonObject, fields_to_json

LEFT_OUT: Final = (
    "Neither has the optimizer's step, data loading or the first message of a new connection.",
    "Aceso leaves out that data parallel ranks add up gradients; ours has it, from the all-gathers of the profile.",
    "Aceso lets a stage wait for what it sends and receives; ours for what it receives, once the sender has it.",
    "Aceso takes the slowest stage m − 1 times; ours replays 1F1B with the forward and the backward of each stage.",
    "Aceso adds what the allocator may keep unused; ours is what is allocated at one time.",
)
"""What the two predictions leave out, and in what they differ."""

_STATES_OF_OPTIMIZER: Final = {"gpt": 6, "t5": 6, "resnet": 2}
"""Size of the optimizer's states, as a multiple of the parameters: an fp32 copy and Adam's moments of 16-bit ones."""


class AcesoStagePrediction(NamedTuple):
    """One stage in Aceso's model; times of one microbatch."""

    gpus: int
    forward_ms: float
    backward_ms: float
    recompute_ms: float
    incoming_ms: float  # with changes of the division of tensors in the forward
    outgoing_ms: float  # with those in the backward
    iteration_ms: float  # if this stage were the slowest
    parameters_mib: float
    allocated_mib: float  # states of the parameters, and activations at their peak
    reserved_mib: float  # what the allocator may keep on top

    @property
    def memory_mib(self) -> float:
        return self.allocated_mib + self.reserved_mib


@dataclass(frozen=True, slots=True)
class AcesoPrediction:
    """A configuration in Aceso's model, and in ours."""

    model: str
    stages: tuple[AcesoStagePrediction, ...]
    iteration_ms: float
    memory_mib: float  # of the fullest stage
    our_iteration_ms: float
    our_gradients_ms: float  # in it: data parallel ranks add up their gradients
    our_memory_mib: float
    notes: tuple[str, ...]

    @property
    def slowest(self) -> int:
        """The stage that decides the time of an iteration in Aceso's model."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].iteration_ms)

    def to_json(self) -> JsonObject:
        return {**fields_to_json(self), "slowest_stage": self.slowest}


def predict(profile: AcesoProfile, configuration: AcesoConfiguration, gpus_per_node: int = 8) -> AcesoPrediction:
    """Return what Aceso predicts for a configuration, and what we do.

    Raises:
        ConfigurationError: an operator, a collective or messages were not profiled in the form that is needed.
    """
    stages = configuration.stages(profile)
    begins = [sum(stage.gpus for stage in stages[:index]) for index in range(len(stages) + 1)]
    crosses = [begin > 0 and begin % gpus_per_node == 0 for begin in begins]
    measured = [
        _AcesoStage(profile, configuration.model_name, stage, crosses[index], crosses[index + 1])
        for index, stage in enumerate(stages)
    ]
    m = configuration.microbatches
    times = [stage.times_ms() for stage in measured]
    through_all_ms = sum(sum(parts) for parts in times)
    predictions = []
    for index, (stage, parts) in enumerate(zip(measured, times, strict=True)):
        forward_ms, backward_ms, recompute_ms, incoming_ms, outgoing_ms = parts
        predictions.append(
            AcesoStagePrediction(
                gpus=stages[index].gpus,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                recompute_ms=recompute_ms,
                incoming_ms=incoming_ms,
                outgoing_ms=outgoing_ms,
                iteration_ms=sum(parts) * (m - 1) + through_all_ms,
                parameters_mib=stage.parameters_mib(),
                allocated_mib=stage.allocated_mib(in_flight=len(stages) - index),
                reserved_mib=stage.reserved_mib(),
            )
        )
    gradients_ms = [stage.gradients_ms() for stage in measured]
    known_ms = [ms for ms in gradients_ms if ms is not None]
    notes = tuple(dict.fromkeys(_notes(profile, measured, any(crosses[1:-1]))))
    return AcesoPrediction(
        model=profile.model,
        stages=tuple(predictions),
        iteration_ms=max(prediction.iteration_ms for prediction in predictions),
        memory_mib=max(prediction.memory_mib for prediction in predictions),
        our_iteration_ms=_replayed_ms(measured, times, m) + max(known_ms, default=0.0),
        our_gradients_ms=max(known_ms, default=0.0),
        our_memory_mib=max(
            stage.allocated_mib(in_flight=min(m, len(stages) - index)) for index, stage in enumerate(measured)
        ),
        notes=notes,
    )


def _notes(profile: AcesoProfile, measured: Sequence[_AcesoStage], between_nodes: bool) -> Iterator[str]:
    """Yield what was taken for granted because the profile does not have it."""
    if between_nodes and not profile.between_nodes:
        yield (
            "Messages between nodes were not profiled (p2p_inter_node.csv): they take what messages within a node take."
        )
    for ranks in {size for stage in measured for size in stage.data_parallel_sizes()}:
        like = profile.gathered_like(ranks)
        if profile.ring_bandwidth(ranks) is None:
            yield "Nothing in the profile tells the time of adding up gradients: ours leaves it out."
        elif like != ranks:
            where = f"that of {like} ranks" if like else "that of messages"
            yield (
                f"No all-gather of {ranks} ranks was profiled: ours adds up gradients with a bandwidth like {where}, "
                "also between nodes."
            )


def _replayed_ms(measured: Sequence[_AcesoStage], times: Sequence[tuple[float, ...]], microbatches: int) -> float:
    """Return the time of 1F1B, ms."""
    chunks = []
    for stage, (forward_ms, backward_ms, recompute_ms, *_) in zip(measured, times, strict=True):
        within_forward_ms, within_backward_ms = stage.redivided_ms()
        forward_ns = round((forward_ms + within_forward_ms) * 1e6)
        chunks.append([ChunkTimes(forward_ns, round((backward_ms + recompute_ms + within_backward_ms) * 1e6))])
    return pipeline_ns(chunks, microbatches, [round(stage.output_ms() * 1e6) for stage in measured]) / 1e6


class _Placement(NamedTuple):
    """How often a tensor is there, and over how many ranks each of its dimensions is divided."""

    copies: int
    parts: tuple[int, ...]


class _Change(NamedTuple):
    """A change of a tensor's placement: what is called in the forward and in the backward."""

    forward: str
    backward: str
    ranks: int


def _placement(operator: PlacedOperator, *, is_input: bool) -> _Placement | None:
    """Return how an operator wants its input, or leaves its output; None: in any way.

    Dimensions are sequence, batch and hidden; of attention scores batch, heads and sequence; of what comes out of the
    model, and of images, batch first.
    """
    name, tp, dp = operator.name, operator.case.tp, operator.dp
    replicated, by_columns = _Placement(tp, (1, dp, 1)), _Placement(1, (1, dp, tp))
    scores, batch_first = _Placement(1, (dp, tp, 1)), _Placement(tp, (dp, 1, 1))
    if not name.startswith("enc-") and name not in ("encoder-embedding", "final-layernorm", "gpt-post-process"):
        return batch_first  # convolutional networks
    if (name == "encoder-embedding" and is_input) or (name == "gpt-post-process" and not is_input):
        return None
    if name in ("enc-attention-qkv", "enc-MLP-GEMM-1", "enc-attention-dense", "enc-MLP-GEMM-2"):
        divides_columns = (operator.case.algorithm == 0) == (name in ("enc-attention-qkv", "enc-MLP-GEMM-1"))
        return replicated if is_input == divides_columns else by_columns
    others = {
        "enc-attention-score": by_columns if is_input else scores,
        "enc-attention-softmax": scores,
        "enc-attention-dropout": scores,
        "enc-attention-context": scores if is_input else by_columns,
        "enc-MLP-gelu": by_columns,
        "gpt-post-process": batch_first,
        "final-layernorm": replicated if is_input else batch_first,
    }
    return others.get(name, replicated)


def _change(before: PlacedOperator, after: PlacedOperator) -> _Change | None:
    """Return what brings the output of one operator into the form in which the next one wants it."""
    have, want = _placement(before, is_input=False), _placement(after, is_input=True)
    if have is None or want is None or have == want:
        return None
    split = [old // new for old, new in zip(have.parts, want.parts, strict=True) if old > new]
    grown = [new for old, new in zip(have.parts, want.parts, strict=True) if new > old]
    if have.copies > want.copies and grown:
        return _Change("split", "all_gather", have.copies // want.copies)
    if split and have.copies < want.copies:
        return _Change("all_gather", "split", split[0])
    if split and grown:
        return _Change("all_to_all", "all_to_all", split[0])
    raise ConfigurationError(f"no single collective brings the output of {before.name} to {after.name}: {have}, {want}")


class _AcesoStage:
    """The measurements of one stage's operators."""

    def __init__(
        self, profile: AcesoProfile, family: str, stage: AcesoStage, from_other_node: bool, to_other_node: bool
    ) -> None:
        self._profile = profile
        self._family = family
        self._operators = stage.operators
        self._costs = [profile.cost(one.name, one.case) for one in stage.operators]
        self._from_other_node = from_other_node
        self._to_other_node = to_other_node

    def times_ms(self) -> tuple[float, float, float, float, float]:
        """Return forward, backward, recomputed forward, incoming and outgoing messages of one microbatch."""
        redivided_forward_ms, redivided_backward_ms = self.redivided_ms()
        again = (cost.forward_us for operator, cost in self._both() if operator.is_recomputed)
        return (
            sum(cost.forward_us for cost in self._costs) / 1000,
            sum(cost.backward_us for cost in self._costs) / 1000,
            sum(again) / 1000,
            self._message_ms(self._costs[0].input_mib, between_nodes=self._from_other_node) + redivided_forward_ms,
            self.output_ms() + redivided_backward_ms,
        )

    def output_ms(self) -> float:
        """Return the time of the message to the next stage."""
        first, last = self._operators[0], self._operators[-1]
        # Aceso looks the last operator's output up with the tensor parallel size of the first one
        case = last.case._replace(tp=first.case.tp)
        output_mib = self._profile.cost(last.name, case).output_mib
        return self._message_ms(output_mib, between_nodes=self._to_other_node)

    def redivided_ms(self) -> tuple[float, float]:
        """Return what changes of the division of tensors inside the stage cost in the forward and in the backward."""
        if self._family == "t5":  # Aceso looks for none in its models
            return 0.0, 0.0
        forward_ms = backward_ms = 0.0
        for (before, _), (after, cost) in pairwise(self._both()):
            change = _change(before, after)
            if change is not None:
                forward_ms += self._collective_ms(change.forward, change.ranks, cost.input_mib)
                backward_ms += self._collective_ms(change.backward, change.ranks, cost.input_mib)
        return forward_ms, backward_ms

    def gradients_ms(self) -> float | None:
        """Return the time in which data parallel ranks add up the gradients; None if the profile does not tell it.

        In a ring each rank sends 2(n − 1)/n of the gradients.
        """
        total_ms = 0.0
        by_ranks: dict[int, float] = {}
        for operator, cost in self._both():
            if operator.dp > 1:
                by_ranks[operator.dp] = by_ranks.get(operator.dp, 0.0) + cost.weights_mib
        for ranks, mib in by_ranks.items():
            bandwidth = self._profile.ring_bandwidth(ranks)
            if bandwidth is None:
                return None
            total_ms += 2 * (ranks - 1) / ranks * mib / bandwidth
        return total_ms

    def data_parallel_sizes(self) -> set[int]:
        return {operator.dp for operator in self._operators if operator.dp > 1}

    def parameters_mib(self) -> float:
        return sum(cost.weights_mib for cost in self._costs)

    def allocated_mib(self, in_flight: int) -> float:
        """Return the states of the parameters, their gradients, and the activations of all microbatches in flight.

        On top come the activations of the largest group of operators that is recomputed together.
        """
        all_mib = self._costs[0].input_mib + sum(kept_mib(operator.name, cost) for operator, cost in self._both())
        all_mib -= self._dropped_mib()
        states = states_of_parameters(self._family)
        return states * self.parameters_mib() + in_flight * all_mib + max(self._recomputed_groups_mib(), default=0.0)

    def reserved_mib(self) -> float:
        """Return Aceso's bound for what the allocator keeps unused. Its last operator is not looked at."""
        workspaces = self._costs[:-1]
        forward_mib = max((cost.forward_reserved_mib for cost in workspaces), default=0.0)
        backward_mib = max((cost.backward_reserved_mib for cost in workspaces), default=0.0)
        return max(forward_mib + backward_mib, self.parameters_mib())

    def _both(self) -> Iterator[tuple[PlacedOperator, OperatorCost]]:
        return zip(self._operators, self._costs, strict=True)

    def _recomputed_pairs(self) -> Iterator[tuple[float, PlacedOperator, PlacedOperator, bool]]:
        """Yield what each operator keeps, itself, the next one, and whether both are recomputed."""
        for (operator, cost), (after, _) in pairwise(self._both()):
            yield kept_mib(operator.name, cost), operator, after, operator.is_recomputed and after.is_recomputed

    def _dropped_mib(self) -> float:
        """Return the activations that recomputation does without; the input of each part stays."""
        return sum(
            own_mib
            for own_mib, _, after, is_recomputed in self._recomputed_pairs()
            if is_recomputed and not begins_part(after.name)
        )

    def _recomputed_groups_mib(self) -> Iterator[float]:
        """Yield the activations of each group of operators that are recomputed together."""
        group_mib = 0.0
        pairs = list(self._recomputed_pairs())
        for position, (own_mib, _, after, is_recomputed) in enumerate(pairs):
            if is_recomputed:
                group_mib += own_mib
            if not is_recomputed or begins_part(after.name) or position == len(pairs) - 1:
                yield group_mib
                group_mib = 0.0

    def _collective_ms(self, operation: str, ranks: int, mib: float) -> float:
        return 0.0 if operation == "split" else self._profile.collective_ms(operation, ranks, mib)

    def _message_ms(self, mib: float, *, between_nodes: bool) -> float:
        return self._profile.message_ms(mib, between_nodes=between_nodes)


def states_of_parameters(family: str) -> int:
    """Return the size of parameters, their gradients and the optimizer's states, as a multiple of the parameters."""
    return 2 + _STATES_OF_OPTIMIZER[family]


def kept_mib(name: str, cost: OperatorCost) -> float:
    """Return what an operator keeps for its backward: tensors that it shares with its neighbours count once."""
    if name == "enc-attention-dropout":
        return 1.5 * cost.activations_mib
    is_shared = name in ("enc-attention-softmax", "bn1") or "-bn3" in name
    return 0.0 if is_shared or ("-downsample" in name and "0-0" not in name) else cost.activations_mib


def begins_part(name: str) -> bool:
    """Whether the input of an operator is kept where it is recomputed: of a layer, or of a block of a ResNet."""
    return name == "enc-1st-layernorm" or "-conv1" in name
