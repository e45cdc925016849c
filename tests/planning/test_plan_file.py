"""Plans in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan_file import read_plan_file

MODEL = "{layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 128}"


def write(folder: Path, text: str, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, f"model: {MODEL}\nlayout:\n  tp: 2\n  sequence_parallel: true\n  recompute: full\n")

    assert read_plan_file(path) == (
        Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128),
        Layout(tp=2, sequence_parallel=True, recompute="full"),
    )


def test_json(tmp_path: Path) -> None:
    text = '{"model": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}}'

    assert read_plan_file(write(tmp_path, text, "plan.json"))[1] == Layout()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "plan.yaml: "),
        ("layers: 4", "expected the parts model and layout"),
        ("model: 4", "model has no fields"),
        (f"model: {MODEL}\nlayout: {{tensor: 2}}", "layout has no field tensor; its fields are tp, pp, dp"),
        ("model: {layers: 4}", "model: Object missing required field `hidden`"),
        (f"model: {MODEL}\nlayout: {{tp: two}}", r"layout: Expected `int`, got `str` - at `\$.tp`"),
        (f"model: {MODEL}\nlayout: {{recompute: some}}", "layout: Invalid enum value 'some'"),
        (f"model: {MODEL}\nlayout: {{tp: 0}}", "layout: tp is 0: give a number above 0"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_plan_file(write(tmp_path, text))
