from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.timeline import Timeline
from commtrace.viewer.data import BOX_TABLES, encode_table, step_tables
from tests.pipeline_factory import PipelineJob


def stored(encoded: bytes) -> pa.Table:
    return pa.ipc.open_stream(encoded).read_all()


@pytest.mark.parametrize(
    ("values", "stored_as"),
    [
        ([0, 127], pa.int8()),
        ([-129, 0], pa.int16()),
        ([0, 40_000], pa.int32()),
        ([2**40, -1], pa.int64()),
        ([], pa.int8()),
    ],
)
def test_a_column_has_the_smallest_type_that_holds_it(values: list[int], stored_as: pa.DataType) -> None:
    column = stored(encode_table({"bytes": np.array(values, np.int64)}))["bytes"]

    assert (column.type, column.to_pylist()) == (stored_as, values)


def test_starts_are_stored_as_differences() -> None:
    starts = np.array([5, 15, 3_000_000_000, 7], np.int64)
    table = stored(encode_table({"start": starts}))

    assert table.schema.field("start").metadata == {b"encoding": b"delta"}
    assert np.cumsum(table["start"].to_numpy()).tolist() == starts.tolist()


def test_a_step_is_five_tables_whose_rows_are_in_the_order_of_ranks() -> None:
    timeline = Timeline.of_analysis(analyse(PipelineJob(stages=2, microbatches=3, data_parallel=2, steps=3).run()))
    step = timeline.step(1)

    tables = {name: stored(data) for name, data in step_tables(step, "step/1")}

    assert list(tables) == [f"step/1/{name}" for name in ("bounds", *BOX_TABLES)]
    assert tables["step/1/bounds"]["rank"].to_pylist() == [0, 1, 2, 3]
    for name in BOX_TABLES:
        table = tables[f"step/1/{name}"]
        ranks = table["rank"].to_numpy()
        assert (np.diff(ranks) >= 0).all()
        for rank in step["ranks"]:
            own = table.filter(pa.array(ranks == rank["rank_index"]))
            assert own["duration"].to_pylist() == rank[name]["duration"]
