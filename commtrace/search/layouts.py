"""The search: layouts in the order of a time that they cannot be below, until no other can be among the fastest."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.search.candidates import candidates
from commtrace.search.prediction import Prediction, Predictor
from commtrace.trace.json_values import JsonObject, to_json


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest layouts that fit.

    Two layouts are a tie if their steps differ by no more than the predictor's uncertainty. Of ties the simplest is
    chosen: the recorded layout, else that with the fewest assumptions, then chunks, then sizes above 1, then with as
    many layers on all stages, then without recomputation.
    """

    best: tuple[Prediction, ...]  # the fastest first
    measured: Prediction | None  # the fastest of those whose work was measured as it is
    chosen: Prediction | None  # the simplest of those that are a tie with it, and assume nothing either
    ties: tuple[Prediction, ...]  # all of these, itself included; the fastest first
    assuming: Prediction | None  # the simplest of those that are a tie with the fastest that assumes something
    assuming_ties: tuple[Prediction, ...]  # all of these, likewise
    recorded: Prediction | None  # the run's own layout, fitting or not; None for other GPUs or another batch
    layouts: int  # that were looked at
    fitting: int  # of these, layouts that fit
    not_known: tuple[str, ...]  # why others could not be predicted, in sentences

    @property
    def too_large(self) -> int:
        return self.layouts - self.fitting

    @property
    def margin(self) -> float | None:
        """How much slower than predicted the fastest may be until the fastest measured one is as fast."""
        return self.measured.time.step_ns / self.best[0].time.step_ns - 1 if self.measured and self.best else None

    @property
    def keeps_recorded(self) -> bool:
        """Whether nothing that was measured as it is is faster than the recorded layout by more than the error."""
        return self.chosen is not None and self.recorded is not None and self.chosen.layout == self.recorded.layout

    @property
    def gain(self) -> float | None:
        """The share of the recorded layout's step that the chosen one saves."""
        if self.chosen is None or self.recorded is None:
            return None
        return 1 - self.chosen.time.step_ns / self.recorded.time.step_ns

    def to_json(self) -> JsonObject:
        return {
            "best": to_json(self.best),
            "best_measured": to_json(self.measured),
            "margin": self.margin,
            "chosen": to_json(self.chosen),
            "ties": len(self.ties),
            "assuming": to_json(self.assuming),
            "recorded_layout": to_json(self.recorded),
            "gain": self.gain,
            "layouts": self.layouts,
            "fitting": self.fitting,
            "too_large": self.too_large,
            "not_known": list(self.not_known),
        }


def search_layouts(
    predictor: Predictor,
    gpus: int,
    memory_bytes: int,
    global_batch: int,
    top: int,
    cp: Sequence[int] = (),
    ep: Sequence[int] = (),
) -> Found:
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
    not_known: dict[str, None] = {}
    for number, layout in enumerate(fitting):
        try:
            bounds.append((predictor.shortest_ns(layout), number, layout))
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
    if fitting and not bounds:
        raise ConfigurationError(f"no layout of {gpus} GPUs can be predicted: {next(iter(not_known))}")
    predictions: list[Prediction] = []  # the fastest first
    fastest: dict[bool, Prediction] = {}  # by whether it was measured
    for bound_ns, _, layout in sorted(bounds):
        is_measured = not predictor.assumed(layout)
        limits_ns = [_tie_ns(predictor, fastest[is_measured])] if is_measured in fastest else []
        if limits_ns and len(predictions) >= top:
            limits_ns.append(predictions[top - 1].time.step_ns)
            if bound_ns + max(predictor.rest_ns, 0) > max(limits_ns):
                continue
        try:
            prediction = predictor.predict(layout)
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
            continue
        insort(predictions, prediction, key=_step_ns)
        if is_measured not in fastest or _step_ns(prediction) < _step_ns(fastest[is_measured]):
            fastest[is_measured] = prediction
    measured, assuming = (
        [one for one in predictions if bool(one.assumed) != is_measured and _is_tie(predictor, one, fastest)]
        for is_measured in (True, False)
    )
    return Found(
        best=tuple(predictions[:top]),
        measured=fastest.get(True),
        chosen=_simplest(measured, like),
        ties=tuple(measured),
        assuming=_simplest(assuming, like),
        assuming_ties=tuple(assuming),
        recorded=_recorded(predictor, gpus, global_batch),
        layouts=len(tried),
        fitting=len(fitting),
        not_known=tuple(not_known),
    )


def _step_ns(prediction: Prediction) -> int:
    return prediction.time.step_ns


def _tie_ns(predictor: Predictor, fastest: Prediction) -> float:
    """Return the longest step that is a tie with the fastest."""
    return _step_ns(fastest) * (1 + predictor.uncertainty)


def _is_tie(predictor: Predictor, one: Prediction, fastest: Mapping[bool, Prediction]) -> bool:
    return _step_ns(one) <= _tie_ns(predictor, fastest[not one.assumed])


def _simplest(ties: Sequence[Prediction], recorded: Layout) -> Prediction | None:
    def effort(one: Prediction) -> tuple[int, ...]:
        layout = one.layout
        sizes = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep)
        return (
            layout != recorded,
            len(one.assumed),
            layout.chunks,
            sum(size > 1 for size in sizes),
            bool(layout.first_stage_layers or layout.last_stage_layers),
            layout.recompute != "none",
            _step_ns(one),
        )

    return min(ties, key=effort, default=None)


def _recorded(predictor: Predictor, gpus: int, global_batch: int) -> Prediction | None:
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
