"""All ranks evaluate, and meet at the end of it: batches of rank 0 and rank 1 in each of four evaluations.

torchrun --nproc-per-node 2 uneven_evaluation.py 4 24
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import commtrace.auto  # noqa: F401

STEPS, EVERY, STEP_SECONDS, BATCH_SECONDS = 24, 6, 0.02, 0.01

torch.set_num_threads(1)
dist.init_process_group("gloo")
batches = int(sys.argv[1 + dist.get_rank()])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(STEPS):
    time.sleep(STEP_SECONDS)
    model(torch.ones(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % EVERY == EVERY - 1:
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for _ in range(batches):
                total += model(torch.ones(4, 16)).mean()
                time.sleep(BATCH_SECONDS)
        dist.all_reduce(total)
        model.train()
dist.destroy_process_group()
