"""Pure functions from a recorded run to its analysis; nothing here imports torch.

The chain is: align the hosts' clocks, match communications across ranks, partition each rank's steps, summarise.
"""
