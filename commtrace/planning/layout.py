"""How a model is divided between ranks, and what each of them keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import lcm
from typing import Final, Literal, NamedTuple, TypeAlias

from commtrace.errors import ConfigurationError
from commtrace.planning.model import Model, check_size, padded
from commtrace.trace.inputs import MOST_RANKS
from commtrace.trace.schedule import check_sizes, default_schedule

_MOST_ELEMENTS: Final = 2**50
"""Of a bucket: more than all memory of a cluster."""


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """DeepSpeed's ``zero_optimization`` as far as communication depends on it. Sizes are elements.

    Raises:
        ConfigurationError: a size is negative.
    """

    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = True
    overlap_comm: bool = False  # without it, ZeRO 1 reduces in the order of the model
    check_overflow: bool = True

    def __post_init__(self) -> None:
        for name in (
            "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
            "stage3_max_live_parameters", "stage3_max_reuse_distance",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a number of elements, 0 or above")
            check_size(name, getattr(self, name), _MOST_ELEMENTS)


Group: TypeAlias = tuple[int, ...]
"""The global ranks of a process group."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes, the batch, and what is sharded, recomputed and fused.

    Raises:
        ConfigurationError: the sizes contradict one another.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0  # tensor parallel size of experts; 0: tp
    chunks: int = 1  # model chunks of each pipeline rank: the virtual pipeline size
    first_stage_layers: int = 0  # 0: as many as the other stages
    last_stage_layers: int = 0
    microbatch: int = 1  # sequences
    microbatches: int = 1  # of each rank in an iteration
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    zero_stage: int | None = None  # DeepSpeed's 0 to 3; None: not DeepSpeed
    zero: ZeroOptions = field(default_factory=ZeroOptions)  # DeepSpeed's
    recompute: Literal["none", "selective", "full"] = "none"
    flash_attention: bool = False
    fused_cross_entropy: bool = False
    cp_communication: Literal["ring", "all_to_all", "other"] = "ring"
    expert_dispatcher: Literal["all_to_all", "other"] = "all_to_all"
    overlap_gradients: bool = False  # gradients are reduced during the last backward, in buckets
    bucket_elements: int = 0  # largest bucket; 0: max(40,000,000, 1,000,000 · dp)
    parameter_bytes: int = 2
    gradient_bytes: int = 0  # 0: 4 in Megatron-LM, 2 in DeepSpeed
    optimizer_bytes: int = 12  # of each parameter: an fp32 copy and Adam's two moments
    clip_gradients: bool = True  # by their norm over all ranks

    def __post_init__(self) -> None:
        if not self.expert_tp:
            object.__setattr__(self, "expert_tp", self.tp)
        if not self.gradient_bytes:
            object.__setattr__(self, "gradient_bytes", 4 if self.zero_stage is None else 2)
        sizes = ("tp", "pp", "dp", "cp", "ep", "expert_tp", "chunks", "microbatch", "microbatches")
        for name in (*sizes, "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a number above 0")
            check_size(name, getattr(self, name), MOST_RANKS)
        check_size("tp · cp · dp · pp", self.world_size, MOST_RANKS)
        check_size("bucket_elements", self.bucket_elements, _MOST_ELEMENTS)
        if (self.tp * self.cp * self.dp) % (self.expert_tp * self.ep):
            raise ConfigurationError(
                f"tp · cp · dp ({self.tp * self.cp * self.dp}) is no multiple of expert_tp · ep "
                f"({self.expert_tp * self.ep}): lower ep, or use more ranks"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigurationError("sequence_parallel divides activations over tp, which is 1: leave it out")
        if self.chunks > 1 and self.pp == 1:
            raise ConfigurationError(f"{self.chunks} chunks need a pipeline: raise pp above 1, or leave chunks out")
        check_sizes(self.schedule, self.pp, self.microbatches, self.chunks)
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise ConfigurationError(f"zero_stage is {self.zero_stage}: DeepSpeed has 0, 1, 2 and 3")
        if self.zero_stage is not None and self.distributed_optimizer:
            raise ConfigurationError(
                "distributed_optimizer is Megatron-LM's and zero_stage DeepSpeed's: give one of them"
            )

    def check(self, model: Model) -> None:
        """Raise ConfigurationError if ``model`` cannot be divided in this way."""
        self._check_stages(model)
        if model.query_groups < self.tp <= model.heads and self.tp % model.query_groups == 0:
            raise ConfigurationError(
                f"query_groups ({model.query_groups}) is below tp ({self.tp}): Megatron-core then gathers queries, "
                "keys and values of the tp ranks in each layer, which a plan does not count yet. Lower tp to "
                f"{model.query_groups} to plan it"
            )
        for name in ("heads", "query_groups", "vocabulary", "ffn"):
            if getattr(model, name) % self.tp:
                unit = lcm(self.tp, 128) if name == "vocabulary" else self.tp
                whole = padded(getattr(model, name), unit)
                raise ConfigurationError(
                    f"{name} ({getattr(model, name)}) is no multiple of tp ({self.tp}): "
                    f"lower tp, or change {name} to {whole}"
                )
        if self.cp > 1 and self.cp_communication == "all_to_all":
            self._check_heads_of_cp_ranks(model)
        if model.sequence % (self.cp * (self.tp if self.sequence_parallel else 1)):
            raise ConfigurationError(
                f"sequence ({model.sequence}) cannot be divided over cp ({self.cp}) and, with sequence_parallel, tp "
                f"({self.tp})"
            )
        if self.ep > 1 and model.experts % self.ep:
            raise ConfigurationError(f"{model.experts} experts cannot be divided over ep = {self.ep}: lower ep")
        if self.ep > 1 and not model.experts:
            raise ConfigurationError(f"ep is {self.ep}, but the model has no experts: leave ep out, or give experts")
        if model.experts and model.expert_ffn % self.expert_tp:
            raise ConfigurationError(f"expert_ffn ({model.expert_ffn}) is no multiple of expert_tp ({self.expert_tp})")
        if model.experts and self.tp > 1 and not self.sequence_parallel and self.zero_stage is None:
            # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_layer.py#L380
            raise ConfigurationError(
                f"Megatron-core does not train experts with tp {self.tp} without sequence parallelism: set "
                "sequence_parallel (--sequence-parallel), or lower tp to 1"
            )

    def _check_heads_of_cp_ranks(self, model: Model) -> None:
        """Raise ConfigurationError if all-to-all cannot divide the heads that tp has left to each rank."""
        for name in ("heads", "query_groups"):
            if getattr(model, name) % (self.tp * self.cp):
                raise ConfigurationError(
                    f"{name} ({getattr(model, name)}) is no multiple of tp · cp ({self.tp * self.cp}): all-to-all "
                    "context parallelism divides the heads of a tp rank between cp ranks. Lower tp or cp, or take the "
                    "ring (cp_communication: ring, --cp-comm-type p2p)"
                )

    def _check_stages(self, model: Model) -> None:
        sizes = self.stage_sizes(model)
        if sum(sizes) == model.layers and min(sizes) > 0 and not any(size % self.chunks for size in sizes):
            return
        if not (self.first_stage_layers or self.last_stage_layers):
            parts = self.pp * self.chunks
            raise ConfigurationError(
                f"{model.layers} layers cannot be divided evenly into pp · chunks = {parts} parts: change pp or chunks"
            )
        raise ConfigurationError(
            f"{model.layers} layers cannot be divided into {self.pp} stages of {self.chunks} chunks with "
            f"first_stage_layers {self.first_stage_layers} and last_stage_layers {self.last_stage_layers}: the other "
            "stages need equal shares of what is left"
        )

    @property
    def schedule(self) -> str:
        """Return the printed name of the schedule that Megatron-core runs: 1F1B, or its interleaved form."""
        return default_schedule(self.chunks)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank holds, or shares, the whole model."""
        return self.world_size == self.dp

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def data_copies(self) -> int:
        """The ranks that hold the same dense parameters, and so share the distributed optimizer: dp · cp."""
        return self.dp * self.cp

    @property
    def expert_data_copies(self) -> int:
        """The ranks that hold the same expert parameters."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks of a pipeline stage; the pipeline is the outermost dimension."""
        size = self.world_size // self.pp
        return range(stage * size, (stage + 1) * size)

    def stage_sizes(self, model: Model) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        given = {stage: layers for stage, layers in ends.items() if layers}
        num_not_given = max(self.pp - len(given), 1)
        each = (model.layers - sum(given.values())) // num_not_given
        return tuple(given.get(stage, each) for stage in range(self.pp))

    def stage_layers(self, model: Model, stage: int) -> tuple[range, ...]:
        """Return the layers of each chunk of a stage."""
        sizes = [size // self.chunks for size in self.stage_sizes(model)]
        begins = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(self.chunks)]
        return tuple(range(begin, begin + sizes[stage]) for begin in begins)

    def tp_group(self, rank: int) -> Group:
        begin = rank // self.tp * self.tp
        return tuple(range(begin, begin + self.tp))

    def cp_group(self, rank: int) -> Group:
        return self._along(rank, self.tp, self.cp)

    def dp_cp_group(self, rank: int) -> Group:
        return self._along(rank, self.tp, self.cp * self.dp)

    def pp_group(self, rank: int) -> Group:
        return self._along(rank, self.tp * self.cp * self.dp, self.pp)

    def ep_group(self, rank: int) -> Group:
        return self._along(rank, self.expert_tp, self.ep)

    def expert_tp_group(self, rank: int) -> Group:
        return self._along(rank, 1, self.expert_tp)

    def tp_ep_group(self, rank: int) -> Group:
        return self._along(rank, 1, self.expert_tp * self.ep)

    def expert_dp_group(self, rank: int) -> Group:
        return self._along(rank, self.expert_tp * self.ep, self.expert_data_copies)

    def embedding_group(self, rank: int) -> Group:
        """Return the ranks of the first and the last stage that share a tied embedding."""
        pipeline = self.pp_group(rank)
        return (pipeline[0], pipeline[-1])

    def mp_group(self, rank: int) -> Group:
        """Return the ranks that hold one copy of the model: those of tp and pp."""
        first = rank % (self.world_size // self.pp) // self.tp * self.tp
        pipelines = (self.pp_group(first + offset) for offset in range(self.tp))
        return tuple(sorted(member for pipeline in pipelines for member in pipeline))

    def world_group(self, rank: int) -> Group:
        return tuple(range(self.world_size))

    def _along(self, rank: int, stride: int, size: int) -> Group:
        """Return the ranks that differ from ``rank`` only in the dimension of this stride and size.

        Megatron-core's order is tp-cp-ep-dp-pp, the first the innermost; experts have an order of their own.
        """
        begin = rank - rank // stride % size * stride
        return tuple(range(begin, begin + stride * size, stride))


class PlannedJob(NamedTuple):
    """A model in a layout, as a file, a command or a run describes it."""

    model: Model
    layout: Layout
    notes: tuple[str, ...] = ()  # what is not understood, or taken for granted, in sentences
    ignored: tuple[str, ...] = ()  # arguments of a command that are not known here


def groups(layout: Layout, role: str) -> Iterator[Group]:
    """Yield every process group of a role of Megatron-core, in the order of its lowest ranks."""
    find = {
        "tp": layout.tp_group,
        "pp": layout.pp_group,
        "embedding": layout.embedding_group,
        "cp": layout.cp_group,
        "dp-cp": layout.dp_cp_group,
        "ep": layout.ep_group,
        "expert-tp": layout.expert_tp_group,
        "tp-ep": layout.tp_ep_group,
        "expert-dp": layout.expert_dp_group,
        "dp": layout.dp_cp_group,
        "mp": layout.mp_group,
        "dist-opt": layout.world_group,
    }[role]
    yield from dict.fromkeys(find(rank) for rank in range(layout.world_size))
