"""Open the exporters that run during training, by their names in ``COMMTRACE_EXPORT``."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from commtrace.config import Config
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.live.collector import StepCollector
from commtrace.live.rank import Hang, LiveRank, Phase
from commtrace.live.summary import StepListener
from commtrace.recording.recorder import Recorder
from commtrace.trace.metadata import RankMetadata

if TYPE_CHECKING:
    from commtrace.analysis.communication.baseline import NetworkBaseline

_logger = logging.getLogger("commtrace")

OpenListener: TypeAlias = Callable[[Config, LiveRank], StepListener | None]

LISTENERS: Final[Mapping[str, str]] = {
    "mlflow": "commtrace.exporters.scalars.exporter:open_mlflow",
    "monitor": "commtrace.exporters.monitor.exporter:open_monitor",
    "otlp": "commtrace.exporters.otlp.exporter:open_otlp",
    "prometheus": "commtrace.exporters.prometheus.exporter:open_prometheus",
    "tensorboard": "commtrace.exporters.scalars.exporter:open_tensorboard",
    "wandb": "commtrace.exporters.scalars.exporter:open_wandb",
}
"""Functions that open exporters, as ``module:function``, imported when they are needed."""


def live_view(
    config: Config, end_first: Callable[[], None] = lambda: None
) -> Callable[[RankMetadata, Path, Recorder, Hang, Phase], Sequence[StepCollector]]:
    """Return a function that opens the exporters; raise :class:`ConfigurationError` if one is unknown."""
    wanted = exporter_names(config.export)

    def opened(
        metadata: RankMetadata, directory: Path, recorder: Recorder, hang: Hang, phase: Phase
    ) -> Sequence[StepCollector]:
        rank = LiveRank(metadata, directory, hang, phase, end_first, _baseline_or_none(config, metadata.local_rank))
        listeners = [listener for name in wanted if (listener := _opened(name, config, rank)) is not None]
        return (StepCollector(rank, listeners, dropped=lambda: recorder.dropped),)

    return opened


def _baseline_or_none(config: Config, local_rank: int) -> NetworkBaseline | None:
    """Return the configured baseline; None if nothing exports shares of it, or with a warning if it cannot be used."""
    exporters = exporter_names(config.export)
    is_exported = "prometheus" in exporters or ("otlp" in exporters and config.otlp.metrics)
    if not is_exported or not config.baseline.file:
        return None
    path = Path(config.baseline.file)
    try:
        from commtrace.analysis.communication.baseline import read_baseline  # here: few jobs have one

        return read_baseline(path)
    except OSError as error:
        said = f"{path} cannot be read ({error.strerror or error}): name a file that every node sees"
    except ConfigurationError as error:
        said = str(error)
    if not local_rank:  # one rank of a node says it for all
        _logger.warning("commtrace: live metrics have no share of a baseline: %s", said)
    return None


def exporter_names(export: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list; raise :class:`ConfigurationError` if one is unknown."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in export.split(",") if name.strip()))
    unknown = sorted(set(names) - set(LISTENERS))
    if unknown:
        raise ConfigurationError(f"export={export!r}: write any of {', '.join(LISTENERS)}, not {', '.join(unknown)}")
    return names


def _opened(name: str, config: Config, rank: LiveRank) -> StepListener | None:
    """Return the exporter; None if it has nothing to do on this rank, or fails to open, with a warning."""
    module, _, function = LISTENERS[name].partition(":")
    try:
        opener: OpenListener = getattr(importlib.import_module(module), function)
        return opener(config, rank)
    except CommtraceError as error:
        _logger.warning("commtrace: no export to %s: %s", name, error)
    except Exception as error:
        # From Python 3.12 on no thread starts once the process ends: the job was shorter than the first write.
        if isinstance(error, RuntimeError) and "interpreter shutdown" in str(error):
            _logger.warning("commtrace: no export to %s: the job ended before it had begun", name)
        else:
            _logger.warning("commtrace: no export to %s; training and the trace go on", name, exc_info=True)
    return None
