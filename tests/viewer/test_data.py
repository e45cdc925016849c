from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.timeline import Timeline
from commtrace.viewer.data import BOX_TABLES, encode_json, encode_table, outline_json, step_resources
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


def test_the_rows_of_a_step_are_in_the_order_of_ranks() -> None:
    timeline = Timeline.of_analysis(analyse(PipelineJob(stages=2, microbatches=3, data_parallel=2, steps=3).run()))
    step = timeline.step(1)

    resources = step_resources(timeline, 1, "outline.json")

    assert list(resources) == ["step/1.json", *(f"step/1/{name}" for name in ("ranks", *BOX_TABLES))]
    ranks = stored(resources["step/1/ranks"])
    assert ranks["rank"].to_pylist() == [0, 1, 2, 3]
    assert ranks["end"].to_pylist() == [rank["end"] for rank in step["ranks"]]
    for name in BOX_TABLES:
        table = stored(resources[f"step/1/{name}"])
        of_row = table["rank"].to_numpy()
        assert (np.diff(of_row) >= 0).all()
        for rank in step["ranks"]:
            own = table.filter(pa.array(of_row == rank["rank_index"]))
            assert own["duration"].to_pylist() == rank[name]["duration"]


def test_a_step_can_have_the_boxes_of_some_ranks() -> None:
    timeline = Timeline.of_analysis(analyse(PipelineJob(stages=2, microbatches=3, data_parallel=2, steps=3).run()))

    some = step_resources(timeline, 1, "outline.json", {3, 1})

    assert stored(some["step/1/ranks"])["has_boxes"].to_pylist() == [0, 1, 0, 1]
    assert set(stored(some["step/1/work"])["rank"].to_pylist()) == {1, 3}


def test_own_work_is_the_step_without_its_stalls() -> None:
    timeline = Timeline.of_analysis(analyse(PipelineJob(stages=2, microbatches=3, steps=3).run()))

    for bounds, boxes in zip(timeline.bounds(1), timeline.step(1)["ranks"], strict=True):
        assert bounds.own_ns == boxes["end"] - boxes["start"] - sum(boxes["stalls"]["duration"])


def test_an_outline_writes_a_lane_of_several_ranks_once() -> None:
    job = PipelineJob(stages=2, microbatches=3, data_parallel=2, steps=3)
    outline = Timeline.of_analysis(analyse(job.run())).outline()

    written = json.loads(encode_json(outline_json(outline)))

    assert [[written["lanes"][lane] for lane in rank["lanes"]] for rank in written["ranks"]] == [
        rank["lanes"] for rank in outline["ranks"]
    ]
    assert len(written["lanes"]) == len({json.dumps(lane) for rank in outline["ranks"] for lane in rank["lanes"]})
