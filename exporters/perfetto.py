"""Perfetto's native trace format, for https://ui.perfetto.dev; needs the ``perfetto`` package.

Unlike :mod:`commtrace.exporters.chrome_trace`, it has tracks that are no threads and keep their order, one colour for a
collective on all ranks, and exact nanoseconds. Strings are interned: each is written once, and slices refer to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

from commtrace.analysis.timeline import Outline, StepBoxes
from commtrace.errors import ConfigurationError
from commtrace.exporters.slices import CounterSample, RankTracks, Slice, Words, arrow_of, join_of, layers, processes

INSTALL: Final = "pip install 'perfetto>=0.12'"

_SEQUENCE: Final = 1
_ROOT_TRACK: Final = 0

_NAMES: Final = "event_names"
_CATEGORIES: Final = "event_categories"
_ANNOTATIONS: Final = "debug_annotation_names"
_VALUES: Final = "debug_annotation_string_values"


def is_available() -> bool:
    """Return True if the ``perfetto`` package is installed."""
    return find_spec("perfetto") is not None


def write(outline: Outline, steps: Iterable[StepBoxes], output: Path) -> int:
    """Write the outline and steps of a :class:`commtrace.analysis.timeline.Timeline`; return the number of slices.

    Raises:
        ConfigurationError: the ``perfetto`` package is not installed.
    """
    if not is_available():
        raise ConfigurationError(f"the native Perfetto format needs a package: {INSTALL}. Or write --format chrome")
    ranks = processes(outline, steps)
    with output.open("wb") as file:
        return _Writer(file, Words(outline)).write(ranks)


class _Writer:
    def __init__(self, file: IO[bytes], words: Words) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protocol
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._protocol = protocol
        self._builder = StreamingTraceProtoBuilder(file)
        self._words = words
        self._strings = _Strings(protocol)
        self._is_empty = True
        self._uuids = count(1)
        self._num_slices = 0

    def write(self, ranks: Sequence[RankTracks]) -> int:
        self._root()
        parents = [self._process(rank, order) for order, rank in enumerate(ranks)]
        for layer in layers(ranks, self._words):
            # Tracks of one name and parent are drawn as one: that is how overlapping communications are shown.
            parent = parents[layer.process]
            self._slices(self._track(name=layer.name, parent_uuid=parent, sibling_order_rank=layer.track), layer.slices)
        return self._num_slices

    def _root(self) -> None:
        """Declare the empty track that orders the processes."""
        descriptor = self._protocol.TrackDescriptor(uuid=_ROOT_TRACK)
        if "process_ordering" not in descriptor.DESCRIPTOR.fields_by_name:
            return  # an older perfetto package: the UI then sorts the processes itself
        descriptor.process_ordering = self._protocol.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        self._packet(track_descriptor=descriptor)

    def _process(self, rank: RankTracks, order: int) -> int:
        """Declare a rank and its counters, and return its track."""
        process = self._protocol.ProcessDescriptor(pid=rank.rank + 1, process_name=rank.name, legacy_sort_index=order)
        uuid = self._track(name=rank.name, process=process, sibling_order_rank=order)
        # A process has no order of its own for its tracks, a track has: one that holds all the others.
        explicit = self._protocol.TrackDescriptor.EXPLICIT
        parent = self._track(name="timeline", parent_uuid=uuid, child_ordering=explicit)
        self._counter(parent, "bytes in flight", "size_bytes", rank.bytes_in_flight, len(rank.tracks))
        self._counter(parent, "stalled, % of the step", "percent", rank.stalled_percent, len(rank.tracks) + 1)
        return parent

    def _track(self, **descriptor: object) -> int:
        uuid = next(self._uuids)
        self._packet(track_descriptor=self._protocol.TrackDescriptor(uuid=uuid, **descriptor))
        return uuid

    def _slices(self, uuid: int, layer: Iterable[Slice]) -> None:
        open_ends: list[int] = []
        for one in layer:
            for end in _closed_by(one.start, open_ends):
                self._event(end, track_uuid=uuid, type=self._protocol.TrackEvent.TYPE_SLICE_END)
            self._begin(uuid, one)
            open_ends.append(one.end)
        for end in reversed(open_ends):
            self._event(end, track_uuid=uuid, type=self._protocol.TrackEvent.TYPE_SLICE_END)

    def _begin(self, uuid: int, one: Slice) -> None:
        self._num_slices += 1
        join, arrow = join_of(one), arrow_of(one, self._words)
        same_everywhere: dict[str, object] = {} if join is None else {"correlation_id": join + 1}
        if arrow is not None:
            end = "flow_ids" if arrow.is_source else "terminating_flow_ids"
            same_everywhere[end] = [arrow.number + 1]
        self._event(
            one.start,
            track_uuid=uuid,
            type=self._protocol.TrackEvent.TYPE_SLICE_BEGIN,
            name_iid=self._strings.number(_NAMES, self._words.name(one)),
            category_iids=[self._strings.number(_CATEGORIES, self._words.category(one))],
            debug_annotations=[self._annotation(*item) for item in self._words.arguments(one).items()],
            **same_everywhere,
        )

    def _annotation(self, name: str, value: str | int) -> object:
        number = self._strings.number(_ANNOTATIONS, name)
        if isinstance(value, str):
            return self._protocol.DebugAnnotation(
                name_iid=number, string_value_iid=self._strings.number(_VALUES, value)
            )
        return self._protocol.DebugAnnotation(name_iid=number, int_value=value)

    def _counter(self, parent: int, name: str, unit: str, samples: Iterable[CounterSample], order: int) -> None:
        descriptor = self._protocol.CounterDescriptor
        counter = descriptor(unit=descriptor.UNIT_SIZE_BYTES) if unit == "size_bytes" else descriptor(unit_name="%")
        uuid = self._track(name=name, parent_uuid=parent, counter=counter, sibling_order_rank=order)
        for sample in samples:
            self._event(
                sample.time,
                track_uuid=uuid,
                type=self._protocol.TrackEvent.TYPE_COUNTER,
                double_counter_value=sample.value,
            )

    def _event(self, time: int, **event: object) -> None:
        time = max(time, 0)  # Perfetto has no time before 0: damaged rows are drawn at 0
        self._packet(timestamp=time, track_event=self._protocol.TrackEvent(**event))

    def _packet(self, **fields: object) -> None:
        packet = self._protocol.TracePacket(trusted_packet_sequence_id=_SEQUENCE, **fields)
        # A reader skips packets that refer to strings until it knows where the strings of the sequence begin.
        packet.sequence_flags = self._protocol.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        if self._is_empty:
            packet.sequence_flags = self._protocol.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._is_empty = False
        self._strings.move_new(packet)
        self._builder.write_packet(packet)


class _Strings:
    """Numbers strings from 1, in each field of Perfetto's ``InternedData``; keeps those that no packet has yet."""

    def __init__(self, protocol: ModuleType) -> None:
        self._numbers: dict[str, dict[str, int]] = {_NAMES: {}, _CATEGORIES: {}, _ANNOTATIONS: {}, _VALUES: {}}
        self._new = protocol.InternedData()

    def number(self, field: str, text: str) -> int:
        """Return the number of a string that one of the next packets refers to."""
        numbers = self._numbers[field]
        if text not in numbers:
            numbers[text] = len(numbers) + 1
            content: dict[str, str | bytes] = {"str": text.encode()} if field == _VALUES else {"name": text}
            getattr(self._new, field).add(iid=numbers[text], **content)
        return numbers[text]

    def move_new(self, packet: Any) -> None:
        """Move the strings that no packet has yet to this one, which may refer to them itself."""
        if self._new.ListFields():
            packet.interned_data.CopyFrom(self._new)
            self._new.Clear()


def _closed_by(time: int, open_ends: list[int]) -> Iterator[int]:
    """Yield and remove the open ends up to ``time``, innermost first."""
    while open_ends and open_ends[-1] <= time:
        yield open_ends.pop()
