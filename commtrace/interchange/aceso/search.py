"""Searches the profile of a model, as Aceso measures it, for the configurations that train it fastest.

All stages have the same tp and dp. Stages end behind any operator with a small output; each recomputes as few operators
as it needs to fit. Of a GPT model, what Megatron-LM can be told is tried too: whole layers, and uniform recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.configuration import AcesoConfiguration, AcesoJob, model_operators
from commtrace.interchange.aceso.division import Division, OperatorChain
from commtrace.interchange.aceso.prediction import AcesoPrediction, predict
from commtrace.interchange.aceso.profile import AcesoProfile, Case
from commtrace.planning.layout import Layout
from commtrace.planning.search.candidates import Recompute, divisions, divisors
from commtrace.planning.search.megatron import megatron_arguments
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.spans import Bool

SEARCH_LEAVES_OUT: Final = (
    "All stages have the same tp and dp, and with tp all operators the same algorithm; Aceso may mix them.",
    "Not searched: chunks, sequence parallelism and a distributed optimizer; the profile has none of them.",
    "A microbatch that was not profiled is not tried.",
    "No all-reduce is added for tp: where the profile has it, it is in the operators' times.",
)
"""What the search leaves out, on top of what the predictions do."""

_RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
_ATTENTION: Final = ("enc-attention-score", "enc-attention-softmax", "enc-attention-dropout", "enc-attention-context")
_FIRST_OF_LAYER: Final = "enc-1st-layernorm"
_LAST_OF_LAYER: Final = "enc-post-MLP-dropout"


class _Form(NamedTuple):
    """How all operators are divided."""

    pp: int
    dp: int
    case: Case

    @property
    def batch(self) -> int:
        """Sequences of a microbatch of all data parallel ranks together, as Aceso counts it."""
        return self.case.microbatch * self.dp


@dataclass(frozen=True, slots=True)
class AcesoChoice:
    """A configuration that fits, with its predictions."""

    configuration: AcesoConfiguration
    layout: Layout | None  # as Megatron-LM is told it; None if it cannot be
    prediction: AcesoPrediction

    @property
    def tp(self) -> int:
        return self.configuration.model_parallel_size_of_each_op[0][0]

    @property
    def dp(self) -> int:
        return self.configuration.data_parallel_size_of_each_op[0][0]

    @property
    def pp(self) -> int:
        return len(self.configuration.num_gpus)

    @property
    def algorithm(self) -> int:
        return self.configuration.algo_of_each_op[0][0]

    @property
    def microbatch(self) -> int:
        """Sequences of each data parallel rank."""
        return self.configuration.micro_batch_size // self.dp

    @property
    def recomputed_share(self) -> float:
        """The share of the operators that are recomputed."""
        flags = [flag for stage in self.configuration.recompute_ops for flag in stage]
        return sum(flags) / len(flags)

    def to_json(self) -> JsonObject:
        prediction = self.prediction
        return {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "algorithm": self.algorithm,
            "microbatch": self.microbatch,
            "microbatches": self.configuration.microbatches,
            "operators_of_stages": list(self.configuration.num_ops_in_each_stage),
            "recomputed_share": self.recomputed_share,
            "iteration_ms": prediction.our_iteration_ms,
            "gradients_ms": prediction.our_gradients_ms,
            "memory_mib": prediction.our_memory_mib,
            "aceso_iteration_ms": prediction.iteration_ms,
            "aceso_memory_mib": prediction.memory_mib,
            "configuration": to_json(self.configuration),
            "arguments": list(megatron_arguments(self.layout)) if self.layout else None,
        }


@dataclass(frozen=True, slots=True)
class AcesoFound:
    """The fastest configurations that fit, the fastest first."""

    best: tuple[AcesoChoice, ...]
    for_megatron: AcesoChoice | None  # the fastest of those that Megatron-LM can be told
    forms: int  # combinations of tp, pp, dp, microbatch and algorithm
    too_large: int  # of these, without any configuration that fits
    not_known: tuple[str, ...]  # why others could not be predicted, in sentences
    notes: tuple[str, ...]  # what was taken for granted, in sentences


def fullest_mib(prediction: AcesoPrediction) -> float:
    """Return the memory that has to fit: the larger one of Aceso's model, which counts unused reserves, and ours."""
    return max(prediction.memory_mib, prediction.our_memory_mib)


def search_aceso(
    profile: AcesoProfile, job: AcesoJob, gpus: int, limit_mib: float, top: int, gpus_per_node: int = 8
) -> AcesoFound:
    """Return the ``top`` fastest configurations of ``gpus`` that need at most ``limit_mib`` on each.

    Raises:
        ConfigurationError: the profile has no form of the model that divides the GPUs and the batch.
    """
    return _Search(profile, job, gpus, limit_mib, top, gpus_per_node).run()


class _Search:
    def __init__(
        self, profile: AcesoProfile, job: AcesoJob, gpus: int, limit_mib: float, top: int, gpus_per_node: int
    ) -> None:
        self._profile, self._job, self._gpus = profile, job, gpus
        self._limit_mib, self._top, self._gpus_per_node = limit_mib, top, gpus_per_node
        self._names = model_operators(profile, job.model_name, job.num_layers)
        self._chains: dict[Case, OperatorChain] = {}
        self._not_known: dict[str, None] = {}
        self._best: list[AcesoChoice] = []
        self._for_megatron: AcesoChoice | None = None

    def run(self) -> AcesoFound:
        forms = list(self._forms())
        if not forms:
            sizes = sorted({(case.microbatch, case.tp) for case in self._profile.cases})
            raise ConfigurationError(
                f"no form of {self._profile.model} divides {self._gpus} GPUs and a global batch of "
                f"{self._job.global_batch_size}: profiled are (microbatch, tp) {', '.join(map(str, sizes))}"
            )
        bounds = []
        for form in forms:
            try:
                bounds.append((self._bound_ms(form), form))
            except ConfigurationError as error:
                self._not_known[str(error)] = None
        too_large = 0
        for bound_ms, form in sorted(bounds):
            slowest = self._best[-1] if len(self._best) == self._top else None
            is_done = slowest is not None and bound_ms >= slowest.prediction.our_iteration_ms
            megatron = self._for_megatron
            if is_done and not (self._maps() and (megatron is None or bound_ms < megatron.prediction.our_iteration_ms)):
                continue
            fits = [self._tried(form, division, layout) for division, layout in self._divisions(form)]
            too_large += not any(fits)
        notes = dict.fromkeys(note for choice in self._best for note in choice.prediction.notes)
        return AcesoFound(
            tuple(self._best), self._for_megatron, len(forms), too_large, tuple(self._not_known), tuple(notes)
        )

    def _forms(self) -> Iterator[_Form]:
        for case in sorted(self._profile.cases):
            if self._gpus % case.tp or (case.tp == 1 and case.algorithm):
                continue  # without tp both algorithms are the same work
            for pp in divisors(self._gpus // case.tp):
                form = _Form(pp, self._gpus // (case.tp * pp), case)
                if pp <= len(self._names) and self._job.global_batch_size % form.batch == 0:
                    yield form

    def _maps(self) -> bool:
        return self._job.model_name == "gpt"

    def _chain(self, case: Case) -> OperatorChain:
        if case not in self._chains:
            self._chains[case] = OperatorChain(self._profile, self._job.model_name, self._names, case)
        return self._chains[case]

    def _microbatches(self, form: _Form) -> int:
        return self._job.global_batch_size // form.batch

    def _bound_ms(self, form: _Form) -> float:
        """Return a time that no division of the operators goes below: the work of a stage with its even part."""
        return self._chain(form.case).work_ms / form.pp * self._microbatches(form)

    def _divisions(self, form: _Form) -> Iterator[tuple[Division, Layout | None]]:
        division = self._chain(form.case).divide(form.pp, self._limit_mib)
        if division is not None:
            yield division, None
        if self._maps():
            for recompute in _RECOMPUTES:
                yield from self._of_whole_layers(form, recompute)

    def _of_whole_layers(self, form: _Form, recompute: Recompute) -> Iterator[tuple[Division, Layout]]:
        """Yield the fastest division into whole layers that fits, as arguments of Megatron-LM can say it."""
        chain, recomputed = self._chain(form.case), _uniform(self._names, recompute)
        begins = [index for index, name in enumerate(self._names) if name == _FIRST_OF_LAYER]
        m, best = self._microbatches(form), None
        for _, first, last in divisions(len(begins), form.pp, 0):
            layers = _layers(len(begins), form.pp, first, last)
            bounds = np.cumsum(layers).tolist()
            ends = (*(begins[bound] for bound in bounds[:-1]), len(self._names))
            slowest_ms = chain.slowest_ms(ends, recomputed)
            if best is not None and slowest_ms >= best[0]:
                continue
            if chain.largest_mib(ends, recomputed) <= self._limit_mib:
                best = slowest_ms, ends, first, last
        if best is None:
            return
        _, ends, first, last = best
        layout = Layout(
            tp=form.case.tp,
            pp=form.pp,
            dp=form.dp,
            first_stage_layers=first,
            last_stage_layers=last,
            microbatch=form.case.microbatch,
            microbatches=m,
            recompute=recompute,
        )
        yield Division(ends, recomputed), layout

    def _tried(self, form: _Form, division: Division, layout: Layout | None) -> bool:
        """Return whether a division fits, and keep it if it is among the fastest."""
        configuration = _configuration(self._job, form, division)
        try:
            prediction = predict(self._profile, configuration, self._gpus_per_node)
        except ConfigurationError as error:
            self._not_known[str(error)] = None
            return True
        if fullest_mib(prediction) > self._limit_mib:
            return False
        choice = AcesoChoice(configuration, layout, prediction)
        if not any(configuration == kept.configuration for kept in self._best):
            self._best = sorted([*self._best, choice], key=_iteration_ms)[: self._top]
        if layout is not None and (
            self._for_megatron is None or _iteration_ms(choice) < _iteration_ms(self._for_megatron)
        ):
            self._for_megatron = choice
        return True


def _iteration_ms(choice: AcesoChoice) -> float:
    return choice.prediction.our_iteration_ms


def _uniform(names: Sequence[str], recompute: Recompute) -> Bool:
    """Return what Megatron-LM recomputes: with ``selective`` the core of attention, with ``full`` every layer."""
    if recompute == "none":
        return np.zeros(len(names), np.bool_)
    if recompute == "selective":
        return np.array([name in _ATTENTION for name in names])
    last = max((index for index, name in enumerate(names) if name == _LAST_OF_LAYER), default=-1)
    return np.array([0 < index <= last for index in range(len(names))])


def _layers(layers: int, pp: int, first: int, last: int) -> list[int]:
    if not first:
        return [layers // pp] * pp
    each = (layers - first - last) // (pp - 2) if pp > 2 else 0
    return [first, *[each] * (pp - 2), last]


def _configuration(job: AcesoJob, form: _Form, division: Division) -> AcesoConfiguration:
    bounds = list(pairwise((0, *division.ends)))
    sizes = [end - begin for begin, end in bounds]
    return AcesoConfiguration(
        **asdict(job),
        micro_batch_size=form.batch,
        num_gpus=[form.case.tp * form.dp] * form.pp,
        num_ops_in_each_stage=sizes,
        model_parallel_size_of_each_op=[[form.case.tp] * size for size in sizes],
        data_parallel_size_of_each_op=[[form.dp] * size for size in sizes],
        recompute_ops=[[int(flag) for flag in division.recomputed[begin:end]] for begin, end in bounds],
        algo_of_each_op=[[form.case.algorithm] * size for size in sizes],
    )
