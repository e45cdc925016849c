"""The estimate of the analysis tool of Megatron-LM's issue 488 for its sample job, beside ours.

The tool was proposed in https://github.com/NVIDIA/Megatron-LM/issues/488 and pull request 482. Its numbers are widely
quoted; here they are computed by its own formulas, each with what is wrong in it. Its text says 24 layers, but every
number of it needs 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from commtrace.planning.layout import Layout
from commtrace.planning.memory import Memory
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan, make_plan
from commtrace.trace.json_values import JsonObject, fields_to_json

MODEL: Final = Model(
    layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=50_432, ffn=8 * 4096 // 3 // 64 * 64, gated=True
)
LAYOUT: Final = Layout(
    tp=2, pp=2, dp=4, microbatch=4, microbatches=32, distributed_optimizer=True, flash_attention=True
)

_WHOLE, _GPU, _ITERATION = "whole model", "fullest GPU", "one iteration"


class _SampleSizes(NamedTuple):
    """Elements of the model and on each GPU, by the formulas of the tool."""

    parameters: int
    gpu_parameters: int
    activations: int
    gpu_activations: int


@dataclass(frozen=True, slots=True)
class ComparedNumber:
    """A number of the tool beside ours."""

    of: str
    quantity: str
    unit: Literal["parameters", "bytes", "operations"]
    tool: int
    ours: int
    difference: str  # why ours is another; empty if it is not

    def to_json(self) -> JsonObject:
        return fields_to_json(self)


def _tool_sizes() -> _SampleSizes:
    h, s, n, f, v = MODEL.hidden, MODEL.sequence, MODEL.layers, MODEL.ffn, MODEL.vocabulary
    t, p, b = LAYOUT.tp, LAYOUT.pp, LAYOUT.microbatch
    return _SampleSizes(
        parameters=v * h + s * h + n * (7 * h + 4 * h * h + 3 * f * h + 2 * f),
        gpu_parameters=v * h // t + s * h + n // p * (7 * h + 4 * h * h // t + 3 * f * h // t + 2 * f),
        activations=n * s * b * (10 * h + 4 * f) + (3 * s * b * h + 9 * s * b * v) // 2,
        gpu_activations=p * (n // p * s * b * ((5 * h + 4 * f) // t + 5 * h) + 3 * s * b * h // 2),
    )


def sample_plan() -> Plan:
    """Return our plan of the tool's sample: 2 nodes of 8 GPUs."""
    return make_plan(MODEL, LAYOUT)


def compare(plan: Plan) -> tuple[ComparedNumber, ...]:
    """Return every number of the tool's sample beside that of ``plan``, which is :func:`sample_plan`."""
    return (*_compare_memory(plan), *_compare_communication(plan))


def _compare_memory(plan: Plan) -> Iterator[ComparedNumber]:
    tool = _tool_sizes()
    undivided = make_plan(MODEL, Layout(microbatch=LAYOUT.microbatch, flash_attention=True)).fullest.memory
    yield ComparedNumber(
        _WHOLE,
        "parameters",
        "parameters",
        tool.parameters,
        plan.parameters,
        "2h of each layer and the last norm are missing",
    )
    yield from _compare_states(
        _WHOLE, (2 * tool.parameters, 4 * tool.parameters, 12 * tool.parameters, 2 * tool.activations), undivided
    )
    yield ComparedNumber(
        _GPU,
        "parameters",
        "parameters",
        tool.gpu_parameters,
        plan.fullest.parameters,
        "as above, and biases are not divided by t",
    )
    sharded = 12 * tool.gpu_parameters // LAYOUT.dp
    yield from _compare_states(
        _GPU,
        (2 * tool.gpu_parameters, 4 * tool.gpu_parameters, sharded, 2 * tool.gpu_activations),
        plan.fullest.memory,
    )


def _compare_states(of: str, tool: tuple[int, int, int, int], memory: Memory) -> Iterator[ComparedNumber]:
    parameters, gradients, optimizer, activations = tool
    because = "follows from the parameters"
    kept = "tool: 10sbh + 4sbf elements a layer, 4.5 each logit; here: 9sbh + 3sbf, 2 each logit"
    yield ComparedNumber(of, "parameters", "bytes", parameters, memory.parameters_bytes, because)
    yield ComparedNumber(of, "gradients", "bytes", gradients, memory.gradients_bytes, because)
    yield ComparedNumber(of, "optimizer", "bytes", optimizer, memory.optimizer_bytes, because)
    yield ComparedNumber(of, "activations", "bytes", activations, memory.activations_bytes, kept)
    yield ComparedNumber(of, "total", "bytes", sum(tool), memory.peak_bytes, "the sum")


def _compare_communication(plan: Plan) -> Iterator[ComparedNumber]:
    """Yield operations and tensor bytes of all GPUs in an iteration, without the all-reduce of the embedding."""
    m, layers, world = LAYOUT.microbatches, MODEL.layers // LAYOUT.pp, LAYOUT.world_size
    hidden_bytes = 2 * MODEL.sequence * LAYOUT.microbatch * MODEL.hidden
    calls = {
        "pipeline": (world * m * 4, "a rank sends or receives 2 times a microbatch with p = 2, not 4 times"),
        "tensor": (world * 4 * layers * m, "embedding, output layer and cross entropy are missing"),
        "data": (2, "those of one GPU, where others are of all; the tied embedding has a bucket of its own"),
    }
    bytes_of_data = 8 * _tool_sizes().gpu_parameters
    num_bytes = {
        "pipeline": (calls["pipeline"][0] * hidden_bytes, "a message is counted at both ends, and each of them twice"),
        "tensor": (calls["tensor"][0] * hidden_bytes, "embedding, output layer and cross entropy are missing"),
        "data": (bytes_of_data, "that of one GPU; and parameters are gathered in 2 bytes, not 4"),
    }
    ours = {"pipeline": "pp", "tensor": "tp", "data": "dp-cp"}
    totals = {total.role: total for total in plan.role_totals()}
    received = sum(
        len(stage.ranks) * row.count for stage in plan.stages for row in stage.traffic if row.operation == "recv"
    )
    our_calls = {name: totals[role].calls + (received if role == "pp" else 0) for name, role in ours.items()}
    our_bytes = {name: totals[role].tensor_bytes for name, role in ours.items()}
    for name, (count, difference) in calls.items():
        yield ComparedNumber(_ITERATION, name, "operations", count, our_calls[name], difference)
    all_calls = sum(count for count, _ in calls.values())
    yield ComparedNumber(_ITERATION, "all", "operations", all_calls, sum(our_calls.values()), "the sum")
    for name, (count, difference) in num_bytes.items():
        yield ComparedNumber(_ITERATION, name, "bytes", count, our_bytes[name], difference)
    all_bytes = sum(count for count, _ in num_bytes.values())
    wire_bytes = sum(totals[role].wire_bytes for role in ours.values())
    yield ComparedNumber(
        _ITERATION,
        "all",
        "bytes",
        all_bytes,
        sum(our_bytes.values()),
        f"tensors, not bytes on the wire, which are {wire_bytes / (1 << 30):,.1f} GiB",
    )
