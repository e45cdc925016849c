from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from commtrace.cli.commands import run
from commtrace.cli.commands.run import _execute_with_notes, injected_environment
from commtrace.cli.ended_command import EndedCommand
from commtrace.config import forwardable, forwarded_variables
from commtrace.errors import ConfigurationError
from commtrace.trace import side_process
from tests.cli.commands import slow_look

INJECTED = str(Path(__file__).resolve().parents[3] / "commtrace" / "_inject")


def _environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COMMTRACE_", "PYTHON"))}
    return {**inherited, **(changes or {})}


def _run(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commtrace", "run", *arguments],
        cwd=cwd,
        env=_environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _python(source: str) -> list[str]:
    return ["--", sys.executable, "-c", textwrap.dedent(source)]


def test_a_command_line_option_wins_over_a_variable_and_a_variable_over_a_default(tmp_path: Path) -> None:
    given = {"COMMTRACE_RUN_ID": "from-variable", "COMMTRACE_STEPS": "1:2", "PYTHONPATH": "/mine"}
    options = {"run_id": "from-option", "node_id": "n1"}

    environment = injected_environment(given, options)

    own = {
        "COMMTRACE_RUN_ID": "from-option",
        "COMMTRACE_STEPS": "1:2",
        "COMMTRACE_NODE_ID": "n1",
        "COMMTRACE_DIR": str(Path.cwd() / "commtrace-runs" / "{run_id}"),
    }
    assert environment == {
        **own,
        "PYTHONPATH": INJECTED + os.pathsep + "/mine",
        "PYTHON_COMMTRACE_VARIABLES": forwardable(own),
    }
    assert forwarded_variables(environment) == own


def test_secrets_are_not_handed_to_a_launcher_that_prints_them() -> None:
    secrets = {
        "COMMTRACE_MONITOR_WEBHOOK": "https://user:secret@host",
        "COMMTRACE_MONITOR_WEBHOOK_KEY": "secret",
        "COMMTRACE_MONITOR_TOKEN": "secret" * 8,
    }
    environment = injected_environment(secrets, {})

    assert list(forwarded_variables(environment)) == ["COMMTRACE_DIR"]


def test_no_name_is_invented_where_there_may_be_other_nodes() -> None:
    assert "COMMTRACE_RUN_ID" not in injected_environment({}, {})
    of_two_nodes = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert "COMMTRACE_RUN_ID" not in injected_environment(of_two_nodes, {})


def test_behind_the_launcher_of_one_node_all_ranks_are_named_after_that() -> None:
    ranks = [{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} for rank in "01"]

    names = {injected_environment(rank, {})["COMMTRACE_RUN_ID"] for rank in ranks}

    assert len(names) == 1
    assert names.pop().endswith(f"-{os.getppid()}")


def test_a_name_of_slurm_is_left_to_the_ranks_as_torchrun_may_have_another() -> None:
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}

    assert "COMMTRACE_RUN_ID" in injected_environment(task, {})
    assert "COMMTRACE_RUN_ID" not in injected_environment({**task, "SLURM_JOB_ID": "47", "SLURM_STEP_ID": "0"}, {})


def test_a_recording_that_is_off_puts_nothing_on_the_python_path_of_any_node() -> None:
    environment = injected_environment({"COMMTRACE_ENABLED": "0", "PYTHONPATH": "/mine"}, {})

    assert environment["PYTHONPATH"] == "/mine"
    assert forwarded_variables(environment)["COMMTRACE_ENABLED"] == "0"


def test_the_directory_does_not_depend_on_where_a_rank_changes_to(tmp_path: Path) -> None:
    assert injected_environment({}, {"dir": "runs/a"})["COMMTRACE_DIR"] == str(Path.cwd() / "runs" / "a")


def test_a_value_that_cannot_be_used_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="COMMTRACE_SAMPLE='x'"):
        injected_environment({"COMMTRACE_SAMPLE": "x"}, {})


@pytest.mark.parametrize(("ending", "exit_code"), [("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_exit_code_is_the_commands(tmp_path: Path, ending: str, exit_code: int) -> None:
    assert _run("--", "sh", "-c", ending, cwd=tmp_path).returncode == exit_code


def test_a_command_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    missing = _run("--", "no-such-command", cwd=tmp_path)
    text = _run("--", "./text", cwd=tmp_path)

    assert (missing.returncode, missing.stderr) == (127, "commtrace: no-such-command: command not found\n")
    assert (text.returncode, text.stderr) == (126, "commtrace: ./text: not an executable file\n")


def test_leftovers_of_an_earlier_run_keep_no_job_from_starting(tmp_path: Path) -> None:
    (tmp_path / "commtrace-runs" / "old").mkdir(parents=True)
    (tmp_path / "commtrace-runs" / "old" / "rank-00000").symlink_to(tmp_path / "gone")
    assert _run("--", "echo", "started", cwd=tmp_path).stdout == "started\n"


def test_a_job_starts_where_no_temporary_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert _execute_with_notes(["true"], dict(os.environ)) == (0, {})


def test_options_after_the_command_are_the_commands_with_or_without_dashes(tmp_path: Path) -> None:
    for separator in (["--"], []):
        completed = _run(*separator, "echo", "--dir", "x", "--help", cwd=tmp_path)
        assert (completed.returncode, completed.stdout) == (0, "--dir x --help\n")


def test_output_of_the_command_is_left_alone_and_ours_goes_to_stderr(tmp_path: Path) -> None:
    completed = _run("--run-id", "r1", *_python("print('loss 1.0')"), cwd=tmp_path)

    assert completed.stdout == "loss 1.0\n"
    assert f"commtrace: nothing was recorded in {tmp_path}/commtrace-runs/r1. Did a process call" in completed.stderr
    assert not (tmp_path / "commtrace-runs").exists()


def test_a_run_without_ranks_and_without_a_name_names_the_folder_of_runs(tmp_path: Path) -> None:
    completed = _run("--", "true", cwd=tmp_path)
    assert f"commtrace: nothing was recorded in {tmp_path}/commtrace-runs. Did a process call" in completed.stderr


ENDED = EndedCommand({}, 0, {"COMMTRACE_DIR": "/runs"}, 0)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "what was recorded is not known: the process that looks has ended with -9"),
        (signal.SIGSTOP, "the file system of /runs does not answer: what was recorded is not known"),
    ],
)
def test_a_process_that_cannot_tell_what_was_recorded_keeps_nobody_waiting(
    number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process computes nothing, as one whose file system does not answer."""
    start, started = side_process.start, []

    def start_one(*arguments: Any, **keywords: Any) -> tuple[subprocess.Popen[bytes], Connection]:
        process, connection = start(*arguments, **keywords)
        os.kill(process.pid, number)
        started.append(process)
        return process, connection

    monkeypatch.setattr(side_process, "start", start_one)
    monkeypatch.setattr(run, "_LOOK_SECONDS", 0.1)
    try:
        assert run._told(ENDED) == [f"\ncommtrace: {said}"]
    finally:
        for process in started:
            process.kill()
            process.wait(20)


def test_a_process_that_takes_long_to_tell_what_was_recorded_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ended_command", slow_look)
    monkeypatch.setattr(run, "_LOOK_SECONDS", 1.5)  # on a busy machine it gets no core for a while
    assert run._told(ENDED) == ["read"]


def test_signals_reach_the_command(tmp_path: Path) -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    script = f"""
        import os, signal, time
        left = {[*map(int, numbers)]}
        def told(number, frame):
            os.write(1, b"got %d\\n" % number)  # print would refuse to be entered from within print
            left.remove(number)
            if not left:
                os._exit(42)
        for number in list(left):
            signal.signal(number, told)
        print("ready", flush=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
    """
    command = [sys.executable, "-m", "commtrace", "run", *_python(script)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
            assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.wait(30) == 42


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    script = """
        import signal, time
        times = []
        signal.signal(signal.SIGINT, lambda *_: times.append(1))
        print("ready", flush=True)
        deadline = time.monotonic() + 30
        while not times and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        print("times", len(times), flush=True)
    """
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "commtrace", "run", *_python(script)]
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_A_TERMINAL, *command], cwd=tmp_path, env=_environment(), stdin=terminal,
        stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    output = _read_until(master, b"ready")
    os.write(master, b"\x03")
    output += _read_until(master, b"times ")
    output += os.read(master, 1)
    exit_code = process.wait(30)
    os.close(master)

    assert output.endswith(b"times 1")
    assert exit_code == 0


_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    output = b""
    while wanted not in output:
        output += os.read(descriptor, 1)
    return output


def _injected(source: str, tmp_path: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A Python as the command starts it, in an environment whose ``torch`` is a file that we wrote."""
    return _started_by_injected([*flags, "-c", textwrap.dedent(source)], tmp_path, **env)


def _started_by_injected(words: Sequence[str], tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    search_path = os.pathsep.join([INJECTED, str(tmp_path)])
    return subprocess.run(
        [sys.executable, *words],
        env=_environment({"PYTHONPATH": search_path, **env}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_without_torch_imports_nothing_of_ours(tmp_path: Path) -> None:
    completed = _injected(
        "import sys; print([name for name in sys.modules if 'commtrace' in name and '__editable__' not in name])",
        tmp_path,
    )

    assert (completed.stdout, completed.stderr) == ("[]\n", "")


FAKE_COMMTRACE = "print('commtrace.auto with', __import__('torch').whole)"


def _fake_packages(folder: Path) -> None:
    (folder / "torch.py").write_text("whole = False\nprint('torch executes')\nwhole = True\n")
    (folder / "commtrace").mkdir()
    (folder / "commtrace" / "__init__.py").write_text("")
    (folder / "commtrace" / "auto.py").write_text(FAKE_COMMTRACE)


def test_commtrace_is_imported_once_and_when_torch_is_whole(tmp_path: Path) -> None:
    _fake_packages(tmp_path)
    source = """
        import importlib.util, sys
        importlib.util.find_spec("torch")  # as libraries do to see whether it is there
        import torch
        import torch
        print(type(torch.__spec__.loader).__name__, sum("Torch" in type(finder).__name__ for finder in sys.meta_path))
    """

    assert _injected(source, tmp_path).stdout == "torch executes\ncommtrace.auto with True\nSourceFileLoader 0\n"


LAUNCHER = """
import multiprocessing

def train():
    import torch

if __name__ == "__main__":
    import torch
    train_elsewhere = multiprocessing.get_context("spawn").Process(target=train)
    train_elsewhere.start()
    train_elsewhere.join()
"""


@pytest.mark.parametrize(
    "started",
    [["bin/torchrun"], ["-um", "torch.distributed.run"], ["-X", "dev", "-m", "torch.distributed.launch", "train.py"]],
)
def test_a_launcher_is_not_recorded_but_the_processes_that_it_starts_are(tmp_path: Path, started: list[str]) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch.py").rename(tmp_path / "torch" / "__init__.py")
    (tmp_path / "bin").mkdir()
    for place in ("bin/torchrun", "torch/distributed/run.py", "torch/distributed/launch.py"):
        (tmp_path / place).write_text(LAUNCHER)

    completed = _started_by_injected(started, tmp_path)

    assert completed.stdout == "torch executes\ntorch executes\ncommtrace.auto with True\n"


def test_a_script_whose_argument_is_a_launcher_is_recorded(tmp_path: Path) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "train.py").write_text("import torch")

    completed = _started_by_injected(["train.py", "-m", "torch.distributed.run"], tmp_path)

    assert completed.stdout == "torch executes\ncommtrace.auto with True\n"


def test_a_torch_that_cannot_be_imported_fails_as_without_commtrace(tmp_path: Path) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    source = """
        for _ in range(2):
            try:
                import torch
            except ImportError as error:
                print(error)
    """

    assert _injected(source, tmp_path).stdout == "libcudart.so is missing\n" * 2


@pytest.mark.parametrize(
    ("auto", "said"),
    [
        ("raise RuntimeError('broken')", "RuntimeError: broken."),
        ("import no_such_dependency", "No module named 'no_such_dependency'. Install it there: "),
    ],
)
def test_whatever_happens_in_commtrace_the_script_goes_on(tmp_path: Path, auto: str, said: str) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "commtrace" / "auto.py").write_text(auto)

    completed = _injected("import torch; print('training')", tmp_path)

    assert (completed.returncode, completed.stdout) == (0, "torch executes\ntraining\n")
    assert "commtrace: nothing is recorded in process" in completed.stderr
    assert said in completed.stderr
    assert completed.stderr.count("\n") == 1


def test_torch_is_imported_by_pythons_that_are_too_old_for_commtrace(tmp_path: Path) -> None:
    """Python 3.8 and 3.9 have no sys.orig_argv."""
    _fake_packages(tmp_path)

    completed = _injected("import sys; del sys.orig_argv; import torch; print('training')", tmp_path)

    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == "torch executes\ncommtrace.auto with True\ntraining\n"


def test_the_injected_file_is_one_of_python_3_8() -> None:
    source = Path(INJECTED, "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 8))


@pytest.mark.parametrize(
    "finder",
    [
        "class Old: find_module = staticmethod(lambda *_: None)",  # as Python 3.11 still takes them
        "class Old(Frozen): pass",
    ],
)
def test_finders_and_loaders_of_all_kinds_are_let_pass(tmp_path: Path, finder: str) -> None:
    _fake_packages(tmp_path)
    source = f"""
        import importlib.machinery, sys
        class Loader:
            __slots__ = ()
            create_module = staticmethod(lambda spec: None)
            exec_module = staticmethod(lambda module: print("torch executes"))
        class Frozen:
            find_spec = staticmethod(
                lambda name, *_: importlib.machinery.ModuleSpec(name, Loader()) if name == "torch" else None
            )
        {finder}
        sys.meta_path.insert(0, Old())
        import torch
        print("training")
    """

    completed = _injected(source, tmp_path)

    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("torch executes\n")
    assert completed.stdout.endswith("training\n")


def test_the_sitecustomize_that_ours_hides_is_executed(tmp_path: Path) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("print('hidden one'); value = 5")

    completed = _injected("import sitecustomize, torch; print(sitecustomize.value)", tmp_path)

    assert completed.stdout == "hidden one\ntorch executes\ncommtrace.auto with True\n5\n"
    assert completed.stderr == ""


def test_a_hidden_sitecustomize_that_fails_does_so_as_without_commtrace(tmp_path: Path) -> None:
    _fake_packages(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')")

    completed = _injected("import torch", tmp_path)

    assert completed.returncode == 0
    assert "ValueError: theirs" in completed.stderr
    assert completed.stdout == "torch executes\ncommtrace.auto with True\n"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_pythons_that_ignore_the_path_are_not_touched(tmp_path: Path, flag: str) -> None:
    completed = _injected("import sys; print(sum('Torch' in type(f).__name__ for f in sys.meta_path))", tmp_path, flag)

    assert completed.stdout == "0\n"


@pytest.mark.e2e
def test_steps_that_the_job_does_not_get_to_are_spoken_of(tmp_path: Path) -> None:
    source = """
        import torch, torch.distributed as dist, commtrace
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for number in range(3):
            with commtrace.step(number):
                dist.all_reduce(torch.ones(1))
        """
    completed = _run("--steps", "100:110", *_python(source), cwd=tmp_path)

    assert completed.returncode == 0, completed.stderr
    told = (
        "commtrace: Only steps 100:110 were to be recorded (COMMTRACE_STEPS, --steps), and the job got as far as step 2"
    )
    assert told in completed.stderr
    assert "Next:" not in completed.stderr


@pytest.mark.e2e
def test_turned_off_a_job_writes_nothing(tmp_path: Path) -> None:
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()
        """
    completed = _run("--run-id", "r1", *_python(source), cwd=tmp_path, env={"COMMTRACE_ENABLED": "0"})

    assert completed.returncode == 0, completed.stderr
    assert "COMMTRACE_ENABLED turns it off" in completed.stderr
    assert not (tmp_path / "commtrace-runs").exists()
