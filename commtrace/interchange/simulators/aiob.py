"""AICB's compute file (AIOB): the times of a layer's parts, µs, from spans of modules without their stalls.

AICB adds up the sections of attention and MLP and takes the backward to be as long as the forward. Here the backward
is measured: it has a file of its own with the same sections, because AICB has no place for it in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.operations import is_kernel_trace
from commtrace.interchange.simulators.aicb_log import rank_of
from commtrace.trace import schema
from commtrace.trace.spans import Int64

_BACKWARD: Final = " backward"
_RECOMPUTE: Final = " recompute"
_ATTENTION: Final = ("attention", "attn")
_MLP: Final = ("mlp", "feed_forward", "ffn", "moe", "expert")
_HEAD: Final = ("output_layer", "lm_head")
_NS_PER_US: Final = 1000


@dataclass(frozen=True, slots=True)
class ComputeLane:
    """When the lane stalled, and for how long before each stall in all."""

    start: Int64
    total: Int64  # one more than starts: the last is behind all stalls

    @classmethod
    def of(cls, analysis: Analysis, rank: int) -> ComputeLane:
        """Return the lane of a rank in the steps that count."""
        spans = analysis.context.run.ranks[rank].spans
        stalled = analysis.partition.stalled_ns[rank].sum(axis=1)
        rows = np.flatnonzero(stalled)
        rows = rows[np.argsort(spans.start[rows], kind="stable")]
        return cls(spans.start[rows], np.concatenate([[0], np.cumsum(stalled[rows])]))

    def compute_ns(self, begin: Int64, end: Int64) -> Int64:
        """Return the length of intervals without the stalls that began inside, ns."""
        first, last = np.searchsorted(self.start, np.stack([begin, end]))
        return np.asarray(np.maximum(end - begin - (self.total[last] - self.total[first]), 0))


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """The samples of each section, ns; sections are AICB's."""

    steps: int
    forward: Mapping[str, Int64]
    backward: Mapping[str, Int64]


def compute_times(analysis: Analysis, rank: int) -> ComputeTimes:
    """Return the compute of the modules of a rank in the steps that count; empty if no modules were recorded.

    Raises:
        ConfigurationError: the rank was not recorded.
    """
    trace = rank_of(analysis.run, rank)
    spans, steps = trace.spans, analysis.steps.used
    lane = ComputeLane.of(analysis, rank)
    samples: dict[bool, dict[str, list[Int64]]] = {False: {}, True: {}}
    rows = np.flatnonzero((spans.kind == schema.MODULE) & np.isin(spans.step, steps))
    if len(rows) and not is_kernel_trace(spans):
        compute = lane.compute_ns(spans.start[rows], spans.end[rows])
        for code in np.unique(spans.name[rows]).tolist():
            name = analysis.run.names[code]
            section = section_of(name.removesuffix(_BACKWARD))
            if section and not name.endswith(_RECOMPUTE):
                of_way = samples[name.endswith(_BACKWARD)]
                of_way.setdefault(section, []).append(compute[spans.name[rows] == code])
    optimizer = (spans.kind == schema.OPTIMIZER) & np.isin(spans.step, steps)
    if samples[False] and optimizer.any():
        compute = lane.compute_ns(spans.start[optimizer], spans.end[optimizer])
        samples[False]["param_time"] = [compute]
    forward, backward = ({key: np.concatenate(times) for key, times in of_way.items()} for of_way in samples.values())
    return ComputeTimes(len(steps), forward, backward)


def section_of(module: str) -> str:
    """Return AICB's section for a module; empty for a part of another section, or one that it does not have."""
    parts = module.split(".")
    layer = next((position for position, part in enumerate(parts) if part.isdecimal()), -1)
    if layer < 0:
        return _section_outside(parts)
    if len(parts) != layer + 2:
        return ""
    name = parts[-1]
    if "norm" in name:
        return "layernorm2" if any(word in name for word in ("mlp", "post", "2")) else "layernorm"
    if any(word in name for word in _ATTENTION):
        return f"atten_{name}"
    return f"mlp_{name}" if any(word in name for word in _MLP) else ""


def _section_outside(parts: list[str]) -> str:
    name = parts[-1]
    if any("embed" in part for part in parts[:-1]):
        return ""
    if "embed" in name:
        return "Emb"
    if name in _HEAD:
        return "logit_time"
    return "layernorm_post" if "norm" in name else ""


def write_times(steps: int, times: Mapping[str, Int64], path: Path) -> None:
    """Write a compute file: most, least and mean of each section, µs."""
    path.write_text("".join(f"{line}\n" for line in _lines(steps, times)), encoding="utf-8")


def _lines(steps: int, times: Mapping[str, Int64]) -> Iterator[str]:
    yield f"train_iter:{steps}"
    for section, times_of_section in times.items():
        yield f"{section}:"
        for name, time in (
            ("max", times_of_section.max()),
            ("min", times_of_section.min()),
            ("avg", times_of_section.mean()),
        ):
            yield f"    time_gpu_{name}: {time / _NS_PER_US:.3f}"
