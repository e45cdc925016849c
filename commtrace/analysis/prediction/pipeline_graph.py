"""A pipeline as a graph, made from what each of its stages does: the one place that turns a schedule into dependencies.

A stage runs its actions in their order, each once its input has arrived: one transfer after the message was sent and,
unless messages are received while the stage works, after the stage came to wait for it. Sends hold nobody up.

>>> from commtrace.trace.schedule import orders
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
from commtrace.trace.schedule import BACKWARD, FORWARD, WEIGHTS, Action
from commtrace.trace.spans import Int64


@dataclass(frozen=True)
class PipelineGraph:
    """The dependencies of one pipeline; actions are numbered stage by stage, in their order.

    A stage has a node for its start, and one for the end of each action. Edges lead to an action from the one before,
    and from those that it needs, the messages first.
    """

    actions: tuple[Action, ...]
    stage: Int64  # of each action
    first_action: Int64  # of each stage, and the number of all
    source: Int64
    target: Int64
    needs: Int64  # of each edge beyond those of the order: the action that needs something
    receiver: Int64  # of each message: the action that needs it
    sender: Int64  # of each message: the action that made it

    @property
    def num_nodes(self) -> int:
        return len(self.actions) + len(self.first_action) - 1

    @property
    def end(self) -> Int64:
        """Return the node of each action: its end. One before it is the end of the action before, or the start."""
        return np.arange(len(self.actions)) + self.stage + 1

    @property
    def last(self) -> Int64:
        """Return the last node of each stage."""
        return self.first_action[1:] + np.arange(len(self.first_action) - 1)

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
        busy = np.asarray(busy_ns, np.int64)
        wait = np.array(gap_ns, np.int64)
        if not receives_early:
            wait[self.receiver] += np.maximum(transfer_ns, 0)
        weights = np.concatenate([wait + busy, busy[self.needs]])
        weights[count : count + messages] += np.add(send_delay_ns, transfer_ns)
        return weights

    @cached_property
    def _replay(self) -> ReplayGraph:
        return ReplayGraph.from_edges(self.num_nodes, self.source, self.target)

    def phase_ns(self, weights: Int64) -> int:
        """Return the time from the common start to the end of the last action of any stage."""
        return int(self._replay.times(weights)[self.last].max())


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
    within_stage, message = _inputs(actions, stage.tolist(), places)
    end = np.arange(len(actions)) + stage + 1
    needed = np.concatenate([message, within_stage])
    return PipelineGraph(
        actions=actions,
        stage=stage,
        first_action=first,
        source=np.concatenate([end - 1, end[needed[:, 0]]]),
        target=np.concatenate([end, end[needed[:, 1]]]),
        needs=needed[:, 1],
        receiver=message[:, 1],
        sender=message[:, 0],
    )


def _inputs(
    actions: Sequence[Action], stage: Sequence[int], places: Mapping[tuple[int, int], int]
) -> tuple[Int64, Int64]:
    """Return pairs of actions, the first of which makes what the second needs: within a stage, and between two."""
    last_position = max(places.values())
    done: dict[tuple[str, int, int], int] = {}
    needs: list[tuple[int, tuple[str, int, int]]] = []
    for number, action in enumerate(actions):
        if action.letter == WEIGHTS:
            continue
        way = FORWARD if action.letter == FORWARD else BACKWARD
        position = places[stage[number], action.chunk]
        done[way, position, action.microbatch] = number
        source = position - 1 if way == FORWARD else position + 1
        if 0 <= source <= last_position:
            needs.append((number, (way, source, action.microbatch)))
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    for number, needed in needs:
        if needed not in done:
            raise ConfigurationError(
                f"microbatch {needed[2]} was not recorded on all stages, so the schedule cannot be rebuilt"
            )
        pairs[stage[done[needed]] != stage[number]].append((done[needed], number))
    within_stage, messages = (np.array(each, np.int64).reshape(-1, 2) for each in pairs)
    return within_stage, messages
