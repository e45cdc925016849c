"""One trace per step: an id that all ranks find without talking to each other."""

from __future__ import annotations

import hashlib


def trace_id(run_id: str, step: int) -> int:
    """Return the 128-bit trace id of a step: the first 16 bytes of SHA-256 over ``RUN_ID/STEP``, big-endian.

    Written as 32 hexadecimal digits (``f"{trace_id(run_id, step):032x}"``) it is what OpenTelemetry calls a trace id.
    """
    return int.from_bytes(hashlib.sha256(f"{run_id}/{step}".encode()).digest()[:16], "big")
