"""Who sends."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource

from commtrace.exporters.otlp.resource import resource_of
from tests.exporters.otlp.made import RUN, live_rank


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def test_rank_and_topology_under_our_names_and_megatrons() -> None:
    attributes = resource_of(live_rank(3)).attributes

    expected = {
        "service.name": "commtrace",
        "service.instance.id": "r1-rank3",
        "commtrace.run.id": RUN,
        "nemo.run.id": RUN,
        "dl.rank": 3,
        "nv.dl.rank": 3,
        "dl.world_size": 4,
        "dl.local_rank": 3,
        "dl.pipeline_parallel.rank": 1,
        "dl.pipeline_parallel.size": 2,
        "dl.data_parallel.rank": 1,
        "dl.tensor_parallel.size": 1,
        "commtrace.parallel.pp.rank": 1,
        "commtrace.attempt": 0,
        "host.name": "alpha",
    }
    assert {name: attributes.get(name) for name in expected} == expected


def test_variables_win_over_defaults_but_not_over_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,dl.rank=77,nemo.run.id=launcher")
    attributes = resource_of(live_rank(3)).attributes

    assert (attributes["service.name"], attributes["team"]) == ("mine", "a")
    assert attributes["dl.rank"] == 3
    assert attributes["nemo.run.id"] == "launcher"


def test_the_resource_of_a_provider_is_taken_over() -> None:
    theirs = Resource({"service.name": "megatron-lm", "nemo.run.id": "llama", "nv.dl.run.uuid": "u", "dl.rank": 3})
    attributes = resource_of(live_rank(3), theirs.attributes).attributes

    assert attributes["service.name"] == "megatron-lm"
    assert attributes["nemo.run.id"] == "llama"
    assert attributes["nv.dl.run.uuid"] == "u"
    assert attributes["commtrace.run.id"] == RUN


def test_a_resource_is_hashed_as_any_other_but_once() -> None:
    ours, again = resource_of(live_rank(1)), resource_of(live_rank(1))

    assert ours == again
    assert hash(ours) == hash(again) == hash(Resource(ours.attributes))


def test_while_python_ends_the_variables_are_read_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=red")

    def no_more_threads(*_: object) -> Resource:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(Resource, "create", no_more_threads)

    attributes = resource_of(live_rank(3)).attributes

    assert (attributes["team"], attributes["service.name"], attributes["dl.rank"]) == ("red", "commtrace", 3)
