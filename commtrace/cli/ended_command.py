"""What ``commtrace run`` does once its command has ended: note how it ended beside its ranks, and say where these are.

A process of its own does it: the file system of the run may not answer, and ``commtrace run`` ends with its command.
"""

from __future__ import annotations

import glob
import os
import shlex
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from commtrace.cli.ending import ending_lines
from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.recording import launchers
from commtrace.recording.identity import RUN_ID_PLACE
from commtrace.recording.installation import own_command
from commtrace.trace.files.rank_files import RANK_DIRECTORY_PATTERN, segment_paths, write_exit


class EndedCommand(NamedTuple):
    """A command that has ended."""

    noted: Mapping[Path, bool]  # folders that ranks of this node reported; True if a shell had started the rank
    began_ns: int  # epoch
    environment: Mapping[str, str]
    exit_code: int


def main(descriptor: int, parent: int) -> None:
    """Tell the process ``parent`` over a connection, once."""
    connection = Connection(descriptor)
    ended = connection.recv()
    try:
        lines = tell(ended)
    except Exception:
        lines = [f"commtrace: what was recorded cannot be told:\n{traceback.format_exc()}"]
    connection.send(lines)


def tell(ended: EndedCommand) -> Sequence[str]:
    """Note how the command ended, and return what there is to say, line by line."""
    lines = list(_note_exit(ended))
    position = launchers.position(os.environ)
    if position is None or position.rank == 0:  # behind a launcher there is one of us for each rank
        lines += _recorded(ended, is_one_of_several=position is not None and position.world_size > 1)
    return lines


def _note_exit(ended: EndedCommand) -> Iterator[str]:
    """Note beside the files of this node's ranks how their command ended: many a rank ends without closing them."""
    from commtrace.trace.files.reader import newest_recording

    newest = {}
    for folder in ended.noted:
        recording = newest_recording(folder)
        if recording is not None and recording.metadata.session >= ended.began_ns:
            newest[folder] = recording
    # A launcher that hides the failure of a rank, as `torchrun … || true` does, says nothing of the others.
    if ended.exit_code == 0 and any(recording.exception or recording.exit for recording in newest.values()):
        return
    # Ranks that were started again after a failure: of those before, it is not said how they ended. Each world of a job
    # is started again by itself.
    attempts: dict[Path, int] = {}
    for folder, recording in newest.items():
        attempts[folder.parent] = max(recording.metadata.attempt, attempts.get(folder.parent, 0))
    for folder, recording in newest.items():
        if not recording.closed and recording.metadata.attempt == attempts[folder.parent]:
            try:
                write_exit(folder, recording.metadata.session, ended.exit_code, by_shell=ended.noted[folder])
            except OSError as error:
                yield f"commtrace: {folder}: the end of the command could not be noted: {error}"


def _written_since(directory: str, began_ns: int) -> set[Path]:
    """Return the folders of ranks with new files since ``began_ns``, in the runs that ``directory`` may mean."""
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


def _recorded(ended: EndedCommand, *, is_one_of_several: bool) -> Iterator[str]:
    """Yield the place of the run and the next command. Of several, each knows only of its own ranks."""
    environment = ended.environment
    directory = environment["COMMTRACE_DIR"]
    says_findings = Config.from_env(environment).findings_seconds > 0
    recorded = {folder for folder in ended.noted if folder.is_dir() and segment_paths(folder)}
    if not recorded:  # ranks of other nodes only, perhaps
        recorded = _written_since(directory, ended.began_ns)
    if not recorded:
        run_id = environment.get("COMMTRACE_RUN_ID")
        if run_id:
            directory = directory.replace(RUN_ID_PLACE, run_id)
        elif RUN_ID_PLACE in directory:  # the ranks would have agreed on a name
            directory = os.path.dirname(directory.partition(RUN_ID_PLACE)[0]) or "."
        yield f"\ncommtrace: nothing was recorded in {directory}. {_likely_reason(environment, ended.exit_code)}"
    runs = Counter(folder.parent for folder in recorded)
    if len(runs) > 1 and not is_one_of_several:
        sizes = " + ".join(str(runs[run_directory]) for run_directory in sorted(runs))
        yield f"\ncommtrace: recorded {len(runs)} worlds: {sizes} ranks"
    for run_directory in sorted(runs):
        unreached = _unreached(run_directory, environment)
        if unreached is not None:
            yield f"\ncommtrace: {unreached}"
            continue
        ranks = runs[run_directory]
        number = "" if is_one_of_several else f" {ranks} rank{'s' * (ranks > 1)}"
        yield f"\ncommtrace: recorded{number} in {run_directory}"
        if says_findings:
            yield from ending_lines(run_directory, wait_for_ranks=is_one_of_several)
        following = "doctor" if ended.exit_code else "summary"  # of a job that failed or hung, first why
        yield f"Next: {own_command()} {following} {shlex.quote(str(run_directory))}"


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
