"""Turn a timeline (:mod:`commtrace.analysis.timeline`) into nested slices on tracks, for all trace viewers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commtrace.analysis.timeline import Columns, Outline, OutlineRank, RankBoxes, StepBoxes

_NOT_APPLICABLE: Final = -1
_WHERE: Final = ("microbatch", "chunk", "stage")


class Slice(NamedTuple):
    """A box; ``start`` and ``end`` are ns on the clock of the run."""

    start: int
    end: int
    table: str  # step, work, stalls, host, communication or transfer
    columns: Columns  # the table, of which this slice is a row; empty for a step
    row: int
    step: int
    boxes: RankBoxes  # all tables of the rank


@dataclass(frozen=True, slots=True)
class Track:
    """Slices of one place, which may overlap; see :meth:`layers`."""

    name: str
    slices: list[Slice] = field(default_factory=list)

    def layers(self) -> list[list[Slice]]:
        """Return the slices in the fewest layers in which they nest, each sorted by start."""
        layers: list[list[Slice]] = []
        open_ends: list[list[int]] = []
        for each in sorted(self.slices, key=lambda candidate: (candidate.start, -candidate.end)):
            number = next((number for number, ends in enumerate(open_ends) if _nests(each, ends)), len(layers))
            if number == len(layers):
                layers.append([])
                open_ends.append([])
            open_ends[number].append(each.end)
            layers[number].append(each)
        return layers


def _nests(inner: Slice, open_ends: list[int]) -> bool:
    """Return True if a slice nests in the open ones; remove those that have ended."""
    while open_ends and open_ends[-1] <= inner.start:
        open_ends.pop()
    return not open_ends or inner.end <= open_ends[-1]


class SliceLayer(NamedTuple):
    """Nested slices of a track; ``lane`` is the number of the layer."""

    process: int
    track: int
    lane: int
    name: str
    slices: Sequence[Slice]


class CounterSample(NamedTuple):
    """The value of a counter from an instant on."""

    time: int
    value: float


@dataclass(frozen=True, slots=True)
class RankTracks:
    """One rank: its tracks and counters in the order of display."""

    rank: int
    name: str
    tracks: Sequence[Track]
    bytes_in_flight: Sequence[CounterSample]
    stalled_percent: Sequence[CounterSample]


class Words:
    """Names and details of slices, from the vocabularies of an outline."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline

    def name(self, box: Slice) -> str:
        """Return the text of the box: ``forward 3``, ``all_reduce``, ``bubble``."""
        if box.table == "step":
            return f"step {box.step}"
        if box.table == "stalls":
            state = _word(self._outline["states"], box.columns["state"][box.row])
            if state == "bubble":
                return state
            return f"{state} {_word(self._outline['roles'], box.columns['role'][box.row])}"
        name = _word(self._outline["names"], box.columns["name"][box.row])
        if box.table == "communication":
            return name
        if box.table == "transfer":
            return "transfer"
        kind = _word(self._outline["kinds"], box.columns["kind"][box.row])
        microbatch = box.columns["microbatch"][box.row]
        number = "" if microbatch == _NOT_APPLICABLE else f" {microbatch}"
        return f"{kind}{number}" if name in ("", kind) else name

    def operation(self, box: Slice) -> str:
        """Return the operation of a communication; empty for other slices."""
        if box.table not in ("communication", "transfer"):
            return ""
        return _word(self._outline["names"], box.columns["name"][box.row])

    def category(self, box: Slice) -> str:
        """Return the kind of a slice, for filters."""
        if box.table in ("work", "host"):
            return _word(self._outline["kinds"], box.columns["kind"][box.row])
        return {"stalls": "stall"}.get(box.table, box.table)

    def arguments(self, box: Slice) -> dict[str, str | int]:
        """Return the details of a selected slice."""
        arguments: dict[str, str | int] = {"step": box.step}
        if box.table == "step":
            return arguments
        for column in _WHERE:
            arguments |= _applicable(column, box.columns[column][box.row])
        if box.table == "stalls":
            return arguments | {
                "role": _word(self._outline["roles"], box.columns["role"][box.row]),
                **self._waited_for(box),
            }
        if box.table in ("communication", "transfer"):
            return arguments | self._communication(box)
        return arguments

    def _waited_for(self, box: Slice) -> dict[str, str | int]:
        row = box.columns["communication"][box.row]
        return {} if row == _NOT_APPLICABLE else self._communication(box._replace(row=row))

    def _communication(self, box: Slice) -> dict[str, str | int]:
        columns, row = box.boxes["communication"], box.row
        lane = self._outline["ranks"][box.boxes["rank_index"]]["lanes"][columns["lane"][row]]
        arguments: dict[str, str | int] = {"operation": _word(self._outline["names"], columns["name"][row])}
        arguments |= {"role": lane["role"], "group": lane["label"], "members": ", ".join(map(str, lane["ranks"]))}
        for argument, column in _COMMUNICATION_ARGUMENTS.items():
            arguments |= _applicable(argument, columns[column][row])
        if columns["dtype"][row] != _NOT_APPLICABLE:
            arguments["dtype"] = _word(self._outline["names"], columns["dtype"][row])
        arguments["async"] = "yes" if columns["is_async"][row] else "no"
        arguments["timing"] = _word(self._outline["timings"], columns["timing"][row])
        for column, bound in _BOUNDS.items():
            if not columns[column][row]:
                arguments[column.removesuffix("_exact")] = bound
        if not columns["finished"][row]:
            arguments["end"] = "never seen: the duration is not known"
        return arguments


_COMMUNICATION_ARGUMENTS: Final = {
    "seq": "seq",
    "bytes": "bytes",
    "peer": "peer",
    "wait_ns": "wait",
    "transfer_ns": "transfer",
}


_BOUNDS: Final = {
    "start_exact": "lower bound: it started then or later",
    "end_exact": "upper bound: it ended then or earlier",
    "transfer_exact": "upper bound",
}


def _word(vocabulary: Sequence[str], code: int) -> str:
    return vocabulary[code] if code >= 0 else ""


def _applicable(name: str, value: int) -> dict[str, str | int]:
    return {} if value == _NOT_APPLICABLE else {name: value}


def join_of(box: Slice) -> int | None:
    """Return the number of a communication on all its ranks; None if only one recorded it."""
    join = box.columns["join"][box.row] if box.table == "communication" else _NOT_APPLICABLE
    return None if join == _NOT_APPLICABLE else join


class Arrow(NamedTuple):
    """One end of the arrow from a send to its receive."""

    number: int
    is_source: bool


def arrow_of(box: Slice, words: Words) -> Arrow | None:
    """Return the arrow that starts or ends in a slice."""
    # Viewers only draw arrows forward in time: an arrow ends in the transfer of a receive, a slice of its own.
    if box.table not in ("communication", "transfer"):
        return None
    operation, join = words.operation(box), box.columns["join"][box.row]
    waited = box.columns["wait"][box.row] > 0
    if join == _NOT_APPLICABLE or operation not in ("send", "recv"):
        return None
    if operation == "send":
        return Arrow(join, True) if box.table == "communication" else None
    return Arrow(join, False) if (box.table == "transfer") == waited else None


def layers(ranks: Sequence[RankTracks], words: Words) -> list[SliceLayer]:
    """Return all slices in layers, sends first."""
    # An arrow must begin before its end, and viewers keep the order of the file at equal times: the transfer of a
    # posted receive starts when the send does.
    slice_layers = []
    for process, rank in enumerate(ranks):
        tracks = enumerate(rank.tracks)
        parts = [(position, track.name, layer) for position, track in tracks for layer in track.layers()]
        slice_layers += [
            SliceLayer(process, position, lane, name, layer) for lane, (position, name, layer) in enumerate(parts)
        ]
    return sorted(slice_layers, key=lambda layer: words.operation(layer.slices[0]) != "send")


def processes(outline: Outline, steps: Iterable[StepBoxes]) -> list[RankTracks]:
    """Return the ranks of a timeline with their slices in these steps."""
    collected = [_GrowingTracks(outline, rank) for rank in outline["ranks"]]
    for step in steps:
        for boxes in step["ranks"]:
            collected[boxes["rank_index"]].add(step, boxes)
    return [tracks.finished() for tracks in collected]


class _GrowingTracks:
    """Tracks of a rank while steps are added. Sends have tracks of their own, see :func:`layers`."""

    def __init__(self, outline: Outline, rank: OutlineRank) -> None:
        self._rank = rank
        self._step, self._schedule, self._stalls, self._host = map(Track, ("step", "schedule", "stalls", "host"))
        self._names = outline["names"]
        self._lanes = [Track(lane["label"]) for lane in rank["lanes"]]
        self._sends = [Track(lane["label"]) for lane in rank["lanes"]]
        self._stalled: list[CounterSample] = []

    def add(self, step: StepBoxes, boxes: RankBoxes) -> None:
        base = step["base_ns"]
        begin, end = base + boxes["start"], base + boxes["end"]
        self._step.slices.append(Slice(begin, end, "step", {}, 0, step["step"], boxes))
        self._schedule.slices.extend(_slices(step, boxes, "work", boxes["work"]))
        self._stalls.slices.extend(_slices(step, boxes, "stalls", boxes["stalls"]))
        self._host.slices.extend(_slices(step, boxes, "host", boxes["host"]))
        for box in _slices(step, boxes, "communication", boxes["communication"]):
            lane = box.columns["lane"][box.row]
            sends = self._names[box.columns["name"][box.row]] == "send"
            (self._sends if sends else self._lanes)[lane].slices.extend(_with_transfer(box))
        if end > begin:
            self._stalled.append(CounterSample(begin, 100 * sum(boxes["stalls"]["duration"]) / (end - begin)))

    def finished(self) -> RankTracks:
        lanes = [track for pair in zip(self._lanes, self._sends, strict=True) for track in pair]
        tracks = [self._step, self._schedule, self._stalls, self._host, *lanes]
        coordinates = " ".join(f"{name}{value}" for name, value in self._rank["coordinates"].items())
        name = " / ".join(filter(None, [self._rank["host"], f"rank {self._rank['rank']}", coordinates]))
        return RankTracks(
            self._rank["rank"],
            name,
            [track for track in tracks if track.slices],
            _bytes_in_flight(box for lane in lanes for box in lane.slices if box.table == "communication"),
            self._stalled,
        )


def _slices(step: StepBoxes, boxes: RankBoxes, table: str, columns: Columns) -> Iterator[Slice]:
    base = step["base_ns"]
    for row, (start, duration) in enumerate(zip(columns["start"], columns["duration"], strict=True)):
        yield Slice(base + start, base + start + duration, table, columns, row, step["step"], boxes)


def _with_transfer(box: Slice) -> Iterator[Slice]:
    """Yield a communication and, inside it, its transfer, unless that is all of it."""
    yield box
    wait = box.columns["wait"][box.row]
    if wait > 0:
        yield box._replace(start=min(box.start + wait, box.end), table="transfer")


def _bytes_in_flight(communications: Iterable[Slice]) -> list[CounterSample]:
    """Return the bytes in flight at every change."""
    changes: dict[int, int] = {}
    for box in communications:
        size = max(box.columns["bytes"][box.row], 0)
        changes[box.start] = changes.get(box.start, 0) + size
        changes[box.end] = changes.get(box.end, 0) - size
    samples, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        samples.append(CounterSample(time, total))
    return samples
