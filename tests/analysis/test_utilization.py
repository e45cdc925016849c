from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.utilization import Utilization, peak_flops

SECOND = 10**9
# 312 TFLOP/s on each of 8 devices, and steps of 2 s with half of the FLOPs of that
HALF = Utilization(
    model_flops=8 * 312e12,
    formula="given",
    devices=8,
    device="NVIDIA A100-SXM4-80GB",
    step_ns=2 * SECOND,
    run_ns=40 * SECOND,
    run_steps=10,
    peak=312e12,
    achievable=271e12,
    recompute="none",
)


def test_the_shares_of_steps_and_of_the_wall_time() -> None:
    assert HALF.mfu == pytest.approx(0.5)
    assert HALF.run_mfu == pytest.approx(0.25)
    assert HALF.mamfu == pytest.approx(156 / 271)


def test_recomputation_toggles_three_passes_and_four() -> None:
    assert HALF.hfu == pytest.approx(0.5)
    assert replace(HALF, recompute="full").hfu == pytest.approx(0.5 * 4 / 3)
    assert replace(HALF, recompute="full").mfu == pytest.approx(0.5)
    assert replace(HALF, recompute=None).hfu is None


def test_a_billion_parameters_and_8192_tokens_are_65_536_teraflop_with_recomputation() -> None:
    # 2 FLOPs for each parameter and token, in a forward and in a backward of twice its work
    one_second = replace(
        HALF, model_flops=2 * 3 * 1e9 * 8192, devices=1, step_ns=SECOND, peak=65.536e12, recompute="full"
    )

    assert one_second.hfu == pytest.approx(1)
    assert one_second.mfu == pytest.approx(3 / 4)


def test_what_is_not_known_is_not_guessed() -> None:
    unknown = replace(HALF, peak=None, achievable=None, run_ns=None)

    assert (unknown.mfu, unknown.hfu, unknown.run_mfu, unknown.mamfu) == (None, None, None, None)
    assert unknown.flops_per_second == pytest.approx(156e12)


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_of_known_devices(device: str, teraflops: float) -> None:
    assert peak_flops(device) == teraflops * 1e12


@pytest.mark.parametrize(
    "device", ["x86_64 cpu", "NVIDIA H100X", "NVIDIA GeForce RTX 4090", "NVIDIA A1000", "NVIDIA L40", ""]
)
def test_other_devices_have_no_peak(device: str) -> None:
    assert peak_flops(device) is None
