"""The search: layouts in the order of a time that they cannot be below, until no other can be among the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.search.candidates import candidates
from commtrace.search.prediction import Prediction, Predictor
from commtrace.trace.json_values import JsonObject, to_json


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest layouts that fit."""

    best: tuple[Prediction, ...]  # the fastest first
    measured: Prediction | None  # the fastest of those whose work was measured as it is
    layouts: int  # that were looked at
    too_large: int  # of these, left out for their memory before the search ended
    not_known: tuple[str, ...]  # why others could not be predicted, in sentences

    @property
    def margin(self) -> float | None:
        """How much slower than predicted the fastest may be until the fastest measured one is as fast."""
        return self.measured.time.step_ns / self.best[0].time.step_ns - 1 if self.measured and self.best else None

    def to_json(self) -> JsonObject:
        return {
            "best": to_json(self.best),
            "best_measured": to_json(self.measured),
            "margin": self.margin,
            "layouts": self.layouts,
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
    bounds: list[tuple[int, int, Layout]] = []
    not_known: dict[str, None] = {}
    layouts = 0
    for layout in candidates(predictor.costs.model, like, gpus, global_batch, cp, ep):
        layouts += 1
        try:
            bounds.append((predictor.shortest_ns(layout), layouts, layout))
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
    if not layouts:
        raise ConfigurationError(
            f"no layout divides {predictor.costs.model.layers} layers and a global batch of {global_batch} between "
            f"{gpus} GPUs{_at(cp, ep)}: change --gpus or --global-batch"
        )
    if not bounds:
        raise ConfigurationError(f"no layout of {gpus} GPUs can be predicted: {next(iter(not_known))}")
    bounds.sort()
    rest_ns = predictor.rest_ns
    best: list[Prediction] = []
    measured: Prediction | None = None
    too_large = 0
    for bound_ns, _, layout in bounds:
        is_measured = not predictor.assumed(layout)
        could_be_best = len(best) < top or bound_ns + rest_ns < best[-1].time.step_ns
        could_be_measured = is_measured and (measured is None or bound_ns + rest_ns < measured.time.step_ns)
        if not (could_be_best or could_be_measured):
            continue
        if not predictor.fits(layout, memory_bytes):
            too_large += 1
            continue
        try:
            prediction = predictor.predict(layout)
        except ConfigurationError as error:
            not_known[f"{_sizes(layout)}: {error}"] = None
            continue
        if is_measured and (measured is None or prediction.time.step_ns < measured.time.step_ns):
            measured = prediction
        best = sorted([*best, prediction], key=lambda one: one.time.step_ns)[:top]
    return Found(tuple(best), measured, layouts, too_large, tuple(not_known))


def _sizes(layout: Layout) -> str:
    changed = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(layout, name) > 1]
    return " · ".join(changed) or f"dp {layout.dp}"


def _at(cp: Sequence[int], ep: Sequence[int]) -> str:
    given = [f"{name} {' or '.join(map(str, sizes))}" for name, sizes in (("cp", cp), ("ep", ep)) if sizes]
    return f" with {' and '.join(given)}" if given else ""
