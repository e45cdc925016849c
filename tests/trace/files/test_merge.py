"""Folders of ranks from several nodes become one run, if they are of one job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError, RunNotFoundError
from commtrace.trace.files.merge import Place, copy, link, merge
from commtrace.trace.files.reader import load_run
from tests.trace.files.nodes import write_node
from tests.trace.rows import steps, write_rank


@pytest.mark.parametrize("place", [copy, link])
def test_the_ranks_of_two_nodes_become_one_run(tmp_path: Path, place: Place) -> None:
    write_node(tmp_path / "left", [0, 1], "job")
    write_node(tmp_path / "right" / "job", [2, 3], "job")  # a directory that holds exactly one run
    (tmp_path / "left" / "monitor.json").write_text("{}")

    assert merge([tmp_path / "left", tmp_path / "right"], tmp_path / "run", place) == 4

    run = load_run(tmp_path / "run")
    assert list(run.ranks) == [0, 1, 2, 3]
    assert run.problems == ()
    assert (tmp_path / "run" / "monitor.json").read_text() == "{}"


def test_a_merged_copy_outlives_the_nodes_directories(tmp_path: Path) -> None:
    write_node(tmp_path / "left", [0, 1], "job")
    write_node(tmp_path / "right", [2, 3], "job")
    merge([tmp_path / "left", tmp_path / "right"], tmp_path / "run", copy)
    shutil.rmtree(tmp_path / "left")

    assert list(load_run(tmp_path / "run").ranks) == [0, 1, 2, 3]


def test_a_link_sees_what_is_written_later(tmp_path: Path) -> None:
    write_rank(tmp_path / "left", steps(0, 3), world_size=2)
    write_rank(tmp_path / "right", steps(0, 3), rank=1, world_size=2)
    merge([tmp_path / "left", tmp_path / "right"], tmp_path / "run", link)
    write_rank(tmp_path / "left", steps(3, 5), world_size=2, session=2_000)

    assert load_run(tmp_path / "run").ranks[0].spans.step.tolist() == [3, 4]


def test_one_directory_under_two_names_is_one(tmp_path: Path) -> None:
    write_node(tmp_path / "left", [0, 1, 2, 3], "job")

    assert merge([tmp_path / "left", tmp_path / "left" / "..", ], tmp_path / "run", copy) == 4  # fmt: skip


def test_ranks_of_two_names_are_brought_together_and_the_names_told(tmp_path: Path) -> None:
    write_node(tmp_path / "left", [0, 1], "a")
    write_node(tmp_path / "right", [2, 3], "b")
    merge([tmp_path / "left", tmp_path / "right"], tmp_path / "run", copy)

    run = load_run(tmp_path / "run")
    assert list(run.ranks) == [0, 1, 2, 3]
    assert "run b, attempt 1 holds ranks 2, 3; run a, attempt 1 holds ranks 0, 1" in run.problems[0]


def test_directories_of_several_jobs_are_refused(tmp_path: Path) -> None:
    write_node(tmp_path / "left", [0, 1], "a")
    write_node(tmp_path / "same", [1, 2], "b")
    write_node(tmp_path / "larger", [2, 3], "c", world_size=8)
    write_node(tmp_path / "later", [2, 3], "d", began_s=1_000)

    for other, why in (
        ("same", r"are not of one job: both hold rank 1\."),
        ("larger", r"are not of one job: one is of 4 ranks and the other of 8\."),
        ("later", r"are not of one job: one had ended before the other began\."),
    ):
        with pytest.raises(ConfigurationError, match=why):
            merge([tmp_path / "left", tmp_path / other], tmp_path / "run", copy)
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_node(tmp_path / "left", [0, 1, 2, 3], "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match="is not empty"):
        merge([tmp_path / "left"], tmp_path / "full", copy)
    with pytest.raises(ConfigurationError, match="is a file"):
        merge([tmp_path / "left"], tmp_path / "file", copy)
    with pytest.raises(RunNotFoundError):
        merge([tmp_path / "nowhere"], tmp_path / "run", copy)
