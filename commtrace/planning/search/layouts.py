"""The search: layouts in the order of a time that they cannot be below, until no other can be among the fastest."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.search.candidates import candidates
from commtrace.planning.search.prediction import PredictedLayout, Predictor
from commtrace.planning.search.reliability import ORDER_HELD, can_be_ranked, kinds_of_change
from commtrace.trace.json_values import JsonObject


@dataclass(frozen=True, slots=True)
class FoundLayouts:
    """The layouts that fit: those that can be ranked, and candidates to measure.

    A layout is ranked if in real runs the order of layouts with its kinds of change was as predicted often enough. Of
    two layouts one beats the other if it is faster by more than its ±; a tie is what no other layout beats. Of ties the
    simplest is chosen: the recorded layout, else that with the fewest assumptions, then chunks, then sizes above 1,
    then with as many layers on all stages, then without recomputation.
    """

    best: tuple[PredictedLayout, ...]  # of those that can be ranked, the fastest first
    chosen: PredictedLayout | None  # the simplest of those that are a tie with the fastest of them
    ties: tuple[PredictedLayout, ...]  # all of these, itself included; the fastest first
    candidates: tuple[PredictedLayout, ...]  # the others, as far as they may be faster; in the order of their sizes
    recorded: PredictedLayout | None  # the run's own layout, fitting or not; None for other GPUs or another batch
    layouts: int  # that were looked at
    fitting: int  # of these, layouts that fit
    ranked: int  # of these, layouts that can be ranked
    changes: Mapping[Layout, tuple[str, ...]]  # the kinds of change of all that are named here
    not_known: tuple[str, ...]  # why others could not be predicted, in sentences

    @property
    def too_large(self) -> int:
        return self.layouts - self.fitting

    @property
    def keeps_recorded(self) -> bool:
        """Whether nothing that can be ranked is faster than the recorded layout by more than the error."""
        return self.chosen is not None and self.recorded is not None and self.chosen.layout == self.recorded.layout

    @property
    def gain(self) -> float | None:
        """The share of the recorded layout's step that the chosen one saves."""
        if self.chosen is None or self.recorded is None:
            return None
        return 1 - self.chosen.time.step_ns / self.recorded.time.step_ns

    def to_json(self) -> JsonObject:
        return {
            "best": [self._json_of(each) for each in self.best],
            "chosen": None if self.chosen is None else self._json_of(self.chosen),
            "ties": len(self.ties),
            "candidates": [self._json_of(each) for each in self.candidates],
            "recorded_layout": None if self.recorded is None else self._json_of(self.recorded),
            "gain": self.gain,
            "layouts": self.layouts,
            "fitting": self.fitting,
            "ranked": self.ranked,
            "too_large": self.too_large,
            "order_held": [{"change": kind, **held._asdict()} for kind, held in ORDER_HELD.items()],
            "not_known": list(self.not_known),
        }

    def _json_of(self, prediction: PredictedLayout) -> JsonObject:
        return {**prediction.to_json(), "changes": list(self.changes[prediction.layout])}


def search_layouts(
    predictor: Predictor,
    gpus: int,
    memory_bytes: int,
    global_batch: int,
    top: int,
    cp: Sequence[int] = (),
    ep: Sequence[int] = (),
) -> FoundLayouts:
    """Return the ``top`` fastest layouts of ``gpus`` whose ranks need at most ``memory_bytes``.

    Args:
        cp: Context parallel sizes to try. Empty: that of the run.
        ep: Expert parallel sizes, likewise.

    Raises:
        ConfigurationError: no layout divides the model and the batch, or none could be predicted.
    """
    like = predictor.costs.layout
    tried = list(candidates(predictor.costs.model, like, gpus, global_batch, cp, ep))
    if not tried:
        raise ConfigurationError(
            f"no layout divides {predictor.costs.model.layers} layers and a global batch of {global_batch} between "
            f"{gpus} GPUs{_at(cp, ep)}: change --gpus or --global-batch"
        )
    fitting = [layout for layout in tried if predictor.fits(layout, memory_bytes)]
    bounds: list[tuple[int, int, Layout]] = []
    changes: dict[Layout, tuple[str, ...]] = {}
    not_known: dict[str, None] = {}
    for number, layout in enumerate(fitting):
        changes[layout] = kinds_of_change(predictor.assumptions(layout), layout, like)
        try:
            bounds.append((predictor.shortest_ns(layout), number, layout))
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
    if fitting and not bounds:
        raise ConfigurationError(f"no layout of {gpus} GPUs can be predicted: {next(iter(not_known))}")
    ranked, others = _Fastest(predictor, top), _Fastest(predictor, top)
    for bound_ns, _, layout in sorted(bounds):
        fastest = ranked if can_be_ranked(changes[layout]) else others
        try:
            fastest.try_layout(layout, bound_ns)
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
    ties = ranked.ties
    recorded = _recorded(predictor, gpus, global_batch)
    if recorded is not None:
        changes[recorded.layout] = kinds_of_change(recorded.assumptions, recorded.layout, like)
    return FoundLayouts(
        best=tuple(ranked.predictions[:top]),
        chosen=_simplest(ties, like),
        ties=tuple(ties),
        candidates=tuple(sorted(others.predictions[:top], key=_order_of_sizes)),
        recorded=recorded,
        layouts=len(tried),
        fitting=len(fitting),
        ranked=sum(can_be_ranked(changes[layout]) for layout in fitting),
        changes=changes,
        not_known=tuple(not_known),
    )


@dataclass(slots=True)
class _Fastest:
    """The fastest of the layouts that were tried, and those that are a tie with the fastest."""

    predictor: Predictor
    top: int
    predictions: list[PredictedLayout] = field(default_factory=list)  # the fastest first

    def try_layout(self, layout: Layout, bound_ns: int) -> None:
        """Predict a layout, unless it cannot be below ``bound_ns`` and that is too slow to be of interest."""
        if len(self.predictions) >= self.top:
            limit_ns = max(self._tie_ns, _step_ns(self.predictions[self.top - 1]))
            if bound_ns + max(self.predictor.rest_ns, 0) > limit_ns:
                return
        insort(self.predictions, self.predictor.predict(layout), key=_step_ns)

    @property
    def _tie_ns(self) -> float:
        """Return the longest step that is a tie: what one of the predicted layouts takes at most."""
        return min((_step_ns(each) + each.uncertainty_ns for each in self.predictions), default=0.0)

    @property
    def ties(self) -> list[PredictedLayout]:
        longest_ns = self._tie_ns
        return [each for each in self.predictions if _step_ns(each) <= longest_ns]


def _step_ns(prediction: PredictedLayout) -> int:
    return prediction.time.step_ns


def _order_of_sizes(prediction: PredictedLayout) -> tuple[int, ...]:
    layout = prediction.layout
    names = ("tp", "pp", "dp", "cp", "ep", "chunks", "first_stage_layers", "last_stage_layers", "microbatch")
    return tuple(getattr(layout, name) for name in names)


def _simplest(ties: Sequence[PredictedLayout], recorded: Layout) -> PredictedLayout | None:
    def effort(predicted: PredictedLayout) -> tuple[int, ...]:
        layout = predicted.layout
        sizes = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep)
        return (
            layout != recorded,
            len(predicted.assumed),
            layout.chunks,
            sum(size > 1 for size in sizes),
            bool(layout.first_stage_layers or layout.last_stage_layers),
            layout.recompute != "none",
            _step_ns(predicted),
        )

    return min(ties, key=effort, default=None)


def _recorded(predictor: Predictor, gpus: int, global_batch: int) -> PredictedLayout | None:
    layout = predictor.costs.layout
    if (layout.world_size, layout.microbatch * layout.microbatches * layout.dp) != (gpus, global_batch):
        return None
    try:
        return predictor.predict(layout)
    except ConfigurationError:  # nodes of another size, whose bandwidth was not measured
        return None


def _sizes(layout: Layout) -> str:
    changed = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(layout, name) > 1]
    return " · ".join(changed) or f"dp {layout.dp}"


def _at(cp: Sequence[int], ep: Sequence[int]) -> str:
    given = [f"{name} {' or '.join(map(str, sizes))}" for name, sizes in (("cp", cp), ("ep", ep)) if sizes]
    return f" with {' and '.join(given)}" if given else ""
