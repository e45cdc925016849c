"""``commtrace run -- torchrun … train.py``: records a training job without a change to its script."""

from __future__ import annotations

import glob
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import typer

import commtrace._inject
from commtrace import identity, launchers
from commtrace.config import FORWARDED, NOTES_VARIABLE, Config, forwardable
from commtrace.errors import CommtraceError
from commtrace.identity import DEFAULT_DIRECTORY, RUN_ID_PLACE

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

    Every process of it that imports torch records. The exit code is the command's own; signals are passed on to it.
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
    _note_exit(noted, began_ns, exit_code)
    position = launchers.position(os.environ)
    if position is None or position.rank == 0:  # behind a launcher there is one of us for each rank
        _print_recorded(noted, began_ns, environment, exit_code)
    raise typer.Exit(exit_code)


def _execute_with_notes(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, set[Path]]:
    """Return the exit code of ``command``, and the folders that ranks on this node reported to record in."""
    try:
        notes = tempfile.NamedTemporaryFile(prefix="commtrace-run-")  # noqa: SIM115
    except OSError:  # no directory for temporary files can be written: look for the recorded files instead
        return _execute(command, environment), set()
    with notes:
        exit_code = _execute(command, {**environment, NOTES_VARIABLE: notes.name})
        return exit_code, {Path(line) for line in notes.read().decode(errors="replace").splitlines()}


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


def _note_exit(noted: set[Path], began_ns: int, exit_code: int) -> None:
    """Note beside the files of this node's ranks how their command ended: many a rank ends without closing them."""
    from commtrace.trace.files.reader import newest_recording
    from commtrace.trace.files.side_files import write_exit

    newest = {}
    for folder in noted:
        recording = newest_recording(folder)
        if recording is not None and recording.metadata.session >= began_ns:
            newest[folder] = recording
    # A launcher that hides the failure of a rank, as `torchrun … || true` does, says nothing of the others.
    if exit_code == 0 and any(recording.exception for recording in newest.values()):
        return
    # Ranks that were started again after a failure: of those before, it is not said how they ended. Each world of a job
    # is started again by itself.
    attempts: dict[Path, int] = {}
    for folder, recording in newest.items():
        attempts[folder.parent] = max(recording.metadata.attempt, attempts.get(folder.parent, 0))
    for folder, recording in newest.items():
        if not recording.closed and recording.metadata.attempt == attempts[folder.parent]:
            try:
                write_exit(folder, recording.metadata.session, exit_code)
            except OSError as error:
                typer.echo(f"commtrace: {folder}: the end of the command could not be noted: {error}", err=True)


def _written_since(directory: str, began_ns: int) -> set[Path]:
    """Return the folders of ranks with new files since ``began_ns``, in the runs that ``directory`` may mean."""
    # Imported here: pyarrow is not needed for the command to start.
    from commtrace.trace.files.writer import RANK_DIRECTORY_PATTERN

    found = set()
    runs = glob.escape(directory).replace(RUN_ID_PLACE, "*")
    for name in chain(glob.iglob(f"{runs}/rank-*"), glob.iglob(f"{runs}/world-*/rank-*")):
        folder = Path(name)
        try:
            if folder.parent.is_symlink():  # ``latest``: the run that it leads to is there as well
                continue
            if RANK_DIRECTORY_PATTERN.match(folder.name) and folder.stat().st_mtime_ns >= began_ns:
                found.add(folder)
        except OSError:  # deleted meanwhile, or a link to nowhere: of another run
            continue
    return found


def _print_recorded(noted: set[Path], began_ns: int, environment: Mapping[str, str], exit_code: int) -> None:
    """Print the place of the run and the next command on stderr, as stdout is the command's."""
    from commtrace.trace.files.writer import segment_paths

    directory = environment["COMMTRACE_DIR"]
    position = launchers.position(os.environ)
    is_one_of_several = position is not None and position.world_size > 1  # the others know of their ranks
    recorded = {folder for folder in noted if folder.is_dir() and segment_paths(folder)}
    if not recorded:  # ranks of other nodes only, perhaps
        recorded = _written_since(directory, began_ns)
    if not recorded:
        run_id = environment.get("COMMTRACE_RUN_ID")
        if run_id:
            directory = directory.replace(RUN_ID_PLACE, run_id)
        elif RUN_ID_PLACE in directory:  # the ranks would have agreed on a name
            directory = os.path.dirname(directory.partition(RUN_ID_PLACE)[0]) or "."
        typer.echo(
            f"\ncommtrace: nothing was recorded in {directory}. {_likely_reason(environment, exit_code)}", err=True
        )
    runs = Counter(folder.parent for folder in recorded)
    if len(runs) > 1 and not is_one_of_several:
        sizes = " + ".join(str(runs[run_directory]) for run_directory in sorted(runs))
        typer.echo(f"\ncommtrace: recorded {len(runs)} worlds: {sizes} ranks", err=True)
    for run_directory in sorted(runs):
        unreached = _unreached(run_directory, environment)
        if unreached is not None:
            typer.echo(f"\ncommtrace: {unreached}", err=True)
            continue
        ranks = runs[run_directory]
        number = "" if is_one_of_several else f" {ranks} rank{'s' * (ranks > 1)}"
        typer.echo(f"\ncommtrace: recorded{number} in {run_directory}", err=True)
        typer.echo(f"Next: commtrace summary {shlex.quote(str(run_directory))}", err=True)


def _unreached(run_directory: Path, environment: Mapping[str, str]) -> str | None:
    """Return a sentence if the steps to record were never reached."""
    if not Config.from_env(environment).steps:
        return None
    from commtrace.analysis.steps.progress import unreached_steps
    from commtrace.trace.files.reader import load_newest

    try:
        return unreached_steps(load_newest(run_directory))
    except CommtraceError:
        return None  # every reading command reports it


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
