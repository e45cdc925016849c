"""The bench of a call: variants in turns, and every table in a short run. No figure is judged."""

from __future__ import annotations

import re
import sys

import pytest

from bench.overhead import Variant, in_turns
from tests.e2e.launch import REPOSITORY, run


def test_each_variant_goes_first_as_often_as_the_others() -> None:
    order: list[str] = []

    def variant(name: str, nanoseconds: float) -> Variant:
        def measure(operation: object, calls: int) -> float:
            order.append(name)
            return nanoseconds * calls

        return measure

    measured = in_turns(lambda: None, {"plain": variant("plain", 1.0), "recorded": variant("recorded", 2.0)}, 4, 10)

    assert measured == {"plain": [10.0] * 4, "recorded": [20.0] * 4}
    assert [order[2 * turn] for turn in range(4)] == ["plain", "recorded", "plain", "recorded"]


@pytest.mark.e2e
@pytest.mark.thorough
def test_all_tables_are_printed() -> None:
    command = [sys.executable, "bench/overhead.py", "--rounds", "2", "--calls", "50", "--spans", "50000"]
    completed = run(command, {"PYTHONPATH": str(REPOSITORY)}, 400)

    assert completed.returncode == 0, completed.stdout
    if "The native engine with marks on the simulated driver" in completed.stdout:
        assert completed.stdout.count("\nall_reduce, async + wait ") == 2
    for operation in ("all_reduce, async + wait", "isend + wait", "broadcast", "DataLoader next", "module, in a chain"):
        assert re.search(rf"^{re.escape(operation)} +\d+\.\d\d +\d+\.\d\d \([+-]\d", completed.stdout, re.MULTILINE)
    counts = r"Harvest, (\w+), .*?: (\d+) spans were resolved"
    times = r"threads: ([\d.]+) s; .* with the GIL: (.*?)[.] Of"
    harvests = re.findall(f"{counts}.*? {times}", completed.stdout)
    assert harvests
    for _, spans, all_seconds, with_gil in harvests:
        assert int(spans) == 50_000
        assert with_gil.startswith("not measured") or 0 < float(with_gil.removesuffix(" s")) <= 1.1 * float(all_seconds)
