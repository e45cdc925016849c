from __future__ import annotations

from commtrace.analysis.chain import analyse
from commtrace.analysis.communication.bandwidth_by_size import BandwidthBySize, SizeBin, bandwidth_by_size
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span

PAIR = group("dp", 0, 1)


def measured(run: Run, residual_ns: int = 0) -> BandwidthBySize:
    analysis = analyse(run)
    return bandwidth_by_size(analysis.context, analysis.partition, residual_ns)


def reduces(sizes: list[int], transfers: list[int]) -> list[Row]:
    """All-reduces of these bytes and ns, 1,000 ns apart, in one step."""
    calls = [
        collective("all_reduce", PAIR, seq, 1_000 * seq, 1_000 * seq + transfer, bytes=size, step=0)
        for seq, (size, transfer) in enumerate(zip(sizes, transfers, strict=True))
    ]
    return [span("step", 0, 10_000, step=0), *calls]


def test_calls_of_one_power_of_two_share_a_bin() -> None:
    rows = reduces([1_024, 1_536, 2_048], [512, 512, 256])
    found = measured(make_run({0: rows, 1: rows}, [PAIR]))

    small, large = (SizeBin("dp", "all_reduce", 2, 1, power, True, False) for power in (10, 11))
    assert {key: (len(own.busbw_gbps), own.num_bytes) for key, own in found.bins.items()} == {
        small: (4, 2 * 1_024 + 2 * 1_536),
        large: (2, 2 * 2_048),
    }
    assert found.bins[small].busbw_gbps.maximum == 3.0
    assert found.bins[small].busbw_gbps.median() == 2.5
    assert found.bins[large].busbw_gbps.maximum == 8.0


def test_waiting_is_no_part_of_the_time() -> None:
    late = [span("step", 0, 10_000, step=0), collective("all_reduce", PAIR, 0, 400, 500, bytes=1_000, step=0)]
    early = [span("step", 0, 10_000, step=0), collective("all_reduce", PAIR, 0, 0, 500, bytes=1_000, step=0)]
    (own,) = measured(make_run({0: early, 1: late}, [PAIR])).bins.values()

    assert own.busbw_gbps.median() == 10.0


def test_calls_that_were_not_matched_are_apart_for_they_hold_waits() -> None:
    alone = make_run({0: reduces([1_000], [500])}, [PAIR], world_size=2)
    ((key, own),) = measured(alone).bins.items()

    assert not key.is_matched
    assert own.busbw_gbps.median() == 2.0


def test_calls_of_bounds_are_apart_from_those_of_exact_times() -> None:
    rows = reduces([1_024, 1_024], [512, 256])
    rows[2]["end_exact"] = False
    found = measured(make_run({0: rows, 1: rows}, [PAIR]))

    assert {key.is_bound: own.busbw_gbps.median() for key, own in found.bins.items()} == {False: 2.0, True: 4.0}


def test_calls_quicker_than_the_clocks_error_between_nodes_are_left_out() -> None:
    rows = reduces([1_024, 1_024], [512, 100])
    run = make_run({0: rows, 1: rows}, [PAIR], nodes={0: "a", 1: "b"})
    found = measured(run, residual_ns=200)

    assert [len(own.busbw_gbps) for own in found.bins.values()] == [2]
    assert found.uncertain == 2


def test_parts_of_a_run_add_up() -> None:
    rows = reduces([1_024, 2_048], [512, 256])
    found = measured(make_run({0: rows, 1: rows}, [PAIR]))
    both = found + found

    assert [len(own.busbw_gbps) for own in both.bins.values()] == [4, 4]
