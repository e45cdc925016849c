"""The native part: the C extension ``core``, built with the package where there is a C compiler.

>>> core, reason = load()
>>> print(reason or f"built, ABI {core.ABI}")                     # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sysconfig
from types import ModuleType
from typing import Final

ABI: Final = 8
"""The version of the names, arguments and layouts of ``core``. It is raised here and in core.c when they change: a file
that was built from other sources is not used."""

NOT_BUILT: Final = (
    "it was not built when commtrace was installed, which takes a C compiler and the headers of Python: install a "
    "wheel, or gcc and python3-dev, and then commtrace again with pip's --force-reinstall --no-cache-dir"
)
FREE_THREADED: Final = "this Python has no GIL (free-threaded)"
OTHER_ABI: Final = "it was built for another version of commtrace: reinstall commtrace"

_NAME: Final = f"{__name__}.core"


def load() -> tuple[ModuleType | None, str]:
    """Return the extension module, or None and the reason, in plain words, why it cannot be used."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, FREE_THREADED
    try:
        core = importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        return None, NOT_BUILT if error.name == _NAME else f"it cannot be loaded: {error}"
    except Exception as error:  # whatever a file of another system or of a broken build raises
        return None, f"it cannot be loaded: {error}"
    return (core, "") if getattr(core, "ABI", None) == ABI else (None, OTHER_ABI)
