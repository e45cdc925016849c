"""commtrace shows people who train large models where their time goes.

One line in a training script is enough, ``import commtrace.auto``; or, explicitly::

    import commtrace

    commtrace.start(commtrace.Config(dir="runs/a", steps="100:110"))
    with commtrace.step(i):
        ...
    commtrace.stop()

and to read a recording::

    run = commtrace.open("runs/a")
    run.steps().to_pandas()

Importing this package imports neither torch nor pyarrow.
"""

import typing as _typing

from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.recording.session import count, span, start, step, stop

if _typing.TYPE_CHECKING:
    from commtrace.python.recorded_run import RecordedRun, open
else:

    def __getattr__(name):
        """Import what reads runs, and pyarrow and numpy with it, when it is first asked for."""
        if name not in ("RecordedRun", "open"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from commtrace.recording.installation import import_pyarrow

        import_pyarrow()
        from commtrace.python import recorded_run

        return getattr(recorded_run, name)


__version__ = "0.1.0"

__all__ = [
    "CommtraceError",
    "Config",
    "RecordedRun",
    "__version__",
    "count",
    "open",
    "span",
    "start",
    "step",
    "stop",
]
