"""Of the environment, what is stored with a run."""

from __future__ import annotations

from commtrace.settings import stored_settings


def test_only_known_settings_with_short_values_are_stored() -> None:
    environment = {
        "NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4",
        "NCCL_PLUGIN_TOKEN": "secret", "NCCL_DEBUG_FILE": "/home/secret", "GLOO_PASSWORD": "secret",
        "NCCL_IB_HCA": "x" * 101, "NCCL_NET": "a\x1b]0;", "AWS_SECRET_ACCESS_KEY": "secret", "OMP_NUM_THREADS_X": "1",
    }  # fmt: skip
    assert stored_settings(environment) == {
        "NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
