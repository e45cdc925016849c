"""What a rank tells Prometheus: every sample of a step that is known, and never too many of them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import generate_latest as text_format
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from commtrace.analysis.matching.stages import Flow
from commtrace.exporters.prometheus.metrics import MOST_OPERATIONS, RankCollector, StepCounters
from commtrace.live.monitoring.waits import Split
from commtrace.live.summary import LARGER, SIZES, DeviceMemory, MessageSummary, OperationSummary, trace_id
from commtrace.trace import schema
from commtrace.trace.hang_report import Activity, HangReport
from tests.exporters.prometheus.steps import SECOND, rank, summary
from tests.live.findings import slow_finding
from tests.trace.rows import mark

PROMTOOL = shutil.which("promtool")
MOST_SERIES = 400
OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
    "send", "recv",
)  # fmt: skip


def samples(collector: RankCollector) -> list[Sample]:
    """As Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    text = generate_latest(registry).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(collector: RankCollector, without: str = "commtrace_spans_dropped") -> dict[str, float]:
    found = {}
    for sample in samples(collector):
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        if not sample.name.startswith(without):
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_two_steps_are_added_up() -> None:
    live, totals = rank(), StepCounters()
    live.spans, live.overhead_ns = 40, SECOND // 8
    live.learn(
        mark("clock_anchor", {"monotonic_ns": 1_005, "realtime_ns": 1_700_000_000_000_003_000, "bracket_ns": 80})
    )
    totals.add(summary(6, duration_ns=SECOND // 5, counts={"tokens": 100.0}))
    totals.add(summary(7, counts={"tokens": 50.0}))

    exported = values(RankCollector(live, totals))

    bounds = (
        "0.0008887", "0.002866", "0.009243", "0.02981", "0.09614", "0.3101", "1.0", "3.225", "10.4", "33.55", "108.2",
        "348.9", "1125.0", "3629.0", "+Inf",
    )  # fmt: skip
    below = (0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2)
    assert exported == {
        **{
            f"commtrace_step_duration_seconds_bucket{{le={bound}}}": count
            for bound, count in zip(bounds, below, strict=True)
        },
        "commtrace_step_duration_seconds_count": 2,
        "commtrace_step_duration_seconds_sum": 2.2,
        "commtrace_compute_seconds_total{phase=forward}": 2,
        "commtrace_compute_seconds_total{phase=backward}": 0,
        "commtrace_bubble_seconds_total": 1,
        "commtrace_data_seconds_total": 0,
        "commtrace_checkpoint_seconds_total": 0,
        "commtrace_gc_seconds_total": 0,
        "commtrace_between_seconds_total": 0.0,
        "commtrace_other_seconds_total": 0.5,
        "commtrace_work_seconds_total": pytest.approx(2.2 - 0.5 - 1),
        "commtrace_tokens_total": 150,
        "commtrace_last_step": 7,
        "commtrace_last_step_timestamp_seconds": pytest.approx(1_700_000_012.000002),
        "commtrace_communication_operations_total{operation=all_reduce,role=dp}": 4,
        "commtrace_communication_operations_total{operation=recv,role=pp}": 8,
        "commtrace_communication_seconds_total{operation=all_reduce,role=dp}": 2,
        "commtrace_communication_seconds_total{operation=recv,role=pp}": 1,
        "commtrace_communication_bytes_total{operation=all_reduce,role=dp}": 16_000,
        "commtrace_communication_bytes_total{operation=recv,role=pp}": 800,
        "commtrace_exposed_seconds_total{operation=all_reduce,role=dp}": 0.5,
        "commtrace_exposed_seconds_total{operation=recv,role=pp}": 0,
        "commtrace_communication_overlap_ratio{operation=all_reduce,role=dp}": 0.75,
        "commtrace_communication_overlap_ratio{operation=recv,role=pp}": 0,
        "commtrace_communication_busbw_bytes_per_second{operation=all_reduce,role=dp}": 12_000,
        "commtrace_communication_busbw_bytes_per_second{operation=recv,role=pp}": 800,
        "commtrace_communication_baseline_ratio{operation=all_reduce,role=dp}": 0.4,
        "commtrace_message_operations_total{nodes=between,operation=all_reduce,up_to=64KiB}": 4,
        "commtrace_message_seconds_total{nodes=between,operation=all_reduce,up_to=64KiB}": 2,
        "commtrace_message_bus_bytes_total{nodes=between,operation=all_reduce,up_to=64KiB}": 24_000,
        "commtrace_spans_total": 40,
        "commtrace_exported_timestamp_seconds": pytest.approx(time.time(), abs=60),
        "commtrace_overhead_seconds_total": 0.125,
        "commtrace_host_memory_bytes": pytest.approx(2**33, abs=2**33 - 2**20),
        "commtrace_communications_in_flight": 0,
        "commtrace_hung": 0,
        "commtrace_world_size": 8,
        "commtrace_attempt": 0,
        f"commtrace_run_info{{attempt=0,directory={Path('run').absolute()},version=}}": 1,
        "commtrace_open_phase{phase=checkpoint}": 0,
        "commtrace_open_phase{phase=evaluation}": 0,
        "commtrace_clock_offset_seconds": pytest.approx(2e-6),
        "commtrace_clock_residual_seconds": pytest.approx(40e-9),
    }


def test_an_example_of_every_duration_leads_to_the_trace_of_its_step() -> None:
    totals = StepCounters()
    for step, seconds in ((1, 0.2), (2, 0.21), (3, 2.0), (4, 200.0)):
        totals.add(summary(step, duration_ns=int(seconds * SECOND)))

    examples = {
        sample.labels["le"]: sample.exemplar for sample in samples(RankCollector(rank(), totals)) if sample.exemplar
    }

    assert {bound: (example.labels, example.value) for bound, example in examples.items()} == {
        "0.3101": ({"trace_id": f"{trace_id('r1', 2):032x}"}, 0.21),
        "3.225": ({"trace_id": f"{trace_id('r1', 3):032x}"}, 2.0),
        "348.9": ({"trace_id": f"{trace_id('r1', 4):032x}"}, 200.0),
    }


def test_mfu_and_memory_are_there_where_they_are_known_and_absent_where_not() -> None:
    flops = {"model_flops": 989e12}
    known, unknown, without = StepCounters(), StepCounters(), StepCounters()
    known.add(summary(counts=flops, device=DeviceMemory("NVIDIA H200", 5_000, 3_000, 6_000, 8_000)))
    unknown.add(summary(counts=flops, device=DeviceMemory("Another GPU", 5_000, 3_000, 6_000, 8_000)))
    without.add(summary(counts=flops))

    exported = [values(RankCollector(rank(), totals)) for totals in (known, unknown, without)]

    assert [one.get("commtrace_mfu_ratio") for one in exported] == [0.5, None, None]
    for name, held in {"peak": 5_000, "allocated": 3_000, "reserved": 6_000, "reserved_peak": 8_000}.items():
        assert [one.get(f"commtrace_device_memory_{name}_bytes") for one in exported] == [held, held, None]
    resident = [one["commtrace_host_memory_bytes"] for one in exported]
    assert all(2**20 < held < 2**40 for held in resident)


def test_drops_of_every_kind_are_told_before_the_first_one() -> None:
    live = rank()
    live.dropped = {"stall": 7}

    exported = {
        sample.labels["kind"]: sample.value
        for sample in samples(RankCollector(live, StepCounters()))
        if sample.name == "commtrace_spans_dropped_total"
    }

    assert exported == {**dict.fromkeys(set(schema.KINDS) - {"kernel", "memory"}, 0), "stall": 7}


def test_every_sample_says_whose_it_is_where_that_is_wanted() -> None:
    totals = StepCounters()
    totals.add(summary())

    exported = samples(RankCollector(rank(), totals, identity=True))

    wanted = {"run_id": "r1", "rank": "3", "node": "alpha", "local_rank": "3", "tp": "1", "pp": "0", "dp": "1"}
    assert len(exported) > 40
    assert all(wanted.items() <= sample.labels.items() for sample in exported)


def test_before_the_first_step_there_is_no_last_step() -> None:
    exported = values(RankCollector(rank(), StepCounters()))

    assert "commtrace_last_step_timestamp_seconds" not in exported
    assert exported["commtrace_step_duration_seconds_count"] == 0


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(
            [("all_reduce", "tp"), ("all_gather", "tp"), ("reduce_scatter", "tp"), ("broadcast", "tp"),
             ("send", "pp"), ("recv", "pp"), ("all_reduce", "pp"), ("broadcast", "pp"),
             ("all_reduce", "dp"), ("all_gather", "dp"), ("reduce_scatter", "dp"), ("broadcast", "dp"),
             ("all_reduce", "cp"), ("all_gather", "cp"), ("send", "cp"), ("recv", "cp"),
             ("all_to_all", "ep"), ("all_gather", "ep"), ("reduce_scatter", "ep"), ("all_reduce", "ep"),
             ("reduce_scatter", "edp"), ("all_gather", "edp"), ("all_reduce", "edp"),
             ("all_reduce", "mp"), ("all_reduce", "embedding"), ("barrier", "world"), ("all_reduce", "world")],
            id="tp x pp x dp x cp x ep",
        ),
        pytest.param(list(itertools.product(OPERATIONS, [f"role{number}" for number in range(40)])), id="all there is"),
    ],
)  # fmt: skip
def test_a_rank_never_has_more_series_than_its_budget(pairs: list[tuple[str, str]]) -> None:
    totals = StepCounters()
    operations = tuple(OperationSummary(*pair, 1, 10, 100, 50, 50, 10.0, 100, 0, 50.0, 100) for pair in pairs)
    phases = dict.fromkeys(("forward", "backward", "recompute", "optimizer", "evaluation", "other"), 1)
    counts = {"tokens": 1.0, "samples": 1.0, "model_flops": 1e12}
    messages = tuple(
        MessageSummary(operation, nodes, size, 1, 100, 10.0)
        for operation, _ in pairs
        for nodes in ("within", "between")
        for size in (*SIZES, LARGER)
    )
    for step in range(20):
        totals.add(
            summary(
                step, compute_ns=phases, operations=operations, messages=messages, counts=counts,
                device=DeviceMemory("NVIDIA H200", 1, 1, 1, 1),
            )
        )  # fmt: skip

    live = rank()
    live.joins = True
    live.split = {pair: Split(1, 2) for pair in pairs}
    live.score = 1.2
    live.findings = tuple(map(slow_finding, range(20)))

    exported = samples(RankCollector(live, totals))

    of_baseline = [one for one in exported if one.name == "commtrace_communication_baseline_ratio"]
    assert len(exported) - len(of_baseline) <= MOST_SERIES
    between_stages = {("send", "pp"), ("recv", "pp")}.intersection(pairs)
    assert len(of_baseline) == min(len(pairs), MOST_OPERATIONS + 1) - len(between_stages)
    assert sum(one.value for one in exported if one.labels.get("part") == "wait") == pytest.approx(1e-9 * len(pairs))
    communications = [sample for sample in exported if sample.name == "commtrace_communication_operations_total"]
    assert sum(sample.value for sample in communications) == 20 * len(pairs)
    assert sum(one.value for one in exported if one.name == "commtrace_message_operations_total") == 20 * len(messages)
    folded = [sample for sample in communications if sample.labels["role"] == "other"]
    assert bool(folded) == (len(pairs) > MOST_OPERATIONS)


def test_known_waits_are_exported_beside_exposed_time() -> None:
    live, totals = rank(), StepCounters()
    totals.add(summary())
    live.split = {("all_reduce", "dp"): Split(150_000_000, 50_000_000)}
    exported = values(RankCollector(live, totals))
    split = {name: value for name, value in exported.items() if name.startswith("commtrace_exposed_split")}
    assert split == {
        "commtrace_exposed_split_seconds_total{operation=all_reduce,part=wait,role=dp}": 0.15,
        "commtrace_exposed_split_seconds_total{operation=all_reduce,part=transfer,role=dp}": 0.05,
    }
    assert exported["commtrace_exposed_seconds_total{operation=all_reduce,role=dp}"] == 0.25


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_names_and_units_are_what_prometheus_recommends() -> None:
    totals = StepCounters()
    counts = {"tokens": 1.0, "samples": 1.0, "model_flops": 1.0}
    totals.add(summary(counts=counts, device=DeviceMemory("NVIDIA H200", 1, 1, 1, 1)))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RankCollector(rank(), totals))
    command = [str(PROMTOOL), "check", "metrics"]
    checked = subprocess.run(command, input=text_format(registry), capture_output=True, timeout=60)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_stage_that_nobody_told_is_a_metric_until_the_monitor_knows_its_peers() -> None:
    live = rank()
    live.marks.topology["coordinates"] = {}
    assert "commtrace_unknown_stage" not in values(RankCollector(live, StepCounters()))
    live.flow = Flow(sender=0)
    assert values(RankCollector(live, StepCounters()))["commtrace_unknown_stage"] == 1
    assert "peers" not in live.identity()
    live.work_class = 3
    assert "commtrace_unknown_stage" not in values(RankCollector(live, StepCounters()))
    assert live.identity()["peers"] == "3"
    live.marks.topology["coordinates"] = {"pp": 1}
    assert {key: live.identity().get(key) for key in ("pp", "peers")} == {"pp": "1", "peers": None}


def test_the_rank_that_joins_tells_who_is_slow_and_every_rank_whether_it_hangs() -> None:
    live = rank()
    exported = values(RankCollector(live, StepCounters()))
    assert exported["commtrace_hung"] == 0
    assert not any(name.startswith(("commtrace_straggler", "commtrace_finding")) for name in exported)
    live.joins = True
    live.score = 1.25
    activity = Activity((0, -1, -1, -1), (), {}, (), ())
    live.hang = lambda: HangReport(0.0, 0, 1, live.metadata, (), {}, {}, activity, (), ())
    live.findings = tuple(map(slow_finding, range(20)))
    exported = values(RankCollector(live, StepCounters()))
    assert exported["commtrace_hung"] == 1
    assert exported["commtrace_finding_cost_seconds{cause=compute,finding_rank=2,kind=slow,place=ranks}"] == 0.012
    of_rank_2 = "{cause=compute,finding_rank=2,kind=slow,place=ranks}"
    assert exported[f"commtrace_finding_since_step{of_rank_2}"] == 30
    assert exported[f"commtrace_finding_since_timestamp_seconds{of_rank_2}"] == 5.0
    assert sum(name.startswith("commtrace_finding_cost") for name in exported) == 3
    assert exported["commtrace_straggler_score_ratio"] == 1.25


def test_launch_bound_time_is_there_where_it_is_known_and_absent_where_not() -> None:
    totals = StepCounters()
    totals.add(summary())
    assert not any("launch_bound" in name for name in values(RankCollector(rank(), totals)))

    totals.add(summary(1, launch_bound_ns={"forward": SECOND, "in_no_span": 0}))
    totals.add(summary(2, launch_bound_ns={"forward": SECOND, "in_no_span": SECOND // 2}))

    known = {name: value for name, value in values(RankCollector(rank(), totals)).items() if "launch_bound" in name}
    assert known == {
        "commtrace_launch_bound_seconds_total{phase=forward}": 2.0,
        "commtrace_launch_bound_seconds_total{phase=in_no_span}": 0.5,
    }
