"""Find slow communication: a link between ranks, all that a rank sends, all of a rank, or a network of hosts.

Similar transfers are compared between links; slow links are then named by what they have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace as replace_fields

from commtrace.analysis.keys import grouped
from commtrace.analysis.replay.scenarios import MEASURED, NormalLinks, Replay, Scenario
from commtrace.analysis.replay.step_statistics import LinkTraffic, TransferLink, TransferTable
from commtrace.analysis.statistics import MAD_TO_SIGMA, MEDIAN_DISTANCE, Float64, grouped_median, nan_median
from commtrace.analysis.stragglers.change_points import Series, cut_at, error_of_steps, find_cuts, without_single_steps
from commtrace.analysis.stragglers.costs import (
    TotalCost,
    cost_of,
    finding_of,
    makes_steps_long,
    stands_out,
    total_cost,
)
from commtrace.analysis.stragglers.limits import (
    ALIKE,
    FAST_PERCENTILE,
    FEWEST_TRANSFERS,
    LINKS,
    MOST_OF_STEP,
    SHARE_OF_HOST,
    STRUCK,
)
from commtrace.analysis.stragglers.mended import MendedFinding, costliest_first
from commtrace.analysis.stragglers.normal import BASELINE, MAJORITY, PAST, Judged, Usual, Work, judge
from commtrace.analysis.stragglers.strikes import not_by_chance, runs_of
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.findings.causes import LINK, NETWORK, RANKS, advice
from commtrace.findings.finding import Finding, Member, Norm, not_judged
from commtrace.findings.formatting import format_ranks
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The transfers of the steps that count, one row for all similar transfers over a link."""

    traffic: tuple[LinkTraffic, ...]
    like: Int64  # equal for rows of the same operation, size and number of members, within hosts or between them
    is_between_hosts: Bool
    row: Int64  # of each communication, as are step and ns
    step: Int64
    ns: Float64
    each: TransferTable  # of every participant

    @classmethod
    def of(cls, table: TransferTable, counted: Bool, node: Mapping[int, str]) -> LinkTransfers | None:
        """Return the exact transfers of the steps that count; None if these are too few. ``node`` is by rank."""
        rows = np.flatnonzero(counted[table.step] & (table.row >= 0) & table.exact)
        if len(rows) < FEWEST_TRANSFERS:
            return None
        first, join = grouped(table.join[rows])
        ns = np.zeros(len(first))
        np.maximum.at(ns, join, table.ns[rows].astype(np.float64))  # a sender may not see the end of what it sent
        crosses = [len({node.get(rank) for rank in traffic.link.ranks}) > 1 for traffic in table.traffic]
        number: dict[tuple[str, int, int, bool], int] = {}
        like = [
            number.setdefault((traffic.operation, traffic.num_bytes, traffic.participants, between), len(number))
            for traffic, between in zip(table.traffic, crosses, strict=True)
        ]
        return cls(
            traffic=table.traffic,
            like=np.array(like, np.int64),
            is_between_hosts=np.array(crosses),
            row=table.row[rows][first].astype(np.int64),
            step=table.step[rows][first].astype(np.int64),
            ns=ns,
            each=table,
        )

    def __len__(self) -> int:
        return len(self.traffic)

    @property
    def links(self) -> tuple[TransferLink, ...]:
        return tuple(traffic.link for traffic in self.traffic)

    def typical_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in these steps; NaN if there are too few transfers."""
        chosen = steps[self.step]
        enough = np.bincount(self.row[chosen], minlength=len(self)) >= FEWEST_TRANSFERS
        return np.where(enough, grouped_median(self.row[chosen], self.ns[chosen], len(self)), np.nan)

    def per_step_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in each of these steps, shape (rows, steps); NaN without any."""
        count = len(steps)
        medians = grouped_median(self.row * count + self.step, self.ns, len(self) * count)
        return np.asarray(medians.reshape(-1, count)[:, steps])


_OFTEN: Final = 0.5
"""Share of consecutive steps, in each of which some link is slow, in which a link must be."""

_QUICK: Final = 0.5
"""Share of the excess from which on links are slow, below which a link is certainly not."""

COMMUNICATION: Final = "communication"
"""The cause."""
_NORMAL: Final = {
    PAST: "as in the steps in which they were fast",
    BASELINE: "as in the baseline",
}
_ELSEWHERE: Final = "as the same ones elsewhere"


class SlowLinks(NamedTuple):
    """Findings, costliest first, and the scenario without them."""

    mended: list[MendedFinding]
    normal: Scenario = MEASURED
    undecided: tuple[Finding, ...] = ()
    healthy_ns: Mapping[LinkTraffic, float] = {}  # typical transfers over links that are not slow in the last stretch


@dataclass(frozen=True, slots=True)
class _Links:
    """The speed of links in some steps, one row for all similar transfers over a link."""

    work: WorkStatistics
    ns: Float64  # median of the transfers; NaN if there are too few
    is_judged: Bool  # has enough transfers and touches no slow rank
    normal_ns: Float64  # NaN if unknown
    is_slow: Bool
    is_known: Bool  # ``is_slow`` is certain; not for a link without a past if other links are judged by theirs
    norm_source: tuple[Norm, ...]

    @property
    def is_quick(self) -> Bool:
        """Return which links are certainly not slow."""
        return self.is_known & ~self.is_slow & _is_quick(self.ns, self.normal_ns)


class _SlowStretch(NamedTuple):
    """Links that are slow for one reason in one stretch."""

    stretch: int
    suspicion: Suspicion


def slow_links(
    work: WorkStatistics,
    replay: Replay,
    others: Scenario,
    slow_ranks: Collection[int],
    *,
    is_cut: bool = False,
    usual: Usual | None = None,
) -> SlowLinks:
    """Find slow communication, and what the job would save without it.

    Links of ``slow_ranks`` are not judged: these ranks may serve their communications late. ``others`` is the scenario
    without earlier findings; ``usual`` is the job when it is healthy; ``is_cut`` cuts the run where links change, and
    looks for links that are slow in a few of its steps.
    """
    transfers = _transfers_of(work)
    if transfers is None:
        return SlowLinks([])
    usual = usual or Usual()
    usual_ns = np.array([usual.transfer_ns.get(traffic, np.nan) for traffic in transfers.traffic])
    stretches = _judge_stretches(work, transfers, slow_ranks, usual_ns, usual.by, is_cut=is_cut)
    healthy_ns = _healthy(transfers, stretches[-1])
    parts: dict[tuple[str, str], list[_SlowStretch]] = {}
    # A direction is told apart by all stretches alike.
    is_quick = np.logical_and.reduce(
        [links.is_quick for links in stretches if links.is_slow.any()] or [stretches[0].is_quick]
    )
    for number, links in enumerate(stretches):
        for suspicion in suspicions_of(work.run, transfers.links, links.is_known, links.is_slow, is_quick):
            parts.setdefault((suspicion.place, suspicion.who), []).append(_SlowStretch(number, suspicion))
    everything = [part for group in parts.values() for part in group]
    without = [[part for part in everything if part not in group] for group in ([], *parts.values())] if parts else []
    times = replay.steps_ns([others + _normal_links(stretches, left) for left in without])
    mended: list[MendedFinding] = []
    named: list[_SlowStretch] = []
    for group, without_others in zip(parts.values(), times[1:], strict=True):
        saved = without_others - times[0]
        cost = total_cost(work, [stretch.work for stretch in stretches], [part.stretch for part in group], saved)
        if cost is not None:
            costliest = next(part for part in group if part.stretch == cost.costliest)
            finding = _finding(transfers, stretches[costliest.stretch], costliest.suspicion, cost)
            mended.append(MendedFinding(finding, _normal_links(stretches, group)))
            named += group
    normal = _normal_links(stretches, named)
    in_few_steps = _slow_in_few_steps(work, replay, others + normal, transfers, stretches, slow_ranks) if is_cut else []
    mended += [MendedFinding(few_steps.finding, Scenario(transfers=(few_steps.rule,))) for few_steps in in_few_steps]
    normal += Scenario(transfers=tuple(few_steps.rule for few_steps in in_few_steps))
    if not mended:
        unknown = np.isnan(usual_ns) | (usual.by == PAST)
        said = _most_links(replay, others, transfers, stretches[0], unknown)
        said = said or _most_of_step(replay, others, transfers, stretches[0], unknown)
        return SlowLinks([], undecided=(not_judged(LINK, said),) if said else (), healthy_ns=healthy_ns)
    return SlowLinks(costliest_first(mended), normal, healthy_ns=healthy_ns)


class _FewSteps(NamedTuple):
    """Links that are slow in a few steps, and the rule by which they are not."""

    finding: Finding
    rule: NormalLinks


def _slow_in_few_steps(
    work: WorkStatistics,
    replay: Replay,
    others: Scenario,
    transfers: LinkTransfers,
    stretches: Sequence[_Links],
    slow_ranks: Collection[int],
) -> list[_FewSteps]:
    """Find the links that are slow in a few steps; ``stretches`` in which they are slow are not looked at."""
    if not work.noise_is_known:
        return []
    per_step = transfers.per_step_ns(work.steady)
    for links in stretches:
        per_step[np.ix_(links.is_slow, links.work.steady[work.steady])] = np.nan
    typical = nan_median(per_step)
    touches_slow = np.array([not set(slow_ranks).isdisjoint(link.ranks) for link in transfers.links])
    is_known = np.isfinite(typical) & ~touches_slow
    scatter = MAD_TO_SIGMA * nan_median(np.abs(per_step - typical[:, np.newaxis]))
    least = np.maximum((1 + LINKS.share) * typical, typical + STRUCK * scatter)
    least_ns = np.nan_to_num(least)[:, np.newaxis] * _slowdown_of_all(per_step, typical)
    is_struck = is_known[:, np.newaxis] & (np.nan_to_num(per_step) > least_ns)
    steps: dict[Suspicion, set[int]] = {}
    for first, last in runs_of(np.flatnonzero(is_struck.any(axis=0)).tolist()):
        is_slow = is_struck[:, first : last + 1].mean(axis=1) >= _OFTEN
        is_quick = is_known & ~is_slow & _is_quick(nan_median(per_step[:, first : last + 1]), typical)
        for suspicion in suspicions_of(work.run, transfers.links, is_known, is_slow, is_quick):
            struck = is_struck[sorted(suspicion.rows)].any(axis=0)
            steps.setdefault(suspicion, set()).update(np.flatnonzero(struck[first : last + 1]) + first)
    num_links = len({frozenset(link.ranks) for link in transfers.links})
    rules: list[tuple[Suspicion, _Links, NormalLinks]] = []
    for suspicion, at in not_by_chance(steps, num_links, work.num_steps).items():
        chosen = np.zeros(len(work.steady), np.bool_)
        chosen[np.flatnonzero(work.steady)[list(at)]] = True
        ns = np.nan_to_num(nan_median(per_step[:, list(at)]))
        rows = sorted(suspicion.rows)
        links = _Links(replace(work, steady=chosen), ns, is_known, typical, is_known, is_known, (PAST,) * len(ns))
        ratio, normal_ns = np.ones(len(ns)), np.zeros(len(ns))
        ratio[rows], normal_ns[rows] = typical[rows] / np.maximum(ns[rows], 1.0), typical[rows]
        rules.append((suspicion, links, NormalLinks(chosen, ratio, normal_ns)))
    slow = []
    for suspicion, links, rule in rules:
        # The cost of a link is hidden where others wait for another one as well.
        other_rules = tuple(other_rule for _, _, other_rule in rules if other_rule is not rule)
        saved_ns = replay.saved_ns(Scenario(transfers=(rule,)), others + Scenario(transfers=other_rules))
        cost = total_cost(work, [work], [0], saved_ns, rare=True)
        if cost is not None and makes_steps_long(work, cost.cost):
            named = _finding(transfers, links, suspicion, cost)
            slow.append(_FewSteps(replace_fields(named, occurrence=cost.when if cost.is_of_some_steps else None), rule))
    return slow


def _is_quick(ns: Float64, normal_ns: Float64) -> Bool:
    """Return which links are known to take hardly longer than is normal."""
    return np.asarray(np.nan_to_num(ns - (1 + _QUICK * LINKS.share) * normal_ns, nan=1.0) <= 0)


def _slowdown_of_all(per_step: Float64, typical: Float64) -> Float64:
    """Return the multiple of its typical time that even a fast link takes, in each step; at least 1."""
    # A busy machine delays the communications of all links, for several steps in a row: no single one is at fault.
    relative = per_step / np.maximum(typical, 1.0)[:, np.newaxis]
    is_known = np.isfinite(relative).any(axis=0)
    slowdown = np.ones(per_step.shape[1])
    slowdown[is_known] = np.nanpercentile(relative[:, is_known], FAST_PERCENTILE, axis=0)
    return np.maximum(slowdown, 1.0)


def _healthy(transfers: LinkTransfers, judged: _Links) -> dict[LinkTraffic, float]:
    is_healthy = judged.is_judged & ~judged.is_slow
    return {transfers.traffic[row]: float(judged.ns[row]) for row in np.flatnonzero(is_healthy).tolist()}


def typical_transfers(work: WorkStatistics) -> dict[LinkTraffic, float]:
    """Return the typical time of transfers, ns."""
    transfers = _transfers_of(work)
    if transfers is None:
        return {}
    typical = transfers.typical_ns(work.steady)
    return {traffic: float(ns) for traffic, ns in zip(transfers.traffic, typical, strict=True) if np.isfinite(ns)}


def _transfers_of(work: WorkStatistics) -> LinkTransfers | None:
    node = {rank: trace.metadata.node for rank, trace in work.run.ranks.items()}
    return LinkTransfers.of(work.of_steps.transfers, work.steady, node)


def _judge_stretches(
    work: WorkStatistics,
    transfers: LinkTransfers,
    slow_ranks: Collection[int],
    usual: Float64,
    usual_by: Norm,
    *,
    is_cut: bool,
) -> list[_Links]:
    whole = [_judge(work, transfers, slow_ranks, usual, usual_by)]
    cuts = _find_changes(work, transfers) if is_cut and work.noise_is_known else []
    stretches = _judge_each(work, cuts, transfers, slow_ranks, usual)
    if any(_are_alike(stretch, next_stretch) for stretch, next_stretch in pairwise(stretches)):
        cuts = [
            at
            for at, stretch, next_stretch in zip(cuts, stretches[:-1], stretches[1:], strict=True)
            if not _are_alike(stretch, next_stretch)
        ]
        stretches = _judge_each(work, cuts, transfers, slow_ranks, usual)
    return stretches if cuts and any(stretch.is_slow.any() for stretch in stretches) else whole


def _judge_each(
    work: WorkStatistics, cuts: Sequence[int], transfers: LinkTransfers, slow_ranks: Collection[int], usual: Float64
) -> list[_Links]:
    """Judge each stretch. Without a baseline, the stretch in which a link was fastest shows its usual time."""
    stretches = cut_at(work, cuts)
    typical = np.array([transfers.typical_ns(stretch.steady) for stretch in stretches])
    fastest = np.nanmin(np.where(np.isnan(typical), np.inf, typical), axis=0)
    past = np.where(np.isfinite(usual) | ~np.isfinite(fastest), usual, fastest)
    by = BASELINE if np.isfinite(usual).any() else PAST
    return [_judge(stretch, transfers, slow_ranks, past, by) for stretch in stretches]


def _judge(
    work: WorkStatistics, transfers: LinkTransfers, slow_ranks: Collection[int], usual: Float64, usual_by: Norm
) -> _Links:
    """Compare similar links; if these do not decide, compare with their usual time."""
    typical = transfers.typical_ns(work.steady)
    number = np.arange(len(transfers), dtype=np.int64)
    touches_slow = np.array([not set(slow_ranks).isdisjoint(link.ranks) for link in transfers.links])
    is_judged = np.isfinite(typical) & ~touches_slow
    ns = np.nan_to_num(typical)
    scatter = _typical_scatter(work, transfers, ns)
    of_links = Work(
        rank=number,
        peers=np.where(is_judged, transfers.like, -1 - number),
        host=np.zeros(len(number), np.int64),
        total_ns=ns,
        error_ns=scatter,
        scale_ns=_level_of_fast_ones(transfers.like, ns),
    )
    judged = judge(of_links, LINKS)
    if not judged.is_slow.any():
        judged = _judge_by_host(work, of_links, transfers)
    least = np.maximum(LINKS.share * usual, LINKS.sigmas * scatter)
    by_usual = is_judged & ~judged.is_slow & (np.nan_to_num(ns - usual, nan=-1.0) > np.nan_to_num(least))
    normal = np.where(by_usual | np.isnan(judged.normal_ns), usual, judged.normal_ns)
    norm_source = tuple(
        usual_by if is_by_usual else by for is_by_usual, by in zip(by_usual.tolist(), judged.norm_source, strict=True)
    )
    normal = np.where(is_judged, normal, np.nan)
    is_known = np.isfinite(normal) & (np.isfinite(usual) | (not by_usual.any()))
    return _Links(work, typical, is_judged, normal, judged.is_slow | by_usual, is_known, norm_source)


def _judge_by_host(work: WorkStatistics, of_links: Work, transfers: LinkTransfers) -> Judged:
    """Judge links of which most may be slow: those of one host are slow if the others differ from them."""
    node = {rank: trace.metadata.node for rank, trace in work.run.ranks.items()}
    for host in sorted(set(node.values())):
        touches = [any(node.get(rank) == host for rank in link.ranks) for link in transfers.links]
        judged = judge(replace(of_links, host=np.array(touches, np.int64)), LINKS)
        if judged.is_slow.any():
            return judged
    return judge(of_links, LINKS)


def _find_changes(work: WorkStatistics, transfers: LinkTransfers) -> list[int]:
    """Return the steps at which transfers over a link change, as indices among the steps that count."""
    steps = transfers.per_step_ns(work.steady)
    steps = steps[np.isfinite(steps).all(axis=1)]
    if not len(steps):
        return []
    level = np.percentile(steps, FAST_PERCENTILE, axis=1)
    typical = max(float(np.median(level)), 1.0)
    relative, shortest = steps / np.maximum(level, 1.0)[:, np.newaxis] * typical, work.thresholds.fewest_steps
    smooth, of_rows = without_single_steps(relative), np.full(len(relative), typical)
    error = error_of_steps(relative, smooth, of_rows, shortest)
    return find_cuts(Series(smooth, error, LINKS.share * of_rows / 2), shortest)


def _are_alike(stretch: _Links, next_stretch: _Links) -> bool:
    slow_ns, next_slow_ns = stretch.ns[stretch.is_slow], next_stretch.ns[stretch.is_slow]
    same = np.array_equal(stretch.is_slow, next_stretch.is_slow)
    return same and bool((np.abs(slow_ns - next_slow_ns) <= ALIKE * np.maximum(slow_ns, next_slow_ns)).all())


def _typical_scatter(work: WorkStatistics, transfers: LinkTransfers, typical: Float64) -> Float64:
    """Return the distance of single transfers of each kind from the median of their link, on the typical link."""
    # The upper half counts: transfers on a busy host are short, with a long tail.
    above = transfers.ns - typical[transfers.row]
    upper = (above >= 0) & work.steady[transfers.step]
    spread = grouped_median(transfers.row[upper], above[upper], len(transfers)) / MEDIAN_DISTANCE
    known = np.isfinite(spread)
    of_like = grouped_median(transfers.like[known], spread[known], int(transfers.like.max()) + 1)
    return np.asarray(of_like[transfers.like])


def _level_of_fast_ones(like: Int64, typical: Float64) -> Float64:
    level = np.zeros(len(typical))
    for number in np.unique(like):
        is_alike = like == number
        level[is_alike] = np.percentile(typical[is_alike], FAST_PERCENTILE, method="lower")
    return level


def _finding(transfers: LinkTransfers, judged: _Links, suspicion: Suspicion, cost: TotalCost) -> Finding:
    slowest = max(sorted(suspicion.rows), key=lambda row: judged.ns[row] / judged.normal_ns[row])
    return finding_of(
        suspicion.place,
        COMMUNICATION,
        suspicion.who,
        cost,
        members=tuple(_member(transfers, judged, suspicion, rank) for rank in suspicion.ranks),
        norm=judged.norm_source[slowest],
        evidence=_evidence(judged, slowest),
        advice=advice(COMMUNICATION, len(suspicion.ranks)),
    )


def _evidence(judged: _Links, slowest: int) -> str:
    ns, normal_ns = judged.ns[slowest], judged.normal_ns[slowest]
    return (
        f"Its communications take up to {ns / normal_ns:.1f} times as long, after all participants have arrived, "
        f"{_NORMAL.get(judged.norm_source[slowest], _ELSEWHERE)} ({ns / 1e6:.2f} against {normal_ns / 1e6:.2f} ms, "
        "medians); none of its ranks works for longer than is normal."
    )


def _member(transfers: LinkTransfers, judged: _Links, suspicion: Suspicion, rank: int) -> Member:
    work, each = judged.work, transfers.each
    chosen = np.isin(each.row, list(suspicion.rows)) & (each.rank == rank) & work.steady[each.step]
    beyond = each.ns[chosen] - judged.normal_ns[each.row[chosen]]
    return Member(
        rank=rank,
        host=work.run.ranks[rank].metadata.node,
        excess_ns=float(beyond.sum()) / max(work.num_steps, 1),
    )


def _normal_links(stretches: Sequence[_Links], parts: Sequence[_SlowStretch]) -> Scenario:
    rules = []
    for number, suspicion in parts:
        stretch = stretches[number]
        ratio, normal = np.ones(len(stretch.ns)), np.zeros(len(stretch.ns))
        chosen = sorted(suspicion.rows)
        ratio[chosen] = stretch.normal_ns[chosen] / stretch.ns[chosen]
        normal[chosen] = stretch.normal_ns[chosen]
        rules.append(NormalLinks(stretch.work.steady, ratio, normal))
    return Scenario(transfers=tuple(rules))


def _most_links(replay: Replay, others: Scenario, transfers: LinkTransfers, judged_links: _Links, unknown: Bool) -> str:
    """Say that most links are far slower than a few that carry the same, if that costs enough."""
    level = _level_of_fast_ones(transfers.like, np.nan_to_num(judged_links.ns))
    judged = (
        unknown & np.isfinite(judged_links.normal_ns) & np.array([by == MAJORITY for by in judged_links.norm_source])
    )
    slower = judged & (np.nan_to_num(judged_links.ns) > (1 + LINKS.clearly) * level)
    if not slower.any():
        return ""
    rows = np.flatnonzero(slower)
    as_fast = replace(judged_links, normal_ns=level)
    all_of_them = _SlowStretch(0, Suspicion("", "", (), frozenset(rows.tolist())))
    cost = cost_of(judged_links.work, replay.saved_ns(_normal_links([as_fast], [all_of_them]), others))
    if not stands_out(judged_links.work, cost):
        return ""
    slowest = int(rows[np.argmax(judged_links.ns[rows] / level[rows])])
    alike = judged & (transfers.like == transfers.like[slowest])
    ns, fast_ns = judged_links.ns[slowest], level[slowest]
    return (
        f"{int((slower & alike).sum())} of {int(alike.sum())} links take {ns / fast_ns:.1f} times as long as the "
        f"fastest that carry the same ({ns / 1e6:.2f} against {fast_ns / 1e6:.2f} ms): either most links are slow, or "
        f"the fastest have a shorter path. With all as fast as these, a step would be {cost.ns / 1e6:.1f} ms shorter. "
        "A healthy run (--baseline RUN) or a bandwidth test between the hosts decides."
    )


def _most_of_step(
    replay: Replay, others: Scenario, transfers: LinkTransfers, judged_links: _Links, unknown: Bool
) -> str:
    """Say that transfers between hosts take most of the step."""
    between = transfers.is_between_hosts & unknown
    if not between.any() or not judged_links.work.noise_is_known:
        return ""
    at_once = NormalLinks(np.ones_like(judged_links.work.steady), np.where(between, 0.0, 1.0), np.zeros(len(between)))
    cost = cost_of(judged_links.work, replay.saved_ns(Scenario(transfers=(at_once,)), others))
    if cost.share < MOST_OF_STEP:
        return ""
    each = transfers.each
    # Row −1, of transfers without other participants, reads the appended value.
    crosses = np.append(between, False)[each.row] & judged_links.work.steady[each.step]
    total = np.bincount(each.row[crosses], each.ns[crosses], minlength=len(transfers))
    most = int(np.argmax(total))
    traffic, ns = transfers.traffic[most], float(np.nan_to_num(judged_links.ns[most]))
    return (
        f"Transfers between hosts take {cost.share:.0%} of a step, {cost.ns / 1e6:.1f} ms; most of it "
        f"{traffic.operation} of {traffic.num_bytes / 1e6:.1f} MB in {ns / 1e6:.2f} ms "
        f"({traffic.num_bytes / max(ns, 1.0):.2g} GB/s). All similar transfers take about as long: "
        "either the network is slow, or the job sends too much. A run on a healthy network (--baseline RUN) or a "
        "bandwidth test between pairs of hosts decides."
    )


_MOST_HOSTS = 3


class Suspicion(NamedTuple):
    """Slow links that share a place; ``ranks`` are the suspects, or the ends of the links."""

    place: str
    who: str
    ranks: tuple[int, ...]
    rows: frozenset[int]


class _Place(NamedTuple):
    """A place of slow links, with the rows of all links there."""

    place: str
    who: str
    ranks: tuple[int, ...]
    rows: list[int]


def suspicions_of(
    run: Run, links: Sequence[TransferLink], is_known: Bool, is_slow: Bool, is_quick: Bool
) -> Iterator[Suspicion]:
    """Yield the places that slow links share: first those that explain many links, then single links.

    A link is called slow in one direction if all that passes in the other one is known, and certainly not slow.
    """
    left = {row for row in range(len(links)) if is_slow[row]}
    for place in _places(run, links, frozenset(left)):
        known = [row for row in place.rows if is_known[row]]
        slow = left.intersection(known)
        all_slow = sum(bool(is_slow[row]) for row in known)
        partners = {frozenset(links[row].ranks) for row in slow}
        if len(partners) > 1 and all_slow >= SHARE_OF_HOST * len(known):
            left -= slow
            yield Suspicion(place.place, place.who, place.ranks, frozenset(slow))
    pairs: dict[frozenset[int], list[int]] = {}
    for row in sorted(left):
        pairs.setdefault(frozenset(links[row].ranks), []).append(row)
    for rows in pairs.values():
        is_one_way = _is_one_way(links, rows, is_quick)
        ranks = links[rows[0]].ranks if is_one_way else tuple(sorted(links[rows[0]].ranks))
        yield Suspicion(LINK, _format_link(run, ranks, is_one_way=is_one_way), ranks, frozenset(rows))


def _is_one_way(links: Sequence[TransferLink], slow: Sequence[int], is_quick: Bool) -> bool:
    """Return whether these slow rows are one direction of a link of which the other direction is certainly not slow."""
    first = links[slow[0]]
    back = [row for row, link in enumerate(links) if link.is_directed and link.ranks == first.ranks[::-1]]
    return all(links[row] == first for row in slow) and first.is_directed and bool(back) and bool(is_quick[back].all())


def _places(run: Run, links: Sequence[TransferLink], slow: frozenset[int]) -> Iterator[_Place]:
    hosts: dict[str, list[int]] = {}
    for rank, trace in run.ranks.items():
        hosts.setdefault(trace.metadata.node, []).append(rank)
    of_hosts = {host: _of_host(links, host, ranks) for host, ranks in hosts.items()}
    network = sorted({row for of_host in of_hosts.values() for row in of_host.rows})
    # With all of the network slow, one host is to blame only if it is at an end of all slow links, and no other is.
    if sum(slow.intersection(network) <= set(of_host.rows) for of_host in of_hosts.values()) != 1:
        used = sorted({rank for row in network for rank in links[row].ranks})
        yield _Place(NETWORK, f"network between {_format_hosts(run, used)}", tuple(used), network)
    yield from (of_host for of_host in of_hosts.values() if len(of_host.ranks) > 1)
    for rank, trace in run.ranks.items():
        where = f"rank {rank} on {trace.metadata.node}"
        yield _Place(RANKS, where, (rank,), [row for row, link in enumerate(links) if rank in link.ranks])
        sent = [row for row, link in enumerate(links) if link.is_directed and link.ranks[0] == rank]
        yield _Place(RANKS, f"what {where} sends", (rank,), sent)


def _of_host(links: Sequence[TransferLink], host: str, ranks: Sequence[int]) -> _Place:
    crossing = [row for row, link in enumerate(links) if 0 < len(set(ranks).intersection(link.ranks)) < len(link.ranks)]
    used = {rank for row in crossing for rank in links[row].ranks}.intersection(ranks)
    return _Place(NETWORK, f"network of host {host} ({format_ranks(ranks)})", tuple(sorted(used)), crossing)


def _format_hosts(run: Run, ranks: Sequence[int]) -> str:
    hosts = sorted({run.ranks[rank].metadata.node for rank in ranks})
    words = f"hosts {', '.join(hosts)}" if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"
    return f"{words} ({format_ranks(ranks)})"


def _format_link(run: Run, ranks: Sequence[int], *, is_one_way: bool) -> str:
    """Return ``link from rank 2 on a to rank 4 on b``; ``between`` if it is not slow in this direction alone."""
    if len(ranks) > 2:
        return f"group of {format_ranks(ranks)}"
    ends = [f"rank {rank} on {run.ranks[rank].metadata.node}" for rank in ranks]
    return f"link from {ends[0]} to {ends[1]}" if is_one_way else f"link between {' and '.join(ends)}"
