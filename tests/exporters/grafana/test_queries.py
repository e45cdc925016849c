"""Every query of every dashboard on the series of a simulated job in a real Prometheus: data, labels, numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commtrace.findings.causes import PART_OF_LOSS
from tests.e2e.prometheus import PROGRAM, Prometheus, Sample
from tests.exporters.grafana.queries import RANGE_SECONDS, PanelQuery, queries
from tests.exporters.grafana.simulated_job import Simulation, ranks_of, stored

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed: apt-get install prometheus"),
]

SMALL = Simulation(tp=2, pp=1, dp=4, slow_rank=5, gpus_per_host=2, rule_seconds=30)
EMPTY_WHILE_ALL_IS_WELL = {
    "Fleet: Alerts", "Overview: Alerts", "Health of commtrace: Ranks that wait",
    *(f"{name}: annotation {what}" for name in (
        "Fleet", "Overview", "Node", "Rank", "Data x pipeline", "Communication", "Health of commtrace",
    ) for what in ("Alerts", "Pauses", "Launches")),
}  # fmt: skip


@dataclass(frozen=True)
class Watched:
    """A Prometheus and the time of its newest samples."""

    server: Prometheus
    end: int

    def panel(self, title: str, number: int = 0) -> list[Sample]:
        return self.query(title, number).run(self.server, self.end)

    @staticmethod
    def query(title: str, number: int = 0) -> PanelQuery:
        return [one for one in queries() if one.title == title][number]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    end = int(time.time()) // 15 * 15
    with stored(SMALL, tmp_path_factory.mktemp("simulated"), end) as server:
        yield Watched(server, end)


def test_every_query_gives_data(watched: Watched) -> None:
    empty = [one.title for one in queries() if not one.run(watched.server, watched.end)]
    assert set(empty) <= EMPTY_WHILE_ALL_IS_WELL


def test_every_series_has_the_labels_of_its_legend(watched: Watched) -> None:
    for query in queries():
        named = {part.partition("}}")[0] for part in query.legend.split("{{")[1:]}
        for sample in query.run(watched.server, watched.end):
            assert named <= set(sample.labels), query


def test_no_panel_has_a_series_for_every_rank_unless_it_shows_the_ten_slowest(watched: Watched) -> None:
    ranks = {
        one.title: len({sample.labels.get("rank") for sample in one.run(watched.server, watched.end)})
        for one in queries()
    }
    assert {title for title, count in ranks.items() if count >= SMALL.job.world_size} == {"Overview: Slowest ranks"}
    assert Watched.query("Overview: Slowest ranks").expr.startswith("topk(10, ")


def test_the_first_row_says_who_is_slow_since_when_and_what_it_costs(watched: Watched) -> None:
    usual, slow = step_seconds()
    (silence,) = watched.panel("Overview: Last step ago")
    assert 0 <= silence.value <= slow + 1
    (step,) = watched.panel("Overview: Step")
    assert step.value == pytest.approx(slow, rel=0.03)
    (change,) = watched.panel("Overview: Against 1 h ago")
    assert change.value == pytest.approx(slow / usual - 1, abs=0.05)
    (worst,) = watched.panel("Overview: Slowest rank")
    assert (worst.labels["rank"], worst.labels["node"]) == ("5", "node2")
    assert worst.value == pytest.approx(SMALL.factor, rel=0.05)
    (since,) = watched.panel("Overview: Slow since")
    assert since.value / 1000 == pytest.approx(watched.end - SMALL.slow_minutes * 60, abs=180)
    (lost,) = watched.panel("Overview: GPUs lost to it")
    assert 2 < lost.value < SMALL.job.world_size
    assert [one.value for one in watched.panel("Overview: Ranks")] == [8]
    assert [one.value for one in watched.panel("Overview: Ranks missing")] == [0]
    assert [one.value for one in watched.panel("Overview: Hanging ranks")] == [0]


def test_the_first_row_has_the_findings_of_the_monitor(watched: Watched) -> None:
    (verdict,) = watched.panel("Overview: Is all right?")
    assert verdict.value == 1  # slow, and no rank hangs
    costs, shares, since = ([*watched.panel("Overview: Findings", number)] for number in range(3))
    (slow,) = (one for one in costs if one.labels["kind"] == "slow")
    assert slow.labels == {
        "kind": "slow", "place": "ranks", "cause": "compute", "finding_rank": str(SMALL.slow_rank),
        "advice": "compute/ranks",
    }  # fmt: skip
    assert slow.value == pytest.approx(0.012)
    assert {one.labels["cause"] for one in costs if one.labels["kind"] == "lost"} == set(PART_OF_LOSS)
    (share,) = (one for one in shares if one.labels == slow.labels)
    (mean,) = watched.panel("Overview: Step time", 2)
    assert share.value == pytest.approx(slow.value / mean.value, rel=0.05)
    assert [one.labels for one in since] == [slow.labels]  # what is merged has the same labels
    assert since[0].value == 5_000


def test_before_the_fault_nobody_was_slow(watched: Watched) -> None:
    before = watched.end - SMALL.slow_minutes * 60 - 120
    for title in ("Overview: Slow since", "Overview: GPUs lost to it"):
        values = [one.value for one in Watched.query(title).run(watched.server, before)]
        assert values in ([], [0])
    (worst,) = Watched.query("Overview: Slowest rank").run(watched.server, before)
    assert worst.value < 1.05


def test_parts_of_the_step_add_up_to_it(watched: Watched) -> None:
    parts = sum(one.value for number in range(3) for one in watched.panel("Overview: Where the step goes", number))
    (mean,) = watched.panel("Overview: Step time", 2)
    assert parts == pytest.approx(mean.value, rel=0.02)


def test_only_the_node_of_the_slow_rank_is_slow(watched: Watched) -> None:
    nodes = {one.labels["node"]: one.value for one in watched.panel("Overview: Nodes, slowest first")}
    assert set(nodes) == {"node0", "node1", "node2", "node3"}
    assert [node for node, score in nodes.items() if score > 1.1] == ["node2"]


def test_cells_of_grids_have_labels_that_sort_as_numbers(watched: Watched) -> None:
    cells = watched.panel("Data x pipeline: Straggler score")
    assert sorted(one.labels["cell"] for one in cells) == [
        "000 000", "001 000", "002 000", "003 000",
    ]  # fmt: skip
    ((slow),) = (one for one in cells if one.value > 1.1)
    assert slow.labels["cell"] == "002 000"


def test_links_within_and_between_nodes_are_told_apart(watched: Watched) -> None:
    nodes = {
        one.labels["nodes"]: one.value for one in watched.panel("Communication: Bus bandwidth within and between nodes")
    }
    assert set(nodes) == {"within", "between"}
    assert nodes["within"] > nodes["between"]


def test_gpus_of_the_node_are_shown_where_dcgm_exporter_runs(watched: Watched) -> None:
    tensor = {one.labels["gpu"]: one.value for one in watched.panel("Node: Tensor cores active")}
    occupancy = {one.labels["gpu"]: one.value for one in watched.panel("Node: Occupancy")}
    assert tensor == {"0": 0.25, "1": 0.3125}
    assert occupancy == {"0": 0.5, "1": 0.5}


def test_variables_offer_what_there_is(watched: Watched) -> None:
    def offered(label: str, selector: str) -> list[str]:
        return watched.server.label_values(label, selector, watched.end - RANGE_SECONDS, watched.end)

    series = "commtrace_last_step_timestamp_seconds"
    assert offered("run_id", series) == ["simulated"]
    assert len(offered("rank", f'{series}{{run_id=~"simulated"}}')) == 8
    assert len(offered("node", f'{series}{{run_id=~"simulated"}}')) == 4


def step_seconds() -> tuple[float, float]:
    """How long a step takes, without and with the fault."""
    rank = next(ranks_of(SMALL, 0))
    return rank.usual[-1].duration_ns / 1e9, rank.slow[-1].duration_ns / 1e9


SIXTY_FOUR = Simulation(tp=4, pp=4, dp=4, slow_rank=37, scrape_seconds=30, rule_seconds=30, processes=2)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_query_gives_data_on_a_job_of_64_ranks_with_a_pipeline(tmp_path: Path) -> None:
    end = int(time.time()) // 30 * 30
    with stored(SIXTY_FOUR, tmp_path, end) as server:
        watched = Watched(server, end)
        asked = list(queries(scrape_seconds=SIXTY_FOUR.scrape_seconds))
        empty = {one.title for one in asked if not one.run(server, end)}
        findings = watched.panel("Overview: Findings")
        (slowest,) = watched.panel("Overview: Slowest rank")
        bubbles = watched.panel("Overview: Bubble by stage")
    assert empty <= EMPTY_WHILE_ALL_IS_WELL
    assert [one.labels["finding_rank"] for one in findings if one.labels["kind"] == "slow"] == ["37"]
    assert slowest.labels["rank"] == "37"
    assert [one.labels["pp"] for one in bubbles] == ["0", "1", "2", "3"]


# Scraped once a minute, as docs/grafana.md says of so many ranks. With a scrape every 15 s and rules every 5 s, making
# the series would take an hour: 50 million samples, and 900 evaluations of the rules.
THOUSAND = Simulation(tp=8, pp=4, dp=32, slow_rank=517, scrape_seconds=60, rule_seconds=15, processes=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_ranks_are_shown_within_two_seconds(tmp_path: Path) -> None:
    end = int(time.time()) // 60 * 60
    asked = list(queries(scrape_seconds=THOUSAND.scrape_seconds))
    with stored(THOUSAND, tmp_path, end) as server:
        seconds = {one: min(seconds_of(one, server, end) for _ in range(3)) for one in asked}
        empty = {one.title for one in asked if not one.run(server, end)}
    assert {one.title: seconds[one] for one in asked if seconds[one] > 2} == {}
    assert empty <= EMPTY_WHILE_ALL_IS_WELL


def seconds_of(query: PanelQuery, server: Prometheus, end: int) -> float:
    """Return the CPU seconds of the server, which other programs on the machine do not change."""
    before = server.cpu_seconds()
    query.run(server, end)
    return server.cpu_seconds() - before
