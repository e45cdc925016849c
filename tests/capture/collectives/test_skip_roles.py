"""Communication of roles that are skipped costs no marks and keeps its numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.capture.tracer import Tracer
from tests.capture.recording import Recording, fake_backend
from tests.process_groups import world_group


def skipping(*roles: str) -> Recording:
    recording = Recording()
    native = recording.native
    groups = GroupRegistry(roles, None if native is None else native.make_counters)
    recording.tracer = Tracer(recording.recorder, groups=groups, native=native)
    return recording


def test_a_skipped_role_is_numbered_and_not_recorded() -> None:
    with fake_backend():
        recording = skipping("tp")
        tp, dp = dist.new_group([0, 1]), dist.new_group([0, 2])
        recording.tracer.set_role(dp, "dp")
        with recording.capturing():
            for group in (tp, dp, tp):
                dist.all_reduce(torch.ones(4), group=group)
            recording.tracer.set_role(tp, "tp")
            for group in (tp, dp, tp):
                work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
                work.wait()
            recording.tracer.set_role(tp, "other")
            dist.all_reduce(torch.ones(4), group=tp)
        name_of = {recording.tracer.groups.state(group).group.id: name for name, group in (("tp", tp), ("dp", dp))}

        recorded = [(name_of[row.group], row.seq) for row in recording.communications()]
        assert recorded == [("tp", 0), ("dp", 0), ("tp", 1), ("dp", 1), ("tp", 4)]
        assert len(recording.stalls()) == 5


def test_a_pipelines_messages_over_another_group_are_of_the_pipeline() -> None:
    with fake_backend():
        recording = skipping("pp")
        recording.tracer.set_role(dist.new_group([0, 1]), "pp")
        with recording.capturing():
            dist.send(torch.ones(4), 1)
            dist.send(torch.ones(4), 2)
            dist.send(torch.ones(4), 1)

        assert [(row.name, row.peer, row.seq) for row in recording.communications()] == [("send", 2, 0)]


@pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "isend"), reason="this torch has no functional point-to-point"
)
def test_so_are_those_that_a_compiled_graph_sends() -> None:
    with fake_backend():
        recording = skipping("pp")
        recording.tracer.set_role(dist.new_group([0, 1]), "pp")
        functional = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
        functional.install()
        try:
            world = world_group().group_name
            for peer in (1, 2, 1):
                sent = torch.ops._c10d_functional.isend(torch.ones(4), peer, 0, world)
                torch.ops._c10d_functional.wait_tensor(sent)
        finally:
            functional.uninstall()

        assert [(row.name, row.peer, row.seq) for row in recording.communications()] == [("send", 2, 0)]
