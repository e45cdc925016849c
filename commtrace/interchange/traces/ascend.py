"""Recognise events of Ascend devices in the traces of torch_npu, ``trace_view.json``.

They have no categories; their processes and threads are named. "Ascend Hardware" holds the tasks of a device,
"Communication" (older versions: "HCCL") an operation of HCCL on the thread of its group, and its parts on further
threads. Written by https://github.com/Ascend/msprof, analysis/csrc/application/timeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from commtrace.interchange.traces.trace_events import ConfiguredGroup, Distributed, TraceEvent
from commtrace.trace.inputs import decode_json, printable, read_file

BACKEND: Final = "hccl"
OUTPUT_FOLDER: Final = "ASCEND_PROFILER_OUTPUT"

_HARDWARE: Final = "Ascend Hardware"
_COMMUNICATION: Final = frozenset({"Communication", "HCCL"})
_MOST_NAMES: Final = 100_000
"""Processes and threads; a trace has some dozens."""

_GROUP_THREAD: Final = re.compile(r"(?:Group (.*) )?Communication")
_NUMBERED: Final = re.compile(r"_(\d{1,9})_(\d{1,9})_\d{1,9}$")
"""``hcom_allReduce__868_3_1``: digits of the group's hash, number inside the group, part."""

_TASK_TYPE: Final = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
_COMPUTES: Final = re.compile(rb"AI_|MIX_|KERNEL_|DSA|DVPP|FUSION|FFTS_PLUS|Other")
"""Types of tasks that compute begin so; others copy, wait for or record an event, or are parts of communication."""

_NO_OPERATOR: Final = re.compile(rb'"(?!KERNEL_AI(?:CORE|VEC)|KERNEL_MIX)[A-Z_\d]+"')
"""Names of tasks that are of no operator, such as EVENT_WAIT; without operators recorded, kernels are named so too."""

_COPIES: Final = (b'"MEMCPY', b'"MEMSET')
_COMMUNICATES: Final = (b'"hcom_', b'"Hccl')
_DEVICE_LABEL: Final = re.compile(r"NPU (\d{1,4})")
_LARGEST_FILE: Final = 16 << 20
_INFO_NAME: Final = re.compile(r"profiler_info_(\d{1,7})\.json")

_DTYPES: Final = {
    "FP32": "Float",
    "FP64": "Double",
    "FP16": "Half",
    "BFP16": "BFloat16",
    "INT64": "Long",
    "INT32": "Int",
    "INT16": "Short",
    "INT8": "Char",
    "UINT8": "Byte",
}
"""HCCL's names of types as torch's."""

_WHOLE_TENSOR: Final = re.compile(r"hcom_(?:allReduce|broadcast|reduce|send|receive)_")
"""Operations whose ``count`` is that of the tensor. Of others it is that of one rank's part, or a split's."""

_DESCRIPTIONS: Final = {
    "default_group": "default_pg",
    "hccl_world_group": "default_pg",
    "dp_cp": "dp-cp",
    "embd": "embedding",
}
"""Names of groups as torch describes them; MindSpore calls the default group hccl_world_group."""


class ProcessKind(Enum):
    """What the events of a process are."""

    DEVICE = "device"
    COMMUNICATION = "communication"


class Processes:
    """The processes and threads that a trace has named so far."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, ProcessKind] = {}
        self._devices: dict[bytes, int] = {}
        self._groups: dict[tuple[bytes, bytes], str] = {}
        self._unnamed: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._kinds)

    @property
    def named_late(self) -> bool:
        """Return whether events of a process stood before its name."""
        return not self._unnamed.isdisjoint(self._kinds)

    def name(self, event: TraceEvent) -> None:
        """Take the name in an event of the phase M; one that is damaged names nothing."""
        kind = bytes(event.name)
        if len(self._groups) + len(self._kinds) >= _MOST_NAMES:
            return
        try:
            arguments: dict[str, object] = decode_json(bytes(event.args) or b"{}", dict[str, object])
        except ValueError:
            return
        name, pid = str(arguments.get("name", "")), bytes(event.pid)
        if kind == b'"process_name"' and name == _HARDWARE:
            self._kinds[pid] = ProcessKind.DEVICE
        elif kind == b'"process_name"' and name in _COMMUNICATION:
            self._kinds[pid] = ProcessKind.COMMUNICATION
        elif kind == b'"process_labels"' and (label := _DEVICE_LABEL.fullmatch(str(arguments.get("labels", "")))):
            self._devices[pid] = int(label[1])
        elif kind == b'"thread_name"' and (group := _GROUP_THREAD.fullmatch(name)):
            self._groups[pid, bytes(event.tid)] = printable(group[1] or "")

    def kind(self, event: TraceEvent) -> ProcessKind | None:
        """Return the kind of process of an event; None for all but those that this module is about."""
        kind = self._kinds.get(bytes(event.pid))
        if kind is None and event.cat is None and len(self._unnamed) < _MOST_NAMES:
            self._unnamed.add(bytes(event.pid))
        return kind

    def device(self, event: TraceEvent) -> int:
        return self._devices.get(bytes(event.pid), 0)

    def group(self, event: TraceEvent) -> str | None:
        """Return the name of the group whose operations lie on the event's thread; None on a thread of parts."""
        return self._groups.get((bytes(event.pid), bytes(event.tid)))


def computes(event: TraceEvent) -> bool:
    """Return whether a task of the device is a kernel that does not communicate."""
    task_type, name = _TASK_TYPE.search(bytes(event.args)), bytes(event.name)
    if not task_type or not _COMPUTES.match(task_type[1]):
        return False
    return not (name.startswith(_COMMUNICATES) or _NO_OPERATOR.fullmatch(name))


def copies(event: TraceEvent) -> bool:
    """Return whether a task of the device copies or sets memory."""
    return bytes(event.name).startswith(_COPIES)


def described(name: str, group: str, arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments of an operation of HCCL in the words of torch, for ``nccl_calls``.

    Args:
        name: of the event.
        group: of its thread; a number, or empty, in older versions, which count the groups of each file.
        arguments: of the event.
    """
    words: dict[str, object] = {
        "Process Group Name": group,
        "dtype": _DTYPES.get(str(arguments.get("data_type")), ""),
        "Group size": arguments.get("rank_size", -1),
    }
    numbered = _NUMBERED.search(name)
    if numbered:
        words["Seq"] = int(numbered[2])
        if not group or group.isdecimal():
            words["Process Group Name"] = numbered[1]
    if _WHOLE_TENSOR.match(name):
        words["In msg nelems"] = words["Out msg nelems"] = arguments.get("count", -1)
    return words


class _ParallelGroup(msgspec.Struct):
    group_name: str = ""
    global_ranks: list[int] | None = None


class _DistributedArguments(msgspec.Struct):
    rank: int = -1
    world_size: int = -1


class _AscendMetadata(msgspec.Struct):
    distributed_args: _DistributedArguments | None = None
    parallel_group_info: dict[str, _ParallelGroup] | None = None


def distributed_beside(trace: Path) -> Distributed:
    """Return what the files beside ``ASCEND_PROFILER_OUTPUT/trace_view.json`` say about its rank and its groups."""
    folder = trace.absolute().parent.parent
    metadata = _metadata(folder / "profiler_metadata.json")
    arguments = metadata.distributed_args or _DistributedArguments()
    groups = [
        ConfiguredGroup(name, group.global_ranks, _DESCRIPTIONS.get(group.group_name, group.group_name))
        for name, group in (metadata.parallel_group_info or {}).items()
    ]
    rank = next(_ranks_in_names(folder), arguments.rank)
    return Distributed(BACKEND, rank, arguments.world_size, pg_config=groups)


def _ranks_in_names(folder: Path) -> Iterator[int]:
    for path in folder.glob("profiler_info_*.json"):
        match = _INFO_NAME.fullmatch(path.name)
        if match:
            yield int(match[1])


def _metadata(path: Path) -> _AscendMetadata:
    try:
        return decode_json(read_file(path, _LARGEST_FILE), _AscendMetadata)
    except (OSError, ValueError):  # a trace may be copied without it, and says most of it itself
        return _AscendMetadata()
