"""How long every query of the dashboards takes in a real Prometheus, on the series of a simulated job.

    python -m bench.dashboards [--tp 8 --pp 4 --dp 32 --scrape 15 --minutes 75 --processes 1]

The series are made by the exporter's own code (tests/exporters/grafana/simulated_job.py); the default is a job of 1,024
ranks. Needs `apt-get install prometheus`, and 10 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.e2e.prometheus import Prometheus
from tests.exporters.grafana.queries import queries
from tests.exporters.grafana.simulated_job import SCRAPE_SECONDS, Simulation, stored
from tools.prometheus_rules import write

TIMES = 3
_AHEAD_SECONDS = 3600  # the samples reach into the future, so that the rules still find them when they are evaluated


def seconds_of_queries(server: Prometheus, end: float, simulation: Simulation) -> dict[str, dict[str, float]]:
    """Return the median seconds of each query, by dashboard and panel."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    rank, node = str(simulation.slow_rank), f"node{simulation.slow_rank // simulation.gpus_per_host}"
    for number, query in enumerate(queries(rank, node, scrape_seconds=simulation.scrape_seconds)):
        times = []
        for _ in range(TIMES):
            before = time.monotonic()
            query.run(server, end)
            times.append(time.monotonic() - before)
        found[query.dashboard][f"{query.panel} ({number})"] = statistics.median(times)
    return found


def seconds_of_rules(directory: Path, server: Prometheus) -> dict[str, float]:
    """Return how long one evaluation of each group of rules takes."""
    rules = directory / "rules"
    rules.mkdir()
    write(rules)
    (directory / "prometheus.yml").write_text(f'rule_files: ["{rules}/*.yml"]\n')
    server.stop()
    server.start()
    time.sleep(60)
    return server.seconds_of_rule_groups()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the queries of the dashboards.")
    for name, default in (("--tp", 8), ("--pp", 4), ("--dp", 32)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--scrape", type=int, default=SCRAPE_SECONDS, help="seconds between scrapes")
    parser.add_argument("--minutes", type=int, default=75, help="of the job, in the last 20 of which a rank is slow")
    parser.add_argument("--processes", type=int, default=1, help="that make the series")
    chosen = parser.parse_args()
    ranks = chosen.tp * chosen.pp * chosen.dp
    simulation = Simulation(
        tp=chosen.tp, pp=chosen.pp, dp=chosen.dp, slow_rank=ranks // 2 + 5, minutes=chosen.minutes,
        scrape_seconds=chosen.scrape, rule_seconds=max(5, chosen.scrape // 4), processes=chosen.processes,
    )  # fmt: skip
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {ranks} ranks, "
        f"a scrape every {chosen.scrape} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        end = int(time.time()) // 15 * 15 + _AHEAD_SECONDS
        before = time.monotonic()
        with stored(simulation, directory, end) as server:
            (series,) = server.query_at('count({job="commtrace"})', end)
            print(f"{series.value:,.0f} series, {series.value / ranks:.0f} per rank; made in "
                  f"{time.monotonic() - before:.0f} s", flush=True)  # fmt: skip
            print("| dashboard | queries | median s | slowest s | |")
            print("|---|---|---|---|---|")
            for dashboard, times in seconds_of_queries(server, end, simulation).items():
                slowest = max(times, key=times.__getitem__)
                print(
                    f"| {dashboard} | {len(times)} | {statistics.median(times.values()):.3f} | "
                    f"{times[slowest]:.3f} | {slowest.rpartition(' (')[0]} |",
                    flush=True,
                )
            for group, seconds in seconds_of_rules(directory, server).items():
                print(f"{group}: {seconds:.2f} s for one evaluation")


if __name__ == "__main__":
    main()
