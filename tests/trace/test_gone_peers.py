"""What a rank notes of others that end, beside its segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.trace.files.reader import load_run
from commtrace.trace.gone_peers import forget_gone_peers, note_gone_peers
from commtrace.trace.run import PeerLook
from tests.trace.rows import mark, write_rank

SESSION = 7


def noted(tmp_path: Path) -> tuple[PeerLook, ...]:
    return load_run(tmp_path).ranks[0].gone_peers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rank(tmp_path, [mark("end", {})], rank=0, world_size=4, session=SESSION)
    return tmp_path / "rank-00000"


def test_looks_are_read_in_their_order(tmp_path: Path, folder: Path) -> None:
    note_gone_peers(folder, SESSION, 10, {2})
    note_gone_peers(folder, SESSION, 12, {3, 1})
    note_gone_peers(folder, SESSION, 24, ())
    note_gone_peers(folder, SESSION + 1, 11, {1})
    assert noted(tmp_path) == ((10, (2,)), (12, (1, 3)), (24, ())), "the one of another session is not this one's"


def test_who_forgets_has_noted_nothing(tmp_path: Path, folder: Path) -> None:
    note_gone_peers(folder, SESSION, 10, {2})
    forget_gone_peers(folder, SESSION)
    assert noted(tmp_path) == ()
    forget_gone_peers(folder, SESSION)


@pytest.mark.parametrize(
    "text", ["[11, [4]]", "[11, [-1]]", "[11, [true]]", "[-1, [1]]", "[11]", '{"ranks": 1}', "[1", "[" * 100_000]
)
def test_of_a_damaged_file_nothing_is_believed(tmp_path: Path, folder: Path, text: str) -> None:
    (folder / f"gone-{SESSION}").write_text(f"[10, [2]]\n{text}\n")
    assert noted(tmp_path) == ()
