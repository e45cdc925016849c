"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Deadlines per example measure how busy the machine is. A test that hangs is ended by pytest-timeout.
settings.register_profile("commtrace", deadline=None)
settings.load_profile("commtrace")
