"""The driver's readings of a slow rank's device, compared with those of the other ranks' devices.

>>> device_evidence(run, 3).sentence                            # doctest: +SKIP
'Its device: 1095 MHz (the others 1980 MHz), held down by thermal slowdown in 58 of 60 readings; 91 °C.'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

from commtrace.trace.device_state import DeviceState
from commtrace.trace.run import RankTrace, Run

_SLOWER: Final = 0.97
"""Of the others' clock: devices of one model, at the same work, differ by a few steps of 15 MHz."""

_MOSTLY: Final = 0.5
"""Of the readings."""


class DeviceEvidence(NamedTuple):
    """Evidence for or against the device.

    Attributes:
        is_throttled: its clock was held down, and lower than that of other ranks' devices of its model; without such,
            than it can be.
        sentence: with the numbers.
        serial: of the board; empty where it is not known.
    """

    is_throttled: bool
    sentence: str
    serial: str


def device_evidence(run: Run, rank: int, within: tuple[int, int] | None = None) -> DeviceEvidence | None:
    """Return what was read; None where nothing was.

    Medians over the readings of a rank, and over the other ranks whose device has the same name.

    Args:
        run: on one clock.
        rank: whose device.
        within: from when to when, ns; None for the whole recording.
    """
    own = _read(run.ranks[rank], within)
    if not own:
        return None
    model = run.ranks[rank].metadata.device
    others = [
        states
        for other, trace in run.ranks.items()
        if other != rank and trace.metadata.device == model and (states := _read(trace, within))
    ]
    clock, usual_clock = _typical(own, "clock_mhz"), _typical_of_others(others, "clock_mhz")
    reasons = Counter(reason for state in own for reason in state.slowdowns)
    could_be = _typical(own, "most_clock_mhz") if usual_clock is None else usual_clock
    held_down = bool(reasons) and reasons.most_common(1)[0][1] >= _MOSTLY * len(own)
    is_throttled = held_down and clock is not None and could_be is not None and clock < _SLOWER * could_be
    state = [part for part in (_clock(own, clock, usual_clock, reasons), *_conditions(own, others)) if part]
    sentences = (("Its device: ", state), ("Its errors: ", [*_errors(own)]))
    sentence = " ".join(f"{begin}{'; '.join(parts)}." for begin, parts in sentences if parts)
    return DeviceEvidence(is_throttled, sentence, own[-1].serial) if sentence else None


def _read(trace: RankTrace, within: tuple[int, int] | None) -> Sequence[DeviceState]:
    if within is None:
        return trace.device_states
    return [state for state in trace.device_states if within[0] <= state.at_ns <= within[1]]


def _clock(own: Sequence[DeviceState], clock: float | None, usual: float | None, reasons: Counter[str]) -> str:
    if clock is None:
        return ""
    compared = f" (the others {usual:.0f} MHz)" if usual is not None else ""
    reason, count = next(iter(reasons.most_common(1)), ("", 0))
    why = f", held down by {reason} in {count} of {len(own)} readings" if count else ""
    return f"{clock:.0f} MHz{compared}{why}"


def _conditions(own: Sequence[DeviceState], others: Sequence[Sequence[DeviceState]]) -> Iterator[str]:
    for field, unit, scale in (("temperature_c", "°C", 1.0), ("power_mw", "W", 1000.0)):
        value, usual = _typical(own, field), _typical_of_others(others, field)
        if value is not None:
            compared = f" (the others {usual / scale:.0f} {unit})" if usual is not None else ""
            yield f"{value / scale:.0f} {unit}{compared}"


def _errors(own: Sequence[DeviceState]) -> Iterator[str]:
    for field, words in (
        ("uncorrected_errors", "uncorrectable memory errors"),
        ("corrected_errors", "corrected memory errors"),
        ("nvlink_errors", "NVLink errors"),
        ("pcie_replays", "PCIe replays"),
    ):
        counts = [count for state in own if (count := getattr(state, field)) is not None]
        if counts and counts[-1]:
            yield f"{counts[-1]} {words}, {max(counts[-1] - counts[0], 0)} of them during the run"


def _typical(states: Sequence[DeviceState], field: str) -> float | None:
    values = [value for state in states if (value := getattr(state, field)) is not None]
    return float(median(values)) if values else None


def _typical_of_others(others: Sequence[Sequence[DeviceState]], field: str) -> float | None:
    values = [value for states in others if (value := _typical(states, field)) is not None]
    return float(median(values)) if values else None
