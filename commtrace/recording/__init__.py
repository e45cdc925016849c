"""Record a training process: who it is, the options, the buffer and its thread, and the start and end of it all.

What is hooked, and how it is timed, is in :mod:`commtrace.capture` and :mod:`commtrace.integrations`.
"""
