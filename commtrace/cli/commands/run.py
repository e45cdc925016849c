"""``commtrace run -- torchrun … train.py``: records a training job without a change to its script."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import commtrace._inject
from commtrace.cli import ended_command
from commtrace.cli.ended_command import EndedCommand
from commtrace.config import BY_SHELL, FORWARDED, NOTES_VARIABLE, Config, forwardable
from commtrace.recording import identity, launchers
from commtrace.recording.identity import DEFAULT_DIRECTORY
from commtrace.trace import side_process
from commtrace.trace.processes import cpu_ns

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_LOOK_SECONDS: Final = 2.5
"""A process that computes nothing for so long waits for its file system; the first interval does not count."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to run.", show_default=False)],
    directory: Annotated[
        str, typer.Option("--output", "-o", "--dir", help="Record here, not in commtrace-runs/{run_id}.")
    ] = "",
    run_id: Annotated[
        str, typer.Option(help="Name of the run. Default: the launcher's job name, else the ranks agree on one.")
    ] = "",
    steps: Annotated[str, typer.Option(help="Record only these steps: A:B (B exclusive), A:B:k (one in k) or A.")] = "",
    sample: Annotated[str, typer.Option(help="Record one step in N in detail, and the sums of the others.")] = "",
    modules: Annotated[str, typer.Option(help="Record modules too: depth=N, or patterns of their names.")] = "",
    keep_bytes: Annotated[str, typer.Option(help="Keep at most this many bytes per rank, the newest; e.g. 2G.")] = "",
    keep_steps: Annotated[str, typer.Option(help="Keep at most this many steps, the newest.")] = "",
    export: Annotated[
        str,
        typer.Option(
            help="Exporters to run, separated by commas: monitor, prometheus, otlp, tensorboard, wandb, mlflow."
        ),
    ] = "",
    node_id: Annotated[str, typer.Option(help="Name of this node. Default: the host name.")] = "",
    engine: Annotated[
        str, typer.Option(help="What records: native (in C) or python. Default: native where it can be had.")
    ] = "",
) -> None:
    """Run a training command and record it; its script needs no change.

    Every process of it that imports torch records. At the end, the state of the job and the findings that cost most are
    told in three lines, if a second of computing is enough to find them. The exit code is the command's own; signals
    are passed on to it.
    Every option sets the COMMTRACE_* variable of its name; docs/environment-variables.md has the others.
    """
    options = {
        "dir": directory,
        "run_id": run_id,
        "steps": steps,
        "sample": sample,
        "modules": modules,
        "keep_bytes": keep_bytes,
        "keep_steps": keep_steps,
        "export": export,
        "node_id": node_id,
        "engine": engine,
    }
    environment = injected_environment(os.environ, {name: value for name, value in options.items() if value})
    if NOTES_VARIABLE in os.environ:
        raise typer.Exit(_execute(command, environment))  # below another commtrace run, which says what was recorded
    began_ns = time.time_ns()
    exit_code, noted = _execute_with_notes(command, environment)
    for line in _told(EndedCommand(noted, began_ns, environment, exit_code)):
        typer.echo(line, err=True)
    raise typer.Exit(exit_code)


def _told(ended: EndedCommand) -> Sequence[str]:
    """Return what there is to say of the recording, by a process that this one leaves behind if files do not answer."""
    try:
        process, connection = side_process.start(ended_command.__name__, stderr=subprocess.DEVNULL)
    except side_process.NotStartedError:
        return ended_command.tell(ended)
    try:
        connection.send(ended)
        before_ns = -1
        while not connection.poll(_LOOK_SECONDS):
            spent_ns = cpu_ns(process.pid)
            if spent_ns == before_ns:
                directory = ended.environment["COMMTRACE_DIR"]
                return [f"\ncommtrace: the file system of {directory} does not answer: what was recorded is not known"]
            before_ns = spent_ns
        lines: Sequence[str] = connection.recv()
    except (EOFError, ConnectionError):
        lines = [f"\ncommtrace: what was recorded is not known: the process that looks has ended with {process.wait()}"]
    process.wait()
    return lines


def _execute_with_notes(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, dict[Path, bool]]:
    """Return the exit code of ``command``, and the folders that ranks on this node reported to record in.

    The folders of ranks that a shell started are True.
    """
    try:
        notes = tempfile.NamedTemporaryFile(prefix="commtrace-run-")  # noqa: SIM115
    except OSError:  # no directory for temporary files can be written: look for the recorded files instead
        return _execute(command, environment), {}
    with notes:
        exit_code = _execute(command, {**environment, NOTES_VARIABLE: notes.name})
        lines = (line.partition(BY_SHELL) for line in notes.read().decode(errors="replace").splitlines())
        return exit_code, {Path(folder): bool(by_shell) for folder, by_shell, _ in lines}


def injected_environment(environment: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with the variables that make every Python process below record into one run.

    Raises:
        ConfigurationError: an option or a COMMTRACE_* variable cannot be used. Reported here, not by every rank.
    """
    given = {**environment, **{f"COMMTRACE_{name.upper()}": value for name, value in options.items()}}
    config = Config.from_env(given)
    injected = {**given, "COMMTRACE_DIR": os.path.abspath(config.dir or DEFAULT_DIRECTORY)}
    # A name of the launcher reaches all ranks, and may change below: torchrun's own id counts before Slurm's.
    if launchers.is_on_one_node(environment) and not launchers.job_name(environment):
        injected["COMMTRACE_RUN_ID"] = identity.run_id(config, environment)
    if config.enabled:  # where it is off, nothing is to be imported at all, on no node
        search_path = [str(Path(commtrace._inject.__file__).parent), environment.get("PYTHONPATH", "")]
        injected["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    return {**injected, FORWARDED: forwardable(injected)}


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of ``command``: 128 + n if signal n ended it, as in shells."""
    # Blocked before the command starts, so that neither its end nor an early signal can be missed.
    awaited = {*side_process.SENT_TO_ALL, signal.SIGCHLD}
    original = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        process = subprocess.Popen(
            command, env=environment, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, original)
        )
        while process.poll() is None:
            received = signal.sigwaitinfo(awaited)
            # A code above 0 is the kernel's: Ctrl-C at a terminal, which the command has been sent as well.
            if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                process.send_signal(received.si_signo)
    except FileNotFoundError as error:
        typer.echo(f"commtrace: {command[0]}: command not found", err=True)
        raise typer.Exit(_NOT_FOUND) from error
    except PermissionError as error:
        typer.echo(f"commtrace: {command[0]}: not an executable file", err=True)
        raise typer.Exit(_NOT_EXECUTABLE) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, original)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
