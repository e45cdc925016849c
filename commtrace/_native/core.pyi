"""The C extension; commtrace/_native/core.c has it."""

ABI: int
