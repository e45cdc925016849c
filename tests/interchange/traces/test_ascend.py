"""Traces of torch_npu made by hand, in the shape that it writes: no categories, named processes and threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.summary import summarise
from commtrace.errors import ImportFileError
from commtrace.interchange.traces.kineto import KinetoOptions, import_kineto
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.interchange.traces.ascend_files import HOST, OVERLAP, Event, event, names, operation, task, two_ranks, write
from tests.interchange.traces.summarised_ranks import rank_of


def host(name: str, start: float, duration: float, category: str = "cpu_op") -> Event:
    return {**event(name, HOST, HOST, start, duration), "cat": category}


@pytest.mark.parametrize("process", ["Communication", "HCCL"])
def test_tasks_and_operations_divide_the_device_time(tmp_path: Path, process: str) -> None:
    """compute ####.##.....  operation ..######....  copies ...####.#... of 12 µs."""
    events = [
        *names(process),
        task("aclnnMatmul_MatMulV2", 0, 2),
        task("ReduceSum7", 1, 3, "MIX_AIV", stream=9),
        task("aclnnDropoutGenMaskV2_DSAGenBitMask", 5, 1, "DSA_SQE"),
        task("Cast", 6, 1, "AI_CPU"),
        task("EVENT_WAIT", 0, 12, "EVENT_WAIT_SQE"),  # these do nothing
        task("Notify Wait", 2, 6, "Notify Wait"),
        task("SDMA", 2, 6, "SDMA"),  # a part of the operation
        task("hcom_allReduce_AivKernel_868_0_1", 2, 6, "MIX_AIV"),
        task("KERNEL_AICPU", 2, 6, "KERNEL_AICPU"),
        operation("hcom_allReduce__868_0_1", 2, 6),
        operation("Reduce_Inline", 2, 6, tid=1),
        task("MEMCPY_ASYNC", 3, 4, "PCIE_DMA_SQE"),
        task("MEMCPY_ASYNC", 8, 2, "SDMA_SQE"),
        task("MEMSET_ASYNC", 11, 1, "SDMA_SQE"),
        event("Computing", OVERLAP, 0, 0, 12),
        host("aten::mm", 0, 12),
        host("Enqueue@Matmul", 0, 12, "enqueue"),
    ]
    import_kineto([write(tmp_path / "0", events)], tmp_path / "run")

    row = rank_of(tmp_path / "run")
    assert (row.wall_ns, row.part("compute")) == (12_000, 6_000)
    assert (row.part("exposed"), row.hidden_ns) == (2_000, 4_000)
    assert (row.part("memory"), row.part("idle")) == (3_000, 1_000)
    metadata = load_run(tmp_path / "run").any_metadata
    assert (metadata.backend, metadata.local_rank) == ("hccl", 3)


def test_tasks_of_older_chips_have_other_types(tmp_path: Path) -> None:
    events = [*names(), task("aclnnInplaceZero_ZerosLike", 0, 2, "Other"), task("EVENT_RECORD", 2, 9, "Other")]
    import_kineto([write(tmp_path / "0", events)], tmp_path / "run")

    assert rank_of(tmp_path / "run").part("compute") == rank_of(tmp_path / "run").wall_ns == 2_000


def test_ranks_meet_on_group_and_number(tmp_path: Path) -> None:
    import_kineto(two_ranks(tmp_path, rank_size=2), tmp_path / "run")

    summary = summarise(tmp_path / "run")
    assert [rank.wait_ns for rank in summary.ranks] == [80_000, 0]
    (row,) = summary.communication
    assert (row.operation, row.role, row.group_size, row.count) == ("all_reduce", "unknown", 2, 4)
    assert row.num_bytes == 16_000
    assert summary.awaited[0].activities[0].activity == "compute"
    assert examine(tmp_path / "run", now_ns=0).findings == ()


def test_groups_are_those_of_the_metadata_beside_the_trace(tmp_path: Path) -> None:
    import_kineto(two_ranks(tmp_path, metadata=True)[::-1], tmp_path / "run")

    summary = summarise(tmp_path / "run")
    assert [(row.role, row.group_size) for row in summary.communication] == [("tp", 2)]
    assert [rank.wait_ns for rank in summary.ranks] == [80_000, 0], "ranks are not those of the order of the files"


def test_waits_in_a_group_without_known_members_are_lower_bounds(tmp_path: Path) -> None:
    """Older versions neither name groups alike on all ranks nor tell their size."""
    files = []
    for rank in (0, 1):
        events = [
            *names("HCCL", f"Group {rank} Communication"),
            task("MatMul", 0, 100 + 40 * rank),
            operation("hcom_allReduce__868_0_1", 100 + 40 * rank, 100 - 40 * rank),
        ]
        files.append(write(tmp_path / str(rank), events, rank))
    import_kineto(files, tmp_path / "run")

    summary = summarise(tmp_path / "run")
    assert [rank.wait_ns for rank in summary.ranks] == [40_000, 0]
    assert "not every member of it was matched" in " ".join([summary.verdict, *summary.problems])


@pytest.mark.parametrize(
    ("name", "kind", "operation_name", "num_bytes"),
    [
        ("hcom_broadcast__868_0_1", schema.COLLECTIVE, "broadcast", 4_000),
        ("hcom_allGather__868_0_1", schema.COLLECTIVE, "all_gather", -1),  # of one rank's part
        ("hcom_reduceScatter_AicpuKernel_868_0_1", schema.COLLECTIVE, "reduce_scatter", -1),
        ("hcom_alltoallvc__868_0_1", schema.COLLECTIVE, "all_to_all", -1),
        ("hcom_batchSendRecv__868_0_1", schema.COLLECTIVE, "sends_and_receives", -1),
        ("hcom_send__868_0_1", schema.P2P, "send", 4_000),
        ("hcom_receive__868_0_1", schema.P2P, "recv", 4_000),
        ("AllGatherMatmul", schema.COLLECTIVE, "all_gather", -1),
    ],
)
def test_operations_of_hccl(tmp_path: Path, name: str, kind: int, operation_name: str, num_bytes: int) -> None:
    import_kineto([write(tmp_path / "0", [*names(), operation(name, 0, 5)])], tmp_path / "run")

    run = load_run(tmp_path / "run")
    spans = run.ranks[0].spans
    row = [*spans.kind].index(kind)
    assert (run.names[spans.name[row]], spans.bytes[row]) == (operation_name, num_bytes)


def test_steps_of_the_profiler(tmp_path: Path) -> None:
    events = [
        *names(),
        host("ProfilerStep#50", 0, 10),
        host("ProfilerStep#51", 10, 10),
        task("MatMul", 1, 2),
        task("MatMul", 11, 4),
    ]
    import_kineto([write(tmp_path / "0", events)], tmp_path / "run", KinetoOptions(profiler_steps=True))

    assert summarise(tmp_path / "run").run.steps.used == (50, 51)


def test_names_may_follow_their_events(tmp_path: Path) -> None:
    events = [task("MatMul", 0, 2), operation("hcom_allReduce__868_0_1", 2, 3), *names()]
    import_kineto([write(tmp_path / "0", events)], tmp_path / "run")

    row = rank_of(tmp_path / "run")
    assert (row.part("compute"), row.part("exposed")) == (2_000, 3_000)


@pytest.mark.parametrize(
    "damage",
    ["{", '{"parallel_group_info": 3}', '{"parallel_group_info": {"g": {"global_ranks": [0]}}}'],
)
def test_damaged_metadata_is_not_believed(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "0", [*names(), operation("hcom_allReduce__868_0_1", 0, 5)], 0)
    (path.parent.parent / "profiler_metadata.json").write_text(damage)
    import_kineto([path], tmp_path / "run")

    assert rank_of(tmp_path / "run").part("exposed") == 5_000


def test_a_trace_of_the_host_alone_gets_the_advice_for_its_device(tmp_path: Path) -> None:
    path = write(tmp_path / "0", [host("aten::mm", 0, 3), host("Enqueue@MatMul", 1, 1, "enqueue")])

    with pytest.raises(ImportFileError, match=r"ProfilerActivity\.NPU"):
        import_kineto([path], tmp_path / "run")
