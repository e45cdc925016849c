"""Start and stop commtrace in a training process, which has at most one session; nothing here raises into training."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from commtrace.config import Config
from commtrace.errors import ConfigurationError, InstallationError
from commtrace.recording import process_end
from commtrace.recording.installation import import_pyarrow

if TYPE_CHECKING:
    from commtrace.capture.instrumentation import Instrumentation, OpenObservers
    from commtrace.recording.agreement import Predecessor

_logger = logging.getLogger("commtrace")
# Re-entrant: a signal handler of the script's may stop the recording while the script starts it.
_lock = threading.RLock()
_current: Instrumentation | None = None
_starting = threading.Lock()
_is_to_stop = False
_sessions: list[Instrumentation] = []
"""Those whose callbacks the end of the process waits for."""
_exit_pid = 0
_inherited: Instrumentation | None = None
"""The recording of the process that this one was forked from; its hooks are still there, and pass everything through.
"""


def start(config: Config | None = None) -> None:
    """Start recording in this process. Idempotent: a second call warns and changes nothing.

    Failures are logged, never raised; a :class:`Config` that cannot be used raises ValueError when it is made.

    Args:
        config: options; read from COMMTRACE_* variables if None.
    """
    try:
        with _lock:
            _start(config)
    except (ConfigurationError, InstallationError) as error:
        _logger.error("commtrace is off in this process: %s", error)
    except Exception:
        _logger.exception("commtrace could not start and is off in this process; training is not affected")


def stop() -> None:
    """Stop recording, write the rest, and put every patched function back. Idempotent; never raises."""
    try:
        _stop()
    except Exception:
        _logger.exception("commtrace could not stop cleanly; its files may miss the last second")
        try:
            _stop()  # It begins where it was interrupted: no function stays replaced.
        except Exception:
            _logger.exception("commtrace could not put every function back; they pass everything through")


@contextmanager
def step(number: int | None = None) -> Iterator[None]:
    """Mark one training step, in a loop that no integration knows; ``number`` follows the previous one if None."""
    end: Callable[[], None] | None = None
    try:
        end = _begin_step(number)
    except Exception as error:
        _failed(error)
    try:
        yield
    finally:
        if end is not None:
            try:
                end()
            except Exception as error:
                _failed(error)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark a piece of work of your own, e.g. ``with commtrace.span("augment"):``.

    ``name`` becomes a label, so keep step numbers and the like out of it.
    """
    end: Callable[[], None] | None = None
    try:
        end = _begin_span(name)
    except Exception as error:
        _failed(error)
    try:
        yield
    finally:
        if end is not None:
            try:
                end()
            except Exception as error:
                _failed(error)


def count(*, tokens: float = 0, samples: float = 0, model_flops: float = 0) -> None:
    """Add this rank's work to the current step, for throughput and MFU.

    Args:
        tokens, samples: input of this rank.
        model_flops: floating-point operations of the model on this rank, recomputation not counted.
    """
    try:
        _count({"tokens": tokens, "samples": samples, "model_flops": model_flops})
    except Exception as error:
        _failed(error)


def _begin_step(number: int | None) -> Callable[[], None] | None:
    session = _current
    if session is None:
        return None
    session.tracer.begin_step(None if number is None else operator.index(number), is_users=True)
    return session.tracer.end_step


def _begin_span(name: str) -> Callable[[], None] | None:
    session = _current
    if session is None:
        return None
    from commtrace.trace import schema

    tracer = session.tracer
    # A thread of the script's beside the training must not move the place in the schedule.
    if threading.current_thread() is threading.main_thread():
        return functools.partial(tracer.leave, tracer.enter(schema.USER, name))
    opened = tracer.aside(schema.USER, name)
    return None if opened is None else functools.partial(tracer.leave_aside, opened)


def _count(counts: dict[str, float]) -> None:
    session = _current
    if session is not None:
        session.tracer.count({name: float(number) for name, number in counts.items() if number})


def _failed(error: Exception) -> None:
    session = _current
    if session is not None:
        session.tracer.failed("commtrace.step, commtrace.span and commtrace.count", error)


def _start(config: Config | None) -> None:
    if _current is not None or _starting.locked():
        _logger.warning("commtrace is already recording; call commtrace.stop() before starting it again")
        return
    chosen = Config.from_env() if config is None else config
    if chosen.enabled:
        import_pyarrow()
        _begin(chosen)


def _begin(config: Config, predecessor: Predecessor | None = None) -> None:
    global _current, _is_to_stop
    _is_to_stop = False
    with _starting:
        _current = _started(config, predecessor)
    if _is_to_stop:
        stop()


def _stop() -> None:
    global _current, _is_to_stop
    with _lock:
        # A stop during a start interrupts it on its own thread: in a signal's handler.
        _is_to_stop = _is_to_stop or _starting.locked()
        session, _current = _current, None
    if session is not None:
        try:
            session.stop()
        except BaseException:
            _current = session
            raise


def _go_on(config: Config, predecessor: Predecessor) -> None:
    """Record on in another world of this process: its ranks, and so its files, are others. Never raises."""
    stop()
    try:
        with _lock:
            if _current is None:
                _begin(config, predecessor)
    except Exception:
        _logger.exception("commtrace could not go on in another world, and is off in this process")


def _started(config: Config, predecessor: Predecessor | None = None) -> Instrumentation:
    # Imported here: `import commtrace` alone must cost nothing.
    from commtrace.capture.instrumentation import Instrumentation
    from commtrace.integrations import INTEGRATIONS, told_layout

    go_on = functools.partial(_go_on, config)
    integrations = (*INTEGRATIONS, *told_layout(config))
    session = Instrumentation(config, integrations, _open_observers(config), predecessor, go_on)
    try:
        session.start()
        _end_at_exit(session)
    except BaseException:
        session.stop()
        raise
    return session


def _end_at_exit(session: Instrumentation) -> None:
    """Wait, at exit, for the callbacks of this session and of earlier ones that still have some to come."""
    global _sessions, _exit_pid
    _sessions = [*(earlier for earlier in _sessions if earlier.awaits_callbacks), session]
    if _exit_pid != os.getpid():
        _exit_pid = os.getpid()
        atexit.register(_end, _exit_pid)
        process_end.end_with_multiprocessing(functools.partial(_end, _exit_pid))


def _open_observers(config: Config) -> OpenObservers | None:
    if not config.export:
        return None
    from commtrace.exporters.live import live_view

    return live_view(config, _end_before_others)


def _end_before_others() -> None:
    """Have :func:`_end` called at exit before the functions registered so far."""
    # The earlier registration stays: where Python is ending already, it calls only what it knew before.
    atexit.register(_end, _exit_pid)


def _end(pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.nullcontext() if _current is None else _current.telling_findings():
        try:
            is_settled = True
            for session in _sessions:
                # The time in which one did not settle was that of all others, too.
                is_settled = session.await_callbacks(is_patient=is_settled) and is_settled
        finally:
            stop()


def _after_fork_in_child() -> None:
    """Record nothing in a forked child: the thread and the files are its parent's. It starts anew as it joins a job.

    A DataLoader worker never does; a training process does, which a notebook or multiprocessing has forked.
    """
    global _current, _lock, _starting, _inherited, _sessions
    _lock, _starting = threading.RLock(), threading.Lock()
    _sessions = []  # the threads that call their callbacks are the parent's
    session, _current = _current, None
    if session is not None:
        session.abandon_after_fork()
        _inherited = session
        session.before_joining(_start_in_forked_child)


def _start_in_forked_child() -> None:
    global _inherited
    inherited, _inherited = _inherited, None
    if inherited is None or _current is not None:
        return
    try:
        inherited.take_out()
    except Exception:
        _logger.exception("commtrace is off in this process: it could not take over what its parent had installed")
        return
    start(inherited.config)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
