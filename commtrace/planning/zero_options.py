"""The options of DeepSpeed's ZeRO on which communication depends."""

from __future__ import annotations

from dataclasses import dataclass

from commtrace.errors import ConfigurationError


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
