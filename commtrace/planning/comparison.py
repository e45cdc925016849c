"""Compare what a job should send and hold with what its ranks did, with a sentence for each difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from commtrace.analysis.memory import RankMemory, fullest
from commtrace.errors import ConfigurationError
from commtrace.findings.formatting import format_ranges, format_ranks, ranges
from commtrace.planning.call_counts import OUTSIDE, CallCounts, CountedCall, Counts, Shape, is_uneven, shape
from commtrace.planning.communication import GRADIENT_NORM, Traffic
from commtrace.planning.memory import Memory
from commtrace.planning.plan import Plan, plan_job
from commtrace.planning.recorded_job import recorded_job, recorded_zero_job
from commtrace.planning.zero import GATHERED_AGAIN, zero_traffic
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.run import Run

Verdict: TypeAlias = Literal["same", "explained", "different"]

_MOST_SIZES: Final = 4
_OF_PARAMETERS: Final = ("dp", "dp-cp", "expert-dp", "embedding")
"""Roles that exchange parameters and gradients, whose bytes depend on neither the sequence nor the microbatch."""

ALIKE: Final = 0.05
"""A peak is as planned within this share of the plan: workspaces and the rounding of blocks always add a little."""


class ExpectedTraffic(NamedTuple):
    """What each of some ranks should send in an iteration, and hold."""

    ranks: Sequence[int]
    traffic: tuple[Traffic, ...]
    memory: Memory | None = None  # of each of them; None if the plan has none


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """The calls of one role and operation, of each of some ranks in one step.

    Bytes are of full tensors. ``measured_bytes`` is the mean of these ranks where routing makes them uneven; None if
    the bytes of a call were not recorded.
    """

    ranks: tuple[int, ...]
    role: str
    operation: str
    expected_count: int
    measured_count: int
    expected_bytes: int
    measured_bytes: int | None
    verdict: Verdict
    reason: str  # a sentence; empty if both are the same


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The peak of the fullest of some ranks for which the same is planned."""

    ranks: tuple[int, ...]  # that recorded a peak
    planned: Memory | None  # None if the plan has no memory
    fullest_rank: int
    measured_bytes: int  # of tensors, on this rank
    lowest_bytes: int  # of tensors, on the one of these ranks that held least
    reserved_bytes: int  # on the fullest rank
    reason: str  # a sentence; empty if the peak is as planned, and without a plan


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """What ranks should send and hold by a plan, compared with what they did."""

    rows: tuple[TrafficRow, ...]
    steps: tuple[int, ...]  # that were compared: in which the first rank sent what it usually did
    notes: tuple[str, ...]
    memory: tuple[MemoryRow, ...] = ()  # by stage; empty if no rank recorded its peak
    other_sizes: tuple[str, ...] = ()  # of the run, in words; empty if it is the planned job

    @property
    def differences(self) -> int:
        """The rows that differ without an explanation in the run itself."""
        return sum(row.verdict == "different" for row in self.rows)

    @property
    def verdict(self) -> str:
        """What to look at, in a sentence; other sizes of the run stand in front of it."""
        sentence = self._found()
        if not self.other_sizes:
            return sentence
        return f"This is not the planned job: the run has {', '.join(self.other_sizes)}. {sentence}"

    def _found(self) -> str:
        worst = max(self.rows, key=_lost, default=None)
        if worst is None:
            return "Nothing was expected, and nothing was recorded."
        if worst.verdict == "different":
            number = f"{self.differences} difference{'s' if self.differences != 1 else ''}"
            return f"{number}. The largest: {worst.role} {worst.operation}. {worst.reason}"
        return f"0 differences in {len(self.rows)} kind{'s' * (len(self.rows) != 1)} of communication."

    def to_json(self) -> JsonObject:
        head: JsonObject = {"verdict": self.verdict, "differences": self.differences}
        return {**head, **fields_to_json(self)}


def _lost(row: TrafficRow) -> tuple[bool, int]:
    return row.verdict == "different", abs((row.measured_bytes or 0) - row.expected_bytes)


def compare_plan(
    expected: Iterable[ExpectedTraffic],
    sent: CallCounts,
    problems: Sequence[str] = (),
    peaks: Iterable[RankMemory] = (),
    other_sizes: Sequence[str] = (),
) -> PlanComparison:
    """Compare what ranks should send with what they usually did send in a step.

    Args:
        expected: By ranks; those that were not recorded are left out and named.
        counted: The steps of a run.
        problems: Of the run, which may explain that calls are missing.
        peaks: The memory of its ranks, as far as it was recorded.
        other_sizes: Sizes of the run that the plan has not, in words.

    Raises:
        ConfigurationError: no rank of the plan was recorded.
    """
    expected = list(expected)
    planned = sorted(rank for stage in expected for rank in stage.ranks)
    absent = [rank for rank in planned if rank not in sent.ranks]
    unplanned = sorted(set(sent.ranks).difference(planned))
    if len(absent) == len(planned):
        raise ConfigurationError(
            f"of {format_ranks(planned)}, which the plan has, none was recorded: compare the plan with its own run"
        )
    rows: list[TrafficRow] = []
    for stage in expected:
        alike: dict[Shape, list[int]] = defaultdict(list)
        for rank in stage.ranks:
            if rank in sent.ranks:
                alike[shape(sent.usual(rank).counts)].append(rank)
        for ranks in alike.values():
            rows += _rows(tuple(ranks), stage.traffic, [sent.usual(rank).counts for rank in ranks], sent)
    some_rank = next(rank for rank in planned if rank in sent.ranks)
    notes = _notes(expected, sent, absent, unplanned, some_rank)
    memory = compare_memory(((stage.ranks, stage.memory) for stage in expected), peaks)
    return PlanComparison(
        tuple(_joined(rows)), sent.usual(some_rank).steps, (*notes, *problems), tuple(memory), tuple(other_sizes)
    )


def _joined(rows: Iterable[TrafficRow]) -> Iterator[TrafficRow]:
    """Yield rows that are equal on several sets of ranks once."""
    ranks: dict[TrafficRow, list[int]] = defaultdict(list)
    for row in rows:
        ranks[replace(row, ranks=())] += row.ranks
    for row, together in ranks.items():
        yield replace(row, ranks=tuple(sorted(together)))


def expected_of_run(run: Run) -> tuple[list[ExpectedTraffic], tuple[str, ...]]:
    """Return what the ranks of a run should send by the sizes that it recorded, and notes.

    Raises:
        ConfigurationError: the run has no sizes, or they contradict one another.
    """
    zero = recorded_zero_job(run)
    if zero is not None:
        return [ExpectedTraffic(zero.ranks, zero_traffic(zero.job))], zero.notes
    plan = plan_job(recorded_job(run))
    return expected_of(plan), plan.notes


def expected_of(plan: Plan) -> list[ExpectedTraffic]:
    """Return what the ranks of a plan should send, with the roles that are recorded."""
    has_context_parallelism = plan.layout.cp > 1
    return [
        ExpectedTraffic(
            stage.ranks,
            stage.traffic
            if has_context_parallelism
            else tuple(replace(row, role=row.role.removesuffix("-cp")) for row in stage.traffic),
            stage.memory,
        )
        for stage in plan.stages
    ]


def _notes(
    expected: Sequence[ExpectedTraffic], sent: CallCounts, absent: list[int], unplanned: list[int], some_rank: int
) -> Iterator[str]:
    if absent:
        yield f"The plan also has {format_ranks(absent)}: not recorded, so not compared."
    if unplanned:
        yield f"The run also has {format_ranks(unplanned)}; the plan is of a smaller job."
    if not sent.optimizer_steps and any(row.what == GRADIENT_NORM for stage in expected for row in stage.traffic):
        yield "No optimizer made a step in these steps, so that the norm of the gradients is not expected."
    unusual = sent.unusual_steps(some_rank)
    if unusual:
        yield (
            f"Rank {some_rank} sent something else in the steps {format_ranges(ranges(unusual))}, which are not "
            f"compared; see them with --steps {unusual[0]}."
        )


def _rows(
    ranks: tuple[int, ...], traffic: Sequence[Traffic], measured: Sequence[Counts], run: CallCounts
) -> Iterator[TrafficRow]:
    sizes = _expected_sizes(traffic, has_optimizer=run.optimizer_steps > 0)
    calls: dict[tuple[str, str], dict[CountedCall, int]] = defaultdict(dict)
    for call, count in measured[0].items():
        calls[call.role, call.operation][call] = count
    uneven_bytes = _uneven_bytes(measured)
    for role, operation in sorted({*sizes, *calls}):
        wanted, sent = sizes.get((role, operation), Counter()), calls.get((role, operation), {})
        of_sizes: Counter[int] = Counter()
        for call, count in sent.items():
            of_sizes[call.num_bytes] += count
        again = sum(
            row.tensor_bytes
            for row in traffic
            if (row.role, row.operation, row.what) == (role, operation, GATHERED_AGAIN)
        )
        difference = _Difference(role, operation, wanted, of_sizes, sent, run.recomputations > 0, again)
        verdict, reason = difference.explained()
        num_bytes: int | None = sum(size * count for size, count in of_sizes.items())
        if is_uneven(role, operation):
            num_bytes = uneven_bytes.get((role, operation), num_bytes)
        yield TrafficRow(
            ranks=ranks,
            role=role,
            operation=operation,
            expected_count=wanted.total(),
            measured_count=of_sizes.total(),
            expected_bytes=sum(size * count for size, count in wanted.items()),
            measured_bytes=None if -1 in of_sizes else num_bytes,
            verdict=verdict,
            reason=reason,
        )


def _expected_sizes(traffic: Iterable[Traffic], has_optimizer: bool) -> dict[tuple[str, str], Counter[int]]:
    """Return the count by bytes of each role and operation."""
    sizes: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for row in traffic:
        if has_optimizer or row.what != GRADIENT_NORM:
            sizes[row.role, row.operation][row.bytes_per_call] += row.count
    return sizes


def _uneven_bytes(measured: Sequence[Counts]) -> dict[tuple[str, str], int]:
    """Return by role and operation the mean over ranks of the bytes that routing makes uneven."""
    totals: Counter[tuple[str, str]] = Counter()
    for counts in measured:
        for call, count in counts.items():
            if is_uneven(call.role, call.operation):
                totals[call.role, call.operation] += call.num_bytes * count
    return {kind: round(total / len(measured)) for kind, total in totals.items()}


class _Difference(NamedTuple):
    """Calls by bytes, as expected and as measured, of one role and operation."""

    role: str
    operation: str
    wanted: Counter[int]
    sent: Counter[int]
    calls: Mapping[CountedCall, int]
    recomputes: bool
    bytes_again: int  # of ``wanted``: those of an estimate of what is gathered again

    def explained(self) -> tuple[Verdict, str]:
        """Return whether it is a difference, and why."""
        wanted, sent = self.wanted, self.sent
        if wanted == sent:
            return "same", ""
        if -1 in sent:
            verdict: Verdict = "explained" if wanted.total() == sent.total() else "different"
            return verdict, "The bytes of some calls were not recorded."
        if is_uneven(self.role, self.operation) and wanted.total() == sent.total():
            return "explained", "As many calls as expected; their bytes follow the routing of tokens to experts."
        if self.bytes_again and _bytes(wanted) - self.bytes_again <= _bytes(sent) <= _bytes(wanted):
            return "explained", (
                "Extra all-gather in the backward: parameters do not stay live within stage3_max_live_parameters and "
                "stage3_max_reuse_distance. The plan is an upper limit: it gathers all of them again."
            )
        missing, extra = wanted - sent, sent - wanted
        if extra.total() == 1 and missing.total() > 1 and _bytes(extra) == _bytes(missing):
            return "explained", f"{missing.total()} buckets went in one coalesced call of {_bytes(extra):,} bytes."
        return "different", self._reason()

    def _reason(self) -> str:
        wanted, sent = self.wanted, self.sent
        if not sent:
            return (
                "Not sent, or on a path that commtrace does not see: commtrace doctor names the paths that it does not."
            )
        if not wanted:
            return f"Not in the plan: {_calls(sent)}{self._places()}. Of the script, or of an option the plan lacks."
        times = {sent[size] / count for size, count in wanted.items()}
        if sent.keys() == wanted.keys() and len(times) == 1 and (factor := times.pop()) > 1 and factor == int(factor):
            return f"Sent {'twice' if factor == 2 else f'{int(factor)} times'}{self._places()}."
        missing, extra = wanted - sent, sent - wanted
        if extra and not missing:
            return self._further(extra)
        if missing and not extra:
            return f"{_calls(missing)} {'is' if missing.total() == 1 else 'are'} missing."
        ratio = _ratio(wanted, sent)
        if ratio is not None:
            what = " or size of the parameters" if self.role in _OF_PARAMETERS else ", sequence or microbatch"
            return f"Each call has {ratio:g} times the bytes: another precision{what} than planned."
        if _bytes(wanted) == _bytes(sent):
            return f"The same bytes, divided otherwise: {_calls(extra)} instead of {_calls(missing)}."
        return f"{_calls(extra)} instead of {_calls(missing)}{self._places()}."

    def _further(self, extra: Counter[int]) -> str:
        in_backward = sum(count for call, count in self.calls.items() if call.when == "backward")
        if self.operation == "all_gather" and in_backward >= extra.total() and not self.recomputes:
            return f"Extra all-gather in the backward: parameters do not stay live. {_calls(extra)} more than planned."
        if self.recomputes and in_backward >= extra.total():
            return f"The forward's calls again in the backward, which recomputes activations: {_calls(extra)} more."
        return f"{_calls(extra)} more than planned{self._places()}."

    def _places(self) -> str:
        """Return where in the step the calls were, if they were all in one phase."""
        places = {call.when for call in self.calls}
        if len(places) != 1 or places == {OUTSIDE}:
            return ""
        return f", in the {places.pop()}"


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _ratio(wanted: Counter[int], sent: Counter[int]) -> float | None:
    """Return the factor between the bytes of all calls, if there is one."""
    ours, theirs = (sorted(sizes.elements()) for sizes in (wanted, sent))
    if len(ours) != len(theirs) or 0 in ours:
        return None
    ratios = {received / planned for received, planned in zip(theirs, ours, strict=True)}
    return ratios.pop() if len(ratios) == 1 else None


def _calls(sizes: Counter[int]) -> str:
    """Return ``3 calls of 4,096 bytes, 1 of 128``, the largest first."""
    first, *rest = sorted(sizes.items(), reverse=True)
    parts = [f"{first[1]:,} call{'s' * (first[1] != 1)} of {first[0]:,} bytes"]
    parts += [f"{count:,} of {size:,}" for size, count in rest[: _MOST_SIZES - 1]]
    left_out = len(rest) - _MOST_SIZES + 1
    return ", ".join(parts) + (f" and {left_out} other sizes" if left_out > 0 else "")


def compare_memory(
    expected: Iterable[tuple[Sequence[int], Memory | None]], peaks: Iterable[RankMemory]
) -> Iterator[MemoryRow]:
    """Yield the planned memory of ranks beside what they recorded; nothing for ranks without a recorded peak."""
    by_rank = {peak.rank: peak for peak in peaks}
    for ranks, planned in expected:
        peaks_of_ranks = [by_rank[rank] for rank in ranks if rank in by_rank]
        if peaks_of_ranks:
            most = fullest(peaks_of_ranks)
            yield MemoryRow(
                ranks=tuple(peak.rank for peak in peaks_of_ranks),
                planned=planned,
                fullest_rank=most.rank,
                measured_bytes=most.allocated_bytes,
                lowest_bytes=min(peak.allocated_bytes for peak in peaks_of_ranks),
                reserved_bytes=most.reserved_bytes,
                reason="" if planned is None else _reason(planned, most.allocated_bytes),
            )


def _reason(planned: Memory, measured_bytes: int) -> str:
    """Return what can make the difference. A peak alone does not tell which of it did."""
    kept = planned.peak_bytes - planned.activations_bytes
    if abs(measured_bytes - planned.peak_bytes) <= ALIKE * planned.peak_bytes:
        return ""
    if measured_bytes > planned.peak_bytes:
        return (
            "More than planned: the plan has no workspaces, no temporary tensors of kernels and of the loss, and no "
            "buffers of the framework. Or more activations are kept: less recomputation, more microbatches in flight."
        )
    if measured_bytes < kept:
        return (
            "Less than parameters, gradients and optimizer states would take: smaller types, a sharding that the plan "
            "lacks, or a recording without an optimizer step."
        )
    return "Parameters, gradients and optimizer states fit in it; fewer activations are kept than planned."
