"""Ranks that hang, or end, before the first step, in the way that the argument names."""

import os
import sys
import time

import torch.distributed as dist

import commtrace.auto  # noqa: F401

how, rank = sys.argv[1], int(os.environ["RANK"])


def prepare() -> None:
    time.sleep(600)


if how == "no_rank_comes":
    prepare()
if how == "one_leaves" and rank == 1:
    time.sleep(14)
    os._exit(5)
if how == "one_prepares_first" and rank == 1:
    prepare()
dist.init_process_group("gloo")
if how == "all_prepare":
    prepare()
if rank == 1:
    prepare()
if how == "new_group":
    dist.new_group([0, 1])
elif how == "new_subgroups":
    dist.new_subgroups(group_size=2)
