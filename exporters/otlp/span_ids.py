"""Span ids that every rank can compute for every other rank: links need no communication.

An id is the first 8 bytes of a BLAKE2b digest over what identifies the span in the whole run. Of a communication that
is what the analysis matches it by: ``(group, seq, op_in_seq)`` of a collective, ``(group, sender, receiver, seq)`` of a
message. With 10⁵ spans in a trace the chance that two of them have one id is below 10⁻⁹.
"""

from __future__ import annotations

import hashlib


class SpanIds:
    """The ids of one attempt of a run.

    Args:
        run_id, attempt: of the job; a restarted job repeats steps and sequence numbers.
    """

    def __init__(self, run_id: str, attempt: int) -> None:
        self._seed = hashlib.blake2b(f"{run_id}/{attempt}/".encode(), digest_size=8)

    def job_step(self, step: int, repetition: int = 0) -> int:
        """Of the span that holds the steps of all ranks.

        Args:
            step: its number.
            repetition: how often a step of this number was seen before.
        """
        return self._id(f"job step {step} {repetition}")

    def step(self, rank: int, step: int, repetition: int = 0) -> int:
        """Of a rank's step."""
        return self._id(f"step {rank} {step} {repetition}")

    def collective(self, rank: int, group: int, seq: int, op_in_seq: int) -> int:
        """Of a rank's part in a collective."""
        return self._id(f"collective {rank} {group} {seq} {op_in_seq}")

    def message(self, is_send: bool, group: int, sender: int, receiver: int, seq: int) -> int:
        """Of one side of a point-to-point operation."""
        return self._id(f"{'send' if is_send else 'recv'} {group} {sender} {receiver} {seq}")

    def own(self, rank: int, number: int) -> int:
        """Of anything else on a rank: nobody links to it, a running number is enough."""
        return self._id(f"own {rank} {number}")

    def _id(self, identity: str) -> int:
        digest = self._seed.copy()
        digest.update(identity.encode())
        return int.from_bytes(digest.digest(), "big") or 1  # 0 is no span id
