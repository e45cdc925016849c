"""SimAI's workload file: a header, the number of rows, and a row of 12 fields per layer.

Forward and input-gradient communication is of the tensor-parallel group, weight-gradient communication of the
data-parallel one; ``_EP`` and ``_DP_EP`` name the expert-parallel groups. https://github.com/aliyun/SimAI
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

NONE: Final = "NONE"

OPERATIONS: Final[Mapping[str, str]] = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCESCATTER",
    "all_to_all": "ALLTOALL",
}
"""SimAI's name of a collective. Others it does not simulate."""


class WorkloadPart(NamedTuple):
    """Compute, and the communication after it."""

    compute_ns: int = 0
    operation: str = NONE
    num_bytes: int = 0  # of the full tensor


NO_PART: Final = WorkloadPart()


@dataclass(frozen=True, slots=True)
class WorkloadLayer:
    """A row: SimAI runs all forward parts in order, then the two gradients of each row from the last to the first."""

    name: str
    forward: WorkloadPart = NO_PART
    input_gradient: WorkloadPart = NO_PART
    weight_gradient: WorkloadPart = NO_PART

    def line(self) -> str:
        parts = (self.forward, self.input_gradient, self.weight_gradient)
        # −1: depends on no layer; 100: SimAI's time to update the weights, which AICB always writes
        fields = (self.name, -1, *(field for part in parts for field in part), 100)
        return "\t".join(map(str, fields))


@dataclass(frozen=True, slots=True)
class Workload:
    """One iteration of one rank."""

    tp: int
    ep: int
    pp: int
    chunks: int  # in the field vpp, where AICB writes the number of layers
    microbatches: int
    world_size: int
    pipeline_bytes: int  # of one message between stages; 0 without a pipeline
    layers: tuple[WorkloadLayer, ...]

    def text(self) -> str:
        """Return the file."""
        head = (
            f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {self.tp} ep: {self.ep} pp: {self.pp} "
            f"vpp: {self.chunks} ga: {self.microbatches} all_gpus: {self.world_size} "
            f"checkpoints: 0 checkpoint_initiates: 0 pp_comm: {self.pipeline_bytes}"
        )
        return "\n".join([head, str(len(self.layers)), *(layer.line() for layer in self.layers), ""])

    def write(self, path: Path) -> None:
        path.write_text(self.text(), encoding="utf-8")
