"""Which starts and ends of older recordings are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files.rank_files import rank_directory
from commtrace.trace.files.reader import load_run, read_files
from tests.trace.rows import Row, row, write_rank


def launch(number: int, start: int, end: int, **columns: Any) -> Row:
    columns = {"name": "all_reduce", "kind": schema.COLLECTIVE, "timing": schema.CUDA_EVENT_TIMING, **columns}
    return row(
        lane=schema.COMMUNICATION, id=number, group=columns.pop("group", 7), seq=number, start=start, end=end, step=0,
        op_in_seq=columns.pop("op_in_seq", 0), **columns,
    )  # fmt: skip


def hidden(number: int, start: int, end: int, **columns: Any) -> Row:
    return launch(number, start, end, **{"timing": schema.UNKNOWN_TIMING, **columns})


def message(number: int, start: int, end: int, peer: int, **columns: Any) -> Row:
    return launch(number, start, end, **{"kind": schema.P2P, "name": "send", "peer": peer, **columns})


def written_before_the_columns(directory: Path, rows: list[Row]) -> Path:
    """Write a recording as versions before these columns did."""
    write_rank(directory, rows, world_size=4)
    for segment in rank_directory(directory, 0).iterdir():
        with pa.ipc.open_stream(segment.read_bytes()) as stream:
            table = stream.read_all().drop_columns(sorted(schema.LATER_COLUMNS))
        with pa.ipc.new_stream(str(segment), table.schema) as stream:
            stream.write_table(table)
    return directory


def exact(directory: Path) -> dict[int, tuple[bool, bool]]:
    """Whether start and end are exact, by the id of the operation."""
    spans = load_run(directory).ranks[0].spans
    pairs = zip(spans.start_exact.tolist(), spans.end_exact.tolist(), strict=True)
    return dict(zip(spans.id.tolist(), pairs, strict=True))


EXACT, LATE_START, EARLY_END = (True, True), (False, True), (True, False)


def test_an_operation_behind_one_without_a_known_end_has_no_exact_start(tmp_path: Path) -> None:
    rows = [launch(0, 0, 50), hidden(1, 60, 100), launch(2, 61, 140), launch(3, 140, 180), launch(4, 300, 310)]

    read = exact(written_before_the_columns(tmp_path, rows))

    assert read == {0: EXACT, 1: EARLY_END, 2: LATE_START, 3: EXACT, 4: EXACT}


def test_hidden_operations_in_flight_together_have_neither(tmp_path: Path) -> None:
    read = exact(written_before_the_columns(tmp_path, [hidden(0, 0, 90), hidden(1, 10, 95), hidden(2, 95, 120)]))

    assert read == {0: EARLY_END, 1: (False, False), 2: EARLY_END}


def test_only_the_own_communicator_matters(tmp_path: Path) -> None:
    rows = [hidden(0, 0, 90), launch(1, 10, 95, group=8), launch(2, 20, 99)]

    assert exact(written_before_the_columns(tmp_path, rows)) == {0: EARLY_END, 1: EXACT, 2: LATE_START}


def test_launches_are_in_the_order_of_their_ids_not_of_the_rows(tmp_path: Path) -> None:
    rows = [launch(2, 61, 140), hidden(1, 60, 100)]

    assert exact(written_before_the_columns(tmp_path, rows)) == {1: EARLY_END, 2: LATE_START}


def test_messages_outside_of_brackets_have_a_communicator_per_pair(tmp_path: Path) -> None:
    rows = [
        message(0, 0, 90, 1, timing=schema.UNKNOWN_TIMING), launch(1, 10, 95), message(2, 20, 96, 2),
        message(3, 30, 97, 1),
    ]  # fmt: skip

    assert exact(written_before_the_columns(tmp_path, rows)) == {0: EARLY_END, 1: EXACT, 2: EXACT, 3: LATE_START}


def test_a_bracket_is_one_operation_of_the_communicator(tmp_path: Path) -> None:
    rows = [
        hidden(0, 0, 90), message(1, 10, 120, 1), message(2, 10, 120, 2, op_in_seq=1),
        launch(3, 120, 130),
    ]  # fmt: skip

    assert exact(written_before_the_columns(tmp_path, rows)) == {
        0: EARLY_END, 1: LATE_START, 2: LATE_START, 3: EXACT,
    }  # fmt: skip


def test_behind_an_operation_without_an_end_no_start_is_exact(tmp_path: Path) -> None:
    rows = [launch(0, 0, 0, detail='{"unfinished":true}'), launch(1, 900, 950), launch(2, 960, 970)]

    assert exact(written_before_the_columns(tmp_path, rows)) == {0: EXACT, 1: LATE_START, 2: EXACT}


@pytest.mark.parametrize("timing", [schema.HOST_TIMING, schema.KERNEL_TIMING])
def test_host_times_and_kernels_are_what_they_are(timing: int, tmp_path: Path) -> None:
    rows = [launch(0, 0, 90, timing=timing), launch(1, 10, 95, timing=timing)]

    assert exact(written_before_the_columns(tmp_path, rows)) == {0: EXACT, 1: EXACT}


def test_exactness_is_read_as_the_recorder_wrote_it(tmp_path: Path) -> None:
    rows = [hidden(0, 0, 90, end_exact=False), launch(1, 10, 95, start_exact=True), launch(2, 99, 99)]
    write_rank(tmp_path, [*rows, launch(3, 100, 110, start_exact=False)])

    assert exact(tmp_path) == {0: EARLY_END, 1: EXACT, 2: EXACT, 3: LATE_START}


def test_older_recordings_say_nothing_about_exactness(tmp_path: Path) -> None:
    table = pa.concat_tables(read_files(written_before_the_columns(tmp_path, [launch(0, 0, 9)])))

    assert table["start_exact"].to_pylist() == table["end_exact"].to_pylist() == [None]
