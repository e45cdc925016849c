from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.live.summary import DeviceMemory, mfu, training_device


def torch_with(peaks: list[int | None], *, in_use: bool = True) -> Any:
    """None: this process has no context on the device, and asking what it holds would make one."""

    def statistics(number: int) -> dict[str, int]:
        held = peaks[number]
        assert held is not None
        return {
            "allocated_bytes.all.peak": held,
            "allocated_bytes.all.current": held - 1,
            "reserved_bytes.all.current": held + 1,
            "reserved_bytes.all.peak": held + 2,
        }

    cuda = SimpleNamespace(
        is_initialized=lambda: in_use,
        device_count=lambda: len(peaks),
        memory_stats=statistics,
        get_device_name=lambda number: f"GPU {number}",
    )
    return SimpleNamespace(
        cuda=cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda number: peaks[number] is not None)
    )


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (torch_with([0, None, 700, 20]), DeviceMemory("GPU 2", 700, 699, 701, 702)),
        (torch_with([0, 0]), None),
        (torch_with([700], in_use=False), None),
        (None, None),
    ],
)
def test_the_device_is_the_one_that_is_used(
    torch: Any, expected: DeviceMemory | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)

    assert training_device() == expected


def test_mfu_is_model_flops_by_time_and_peak() -> None:
    # 2e9 parameters, 2048 · 16 tokens over 8 GPUs: 6 · 2e9 · 2048 · 16 / 8 FLOPs per GPU, in half a second
    assert mfu(6 * 2e9 * 2048 * 16 / 8, 0.5, "NVIDIA A100-SXM4-80GB") == pytest.approx(49.152e12 / 0.5 / 312e12)
    assert mfu(1e12, 0.5, "NVIDIA GeForce RTX 4090") is None
    assert mfu(0.0, 0.5, "NVIDIA H200") is None
