"""Start recording on ``import commtrace.auto``, before or after torch, as COMMTRACE_* variables say."""

from commtrace.recording.session import start

start()
