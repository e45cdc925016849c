"""The name of a run: equal on all its ranks, different from launch to launch."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace import identity
from commtrace.config import Config


def test_the_name_that_is_given_wins() -> None:
    environment = {"TORCHELASTIC_RUN_ID": "torch", "SLURM_JOB_ID": "1", "RANK": "0"}
    assert identity.run_id(Config(run_id="mine"), environment) == "mine"
    assert identity.run_id(Config(), environment) == "torch"
    assert identity.run_id(Config(), {**environment, "NEMO_LENS_RUN_ID": "lens"}) == "lens"
    assert identity.run_id(Config(), {"SLURM_JOB_ID": "1", "TORCHELASTIC_RUN_ID": "none"}) == "slurm-1"


def test_the_ranks_of_one_node_are_named_after_their_launcher() -> None:
    ranks = [{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"} for rank in "01"]
    names = {identity.run_id(Config(), rank) for rank in ranks}

    assert len(names) == 1
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getppid()}", names.pop())


def test_the_ranks_of_several_nodes_have_to_agree() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert identity.run_id(Config(), environment) == ""
    assert identity.agreed_run_id() == ""  # no job, no store


def test_a_process_of_its_own_is_named_after_itself() -> None:
    assert identity.run_id(Config(), {}).endswith(f"-{os.getpid()}")


@pytest.mark.parametrize(
    ("contexts", "local_rank", "expected"),
    [([3], "3", "GPU 3"), ([0, 3], "3", "GPU 3"), ([0], "3", "GPU 0"), ([2, 5], "", "GPU 2")],
)
def test_the_device_is_not_that_of_the_thread_that_asks(
    contexts: list[int], local_rank: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(contexts))
    monkeypatch.setenv("LOCAL_RANK", local_rank)

    assert identity.device() == (expected, f"uuid of {expected}")
    assert identity.device(7) == ("GPU 7", "uuid of GPU 7")


def test_a_process_that_uses_no_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with([]))
    assert identity.device()[0].endswith(" cpu")


def torch_with(contexts: list[int]) -> Any:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 8,
        current_device=lambda: 0,  # of a thread that never set one
        get_device_properties=lambda number: SimpleNamespace(name=f"GPU {number}", uuid=f"uuid of GPU {number}"),
    )
    return SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=contexts.__contains__))


@pytest.mark.parametrize(
    ("named", "by_device", "shown"),
    [
        ("nccl", "cuda:nccl", "nccl"),
        ("undefined", "cpu:gloo", "gloo"),
        ("undefined", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_backend_that_the_script_did_not_name_is_the_one_that_torch_chose(
    named: str, by_device: str, shown: str
) -> None:
    distributed = SimpleNamespace(get_backend=lambda: named, get_backend_config=lambda: by_device)

    assert identity._backend(distributed) == shown
