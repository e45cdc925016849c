"""history/hosts.py: how often each host was named."""

from __future__ import annotations

from dataclasses import replace

from commtrace.history.hosts import HostTally, Naming, tally_hosts
from commtrace.history.store import StoredRun
from commtrace.history.verdicts import MONITOR
from tests.history.factory import BEGIN_NS, entry, named, verdict


def tally(host: str, *entries: StoredRun) -> HostTally:
    return next(one for one in tally_hosts(entries).hosts if one.host == host)


def test_a_host_that_comes_back_stands_first_with_its_rate() -> None:
    report = tally_hosts([
        entry("one", verdict(named("beta", cost=3.0)), ended_ns=BEGIN_NS),
        entry("two", verdict(named("beta", "data", cost=8.0)), ended_ns=BEGIN_NS + 60 * 10**9),
        entry("three", verdict()),
        entry("four"),
    ])  # fmt: skip

    assert (report.runs, report.judged) == (4, 3)
    assert [(one.host, one.named, one.judged, one.runs, one.rate) for one in report.hosts] == [
        ("beta", 2, 3, 4, 2 / 3), ("alpha", 0, 3, 4, 0.0),
    ]  # fmt: skip
    beta = report.hosts[0]
    assert beta.causes == {"compute": 1, "data": 1}
    assert beta.largest_cost_ms_per_step == 8.0
    assert beta.last_ns == BEGIN_NS + 60 * 10**9
    assert beta.namings[0] == Naming(
        "two", "two", BEGIN_NS + 60 * 10**9, "rank 1 on beta", "data", 8.0, ("analysis",)
    )  # fmt: skip


def test_a_host_named_by_the_monitor_and_by_an_analysis_counts_once() -> None:
    one = tally("beta", entry("one", verdict(named(cost=9.0), source=MONITOR), verdict(named(cost=3.0))))

    assert (one.runs, one.judged, one.named, one.causes) == (1, 1, 1, {"compute": 1})
    assert one.namings[0].sources == ("analysis", "monitor")
    assert one.namings[0].cost_ms_per_step == 3.0  # of the analysis, which read the whole run


def test_a_host_named_by_the_monitor_alone_counts_as_well() -> None:
    one = tally("beta", entry("one", verdict(), verdict(named(), source=MONITOR)))

    assert (one.named, one.namings[0].sources) == (1, ("monitor",))


def test_two_causes_in_one_run_are_one_naming() -> None:
    one = tally("beta", entry("one", verdict(named(cost=1.0), named("beta", "data", 2.0))))

    assert (one.named, one.causes) == (1, {"compute": 1, "data": 1})
    assert [naming.cause for naming in one.namings] == ["data"]


def test_a_run_that_could_not_be_judged_is_not_in_the_rate() -> None:
    one = tally("beta", entry("one", replace(verdict(), abstentions=("too few steps",))), entry("two"))

    assert (one.runs, one.judged, one.rate, one.last_ns) == (2, 0, None, None)


def test_a_host_of_an_earlier_attempt_that_was_named_took_part() -> None:
    one = tally("gamma", entry("one", verdict(named("gamma"))))

    assert (one.runs, one.named) == (1, 1)


def test_a_copy_of_a_run_counts_once() -> None:
    whole = entry("one", verdict(named()))
    copy = replace(entry("one", verdict(named())), directory="copy")

    report = tally_hosts([whole, copy])

    assert (report.runs, tally("beta", whole, copy).named) == (1, 1)


def test_the_end_of_a_run_without_a_clock_is_when_it_was_judged() -> None:
    assert tally("beta", entry("one", verdict(named()), ended_ns=None)).last_ns == BEGIN_NS
