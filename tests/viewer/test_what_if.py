from __future__ import annotations

import json
from pathlib import Path

import pytest

from commtrace.analysis.prediction.changes import BandwidthChange, OverlapChange
from commtrace.analysis.windows.run import open_run
from commtrace.cli.commands.whatif import predict_for_page
from commtrace.errors import ConfigurationError
from commtrace.synth import Job, synthesize, write
from commtrace.viewer.what_if import MOST_KEPT, Question, WhatIfs


def test_a_query_has_the_options_of_the_command() -> None:
    question = Question.of_query(
        {"bandwidth": ["dp=2x"], "overlap": ["tp=perfect"], "without_slow_rank": ["3"], "microbatches": ["8"]}
    )

    assert question.changes.bandwidth == (BandwidthChange("dp", 2.0),)
    assert question.changes.overlap == (OverlapChange("tp", True),)
    assert (question.changes.microbatches, question.changes.chunks, question.changes.schedule) == (8, None, "")
    assert question.without_slow_rank == ("3",)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"recompute": ["on"]}, "recompute is no change that this page knows"),
        ({"schedule": ["2f2b"]}, "choose one of gpipe, 1f1b"),
        ({"microbatches": ["0"]}, "microbatches 0: write a number of at least 1"),
        ({"microbatches": ["9" * 5_000]}, "microbatches 9{20}: write a number of at least 1"),
        ({"bandwidth": ["dp"]}, "write ROLE=VALUE"),
    ],
)
def test_a_query_that_is_none_is_explained(query: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Question.of_query(query)


def test_more_microbatches_than_can_be_rebuilt_are_refused_as_by_the_command(tmp_path: Path) -> None:
    write(synthesize(Job(pp=2, steps=3)), tmp_path / "run")
    question = Question.of_query({"microbatches": ["99999998"]})

    with pytest.raises(ConfigurationError, match="99999998 microbatches in 1 chunk per stage are more than 1,048,576"):
        WhatIfs(predict_for_page).answer(open_run(tmp_path / "run"), question)


def test_an_answer_has_its_step_until_others_come(tmp_path: Path) -> None:
    write(synthesize(Job(dp=2, steps=3)), tmp_path / "run")
    run, what_ifs = open_run(tmp_path / "run"), WhatIfs(predict_for_page)
    question = Question.of_query({"bandwidth": ["dp=2x"]})

    names = [json.loads(what_ifs.answer(run, question))["drawn"] for _ in range(MOST_KEPT + 1)]

    assert what_ifs.resource(f"{names[0]}.json") is None
    step = json.loads(what_ifs.resource(f"{names[-1]}.json") or b"")
    assert step["outline"] == f"{names[-1]}/outline.json"
    assert {f"{names[-1]}/{part}" for part in ("ranks", "work", "stalls", "host", "communication")} == {
        f"{names[-1]}/{part}"
        for part in ("ranks", "work", "stalls", "host", "communication", "perfetto")
        if what_ifs.resource(f"{names[-1]}/{part}")
    }
