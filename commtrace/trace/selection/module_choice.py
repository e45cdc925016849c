"""Choose the modules to record: ``depth=2`` or patterns of names.

>>> ModuleChoice.parse("depth=1").takes("layers.3", 1)
True
>>> ModuleChoice.parse("layers.*, *.self_attention").takes("decoder.layers.3", 2)
True
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commtrace.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A choice of modules, by depth or by pattern."""

    depth: int = -1  # most modules around a chosen one; −1 with a pattern
    pattern: re.Pattern[str] | None = None  # of qualified names

    @classmethod
    def parse(cls, text: str) -> ModuleChoice:
        """Parse ``depth=N``, patterns separated by commas, or ``re:REGULAR EXPRESSION``.

        A pattern matches the end of a qualified name: ``*`` anything within a part, ``**`` any number of parts.

        Raises:
            ConfigurationError: it is none of these.
        """
        text = text.strip()
        if text.startswith("depth="):
            number = text.removeprefix("depth=").strip()
            if not number.isdecimal():
                raise ConfigurationError(f"modules {text!r}: write depth=N with a whole number, e.g. depth=2")
            return cls(depth=int(number))
        try:
            if text.startswith("re:"):
                return cls(pattern=re.compile(text.removeprefix("re:")))
            return cls(pattern=re.compile("|".join(_expression(part) for part in text.split(","))))
        except re.error as error:
            raise ConfigurationError(f"modules {text!r} is no regular expression: {error}") from None

    def takes(self, name: str, depth: int) -> bool:
        """Return whether a module of this qualified name, called inside ``depth`` other modules, is chosen."""
        return depth <= self.depth if self.pattern is None else self.pattern.fullmatch(name) is not None


def _expression(pattern: str) -> str:
    parts = pattern.strip().split(".")
    if not all(parts):
        raise ConfigurationError(
            f"modules {pattern!r}: write depth=2, or names of modules with * for what varies, e.g. "
            "layers.*,*.self_attention"
        )
    return r"(?:.*\.)?" + r"\.".join(_part(part) for part in parts)


def _part(part: str) -> str:
    return ".+" if part == "**" else re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
