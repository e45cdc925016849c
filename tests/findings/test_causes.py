"""Causes: every finding has words and advice, and the advice fits who it is for."""

from __future__ import annotations

from dataclasses import fields

import pytest

from commtrace.analysis.stragglers.awaited import AwaitedActivity
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.findings.causes import (
    CAUSES,
    HOST,
    JOB,
    LOSSES,
    MEANT,
    PAUSES,
    PLACES,
    TENSOR_GROUP,
    advice,
    cause_or_loss,
    format_cause,
)
from commtrace.findings.finding import Occurrence


@pytest.mark.parametrize("name", [*CAUSES, *LOSSES])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_cause_has_words_and_whole_sentences_of_advice(name: str, place: str, num_ranks: int) -> None:
    sentences = advice(name, num_ranks, place)
    assert cause_or_loss(name).words
    assert sentences[0].isupper()
    assert sentences.endswith(".")
    assert "{" not in sentences


def test_no_name_is_a_cause_and_a_loss() -> None:
    assert not set(CAUSES) & set(LOSSES)


def test_the_cost_of_every_cause_is_a_part_of_lost_time() -> None:
    parts = {field.name for field in fields(LostTime)}
    assert {cause.part for cause in CAUSES.values()} <= parts


def test_advice_is_for_one_rank_for_several_or_for_their_place() -> None:
    assert advice("data", 1).startswith("Give the input pipeline of this rank")
    assert advice("data", 2).startswith("Give the input pipelines of these ranks")
    assert advice("data", 2, HOST).startswith("Look at the storage that this host reads")
    assert advice("data", 2, JOB).startswith("Give the input pipelines more workers")
    assert advice("compute", 2, TENSOR_GROUP) == advice("unknown", 2, TENSOR_GROUP)
    assert advice("gc", 1) == advice("gc", 4, HOST) == advice("gc", 4, JOB)


def test_a_rank_that_is_waited_for_gets_the_advice_of_its_cause() -> None:
    when = Occurrence((3,), 5, 10)
    for name in PAUSES:
        assert AwaitedActivity(name, 5, when).cause.advice == advice(name, 1)
    assert AwaitedActivity("nothing", 5, when).cause.advice == advice("unknown", 1)


def test_words_of_causes() -> None:
    assert PAUSES == ("data", "gc", "checkpoint", "evaluation")
    assert MEANT == ("checkpoint", "evaluation")
    assert format_cause("optimizer") == "slow optimizer step"
    assert format_cause("of_another_version") == "of another version"
