"""What stands in for somebody else's function can be called in every way that the function itself can be.

``DistributedDataParallel(module=model)`` must not meet a parameter of ours that is called ``module``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import commtrace
from commtrace.capture.model.modules import ModuleSpans
from tests.capture.recording import Recording

SOURCES = Path(commtrace.__file__).parent

NAMED_AS_IN_THE_ORIGINAL = {("step", "optimizer"), ("root_pre_forward", "module"), ("checkpoint", "function")}


def handing_on() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Functions inside of functions that take whatever is handed to them."""
    files = [
        SOURCES / "recording" / "compile_safe.py",
        *(SOURCES / "capture").rglob("*.py"),
        *(SOURCES / "integrations").glob("*.py"),
    ]
    for path in files:
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, ast.FunctionDef):
                for inner in ast.walk(outer):
                    if isinstance(inner, ast.FunctionDef) and inner is not outer and inner.args.kwarg:
                        yield path, inner


def test_no_parameter_of_ours_can_be_meant_by_a_keyword_of_the_caller() -> None:
    found = list(handing_on())
    assert len(found) > 10
    taken = {
        (path.name, function.name, parameter.arg)
        for path, function in found
        for parameter in (*function.args.args, *function.args.kwonlyargs)
        if (function.name, parameter.arg) not in NAMED_AS_IN_THE_ORIGINAL
    }
    assert taken == set()


class Odd(nn.Module):
    """Its inputs have the names that wrappers like."""

    def forward(self, module: torch.Tensor, original: Any = None, work: Any = None) -> torch.Tensor:
        return module * 2


def test_a_module_takes_an_input_of_any_name(recording: Recording) -> None:
    model = nn.Sequential(Odd())
    spans = ModuleSpans(recording.tracer)
    spans.select("*")
    try:
        assert model[0](module=torch.ones(2), original=1).sum() == 4
    finally:
        spans.clear()
    assert recording.warnings() == []
