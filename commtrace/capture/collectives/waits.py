"""What stands in for ``Work.wait``: the stall, and the end of a communication that ends with its wait.

The functions are closures over local names, and flat: they are the hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commtrace.capture.collectives.call_arguments import from_anybody
from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.records import (
    COLLECTIVE_AND_STALL,
    NUMBER,
    P2P_AND_STALL,
    WAITED,
    DeviceCall,
    Launch,
    completed_rows,
    kind_of,
    next_id,
    stall_rows,
    waited_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema


def tell_failure(tracer: Tracer, blocked: Any, raised: Exception, part: str) -> None:
    """Of the ranks that fail together, those whose communication failed were cut off by another one."""
    try:
        launch = blocked.launch if isinstance(blocked, DeviceCall) else blocked
        if launch is not None:
            tracer.communication_failed(launch, raised)
    except Exception as error:
        tracer.failed(part, error)


def waiting(original: Any, tracer: Tracer, pending: dict[int, tuple[Launch, Any]], part: str) -> Callable[..., Any]:
    """``wait`` of a Work, on a machine without an accelerator.

    Args:
        original: as it was.
        tracer: where entries go.
        pending: by id of their Work, communications that nobody has waited for.
        part: what is switched off if this fails.
    """
    blocked = tracer.blocked
    buffer, capacity, drop = tracer.recorder.buffer, tracer.recorder.capacity, tracer.recorder.drop

    def wait(work: Any, /, *arguments: Any, **keywords: Any) -> Any:
        start = 0
        try:
            key = id(work)
            ours = pending.get(key)
            if ours is not None:
                blocked[0] = ours[0]
                start = now_ns()
        except Exception as error:
            tracer.failed(part, error)
        if not start:
            return original(work, *arguments, **keywords)
        try:
            result = original(work, *arguments, **keywords)
        except Exception as raised:
            tell_failure(tracer, blocked[0], raised, part)
            raise
        finally:
            try:
                blocked[0] = None
            except Exception as error:
                tracer.failed(part, error)
        try:
            end = now_ns()
            waited_for = pending.pop(key, None)
            if waited_for is None:  # Another thread has waited for it too, and told.
                return result
            launch, completion = waited_for
            entry: tuple[Any, ...]
            tracer.last_mark = end
            if launch.seq < 0 and launch.operation.is_p2p:
                launch = from_anybody(launch, work)
            if completion is None:
                kinds = P2P_AND_STALL if launch.operation.is_p2p else COLLECTIVE_AND_STALL
                entry = (waited_rows, kinds, launch, tracer.coordinates, start, end)
            else:
                completion[WAITED] = end
                entry = (stall_rows, schema.STALL, launch, completion[NUMBER], tracer.coordinates, start, end)
            if len(buffer) < capacity:
                buffer.append(entry)
            else:
                drop(entry)
        except Exception as error:
            tracer.failed(part, error)
        return result

    return wait


def waiting_beside(
    original: Any, tracer: Tracer, pending: dict[int, tuple[Launch, Any]], part: str, devices: DeviceCalls
) -> Callable[..., Any]:
    """``wait`` where there is an accelerator: while its stream is busy, it misses nothing when the host waits."""
    blocked = tracer.blocked

    def wait(work: Any, /, *arguments: Any, **keywords: Any) -> Any:
        calls: tuple[DeviceCall, ...] | None = None
        stall_start: Mark | None = None
        try:
            ours = pending.get(id(work))
            if ours is not None:
                blocked[0], stall_start = ours[0], devices.mark()
            else:
                calls, stall_start = devices.about_to_wait(work)
                if calls is not None:
                    blocked[0] = calls[0]
        except Exception as error:
            tracer.failed(part, error)
        if stall_start is None:
            return original(work, *arguments, **keywords)
        try:
            result = original(work, *arguments, **keywords)
        except Exception as raised:
            tell_failure(tracer, blocked[0], raised, part)
            raise
        finally:
            try:
                blocked[0] = None
            except Exception as error:
                tracer.failed(part, error)
        try:
            if calls is not None:
                devices.waited_by_its_work(work, calls, stall_start)
                return result
            end, stall_end = now_ns(), devices.mark()
            waited_for = pending.pop(id(work), None)
            if waited_for is None or stall_end is None:
                return result
            launch, completion = waited_for
            if launch.seq < 0 and launch.operation.is_p2p:
                launch = from_anybody(launch, work)
            if completion is None:
                number = next_id()
                tracer.append((completed_rows, kind_of(launch), launch, number, end, ()))
            else:
                number, completion[WAITED] = completion[NUMBER], end
            devices.host_stalled(launch, number, stall_start, stall_end)
        except Exception as error:
            tracer.failed(part, error)
        return result

    return wait
