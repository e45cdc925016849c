"""All limits of the search for stragglers. docs/stragglers.md gives the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits from which the work of a rank stands out of that of its peers."""

    share: float  # of its own normal work (recorded runs) or of the step (windows)
    least_ns: float  # per step
    sigmas: float  # standard errors
    clearly: float = 0.05  # share from which the fastest ranks are normal although they are no majority


RECORDED: Final = Limits(share=0.03, least_ns=500_000.0, sigmas=2.5)
"""Limits of typical work over the steps of a recording; the cost in the replay must be enough as well."""

LIVE: Final = Limits(share=0.05, least_ns=1_000_000.0, sigmas=5.0, clearly=0.1)
"""Limits of means over a window of seconds. A day has 20,000 of them: chance may name no rank in any of them. Ranks
that share the cores of a busy host may differ by 5 % for seconds, half against half."""

LIVE_LASTING: Final = Limits(share=0.03, least_ns=1_000_000.0, sigmas=5.0)
"""Limits of means over several windows in a row: their error is smaller, and a busy host is busy for seconds."""

OF_PAUSES: Final = Limits(share=0.02, least_ns=500_000.0, sigmas=2.5, clearly=0.02)
"""Limits of the time lost to pauses, as a share of the step: in a recorded run, and in the last minute."""

CHANCE: Final = 1e-3
"""Pauses that may hit any rank are named if chance gives so many to one of them less often than this. Of a few, which
are counts, a standard error says too little."""

CHANCE_OF_FEW: Final = 5e-3
"""What strikes in some steps is named if chance does so to any rank, host or link less often than this. It is dated, so
that a reader sees in how many steps, and costs a good part of them (LONG_STEP)."""

LONG_STEP: Final = 0.1
LOST_STEPS: Final = 0.5
LOST_TIME: Final = 0.005
"""What strikes in some steps must cost LONG_STEP of a typical step in each of them, and in all of them together
LOST_STEPS of one, and LOST_TIME of the time of all steps."""

SUMS: Final = Limits(share=0.1, least_ns=1_000_000.0, sigmas=5.0, clearly=0.1)
"""Limits of sums over steps that do not show the scatter between them (metrics), as a share of the step."""

LINKS: Final = Limits(share=1.0, least_ns=0.0, sigmas=2.5, clearly=1.0)
"""Limits of transfers: a slow link takes twice as long as similar ones, and stands out of the scatter of transfers."""

FEWEST_TRANSFERS: Final = 8
"""Transfers of a kind over a link; of fewer, the typical duration is not known."""

LONG_TOGETHER: Final = 0.7
"""Forward and backward of a microbatch lengthen together when its sequences do.

Of Megatron's example on a machine with more processes than cores, where single microbatches take ten times as long, the
ranks of both have a correlation of 0.1 to 0.3, and of 0.8 to 0.95 with sequences of different length.
"""

FAR_LONGER: Final = 0.5
"""A microbatch is far longer than usual by this share of it."""

FEWEST_LONG: Final = 8
SCATTER_OF_MICROBATCHES: Final = 0.1
FEWEST_MICROBATCHES: Final = 16
"""Sequences are uneven if so many microbatches are far longer, or if so many differ by this scatter."""

MOST_OF_PHASE: Final = 0.9
ONE_PHASE: Final = 0.7
"""Only one phase is slow if it has so much of the excess, and no more than so much of the work."""

SLOWER_THAN_OTHERS: Final = 3
"""Or, whatever its share of the work, if it is FAR_LONGER and by so many times more than the other phases."""

LONG_MICROBATCH: Final = 0.2
"""A microbatch is long whose forward and backward both take longer than is normal by this share."""

FEW_MICROBATCHES: Final = 0.5
"""A rank is slow in a few microbatches, which are long, if these are at most this share of all."""

MOST_OF_EXCESS: Final = 0.8
"""A rank is slow in a few microbatches only if these have this share of its excess as well; its host is late only if
launch-bound time has it."""

LAUNCH_BOUND: Final = 0.2
LAUNCH_BOUND_GAPS: Final = 0.05
LATER_THAN_OTHERS: Final = 2
LATE_IN_STEPS: Final = 0.8
"""A host is late if its device waits for it in so much of the work, and so many times what its peers do, in so many of
the steps. Less may be the time that single marks take. Of a job, gaps before phases count from a share of the step on,
as most programs do something between two steps."""

FAST_PERCENTILE: Final = 25
"""Shares refer to this percentile of the links of a class, as most may be slow; or of a link in its fast steps."""

MOST_OF_STEP: Final = 0.5
"""Share of a step from which transfers between hosts are mentioned if it is not known whether they are slow."""

FEWEST_FOR_SCATTER: Final = 4
"""Of fewer normal ranks, the scatter between healthy ranks is not known; then only their noise over time counts."""

SIGMAS_OF_CHANGE: Final = 6.0
"""A run is cut where a rank's work changes by so many standard errors. It is the largest of as many differences as
there are ranks times steps: 5 is what a million of them reach by chance."""

LAST_OF_TWO: Final = 0.5
"""The last stage holds the output layer and the loss. Of two stages none is left to show how much these take: only from
this excess on the last one is called uneven, unless its past or another run shows it."""

SMOOTHED_STEPS: Final = 5
"""Steps that count as their median when a run is cut: one or two that the machine held up are no change."""

NOISIEST: Final = 1.5
"""No rank counts as noisier than the typical one by more: of few steps, the noise of a single rank is badly known."""

MOST_CHANGES: Final = 32
SPARE_STEPS: Final = 0.25
"""Share of the steps that may lie at the ends of a run, before the first and after the last slow rank."""

DEPENDENCE: Final = 1.5
"""Factor of errors, as steps are not independent: a disturbance of one often disturbs the next."""

FEWEST_FOR_DRIFT: Final = 24
"""Of fewer steps, slow drift of healthy devices is not known."""

DRIFT_OF_FEW: Final = 1.5
"""Factor of drift among fewer ranks than FEWEST_FOR_SCATTER, which show little of it."""

MOST_DRIFT: Final = 0.05
"""Largest slow drift of a healthy device, as a share of its work. More has a reason, such as another process on its
core, and must not hide a slow rank beside it."""

STRUCK: Final = 5.0
"""A rank works far longer than usual in a step if it does by so many standard deviations of its other steps."""

ALIKE: Final = 0.25
"""Stretches that follow each other are one where what a rank works too long, or costs, differs by no more of it."""

SHARE_OF_HOST: Final = 0.75
"""A host is named instead of its ranks when this share of them is slow."""

WINDOWS_TO_NAME: Final = 2
WINDOWS_OF_LASTING: Final = 4
WINDOWS_TO_CLEAR: Final = 1
CLEARED_BELOW: Final = 0.5
"""A named rank is cleared when its excess is below this share of what names: one at the limit must not flicker."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits from which a cost is named; all of them must be passed."""

    share_of_step: float = 0.02
    cost_ms: float = 0.5  # per step
    persistence: float = 0.6  # share of the steps in which a rank's excess is at least half as large as usual
    majority: float = 0.5  # share of the steps in which it costs at least half as much
    rare_persistence: float = 0.05  # the same for pauses, such as input and garbage collection
    fewest_strikes: int = 3  # steps with a pause, if the noise is known
    standard_errors: float = 1.5  # of the cost's median over steps
    replay_error: float = 0.3  # no verdict is given if the replay misses the measured steps by more
    fewest_steps: int = 8  # of fewer, the noise between steps is not known, and nobody is named
