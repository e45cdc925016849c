"""What recording costs a job, as its own steps show it (docs/own-cost.md)."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from commtrace.findings.formatting import format_time
from commtrace.trace.bounds import LARGEST, Count, Time
from commtrace.trace.json_values import JsonObject

_SMALL_SHARE: Final = 0.02
"""Of a step. A bound above it says nothing good of the recorder, only that the steps are too uneven."""


class OwnCost(Struct, frozen=True):
    """The cost of recording in a run, ns per step."""

    stretches: Count  # of steps that were not recorded, with recorded ones on both sides
    quiet_ns: Annotated[int, Meta(ge=1, le=LARGEST)]  # the mean length of a step that was not recorded
    cost_ns: Time  # how much longer a recorded one is; chance can make it negative
    error_ns: Time  # half of the 95 % interval

    @property
    def share(self) -> float:
        """Return the cost as a share of a step that was not recorded."""
        return self.cost_ns / self.quiet_ns

    @property
    def error_share(self) -> float:
        return self.error_ns / self.quiet_ns

    @property
    def is_seen(self) -> bool:
        """Return whether the cost is larger than its error."""
        return self.cost_ns > self.error_ns

    @property
    def most_share(self) -> float:
        """Return the upper end of the interval, as a share."""
        return max(self.share + self.error_share, 0.0)

    @property
    def sentence(self) -> str:
        """Return what recording costs, in one sentence."""
        by = f"by {self.stretches} stretches of steps that were not recorded"
        if self.is_seen:
            cost, error = format_time(self.cost_ns), format_time(self.error_ns)
            return f"Recording costs {_percent(self.share)} of a step: {cost} ± {error}, {by}."
        if self.most_share <= _SMALL_SHARE:
            return f"Recording costs too little to be seen: at most {_percent(self.most_share)} of a step, {by}."
        within = f"{_percent(self.share)} ± {_percent(self.error_share)}"
        return f"What recording costs is lost in the noise of the steps so far: {within} of a step, {by}."

    @property
    def short(self) -> str:
        """Return the cost and its error in a few words."""
        return short_words(self.share, self.error_share)

    def to_json(self) -> JsonObject:
        return {
            "stretches": self.stretches,
            "quiet_ns": self.quiet_ns,
            "cost_ns": self.cost_ns,
            "error_ns": self.error_ns,
            "share": self.share,
            "error_share": self.error_share,
            "sentence": self.sentence,
        }


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def short_words(share: float, error_share: float) -> str:
    """Return a cost and its error, as shares of a step, in a few words for a line of a screen."""
    return f"Recording costs {_percent(share)} ± {_percent(error_share)} of a step"
