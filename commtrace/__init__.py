"""commtrace shows people who train large models where their time goes.

One line in a training script is enough::

    import commtrace.auto

or, explicitly::

    import commtrace

    commtrace.start(commtrace.Config(dir="runs/a", steps="100:110"))
    with commtrace.step(i):
        ...
    commtrace.stop()

Importing this package imports neither torch nor pyarrow.
"""

from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.session import count, span, start, step, stop

__version__ = "0.1.0"

__all__ = ["CommtraceError", "Config", "__version__", "count", "span", "start", "step", "stop"]
