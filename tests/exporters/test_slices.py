from __future__ import annotations

from commtrace.analysis.timeline import RankBoxes, Timeline
from commtrace.exporters.slices import CounterSample, RankTracks, Slice, Track, Words, arrow_of, layers, processes
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, p2p, span, stall


def a_slice(start: int, end: int) -> Slice:
    boxes = RankBoxes(rank_index=0, start=start, end=end, work={}, stalls={}, host={}, communication={})
    return Slice(start, end, "step", {}, 0, 0, boxes)


def spread(*bounds: tuple[int, int]) -> list[list[tuple[int, int]]]:
    track = Track("pp", [a_slice(start, end) for start, end in bounds])
    return [[(one.start, one.end) for one in layer] for layer in track.layers()]


def exported(run: Run) -> tuple[list[RankTracks], Words]:
    timeline = Timeline.of_recording(run)
    outline = timeline.outline()
    return processes(outline, map(timeline.step, timeline.steps)), Words(outline)


def a_message() -> Run:
    """Rank 0 sends from 22 to 30; rank 1 has waited for it since 10."""
    pipeline = group("pp", 0, 1)
    receive = p2p("recv", pipeline, 0, 0, 10, 30, id=1, step=0, microbatch=2, chunk=0, stage=1)
    send = p2p("send", pipeline, 1, 0, 22, 30, id=1, step=0, microbatch=2, chunk=0, stage=0)
    forward = span("forward", 5, 22, step=0, microbatch=2, chunk=0, stage=0)
    return make_run(
        {
            0: [span("step", 0, 40, step=0), forward, send],
            1: [span("step", 0, 40, step=0), receive, stall(receive, 10, 30)],
        },
        [pipeline],
        coordinates=lambda rank: {"pp": rank, "dp": 0},
    )


def test_slices_that_nest_share_a_layer() -> None:
    assert spread((0, 10), (0, 4), (1, 2), (4, 10), (10, 12)) == [[(0, 10), (0, 4), (1, 2), (4, 10), (10, 12)]]


def test_slices_that_cross_do_not() -> None:
    assert spread((0, 5), (3, 8), (4, 6), (8, 9)) == [[(0, 5), (8, 9)], [(3, 8), (4, 6)]]


def test_a_slice_of_no_length_nests() -> None:
    assert spread((0, 5), (5, 5), (2, 2)) == [[(0, 5), (2, 2), (5, 5)]]


def test_a_rank_is_a_process_with_its_tracks_in_order() -> None:
    ranks, _ = exported(a_message())

    assert [rank.name for rank in ranks] == ["node0 / rank 0 / pp0 dp0", "node0 / rank 1 / pp1 dp0"]
    assert [track.name for track in ranks[0].tracks] == ["step", "schedule", "pp · 0, 1"]
    assert [track.name for track in ranks[1].tracks] == ["step", "stalls", "pp · 0, 1"]


def test_slices_are_named_and_described() -> None:
    ranks, words = exported(a_message())

    described = [(words.name(one), words.category(one)) for track in ranks[0].tracks for one in track.slices]
    send = ranks[0].tracks[2].slices[0]

    assert described == [("step 0", "step"), ("forward 2", "forward"), ("send", "communication")]
    assert words.arguments(send) == {
        "step": 0,
        "microbatch": 2,
        "chunk": 0,
        "stage": 0,
        "operation": "send",
        "role": "pp",
        "group": "pp · 0, 1",
        "members": "0, 1",
        "seq": 0,
        "bytes": 1024,
        "peer": 1,
        "wait_ns": 0,
        "transfer_ns": 8,
        "dtype": "float32",
        "async": "no",
        "timing": "host",
    }


def test_a_stall_says_what_it_waited_for() -> None:
    ranks, words = exported(a_message())

    stalls = next(track for track in ranks[1].tracks if track.name == "stalls").slices

    assert [words.name(one) for one in stalls] == ["bubble", "transfer pp"]
    assert words.arguments(stalls[0])["operation"] == "recv"
    assert words.arguments(stalls[0])["peer"] == 0


def test_the_arrow_ends_where_the_send_had_come() -> None:
    ranks, words = exported(a_message())

    ends = [
        (one.start, arrow)
        for rank in ranks
        for track in rank.tracks
        for one in track.slices
        if (arrow := arrow_of(one, words))
    ]

    assert [(start, arrow.is_source) for start, arrow in ends] == [(22, True), (22, False)]
    assert len({arrow.number for _, arrow in ends}) == 1


def test_sends_come_first_so_that_arrows_begin_before_they_end() -> None:
    ranks, words = exported(a_message())

    order = [layer.name for layer in layers(ranks, words)]

    assert order[0] == "pp · 0, 1"
    assert words.operation(layers(ranks, words)[0].slices[0]) == "send"


def test_bytes_in_flight_rise_and_fall() -> None:
    replicas = group("dp", 0)
    rows = [
        collective("all_reduce", replicas, 0, 1, 5, id=1, step=0, bytes=100),
        collective("all_reduce", replicas, 1, 3, 6, id=2, step=0, bytes=10),
    ]
    ranks, _ = exported(make_run({0: [span("step", 0, 9, step=0), *rows]}, [replicas]))

    assert ranks[0].bytes_in_flight == [
        CounterSample(1, 100),
        CounterSample(3, 110),
        CounterSample(5, 10),
        CounterSample(6, 0),
    ]


def test_the_share_of_a_step_that_was_stalled_is_a_counter() -> None:
    ranks, _ = exported(a_message())

    assert [rank.stalled_percent for rank in ranks] == [[CounterSample(0, 0.0)], [CounterSample(0, 50.0)]]


def test_bounds_of_a_communication_are_described() -> None:
    pair = group("dp", 0, 1)
    rows = {
        rank: [
            span("step", 0, 99, step=0),
            collective("all_reduce", pair, 0, 5, 40, step=0, start_exact=False, end_exact=False),
        ]
        for rank in (0, 1)
    }
    ranks, words = exported(make_run(rows, [pair]))

    arguments = words.arguments(ranks[0].tracks[-1].slices[0])

    assert arguments["start"] == "lower bound: it started then or later"
    assert arguments["end"] == "upper bound: it ended then or earlier"
    assert (arguments["transfer_ns"], arguments["transfer"]) == (35, "upper bound")
    assert "wait_ns" not in arguments
