"""What ``commtrace bench collectives`` prints of measurements; tests/e2e makes real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement
from commtrace.benchmarks.collectives import Results
from commtrace.benchmarks.expectations import ExpectedShare, Rate, shares
from commtrace.cli.commands.bench_collectives import _report, _share_text

MIB = 1 << 20
PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
MADE = {"backend": "gloo", "device": "cpu", "torch": "2.13.0+cpu", "date": "2026-11-26T12:44:13Z"}


def measured(
    num_bytes: int,
    gbps: MeasuredSpread,
    ranks: tuple[int, ...] = (0, 1),
    nodes: tuple[str, ...] = ("node0", "node1"),
    group: str = "world",
) -> Measurement:
    """Return an all_reduce of two ranks, whose busbw is bytes over time."""
    time = MeasuredSpread(num_bytes / gbps.mean, num_bytes / gbps.max, num_bytes / gbps.min)
    return Measurement("all_reduce", ranks, nodes, num_bytes, "float32", 20, time, group)


def test_the_output_in_the_documentation_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        measured(64 * MIB, MeasuredSpread(0.607, 0.290, 0.936)),
        measured(128 * MIB, MeasuredSpread(0.634, 0.459, 0.841)),
    ]
    results = Results(MADE, rows)
    found = shares(results.baseline(), {"": Rate("10Gbit/s", 1.25)}, ["node0", "node1"])
    _report(results, found, json_output=False, output=None, plot=None)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    (block,) = re.findall(r"^```text\n(all_reduce.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert printed[: len(block.splitlines())] == block.splitlines()


def test_the_slow_node_in_the_documentation_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    measured_gbps = {(0, 3): 1.016, (1, 2): 0.234, (0, 2): 0.230, (1, 3): 0.654, (0, 1): 0.643, (2, 3): 0.226}
    rows = [
        measured(64 * MIB, MeasuredSpread(gbps, gbps, gbps), pair, (f"node{pair[0]}", f"node{pair[1]}"), "pairs")
        for pair, gbps in measured_gbps.items()
    ]
    _report(Results(MADE, rows), (), json_output=False, output=None, plot=None)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    (block,) = re.findall(r"^```text\n(Slow links.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert printed[: len(block.splitlines())] == block.splitlines()


@pytest.mark.parametrize(
    ("num_bytes", "nodes", "backend", "advice"),
    [
        (32 * MIB, ("a", "b"), "nccl", "measure larger tensors first"),
        (64 * MIB, ("a", "b"), "gloo", "look at the CPUs first"),
        (64 * MIB, ("a", "b"), "nccl", "look at the interfaces that NCCL_DEBUG=INFO names"),
        (64 * MIB, ("a",), "nccl", "look at nvidia-smi topo -m"),
    ],
)
def test_a_low_share_has_an_advice(num_bytes: int, nodes: tuple[str, ...], backend: str, advice: str) -> None:
    low = ExpectedShare(
        measured(num_bytes, MeasuredSpread(20.0, 20.0, 20.0), nodes=nodes), Rate("400Gbit/s", 50.0), 50.0
    )
    text = _share_text(low, backend)

    assert "reaches only 20.0 GB/s" in text
    assert f"40% of the 50.0 GB/s that 400Gbit/s per rank allow. Expect 75 to 95%: {advice}" in text


def test_a_share_that_is_enough_needs_no_advice() -> None:
    high = ExpectedShare(measured(64 * MIB, MeasuredSpread(41.0, 41.0, 41.0)), Rate("400Gbit/s", 50.0), 50.0)

    assert _share_text(high, "nccl") == (
        "all_reduce on ranks 0–1 of node0 and node1 reaches 41.0 GB/s at 64.0 MiB, 82% of the 50.0 GB/s that "
        "400Gbit/s per rank allow. Expect 75 to 95%."
    )
