"""Keep commtrace's own failures away from training: a part that fails is switched off, with one warning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger("commtrace")


class Guard:
    """The parts that have failed in this process."""

    def __init__(self) -> None:
        self.has_ended = False  # hooks that still run, in a signal's handler, then fail without a warning
        self._lock = threading.RLock()
        self._failed: dict[str, str] = {}
        self._messages: list[str] = []
        self._switches: dict[str, Callable[[], None]] = {}

    def on_failure(self, part: str, switch_off: Callable[[], None]) -> None:
        """Call ``switch_off`` when ``part`` fails, to take its hooks out."""
        self._switches[part] = switch_off

    def failed(self, part: str, error: BaseException) -> None:
        with self._lock:
            if part in self._failed:
                return
            message = (
                f"{part} is switched off for the rest of this run: {type(error).__name__}: {error}. Training is not "
                "affected; what this part would have recorded is missing."
            )
            self._failed[part] = message
            if not self.has_ended:
                self._messages.append(message)
        _logger.log(logging.DEBUG if self.has_ended else logging.WARNING, "commtrace: %s", message, exc_info=error)
        switch_off = self._switches.get(part)
        if switch_off is not None:
            try:
                switch_off()
            except Exception:
                _logger.warning("commtrace: %s could not be switched off", part, exc_info=True)

    def noticed(self, message: str) -> None:
        """Warn, in the log and in the files, of something that is not recorded although every part works."""
        with self._lock:
            self._messages.append(message)
        _logger.warning("commtrace: %s", message)

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def works(self, part: str) -> bool:
        return part not in self._failed

    def take_messages(self) -> list[str]:
        """Return the messages since the last call, for the trace files."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages
