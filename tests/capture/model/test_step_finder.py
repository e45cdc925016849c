"""Steps of loops in which nobody marks them: one per update, whatever the loop does in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates
from tests.capture.recording import Recording


class TickingClock:
    """Each mark is one later than the one before."""

    timing = schema.HOST_TIMING

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def resolve(self, mark: int) -> int:
        return mark

    def refresh(self) -> None:
        return None


@pytest.fixture
def loop() -> Iterator[Recording]:
    clock: Any = TickingClock()  # as much of one as is called here
    recording = Recording(clock)
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    yield recording
    phase.uninstall()


def optimizer(**options: Any) -> torch.optim.SGD:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1, **options)


def forward(recording: Recording) -> None:
    recording.tracer.steps.work_begins()
    recording.tracer.leave(recording.tracer.enter(schema.FORWARD, "forward"))


def alternate(recording: Recording, always: torch.optim.SGD, every_other: torch.optim.SGD, iterations: int) -> None:
    """Train with one optimizer in each iteration, and with another one in every second of them."""
    for number in range(iterations):
        forward(recording)
        always.step()
        if number % 2:
            every_other.step()


def evaluate(recording: Recording) -> None:
    recording.tracer.leave(recording.tracer.enter(schema.EVALUATION, "evaluation"))
    recording.tracer.steps.evaluation_ended()


def steps(recording: Recording) -> list[tuple[int, int, int]]:
    recording.tracer.finish()
    return [(row.step, row.start, row.end) for row in recording.rows(schema.STEP)]


def of_steps(recording: Recording) -> list[tuple[int, int]]:
    """Forwards and optimizer steps in each step."""
    numbers = [number for number, _, _ in steps(recording)]
    return [
        (
            sum(row.step == number for row in recording.rows(schema.FORWARD)),
            sum(row.step == number for row in recording.rows(schema.OPTIMIZER)),
        )
        for number in numbers
    ]


def test_a_step_ends_with_the_optimizer_and_the_set_up_is_none(loop: Recording) -> None:
    sgd = optimizer()
    loop.tracer.leave(loop.tracer.enter(schema.CHECKPOINT, "load"))  # marks 1 and 2
    for _ in range(2):
        forward(loop)
        sgd.step()
    loop.tracer.leave(loop.tracer.enter(schema.CHECKPOINT, "save"))

    # 3: the first step begins; 4–5 forward, 6–7 optimizer, 8: it ends; and so on. What follows is no step.
    assert steps(loop) == [(0, 3, 8), (1, 8, 13)]


def test_an_optimizer_that_steps_before_the_first_forward_begins_no_step(loop: Recording) -> None:
    sgd = optimizer()
    sgd.step()  # as torch.distributed.checkpoint.state_dict does, to have a state to load into
    for _ in range(2):
        forward(loop)
        sgd.step()

    # 1: taken for the begin of a step; 2–3: that optimizer; 4: the first step begins after all.
    assert steps(loop) == [(0, 4, 9), (1, 9, 14)]
    assert [row.step for row in loop.rows(schema.OPTIMIZER)] == [-1, 0, 1]
    assert of_steps(loop) == [(1, 1), (1, 1)]


def test_a_loop_of_which_nothing_but_optimizers_is_seen(loop: Recording) -> None:
    first, second = optimizer(), optimizer()
    for _ in range(3):
        first.step()
        second.step()

    assert [number for number, _, _ in steps(loop)] == [0, 1, 2]


def test_an_optimizer_that_calls_for_the_gradients_itself(loop: Recording) -> None:
    lbfgs = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))], max_iter=1)

    def closure() -> float:
        forward(loop)
        return 0.0

    for _ in range(2):
        lbfgs.step(closure)

    assert [number for number, _, _ in steps(loop)] == [0, 1]


def test_gradient_accumulation_is_one_step_per_update(loop: Recording) -> None:
    sgd = optimizer()
    for number in range(6):
        forward(loop)
        if number % 3 == 2:
            sgd.step()

    assert of_steps(loop) == [(3, 1), (3, 1)]


def test_the_optimizers_of_a_gan_end_a_step_together(loop: Recording) -> None:
    discriminator, generator = optimizer(), optimizer()
    for _ in range(3):
        for one in (discriminator, generator):
            forward(loop)
            one.step()

    assert of_steps(loop) == [(2, 2)] * 3


def test_a_critic_that_is_trained_more_often_does_not_end_a_step(loop: Recording) -> None:
    critic, generator = optimizer(), optimizer()
    for _ in range(3):
        for one in (critic, critic, critic, critic, critic, generator):
            forward(loop)
            one.step()

    assert of_steps(loop) == [(6, 6)] * 3


def test_an_optimizer_that_never_steps_is_not_waited_for_forever(loop: Recording) -> None:
    used, unused = optimizer(), optimizer()
    for _ in range(20):
        forward(loop)
        used.step()

    assert of_steps(loop) == [(17, 17), (1, 1), (1, 1), (1, 1)]
    del unused


def test_an_optimizer_that_is_gone_is_not_waited_for(loop: Recording) -> None:
    old, used = optimizer(), optimizer()
    del old
    for _ in range(2):
        forward(loop)
        used.step()

    assert of_steps(loop) == [(1, 1), (1, 1)]


def test_optimizers_that_were_made_before_are_known_from_their_first_step_on(recording: Recording) -> None:
    discriminator, generator = optimizer(), optimizer()
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    for _ in range(3):
        discriminator.step()
        generator.step()
    phase.uninstall()

    assert of_steps(recording) == [(0, 0), (0, 2), (0, 2)]


def test_one_optimizer_per_parameter_inside_the_backward(loop: Recording) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in weights}
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())
    for _ in range(3):
        loop.tracer.steps.work_begins()
        span = loop.tracer.enter(schema.BACKWARD, "backward")
        torch.stack([weight.sum() for weight in weights]).sum().backward()
        loop.tracer.leave(span)
        loop.tracer.steps.backward_ended()

    assert of_steps(loop) == [(0, 4)] * 3
    ends = [row.end for row in loop.rows(schema.BACKWARD)]
    assert [end - 1 for _, _, end in steps(loop)] == ends  # the next mark after the backward's


def test_an_update_that_the_gradient_scaler_skips_ends_a_step_too(loop: Recording) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        forward(loop)
        sgd.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(sgd)
        scaler.update()

    assert of_steps(loop) == [(1, 1), (1, 0), (1, 1)]


def test_an_evaluation_between_steps_is_a_part_of_the_next_one_before_its_work(loop: Recording) -> None:
    sgd = optimizer()
    for number in range(3):
        forward(loop)
        sgd.step()
        if number == 1:
            evaluate(loop)

    (first, second, third) = steps(loop)
    (evaluation,) = loop.rows(schema.EVALUATION)
    assert first[2] == second[1]
    (between,) = loop.rows(schema.BETWEEN)
    assert second[2] == third[1] == between.start < evaluation.start < evaluation.end < between.end < third[2]
    assert between.step == third[0]


def test_a_teacher_that_runs_in_every_step_belongs_to_the_loop(loop: Recording) -> None:
    sgd = optimizer()
    for _ in range(4):
        evaluate(loop)
        forward(loop)
        sgd.step()

    (_, second, third, fourth) = steps(loop)
    assert second[2] == third[1]
    assert third[2] == fourth[1]


def test_whoever_marks_steps_takes_over(loop: Recording) -> None:
    sgd = optimizer()
    for _ in range(2):
        forward(loop)
        sgd.step()
    forward(loop)  # of a step that is found, but not ended
    loop.tracer.begin_step(7)
    forward(loop)
    sgd.step()
    sgd.step()
    loop.tracer.begin_step(8)

    assert [number for number, _, _ in steps(loop)] == [0, 1, 7]
    assert loop.tracer.steps.is_marked_by_framework


def test_a_program_without_optimizers_has_no_steps(loop: Recording) -> None:
    for _ in range(3):
        forward(loop)

    assert steps(loop) == []


def test_found_steps_obey_the_window() -> None:
    recording = Recording(steps="1:3")
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    sgd = optimizer()
    for _ in range(5):
        sgd.step()
    phase.uninstall()

    assert [number for number, _, _ in steps(recording)] == [1, 2]
    assert recording.tracer.coordinates == Coordinates(5)


def test_an_optimizer_inside_another_one_is_not_waited_for(loop: Recording) -> None:
    inner = optimizer()

    class Wrapping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            inner.step()

    outer = Wrapping([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(3):
        outer.step()

    assert of_steps(loop) == [(0, 0), (0, 1), (0, 1)]  # until the second one, nobody can know that it is a loop


def numbers_and_updates(recording: Recording) -> list[tuple[int, int]]:
    """Number of each step, and its optimizer steps."""
    found = [number for number, _, _ in steps(recording)]
    return [(number, sum(row.step == number for row in recording.rows(schema.OPTIMIZER))) for number in found]


def iterations(recording: Recording) -> Any:
    _, topology = recording.tracer.topology()
    return topology.get("iterations")


def test_an_optimizer_that_steps_in_every_cycle_sets_the_pace(loop: Recording) -> None:
    muon, adam = optimizer(), optimizer()
    alternate(loop, muon, adam, 8)

    # Until Adam steps nobody can know that both are trained by the same loop. Numbers are those of iterations.
    assert [number for number, _ in numbers_and_updates(loop)] == [0, 2, 3, 4, 5, 6, 7]
    assert iterations(loop) == {"first": 2, "fewest": 1, "most": 1, "updates": {"SGD": [1, 1]}}


@pytest.mark.parametrize("used", [(0, 1, 0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 0, 0, 1, 1)])
def test_experts_of_which_each_iteration_trains_another(loop: Recording, used: tuple[int, ...]) -> None:
    """Ranks that use other experts have the same steps."""
    dense, experts = optimizer(), [optimizer(), optimizer()]
    for expert in used:
        forward(loop)
        dense.step()
        experts[expert].step()

    assert [number for number, _ in numbers_and_updates(loop)] == [0, 2, 3, 4, 5, 6, 7]


def test_ranks_that_learn_of_the_pace_later_number_the_same_iterations_alike(loop: Recording) -> None:
    inner, outer = optimizer(), optimizer()
    for number in range(8):
        forward(loop)
        inner.step()
        if number % 4 == 3:
            outer.step()

    assert [number for number, _ in numbers_and_updates(loop)] == [0, 4, 5, 6, 7]


def test_one_optimizer_per_parameter_of_which_some_get_no_gradient(loop: Recording) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in weights}
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())
    for number in range(6):
        loop.tracer.steps.work_begins()
        span = loop.tracer.enter(schema.BACKWARD, "backward")
        torch.stack([weight.sum() for weight in weights[: 3 if number % 2 else 2]]).sum().backward()
        loop.tracer.leave(span)
        loop.tracer.steps.backward_ended()

    assert [number for number, _, _ in steps(loop)] == [0, 2, 3, 4, 5]
    ends = [row.end for row in loop.rows(schema.BACKWARD)]
    assert [end - 1 for _, _, end in steps(loop)] == ends[1:]


def test_optimizers_that_step_together_end_a_step_together(loop: Recording) -> None:
    first, second = optimizer(), optimizer()
    for _ in range(4):
        forward(loop)
        first.step()
        second.step()

    assert numbers_and_updates(loop) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert iterations(loop) is None


def test_an_encoder_that_is_trained_with_its_generator_does_not_set_the_pace_of_a_critic(loop: Recording) -> None:
    critic, encoder, generator = optimizer(), optimizer(), optimizer()
    for _ in range(3):
        forward(loop)
        encoder.step()
        generator.step()
        for _ in range(2):
            forward(loop)
            critic.step()

    assert [number for number, _ in numbers_and_updates(loop)] == [0, 1, 2]


def test_updates_are_counted_in_a_step_that_holds_several_iterations(loop: Recording) -> None:
    critic, generator = optimizer(), optimizer()
    for _ in range(3):
        for one in (critic, critic, critic, generator):
            forward(loop)
            one.step()

    assert iterations(loop) == {"first": 3, "fewest": 3, "most": 3, "updates": {"SGD": [1, 3]}}


def test_an_optimizer_that_no_longer_steps_does_not_hold_up_the_steps(loop: Recording) -> None:
    pace, second = optimizer(), optimizer()
    alternate(loop, pace, second, 4)
    for _ in range(40):
        forward(loop)
        second.step()

    assert len(steps(loop)) > 15


def test_the_id_of_an_optimizer_that_is_gone_is_forgotten(loop: Recording) -> None:
    """A later object may get it. Nobody sets the pace any more: the second one steps in each iteration."""
    pace, second = optimizer(), optimizer()
    alternate(loop, pace, second, 4)
    gone, finder = id(pace), loop.tracer.steps
    del pace
    gc.collect()
    kept = (finder._cycle, finder._cycles_with, finder._stepped_alone, finder._missing, finder._references)
    assert not any(gone in ids for ids in kept)
    assert finder._pace is None
    for _ in range(4):
        forward(loop)
        second.step()

    assert [number for number, _ in numbers_and_updates(loop)][-4:] == [4, 5, 6, 7]


def set_up(recording: Recording) -> None:
    recording.tracer.leave(recording.tracer.enter(schema.PHASE, "set up"))


def test_a_second_training_begins_anew(loop: Recording) -> None:
    for _ in range(2):
        sgd = optimizer()
        for _ in range(2):
            forward(loop)
            sgd.step()
        loop.tracer.steps.training_ended()
        set_up(loop)

    # 1: the first step begins; 4: it ends; 7: so does the second one. 8-9: set up; 10: the second training begins.
    first, second, third, fourth = steps(loop)
    assert [first[0], second[0], third[0], fourth[0]] == [0, 1, 2, 3]
    assert second[2] < third[1]
    assert [row.step for row in loop.rows(schema.PHASE)] == [-1, -1]
    (gap,) = [row for row in loop.rows(schema.PHASE) if row.start < third[1]]
    assert second[2] < gap.start < gap.end < third[1]


def test_a_training_that_goes_on_with_its_optimizers_waits_for_all_of_them(loop: Recording) -> None:
    first, second = optimizer(), optimizer()
    for _ in range(2):
        for _ in range(2):
            for one in (first, second):
                forward(loop)
                one.step()
        loop.tracer.steps.training_ended()

    assert of_steps(loop) == [(2, 2)] * 4


def test_the_optimizer_of_an_earlier_training_is_not_waited_for(loop: Recording) -> None:
    """Its process groups stay."""
    kept = []
    for _ in range(2):
        kept.append(optimizer())
        set_up(loop)
        for _ in range(2):
            forward(loop)
            kept[-1].step()

    assert of_steps(loop) == [(1, 1)] * 4
    _, second, third, _ = steps(loop)
    assert second[2] < third[1]


def test_a_loop_that_makes_an_optimizer_in_every_iteration_has_no_set_up(loop: Recording) -> None:
    outer = optimizer()
    for _ in range(5):
        inner = optimizer()
        forward(loop)
        inner.step()
        forward(loop)
        outer.step()
        del inner

    found = steps(loop)
    assert [before[2] for before in found[1:-1]] == [after[1] for after in found[2:]]
