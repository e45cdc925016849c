"""When something began in a running job."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from commtrace.findings.finding import Finding


class Since(NamedTuple):
    """The step in which something began."""

    step: int  # −1 if not known
    time: float  # begin of that step, epoch seconds
    within: int = 0  # by so many steps it may be off
    is_first: bool = False  # no step before it was compared

    def of(self, finding: Finding) -> Finding:
        """Return a finding that began then."""
        return replace(
            finding,
            since_step=max(self.step, -1),
            since_ns=round(self.time * 1e9),
            since_within_steps=self.within,
            since_first_compared=self.is_first,
        )
