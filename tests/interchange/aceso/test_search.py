"""The search of a profile: it keeps to the memory, reads back what it wrote, and is measured beside Aceso's own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.configuration import (
    AcesoJob,
    model_operators,
    read_aceso_configuration,
    read_aceso_job,
)
from commtrace.interchange.aceso.division import OperatorChain
from commtrace.interchange.aceso.prediction import predict
from commtrace.interchange.aceso.profile import AcesoProfile, Case, read_aceso_profile
from commtrace.interchange.aceso.search import AcesoFound, fullest_mib, search_aceso
from commtrace.planning.search.megatron import megatron_arguments
from tests.interchange.aceso.aceso_files import GPT, HEADER
from tests.reference import reference_data


def searched(name: str, limit_mib: float, gpus: int = 4, layers: int | None = None) -> tuple[AcesoProfile, AcesoFound]:
    folder = reference_data("aceso")
    job, _ = read_aceso_job(folder / "configs" / f"{name}.json")
    profile = read_aceso_profile(folder, job.model)
    return profile, search_aceso(profile, replace(job, num_layers=layers or job.num_layers), gpus, limit_mib, top=5)


@pytest.mark.parametrize(("name", "at_most"), [("gpt_1_3B", 0.985), ("t5_770M", 1.0), ("wresnet_1B", 1.025)])
def test_beside_what_aceso_found_with_the_same_memory(name: str, at_most: float) -> None:
    folder = reference_data("aceso")
    published = read_aceso_configuration(folder / "configs" / f"{name}.json")
    theirs = predict(read_aceso_profile(folder, published.model), published)
    _, found = searched(name, fullest_mib(theirs))
    ours = found.best[0].prediction

    assert ours.iteration_ms <= at_most * theirs.iteration_ms
    assert fullest_mib(ours) <= fullest_mib(theirs)


def test_every_choice_fits_and_the_fastest_is_first() -> None:
    _, found = searched("gpt_1_3B", 8000)
    times = [choice.prediction.our_iteration_ms for choice in found.best]

    assert len(times) == 5
    assert times == sorted(times)
    assert all(fullest_mib(choice.prediction) <= 8000 for choice in found.best)


def test_a_configuration_for_megatron_has_whole_layers() -> None:
    _, found = searched("gpt_1_3B", 12_000, gpus=8, layers=40)
    choice = found.for_megatron

    assert choice is not None
    assert choice.layout is not None
    assert choice.layout.world_size == 8
    sizes = list(choice.configuration.num_ops_in_each_stage)
    sizes[0] -= 1  # the embedding
    sizes[-1] -= 2  # the last norm and the output layer
    assert [size % 13 for size in sizes] == [0] * len(sizes)
    assert sum(sizes) == 13 * 40
    assert "--pipeline-model-parallel-size" in megatron_arguments(choice.layout)


def test_32_gpus_say_what_the_profile_does_not_have() -> None:
    _, found = searched("gpt_1_3B", 11_980, gpus=32, layers=40)

    assert sum(found.best[0].configuration.num_gpus) == 32
    assert any("Messages between nodes were not profiled" in note for note in found.notes)


def test_a_written_configuration_has_the_sizes_and_is_read_back(tmp_path: Path) -> None:
    profile, found = searched("gpt_1_3B", 11_980)
    _, sizes = read_aceso_job(reference_data("aceso") / "configs" / "gpt_1_3B.json")
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found.best[0].configuration.file_content(sizes)))
    published = json.loads((reference_data("aceso") / "configs" / "gpt_1_3B.json").read_text())

    assert set(json.loads(path.read_text())) == set(published)
    assert read_aceso_configuration(path) == found.best[0].configuration
    assert predict(profile, read_aceso_configuration(path)) == found.best[0].prediction


UNEVEN = {"enc-attention-score": 7, "enc-MLP-GEMM-1": 3, "gpt-post-process": 9}


@pytest.fixture
def uneven(tmp_path: Path) -> AcesoProfile:
    rows = "".join(f"{name},{UNEVEN.get(name, 1)}000,2000,4,4,8,16,0,0\n" for name in GPT)
    (tmp_path / "gpt_small_mbs1_tp1_algo0.csv").write_text(HEADER + rows)
    (tmp_path / "p2p_intra_node.csv").write_text("1,2,4,8\n1,2,4,8\n")
    return read_aceso_profile(tmp_path)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_no_other_ends_have_a_faster_slowest_stage_where_memory_suffices(uneven: AcesoProfile, stages: int) -> None:
    names = model_operators(uneven, "gpt", 2)
    chain = OperatorChain(uneven, "gpt", names, Case(1, 1, 0))
    nothing = np.zeros(len(names), np.bool_)
    found = chain.divide(stages, 1e9)
    every = [chain.slowest_ms((*ends, len(names)), nothing) for ends in combinations(range(1, len(names)), stages - 1)]

    assert found is not None
    assert not found.recomputed.any()
    assert chain.slowest_ms(found.ends, found.recomputed) == pytest.approx(min(every), abs=0.01)


def test_less_memory_recomputes_more_until_nothing_fits(uneven: AcesoProfile) -> None:
    job = AcesoJob("gpt", "small", 2, 4)
    times = []
    for limit_mib in (3000, 2600, 2450):
        best = search_aceso(uneven, job, 1, limit_mib, top=1).best[0]
        assert fullest_mib(best.prediction) <= limit_mib
        times.append((best.recomputed_share, best.prediction.our_iteration_ms))

    assert times == sorted(times)
    assert times[0][0] == 0 < times[-1][0]
    assert search_aceso(uneven, job, 1, 1000, top=1).best == ()


def test_a_form_that_was_not_profiled_is_reported(uneven: AcesoProfile) -> None:
    with pytest.raises(ConfigurationError, match=r"divides 31 GPUs and a global batch of 4: profiled are .* \(1, 1\)"):
        search_aceso(uneven, AcesoJob("gpt", "small", 2, 4), 31, 1000, top=1)
