"""The name of a run: equal on all its ranks, different from launch to launch; and what is stored of the environment."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commtrace.config import Config
from commtrace.recording import agreement, identity
from commtrace.recording.identity import stored_settings
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.metadata import is_world_key


def test_the_name_that_is_given_wins() -> None:
    environment = {"TORCHELASTIC_RUN_ID": "torch", "SLURM_JOB_ID": "1", "RANK": "0"}
    assert identity.run_id(Config(run_id="mine"), environment) == "mine"
    assert identity.run_id(Config(), environment) == "torch"
    assert identity.run_id(Config(), {**environment, "NEMO_LENS_RUN_ID": "lens"}) == "lens"
    assert identity.run_id(Config(), {"SLURM_JOB_ID": "1", "TORCHELASTIC_RUN_ID": "none"}) == "slurm-1"


def test_a_name_of_the_launchers_that_is_no_name_of_a_folder_becomes_one() -> None:
    assert identity.run_id(Config(), {"TORCHELASTIC_RUN_ID": "../a\nb"}) == "___a_b"


def test_the_ranks_of_one_node_are_named_after_their_launcher() -> None:
    ranks = [{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"} for rank in "01"]
    names = {identity.run_id(Config(), rank) for rank in ranks}

    assert len(names) == 1
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getppid()}", names.pop())


def test_the_ranks_of_several_nodes_have_to_agree() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert identity.run_id(Config(), environment) == ""


def test_a_process_of_its_own_is_named_after_itself() -> None:
    found = identity.Identity(Config(), {}).found()

    assert found is not None
    assert found == identity.AgreedIdentity(
        found.run_id, attempt=0, rank=0, local_rank=0, world_size=1, backend="", world=found.world,
        job=found.run_id,
    )  # fmt: skip
    assert is_world_key(found.world)
    assert found.run_id.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "2"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": "2"}, 3),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, 1),
        ({"TORCHELASTIC_RESTART_COUNT": ""}, 0),
    ],
)
def test_a_requeue_and_a_restart_are_attempts(environment: dict[str, str], expected: int) -> None:
    assert identity.attempt(environment) == expected


def test_the_name_of_the_run_has_its_place_in_the_directory(tmp_path: Path) -> None:
    assert identity.directory(Config(dir=f"{tmp_path}/{{run_id}}/traces"), "a") == tmp_path / "a" / "traces"
    assert identity.directory(Config(), "a") == Path.cwd() / "commtrace-runs" / "a"
    assert identity.directory(Config(dir=str(tmp_path)), "a") == tmp_path


def job_of(*environments: dict[str, str], configs: list[Config] | None = None) -> list[identity.AgreedIdentity]:
    """Who the processes of a job take themselves for, each with its launcher's variables, by way of one store.

    They ask in the order in which they are given, and again until all know.
    """
    store = HashStore()
    world = len(environments)
    processes = [
        identity.Identity(config, environment)
        for config, environment in zip(configs or [Config()] * world, environments, strict=True)
    ]
    found: list[identity.AgreedIdentity | None] = [None] * world
    for _ in range(3):
        for rank, process in enumerate(processes):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(identity, "current_place", lambda rank=rank: identity.Place(rank, world, "gloo"))
                patch.setattr(identity, "_default_store", lambda: store)
                patch.setattr(agreement, "_arrived_in", 0)
                found[rank] = process.found()
    return [one for one in found if one is not None]


STATIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
JOBS: dict[str, list[dict[str, str]]] = {
    "torchrun, static, two nodes": [
        {**STATIC, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_WORLD_SIZE": "2"} for rank in range(4)
    ],
    "torchrun, c10d, two nodes, one of which counts no restart": [
        {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0",
        }
        for rank in range(4)
    ],
    "deepspeed, two nodes": [
        {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_SIZE": "2", "CROSS_SIZE": "2",
            "CROSS_RANK": str(rank // 2), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
        }
        for rank in range(4)
    ],
    "mpirun of Open MPI, two nodes": [
        {
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1135345665", "PMIX_RANK": str(rank),
        }
        for rank in range(4)
    ],
    "mpiexec of MPICH, two nodes": [
        {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": "2"}
        for rank in range(4)
    ],
    "srun, a task for each rank": [
        {
            "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": str(rank % 2),
            "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "2",
        }
        for rank in range(4)
    ],
    "srun, a torchrun for each node": [
        {
            **STATIC, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_WORLD_SIZE": "2", "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank // 2), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_RESTART_COUNT": "2",
        }
        for rank in range(4)
    ],
    "an srun for each node, each with a torchrun": [
        {
            **STATIC, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_WORLD_SIZE": "2", "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": str(rank // 2), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1",
        }
        for rank in range(4)
    ],
    "pods of a PyTorchJob, a rank in each": [
        {
            "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
            "PET_NODE_RANK": str(rank), "PET_NNODES": "4", "PET_MASTER_ADDR": "job-master-0",
        }
        for rank in range(4)
    ],
    "started by hand, without a launcher": [{}, {}, {}, {}],
}  # fmt: skip
"""The variables that the sources of the launchers set, beside those of torch.distributed's own rendezvous."""

LOCAL_RANKS = {
    "pods of a PyTorchJob, a rank in each": [0, 0, 0, 0],
    "started by hand, without a launcher": [0, 1, 2, 3],
}
NAMES = {
    "torchrun, c10d, two nodes, one of which counts no restart": "mine",
    "srun, a task for each rank": "slurm-4711.1",
    "srun, a torchrun for each node": "slurm-4711.0",
    "an srun for each node, each with a torchrun": "slurm-4711.0",
}


@pytest.mark.parametrize("launcher", JOBS)
def test_all_ranks_of_a_job_are_of_one_run_however_it_is_launched(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["a", "b", "c", "d"])
    if "PyTorchJob" in launcher:
        monkeypatch.setattr("socket.gethostname", lambda: next(hosts))

    found = job_of(*JOBS[launcher])

    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert [one.local_rank for one in found] == LOCAL_RANKS.get(launcher, [0, 1, 0, 1])
    assert len({(one.run_id, one.attempt, one.world_size) for one in found}) == 1
    assert found[0].attempt == int(JOBS[launcher][0].get("SLURM_RESTART_COUNT", 0))
    if launcher in NAMES:
        assert found[0].run_id == NAMES[launcher]
    else:
        assert re.fullmatch(r"\d{8}-\d{6}-\d+", found[0].run_id)


def test_a_node_that_was_not_given_the_name_takes_it_from_rank_0_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with mpirun without -x: processes beside it inherit its variables, those of other nodes do not."""
    configs = [Config(run_id="given"), Config(run_id="given"), Config(run_id="other"), Config(run_id="other")]

    found = job_of(*JOBS["mpirun of Open MPI, two nodes"], configs=configs)

    assert {one.run_id for one in found} == {"given"}
    assert len(caplog.records) == 1
    assert "called other on this node and given on rank 0, and is recorded as given" in caplog.text


def test_a_job_whose_store_cannot_be_asked_is_recorded_under_the_launchers_name_or_says_that_it_is_not_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(2, 4, "gloo"))
    monkeypatch.setattr(identity, "_default_store", Dead)

    named = identity.Identity(Config(), JOBS["srun, a task for each rank"][2]).found()
    assert named is not None
    assert (named.run_id, named.attempt, named.local_rank) == ("slurm-4711.1", 2, 0)
    identity.Identity(Config(), JOBS["deepspeed, two nodes"][2]).found()
    assert "could not agree on a name for this run (connection reset by peer)" in caplog.text


def test_rank_0_says_once_that_ranks_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(0, 4, "gloo"))
    monkeypatch.setattr(identity, "_default_store", lambda: store)
    first = identity.Identity(Config(), JOBS["deepspeed, two nodes"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_PATIENCE_SECONDS", 0.0)
        first.settled(0.0)

    first.look_for_others()
    assert not caplog.records
    monkeypatch.setattr(identity, "_LONGEST_SECONDS", 0.0)
    for _ in range(3):
        first.look_for_others()
    assert len(caplog.records) == 1
    assert "3 of the ranks have not reported" in caplog.text


@pytest.mark.parametrize(
    ("environment", "waits"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "elsewhere"}, True),  # the script has its own
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
    ],
)
def test_rank_0_waits_until_the_others_have_heard_it_only_if_the_store_ends_with_it(
    environment: dict[str, str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("localhost", 0, is_master=True)
    slept: list[float] = []
    simulated = {**vars(time), "monotonic": lambda: sum(slept), "sleep": slept.append}
    monkeypatch.setattr(identity, "time", SimpleNamespace(**simulated))
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(0, 4, "gloo"))
    monkeypatch.setattr(identity, "_default_store", lambda: PrefixStore("default_pg", PrefixStore("worker", store)))
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.0)

    given = {**JOBS["torchrun, static, two nodes"][0], "MASTER_PORT": str(store.port), **environment}
    assert identity.Identity(Config(), given).settled(0.02).rank == 0

    assert bool(slept) is waits


def test_a_rank_does_not_wait_for_ever_for_a_rank_0_that_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(2, 4, "gloo"))
    monkeypatch.setattr(identity, "_default_store", HashStore().__class__)
    process = identity.Identity(Config(), JOBS["deepspeed, two nodes"][2])

    assert process.found() is None
    assert process.settled(0.05).rank == 2
    assert "rank 0 has not announced one" in caplog.text


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
    distributed: Any = SimpleNamespace(get_backend=lambda: named, get_backend_config=lambda: by_device)

    assert identity._backend(distributed) == shown


def test_only_known_settings_with_short_values_are_stored() -> None:
    environment = {
        "NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4",
        "NCCL_PLUGIN_TOKEN": "secret", "NCCL_DEBUG_FILE": "/home/secret", "GLOO_PASSWORD": "secret",
        "NCCL_IB_HCA": "x" * 101, "NCCL_NET": "a\x1b]0;", "AWS_SECRET_ACCESS_KEY": "secret", "OMP_NUM_THREADS_X": "1",
        "LD_PRELOAD": "/home/secret/libjemalloc.so.2:libnccl-net.so libm.so", "LD_LIBRARY_PATH": "/home/secret",
    }  # fmt: skip
    assert stored_settings(environment) == {
        "NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4",
        "LD_PRELOAD": "libjemalloc.so.2:libnccl-net.so:libm.so",
    }  # fmt: skip


@pytest.mark.parametrize("preloaded", ["", " ", "lib\x1b]0;.so", "x" * 101])
def test_a_value_that_is_no_list_of_libraries_is_not_stored(preloaded: str) -> None:
    assert stored_settings({"LD_PRELOAD": preloaded}) == {}


@pytest.mark.timeout(30)
def test_a_handler_of_a_signal_may_ask_while_its_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may destroy the process groups, before which the ranks agree."""
    place = identity.Place(0, 2, "gloo")
    asked = identity.Identity(Config(run_id="mine"), {})
    by_handler: list[identity.AgreedIdentity | None] = []

    def interrupted() -> None:
        by_handler.append(asked.found(place))

    monkeypatch.setattr(identity, "_default_store", interrupted)
    found = asked.found(place)

    assert found is not None
    assert (by_handler, found.run_id, asked.found(place)) == ([None], "mine", found)


@pytest.mark.timeout(30)
def test_a_rank_does_not_wait_for_a_request_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    place = identity.Place(0, 2, "gloo")
    asked = identity.Identity(Config(run_id="mine"), {})
    is_asking, answer = threading.Event(), threading.Event()

    def slow_store() -> None:
        is_asking.set()
        answer.wait()

    monkeypatch.setattr(identity, "_default_store", slow_store)
    harvester = threading.Thread(target=asked.found, args=(place,))
    harvester.start()
    is_asking.wait()
    assert asked.found(place) is None
    answer.set()
    harvester.join()

    assert asked.found(place) == identity.AgreedIdentity("mine", 0, 0, 0, 2, "gloo", job="mine")


def test_a_store_that_does_not_answer_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Blocked(HashStore):
        def add(self, key: str, amount: int) -> int:
            answers.wait(60)
            return 1

        def clone(self) -> Blocked:
            return self

    store = Blocked()
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(2, 4, "gloo"))
    monkeypatch.setattr(identity, "_default_store", lambda: store)
    process = identity.Identity(Config(), JOBS["deepspeed, two nodes"][2])

    began = time.monotonic()
    assert [process.found() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began < 10
    monkeypatch.setattr(identity, "_LONGEST_SECONDS", 0.0)
    found = process.found()
    answers.set()

    assert found is not None
    assert found.rank == 2
    assert "rank 0 has not announced one" in caplog.text


def test_a_file_system_that_does_not_answer_holds_up_no_rank_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    class Frozen:
        def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
            answers.wait(60)
            return HERE.call(function, *arguments)

    store = HashStore()
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(0, 2, "gloo"))
    monkeypatch.setattr(identity, "_default_store", lambda: store)
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.0)
    environment = {**JOBS["deepspeed, two nodes"][0], "TORCHELASTIC_RESTART_COUNT": "1"}
    files = cast("FileCalls", Frozen())
    process = identity.Identity(Config(dir=str(tmp_path)), environment, files=files)

    began = time.monotonic()
    assert [process.found() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began < 10
    answers.set()
    found = process.settled(10)

    assert (found.rank, found.attempt, bool(found.world)) == (0, 1, True)


def test_a_store_is_asked_through_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = HashStore()

    class InUse(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise AssertionError("the job waits on this one")

        def clone(self) -> HashStore:
            return mine

    store = InUse()
    monkeypatch.setattr(identity, "current_place", lambda: identity.Place(0, 2, "gloo"))
    monkeypatch.setattr(identity, "_default_store", lambda: store)
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.0)

    assert identity.Identity(Config(), JOBS["deepspeed, two nodes"][0]).found() is not None


@pytest.mark.parametrize(("given", "expected"), [("", "late"), ("given", "given")])
def test_a_name_that_the_script_has_set_before_it_joins_counts_unless_start_was_given_one(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an actor of Ray, whose process had started before it was one."""
    monkeypatch.delenv("COMMTRACE_RUN_ID", raising=False)
    process = identity.Identity(Config(run_id=given))
    monkeypatch.setenv("COMMTRACE_RUN_ID", "late")
    found = process.found()

    assert found is not None
    assert (found.run_id, found.job) == (expected, expected)
    monkeypatch.setenv("COMMTRACE_RUN_ID", "later still")
    assert process.found() == found


def test_the_directory_of_a_further_world_is_beside_that_of_the_first_or_in_it(tmp_path: Path) -> None:
    name = identity.name_of_world("a", 2)

    assert identity.directory(Config(dir=f"{tmp_path}/{{run_id}}"), name, "a") == tmp_path / "a-world-2"
    assert identity.directory(Config(dir=str(tmp_path)), name, "a") == tmp_path / "world-2"
    assert identity.directory(Config(dir=str(tmp_path)), identity.name_of_world("a", 1), "a") == tmp_path
