"""``commtrace run -- torchrun … train.py``: records a training job without a change to its script."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import commtrace._inject
from commtrace.config import Config
from commtrace.errors import CommtraceError

_FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def run(
    command: Annotated[list[str], typer.Argument(help="The command to run, after --.", show_default=False)],
    directory: Annotated[str, typer.Option("--dir", help="Record here, not in commtrace-runs/RUN_ID.")] = "",
    run_id: Annotated[str, typer.Option(help="Name of the run; give all nodes of a job the same one.")] = "",
    steps: Annotated[str, typer.Option(help="Record only these steps: A:B (B exclusive) or A:B:k (one in k).")] = "",
    node_id: Annotated[str, typer.Option(help="Name of this node. Default: the host name.")] = "",
) -> None:
    """Run a training command and record it; its script needs no change.

    Every process of it that imports torch records. The exit code is the command's own; signals are passed on to it.
    """
    options = {"dir": directory, "run_id": run_id, "steps": steps, "node_id": node_id}
    environment = injected_environment(os.environ, {name: value for name, value in options.items() if value})
    run_directory = Path(environment["COMMTRACE_DIR"])
    before = _trace_files(run_directory)
    exit_code = _execute(command, environment)
    _tell_what_was_recorded(run_directory, _trace_files(run_directory) - before, environment, exit_code)
    raise typer.Exit(exit_code)


def injected_environment(environment: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """``environment`` plus what makes every Python below record into one run directory.

    Args:
        environment: the variables to start from.
        options: fields of :class:`commtrace.Config` that were given on the command line; they win over variables.

    Raises:
        ConfigurationError: an option or a COMMTRACE_* variable cannot be used. Better said here than by every rank.
    """
    injected = {**environment, **{f"COMMTRACE_{name.upper()}": value for name, value in options.items()}}
    config = Config.from_env(injected)
    run_id = config.run_id or _new_run_id()
    directory = Path(config.dir or Path("commtrace-runs") / run_id)
    search_path = [str(Path(commtrace._inject.__file__).parent), environment.get("PYTHONPATH", "")]
    return {
        **injected,
        "COMMTRACE_RUN_ID": run_id,
        "COMMTRACE_DIR": str(directory.absolute()),
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
    }


def _new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of ``command``: 128 + n when signal n ended it, as shells have it."""
    # Blocked before the command starts, so that neither its end nor an early signal can be missed.
    awaited = {*_FORWARDED, signal.SIGCHLD}
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


def _trace_files(run_directory: Path) -> set[Path]:
    # Imported here: pyarrow is not needed for the command to start.
    from commtrace.trace.writer import RANK_DIRECTORY_PATTERN, SEGMENT_PATTERN

    files = run_directory.glob("*/*")
    return {
        file for file in files if RANK_DIRECTORY_PATTERN.match(file.parent.name) and SEGMENT_PATTERN.match(file.name)
    }


def _tell_what_was_recorded(
    run_directory: Path, recorded: set[Path], environment: Mapping[str, str], exit_code: int
) -> None:
    """Where the run is and what to do next, on stderr: stdout is the command's."""
    if recorded:
        unreached = _unreached(run_directory, environment)
        if unreached is not None:
            typer.echo(f"\ncommtrace: {unreached}", err=True)
            return
        ranks = len({file.parent for file in recorded})
        typer.echo(f"\ncommtrace: recorded {ranks} rank{'s' * (ranks > 1)} in {run_directory}", err=True)
        typer.echo(f"Next: commtrace summary {shlex.quote(str(run_directory))}", err=True)
        return
    typer.echo(
        f"\ncommtrace: nothing was recorded in {run_directory}. {_likely_reason(environment, exit_code)}", err=True
    )


def _unreached(run_directory: Path, environment: Mapping[str, str]) -> str | None:
    """What there is to say if only steps were asked for that the job did not get to."""
    if not Config.from_env(environment).steps:
        return None
    from commtrace.analysis.unreached import unreached_steps
    from commtrace.trace.reader import load_newest

    try:
        return unreached_steps(load_newest(run_directory))
    except CommtraceError:
        return None  # Whoever reads the run is told what is wrong with it.


def _likely_reason(environment: Mapping[str, str], exit_code: int) -> str:
    config = Config.from_env(environment)
    if not config.enabled:
        return "COMMTRACE_ENABLED turns it off."
    if exit_code:
        return f"The command ended with {exit_code} before there was anything to record; its own output says why."
    window = f"Only steps {config.steps} were to be recorded: did the job get there? " if config.steps else ""
    return (
        f"{window}Did a process call torch.distributed.init_process_group? Is commtrace installed for the Python that "
        "the command starts, and is that Python started without -I, -E and -S, which ignore PYTHONPATH? "
        "If that cannot be changed, put `import commtrace.auto` into the script."
    )
