"""Finds slow communication: a link between ranks, all that a rank sends, all of a rank, or a network of hosts.

Transfers that are alike are compared link by link, by the rule for the work of ranks. Where others do not tell what is
normal, as where a whole network is slow, the link's own past does, or another run. A run is cut where links change. The
slow links are then told by what they have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.replay.peers import Float64, grouped_median
from commtrace.analysis.statistics import MEDIAN_DISTANCE
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.cusum import Series, error_of_steps, find_cuts, without_single_steps
from commtrace.analysis.stragglers.limits import ALIKE, FAST_PERCENTILE, LINKS, MOST_OF_STEP
from commtrace.analysis.stragglers.link_places import Suspicion, suspicions_of
from commtrace.analysis.stragglers.link_transfers import LinkTransfers, Traffic
from commtrace.analysis.stragglers.normal import BASELINE, MAJORITY, PAST, Judged, Work, judge
from commtrace.analysis.stragglers.prices import Price, price_of
from commtrace.analysis.stragglers.stretches import cut_at
from commtrace.analysis.stragglers.usual import Usual
from commtrace.analysis.stragglers.verdict import Member, Verdict, next_step
from commtrace.trace.spans import Bool, Int64

_CAUSE: Final = "communication"
_NORMAL: Final = {
    PAST: "as in the steps in which they were fast",
    BASELINE: "as in the baseline",
}
_ELSEWHERE: Final = "as the same ones elsewhere"


class SlowLinks(NamedTuple):
    """Slow communication.

    Attributes:
        verdicts: dearest first.
        mended_ns: durations of all transfers without it; None where there is none.
        undecided: sentences on what may be slow, with what would tell.
        well_ns: typical transfers over links that are not slow in the last stretch.
    """

    verdicts: list[Verdict]
    mended_ns: Int64 | None
    undecided: tuple[str, ...] = ()
    well_ns: Mapping[Traffic, float] = {}


@dataclass(frozen=True, slots=True)
class _Links:
    """The speed of links in some steps, one row for all similar transfers over a link.

    Attributes:
        bench: of the steps.
        ns: median of the transfers; NaN where there are too few.
        is_judged: has enough transfers, and touches no slow rank.
        normal_ns: what is normal; NaN where that is not known.
        is_slow: takes far longer.
        is_known: whether it is slow can be told; where the past tells it of others, not of a link without one.
        told_by: what told normal.
    """

    bench: Bench
    ns: Float64
    is_judged: Bool
    normal_ns: Float64
    is_slow: Bool
    is_known: Bool
    told_by: tuple[str, ...]


class _Part(NamedTuple):
    """Links that are slow for one reason in one stretch."""

    stretch: int
    suspicion: Suspicion


def slow_links(
    bench: Bench,
    mended_ns: Int64,
    slow_ranks: Collection[int],
    *,
    is_cut: bool = False,
    usual: Usual | None = None,
) -> SlowLinks:
    """Find slow communication, and what the job would save without it.

    Args:
        bench: the run.
        mended_ns: durations of its segments without what was found so far.
        slow_ranks: those; they may serve their communications late, so links that touch them are not judged.
        is_cut: whether the run is cut where links change; else its steps are judged together.
        usual: what links do where the job is well.
    """
    transfers = LinkTransfers.of(bench)
    if transfers is None:
        return SlowLinks([], None)
    usual = usual or Usual()
    usual_ns = np.array([usual.transfer_ns.get(one, np.nan) for one in transfers.traffic])
    found = _judge_stretches(bench, transfers, slow_ranks, usual_ns, usual.by, is_cut=is_cut)
    well_ns = _well(transfers, found[-1])
    parts: dict[tuple[str, str], list[_Part]] = {}
    for number, links in enumerate(found):
        for one in suspicions_of(bench.run, transfers.links, links.is_known, links.is_slow):
            parts.setdefault((one.place, one.who), []).append(_Part(number, one))
    everything = [part for own in parts.values() for part in own]
    others_saved = bench.saved_ns(mended_ns)
    all_saved = bench.saved_ns(mended_ns, _mended(transfers, found, everything)) - others_saved
    verdicts: list[Verdict] = []
    named: list[_Part] = []
    for own in parts.values():
        left = [part for part in everything if part not in own]
        saved = all_saved
        if left:
            saved = all_saved + others_saved - bench.saved_ns(mended_ns, _mended(transfers, found, left))
        price = price_of(bench, [one.bench for one in found], [part.stretch for part in own], saved)
        if price is not None:
            dearest = next(part for part in own if part.stretch == price.dearest)
            verdicts.append(_verdict(transfers, found[dearest.stretch], dearest.suspicion, price))
            named += own
    if not named:
        untold = np.isnan(usual_ns) | (usual.by == PAST)
        said = _most_links(bench, mended_ns, transfers, found[0], untold)
        said = said or _most_of_step(bench, mended_ns, transfers, found[0], untold)
        return SlowLinks([], None, (said,) if said else (), well_ns)
    ordered = sorted(verdicts, key=lambda verdict: -verdict.cost_ms_per_step)
    return SlowLinks(ordered, _mended(transfers, found, named), well_ns=well_ns)


def _well(transfers: LinkTransfers, found: _Links) -> dict[Traffic, float]:
    is_well = found.is_judged & ~found.is_slow
    return {transfers.traffic[row]: float(found.ns[row]) for row in np.flatnonzero(is_well).tolist()}


def typical_transfers(bench: Bench) -> dict[Traffic, float]:
    """Return how long transfers typically take, ns."""
    transfers = LinkTransfers.of(bench)
    if transfers is None:
        return {}
    typical = transfers.typical_ns(bench.steady)
    return {one: float(ns) for one, ns in zip(transfers.traffic, typical, strict=True) if np.isfinite(ns)}


def _judge_stretches(
    bench: Bench, transfers: LinkTransfers, slow_ranks: Collection[int], usual: Float64, usual_by: str, *, is_cut: bool
) -> list[_Links]:
    """Return which links are slow in each stretch of the run; a single one where that does not change."""
    whole = [_judge(bench, transfers, slow_ranks, usual, usual_by)]
    cuts = _find_changes(bench, transfers) if is_cut and bench.noise_is_known else []
    found = _judge_each(bench, cuts, transfers, slow_ranks, usual)
    if any(_are_alike(one, other) for one, other in pairwise(found)):
        cuts = [at for at, one, other in zip(cuts, found[:-1], found[1:], strict=True) if not _are_alike(one, other)]
        found = _judge_each(bench, cuts, transfers, slow_ranks, usual)
    return found if cuts and any(one.is_slow.any() for one in found) else whole


def _judge_each(
    bench: Bench, cuts: Sequence[int], transfers: LinkTransfers, slow_ranks: Collection[int], usual: Float64
) -> list[_Links]:
    """Judge each stretch; without a baseline, the stretch in which a link was fastest tells what is usual on it."""
    benches = cut_at(bench, cuts)
    typical = np.array([transfers.typical_ns(one.steady) for one in benches])
    fastest = np.nanmin(np.where(np.isnan(typical), np.inf, typical), axis=0)
    past = np.where(np.isfinite(usual) | ~np.isfinite(fastest), usual, fastest)
    by = BASELINE if np.isfinite(usual).any() else PAST
    return [_judge(one, transfers, slow_ranks, past, by) for one in benches]


def _judge(
    bench: Bench, transfers: LinkTransfers, slow_ranks: Collection[int], usual: Float64, usual_by: str
) -> _Links:
    """Compare links with their like, and where these do not tell, with what is usual on them."""
    typical = transfers.typical_ns(bench.steady)
    number = np.arange(len(transfers), dtype=np.int64)
    touches_slow = np.array([not set(slow_ranks).isdisjoint(link.ranks) for link in transfers.links])
    is_judged = np.isfinite(typical) & ~touches_slow
    ns = np.nan_to_num(typical)
    scatter = _typical_scatter(bench, transfers, ns)
    work = Work(
        rank=number,
        peers=np.where(is_judged, transfers.like, -1 - number),
        host=np.zeros(len(number), np.int64),
        total_ns=ns,
        error_ns=scatter,
        scale_ns=_level_of_fast_ones(transfers.like, ns),
    )
    judged = judge(work, LINKS)
    if not judged.is_slow.any():
        judged = _judge_by_host(bench, work, transfers)
    least = np.maximum(LINKS.share * usual, LINKS.sigmas * scatter)
    by_usual = is_judged & ~judged.is_slow & (np.nan_to_num(ns - usual, nan=-1.0) > np.nan_to_num(least))
    normal = np.where(by_usual | np.isnan(judged.normal_ns), usual, judged.normal_ns)
    told_by = tuple(usual_by if own else by for own, by in zip(by_usual.tolist(), judged.told_by, strict=True))
    normal = np.where(is_judged, normal, np.nan)
    is_known = np.isfinite(normal) & (np.isfinite(usual) | (not by_usual.any()))
    return _Links(bench, typical, is_judged, normal, judged.is_slow | by_usual, is_known, told_by)


def _judge_by_host(bench: Bench, work: Work, transfers: LinkTransfers) -> Judged:
    """Judge links of which most may be slow: the others are normal where one host tells them apart.

    All links of that host are then slow, and no others.
    """
    node = {rank: trace.metadata.node for rank, trace in bench.run.ranks.items()}
    for host in sorted(set(node.values())):
        touches = [any(node.get(rank) == host for rank in link.ranks) for link in transfers.links]
        judged = judge(replace(work, host=np.array(touches, np.int64)), LINKS)
        if judged.is_slow.any():
            return judged
    return judge(work, LINKS)


def _find_changes(bench: Bench, transfers: LinkTransfers) -> list[int]:
    """Return where transfers over a link change, as places among the steps that count; ascending.

    Rows are made comparable: each takes as long as the typical one in its fast steps.
    """
    steps = transfers.per_step_ns(bench.steady)
    steps = steps[np.isfinite(steps).all(axis=1)]
    if not len(steps):
        return []
    level = np.percentile(steps, FAST_PERCENTILE, axis=1)
    typical = max(float(np.median(level)), 1.0)
    relative, shortest = steps / np.maximum(level, 1.0)[:, np.newaxis] * typical, bench.thresholds.fewest_steps
    smooth, of_rows = without_single_steps(relative), np.full(len(relative), typical)
    error = error_of_steps(relative, smooth, of_rows, shortest)
    return find_cuts(Series(smooth, error, LINKS.share * of_rows / 2), shortest)


def _are_alike(one: _Links, other: _Links) -> bool:
    """Return whether the same links are slow, and by as much."""
    own, others = one.ns[one.is_slow], other.ns[one.is_slow]
    same = np.array_equal(one.is_slow, other.is_slow)
    return same and bool((np.abs(own - others) <= ALIKE * np.maximum(own, others)).all())


def _typical_scatter(bench: Bench, transfers: LinkTransfers, typical: Float64) -> Float64:
    """Of each row: how far single transfers of its like are from the median of their link, on the typical link.

    The upper half counts, as a standard deviation: transfers on a busy host are short, with a long tail.
    """
    above = transfers.ns - typical[transfers.row]
    upper = (above >= 0) & bench.steady[transfers.step]
    spread = grouped_median(transfers.row[upper], above[upper], len(transfers)) / MEDIAN_DISTANCE
    told = np.isfinite(spread)
    of_like = grouped_median(transfers.like[told], spread[told], int(transfers.like.max()) + 1)
    return np.asarray(of_like[transfers.like])


def _level_of_fast_ones(like: Int64, typical: Float64) -> Float64:
    level = np.zeros(len(typical))
    for one in np.unique(like):
        own = like == one
        level[own] = np.percentile(typical[own], FAST_PERCENTILE, method="lower")
    return level


def _verdict(transfers: LinkTransfers, found: _Links, one: Suspicion, price: Price) -> Verdict:
    first = one.ranks[0]
    return Verdict(
        rank=first,
        host=found.bench.run.ranks[first].metadata.node,
        place=one.place,
        cause=_CAUSE,
        who=one.who,
        cost_ms_per_step=price.ms,
        gpu_hours_per_day=price.gpu_hours_per_day,
        persistence=price.cost.persistence,
        evidence=_evidence(one, found),
        next_step=next_step(_CAUSE, len(one.ranks)),
        members=tuple(_member(transfers, found, one, rank) for rank in one.ranks),
        stretches=price.stretches,
    )


def _evidence(one: Suspicion, found: _Links) -> str:
    slowest = max(sorted(one.rows), key=lambda row: found.ns[row] / found.normal_ns[row])
    ns, normal_ns = found.ns[slowest], found.normal_ns[slowest]
    return (
        f"Its communications take up to {ns / normal_ns:.1f} times as long, after all participants have arrived, "
        f"{_NORMAL.get(found.told_by[slowest], _ELSEWHERE)} ({ns / 1e6:.2f} against {normal_ns / 1e6:.2f} ms, "
        "medians); none of its ranks works for longer than is normal."
    )


def _member(transfers: LinkTransfers, found: _Links, one: Suspicion, rank: int) -> Member:
    """Return an end of slow links, with what its transfers take beyond normal."""
    bench, rows = found.bench, transfers.row_of_transfer
    program = bench.program.transfers
    own = np.isin(rows, list(one.rows)) & (program.rank == rank) & bench.steady[program.step]
    beyond = program.ns[own] - found.normal_ns[rows[own]]
    return Member(
        rank=rank,
        host=bench.run.ranks[rank].metadata.node,
        excess_ms_per_step=float(beyond.sum()) / 1e6 / max(bench.num_steps, 1),
    )


def _mended(transfers: LinkTransfers, found: Sequence[_Links], parts: Sequence[_Part]) -> Int64:
    """Durations of all transfers with those of these links as fast as is normal; those that are stay as they are."""
    program = found[0].bench.program.transfers
    ns = program.ns.astype(np.float64)
    for number, suspicion in parts:
        own = found[number]
        ratio, normal = np.ones(len(own.ns) + 1), np.zeros(len(own.ns) + 1)  # the last one: those in no row
        chosen = sorted(suspicion.rows)
        ratio[chosen] = own.normal_ns[chosen] / own.ns[chosen]
        normal[chosen] = own.normal_ns[chosen]
        rows = transfers.row_of_transfer
        mended = np.maximum(ns * ratio[rows], np.minimum(ns, normal[rows]))
        ns = np.where(own.bench.steady[program.step], mended, ns)
    return np.asarray(np.rint(ns), np.int64)


def _most_links(bench: Bench, mended_ns: Int64, transfers: LinkTransfers, found: _Links, untold: Bool) -> str:
    """Say that most links are far slower than a few that carry the same, if that costs enough; else empty.

    It is said of links of which no other run tells.
    """
    level = _level_of_fast_ones(transfers.like, np.nan_to_num(found.ns))
    judged = untold & np.isfinite(found.normal_ns) & np.array([by == MAJORITY for by in found.told_by])
    slower = judged & (np.nan_to_num(found.ns) > (1 + LINKS.clearly) * level)
    if not slower.any():
        return ""
    rows = np.flatnonzero(slower)
    as_fast = replace(found, normal_ns=level)
    all_of_them = _Part(0, Suspicion("", "", (), frozenset(rows.tolist())))
    saved = bench.saved_ns(mended_ns, _mended(transfers, [as_fast], [all_of_them])) - bench.saved_ns(mended_ns)
    cost = bench.cost_of(saved)
    if not bench.passes(cost):
        return ""
    slowest = int(rows[np.argmax(found.ns[rows] / level[rows])])
    alike = judged & (transfers.like == transfers.like[slowest])
    ns, fast_ns = found.ns[slowest], level[slowest]
    return (
        f"{int((slower & alike).sum())} of {int(alike.sum())} links take {ns / fast_ns:.1f} times as long as the "
        f"fastest that carry the same ({ns / 1e6:.2f} against {fast_ns / 1e6:.2f} ms): whether most links are slow, or "
        f"the fastest have a shorter way, cannot be told. With all as fast as these a step would be {cost.ms:.3g} ms "
        "shorter. A run in which the job was well tells it (--baseline RUN), or a bandwidth test between the hosts."
    )


def _most_of_step(bench: Bench, mended_ns: Int64, transfers: LinkTransfers, found: _Links, untold: Bool) -> str:
    """Say that transfers between hosts take most of the step; else empty.

    It is said of links of which no other run tells.
    """
    between = transfers.is_between_hosts & untold
    if not between.any() or not bench.noise_is_known:
        return ""
    program, rows = bench.program.transfers, transfers.row_of_transfer
    crosses = np.append(between, False)[rows]
    without = np.where(crosses, 0, program.ns)
    cost = bench.cost_of(bench.saved_ns(mended_ns, without) - bench.saved_ns(mended_ns))
    if cost.share < MOST_OF_STEP:
        return ""
    total = np.bincount(rows[crosses], program.ns[crosses], minlength=len(transfers))
    most = int(np.argmax(total))
    traffic, ns = transfers.traffic[most], float(np.nan_to_num(found.ns[most]))
    return (
        f"Transfers between hosts take {cost.share:.0%} of a step, {cost.ms:.3g} ms; most of it {traffic.operation} of "
        f"{traffic.num_bytes / 1e6:.3g} MB in {ns / 1e6:.3g} ms ({traffic.num_bytes / max(ns, 1.0):.2g} GB/s). All "
        "that are alike take about as long, so that it cannot be told whether the network is slow or the job sends too "
        "much. A run in which the network was well tells it (--baseline RUN), or a bandwidth test between pairs of "
        "hosts."
    )
