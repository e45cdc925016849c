"""Paths that pass by torch.distributed are found in what their libraries keep; a library alone is not its use."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commtrace.capture.collectives.untraced_paths import find_invisible


def module(name: str, **variables: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(variables)
    return made


def found(*modules: ModuleType) -> dict[str, str]:
    return find_invisible({made.__name__: made for made in modules})


USER_BUFFERS = "transformer_engine.pytorch.module.base"
FUSED = "megatron.core.transformer.moe.fused_a2a"


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([module(USER_BUFFERS, _ub_communicators=None)], {}),
        ([module(USER_BUFFERS, _ub_communicators={"qkv": object()})], {"Transformer Engine user buffers": "active"}),
        ([module(USER_BUFFERS)], {}),
        ([module("deep_ep")], {"DeepEP": "loaded"}),
        ([module("deep_ep"), module(FUSED, _buffer=None)], {"DeepEP": "loaded"}),
        ([module("deep_ep"), module(FUSED, _buffer=object())], {"DeepEP": "active"}),
        ([module(FUSED, _buffer=None, _hybrid_ep_buffer=object())], {"DeepEP": "active"}),
        ([module("transformer_engine.pytorch.ep", _BOOTSTRAPPED=False)], {}),
        ([module("transformer_engine.pytorch.ep", _BOOTSTRAPPED=True)], {"NCCL EP": "active"}),
        ([module("nvshmem.core")], {"NVSHMEM": "loaded"}),
        ([module("torch.distributed._symmetric_memory", _group_name_to_store={})], {}),
        (
            [module("torch.distributed._symmetric_memory", _group_name_to_store={"0": object()})],
            {"symmetric memory": "active"},
        ),
        ([module("torch.cuda.graphs", graph=SimpleNamespace(default_capture_stream=None))], {}),
        (
            [module("torch.cuda.graphs", graph=SimpleNamespace(default_capture_stream=object()))],
            {"CUDA graphs": "active"},
        ),
    ],
)
def test_use_is_told_from_presence(modules: list[ModuleType], expected: dict[str, str]) -> None:
    assert found(*modules) == expected


def test_looking_imports_nothing() -> None:
    before = set(sys.modules)
    find_invisible()
    assert set(sys.modules) == before


def test_the_variables_that_are_asked_for_exist_in_this_torch() -> None:
    import torch.cuda.graphs
    import torch.distributed._symmetric_memory as symmetric

    assert {"_group_name_to_store", "_group_name_to_workspace_tensor"} <= set(vars(symmetric))
    assert hasattr(torch.cuda.graphs.graph, "default_capture_stream")


def test_a_lazy_module_is_not_made_to_import() -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    assert find_invisible({USER_BUFFERS: Lazy(USER_BUFFERS)}) == {}
