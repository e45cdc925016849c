from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from commtrace.analysis.chain import analyse
from commtrace.viewer.network import measure_network, network_resources
from tests.factory import collective, group, make_run, span
from tests.pipeline_factory import PipelineJob

MIB = 1 << 20
MS = 1_000_000


def test_groups_have_their_members_calls_and_last_ranks() -> None:
    everyone = group("dp", 0, 1)
    rows = {
        rank: [
            span("step", 0, 100 * MS, step=0),
            *(
                collective(
                    "all_reduce",
                    everyone,
                    seq,
                    seq * 10 * MS + rank * MS,
                    seq * 10 * MS + 5 * MS,
                    bytes=4 * MIB,
                    step=0,
                )
                for seq in range(3)
            ),
        ]
        for rank in (0, 1)
    }
    analysis = analyse(make_run(rows, [everyone], nodes={0: "a", 1: "b"}), "0")

    views = network_resources(analysis.run, measure_network(analysis))

    groups: Any = json.loads(views["groups.json"])
    speed = 4 * MIB / (4 * MS)
    assert groups["groups"] == [
        {
            "role": "dp",
            "ranks": [0, 1],
            "inter_node": True,
            "compared": 3,
            "last": groups["groups"][0]["last"],
        }
    ]
    assert groups["calls"] == [
        {
            "group": 0,
            "operation": "all_reduce",
            "count": 6,
            "bytes": 24 * MIB,
            "bus_bytes": 24 * MIB,
            "busbw_gbps": groups["calls"][0]["busbw_gbps"],
            "bandwidth_time": "transfer",
            "bandwidth_is_bound": False,
            "large_calls": 6,
            "quantiles_gbps": groups["calls"][0]["quantiles_gbps"],
            "exposed_ns": 0,
            "wait_ns": groups["calls"][0]["wait_ns"],
        }
    ]
    assert abs(groups["calls"][0]["quantiles_gbps"][2] / speed - 1) < 0.5
    assert [link["source"] for link in json.loads(views["links.json"])["links"]] == ["a"]


def test_messages_are_a_table_by_sender_and_receiver() -> None:
    analysis = analyse(PipelineJob(stages=2, microbatches=3, steps=3).run())

    table = pa.ipc.open_stream(network_resources(analysis.run, measure_network(analysis))["messages"]).read_all()

    assert table.select(["sender", "receiver", "calls"]).to_pydict() == {
        "sender": [0, 1],
        "receiver": [1, 0],
        "calls": [6, 6],
    }


def test_a_run_without_communication_has_empty_resources() -> None:
    analysis = analyse(make_run({0: [span("step", 0, 100, step=0)]}), "0")

    views = network_resources(analysis.run, measure_network(analysis))

    assert json.loads(views["groups.json"]) == {"groups": [], "calls": []}
    assert json.loads(views["links.json"]) == {"links": [], "slow_links": None}
