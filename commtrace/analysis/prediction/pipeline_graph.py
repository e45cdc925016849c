"""A pipeline as a graph, made from what each of its stages does: the one place that turns a schedule into dependencies.

A stage runs its actions in their order, each once its input has arrived: one transfer after the message was sent and,
unless messages are received while the stage works, after the stage came to wait for it. Sends hold nobody up.

>>> from commtrace.schedule import orders
>>> graph = pipeline_graph(orders("1f1b", stages=2, microbatches=3))
>>> weights = graph.weights(gap_ns=[0] * 12, busy_ns=[10, 10, 20, 10, 20, 20, 15, 25, 15, 25, 15, 25])
>>> int(graph.phase_ns(weights))
150
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from commtrace.analysis.replay.graph import ReplayGraph
from commtrace.errors import ConfigurationError
from commtrace.schedule import BACKWARD, FORWARD, WEIGHTS, Action
from commtrace.trace.spans import Int64

_NODES_OF_ACTION = 3
"""When the stage is free for it, its begin, its end."""


@dataclass(frozen=True)
class PipelineGraph:
    """The dependencies of one pipeline; actions are numbered stage by stage, in their order.

    Node 0 of a stage is its start; three nodes of each action follow. Edges: for each action the time before it, its
    wait and its work; then a message for each input from another stage; then what an action needs of its own stage.
    """

    actions: tuple[Action, ...]
    stage: Int64  # of each action
    first_action: Int64  # of each stage, and the number of all
    source: Int64
    target: Int64
    receiver: Int64  # of each message: the action that needs it
    sender: Int64  # of each message: the action that made it

    @property
    def num_nodes(self) -> int:
        return _NODES_OF_ACTION * len(self.actions) + len(self.first_action) - 1

    @property
    def free(self) -> Int64:
        """Return the node at which its stage is free for each action."""
        return _NODES_OF_ACTION * np.arange(len(self.actions)) + self.stage + 1

    @property
    def last(self) -> Int64:
        """Return the last node of each stage."""
        return _NODES_OF_ACTION * self.first_action[1:] + np.arange(len(self.first_action) - 1)

    def weights(
        self,
        gap_ns: npt.ArrayLike,
        busy_ns: npt.ArrayLike,
        send_delay_ns: npt.ArrayLike = 0,
        transfer_ns: npt.ArrayLike = 0,
        *,
        receives_early: bool = False,
    ) -> Int64:
        """Return the weight of each edge, ns.

        Args:
            gap_ns: Before each action, when its stage does something else; the first is the head of the step.
            busy_ns: Of each action.
            send_delay_ns: Of each message: from the end of its action until it is sent.
            transfer_ns: Of each message, from when it is sent and its receiver asks for it.
            receives_early: Messages are received while their receiver works, so that it need not ask first.
        """
        count, messages = len(self.actions), len(self.receiver)
        weights = np.zeros(len(self.source), np.int64)
        weights[:count], weights[2 * count : 3 * count] = gap_ns, busy_ns
        weights[3 * count : 3 * count + messages] = np.add(send_delay_ns, transfer_ns)
        if not receives_early:
            np.maximum.at(weights, count + self.receiver, np.broadcast_to(transfer_ns, messages))
        return weights

    @cached_property
    def _replay(self) -> ReplayGraph:
        return ReplayGraph.from_edges(self.num_nodes, self.source, self.target)

    def times(self, weights: Int64) -> Int64:
        """Return the instant of every node, ns from the common start of all stages."""
        return self._replay.times(weights)

    def phase_ns(self, weights: Int64) -> int:
        """Return the time from the common start to the end of the last action of any stage."""
        return int(self.times(weights)[self.last].max())


def places_in_a_loop(stages: int, chunks: int) -> dict[tuple[int, int], int]:
    """Return the position along the model of each chunk, by stage and chunk: chunk after chunk over all stages."""
    return {(stage, chunk): chunk * stages + stage for stage in range(stages) for chunk in range(chunks)}


def pipeline_graph(
    orders: Sequence[Sequence[Action]], places: Mapping[tuple[int, int], int] | None = None
) -> PipelineGraph:
    """Return the graph of a pipeline whose stages work in these orders.

    Args:
        orders: The actions of each stage.
        places: The position along the model of each stage's chunks; by default in a loop over the stages.

    Raises:
        ConfigurationError: an action needs one that no stage does.
    """
    actions = tuple(action for order in orders for action in order)
    stage = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    first = np.array([0, *accumulate(len(order) for order in orders)], np.int64)
    if places is None:
        places = places_in_a_loop(len(orders), 1 + max(action.chunk for action in actions))
    own, message = _inputs(actions, stage.tolist(), places)
    number = np.arange(len(actions))
    free = _NODES_OF_ACTION * number + stage + 1
    begin, end = free + 1, free + 2
    return PipelineGraph(
        actions=actions,
        stage=stage,
        first_action=first,
        source=np.concatenate([free - 1, free, begin, end[message[:, 0]], end[own[:, 0]]]),
        target=np.concatenate([free, begin, end, begin[message[:, 1]], begin[own[:, 1]]]),
        receiver=message[:, 1],
        sender=message[:, 0],
    )


def _inputs(
    actions: Sequence[Action], stage: Sequence[int], places: Mapping[tuple[int, int], int]
) -> tuple[Int64, Int64]:
    """Return pairs of actions, the first of which makes what the second needs: within a stage, and between two."""
    last_place = max(places.values())
    done: dict[tuple[str, int, int], int] = {}
    needs: list[tuple[int, tuple[str, int, int]]] = []
    for number, action in enumerate(actions):
        if action.letter == WEIGHTS:
            continue
        way = FORWARD if action.letter == FORWARD else BACKWARD
        place = places[stage[number], action.chunk]
        done[way, place, action.microbatch] = number
        source = place - 1 if way == FORWARD else place + 1
        if 0 <= source <= last_place:
            needs.append((number, (way, source, action.microbatch)))
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    for number, needed in needs:
        if needed not in done:
            raise ConfigurationError(
                f"microbatch {needed[2]} was not recorded on all stages, so the schedule cannot be rebuilt"
            )
        pairs[stage[done[needed]] != stage[number]].append((done[needed], number))
    own, messages = (np.array(each, np.int64).reshape(-1, 2) for each in pairs)
    return own, messages
