"""Time by module, computed by hand."""

from __future__ import annotations

import pytest
from rich.console import Console

from commtrace.analysis.breakdown import modules
from commtrace.analysis.breakdown.modules import add_modules
from commtrace.analysis.summary import summarise
from commtrace.cli.commands.summary import print_summary
from tests.factory import Row, collective, group, make_run, span, stall

TP = group("tp", 0, 1)


def module(name: str, start: int, end: int) -> Row:
    return span("module", start, end, name=name, step=0)


def rank(late: int) -> list[Row]:
    """Two layers of which each holds an attention; the second layer's sends 200 of its 300."""
    sent = collective("all_reduce", TP, 0, 1_100 + late, 1_300, id=1, step=0)
    return [
        span("step", 0, 4_000, step=0),
        span("forward", 0, 2_000, step=0, microbatch=0),
        module("layers.0", 0, 900),
        module("layers.0.attention", 100, 500),
        module("layers.1", 900, 2_000),
        module("layers.1.attention", 1_000, 1_300),
        sent,
        stall(sent, 1_100 + late, 1_300),
        span("backward", 2_000, 4_000, step=0, microbatch=0),
        module("layers.1 backward", 2_000, 2_700),
        module("layers.0 recompute", 2_700, 3_000),
        module("layers.0 backward", 2_700, 3_900),
    ]


def test_layers_are_one_row_and_stalls_count_in_all_modules_around_them() -> None:
    found = summarise(make_run({0: rank(0), 1: rank(50)}, [TP]))

    assert [row.to_json() for row in found.modules] == [
        {
            "module": "layers.*", "modules": 2, "calls": 4, "forward_ns": 4_000, "backward_ns": 3_800,
            "recompute_ns": 600, "exposed_ns": 350, "median_step_ns": 3_900, "p95_step_ns": 3_900, "slowest_rank": 0,
            "slowest_rank_slower": 0.0,
        },
        {
            "module": "layers.*.attention", "modules": 2, "calls": 4, "forward_ns": 1_400, "backward_ns": 0,
            "recompute_ns": 0, "exposed_ns": 350, "median_step_ns": 700, "p95_step_ns": 700, "slowest_rank": 0,
            "slowest_rank_slower": 0.0,
        },
    ]  # fmt: skip


def test_median_and_tail_over_steps_and_which_rank_is_slowest() -> None:
    def steps(slow: int) -> list[Row]:
        rows: list[Row] = []
        for number in range(20):
            begin, took = 1_000 * number, 100 + number + (slow if number % 2 else 0)
            rows += [
                span("step", begin, begin + 1_000, step=number),
                span("module", begin, begin + took, name="layers.0", step=number),
                span("module", begin + 500, begin + 500 + took, name="layers.0 backward", step=number),
            ]
        return rows

    (found,) = summarise(make_run({0: steps(0), 1: steps(0), 2: steps(100)}), steps="0:20").modules

    # 200, 202 … 238 on ranks 0 and 1; on rank 2 every other step is 200 longer: the 30th and the 57th of 60 values.
    assert (found.step_quantile(50), found.step_quantile(95)) == (222, 426)
    assert found.slowest() == (2, 236 / 218 - 1)

    (alone,) = summarise(make_run({0: steps(0)}), steps="0:20").modules
    assert alone.slowest() == (None, None)


def test_tables_of_some_steps_and_of_later_ones_add_up() -> None:
    def steps(slow: int) -> list[Row]:
        return [
            row
            for begin, step in ((0, 0), (1_000, 1), (2_000, 2))
            for row in (
                span("step", begin, begin + 1_000, step=step),
                span("module", begin, begin + 100 + 7 * step + slow, step=step, name=f"layers.{step}"),
                *([span("module", begin, begin + 900, step=step, name="head")] if step == 2 else []),
            )
        ]

    run = make_run({0: steps(0), 1: steps(30)})
    first, second, whole = (list(summarise(run, steps).modules) for steps in ("0:2", "2:3", "0:3"))

    assert [row.to_json() for row in add_modules(first, second)] == [row.to_json() for row in whole]
    assert [row.name for row in whole] == ["head", "layers.*"]


def test_very_many_steps_are_shown_to_half_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row
        for step in range(8)
        for row in (
            span("step", 100_000 * step, 100_000 * (step + 1), step=step),
            span("module", 100_000 * step, 100_000 * step + 90_001 + 2 * step, step=step, name="head"),
        )
    ]
    run = make_run({0: rows, 1: rows})
    (exact,) = summarise(run, "0:8").modules
    monkeypatch.setattr(modules, "_MOST_TIMES", 15)
    parts = [summarise(run, steps).modules for steps in ("0:3", "3:8")]
    (rounded,), (whole,) = add_modules(*parts), summarise(run, "0:8").modules

    assert exact.step_quantile(50) == 90_007
    assert rounded.step_quantile(50) == pytest.approx(90_007, rel=2**-11)
    assert rounded.step_quantile(50) == whole.step_quantile(50) != exact.step_quantile(50)


def test_a_stall_in_a_repeated_forward_counts_once() -> None:
    sent = collective("all_reduce", TP, 0, 2_750, 2_950, id=1, step=0)
    rows = [
        span("step", 0, 4_000, step=0),
        module("layers.0 backward", 2_000, 2_600),
        module("layers.0 recompute", 2_700, 3_000),  # of a reentrant checkpoint: outside of any backward
        sent,
        stall(sent, 2_750, 2_950),
    ]
    around = [*rows[:1], module("layers.0 backward", 2_600, 3_900), *rows[2:]]
    for one in (rows, around):
        (found,) = summarise(make_run({0: one, 1: one}, [TP])).modules
        assert found.exposed_ns == 400


def test_modules_change_no_other_number() -> None:
    with_modules = summarise(make_run({0: rank(0), 1: rank(50)}, [TP]))
    without = {number: [row for row in rank(50 * number) if row["kind"] != "module"] for number in (0, 1)}
    plain = summarise(make_run(without, [TP]))

    assert plain.modules == ()
    for part in ("ranks", "communication", "pipeline", "findings", "verdict", "problems"):
        assert getattr(with_modules, part) == getattr(plain, part)


def test_the_table_is_shown_only_where_modules_were_recorded() -> None:
    console = Console(record=True, width=160)
    print_summary(console, summarise(make_run({0: rank(0), 1: rank(50)}, [TP])))
    shown = console.export_text()
    assert "layers.*.attention" in shown

    print_summary(console, summarise(make_run({0: [row for row in rank(0) if row["kind"] != "module"]}, [])))
    assert "Modules, ms" not in console.export_text()
