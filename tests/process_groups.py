"""The process group that a test has set up."""

from __future__ import annotations

import torch.distributed as dist


def world_group() -> dist.ProcessGroup:
    """Return the default group, which a fixture or a program has made."""
    group = dist.group.WORLD
    assert group is not None
    return group
