"""Plans in files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.planning.layout import Layout, PlannedJob
from commtrace.planning.model import Model
from commtrace.planning.plan_file import read_plan_file

MODEL = "{layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 128}"
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}


def write(folder: Path, text: str, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, f"model: {MODEL}\nlayout:\n  tp: 2\n  sequence_parallel: true\n  recompute: full\n")

    assert read_plan_file(path) == PlannedJob(
        Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128),
        Layout(tp=2, sequence_parallel=True, recompute="full"),
    )


def test_json(tmp_path: Path) -> None:
    text = '{"model": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}}'

    assert read_plan_file(write(tmp_path, text, "plan.json")).layout == Layout()


def test_dropout_is_a_probability_or_whether_there_is_any(tmp_path: Path) -> None:
    text = f"model: {MODEL[:-1]}, hidden_dropout: 0, attention_dropout: 0.1}}"
    model = read_plan_file(write(tmp_path, text)).model

    assert (model.hidden_dropout, model.attention_dropout) == (False, True)


MODEL_JSON = '{"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}'


def job(layout: str) -> str:
    return f'{{"model": {MODEL_JSON}, "layout": {layout}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json: Input data was truncated"),
        ('{"layers": 4}', "expected the parts model, layout and deepspeed; model is missing"),
        (
            f'{{"model": {MODEL_JSON}, "laiout": {{}}}}',
            "laiout is no part of a plan; its parts are model, layout, deepspeed",
        ),
        ('{"model": 4}', "model has no fields"),
        ('{"model": {"layers": 4}}', "model: Object missing required field `hidden`"),
        (f'{{"model": {MODEL_JSON[:-1]}, "hidden_dropout": 2}}}}', "model: hidden_dropout is 2: give a probability"),
        (f'{{"model": {MODEL_JSON[:-1]}, "hidden_dropout": "no"}}}}', "Expected `bool`, got `str`"),
        (job('{"tensor": 2}'), "layout has no field tensor; its fields are tp, pp, dp"),
        (job('{"tp": "two"}'), r"layout: Expected `int`, got `str` - at `\$.tp`"),
        (job('{"recompute": "some"}'), "layout: Invalid enum value 'some'"),
        (job('{"tp": 0}'), "layout: tp is 0: give a number above 0"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_plan_file(write(tmp_path, text, "plan.json"))


def test_yaml_that_is_none_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plan\.yaml: line 2, column 7: did not find expected ',' or '\]'$"):
        read_plan_file(write(tmp_path, "model: {a: [1\nlayout: 3\n"))


def test_without_pyyaml_the_message_has_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(MissingExtraError, match=r"PyYAML: pip install 'commtrace\[plan\]', or write"):
        read_plan_file(write(tmp_path, f"model: {MODEL}"))


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("number", ["9" * 5_000, "99999999999999999999", "1" + "0" * 300])
@pytest.mark.parametrize(
    ("part", "field"), [("layout", "dp"), ("layout", "pp"), ("model", "layers"), ("model", "experts")]
)
def test_numbers_that_no_job_has_are_refused(tmp_path: Path, suffix: str, number: str, part: str, field: str) -> None:
    job: dict[str, dict[str, object]] = {"model": dict(SIZES), "layout": {}}
    job[part][field] = "N"
    text = json.dumps(job)  # which is YAML, too

    read_plan_file(write(tmp_path, text.replace('"N"', "2"), f"job.{suffix}"))
    with pytest.raises(ConfigurationError):
        read_plan_file(write(tmp_path, text.replace('"N"', number), f"job.{suffix}"))


def test_more_ranks_than_a_job_has_are_refused(tmp_path: Path) -> None:
    text = json.dumps({"model": SIZES, "layout": {"dp": 1 << 20, "pp": 4}})

    with pytest.raises(ConfigurationError, match="tp · cp · dp · pp is above"):
        read_plan_file(write(tmp_path, text, "job.json"))
