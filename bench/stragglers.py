"""Inject faults of every kind into jobs, and ask commtrace who it was, why, and what it costs.

    python bench/stragglers.py                         # all kinds, without hidden ranks and clean runs
    python bench/stragglers.py --hidden 50 --clean 200 # and those
    python bench/stragglers.py --list                  # the names of the cases
    python bench/stragglers.py --only "half of 4" -v   # one case, with the sentences that were said
    python bench/stragglers.py --only link --ranks 16  # cases with this in their name, of at most so many ranks
    python bench/stragglers.py --only half --seed 7    # the same with other noise
    python bench/stragglers.py --recorded              # without the monitor

Jobs are simulated (docs/synthetic-runs.md), so the guilty ranks, the cause and the true cost are known: the mean step
with the faults less the mean step without them, by the simulation's own schedule. *Offline* asks `find_stragglers` as
`commtrace straggler` does; *live* hands every simulated step to the windows that ranks report and joins them as the
monitor does, by a clock that ticks with the simulation. Real jobs: bench/stragglers_real.py.

A case is a *hit* if the guilty ranks are named before any other rank, and all of them; of a link both of its ends. The
cost is right if it is, of each that is named, within 20 % or 1 ms of what its faults cost when all others are mended:
offline per step of the run, live per step of the stretch (of what strikes every so many steps, up to the next strike).
A *false alarm* is an innocent rank that is named at all. Live, every stretch of steps with the same faults must be
named; *named* and *cleared* are seconds from its begin, and from its end, in the slowest stretch. The monitor gives the
*same name* if the sets that stand at the end of the stretches are those of the verdicts on the recording: the same
ranks or place and the same cause, in the same words.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.findings.finding import SLOW, Finding, Occurrence
from commtrace.findings.status import FOUND
from commtrace.live.collector import owners
from commtrace.live.gil import GilYield
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import ReportWindow, WindowReport
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepExtras, SummaryInput, summarise
from commtrace.live.summary import StepSummary
from commtrace.synth import Synthetic, synthesize
from commtrace.synth.simulation import SimulatedSteps, simulate
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schema import Row
from commtrace.trace.spans import Spans

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.straggler_cases import MS, Case, cases, clean, format_numbers, hidden

NAN: Final = float("nan")
WINDOW_SECONDS: Final = 4.0
JOIN_DELAY_SECONDS: Final = 1.0
"""The monitor's default window, and how long after its end it compares."""

TOLERANCE: Final = 0.2
TOLERANCE_MS: Final = 1.0


class Named(NamedTuple):
    """One that was named.

    Attributes:
        ranks: the guilty.
        who, place, cause, cost_ms, sentence: as they were said.
        steps: over how many the cost of a pause is the mean; 0 of what holds in every step.
    """

    ranks: frozenset[int]
    who: str
    place: str
    cause: str
    cost_ms: float
    sentence: str
    steps: int = 0

    def cost_in_ms(self, stretch: Stretch) -> float:
        """Per step of the stretch, which may be far shorter than what a single pause was spread over."""
        return self.cost_ms * max(self.steps, len(stretch.steps)) / len(stretch.steps)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of a case.

    Attributes:
        hit: the guilty were named before anybody else; live, in every stretch.
        cause: of the first one that was named, and whether it is right.
        cost_ms: of the first one that was named; NaN without a hit.
        cost_is_right: so are those of all that were named until all guilty ones were.
        false_alarms: innocent ranks, or groups of them, that were named.
        sentences: what was said.
        names: who was named, and for which cause; live, where the guilty were named last in each stretch.
        seconds: live, until the guilty were named, in the slowest stretch; NaN if they were not.
        seconds_to_clear: live, from the end of a stretch until its ranks were no longer named; NaN if they never were.
    """

    hit: bool
    cause: str
    cause_is_right: bool
    cost_ms: float
    cost_is_right: bool
    false_alarms: int
    sentences: tuple[str, ...]
    names: frozenset[tuple[str, str]] = frozenset()
    seconds: float = NAN
    seconds_to_clear: float = NAN


class Stretch(NamedTuple):
    """Consecutive steps with the same faults.

    Attributes:
        steps: their numbers, from the first to the last.
        begin, end: true seconds.
        ranks: the guilty; none where the fault moves between microbatches.
    """

    steps: range
    begin: float
    end: float
    ranks: frozenset[int]


class Truth:
    """What is true of a simulated case.

    Attributes:
        ranks: the guilty; none where the fault moves between microbatches, or there is none.
        cost_ms: of all faults, per step, mean over the run.
        stretches: in their order.
    """

    def __init__(self, made: Synthetic) -> None:
        self._made = made
        self._steps_of: dict[frozenset[int], SimulatedSteps] = {}
        self._all = frozenset(range(len(made.job.faults)))
        self._ranks = [frozenset(fault["ranks"]) for fault in made.truth["faults"]]
        self.ranks = frozenset().union(*self._ranks)
        self.stretches = tuple(self._find_stretches())
        self.cost_ms = self._cost_ms(self._all, range(made.job.steps))

    def cost_of_ms(self, ranks: frozenset[int], stretch: Stretch | None = None) -> float:
        """What the faults of these ranks cost when all others are mended, per step of the run or of a stretch."""
        faults = frozenset(at for at in self._all if self._ranks[at] & ranks or not self._ranks[at] | ranks)
        if stretch is None:
            return self._cost_ms(faults, range(self._made.job.steps))
        return self._cost_ms(faults, stretch.steps) * len(stretch.steps) / self._steps_between(faults, stretch)

    def _steps_between(self, faults: frozenset[int], stretch: Stretch) -> int:
        """Of what strikes every so many steps, the steps from each strike to the next; else those of the stretch."""
        (struck,) = {self._made.job.faults[at].steps for at in faults} if len(faults) == 1 else {None}
        if struck is None or struck.every == 1:
            return len(stretch.steps)
        return len(range(struck.first, min(struck.end, stretch.steps.stop), struck.every)) * struck.every

    def _find_stretches(self) -> Iterator[Stretch]:
        steps = self._made.truth["steps"]
        for faults, group in groupby(range(len(steps)), key=self._active):
            if faults:
                numbers = list(group)
                inside = range(numbers[0], numbers[-1] + 1)
                begin, end = steps[inside[0]]["start_ns"] / 1e9, steps[inside[-1]]["end_ns"] / 1e9
                yield Stretch(inside, begin, end, frozenset().union(*(self._ranks[fault] for fault in faults)))

    def _active(self, step: int) -> tuple[int, ...]:
        """The faults of a step; one that strikes every so many steps is there between them, too."""
        return tuple(
            at for at, fault in enumerate(self._made.job.faults) if fault.steps.first <= step < fault.steps.end
        )

    def _cost_ms(self, faults: frozenset[int], steps: range) -> float:
        with_them, without = (self._duration_ns(some, steps) for some in (faults, frozenset[int]()))
        return (with_them - without) / len(steps) / MS

    def _duration_ns(self, faults: frozenset[int], steps: range) -> int:
        """Of consecutive steps of the job with these of its faults."""
        if faults not in self._steps_of:
            job = self._made.job
            self._steps_of[faults] = simulate(replace(job, faults=tuple(job.faults[at] for at in sorted(faults)))).steps
        known = self._steps_of[faults]
        return int(known.end[steps[-1]].max() - known.start[steps[0]].min())


@dataclass(frozen=True, slots=True)
class Judged:
    """A case, its guilty ranks, what its faults cost per step, and what was said."""

    case: Case
    ranks: frozenset[int]
    cost_ms: float
    offline: Answer
    live: Answer

    @property
    def same_name(self) -> bool:
        """Whether the monitor and the recording name the same sets, places and causes, in the same words."""
        return self.live.hit and self.live.names == self.offline.names


# A run of a case


NOT_ASKED: Final = Answer(
    hit=False, cause="", cause_is_right=False, cost_ms=NAN, cost_is_right=False, false_alarms=0, sentences=()
)


def judge(case: Case, seed: int | None = None, *, is_live: bool = True) -> Judged:
    """Simulate a case and ask both ways, or only what a recording tells."""
    made = synthesize(case.job if seed is None else replace(case.job, seed=seed))
    truth, run = Truth(made), made.run
    on = live(case, truth, run) if is_live else NOT_ASKED
    return Judged(case, truth.ranks, truth.cost_ms, offline(case, truth, run), on)


def offline(case: Case, truth: Truth, run: Run) -> Answer:
    """What the analysis of the files says."""
    analysis = analyse(run)
    judgement = find_stragglers(analysis.run, analysis.matches)
    named = [
        Named(ranks_in(one.who, one.rank).union(one.ranks), one.who, one.place, one.cause,
              (one.cost_ns or 0.0) / 1e6,
              f"{one.who}: {one.cause}, {(one.cost_ns or 0.0) / 1e6:.1f} ms. {one.evidence}")
        for one in judgement.slow
    ]  # fmt: skip
    return _answer(case, truth, named, tuple(_unsaid(judgement)))


def _unsaid(judgement: Judgement) -> Iterator[str]:
    yield from (finding.evidence for finding in judgement.not_judged)
    if judgement.waited_for:
        yield judgement.waited_for


class Join(NamedTuple):
    """What the monitor said at the end of a window: who is slow now, and what is new."""

    at: float
    named: list[Named]
    found: list[Named]
    sentences: list[str]


def live(case: Case, truth: Truth, run: Run) -> Answer:
    """What the monitor says while the job runs."""
    joins = list(_joins(run))
    sentences = tuple(f"[{join.at:.0f} s] {sentence}" for join in joins for sentence in join.sentences)
    found = [one for join in joins for one in join.found]
    stretches = () if case.is_clean else truth.stretches
    ends = [*(stretch.begin for stretch in stretches[1:]), float("inf")]
    heard = [_heard(case, truth, stretch, until, joins) for stretch, until in zip(stretches, ends, strict=False)]
    seconds_to_clear = [one.seconds_to_clear for one in heard if one.seconds_to_clear == one.seconds_to_clear]
    first = next((one.first for one in heard if one.first is not None), found[0] if found else None)
    return Answer(
        hit=not found if case.is_clean else all(one.hit for one in heard),
        cause=first.cause if first else "",
        cause_is_right=first is not None and case.is_cause(first.cause, first.place),
        cost_ms=heard[0].cost_ms if heard else NAN,
        cost_is_right=all(one.cost_is_right for one in heard),
        false_alarms=sum(_is_false(case, truth, one) for one in found),
        sentences=sentences,
        names=frozenset().union(*(one.names for one in heard)),
        seconds=max((one.seconds for one in heard), default=NAN) if all(one.hit for one in heard) else NAN,
        seconds_to_clear=max(seconds_to_clear, default=NAN),
    )


class Window(NamedTuple):
    """What ranks report at the end of a window, and when the monitor compares, epoch seconds."""

    reports: list[WindowReport]
    joined_at: float


def windows_of(run: Run, seconds: float = WINDOW_SECONDS) -> Iterator[Window]:
    """Hand the steps of all ranks to their windows, by a clock that shows the simulation's time."""
    ranks = [LiveRank(trace.metadata, Path("run")) for trace in run.ranks.values()]
    for rank, trace in zip(ranks, run.ranks.values(), strict=True):
        _tell(rank, trace)
    steps = [deque(steps_of(rank, run.ranks[rank.rank], run.names)) for rank in ranks]
    windows = [ReportWindow(rank) for rank in ranks]
    for number in range(1, int(max(own[-1].summary.end_ns for own in steps) / 1e9 / seconds) + 1):
        now_ns = round(number * seconds * 1e9)
        for window, own in zip(windows, steps, strict=True):
            while own and own[0].summary.end_ns <= now_ns:
                window.add(*own.popleft())
        yield Window([window.close(number, now_ns) for window in windows], now_ns / 1e9 + JOIN_DELAY_SECONDS)


def _joins(run: Run) -> Iterator[Join]:
    watch = Watch(run.world_size, WINDOW_SECONDS)
    for reports, at in windows_of(run):
        events = watch.join(reports, at)
        found = [_named_live(event.finding) for event in events if event.kind == FOUND]
        named = [_named_live(finding) for finding in watch.findings if finding.kind == SLOW]
        yield Join(at, named, found, [event.sentence for event in events])


class _Heard(NamedTuple):
    """What the monitor said of a stretch."""

    hit: bool
    first: Named | None
    cost_ms: float
    cost_is_right: bool
    seconds: float
    seconds_to_clear: float
    names: frozenset[tuple[str, str]] = frozenset()


def _heard(case: Case, truth: Truth, stretch: Stretch, until: float, joins: Sequence[Join]) -> _Heard:
    """What was said of a stretch; the next one begins at ``until``."""
    inside = [join for join in joins if stretch.begin < join.at - JOIN_DELAY_SECONDS < stretch.end + WINDOW_SECONDS]
    hits = [(join, count) for join in inside if (count := count_until_found(case.causes, stretch.ranks, join.named))]
    if not hits:
        return _Heard(hit=False, first=None, cost_ms=NAN, cost_is_right=False, seconds=NAN, seconds_to_clear=NAN)
    said: dict[frozenset[int], list[float]] = defaultdict(list)
    for join, count in hits:
        for one in join.named[:count]:
            said[one.ranks].append(one.cost_in_ms(stretch))
    costs = {ranks: float(np.median(of_windows)) for ranks, of_windows in said.items()}
    after = [join for join in joins if stretch.end < join.at <= until]
    still = [join.at for join in after if any(one.ranks & stretch.ranks for one in join.named)]
    cleared = next((join.at for join in after if not still or join.at > still[-1]), NAN)
    first = hits[0][0].named[0]
    return _Heard(
        hit=True,
        first=first,
        cost_ms=costs[first.ranks],
        cost_is_right=all(is_right(ms, truth.cost_of_ms(ranks, stretch)) for ranks, ms in costs.items()),
        seconds=hits[0][0].at - stretch.begin,
        seconds_to_clear=cleared - stretch.end,
        names=frozenset((one.who, one.cause) for one in hits[-1][0].named),
    )


def _tell(rank: LiveRank, trace: RankTrace) -> None:
    """What a recorder tells of a rank besides its rows."""
    for group in trace.groups.values():
        rank.marks.read("process_group", group)
    rank.marks.read("topology", {"coordinates": trace.coordinates, "parallel": trace.parallel, **trace.topology})


class Step(NamedTuple):
    """A step of a rank in numbers, and its rows, as a collector tells them."""

    summary: StepSummary
    rows: list[Row]


def steps_of(rank: LiveRank, trace: RankTrace, names: Sequence[str]) -> list[Step]:
    """The steps of a rank, as its collector tells them."""
    spans = trace.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    steps = rows[np.argsort(spans.end[rows], kind="stable")]
    owner = owners(spans, steps)
    window = SummaryInput(list(names), spans, steps, owner, {})
    told = summarise(window, rank, [StepExtras(0, 0, {}, {}, None) for _ in steps], GilYield())
    return [Step(summary, _rows(spans.take(owner == at), names)) for at, summary in enumerate(told)]


def _rows(spans: Spans, names: Sequence[str]) -> list[Row]:
    """Rows as a recorder makes them."""
    columns = {name: getattr(spans, name).tolist() for name in schema.SCHEMA.names if name != "detail"}
    for name in ("name", "dtype"):
        columns[name] = [names[code] if code >= 0 else None for code in columns[name]]
    return [Row(*values) for values in zip(*columns.values(), strict=True)]


def _named_live(finding: Finding) -> Named:
    ranks = ranks_in(finding.who, finding.rank).union(finding.ranks)
    cost_ms, spread = (finding.cost_ns or 0.0) / 1e6, _spread(finding.occurrence)
    return Named(ranks, finding.who, finding.place, finding.cause, cost_ms, finding.evidence, spread)


def _spread(when: Occurrence | None) -> int:
    """The number of steps over which the cost of what strikes in few steps is spread; 0 of what holds in all."""
    if when is None:
        return 0
    return when.num_steps if len(when.steps) == 1 else when.steps[-1] - when.steps[0]


def ranks_in(who: str, rank: int) -> frozenset[int]:
    """The ranks that a sentence names: ``rank 3 on node0``, ``host node1 (ranks 4–7, 9)``."""
    words = re.search(r"ranks? ([\d–, ]+)", who)
    if rank < 0 or words is None:
        return frozenset()
    parts = [part.strip().split("–") for part in words[1].split(",") if part.strip()]
    return frozenset(one for part in parts for one in range(int(part[0]), int(part[-1]) + 1))


def count_until_found(causes: Sequence[str], guilty: frozenset[int], named: Sequence[Named]) -> int:
    """How many must be read until all guilty ones are named; 0 if an innocent one comes before, or some never."""
    if not guilty:
        return int(bool(named) and not named[0].ranks and named[0].cause in causes)
    read: set[int] = set()
    for count, one in enumerate(named, start=1):
        read |= one.ranks
        if not one.ranks or not read <= guilty:
            return 0
        if read == guilty:
            return count
    return 0


def _is_false(case: Case, truth: Truth, one: Named) -> bool:
    return case.is_clean or not one.ranks <= truth.ranks


def is_right(said_ms: float, true_ms: float) -> bool:
    return abs(said_ms - true_ms) <= max(TOLERANCE * true_ms, TOLERANCE_MS)


def _answer(case: Case, truth: Truth, named: Sequence[Named], unsaid: tuple[str, ...]) -> Answer:
    read = named[: count_until_found(case.causes, truth.ranks, named)] if not case.is_clean else ()
    return Answer(
        hit=not named if case.is_clean else bool(read),
        cause=named[0].cause if named else "",
        cause_is_right=bool(named) and case.is_cause(named[0].cause, named[0].place),
        cost_ms=read[0].cost_ms if read else NAN,
        cost_is_right=bool(read) and all(is_right(one.cost_ms, truth.cost_of_ms(one.ranks)) for one in read),
        false_alarms=sum(_is_false(case, truth, one) for one in named),
        sentences=(*(one.sentence for one in named), *unsaid),
        names=frozenset((one.who, one.cause) for one in named),
    )


# The table


def main() -> int:
    """Run the cases that were asked for; 1 if some clean run named somebody."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="Cases with this in their title.")
    parser.add_argument("--ranks", type=int, default=10_000, help="Cases of at most so many ranks.")
    parser.add_argument("--hidden", type=int, default=0, metavar="N", help="N runs with one slow rank, at random.")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="N runs with nothing wrong, at random.")
    parser.add_argument("--seed", type=int, help="Of the noise; default: 0, as the cases say.")
    parser.add_argument("--processes", type=int, default=1, help="That judge cases side by side.")
    parser.add_argument("--recorded", action="store_true", help="Ask only what a recording tells, not the monitor.")
    parser.add_argument("--list", action="store_true", help="Print the titles of the cases only.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print what was said of each case.")
    options = parser.parse_args()
    chosen = [
        case
        for case in (*cases(), *hidden(options.hidden, options.seed or 0), *clean(options.clean, options.seed or 0))
        if options.only.lower() in case.title.lower() and case.job.world_size <= options.ranks
    ]
    if options.list:
        print("\n".join(case.title for case in chosen))
        return 0
    begin = time.perf_counter()
    judged = list(_told(chosen, options))
    _summary(judged)
    print(f"\n{len(judged)} cases in {time.perf_counter() - begin:.0f} s, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    return int(any(one.offline.false_alarms + one.live.false_alarms for one in judged if one.case.is_clean))


def _told(chosen: Sequence[Case], options: argparse.Namespace) -> Iterator[Judged]:
    """Judge cases, and print a line of each as it is done."""
    print(f"{'':44s} {'offline':32s} live")
    print(f"{'case':36s} {'true ms':>7s} {'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s}", end="  ")
    print(f"{'hit':4s} {'cause':13s} {'ms':>7s} {'false':>5s} {'named':>7s} {'cleared':>7s} same name")
    work = partial(judge, seed=options.seed, is_live=not options.recorded)
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes) as pool:
            for one in pool.map(work, chosen):
                _line(one, options.verbose)
                yield one
        return
    for case in chosen:
        one = work(case)
        _line(one, options.verbose)
        yield one


def _line(one: Judged, verbose: bool) -> None:
    print(f"{one.case.title[:36]:36s} {one.cost_ms:7.1f} {columns(one.offline)}  {columns(one.live)} ", end="")
    print(f"{seconds_or_none(one.live.seconds)} {seconds_or_none(one.live.seconds_to_clear)}", end=" ")
    print("" if one.case.is_clean else "yes" if one.same_name else "no", flush=True)
    if verbose:
        print(f"    guilty: {_some(one.ranks)}, {' or '.join(one.case.causes)}")
        for way, answer in (("offline", one.offline), ("live", one.live)):
            for sentence in answer.sentences or ("nothing was said",):
                print(f"    {way}: {sentence}")


def seconds_or_none(seconds: float) -> str:
    return f"{seconds:5.1f} s" if seconds == seconds else "      -"


def _some(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return ("rank " + format_numbers(listed[:16]) + (" …" if len(listed) > 16 else "")) if listed else "no single rank"


def columns(answer: Answer) -> str:
    cause = f"{answer.cause[:12]}{'' if answer.cause_is_right or not answer.cause else '!'}"
    cost = f"{answer.cost_ms:.1f}{'' if answer.cost_is_right else '!'}" if answer.cost_ms == answer.cost_ms else "-"
    return f"{'yes' if answer.hit else 'MISS':4s} {cause or '-':13s} {cost:>7s} {answer.false_alarms or '-':>5}"


class Tally(NamedTuple):
    """Counts of one family, one way."""

    hits: int
    causes: int
    costs: int
    false_alarms: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Tally:
        return cls(
            sum(one.hit for one in answers),
            sum(one.hit and one.cause_is_right for one in answers),
            sum(one.hit and one.cost_is_right for one in answers),
            sum(one.false_alarms for one in answers),
        )


def _summary(judged: Sequence[Judged]) -> None:
    """By family, as a table in Markdown."""
    families: Mapping[str, list[Judged]] = defaultdict(list)
    for one in judged:
        families[one.case.family].append(one)
    print("\n| fault | cases | offline: hit | cause | cost | false ", end="")
    print("| live: hit | cause | cost | false | same name | s to name |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    faulty = [one for one in judged if not one.case.is_clean]
    for family, own in [*families.items(), *([("**all faults**", faulty)] if len(families) > 1 else [])]:
        off, on = Tally.of([one.offline for one in own]), Tally.of([one.live for one in own])
        seconds = [one.live.seconds for one in own if one.live.seconds == one.live.seconds]
        named = f"{np.median(seconds):.0f} (at most {max(seconds):.0f})" if seconds else "-"
        same = sum(one.same_name for one in own)
        print(f"| {family} | {len(own)} | {_row(off, own)} | {_row(on, own)} | {same} | {named} |")


def _row(tally: Tally, own: Sequence[Judged]) -> str:
    if all(one.case.is_clean for one in own):
        return f"{tally.hits} named nobody | | | {tally.false_alarms}"
    return " | ".join(map(str, tally))


if __name__ == "__main__":
    sys.exit(main())
