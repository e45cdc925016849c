"""The name of a run: equal on all its ranks, different from launch to launch."""

from __future__ import annotations

import os
import re

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
