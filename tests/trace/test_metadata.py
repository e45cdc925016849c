from __future__ import annotations

import json

from commtrace.trace.metadata import RankMetadata
from tests.trace.rows import metadata


def test_json_and_back() -> None:
    original = metadata(rank=3, environment={"NCCL_DEBUG": "WARN"})

    assert RankMetadata.from_json(original.to_json()) == original


def test_what_a_newer_version_adds_is_left_out() -> None:
    newer = {**json.loads(metadata().to_json()), "rack": "r7"}

    assert RankMetadata.from_json(json.dumps(newer)) == metadata()
