"""What each step of a run took, part by part: the samples that two runs are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import State
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.communication.calls import Calls, calls_of_rank
from commtrace.analysis.keys import pack, sort_groups
from commtrace.trace.run import Run

FloatArray = npt.NDArray[np.float64]


class Link(NamedTuple):
    """A kind of communication whose bandwidth can be compared between runs."""

    role: str
    operation: str
    group_size: int


@dataclass(frozen=True, slots=True)
class StepSeries:
    """One value per step, by ascending step, of everything that is compared.

    Attributes:
        wall_ns: length of the step, mean over the ranks.
        states: by state, the time in it, mean over the ranks; they add up to ``wall_ns``.
        busbw_gbps: by link, 10⁹ bytes per second of matched transfers; of the steps in which there were any.
    """

    wall_ns: FloatArray
    states: Mapping[State, FloatArray]
    busbw_gbps: Mapping[Link, FloatArray]

    def __add__(self, later: StepSeries) -> StepSeries:
        """Return the series of these steps and of later ones."""
        none = np.zeros(len(self.wall_ns)), np.zeros(len(later.wall_ns))
        states = dict.fromkeys((*self.states, *later.states))
        links = dict.fromkeys((*self.busbw_gbps, *later.busbw_gbps))
        return StepSeries(
            np.concatenate([self.wall_ns, later.wall_ns]),
            {
                state: np.concatenate([self.states.get(state, none[0]), later.states.get(state, none[1])])
                for state in states
            },
            {
                link: np.concatenate([one.busbw_gbps[link] for one in (self, later) if link in one.busbw_gbps])
                for link in links
            },
        )


def step_series(analysis: Analysis) -> StepSeries:
    """The series of a run that was analysed."""
    table = analysis.partition
    wall, of_state = _mean_over_ranks(table)
    states = {state: of_state[:, column] for column, state in enumerate(table.states) if of_state[:, column].any()}
    return StepSeries(wall, states, _bandwidths(analysis))


def _mean_over_ranks(table: Partition) -> tuple[FloatArray, FloatArray]:
    steps, which = np.unique(table.step, return_inverse=True)
    ranks = np.bincount(which, minlength=len(steps))
    totals = np.zeros((len(steps), len(table.states)))
    np.add.at(totals, which.reshape(-1), table.ns)
    return np.bincount(which, table.wall_ns, len(steps)) / ranks, totals / ranks[:, np.newaxis]


def _bandwidths(analysis: Analysis) -> dict[Link, FloatArray]:
    context = analysis.context
    parts = [
        part
        for rank, trace in context.run.ranks.items()
        for part in calls_of_rank(
            trace,
            context.matches.ranks[rank],
            analysis.partition.stalled_ns[rank],
            context.roles.ranks[rank],
            context.steps,
        )
    ]
    calls = Calls.concatenate(parts)
    matched = np.flatnonzero(
        (calls.calls > 0) & calls.complete & calls.finished & (calls.group_size > 1) & (calls.num_bytes >= 0)
    )
    if not len(matched):
        return {}
    calls = calls.take(matched)
    order, begins = sort_groups(pack((calls.role, calls.name, calls.group_size)))
    links = {}
    for rows in np.split(order, begins[1:]):
        link, series = _bandwidth_per_step(context.run, context.roles.words, calls.take(rows))
        if len(series):
            links[link] = series
    return links


def _bandwidth_per_step(run: Run, words: tuple[str, ...], calls: Calls) -> tuple[Link, FloatArray]:
    """busbw of one link in each step: bytes on the bus over the sum of the transfers."""
    code = int(calls.name[0])
    link = Link(words[calls.role[0]], run.names[code] if code >= 0 else "unknown", int(calls.group_size[0]))
    if link.operation in WITHOUT_BANDWIDTH:
        return link, np.empty(0)
    on_the_bus = moved_bytes(link.operation, calls.num_bytes, calls.self_bytes) * bus_factors(
        link.operation, link.group_size, calls.self_bytes
    )
    steps, which = np.unique(calls.step, return_inverse=True)
    time = np.bincount(which.reshape(-1), calls.transfer, len(steps))
    carried = np.bincount(which.reshape(-1), on_the_bus, len(steps))
    known = (time > 0) & (carried > 0)
    return link, carried[known] / time[known]
