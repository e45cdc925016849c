"""ZeRO's communication: what ranks of real DeepSpeed jobs were counted to send, and formulas by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import ZeroOptions
from commtrace.planning.zero import ZeroJob, zero_traffic
from tests.reference import reference_data

LAYER = (32, *4 * (1024,), 32, *3 * (2816,))
ELEMENTS = (5120, *3 * LAYER, 32, 5120)
OPTIONS = ZeroOptions(
    reduce_bucket_size=20_000, stage3_prefetch_bucket_size=20_000, stage3_param_persistence_threshold=100
)
NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def job(stage: int, **options: Any) -> ZeroJob:
    return ZeroJob(stage, ELEMENTS, ranks=2, microbatches=2, options=replace(OPTIONS, **options))


def calls(of: ZeroJob) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for row in zero_traffic(of):
        found[row.operation, row.bytes_per_call] += row.count
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_and_byte_is_that_of_the_reference(stage: int, rank: int) -> None:
    reference = json.loads(reference_data("deepspeed_counts", f"z{stage}.r{rank}.json").read_text())
    counted: Counter[tuple[str, int]] = Counter()
    for phase, operation, num_bytes, count in reference["rec"]:
        if phase.startswith("it2."):  # ZeRO 3 has seen by then in which order parameters are used
            counted[NAMES.get(operation, operation), num_bytes] += count

    assert calls(job(stage)) == counted


def test_zero_2_as_counted() -> None:
    assert calls(job(2)) == {
        ("all_gather", 96_192): 1, ("all_reduce", 1): 1, ("all_reduce", 4): 1,
        ("all_reduce", 24_192): 2, ("all_reduce", 35_520): 2, ("all_reduce", 36_480): 2,
    }  # fmt: skip


def test_a_parameter_of_exactly_the_threshold_is_persistent() -> None:
    threshold = replace(OPTIONS, stage3_param_persistence_threshold=100)
    rows = list(zero_traffic(ZeroJob(3, (100, 102), ranks=2, microbatches=1, options=threshold)))

    gathered = {row.what: row.bytes_per_call for row in rows if row.operation == "all_gather"}
    assert gathered == {"persistent parameters": 2 * 100, "parameters": 2 * 102}


def test_each_pass_moves_all_gradients() -> None:
    for stage, passes in ((0, 1), (1, 1), (2, 2), (3, 2)):
        gradients = [row for row in zero_traffic(job(stage)) if row.what == "gradients"]
        assert sum(row.tensor_bytes for row in gradients) == passes * 2 * sum(ELEMENTS)


def test_owners_are_reduced_to_one_by_one() -> None:
    reduced = [row for row in zero_traffic(job(1, use_multi_rank_bucket_allreduce=False)) if row.operation == "reduce"]

    # three buckets; the half, at 24,048 elements, is inside of the second one
    assert [row.bytes_per_call for row in reduced] == [39_616, 8_480, 26_528, 21_568]


def test_without_overlap_zero_1_follows_the_model_else_the_backward() -> None:
    assert ("all_reduce", 39_616) in calls(job(1))
    assert ("all_reduce", 35_520) in calls(job(1, overlap_comm=True))


def test_parameters_that_do_not_stay_live_are_gathered_again() -> None:
    rows = zero_traffic(job(3, stage3_max_live_parameters=1000))
    forward = [row.tensor_bytes for row in rows if row.when == "forward"]
    again = [row for row in rows if row.what == "parameters, once more"]

    assert [row.tensor_bytes for row in again] == forward
    assert {row.basis for row in again} == {"estimate"}


def test_parts_are_padded_to_the_ranks() -> None:
    assert calls(ZeroJob(3, (7, 3), ranks=4, microbatches=1, options=OPTIONS)) == {
        ("all_gather", 8): 1, ("all_gather", 16): 1, ("all_reduce", 8): 1, ("reduce_scatter", 24): 1,
    }  # fmt: skip
    assert calls(ZeroJob(2, (7, 2), ranks=4, microbatches=1, options=OPTIONS))["all_gather", 2 * 16] == 1


def test_groups_of_the_optimizer_are_flat_one_by_one() -> None:
    grouped = ZeroJob(1, (8, 2, 6), ranks=2, microbatches=1, options=ZeroOptions(8), groups=(0, 1, 0))

    # the order of the groups: 8, then 6 and 2
    assert calls(grouped) == {
        ("all_reduce", 16): 2, ("all_reduce", 1): 1, ("all_reduce", 4): 2, ("all_gather", 32): 1, ("all_gather", 8): 1,
    }  # fmt: skip
    owners = grouped._replace(options=ZeroOptions(8, use_multi_rank_bucket_allreduce=False))
    assert [row.bytes_per_call for row in zero_traffic(owners) if row.operation == "reduce"] == [16, 12, 4]


def test_one_rank_sends_nothing() -> None:
    assert zero_traffic(ZeroJob(3, ELEMENTS, ranks=1, microbatches=2)) == ()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reduce_bucket_size is -1"):
        ZeroOptions(reduce_bucket_size=-1)
