"""Functions of the CUDA driver that the clock needs and ``torch.cuda`` lacks."""

from __future__ import annotations

import ctypes
from typing import Any, Final

_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_EXCHANGE_CAPTURE_MODE: Final = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


class CudaDriver:
    """Questions to the driver that create no context."""

    def has_context(self, device: int) -> bool:
        """Return whether this process uses the device.

        A mark on a device that the job does not use would create a context there: some hundred MB on GPU 0 for each
        rank of a node whose ranks never call ``torch.cuda.set_device``.
        """
        import torch

        has_primary_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return bool(has_primary_context(device))

    def spare_captures(self) -> None:
        """Let the calling thread query events while another thread captures a graph.

        By default such a query fails, and the capture with it; the watchdog of ProcessGroupNCCL does the same
        (https://github.com/pytorch/pytorch/pull/148594). A context must be current.

        Raises:
            OSError: the driver has no such function, or refuses.
        """
        exchange = _exchange_capture_mode()
        status = exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        if status != 0:
            raise OSError(f"{exchange.__name__} failed with status {status}")


def _exchange_capture_mode() -> Any:
    for library, name in _EXCHANGE_CAPTURE_MODE:
        try:
            return getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
    raise OSError(f"none of {', '.join(library for library, _ in _EXCHANGE_CAPTURE_MODE)} can be loaded")
