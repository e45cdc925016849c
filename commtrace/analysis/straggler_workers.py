"""Ranks that are slower than the ranks that do the same work, whole hosts of them, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.peers import Float64, leave_one_out_median
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.replay_segments import BACKWARD, BETWEEN, FORWARD
from commtrace.analysis.straggler_costs import ERROR_OF_MEDIAN, QUARTILES_APART, Bench, Cost
from commtrace.analysis.straggler_verdict import CAUSE_IN_WORDS, NEXT_STEP, Verdict
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64

_MOST_SUSPECTS: Final = 16
"""Replays are made for this many ranks: those with the largest excess."""

_RARE: Final = ("data", "gc")
"""Causes with spans of their own, which may strike in few steps only."""

_DEPENDENCE: Final = 1.5
"""By how much errors are larger because steps are not independent: what disturbs one often disturbs the next."""

_MOST_HIDDEN: Final = 3
"""That are told."""

_SHARE_OF_HOST: Final = 0.75
"""A host is slow when this share of its ranks is."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A rank and how much longer than its peers it takes, ns per step, by what the time went to."""

    rank: int
    excess_ns: Mapping[str, float]
    peers_ns: float
    work_of_steps_ns: Float64

    @property
    def persistence(self) -> float:
        """Share of the steps in which the rank's work exceeds that of its peers by at least half as much as typical."""
        typical = float(np.median(self.work_of_steps_ns)) - self.total_ns
        return float((self.work_of_steps_ns - typical >= self.total_ns / 2).mean())

    @property
    def total_ns(self) -> float:
        return sum(self.excess_ns.values())

    @property
    def cause(self) -> str:
        return max(self.excess_ns, key=lambda cause: self.excess_ns[cause])


class WorkerFindings(NamedTuple):
    """Verdicts, and sentences on who will hold up the job as soon as those named no longer do."""

    verdicts: list[Verdict]
    hidden: list[str]


def slow_workers(bench: Bench) -> WorkerFindings:
    """Verdicts on single ranks and on hosts all of whose ranks are slow; of few steps, only what has its own spans."""
    suspects = _suspects(bench)
    if not bench.noise_is_known:
        suspects = [suspect for suspect in suspects if suspect.cause in _RARE]
    verdicts: list[Verdict] = []
    named: list[int] = []
    slow_hosts = _slow_hosts(bench.run, suspects) if bench.noise_is_known else {}
    for host, members in slow_hosts.items():
        cost = bench.cost(at_speed_of_peers(bench, [suspect.rank for suspect in members]))
        if bench.passes(cost):
            verdicts.append(_host_verdict(bench, host, members, cost))
            named += [suspect.rank for suspect in members]
            suspects = [suspect for suspect in suspects if suspect not in members]
    for suspect in suspects[:_MOST_SUSPECTS]:
        rare = suspect.cause in _RARE
        cost = bench.cost(at_speed_of_peers(bench, [suspect.rank], suspect.cause if rare else None), rare=rare)
        lasting = rare or suspect.persistence >= bench.thresholds.persistence
        if lasting and bench.passes(cost, rare=rare):
            verdicts.append(_verdict(bench, suspect, cost))
            named.append(suspect.rank)
    unnamed = [suspect for suspect in suspects if suspect.rank not in named]
    hidden = _hidden(bench, named, unnamed[:_MOST_HIDDEN]) if named and unnamed else ()
    return WorkerFindings(verdicts, list(hidden))


def _hidden(bench: Bench, named: Sequence[int], suspects: Sequence[_Suspect]) -> Iterator[str]:
    """Ranks that cost nothing, or little, while others are even slower."""
    without_named = bench.program.step_times(at_speed_of_peers(bench, named))
    for suspect in suspects:
        without_both = bench.program.step_times(at_speed_of_peers(bench, [*named, suspect.rank]))
        saved_ms = float(np.median((without_named - without_both)[bench.steady])) / 1e6
        limits = bench.thresholds
        if saved_ms >= max(limits.cost_ms, limits.share_of_step * bench.step_ns / 1e6):
            yield (
                f"{_who(bench.run, suspect.rank)} needs {suspect.total_ns / 1e6:.1f} ms per step more than the ranks "
                f"that do the same work ({CAUSE_IN_WORDS[suspect.cause]}). Once the above is mended, that costs "
                f"{saved_ms:.1f} ms per step."
            )


def _suspects(bench: Bench) -> list[_Suspect]:
    """Ranks whose excess over their peers stands out, largest excess first."""
    segments = bench.program.segments
    excess, peers = bench.work.excess_ns(), np.nan_to_num(bench.work.peer_ns * bench.work.per_step)
    work = _work_of_steps(bench)
    share = _smallest_share(bench, work)
    data, gc = (_rare_excess(bench, values) for values in (segments.data_ns, segments.gc_ns))
    suspects = []
    for index, rank in enumerate(bench.program.ranks.tolist()):
        own = bench.work.rank == rank
        in_phase = own & (bench.work.kind < BETWEEN)
        suspect = _Suspect(
            rank=rank,
            excess_ns={
                "compute": float(excess[in_phase].sum()),
                "unknown": float(excess[own & ~in_phase].sum()),
                "data": data[rank],
                "gc": gc[rank],
            },
            peers_ns=float(peers[own].sum()),
            work_of_steps_ns=work[index],
        )
        if suspect.peers_ns > 0 and suspect.total_ns > share * suspect.peers_ns:
            suspects.append(suspect)
    return sorted(suspects, key=lambda suspect: -suspect.total_ns)


def smallest_share_of_work(bench: Bench) -> float:
    """By how much more than its peers a rank must work to be suspected, as a share."""
    return _smallest_share(bench, _work_of_steps(bench))


def _smallest_share(bench: Bench, work_of_steps: Float64) -> float:
    limits, steps = bench.thresholds, work_of_steps.shape[1]
    return max(limits.share_of_work, limits.sigmas * _error_of_difference(_noise(work_of_steps), steps))


def noise_between_steps(bench: Bench) -> float:
    """How much the work of a rank scatters from step to step, as a share of it: the typical rank."""
    return _noise(_work_of_steps(bench))


def _noise(work_of_steps: Float64) -> float:
    low, high = np.quantile(work_of_steps, [0.25, 0.75], axis=1)
    return float(np.median((high - low) / QUARTILES_APART / np.maximum(np.median(work_of_steps, axis=1), 1.0)))


def _work_of_steps(bench: Bench) -> Float64:
    """Work of every rank in every step that counts, ns; rows in the order of ``program.ranks``."""
    segments, steps = bench.program.segments, len(bench.program.steps)
    index = np.searchsorted(bench.program.ranks, segments.rank)
    work = np.bincount(index * steps + segments.step, segments.work_ns, minlength=len(bench.program.ranks) * steps)
    return np.asarray(work.reshape(-1, steps)[:, bench.steady])


def _error_of_difference(noise: float, steps: int) -> float:
    """Standard error of the difference of two medians over so many steps, each of which scatters by ``noise``."""
    return noise * ERROR_OF_MEDIAN * float(np.sqrt(2 / steps)) * _DEPENDENCE


def _rare_excess(bench: Bench, values_ns: Int64) -> dict[int, float]:
    """Of each rank: mean time per step of something rare, beyond the median of the others at its stage that do it."""
    own = _per_step(bench, values_ns)
    ranks = np.array(list(own))
    values, stage = np.array(list(own.values())), np.array([bench.stage_of_rank[rank] for rank in own])
    usual = np.zeros(len(ranks))
    some = values > 0
    usual[some] = np.nan_to_num(leave_one_out_median(stage[some], values[some]))
    for one in np.unique(stage[~some]).tolist():
        others = values[some & (stage == one)]
        usual[~some & (stage == one)] = np.median(others) if len(others) else 0.0
    return dict(zip(ranks.tolist(), (values - usual).tolist(), strict=True))


def _per_step(bench: Bench, values_ns: Int64) -> dict[int, float]:
    counted, segments = bench.counted, bench.program.segments
    totals = np.zeros(int(bench.program.ranks.max()) + 1)
    rows = np.flatnonzero(values_ns)
    rows = rows[counted[rows]]
    np.add.at(totals, segments.rank[rows], values_ns[rows])
    return {int(rank): float(totals[rank]) / bench.num_steps for rank in bench.program.ranks}


def at_speed_of_peers(bench: Bench, ranks: Sequence[int], cause: str | None = None) -> Int64:
    """Segment durations with these ranks working like their peers; only in what belongs to a cause, if given."""
    segments = bench.program.segments
    chosen = np.isin(segments.rank, ranks)
    work, data, gc = (np.where(chosen & (cause in (None, of)), 1, 0) for of in ("compute", "data", "gc"))
    return np.asarray(
        np.rint(
            segments.work_ns * np.where(work, bench.work.ratio, 1.0)
            + segments.data_ns * np.where(data, _rare_ratio(bench, segments.data_ns), 1.0)
            + segments.gc_ns * np.where(gc, _rare_ratio(bench, segments.gc_ns), 1.0)
            + segments.pause_ns
        ),
        np.int64,
    )


def _rare_ratio(bench: Bench, values_ns: Int64) -> Float64:
    """Of each segment: by how much to scale something rare so that the rank has no more of it than its peers."""
    own, excess = _per_step(bench, values_ns), _rare_excess(bench, values_ns)
    ratio = np.ones(int(bench.program.ranks.max()) + 1)
    for rank, value in own.items():
        if value > 0:
            ratio[rank] = 1 - max(excess[rank], 0.0) / value
    return np.asarray(ratio[bench.program.segments.rank])


def _slow_hosts(run: Run, suspects: Sequence[_Suspect]) -> dict[str, list[_Suspect]]:
    """Hosts with several ranks of which nearly all are suspects, while most ranks elsewhere are not."""
    node = {rank: trace.metadata.node for rank, trace in run.ranks.items()}
    hosts: dict[str, list[_Suspect]] = {}
    for suspect in suspects:
        if suspect.cause not in _RARE:  # input and garbage are a process's own
            hosts.setdefault(node[suspect.rank], []).append(suspect)
    size = {host: sum(other == host for other in node.values()) for host in set(node.values())}
    slow = {
        host: members
        for host, members in hosts.items()
        if len(members) >= 2 and len(members) >= _SHARE_OF_HOST * size[host] and size[host] < len(node)
    }
    return slow if len(slow) * 2 <= len(size) else {}


def _verdict(bench: Bench, suspect: _Suspect, cost: Cost) -> Verdict:
    trace = bench.run.ranks[suspect.rank]
    excess_ms = suspect.excess_ns[suspect.cause] / 1e6
    once = cost.when.in_words() if suspect.cause in _RARE and cost.when.is_rare else ""
    persistence = cost.persistence if suspect.cause in _RARE else suspect.persistence
    how_often = f"so in {round(persistence * bench.num_steps)} of {bench.num_steps} steps"
    if suspect.cause in _RARE:
        evidence = (
            f"{_who(bench.run, suspect.rank)} needs {_details(bench, suspect)} (mean), {excess_ms:.1f} ms more than "
            f"other ranks of its stage; {how_often}."
        )
    else:
        evidence = (
            f"{_who(bench.run, suspect.rank)} needs {_details(bench, suspect)}: {excess_ms:.1f} ms per step more than "
            f"the ranks that do the same work, which need {suspect.peers_ns / 1e6:.1f} ms (medians over steps); "
            f"{how_often}."
        )
    return Verdict(
        rank=suspect.rank,
        host=trace.metadata.node,
        cause=suspect.cause,
        who=f"rank {suspect.rank} on {trace.metadata.node}",
        cost_ms_per_step=cost.ms,
        gpu_hours_per_day=bench.gpu_hours_per_day(cost),
        persistence=persistence,
        evidence=evidence,
        next_step=NEXT_STEP[suspect.cause],
        occurrence=once,
    )


def _host_verdict(bench: Bench, host: str, members: Sequence[_Suspect], cost: Cost) -> Verdict:
    ranks = sorted(suspect.rank for suspect in members)
    shares = sorted(100 * suspect.total_ns / suspect.peers_ns for suspect in members)
    on_host = sum(trace.metadata.node == host for trace in bench.run.ranks.values())
    return Verdict(
        rank=members[0].rank,
        host=host,
        cause="host",
        who=f"host {host} ({ranks_in_words(ranks)})",
        cost_ms_per_step=cost.ms,
        gpu_hours_per_day=bench.gpu_hours_per_day(cost),
        persistence=cost.persistence,
        evidence=(
            f"{_how_many(len(ranks), on_host)} ranks on {host} need {_range(shares)} % longer "
            "per step than the ranks of other hosts that do the same work (medians over steps)."
        ),
        next_step=NEXT_STEP["host"],
    )


def _how_many(some: int, all_of_them: int) -> str:
    return f"All {some}" if some == all_of_them else f"{some} of the {all_of_them}"


def _range(ascending: Sequence[float]) -> str:
    low, high = f"{ascending[0]:.0f}", f"{ascending[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


def _who(run: Run, rank: int) -> str:
    trace = run.ranks[rank]
    place = ", ".join(f"{name} {at}" for name, at in trace.coordinates.items() if trace.parallel.get(name, 2) > 1)
    return f"Rank {rank} ({place}, {trace.metadata.node})" if place else f"Rank {rank} ({trace.metadata.node})"


def _details(bench: Bench, suspect: _Suspect) -> str:
    """What is slower, in numbers."""
    if suspect.cause in ("data", "gc"):
        values = {"data": bench.program.segments.data_ns, "gc": bench.program.segments.gc_ns}[suspect.cause]
        what = {"data": "waiting for input", "gc": "collecting garbage"}[suspect.cause]
        return f"{_per_step(bench, values)[suspect.rank] / 1e6:.1f} ms per step for {what}"
    if suspect.cause == "unknown":
        return "more time outside of forward and backward"
    parts = []
    for kind, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
        own, peers = _per_phase(bench, suspect.rank, kind)
        if own > 0:
            parts.append(f"{own / 1e6:.1f} ms per {name} (peers {peers / 1e6:.1f})")
    return " and ".join(parts) or f"{suspect.excess_ns['compute'] / 1e6:.1f} ms more"


def _per_phase(bench: Bench, rank: int, kind: int) -> tuple[float, float]:
    """Typical duration of a whole phase, own and of the peers, ns."""
    segments, work = bench.program.segments, bench.work
    mask = (segments.rank == rank) & (segments.kind == kind) & bench.counted
    phases = len(np.unique(segments.instance[mask])) / max(bench.num_steps, 1)
    entries = (work.rank == rank) & (work.kind == kind)
    if not phases:
        return 0.0, 0.0
    own = float(np.nan_to_num(work.own_ns[entries] * work.per_step[entries]).sum())
    peers = float(np.nan_to_num(work.peer_ns[entries] * work.per_step[entries]).sum())
    return own / phases, peers / phases
