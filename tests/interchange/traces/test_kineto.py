from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.communication.table import Communication, Detail, communication_table
from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from commtrace.errors import ConfigurationError, ImportFileError
from commtrace.findings.finding import NOT_JUDGED
from commtrace.interchange.traces.kineto import KinetoOptions, import_kineto
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.metadata import group_id
from tests.interchange.traces.kineto_files import NCCL, annotation, copy, kernel, nccl, write_trace
from tests.interchange.traces.summarised_ranks import rank_of


def communication_by_size(run: Path) -> list[Communication]:
    analysis = analyse(run)
    context = analysis.context
    return communication_table(
        context.run, context.matches, analysis.partition, context.roles, context.steps, Detail.SIZE
    )


def test_kernels_divide_the_device_time(tmp_path: Path) -> None:
    """compute ####..##......  communication ..######....  copies ...####.##.. of 12 µs."""
    trace = write_trace(
        tmp_path / "rank-0.json.gz",
        [
            kernel(100, 3),
            kernel(101, 3, stream=9),  # at the same time, on another stream
            nccl(102, 6),
            kernel(106, 1),
            copy(103, 6),
            copy(110, 2, "Memset (Device)", "gpu_memset"),
        ],
    )

    import_kineto([trace], tmp_path / "run")

    row = rank_of(tmp_path / "run")
    assert (row.wall_ns, row.part("compute")) == (12_000, 5_000)
    assert (row.part("exposed"), row.hidden_ns) == (3_000, 3_000)
    assert (row.part("memory"), row.part("idle")) == (3_000, 1_000)


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    events = [kernel(1712345678901234.567, 0.001), kernel(1712345678901236.001, 1.5)]
    text = json.dumps({"traceEvents": events, "baseTimeNanoseconds": 7})
    text = text.replace("1712345678901234.5", "1712345678901234.567").replace("901236.0,", "901236.001,")
    path = tmp_path / "rank-0.json"
    path.write_text(text)

    import_kineto([path], tmp_path / "run")

    spans = load_run(tmp_path / "run").ranks[0].spans
    assert spans.start.tolist() == [1_712_345_678_901_234_574, 1_712_345_678_901_234_574, 1_712_345_678_901_236_008]
    assert spans.end.tolist() == [1_712_345_678_901_237_508, 1_712_345_678_901_234_575, 1_712_345_678_901_237_508]


def test_ranks_meet_on_group_and_sequence_number(tmp_path: Path) -> None:
    """Rank 1's trace begins one collective later: order would pair the wrong ones."""
    arguments: dict[str, Any] = {
        "collective": "allreduce",
        "group": "0",
        "ranks": [0, 1],
        "description": "default_pg",
        "dtype": "Float",
    }
    files = [
        write_trace(
            tmp_path / "a.json",
            [nccl(0, 10, **arguments, seq=4, sent=250), nccl(20, 10, **arguments, seq=5, sent=250)],
            rank=0,
            world_size=2,
        ),
        write_trace(tmp_path / "b.json", [nccl(24, 6, **arguments, seq=5, sent=250)], rank=1, world_size=2),
    ]

    import_kineto(files, tmp_path / "run")

    analysis = analyse(tmp_path / "run")
    assert analysis.matches.ranks[0].complete.tolist() == [False, False, True]
    assert analysis.matches.ranks[0].wait_ns(analysis.run.ranks[0].spans).tolist() == [0, 0, 4_000]
    assert analysis.matches.ranks[0].last_rank[-1] == 1
    (row,) = summarise(tmp_path / "run").communication
    assert (row.role, row.operation, row.num_bytes) == ("world", "all_reduce", 3_000)


def test_without_numbers_the_order_inside_the_group_counts(tmp_path: Path) -> None:
    """Written in another order than they ran; the tensor-parallel group does not disturb the count of the other."""
    dp: dict[str, Any] = {
        "collective": "_allgather_base",
        "group": "1",
        "ranks": [0, 1],
        "description": "DATA_PARALLEL_GROUP",
    }
    tp: dict[str, Any] = {
        "collective": "allreduce",
        "group": "2",
        "ranks": [0],
        "description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    files = [
        write_trace(
            tmp_path / f"{rank}.json",
            [
                nccl(30 + rank, 5, **dp),
                *([nccl(15, 1, **tp, stream=21)] if rank == 0 else []),
                nccl(10 + rank, 5, **dp),
            ],
            rank=rank,
            world_size=2,
        )
        for rank in (0, 1)
    ]

    import_kineto(files, tmp_path / "run")

    run = load_run(tmp_path / "run")
    number = group_id([0, 1], 1)
    for trace in run.ranks.values():
        own = trace.spans.group == number
        assert trace.spans.seq[own].tolist() == [0, 1]
        assert trace.groups[number].role == "dp"
    assert run.ranks[0].groups[group_id([0], 2)].role == "tp"
    waits = [row.wait_ns for row in summarise(tmp_path / "run").ranks]
    assert waits == [2_000, 0]


def test_without_any_description_each_stream_is_a_group_of_all_ranks(tmp_path: Path) -> None:
    files = [
        write_trace(
            tmp_path / f"{rank}.json",
            [
                nccl(10, 20 + rank, stream=84),
                nccl(20 + rank, 5, "ncclKernel_SendRecv_RING(x)", stream=203),
                annotation("nccl:all_to_all", 2, 1),
            ],
            rank=rank,
            world_size=2,
        )
        for rank in (0, 1)
    ]

    import_kineto(files, tmp_path / "run")

    summary = summarise(tmp_path / "run")
    assert {(row.operation, row.group_size, row.unmatched) for row in summary.communication} == {
        ("all_reduce", 2, 0),
        ("all_to_all", 2, 0),
    }
    assert [(row.num_bytes, row.unsized, row.algbw_gbps) for row in summary.communication] == [
        (None, row.count, None) for row in summary.communication
    ]
    rows = communication_by_size(tmp_path / "run")
    assert {row.size for row in rows} == {None}, "unknown is no size"


@pytest.mark.parametrize("host", [[], ["nccl:coalesced"], ["nccl:send", "nccl:all_to_all"], ["nccl:all_reduce"]])
@pytest.mark.parametrize("is_described", [True, False])
def test_sends_and_receives_without_a_description_are_no_all_to_all(
    tmp_path: Path, host: list[str], is_described: bool
) -> None:
    described: dict[str, Any] = {}
    if is_described:
        described = {"collective": "allreduce", "group": "0", "ranks": [0, 1], "seq": 1}
    files = [
        write_trace(
            tmp_path / f"{rank}.json",
            [
                nccl(10, 5, "ncclDevKernel_SendRecv(x)"),
                nccl(20, 5, **described),
                *(annotation(name, 2, 1) for name in host),
            ],
            rank=rank,
            world_size=2,
        )
        for rank in (0, 1)
    ]

    import_kineto(files, tmp_path / "run")

    rows = {row.operation: row for row in summarise(tmp_path / "run").communication}
    assert set(rows) == {"all_reduce", "sends_and_receives"}
    assert rows["sends_and_receives"].unmatched == 2, "whom it waited for is not known"
    assert rows["all_reduce"].unmatched == 0


def test_a_kernel_without_description_takes_that_of_the_call_that_launched_it(tmp_path: Path) -> None:
    described = nccl(0, 1, collective="_reduce_scatter_base", group="3", ranks=[0, 1, 2, 3], dtype="BFloat16", sent=100)
    call = {**described, "cat": "cpu_op", "name": "record_param_comms"}
    call["args"] = {**described["args"], "External id": 77}
    trace = write_trace(tmp_path / "rank-0.json", [call, kernel(5, 5, NCCL, **{"External id": 77})], world_size=4)

    import_kineto([trace], tmp_path / "run")

    (row,) = summarise(tmp_path / "run").communication
    assert (row.operation, row.group_size, row.num_bytes) == ("reduce_scatter", 4, 200)


@pytest.mark.parametrize(
    ("ranks", "extra", "members"),
    [
        ("[0, 2, 4]", {}, (0, 2, 4)),
        ("[0, 1, ...]", {"Global rank start": 0, "Global rank stride": 2, "Group size": 3}, (0, 2, 4)),
        ("[0, 1, ...]", {"Group size": 8}, tuple(range(8))),
        ("[5, 6, ...]", {}, (5, 6, 7)),  # as the trace's own list of groups says
        ("", {}, (5, 6, 7)),
    ],
)
def test_members_of_a_group(tmp_path: Path, ranks: str, extra: dict[str, Any], members: tuple[int, ...]) -> None:
    configured = {"pg_config": [{"pg_name": "9", "ranks": [5, 6, 7]}]} if "Group size" not in extra else {}
    event = nccl(0, 1, group="9", ranks=ranks, **extra)
    trace = write_trace(tmp_path / "rank-0.json", [event], world_size=8, distributed=configured)

    import_kineto([trace], tmp_path / "run")

    (group,) = load_run(tmp_path / "run").ranks[0].groups.values()
    assert (group.ranks, group.id) == (members, group_id(members, 9))


@pytest.mark.parametrize(("splits", "self_bytes"), [("[]", -1), ("[10, 30]", 120), ("[10, ...]", -1)])
def test_an_uneven_all_to_all_keeps_a_part(tmp_path: Path, splits: str, self_bytes: int) -> None:
    arguments: dict[str, Any] = {"collective": "all_to_allv", "group": "0", "ranks": [0, 1], "In split size": splits}
    event = nccl(0, 1, **arguments, dtype="Float", sent=40)

    import_kineto([write_trace(tmp_path / "b.json", [event], rank=1, world_size=2)], tmp_path / "run")

    spans = load_run(tmp_path / "run").ranks[1].spans
    row = int((spans.kind == schema.COLLECTIVE).argmax())
    assert (spans.bytes[row], spans.self_bytes[row]) == (160, self_bytes)


def test_messages_are_matched_by_pair_and_order(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "group": "4",
        "ranks": [0, 1],
        "description": "PIPELINE_MODEL_PARALLEL_GROUP",
        "dtype": "Half",
        "sent": 8,
    }
    kernels = {
        0: [nccl(0, 3, collective="send", destination=1, seq=900, **arguments), kernel(9, 1)],
        1: [kernel(-1, 2), nccl(-1, 4, collective="recv", source=0, seq=901, received=8, **arguments)],
    }
    files = [
        write_trace(tmp_path / f"{rank}.json", events, rank=rank, world_size=2) for rank, events in kernels.items()
    ]

    import_kineto(files, tmp_path / "run")

    row = rank_of(tmp_path / "run", 1)
    assert (row.part("compute"), row.part("bubble"), row.part("exposed"), row.hidden_ns) == (2_000, 0, 2_000, 2_000)
    rows = summarise(tmp_path / "run").communication
    assert {(row.operation, row.unmatched, row.mismatched) for row in rows} == {
        ("recv", 0, 0),
        ("send", 0, 0),
    }


def test_kernels_with_other_names_communicate_if_the_pattern_says_so(tmp_path: Path) -> None:
    name = "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)"
    trace = write_trace(tmp_path / "rank-0.json", [kernel(0, 2), kernel(1, 3, name)], world_size=1)

    import_kineto([trace], tmp_path / "without")
    import_kineto([trace], tmp_path / "with", KinetoOptions(communication_pattern="deep_ep::"))

    assert rank_of(tmp_path / "without").part("compute") == 4_000
    assert any("--communication-pattern" in problem for problem in summarise(tmp_path / "without").problems)
    assert (rank_of(tmp_path / "with").part("compute"), rank_of(tmp_path / "with").part("exposed")) == (2_000, 2_000)
    assert [row.operation for row in summarise(tmp_path / "with").communication] == ["dispatch"]


def test_kernels_that_are_named_like_communication_are_pointed_out(tmp_path: Path) -> None:
    """They count as compute all the same: only the job's owner knows."""
    events = [
        kernel(0, 2, "hcom_allReduce_17"),
        kernel(1, 3, "void (anonymous namespace)::deep_ep_combine<8>(int)"),
        kernel(2, 2, "void dpsk::ep::internode::get_dispatch_layout<8>(long*)"),
        kernel(2, 2, "void step::update<8>(long*)"),
    ]
    trace = write_trace(tmp_path / "rank-0.json", events)

    import_kineto([trace], tmp_path / "run")

    assert rank_of(tmp_path / "run").part("compute") == 4_000
    assert summarise(tmp_path / "run").problems[0] == (
        "rank 0: hcom_allReduce_17, deep_ep_combine, get_dispatch_layout looks like communication but counts as "
        "compute. If it communicates, import again with --communication-pattern and a part of that name."
    )


@pytest.mark.parametrize("name", ["(anonymous namespace)::nccl_thing(int)", "(nccl)", "<nccl>"])
def test_any_name_of_a_communication_kernel_is_taken(tmp_path: Path, name: str) -> None:
    import_kineto([write_trace(tmp_path / "rank-0.json", [nccl(0, 2, name), kernel(1, 3)])], tmp_path / "run")

    assert rank_of(tmp_path / "run").part("exposed") == 1_000


def test_a_call_without_a_number_describes_no_kernel(tmp_path: Path) -> None:
    """Neither has an External id: nothing says that they belong together."""
    described = nccl(0, 1, collective="_reduce_scatter_base", group="3", ranks=[0, 1, 2, 3], dtype="BFloat16", sent=100)
    call = {**described, "cat": "cpu_op", "name": "record_param_comms"}
    trace = write_trace(tmp_path / "rank-0.json", [call, nccl(5, 5), kernel(6, 1)])

    import_kineto([trace], tmp_path / "run")

    (row,) = summarise(tmp_path / "run").communication
    assert (row.operation, row.role) == ("all_reduce", "world")


@pytest.mark.parametrize(
    "odd",
    [
        {"ts": None},
        {"ts": float("nan")},
        {"ts": "NaN"},
        {"ts": 1e30},
        {"dur": None},
        {"dur": -5},
        {"dur": float("inf")},
    ],
)
def test_device_events_without_a_time_are_left_out_and_counted(tmp_path: Path, odd: dict[str, Any]) -> None:
    """An event that began nobody knows when would stretch the step to the year 1970."""
    good = [kernel(1_000, 5), nccl(1_003, 7)]
    missing = {name: value for name, value in kernel(0, 1).items() if name not in odd}
    trace = write_trace(tmp_path / "rank-0.json", [*good, {**kernel(1_001, 1), **odd}, missing])

    import_kineto([trace], tmp_path / "run")

    row = rank_of(tmp_path / "run")
    assert (row.wall_ns, row.part("compute"), row.part("exposed")) == (10_000, 5_000, 5_000)
    assert any(
        "2 device events were left out: their start or duration" in text
        for text in summarise(tmp_path / "run").problems
    )


def test_a_trace_in_which_no_device_event_has_a_time_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank-0.json", [{**kernel(0, 1), "ts": None}])

    with pytest.raises(ImportFileError, match="none of its 1 device events has a readable start and duration"):
        import_kineto([trace], tmp_path / "run")


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0), (1, 1)], "the file holds devices 0, 1, shown as one rank"),
        ([(0, 0), (0, 40)], "the file holds the devices of 2 processes, shown as one rank"),
        ([(0, 0), (None, 0)], ""),
    ],
)
def test_several_devices_in_one_file_are_one_rank_and_said_to_be(
    tmp_path: Path, places: list[tuple[int | None, int]], words: str
) -> None:
    events = [{**kernel(10 * i, 15, device=device), "pid": pid} for i, (device, pid) in enumerate(places)]

    import_kineto([write_trace(tmp_path / "rank-0.json", [*events, nccl(30, 5)])], tmp_path / "run")

    assert rank_of(tmp_path / "run").part("compute") == 25_000
    said = [text for text in summarise(tmp_path / "run").problems if "shown as one rank" in text]
    assert (words in said[0]) if words else not said


def test_a_rank_that_no_job_has_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.json", [kernel(0, 1)], rank=10**12)

    with pytest.raises(ImportFileError, match=f"rank {10**12} in its distributedInfo is out of range"):
        import_kineto([trace], tmp_path / "run")


def test_a_process_outside_of_all_groups_tells_no_rank(tmp_path: Path) -> None:
    """torch.distributed calls it rank −1."""
    trace = write_trace(tmp_path / "rank-5.json", [kernel(0, 1)], rank=-1, world_size=-1)

    import_kineto([trace], tmp_path / "run")

    assert list(load_run(tmp_path / "run").ranks) == [5]


def test_profiler_steps_are_steps(tmp_path: Path) -> None:
    """What ran before the first step is in none; the last one lasts until the device is done."""
    trace = write_trace(
        tmp_path / "rank-0.json",
        [
            kernel(0, 1),
            annotation("ProfilerStep#4", 10, 10),
            annotation("ProfilerStep#5", 20, 8),
            kernel(12, 10),  # into the next step
            kernel(27, 5),
        ],
    )

    import_kineto([trace], tmp_path / "run", KinetoOptions(profiler_steps=True))

    partition = analyse(tmp_path / "run").partition
    assert partition.step.tolist() == [4, 5]
    assert partition.wall_ns.tolist() == [10_000, 12_000]
    assert partition.total("compute").tolist() == [8_000, 7_000]
    assert partition.total("idle").tolist() == [2_000, 5_000]


@pytest.mark.parametrize("category", ["Operator", "cpu_op", "user_annotation", "gpu_user_annotation", None])
def test_profiler_steps_may_have_any_category(tmp_path: Path, category: str | None) -> None:
    """torch 1.8 and 1.9 wrote them as operators."""
    steps = [{**annotation(f"ProfilerStep#{number}", 100 * number, 90), "cat": category} for number in (5, 6)]
    path = write_trace(tmp_path / "0.json", [kernel(510, 10), kernel(610, 10), *steps])

    import_kineto([path], tmp_path / "run", KinetoOptions(profiler_steps=True))

    assert summarise(tmp_path / "run").run.steps.used == (5, 6)


def test_steps_of_the_host_count_where_the_device_has_them_too(tmp_path: Path) -> None:
    events = [kernel(510, 10)]
    for category, shift in (("gpu_user_annotation", 50), ("Operator", 0), ("user_annotation", 1)):
        events += [{**annotation(f"ProfilerStep#{n}", 100 * n + shift, 90), "cat": category} for n in (5, 6)]

    import_kineto([write_trace(tmp_path / "0.json", events)], tmp_path / "run", KinetoOptions(profiler_steps=True))

    (trace,) = load_run(tmp_path / "run").ranks.values()
    steps = trace.spans.kind == schema.STEP
    assert trace.spans.step[steps].tolist() == [5, 6]
    assert np.diff(trace.spans.start[steps]).tolist() == [100_000]


def test_profiler_steps_that_are_not_there(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank-0.json", [kernel(0, 1)])

    with pytest.raises(ImportFileError, match="no ProfilerStep annotations"):
        import_kineto([trace], tmp_path / "run", KinetoOptions(profiler_steps=True))


def test_ranks_come_from_the_file_then_from_its_name_then_from_its_place(tmp_path: Path) -> None:
    files = [
        write_trace(tmp_path / "rank-9.json", [kernel(0, 1)], rank=2, world_size=4),
        write_trace(tmp_path / "rank-3.Jul_15.pt.trace.json.gz", [kernel(0, 1)], rank=None),
        write_trace(tmp_path / "other.json", [kernel(0, 1)], rank=None),
    ]

    with pytest.raises(ImportFileError, match="both of rank 2"):
        import_kineto(files, tmp_path / "run")
    import_kineto(files[:2], tmp_path / "run")
    import_kineto(files[2:], tmp_path / "single")

    assert list(load_run(tmp_path / "run").ranks) == [2, 3]
    assert list(load_run(tmp_path / "single").ranks) == [0]


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    devices = [{"id": 0, "name": "H100"}, {"id": 1, "name": "H100"}]
    files = [
        write_trace(tmp_path / f"{rank}.json", [kernel(0, 1)], rank=rank, world_size=4, deviceProperties=devices)
        for rank in range(4)
    ]

    import_kineto(files, tmp_path / "two")
    import_kineto(files, tmp_path / "four", KinetoOptions(ranks_per_host=4))

    two, four = load_run(tmp_path / "two"), load_run(tmp_path / "four")
    assert [trace.metadata.node for trace in two.ranks.values()] == ["host0", "host0", "host1", "host1"]
    assert {trace.metadata.node for trace in four.ranks.values()} == {"host0"}
    assert two.any_metadata.device == "H100"


@pytest.mark.parametrize("key", ["host_name", "hostname"])
def test_hosts_are_those_that_the_traces_name(tmp_path: Path, key: str) -> None:
    files = [
        write_trace(tmp_path / f"{rank}.json", [kernel(1, 2)], rank=rank, world_size=2, **{key: f"node{rank}"})
        for rank in (0, 1)
    ]

    imported = import_kineto(files, tmp_path / "run")

    assert [trace.metadata.node for trace in load_run(tmp_path / "run").ranks.values()] == ["node0", "node1"]
    assert imported.notes == ()


def test_hosts_that_are_a_guess_are_said_to_be_one(tmp_path: Path) -> None:
    files = [write_trace(tmp_path / f"{rank}.json", [kernel(1, 2)], rank=rank, world_size=2) for rank in (0, 1)]

    imported = import_kineto(files, tmp_path / "run")
    given = import_kineto(files, tmp_path / "given", KinetoOptions(ranks_per_host=2))

    assert "is a guess" in imported.notes[0]
    assert any("is a guess" in problem for problem in summarise(tmp_path / "run").problems)
    assert given.notes == ()


@pytest.mark.parametrize(
    ("categories", "advice"),
    [
        (["cpu_op", "mtia_ccp_events"], "events of the device (mtia_ccp_events) are not read"),
        (["cpu_op", "privateuse1_runtime"], "events of the device (privateuse1_runtime) are not read"),
        (["cpu_op", "xpu_runtime"], "ProfilerActivity.XPU"),
        (["cpu_op", "cuda_runtime"], "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"),
        (["cpu_op"], "a job on CPUs with `commtrace run`"),
    ],
)
def test_the_advice_for_a_trace_without_device_events_is_for_its_device(
    tmp_path: Path, categories: list[str], advice: str
) -> None:
    path = write_trace(tmp_path / "0.json", [{**annotation("aten::mm", 1, 2), "cat": name} for name in categories])

    with pytest.raises(ImportFileError, match=re.escape(advice)):
        import_kineto([path], tmp_path / "run")


def test_without_a_loss_none_is_named(tmp_path: Path) -> None:
    import_kineto([write_trace(tmp_path / "0.json", [kernel(1, 2)])], tmp_path / "run")

    assert [finding.kind for finding in summarise(tmp_path / "run").findings] == [NOT_JUDGED]


def test_a_rank_whose_kernels_take_longer_was_computing(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        events, at = [], 0
        for step in range(10):
            events += [kernel(at, 60 + 20 * rank), annotation(f"ProfilerStep#{step}", at, 99)]
            described: dict[str, Any] = {"group": "0", "ranks": [0, 1], "seq": step, "collective": "allreduce"}
            events.append(nccl(at + 60 + 20 * rank, 10 if rank else 30, **described))
            at += 100
        files.append(write_trace(tmp_path / f"{rank}.json", events, rank=rank, world_size=2))

    import_kineto(files, tmp_path / "run", KinetoOptions(profiler_steps=True))

    awaited = summarise(tmp_path / "run").awaited[0]
    assert (awaited.rank, [one.activity for one in awaited.activities]) == (1, ["compute"])


def test_a_rank_whose_host_launched_nothing_was_idle(tmp_path: Path) -> None:
    """Rank 1 computes for as long as rank 0 does, and copies; its device idles before both."""
    files = []
    for rank in (0, 1):
        events = []
        for step in range(10):
            late = 30 * rank
            described: dict[str, Any] = {"group": "0", "ranks": [0, 1], "seq": step, "collective": "allreduce"}
            begin = 100 * step
            events += [
                annotation(f"ProfilerStep#{step}", begin, 99),
                kernel(begin + late, 40),
                *([copy(begin + late + 40, 10)] if rank else []),
                nccl(begin + 40 + late + 10 * rank, 60 - late - 10 * rank, **described),
            ]
        files.append(write_trace(tmp_path / f"{rank}.json", events, rank=rank, world_size=2))

    import_kineto(files, tmp_path / "run", KinetoOptions(profiler_steps=True))

    awaited = summarise(tmp_path / "run").awaited[0]
    assert (awaited.rank, [one.activity for one in awaited.activities]) == (1, ["idle", "memory"])
    assert "idle, as its host launched nothing" in awaited.describe()


def test_a_trace_begins_amid_the_job_and_says_nothing_about_its_end(tmp_path: Path) -> None:
    """Its first collective has the number that it has in the job; kernels of graphs have none."""
    described: dict[str, Any] = {"group": "0", "ranks": [0], "collective": "allreduce"}
    events = [kernel(0, 5), nccl(5, 5, seq=812, **described), nccl(15, 5, seq=815, **described)]
    import_kineto([write_trace(tmp_path / "0.json", events)], tmp_path / "run")

    diagnosis = examine(tmp_path / "run", now_ns=0)
    text = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")]).stdout

    assert diagnosis.findings == ()
    assert [seen.ranges for seen in diagnosis.groups[0].collectives] == [((813, 814),)]
    assert diagnosis.run.last_written_ns is None, "its times count from its begin"
    assert "say nothing about their end" in text
    assert "1970" not in text


def test_a_trace_without_device_events_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank-0.json", [{**kernel(0, 1), "cat": "cpu_op"}])

    with pytest.raises(ImportFileError, match="no device events"):
        import_kineto([trace], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank-0.json", [kernel(0, 1)])
    import_kineto([trace], tmp_path / "run")

    with pytest.raises(ConfigurationError, match="holds a run already"):
        import_kineto([trace], tmp_path / "run")
    with pytest.raises(ConfigurationError, match="is a file"):
        import_kineto([trace], trace)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        KinetoOptions(communication_pattern="deep_ep(")


def test_memory_does_not_grow_with_the_events_that_are_not_kept(tmp_path: Path) -> None:
    filler = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 1, "args": {"text": "x" * 2_000}}
    trace = write_trace(tmp_path / "rank-0.json.gz", [kernel(0, 1), *[filler] * 20_000, kernel(2, 1)])

    tracemalloc.start()
    import_kineto([trace], tmp_path / "run")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 30_000_000, "the file is 41 MB when unpacked"


def test_every_reading_command_takes_the_run(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank-0.json", [kernel(0, 3), nccl(1, 4), copy(2, 9)])
    commands = [
        ["import", "kineto", str(trace), "-o", str(tmp_path / "run"), "--communication-pattern", "deep_ep"],
        ["summary", str(tmp_path / "run")],
        ["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")],
        ["export", str(tmp_path / "run"), "--format", "chrome", "-o", str(tmp_path / "trace.json")],
    ]

    kernels = [["straggler", str(tmp_path / "run")], ["pipeline", str(tmp_path / "run")]]
    results = [CliRunner().invoke(app, command) for command in commands]

    assert [result.exit_code for result in results] == [0, 0, 0, 0], [result.output for result in results]
    for command in kernels:
        result = CliRunner().invoke(app, command)
        assert "kernels" in result.output or "no pipeline" in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), command
    assert results[0].stdout == f"{tmp_path / 'run'}: 1 rank, 4 spans. Next: commtrace summary {tmp_path / 'run'}\n"
