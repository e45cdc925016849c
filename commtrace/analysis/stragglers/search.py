"""Who is slow, why, what it costs, and what to do: verdicts from the what-if replay.

A worker is suspected when it needs longer than the ranks that do the same work. The cost of a suspect is what the
replay saves when it works at the speed of those peers; so time that nobody waits for costs nothing, and a rank that
waits for the slow one is never named: waiting is no duration in a replay.

>>> findings = find_stragglers(run, matches)                    # doctest: +SKIP
>>> print(findings.verdicts[0].evidence)                        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from commtrace.analysis.clocks.time_of_day import step_begin_ns, step_end_ns
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.stragglers.baseline import Baseline
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.limits import RECORDED, Limits, Thresholds
from commtrace.analysis.stragglers.slow_links import slow_links
from commtrace.analysis.stragglers.slow_sets import Others, judge_sets
from commtrace.analysis.stragglers.stretches import common_change, judge_stretches
from commtrace.analysis.stragglers.uneven_sequences import uneven_sequences
from commtrace.analysis.stragglers.uneven_stages import uneven_stages
from commtrace.analysis.stragglers.usual import Usual
from commtrace.analysis.stragglers.verdict import Verdict
from commtrace.analysis.stragglers.waited import most_waited_for
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

NO_PEERS = (
    "Ranks were not compared: no two ranks do the same work (data- and tensor-parallel size are 1), so a slow rank "
    "cannot be told from a larger share of the model. Run with at least two data-parallel replicas to compare."
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The verdicts, dearest first, and what could not be judged.

    Attributes:
        verdicts: empty when nobody is slow.
        abstentions: sentences that name the missing signal.
        together_ms_per_step: what a step would save without all of the slow ranks that are named.
        waited_for: where nobody is named, for whom others waited most and why that one is no straggler.
        replay_error: how far the replayed step is from the measured one, as a share of it (median over steps); NaN
            where nothing was replayed.
    """

    verdicts: tuple[Verdict, ...] = ()
    abstentions: tuple[str, ...] = ()
    replay_error: float = float("nan")
    together_ms_per_step: float = 0.0
    waited_for: str = ""


def find_stragglers(
    run: Run,
    matches: Matches,
    thresholds: Thresholds | None = None,
    program: Program | None = None,
    baseline: Baseline | None = None,
) -> Findings:
    """Name what holds up the job.

    Args:
        run: with aligned clocks.
        matches: its communications, joined.
        thresholds: when a difference counts.
        program: the run as :func:`build_program` gives it, if there is one already.
        baseline: what the same job does where it is well.
    """
    thresholds = thresholds or Thresholds()
    if len(run.ranks) < 2:
        return Findings(abstentions=(NO_PEERS,))
    try:
        bench = Bench.of(run, program or build_program(run, matches), thresholds)
    except ReplayError as error:
        return Findings(abstentions=(f"Stragglers were not looked for: {error}",))
    abstentions = tuple(_reasons(matches, bench))
    if abstentions:
        return Findings(abstentions=abstentions, replay_error=bench.replay_error)
    stretches = judge_stretches(bench, baseline.of_ranks(bench) if baseline else {})
    sets = judge_sets(bench, stretches)
    verdicts, together = sets.verdicts, sets.together_ms
    undecided = tuple(sentence for one in stretches for sentence in one.undecided)
    if bench.noise_is_known:
        others = of_no_single_rank(
            bench,
            {rank for one in sets.verdicts for rank in one.ranks},
            sets.mended_ns,
            is_cut=True,
            usual=baseline.usual if baseline else None,
        )
        if verdicts and others.verdicts:  # what a rank costs is hidden where others wait for something else as well
            verdicts = judge_sets(bench, stretches, others.mended).verdicts
        verdicts = [*verdicts, *others.verdicts]
        together += sum(verdict.cost_ms_per_step for verdict in others.verdicts)
        undecided += others.undecided
        abstentions = tuple(dict.fromkeys(undecided))
    else:
        abstentions = (_too_few_steps(bench),)
    if not np.isfinite(bench.work.peer_ns).any() and not verdicts:
        abstentions = (NO_PEERS, *undecided)
    ordered = sorted(verdicts, key=lambda verdict: -verdict.cost_ms_per_step)
    if not ordered:
        changes = common_change(bench), baseline.difference(bench) if baseline else ""
        abstentions += tuple(filter(None, changes))
    # Where it cannot be told what is normal, a comparison with others would be one with the slow.
    waited_for = "" if ordered or undecided else most_waited_for(stretches[0], matches)
    dated = tuple(_dated(verdict, bench) for verdict in ordered)
    return Findings(dated, abstentions, bench.replay_error, together, waited_for)


def _dated(verdict: Verdict, bench: Bench) -> Verdict:
    """The verdict with the time of day of its steps; without a step of its own, since the first that was compared."""
    first = int(bench.program.steps[bench.steady][0])
    if verdict.stretches:
        first = verdict.stretches[0].first
    step = verdict.since_step if verdict.since_step >= 0 else first
    stretches = tuple(
        one._replace(since_ns=step_begin_ns(bench.run, one.first), until_ns=step_end_ns(bench.run, one.last))
        for one in verdict.stretches
    )
    return replace(verdict, since_step=step, since_ns=step_begin_ns(bench.run, step), stretches=stretches)


class OfNoSingleRank(NamedTuple):
    """What holds up the job though no rank works longer than those that do the same.

    Attributes:
        verdicts: on stages, sequences and links.
        mended: stages and links without it.
        undecided: sentences on what cannot be told.
        well: what the stages and links do that are not slow.
    """

    verdicts: list[Verdict]
    mended: Others
    undecided: tuple[str, ...]
    well: Usual


def of_no_single_rank(
    bench: Bench,
    slow_ranks: Collection[int],
    mended_ns: Int64,
    limits: Limits = RECORDED,
    *,
    is_cut: bool = False,
    usual: Usual | None = None,
) -> OfNoSingleRank:
    """Look for slow stages, sequences and links, and how to mend stages and links.

    Args:
        bench: the run.
        slow_ranks: that were found to be slow.
        mended_ns: durations of its segments without these.
        limits: from when on a stage stands out.
        is_cut: whether the run is cut where stages or links change; else its steps are judged together.
        usual: what stages and links do where the job is well.
    """
    stages = uneven_stages(bench, mended_ns, limits, is_cut=is_cut, usual=usual)
    slow = {*slow_ranks, *stages.ranks}
    if stages.ratio is not None:
        mended_ns = np.asarray(np.rint(mended_ns * stages.ratio), np.int64)
    # Ranks that are slow now and then have long microbatches, too.
    sequences = None if slow else uneven_sequences(bench)
    links = slow_links(bench, mended_ns, slow, is_cut=is_cut, usual=usual)
    verdicts = [*stages.verdicts, *([sequences] if sequences else []), *links.verdicts]
    mended = Others(stages.ratio, links.mended_ns)
    return OfNoSingleRank(verdicts, mended, stages.undecided + links.undecided, Usual(stages.well_ns, links.well_ns))


def _too_few_steps(bench: Bench) -> str:
    return (
        f"Slow ranks were not looked for: too few steps: {bench.num_steps}, at least {bench.thresholds.fewest_steps} "
        "are needed to tell a slow rank from noise"
        + ("" if bench.steady.all() else "; the first step, in which everything warms up, does not count")
        + "."
    )


def _reasons(matches: Matches, bench: Bench) -> Iterator[str]:
    if not matches.clocks_agree:
        yield (
            "Stragglers were not looked for: the clocks of the hosts could not be brought together, so who waited for "
            "whom across hosts is not known."
        )
    elif bench.replay_error > bench.thresholds.replay_error:
        yield (
            f"Stragglers were not looked for: the replayed steps differ from the measured ones by "
            f"{bench.replay_error:.0%}; spans are missing or the clocks disagree."
        )
