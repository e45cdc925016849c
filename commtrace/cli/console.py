"""Consoles of commands, which escape text from outside; names in a recording are escaped where they are read."""

from __future__ import annotations

from typing import IO, Any, Final

from rich.console import Console
from rich.text import Text

from commtrace.trace.inputs import printable_lines

_READABLE_WIDTH: Final = 100


class PlainConsole(Console):
    """A console that escapes control characters, so that no text moves the cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **options)


def wide_console(file: IO[str] | None = None) -> Console:
    """Return a console wide enough for every number, also for files and pagers."""
    console = PlainConsole(file=file)
    if console.width < _READABLE_WIDTH:
        console.width = _READABLE_WIDTH
    return console
