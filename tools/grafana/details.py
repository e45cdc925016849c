"""The dashboards below the overview: a node, ranks, the grid of the job, its communication, commtrace itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tools.grafana.panels import (
    Column,
    Panel,
    Query,
    Row,
    lines,
    matrix,
    table,
)
from tools.grafana.queries import (
    NODE,
    NODE_COLUMN,
    OPERATION,
    PLACE,
    RANK,
    RANK_COLUMN,
    RANK_LABEL,
    RUN,
    SLOW,
    lines_by_operation,
    lines_by_rank,
    lines_of_ranks,
    link_to,
    per_step,
    step_parts,
    steps_rate,
)

_MOST_ROWS: Final = 32
"""Rows of a grid."""


def node() -> list[Row]:
    """Return the rows on the ranks of one node."""
    score = f"commtrace:straggler_score:ratio{{{NODE}}}"
    return [
        Row(
            [
                table(
                    "Ranks",
                    [
                        Query(score, "score"),
                        Query(f"commtrace:work_seconds:per_step{{{NODE}}}", "work"),
                        Query(f"commtrace:exposed:ratio{{{NODE}}}", "exposed"),
                        Query(f"commtrace_hung{{{NODE}}}", "hung"),
                        Query(f"time() - commtrace_last_step_timestamp_seconds{{{NODE}}}", "silence"),
                    ],
                    [
                        RANK_COLUMN,
                        Column("Value #A", "Score", "none", SLOW),
                        Column("Value #B", "Own work", "s"),
                        Column("Value #C", "Exposed", "percentunit"),
                        Column("Value #D", "Hangs", "none", ((1, "red"),)),
                        Column("Value #E", "Last step ago", "s", ((120, "yellow"), (600, "red"))),
                    ],
                    "The ranks of this node; a click leads to one. Good: no cell is coloured.",
                    joined_by="rank",
                ),
                lines(
                    "Straggler score", "none",
                    Query(score, "rank {{rank}}"),
                    text="Own work of each rank, as a multiple of what its peers need. One rank above the others "
                    "points to its device, all of them to the node. Good: close to 1, below the lines.",
                    from_zero=False, limits=SLOW, link=link_to("rank", "rank", RANK_LABEL),
                ),
            ],
            height=10,
        ),
        Row(
            [
                lines(
                    "Own work", "s",
                    Query(f"commtrace:node_work_seconds:mean{{{NODE}}}", "this node"),
                    Query(f"avg(commtrace:node_work_seconds:mean{{{RUN}}})", "all nodes"),
                    text="Time of a step without waiting for other ranks, mean over ranks. Good: this node lies on "
                    "the line of all nodes.", from_zero=False,
                ),
                lines(
                    "Where the step goes", "s", *step_parts(NODE, "avg"), stacked=True,
                    text="The parts of a step, mean over the node's ranks. Good: compute is by far the largest part.",
                ),
            ],
        ),
        Row(
            [
                lines_by_rank(
                    "Waiting for input", "s", per_step("commtrace_data_seconds_total", NODE),
                    "Time of a step in which a rank waits for its input. Good: close to 0 on all ranks.",
                ),
                lines_by_rank(
                    "Peak device memory", "bytes", f"commtrace_device_memory_peak_bytes{{{NODE}}}",
                    "The most that torch's allocator has held on each device. Good: alike on ranks of a stage, and "
                    "below the memory of the device.",
                ),
                lines_by_rank(
                    "Communications in flight", "none", f"commtrace_communications_in_flight{{{NODE}}}",
                    "Communications that were already under way at the last look: what a hung rank hangs in. Good: 0, "
                    "or it changes.",
                ),
            ],
        ),
        Row(
            [
                _of_gpus(
                    "Tensor cores active", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
                    "Share of cycles in which the tensor cores worked; waiting in a kernel of NCCL does not count as "
                    "work. Good: it stays where it was when the run was tuned, alike on all GPUs.",
                ),
                _of_gpus(
                    "Occupancy", "DCGM_FI_PROF_SM_OCCUPANCY",
                    "Resident warps as a share of what fits on the multiprocessors. Good: alike on all GPUs.",
                ),
            ],
            title="GPUs, by dcgm-exporter where it runs",
        ),
    ]  # fmt: skip


def _of_gpus(title: str, series: str, text: str) -> Panel:
    """Return a series of dcgm-exporter on the node's GPUs, for the time in which the chosen run trains there.

    Its GPU_UTIL is left out: that some kernel runs says nothing of how much of the GPU works.
    """
    hosts = f'label_replace(commtrace_last_step{{{NODE}}}, "Hostname", "$1", "node", "(.*)")'
    query = f'max by (gpu) ({series}{{Hostname=~"$node"}} and on (Hostname) {hosts})'
    return lines(title, "percentunit", Query(query, "GPU {{gpu}}"), text=text, most=1)


def rank() -> list[Row]:
    """Return the rows on one rank, or some."""
    phases = per_step("commtrace_compute_seconds_total", RANK, "phase")
    launch_bound = per_step("commtrace_launch_bound_seconds_total", RANK, "phase")
    return [
        Row(
            [
                table(
                    "Place", [Query(f"commtrace:straggler_score:ratio{{{RANK}}}", "score")],
                    [*PLACE, Column("Value", "Score", "none", SLOW)],
                    "Where the rank is in the job; a click on the node leads to its other ranks. Good: the score is "
                    "not coloured.",
                ),
                lines(
                    "Straggler score", "none",
                    Query(f"commtrace:straggler_score:ratio{{{RANK}}}", "rank {{rank}}"),
                    text="Own work, as a multiple of what the ranks of its stage need. Good: close to 1, below the "
                    "lines.",
                    from_zero=False, limits=SLOW,
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Step time", "s",
                    Query(
                        f"rate(commtrace_step_duration_seconds_sum{{{RANK}}}[$__rate_interval]) / "
                        f"({steps_rate(RANK)})", "rank {{rank}}",
                    ),
                    text="Mean duration of a step. Good: it stays level.", from_zero=False,
                ),
                lines(
                    "Where the step goes", "s", *step_parts(RANK, "avg"), stacked=True,
                    text="The parts of a step, mean over the ranks shown. Good: compute is by far the largest part.",
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Compute by phase", "s", Query(f"avg by (phase) ({phases})", "{{phase}}"), stacked=True,
                    text="Time that a step computes, by phase. Good: alike on all ranks of a stage.",
                ),
                lines(
                    "Launch-bound", "s", Query(f"avg by (phase) ({launch_bound})", "{{phase}}"), stacked=True,
                    text="Time of a step for which the device waited for its host, at most; it is contained in the "
                    "other parts. Good: close to 0.",
                ),
                lines(
                    "Exposed by operation", "s",
                    Query(
                        f"avg by ({OPERATION}) ({per_step('commtrace_exposed_seconds_total', RANK, OPERATION)})",
                        "{{operation}} {{role}}",
                    ),
                    text="Time of a step in which the rank stalls for communication; messages of the pipeline are in "
                    "the bubble. Good: small compared with the step.", stacked=True,
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Own work", "s",
                    Query(f"commtrace:work_seconds:per_step{{{RANK}}}", "rank {{rank}}"),
                    Query(
                        f"commtrace:work_seconds:typical{{{RUN}}} "
                        f"and on (run_id, pp, peers) commtrace_last_step{{{RANK}}}",
                        "typical of stage {{pp}}",
                    ),
                    text="Time of a step without waiting for other ranks, and what is typical of the stage. Good: the "
                    "two lines lie on each other.", from_zero=False,
                ),
                lines(
                    "Memory", "bytes",
                    *(
                        Query(f"commtrace_{name}_bytes{{{RANK}}}", f"{legend}, rank {{{{rank}}}}")
                        for name, legend in (
                            ("device_memory_allocated", "tensors"), ("device_memory_peak", "tensors, peak"),
                            ("device_memory_reserved", "reserved"), ("device_memory_reserved_peak", "reserved, peak"),
                            ("host_memory", "host"),
                        )
                    ),
                    text="What torch's allocator holds on the device, and the process on its host. Good: level after "
                    "the first steps, with reserved memory below that of the device.",
                ),
            ],
        ),
    ]  # fmt: skip


def grid() -> list[Row]:
    """Return the rows that show the run by its parallel dimensions, and by node."""
    text = (
        "One cell per data-parallel replica (down) and pipeline stage (across), with the highest value of its ranks. "
        f"Shown are the {_MOST_ROWS} replicas with the slowest ranks. Good: all cells of a column are alike."
    )
    of_nodes = (
        f"One cell per node (down) and local rank (across). Shown are the {_MOST_ROWS} nodes with the slowest ranks. "
        "Good: all cells are green."
    )

    def cells(title: str, unit: str, series: str, limits: Sequence[tuple[float, str]] = ()) -> Panel:
        worst = f"topk({_MOST_ROWS}, max by (dp) (commtrace:straggler_score:ratio{{{RUN}}}))"
        query = f"(max by (dp, pp) ({series}{{{RUN}}}) and on (dp) {worst})"
        return matrix(title, unit, query, "dp", "pp", text, limits)

    worst_nodes = f"topk({_MOST_ROWS}, commtrace:node_straggler_score:max{{{RUN}}})"
    return [
        Row(
            [
                cells("Straggler score", "none", "commtrace:straggler_score:ratio", SLOW),
                cells("Own work per step", "s", "commtrace:work_seconds:per_step"),
            ],
            height=12,
        ),
        Row(
            [
                cells("Bubble", "percentunit", "commtrace:bubble:ratio"),
                cells("Exposed communication", "percentunit", "commtrace:exposed:ratio"),
            ],
            height=12,
        ),
        Row(
            [
                matrix(
                    "Straggler score by node", "none",
                    f"(max by (node, local_rank) (commtrace:straggler_score:ratio{{{RUN}}}) "
                    f"and on (node) {worst_nodes})",
                    "node", "local_rank", of_nodes, SLOW,
                ),
            ],
            height=16,
        ),
    ]  # fmt: skip


def communication() -> list[Row]:
    """Return the rows on communication by operation, role, size and place."""
    sizes = "{{operation}} {{nodes}}, up to {{up_to}}"
    return [
        Row(
            [
                lines(
                    "Bus bandwidth by size", "Bps", Query(f"commtrace:message_busbw:mean{{{RUN}}}", sizes),
                    text="Effective, as nccl-tests defines it, within and between nodes; waiting for others lowers "
                    "it. Good: it grows with the size and stays level.",
                ),
                lines(
                    "Duration by size", "s", Query(f"commtrace:message_seconds:mean{{{RUN}}}", sizes),
                    text="Mean time for which a call is in flight. Good: it stays level.",
                ),
            ],
            title="By size, within and between nodes",
            height=10,
        ),
        Row(
            [
                lines(
                    "Time in flight within and between nodes", "s",
                    Query(f"sum by (nodes) (commtrace:message_seconds:per_step{{{RUN}}})", "{{nodes}}"), stacked=True,
                    text="Time of a step for which calls are in flight, summed over calls, mean over ranks. Good: the "
                    "network between nodes has the smaller part.",
                ),
                lines(
                    "Bus bandwidth within and between nodes", "Bps",
                    Query(
                        "sum by (nodes) (commtrace:message_busbw:mean"
                        f"{{{RUN}}} * commtrace:message_seconds:per_step{{{RUN}}}) "
                        f"/ sum by (nodes) (commtrace:message_seconds:per_step{{{RUN}}})", "{{nodes}}",
                    ),
                    text="Effective, mean over the time in flight: NVLink compared with the network. Good: both stay "
                    "level.",
                ),
            ],
        ),
        Row(
            [
                lines_by_operation(
                    "Bus bandwidth", "Bps", "commtrace:communication_busbw:mean",
                    "Effective, of the last step, mean over ranks; waiting for others lowers it. Good: it stays level.",
                ),
                lines_by_operation(
                    "Waiting for the last rank", "percentunit", "commtrace:exposed_wait:ratio",
                    "Share of the exposed time in which a call waits for its last rank, of the calls that the monitor "
                    "compares. High means a slow rank; low with little bandwidth means the network. Good: low.",
                ),
                lines_by_operation(
                    "Share of the baseline", "percentunit", "commtrace:communication_baseline:max",
                    "Time at the measured baseline by time in flight, of the last step, on the rank that waits least: "
                    "at least so much of the network is reached. Messages between pipeline stages are left out: they "
                    "wait for work. Empty without COMMTRACE_BASELINE_FILE. Good: above 50 %.",
                ),
            ],
            title="By operation and role",
        ),
        Row(
            [
                lines_by_operation(
                    "Time in flight", "s", "commtrace:communication_seconds:per_step",
                    "Time of a step for which calls are in flight, summed over calls. Good: it stays level.",
                ),
                lines_by_operation(
                    "Exposed", "s", "commtrace:exposed_seconds:per_step",
                    "Time of a step in which ranks stall for communication; messages of the pipeline are in the "
                    "bubble. Good: small compared with the step.", stacked=True,
                ),
            ],
        ),
        Row(
            [
                lines_by_operation(
                    "Bytes per second", "Bps", "commtrace:communication_bytes:rate",
                    "Bytes of the full tensors, of all ranks. Good: it stays level.",
                ),
                lines_by_operation(
                    "Overlap", "percentunit", "commtrace:communication_overlap:mean",
                    "Share of the time in flight in which no rank stalls for the call. Good: high.", most=1,
                ),
                lines_by_operation(
                    "Calls per second", "cps", "commtrace:communication_operations:rate",
                    "Calls of all ranks. Good: it stays level.",
                ),
            ],
        ),
    ]  # fmt: skip


def health() -> list[Row]:
    """Return the rows that say whether the other numbers can be trusted."""
    silence = f"time() - commtrace_last_step_timestamp_seconds{{{RUN}}}"
    drops = f"sum by (kind) (rate(commtrace_spans_dropped_total{{{RUN}}}[$__rate_interval]))"
    return [
        Row(
            [
                lines(
                    "Since the last step", "s",
                    Query(f"max({silence})", "longest"), Query(f"min({silence})", "shortest"),
                    text="Time since a rank has ended a step, the longest and the shortest of all ranks; it grows "
                    "while the run makes no progress. Good: less than a few steps.",
                    limits=((120, "yellow"), (600, "red")),
                ),
                table(
                    "Ranks that wait",
                    [Query(f"topk(10, commtrace_communications_in_flight{{{RUN}}} > 0)", "in flight")],
                    [RANK_COLUMN, NODE_COLUMN, Column("Value", "Communications in flight", "none")],
                    "The ten ranks with the most communications that were already under way at the last look: what a "
                    "hung rank hangs in. Good: the table is empty, or changes.",
                ),
            ],
        ),
        Row(
            [
                lines(
                    "Dropped spans", "cps", Query(drops, "{{kind}}"),
                    text="Spans that were not recorded; above 0 the other numbers are too small. Good: 0.",
                ),
                lines(
                    "Spans", "cps",
                    Query(f"sum(rate(commtrace_spans_total{{{RUN}}}[$__rate_interval]))", "all ranks"),
                    text="Spans that are recorded, of all ranks. Good: it stays level.",
                ),
            ],
        ),
        Row(
            [
                lines_of_ranks(
                    "Overhead", "percentunit", f"rate(commtrace_overhead_seconds_total{{{RUN}}}[$__rate_interval])",
                    "Share of one CPU core that commtrace's own thread takes. Good: a few per cent.",
                ),
                lines_of_ranks(
                    "Clock residual", "s", f"commtrace_clock_residual_seconds{{{RUN}}}",
                    "Error with which the monotonic clock is tied to the wall clock. Good: below a millisecond.",
                ),
                lines_of_ranks(
                    "Clock offset", "s", f"abs(commtrace_clock_offset_seconds{{{RUN}}})",
                    "How far the wall clock was moved since the recording began. Good: close to 0.",
                ),
            ],
        ),
    ]  # fmt: skip
