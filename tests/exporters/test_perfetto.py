from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.timeline import Timeline
from commtrace.errors import ConfigurationError
from commtrace.exporters import perfetto
from commtrace.trace.run import Run
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob


@pytest.fixture
def protocol() -> Any:
    return pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs the perfetto package")


def a_job(start_ns: int = 10**15) -> Run:
    return PipelineJob(
        stages=2, microbatches=3, data_parallel=2, transfer_ns=100_001, all_reduce_ns=500_000, steps=2,
        start_ns=start_ns,
    ).run()  # fmt: skip


def exported(protocol: Any, run: Run, directory: Path) -> Any:
    timeline = Timeline.of_recording(run)
    output = directory / "trace.pftrace"
    perfetto.write(timeline.outline(), map(timeline.step, timeline.steps), output)
    return protocol.Trace.FromString(output.read_bytes())


def strings(trace: Any, field: str, text: str = "name") -> dict[int, Any]:
    """The interned strings of a field by number."""
    return {one.iid: getattr(one, text) for packet in trace.packet for one in getattr(packet.interned_data, field)}


def descriptors(trace: Any) -> dict[int, Any]:
    return {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }


def test_a_rank_is_a_process_in_its_place(protocol: Any, tmp_path: Path) -> None:
    tracks = descriptors(exported(protocol, a_job(), tmp_path))

    processes = [track for track in tracks.values() if track.HasField("process")]

    assert [(track.process.pid, track.name, track.sibling_order_rank) for track in processes] == [
        (1, "node0 / rank 0 / pp0 dp0", 0),
        (2, "node0 / rank 1 / pp0 dp1", 1),
        (3, "node0 / rank 2 / pp1 dp0", 2),
        (4, "node0 / rank 3 / pp1 dp1", 3),
    ]
    assert tracks[0].process_ordering == protocol.TrackDescriptor.PROCESS_ORDERING_EXPLICIT


def test_the_tracks_of_a_rank_are_in_order(protocol: Any, tmp_path: Path) -> None:
    tracks = descriptors(exported(protocol, a_job(), tmp_path))

    process = next(uuid for uuid, track in tracks.items() if track.process.pid == 4)
    timeline = next(uuid for uuid, track in tracks.items() if track.parent_uuid == process)
    children = [track for track in tracks.values() if track.parent_uuid == timeline]

    assert tracks[timeline].child_ordering == protocol.TrackDescriptor.EXPLICIT
    assert [track.name for track in sorted(children, key=lambda track: track.sibling_order_rank)] == [
        "step",
        "schedule",
        "stalls",
        "pp · 1, 3",
        "pp · 1, 3",
        "dp · 2, 3",
        "mp · 0–3",
        "bytes in flight",
        "stalled, % of the step",
    ]


def test_every_slice_that_begins_ends_and_the_innermost_ends_first(protocol: Any, tmp_path: Path) -> None:
    trace = exported(protocol, a_job(), tmp_path)
    open_slices: dict[int, list[str]] = defaultdict(list)
    last: dict[int, int] = {}
    names = strings(trace, "event_names")

    for packet in trace.packet:
        event = packet.track_event
        if event.type == protocol.TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append(names[event.name_iid])
        elif event.type == protocol.TrackEvent.TYPE_SLICE_END:
            open_slices[event.track_uuid].pop()
        if packet.HasField("track_event"):
            assert packet.timestamp >= last.get(event.track_uuid, 0)
            last[event.track_uuid] = packet.timestamp

    assert not any(open_slices.values())


def test_both_ends_of_a_message_share_a_flow_and_a_collective_a_correlation(protocol: Any, tmp_path: Path) -> None:
    trace = exported(protocol, a_job(), tmp_path)
    events = [packet.track_event for packet in trace.packet]
    names = strings(trace, "event_names")

    begun = [flow for event in events for flow in event.flow_ids]
    ended = [flow for event in events for flow in event.terminating_flow_ids]
    correlated = defaultdict[int, int](int)
    for event in events:
        if names.get(event.name_iid) == "all_reduce":
            correlated[event.correlation_id] += 1

    assert sorted(begun) == sorted(ended)
    assert len(begun) == len(set(begun)) == 2 * 2 * 2 * 3  # steps × replicas × (activation, gradient) × microbatches
    assert sorted(correlated.values()) == [2, 2, 2, 2, 4, 4]  # per step: two dp groups of two, one mp group of four


def test_slices_carry_what_is_known_about_them(protocol: Any, tmp_path: Path) -> None:
    trace = exported(protocol, a_job(), tmp_path)
    names, keys = strings(trace, "event_names"), strings(trace, "debug_annotation_names")
    categories, values = (
        strings(trace, "event_categories"),
        strings(trace, "debug_annotation_string_values", "str"),
    )

    send = next(packet.track_event for packet in trace.packet if names.get(packet.track_event.name_iid) == "send")
    annotations = {
        keys[one.name_iid]: values[one.string_value_iid].decode() if one.string_value_iid else one.int_value
        for one in send.debug_annotations
    }

    assert [categories[number] for number in send.category_iids] == ["communication"]
    assert annotations["bytes"] == 1024
    assert annotations["dtype"] == "float32"
    assert annotations["group"] == "pp · 0, 2"
    assert annotations["transfer_ns"] == 100_001


def test_each_string_is_written_once_before_what_refers_to_it(protocol: Any, tmp_path: Path) -> None:
    fields = ("event_names", "event_categories", "debug_annotation_names", "debug_annotation_string_values")
    written: dict[str, dict[int, Any]] = {field: {} for field in fields}

    for number, packet in enumerate(exported(protocol, a_job(), tmp_path).packet):
        is_first = packet.sequence_flags == packet.SEQ_INCREMENTAL_STATE_CLEARED
        assert is_first if number == 0 else packet.sequence_flags == packet.SEQ_NEEDS_INCREMENTAL_STATE
        for field in fields:
            for one in getattr(packet.interned_data, field):
                text = one.str if field == "debug_annotation_string_values" else one.name
                assert one.iid not in written[field]
                assert text not in written[field].values()
                written[field][one.iid] = text
        event = packet.track_event
        assert (event.name, list(event.categories)) == ("", [])
        assert not event.name_iid or event.name_iid in written["event_names"]
        assert set(event.category_iids) <= set(written["event_categories"])
        for one in event.debug_annotations:
            assert (one.name, one.string_value) == ("", "")
            assert one.name_iid in written["debug_annotation_names"]
            assert not one.string_value_iid or one.string_value_iid in written["debug_annotation_string_values"]

    assert "group" in written["debug_annotation_names"].values()
    assert b"pp \xc2\xb7 0, 2" in written["debug_annotation_string_values"].values()


def test_times_are_exact(protocol: Any, tmp_path: Path) -> None:
    packets = exported(protocol, a_job(), tmp_path).packet

    assert min(packet.timestamp for packet in packets if packet.HasField("track_event")) == 10**15
    assert 10**15 + 1_100_001 in {packet.timestamp for packet in packets}


def test_damaged_rows_before_0_are_drawn_at_0(protocol: Any, tmp_path: Path) -> None:
    run = a_job(start_ns=-1_100_000)

    times = [packet.timestamp for packet in exported(protocol, run, tmp_path).packet if packet.HasField("track_event")]
    assert min(times) == 0
    assert 1 in times  # 1_100_001 after the start


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outline = Timeline.of_recording(make_run({0: [span("step", 0, 10, step=0)]})).outline()
    monkeypatch.setattr(perfetto, "is_available", lambda: False)

    with pytest.raises(ConfigurationError, match="pip install 'perfetto"):
        perfetto.write(outline, [], tmp_path / "trace.pftrace")
