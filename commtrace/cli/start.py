"""Entry point of the ``commtrace`` command: a summary whose words leave nothing to explain is begun at once.

Typer, and what it checks arguments with, take a tenth of a second to import. That is a twentieth of the summary of two
million spans, and most of that of a short run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.cli.failures import USER_ERROR, in_words
from commtrace.cli.interpreter import leave_everything_at_the_end
from commtrace.cli.preparation import prepare_for_analysis
from commtrace.errors import CommtraceError
from commtrace.installation import import_pyarrow

_INTERRUPTED: Final = 130
_JSON: Final = "--json"
_ALL_RANKS: Final = "--all-ranks"


def main() -> None:
    """What the ``commtrace`` command does."""
    leave_everything_at_the_end()
    plain = _plain_summary(sys.argv[1:])
    if plain is None:
        from commtrace.cli import main as every_command

        every_command.main()
        return
    try:
        _tell(plain)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CommtraceError, OSError) as error:
        sys.stderr.write(f"commtrace: {in_words(error)}\n")
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


class _PlainSummary(NamedTuple):
    """A run, if one is named, and which flags."""

    run: Path | None
    flags: frozenset[str]


def _plain_summary(words: Sequence[str]) -> _PlainSummary | None:
    """What is to be summarised; None for all that typer has to explain, to check or to complete."""
    if words[:1] != ["summary"] or "_COMMTRACE_COMPLETE" in os.environ:
        return None
    flags = frozenset(word for word in words[1:] if word in (_JSON, _ALL_RANKS))
    runs = [word for word in words[1:] if word not in flags]
    if len(runs) > 1 or any(not run or run.startswith("-") for run in runs):
        return None
    return _PlainSummary(Path(runs[0]) if runs else None, flags)


def _tell(plain: _PlainSummary) -> None:
    with ExitStack() as until_told:
        prepare_for_analysis(until_told.callback)
        import_pyarrow()
        from commtrace.cli.summary_told import tell_summary
        from commtrace.trace.locate import NEWEST_RUN

        run = NEWEST_RUN if plain.run is None else plain.run
        tell_summary(run, None, None, json_output=_JSON in plain.flags, all_ranks=_ALL_RANKS in plain.flags)
