"""What the variables of launchers say."""

from __future__ import annotations

import pytest

from commtrace.recording import launchers
from commtrace.recording.launchers import Position

SLURM_TASK = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
UUID = "6e0d1c3a-8a5b-4f41-9a51-0e8a3f5d9c77"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", []),
        ("gpu7", ["gpu7"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("rack[1-2]n[1,3]", ["rack1n1", "rack1n3", "rack2n1", "rack2n3"]),
        ("a-b[1-2]-ib,c.d", ["a-b1-ib", "a-b2-ib", "c.d"]),
        # not as Slurm writes it
        ("n[3-1],n[1-],n[-],n[x],n[0-99999999],n[", ["n1", "n"]),
    ],
)
def test_slurms_list_of_nodes(listed: str, expected: list[str]) -> None:
    assert launchers.listed_nodes({"SLURM_JOB_NODELIST": listed}) == expected


def test_the_nodes_of_a_step_come_before_those_of_its_job() -> None:
    assert launchers.listed_nodes({"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[2-3]"}) == ["n2", "n3"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None),
        (SLURM_TASK, Position(5, 8, 1)),
        # a batch script, which is no step
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, None),
        # torchrun in a task of srun
        ({**SLURM_TASK, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, (9, 16, 3, 4)),
        # a script that gives itself a rank from its task
        ({**SLURM_TASK, "RANK": "5", "WORLD_SIZE": "8"}, Position(5, 8, 1)),
        # a pod of a PyTorchJob
        ({"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"}, Position(1, 2)),
        ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, (3, 4, 1, None)),
        # Cray's PALS, as DeepSpeed's MPICH runner expects it
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1"}, (3, 4, 1, None)),
    ],
)
def test_the_innermost_launcher_says_which_rank_a_process_is(
    environment: dict[str, str], expected: Position | None
) -> None:
    assert launchers.position(environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine", "SLURM_JOB_ID": "1"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "123456789"}, ""),  # DeepSpeed's elastic launcher, where nobody named it
        ({"TORCHELASTIC_RUN_ID": UUID, "RANK": "0", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, ""),
        ({"TORCHELASTIC_RUN_ID": UUID, "RANK": "0", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, UUID),
        ({"SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}, "slurm-4711.3"),
    ],
)
def test_a_job_has_the_name_that_its_launcher_gives_on_all_nodes(environment: dict[str, str], expected: str) -> None:
    assert launchers.job_name(environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),  # nobody says on how many nodes
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}, False),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}, True),
        (SLURM_TASK, False),
    ],
)
def test_only_a_launcher_can_say_that_there_is_no_other_node(environment: dict[str, str], expected: bool) -> None:
    assert launchers.is_on_one_node(environment) is expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}, 8),
        # mpirun may go round the nodes
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_ranks_of_a_node_follow_each_other_under_torchrun_and_deepspeed(
    environment: dict[str, str], expected: int | None
) -> None:
    assert launchers.ranks_per_node(environment) == expected
