"""Find the identity of this process: name and attempt of the run, rank and local rank, and the rest of its metadata."""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from commtrace.config import FORWARDED, NOTES_VARIABLE, RUN_ID_VARIABLE, Config
from commtrace.recording import launchers
from commtrace.recording.agreement import Agreed, Agreement, Name, Predecessor, Seat, Store, is_same_world
from commtrace.recording.options import is_run_id
from commtrace.trace.files.claims import Claim, Holder, holder_of
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.metadata import ClockAnchor, RankMetadata, new_world_key
from commtrace.trace.processes import GONE, process_state

_Answer = TypeVar("_Answer")

_PACKAGES: Final = (
    "commtrace", "torch", "megatron-core", "deepspeed", "transformer-engine", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

_START_FIELD: Final = 19
"""Of /proc/PID/stat, counted from behind the name: start time in clock ticks since boot (field 22 of proc(5))."""

RUN_ID_PLACE: Final = "{run_id}"
"""Stands for the run's name in COMMTRACE_DIR: it may not be known when the variable is set."""

DEFAULT_DIRECTORY: Final = f"commtrace-runs/{RUN_ID_PLACE}"

_LONGEST_SECONDS: Final = 30.0
"""A rank waits so long for rank 0, beside training, before it writes under a name of its own."""
_ASK_AGAIN_SECONDS: Final = 0.02
_ANSWER_SECONDS: Final = 0.1
"""A store on the other side of a network answers sooner. One whose connection is in use may answer hours later."""
_REUNION_SECONDS: Final = 2.0
"""A rank that joins a new default group waits so long for the others to say where they were: some may not be recorded.
"""
_SIMULATED: Final = "fake"
"""torch's backend in whose jobs there is no rank but this one."""

_logger = logging.getLogger("commtrace")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Identity:
    """The run and rank of this process; constant once they are known."""

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str] | None = None,
        name: Name | None = None,
        predecessor: Predecessor | None = None,
        files: FileCalls = HERE,
    ) -> None:
        """``name`` names the run of a world on its rank 0, by default after the job; it may take long.

        ``predecessor`` is the world that this process was in before; ``files``, where the file system is called.
        """
        self._config = config
        self._files = files
        self._predecessor = predecessor
        self.first_step = 0 if predecessor is None else predecessor.first_step
        """Of this world, as its members count: known with the identity."""
        self.predecessors: set[str] = set() if predecessor is None else {predecessor.world}
        """Keys of the worlds that members were in before, for ``name``."""
        self._name_run: Name = name or (lambda job, world, attempt: job)
        self._is_environment_given = environment is not None
        self._is_name_read_again = False
        # Now: a script may change the launcher's variables, and its launcher may end before it.
        self._environment = dict(os.environ if environment is None else environment)
        self._shared_name = run_id(config, self._environment) if predecessor is None else predecessor.job
        self._name = self._shared_name or _name_of_launcher(self._environment)
        self._lock = threading.Lock()
        self._agreement: Agreement | None = None
        self._asked_at: float | None = None
        self._found: AgreedIdentity | None = None
        self._first_place: Place | None = None
        self._needs_no_others = False
        self._connection: Store | None = None
        self._requests: dict[str, StoreRequest] = {}
        self._missing = 1  # until the store has told

    def name_worlds(self, name: Name) -> None:
        """Have ``name`` name the run of this world, before it is asked for."""
        self._name_run = name

    def found(self, place: Place | None = None) -> AgreedIdentity | None:
        """Return the identity; None while rank 0 has not named the run. Not for the training thread.

        Waits for an answer of the job's store for a tenth of a second at most.
        """
        # It is held by another thread, whose request may take long, or by this one: a signal's handler may destroy the
        # process groups, and so ask, while its thread does.
        if not self._lock.acquire(blocking=False):
            return self._found
        try:
            # The place as capture has seen it: the process groups may be gone by now, or smaller.
            agreed = self._found or self._look(place)
            self._found = self._found or agreed
        finally:
            self._lock.release()
        return self._found

    def settled(self, seconds: float, place: Place | None = None) -> AgreedIdentity:
        """Return the identity; after so many seconds without rank 0's name, one of its own.

        Rank 0 waits so long for the others to hear it, unless the store outlives its process.
        """
        deadline = time.monotonic() + seconds
        while (agreed := self.found(place)) is None and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
        if agreed is None:
            place = self._first_place or place or current_place()
            is_alone = place is None or _is_alone(place)
            alone = (
                self.on_its_own(place or Place(0, 1))
                if is_alone
                else self._not_agreed("rank 0 has not announced one", place)
            )
            agreed = self._found = self._found or alone
        while self._unreported() and not self._store_outlives_us() and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
        return agreed

    def _store_outlives_us(self) -> bool:
        try:
            store = _default_store()
        except (RuntimeError, ValueError) as error:  # the training thread has just destroyed the group
            _logger.debug("commtrace: the owner of the job's store is not known: %s", error)
            return False
        while store is not None and hasattr(store, "underlying_store"):
            store = store.underlying_store
        address = getattr(store, "host", None), getattr(store, "port", None)
        return address == launchers.agent_store(self._environment)

    def look_for_others(self) -> None:
        """Warn, on rank 0, of ranks that have not been heard of for long: they are not recorded.

        Waits like :meth:`found`.
        """
        missing = self._unreported()
        if missing and self._asked_at is not None and time.monotonic() - self._asked_at > _LONGEST_SECONDS:
            self._needs_no_others = True
            _logger.warning(
                "commtrace: %d of the ranks have not reported for %g s: they are not recorded, or under other names. "
                "Is commtrace installed and imported on their nodes? A launcher that starts processes over ssh has to "
                "forward PYTHONPATH and %s, which `commtrace run` sets.",
                missing,
                _LONGEST_SECONDS,
                FORWARDED,
            )

    def _unreported(self) -> int:
        """Return the number of ranks that rank 0 has not heard of; 0 on others, and once all were there."""
        if self._needs_no_others or self._agreement is None:
            return 0
        try:
            store = _default_store()
            if store is None:
                missing = 0
            else:
                answer = self._answered("unreported", partial(self._ask_unreported, self._agreement, store))
                missing = self._missing if answer is None else answer
        # KeyError, ValueError: the training thread has just destroyed the group.
        except (KeyError, RuntimeError, NotImplementedError, ValueError) as error:
            _logger.debug("commtrace: it is not known which ranks have read the name of the run: %s", error)
            missing = 0
        self._missing = missing
        self._needs_no_others = missing == 0
        if self._needs_no_others:
            self._connection = None
        return missing

    def _ask_unreported(self, agreement: Agreement, store: Store) -> int:
        return agreement.unreported(self._connected(store))

    def _look(self, place: Place | None) -> AgreedIdentity | None:
        self._read_name_again()
        # The first one that is seen: a job may give up its group and go on as a smaller one meanwhile.
        place = self._first_place = self._first_place or place or current_place()
        if place is None:
            place = self.launched_place() or Place(0, 1)
            return self._alone(place) if _is_alone(place) else self.on_its_own(place)
        if _is_alone(place):
            return self._alone(place)
        store = _default_store()
        if store is None:
            return self.on_its_own(place) if self._shared_name else self._not_agreed("its store is gone", place)
        return self._asked(store, place)

    def _read_name_again(self) -> None:
        """Take the name that the script has given since this process started, which may have been before the job."""
        if self._is_name_read_again or self._is_environment_given:
            return
        self._is_name_read_again = True
        before, now = self._environment.get(RUN_ID_VARIABLE, ""), os.environ.get(RUN_ID_VARIABLE, "")
        if now != before and is_run_id(now) and self._config.run_id == before:  # no other name was given to start()
            self._shared_name = self._name = now

    def _asked(self, store: Store, place: Place) -> AgreedIdentity | None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        agreement = self._agreement = self._agreement or self._new_agreement(place)
        try:
            ask = None if agreement is None else partial(self._ask_agreement, agreement, store, place)
            agreed = None if ask is None else self._answered("agreement", ask)
        except (RuntimeError, NotImplementedError) as error:
            return self._not_agreed(str(error), place)
        if agreement is not None and agreed is not None:
            self.first_step = agreement.first_step
            if place.rank:  # rank 0 alone will ask who has heard it
                self._connection, self._needs_no_others = None, True
            self._warn_of_other_name(agreed)
            return agreed
        if time.monotonic() - self._asked_at > _LONGEST_SECONDS:
            return self._not_agreed(f"rank 0 has not announced one for {_LONGEST_SECONDS:g} s", place)
        return None

    def _new_agreement(self, place: Place) -> Agreement | None:
        """Return this rank's part in the agreement; None while the file system has not told of earlier attempts."""
        restarts = self._answered("restarts", partial(self._restarts, place))
        if restarts is None:
            return None
        agreement = Agreement(
            place.rank, place.world_size, self._name, *restarts, name=self._name_run, predecessor=self._predecessor
        )
        agreement.predecessors = self.predecessors
        return agreement

    def _restarts(self, place: Place) -> tuple[int, int]:
        """Return the requeues and restarts of the launcher, which does not know of worlds that its processes made."""
        requeues, restarts = launchers.requeues(self._environment), launchers.worker_restarts(self._environment)
        if place.rank == 0 and self._predecessor is None and requeues + restarts:
            try:
                holder = self._files.call(holder_of, directory(self._config, self._name))
            except OSError:  # nothing was recorded there
                holder = None
            if holder is not None and process_state(holder) in (GONE, None):
                restarts = max(restarts, holder.attempt + 1 - requeues)
        return requeues, restarts

    def _ask_agreement(self, agreement: Agreement, store: Store, place: Place) -> AgreedIdentity | None:
        connected = self._connected(store)
        agreed = agreement.reached(connected)
        return None if agreed is None else self._of(agreed, place, connected)

    def _connected(self, store: Store) -> Store:
        """Return a connection of our own: one that the job waits on answers nobody else until that has ended."""
        if self._connection is None:
            clone = getattr(store, "clone", None)  # not in old versions of torch, nor in stores of Python
            self._connection = store if clone is None else clone()
        return self._connection

    def _answered(self, about: str, ask: Callable[[], _Answer | None]) -> _Answer | None:
        """Return the answer of a store or file system; None while there is none. Nothing is asked twice meanwhile.

        Raises:
            RuntimeError, NotImplementedError: the store has ended, or is of a kind that cannot be asked.
        """
        request = self._requests.get(about)
        if request is None:
            request = self._requests[about] = StoreRequest(ask)
        if not request.has_ended(_ANSWER_SECONDS):
            return None
        self._requests.pop(about, None)  # another thread may have had the same answer
        answer: _Answer | None = request.answer()
        return answer

    def launched_place(self) -> Place | None:
        """Return the place of this process by its launcher; None without one."""
        launched = launchers.position(self._environment)
        return None if launched is None else Place(launched.rank, launched.world_size)

    def on_its_own(self, place: Place) -> AgreedIdentity:
        """Return the identity of a process at ``place`` as this process alone knows it: not agreed on with others."""
        number = attempt(self._environment)
        if self._predecessor is not None:
            number = max(number, self._predecessor.attempt + 1)
        world = _world_of_process(number) if _is_alone(place) else ""
        return self._of(Agreed(self._name, number, world, self._name), place, None)

    def goes_on_at(self, place: Place) -> bool:
        """Return whether the world goes on: this process, in its new default group at ``place``, and all others.

        For the thread that has made the group. It waits two seconds at most for the others.
        """
        agreed = self._found
        if agreed is None:
            return self._first_place is None or self._first_place[:2] == place[:2]
        is_alike = (agreed.rank, agreed.world_size) == (place.rank, place.world_size)
        if place.world_size == 1 or place.backend == _SIMULATED or not agreed.world:
            return is_alike
        store = _default_store()
        if store is None:
            return is_alike
        seat = Seat(agreed.world, agreed.rank, agreed.world_size)
        ask = partial(is_same_world, store, seat, place[:2], _REUNION_SECONDS)
        request = StoreRequest(ask)
        try:
            return bool(request.answer()) if request.has_ended(_REUNION_SECONDS + _ANSWER_SECONDS) else is_alike
        except (RuntimeError, NotImplementedError) as error:
            _logger.debug("commtrace: it is not known whether the other ranks have their places as before: %s", error)
            return is_alike

    def _alone(self, place: Place) -> AgreedIdentity | None:
        """Return the identity of a world of one rank; None while its run has no name."""
        agreed = self.on_its_own(place)
        run_id = self._answered("name", partial(self._name_run, agreed.job, agreed.world, agreed.attempt))
        return None if run_id is None else agreed._replace(run_id=run_id)

    def _not_agreed(self, why: str, place: Place | None) -> AgreedIdentity:
        self._warn_of_no_agreement(why)
        return self.on_its_own(place or Place(0, 1))

    def _of(self, agreed: Agreed, place: Place, store: Store | None) -> AgreedIdentity:
        local_rank = self._local_rank(place, store)
        return AgreedIdentity(
            agreed.run_id, agreed.attempt, place.rank, local_rank, place.world_size, place.backend, agreed.world,
            agreed.job,
        )  # fmt: skip

    def _local_rank(self, place: Place, store: Store | None) -> int:
        environment: Mapping[str, str] = self._environment
        launched = launchers.position(environment)
        if launched is None or launched[:2] != place[:2]:
            environment = os.environ  # a script may have set them for itself
            launched = launchers.position(environment)
        number = None
        if launched is not None and launched[:2] == place[:2]:
            number = launched.local_rank
            if number is not None and launchers.counts_ranks_of_node(environment):
                return number
        if store is None or self._agreement is None:
            return number or 0
        # Ray gives every process its own devices and says 0 to all: a number holds if no other rank of the host has it.
        host = f"{self._config.node_id or socket.gethostname()}/{boot_id()}"
        try:
            return self._agreement.local_rank(store, host, number)
        except (RuntimeError, NotImplementedError) as error:
            _logger.debug("commtrace: the number of this rank on its host is not known: %s", error)
            return number or 0

    def _warn_of_other_name(self, agreed: AgreedIdentity) -> None:
        if self._shared_name and agreed.job != self._shared_name and self._is_first_of_its_node():
            _logger.warning(
                "commtrace: the run is called %s on this node and %s on rank 0, and is recorded as %s. The launcher "
                "has not given all nodes the same variables; COMMTRACE_RUN_ID is best set for all of them.",
                self._shared_name,
                agreed.job,
                agreed.run_id,
            )

    def _warn_of_no_agreement(self, why: str) -> None:
        if not self._is_first_of_its_node():
            return
        _logger.warning(
            "commtrace: the ranks could not agree on a name for this run (%s). This node's are recorded as %s; is "
            "rank 0 recorded as well? Bring runs of several names together with `commtrace merge`, or set "
            "COMMTRACE_RUN_ID to the same value on all nodes.",
            why,
            self._name,
        )

    def _is_first_of_its_node(self) -> bool:
        return not launchers.local_rank(self._environment)


class StoreRequest:
    """A question to a store, or a file system, asked on a thread of its own: none says how long it takes to answer."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._answer: Any = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="commtrace-store", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # since Python 3.12 no thread starts once Python ends
            self._thread = None
            self._run()

    def has_ended(self, seconds: float) -> bool:
        """Wait at most so long for the answer; return whether it is there."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:
            self._error = error


class Place(NamedTuple):
    """A process in its job. ``backend`` is empty without torch.distributed."""

    rank: int
    world_size: int
    backend: str = ""


class AgreedIdentity(NamedTuple):
    """The identity of a process. ``backend`` is empty without torch.distributed."""

    run_id: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    backend: str
    world: str = ""  # key of its world; empty if its ranks did not agree on one
    job: str = ""  # name that the worlds of a job share


def _is_alone(place: Place) -> bool:
    return place.world_size == 1 or place.backend == _SIMULATED


_own_worlds: dict[tuple[int, int], str] = {}


def _world_of_process(attempt: int) -> str:
    """Return the key of the world that this process is by itself, in an attempt of its job."""
    return _own_worlds.setdefault((os.getpid(), attempt), new_world_key())


def collect(config: Config, agreed: AgreedIdentity) -> RankMetadata:
    """Describe this process for the headers of its files."""
    device_name, device_uuid = device()
    host = socket.gethostname()
    return RankMetadata(
        run_id=agreed.run_id,
        attempt=agreed.attempt,
        session=time.time_ns(),
        rank=agreed.rank,
        local_rank=agreed.local_rank,
        world_size=agreed.world_size,
        host=host,
        node=config.node_id or host,
        boot_id=boot_id(),
        pid=os.getpid(),
        backend=agreed.backend,
        device=device_name,
        device_uuid=device_uuid,
        versions=_versions(),
        environment=stored_settings(os.environ),
        anchor=clock_anchor(),
        world=agreed.world,
        job=agreed.job,
    )


def attempt(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launchers have started the job again."""
    return launchers.requeues(environment) + launchers.worker_restarts(environment)


def run_id(config: Config, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name for the run that all its ranks find without communication; empty if there is none.

    It comes from COMMTRACE_RUN_ID, Megatron's own telemetry, torchrun's ``--rdzv-id`` or Slurm; if all ranks are on one
    node, from the launcher's process. Otherwise rank 0 gives the name: see :class:`Identity`.
    """
    of_telemetry = environment.get("MEGATRON_OTEL_RUN_ID") or environment.get("NEMO_LENS_RUN_ID")
    named = config.run_id or of_telemetry or launchers.job_name(environment)
    if named:
        return named if is_run_id(named) else re.sub(r"[^\w:@+-]", "_", named[:100])
    return _name_of_launcher(environment) if launchers.is_on_one_node(environment) else ""


def directory(config: Config, run_id: str, job: str = "") -> Path:
    """Return the run directory: COMMTRACE_DIR, with the run's name in the place of ``{run_id}``.

    Without such a place, a world that has a name beside the job's gets a folder in it.
    """
    given = str(config.dir or DEFAULT_DIRECTORY)
    if RUN_ID_PLACE not in given and job and run_id != job:
        return Path(given).absolute() / run_id.removeprefix(f"{job}-")
    return Path(given.replace(RUN_ID_PLACE, run_id)).absolute()


def name_of_world(job: str, number: int) -> str:
    """Return the name of the run of the ``number``-th world of a job, from 1."""
    return job if number == 1 else f"{job}-world-{number}"


class WorldNames:
    """Names the runs of worlds by the first directory that no other world has: see commtrace/trace/files/claims.py."""

    def __init__(self, config: Config, files: FileCalls = HERE, predecessors: Set[str] = frozenset()) -> None:
        """``predecessors`` are the keys of worlds that it takes the directory of, once they are known."""
        self._config = config
        self._files = files
        self._predecessors = predecessors
        self._claim: Claim | None = None

    def __call__(self, job: str, world: str, attempt: int) -> str | None:
        """Return the name of a world's run; None if it is not settled yet. A file system may take long to answer."""
        if self._claim is None:
            folder = partial(self._directory, job)
            self._claim = Claim(_holder(world, attempt), folder, self._files, predecessors=self._predecessors)
        try:
            number = self._claim.settle()
        except OSError as error:  # the recording itself will say so, and try again
            _logger.debug("commtrace: it is not known whether other worlds have the name %s: %s", job, error)
            number = 1
        return None if number is None else name_of_world(job, number)

    def _directory(self, job: str, number: int) -> Path:
        return directory(self._config, name_of_world(job, number), job)


def own_directory(
    config: Config, agreed: AgreedIdentity, files: FileCalls = HERE, predecessors: Set[str] = frozenset()
) -> Path:
    """Return the run directory of a rank, which another world holds if nodes have disks of their own.

    ``predecessors`` are the keys of worlds that its processes were in before.
    """
    of_world = directory(config, agreed.run_id, agreed.job)
    if not agreed.world:
        return of_world
    of_this_world = directory(config, f"{agreed.run_id}-{agreed.world}", agreed.job)
    try:
        holder = _holder(agreed.world, agreed.attempt)
        claim = Claim(
            holder, lambda number: of_world if number == 1 else of_this_world, files, predecessors=predecessors
        )
        is_ours = claim.settle() == 1
    except OSError as error:  # the recording itself will say so, and try again
        _logger.debug("commtrace: it is not known whether another world has %s: %s", of_world, error)
        is_ours = True
    return of_world if is_ours else of_this_world


def _holder(world: str, attempt: int) -> Holder:
    launch = os.environ.get(NOTES_VARIABLE, "")
    return Holder(world, launch, attempt, socket.gethostname(), boot_id(), os.getpid(), time.time_ns())


def boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def is_one_of_many(config: Config) -> bool:
    """Return whether the directory is named after the run, beside those of other runs."""
    return Path(config.dir or DEFAULT_DIRECTORY).name == RUN_ID_PLACE


def _name_of_launcher(environment: Mapping[str, str]) -> str:
    is_launched = launchers.position(environment) is not None or multiprocessing.parent_process() is not None
    return _name_of_process(os.getppid() if is_launched else os.getpid())


def _default_store() -> Store | None:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    return distributed._get_default_store() if distributed is not None and distributed.is_initialized() else None


def _name_of_process(pid: int) -> str:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        started = int(boot.split()[1]) + int(after_name[_START_FIELD]) // os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return f"process-{pid}"  # not Linux
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started))}-{pid}"


def process_start_ns() -> int | None:
    """Return the start of this process on the host's monotonic clock, to 10 ms; None without /proc."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_ns = int(after_name[_START_FIELD]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return since_boot_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + time.monotonic_ns()
    except (AttributeError, OSError, ValueError, IndexError):
        return None  # not Linux


def ranks_per_node() -> int | None:
    """Return how many ranks this node has; None under launchers that may number them across nodes."""
    return launchers.ranks_per_node(os.environ)


def clock_anchor(tries: int = 5) -> ClockAnchor:
    """Return the monotonic clock against the wall clock: of a few readings, the shortest."""
    best = None
    for _ in range(tries):
        before = time.monotonic_ns()
        realtime = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best.bracket_ns:
            best = ClockAnchor((before + after) // 2, realtime, after - before)
    assert best is not None
    return best


def current_place() -> Place | None:
    """Return this process's place in torch.distributed; None if that is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Place(distributed.get_rank(), distributed.get_world_size(), _backend(distributed))


def _backend(distributed: ModuleType) -> str:
    """Return the backend as the script named it, else the one that torch chose: ``gloo``, ``cpu:gloo,cuda:nccl``."""
    named = str(distributed.get_backend())
    if named != "undefined":
        return named
    by_device = str(distributed.get_backend_config())
    chosen = {part.rpartition(":")[2] for part in by_device.split(",")}
    return chosen.pop() if len(chosen) == 1 else by_device


def device(number: int | None = None) -> tuple[str, str]:
    """Return name and UUID of device ``number``, or of the one in use, without creating a context on one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used = _device_in_use(torch) if number is None else number
        if used is not None:
            properties = torch.cuda.get_device_properties(used)
            return str(properties.name), str(getattr(properties, "uuid", ""))
    return platform.machine() + " cpu", ""


def _device_in_use(torch: ModuleType) -> int | None:
    """Return the process's local rank if that device has a context, else the first device with one."""
    in_use = [number for number in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(number)]
    local_rank = launchers.local_rank(os.environ)
    return local_rank if local_rank in in_use else next(iter(in_use), None)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.version, "cuda", None):
        versions["cuda"] = str(torch.version.cuda)
    return versions


_LONGEST: Final = 100
_PRELOAD: Final = "LD_PRELOAD"
_NCCL: Final = """
    ALGO BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING CROSS_NIC
    CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
    IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS
    IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
    IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_MODE LL128_NTHREADS LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS
    MAX_NRINGS MAX_P2P_NCHANNELS MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_ENABLE
    NCHANNELS_PER_NET_PEER NET NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS
    NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL
    P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE RAS_ENABLE RUNTIME_CONNECT SET_STACK_SIZE SHM_DISABLE
    SINGLE_PROC_MEM_REG_ENABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS THREAD_THRESHOLDS TREE_THRESHOLD
    WIN_ENABLE WORK_FIFO_BYTES
"""
_TORCH_NCCL: Final = """
    ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE DESYNC_DEBUG
    DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY NAN_CHECK PROPAGATE_ERROR
    RANKS_PER_ROOT RETHROW_CUDA_ERRORS TRACE_BUFFER_SIZE TRACE_CPP_STACK USE_COMM_NONBLOCKING
    USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
"""
STORED: Final = frozenset(
    [
        *(f"NCCL_{name}" for name in _NCCL.split()),
        *(f"TORCH_NCCL_{name}" for name in _TORCH_NCCL.split()),
        # what the scheduler calls the node, and that it is Kubernetes
        "SLURMD_NODENAME", "NODE_NAME", "KUBERNETES_SERVICE_PORT",
        "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
    ]
)  # fmt: skip


def stored_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that are stored, with their values; of preloaded libraries the names."""
    settings = {name: value for name, value in environment.items() if name in STORED}
    # Spaces and colons separate. Folders may be private, so a library is told by its file name.
    if preloaded := environment.get(_PRELOAD, "").replace(":", " ").split():
        settings[_PRELOAD] = ":".join(Path(library).name for library in preloaded)
    return {name: value for name, value in settings.items() if len(value) <= _LONGEST and value.isprintable()}
