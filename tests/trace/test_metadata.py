from __future__ import annotations

import json

import pytest

from commtrace.trace.metadata import RankMetadata, measures_durations
from tests.trace.rows import metadata


def test_json_and_back() -> None:
    original = metadata(rank=3, world_size=4, environment={"NCCL_DEBUG": "WARN"})

    assert RankMetadata.from_json(original.to_json()) == original


def test_what_a_newer_version_adds_is_left_out() -> None:
    newer = {**json.loads(metadata().to_json()), "rack": "r7"}

    assert RankMetadata.from_json(json.dumps(newer)) == metadata()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("Yes", True), ("0", False), ("", False)])
def test_the_environment_says_whether_nccl_measures(value: str, expected: bool) -> None:
    assert measures_durations({"TORCH_NCCL_ENABLE_TIMING": value}) is expected
    assert not measures_durations({})
