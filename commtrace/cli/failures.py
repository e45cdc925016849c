"""Messages of the ``commtrace`` command for errors that its user can fix."""

from __future__ import annotations

import os
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.trace.inputs import printable, printable_lines

USER_ERROR: Final = 2
"""The exit status."""


def in_words(error: CommtraceError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return printable_lines(str(error))
