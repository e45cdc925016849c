"""The process beside a rank that makes, encodes and sends its spans, so that training keeps its interpreter.

It is started by :mod:`commtrace.exporters.otlp.process`, does one request after the other, and ends when the rank does,
however that ends. It never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Final

from commtrace.exporters.otlp import messages
from commtrace.exporters.otlp.sending import Sender
from commtrace.live.rank import LiveRank

_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SECONDS_OF_GRACE: Final = 2.0
_NICENESS: Final = 5


def main(incoming: int, outgoing: int, parent: int) -> None:
    """Serve the rank.

    Args:
        incoming, outgoing: descriptors of the pipes.
        parent: the rank's process.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = messages.Pipe(incoming, outgoing)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the rank has ended, or does not want to wait any longer
        serve(pipe)
    # Not sys.exit: there is nothing left to do in order, and a thread of an exporter might hold it up.
    sys.stderr.flush()
    os._exit(0)


def serve(pipe: messages.Pipe) -> None:
    """Answer requests until there are none.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    introduction: messages.Introduction = pipe.receive()
    rank = LiveRank(introduction.metadata, introduction.directory)
    with Sender(introduction.config, rank) as sender:
        pipe.send(())
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)  # what prepares the next batch for training goes first
        while True:
            message: messages.Message = pipe.receive()
            if isinstance(message, messages.Known):
                rank.marks.groups = dict(message.groups)
                rank.marks.topology = message.topology
                sender.told = message.told
                continue
            pipe.send(_sent(sender, message))


def _sent(sender: Sender, message: messages.Message) -> messages.Settled:
    settled: list[tuple[int, bool | None]] = []

    def settle(count: int, was_sent: bool | None) -> None:
        settled.append((count, was_sent))

    if isinstance(message, messages.Spans):
        sender.send(message.jobs, settle)
    elif isinstance(message, messages.Metrics):
        sender.send_metrics(message, settle)
    return tuple(settled)


def _end_with(parent: int) -> None:
    """A request to a receiver that does not answer must not outlive the rank, and forked children of the rank may hold
    the pipe open."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    time.sleep(_SECONDS_OF_GRACE)
    os._exit(0)
