"""Start recording on ``import commtrace.auto``, before or after torch, as COMMTRACE_* variables say."""

from commtrace.session import start

start()
