"""How communications are numbered where it is not obvious, and how ranks find the name of their run."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "any_source_and_tags.py"


def test_messages_meet_whatever_their_tag_and_whoever_they_were_expected_from(tmp_path: Path) -> None:
    done = fork([PROGRAM], 2, {"COMMTRACE_DIR": str(tmp_path / "run")})
    assert done.returncode == 0, done.stdout
    run = load_run(tmp_path / "run")
    assert sorted(run.ranks) == [0, 1]
    assert run.problems == ()
    assert len({trace.metadata.run_id for trace in run.ranks.values()}) == 1

    messages = [
        {(row["seq"], row["peer"]): row["bytes"] for row in rows(run, rank, schema.P2P, step=0)} for rank in (0, 1)
    ]
    sizes = {0: 4, 1: 8, 2: 12, 5 << 32: 60, 6 << 32: 64}
    assert messages[0] == {(seq, 1): size for seq, size in sizes.items()}
    assert messages[1] == {(seq, 0): size for seq, size in sizes.items()}
