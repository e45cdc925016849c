"""The what-if analysis of a published trace, by the rules of its authors.

>>> trace = read_whatif_trace("trace-ST.parquet", "meta-ST.yaml")    # doctest: +SKIP
>>> analyse_whatif_trace(trace).slowdown                             # doctest: +SKIP
1.1787
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from commtrace.analysis.replay.peers import grouped_median
from commtrace.analysis.replay.whatif import Experiment, WhatIf, analyse_experiment
from commtrace.analysis.whatif_traces.graph import build_graph
from commtrace.analysis.whatif_traces.trace import WhatIfTrace
from commtrace.trace.spans import Int64

_MERGED: Final = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
"""Both sides of a transfer count as one operation."""

COMPUTE: Final = ("forward-compute", "backward-compute", "optimizer", "gc")
"""Operations that are idealised by the mean; all others are communication."""


def analyse_whatif_trace(trace: WhatIfTrace) -> WhatIf:
    """Return the what-if analysis of such a trace, by the rules of its authors."""
    graph = build_graph(trace)
    durations = np.where(graph.is_communication, graph.transfer_ns, trace.duration_ns)
    types, kind = _types(trace)
    operations, operation_of_type = np.unique([_MERGED.get(name, name) for name in types], return_inverse=True)

    return analyse_experiment(
        Experiment(
            replay=graph.step_times,
            measured_ns=durations,
            ideal_ns=_ideal(types, kind, durations),
            operations=operations.tolist(),
            operation=operation_of_type.reshape(-1).astype(np.int64)[kind],
            stage=trace.stage,
            dp_rank=trace.dp_rank,
            worker=trace.rank,
            steps=trace.steps.tolist(),
            measured_step_ns=_measured_steps(trace),
        )
    )


def _types(trace: WhatIfTrace) -> tuple[list[str], Int64]:
    """Return the types of operations, and of each row its position among them; all copies of an operation are of
    one.
    """
    types, kind = np.unique(trace.optype[:: trace.copies], return_inverse=True)
    return types.tolist(), np.repeat(kind.reshape(-1).astype(np.int64), trace.copies)


def _ideal(types: Sequence[str], kind: Int64, durations: Int64) -> Int64:
    """Mean (compute) or median (communication) over all rows of the same type."""
    mean = np.bincount(kind, durations.astype(np.float64)) / np.bincount(kind)
    median = grouped_median(kind, durations, len(types))
    return np.asarray(np.rint(np.where(np.isin(types, COMPUTE), mean, median)), np.int64)[kind]


def _measured_steps(trace: WhatIfTrace) -> Int64:
    ends = np.zeros(len(trace.steps), np.int64)
    np.maximum.at(ends, trace.step, trace.end_ns)
    return ends
