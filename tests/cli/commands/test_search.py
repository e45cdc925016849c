"""``commtrace search``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from commtrace.cli.main import app
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.synth import Fault
from tests.findings.reading import in_json
from tests.interchange.aceso.aceso_files import configuration, small_profile
from tests.json_schemas import errors
from tests.planning.search.synthetic import LAYOUT, MODEL, record


def run_search(*words: object) -> Result:
    return CliRunner().invoke(app, ["search", *map(str, words)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "run", LAYOUT)


@pytest.fixture(scope="module")
def all_layouts(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is printed as JSON if all layouts of the job are asked for."""
    words = (run, job(tmp_path_factory.mktemp("job")), "--top", "1000", "--json")
    return json.loads(run_search(*words).stdout)


def job(folder: Path, model: Model = MODEL, layout: Layout = LAYOUT) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps({"model": asdict(model), "layout": asdict(layout)}))
    return path


def test_the_fastest_layouts_of_a_recorded_job(run: Path, tmp_path: Path) -> None:
    words = (run, job(tmp_path), "--memory", "60", "--top", "3")
    result, as_json = run_search(*words), json.loads(run_search(*words, "--json").stdout)
    lines = [line.rstrip() for line in result.stdout.splitlines()]

    assert result.exit_code == 0, result.output
    assert lines[0].startswith(f"Fastest of the {as_json['ranked']} of {as_json['layouts']} layouts that fit into 60 ")
    assert as_json["fitting"] + as_json["too_large"] == as_json["layouts"]
    table = next(number for number, line in enumerate(lines) if line.startswith("  step ") and "recompute" in line)
    rows = lines[table + 1 : lines.index("", table)]
    assert [row.endswith("recorded") for row in rows].count(True) == 1
    assert [row.endswith("chosen") for row in rows].count(True) == 1
    assert list(errors("search", as_json)) == []
    best = [one["step_ns"] for one in as_json["best"]]
    assert best == sorted(best)
    assert all(one["peak_bytes"] <= 60 << 30 for one in (*as_json["best"], *as_json["candidates"]))


def test_layouts_whose_order_is_known_come_first_and_the_others_are_candidates(tmp_path: Path) -> None:
    layout = replace(LAYOUT, tp=1, dp=1, expert_tp=0)
    words = (record(tmp_path / "run", layout), job(tmp_path, layout=layout), "--memory", "200")
    printed, as_json = run_search(*words).stdout, json.loads(run_search(*words, "--json").stdout)
    arguments = [line for line in printed.splitlines() if line.startswith("--tensor-model-parallel-size ")]
    sentences = " ".join(printed.split())

    assert " and can be ranked: pp 2 · dp 2 · " in sentences
    assert as_json["chosen"]["assumed"] == ["bandwidth of dp-cp"]
    assert arguments == [" ".join(as_json["chosen"]["arguments"])]
    assert f"{as_json['gain']:.1%} less than in the recorded layout" in sentences
    assert "in the predicted order, by what changes: pp, dp, chunks or layers 19 of 21" in sentences
    assert (
        "Candidates to measure: what they change was not in the predicted order often enough (tp 6 of 22)" in sentences
    )
    assert "Record some steps of one, and search again from that run." in sentences
    assert (
        "The bandwidth of tp alone: torchrun … -m commtrace bench collectives --group 0,1 -o baseline.json" in sentences
    )
    assert {"tp" in one["changes"] for one in as_json["candidates"]} == {True}
    assert not any("tp" in one["changes"] for one in as_json["best"])


def test_the_recorded_layout_is_kept_if_nothing_is_faster_beyond_the_error(tmp_path: Path) -> None:
    """Two GPUs can be divided otherwise only with another tp, whose order is not known."""
    layout = replace(LAYOUT, pp=1, dp=1)
    result = run_search(record(tmp_path / "run", layout), job(tmp_path, layout=layout), "--memory", "200")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Keep the recorded layout: of the ")
    assert "chosen, recorded" in result.stdout


def test_a_recorded_layout_that_does_not_fit_is_said_to(run: Path, tmp_path: Path) -> None:
    printed = " ".join(run_search(run, job(tmp_path), "--memory", "5").stdout.split())

    assert "The recorded layout does not fit: it needs " in printed
    assert " can be ranked: measure some of the candidates below." in printed


@pytest.mark.parametrize(
    ("fault", "beginnings"),
    [
        ("slow-rank=3:1.3", ["The recorded steps have a straggler: rank 3 on node0, compute: "]),
        ("uneven-stage=1:1.5", []),  # other layouts divide the layers otherwise
    ],
)
def test_a_straggler_of_the_recorded_steps_is_named(tmp_path: Path, fault: str, beginnings: list[str]) -> None:
    layout = replace(LAYOUT, tp=1, microbatches=4, expert_tp=0)
    path = record(tmp_path / "run", layout, faults=(Fault.parse(fault),), steps=12)
    words = (path, job(tmp_path, layout=layout), "--memory", "200", "--top", "1", "--json")
    notes = [note for note in json.loads(run_search(*words).stdout)["notes"] if "have a straggler" in note]
    named = in_json(json.loads(CliRunner().invoke(app, ["straggler", str(path), "--json"]).stdout))

    assert len(named) == 1
    assert [note[: len(beginning)] for note, beginning in zip(notes, beginnings, strict=True)] == beginnings


@pytest.mark.parametrize("microbatches", [4, 8, 16, 32])
def test_whatif_and_search_answer_one_question_alike(run: Path, tmp_path: Path, microbatches: int) -> None:
    batch = str(microbatches * LAYOUT.microbatch * LAYOUT.dp)
    words = (run, job(tmp_path), "--top", "1000", "--memory", "1000", "--global-batch", batch, "--json")
    found = json.loads(run_search(*words).stdout)
    own = asdict(replace(LAYOUT, microbatches=microbatches))
    row = next(one for one in found["best"] if one["layout"] == own)
    asked = ["whatif", str(run), "--microbatches", str(microbatches), "--json"]
    answer = json.loads(CliRunner().invoke(app, asked).stdout)

    assert [row[name] for name in ("step_ns", "uncertainty_ns", "uncertainty")] == [
        answer[name] for name in ("predicted_ns", "uncertainty_ns", "uncertainty")
    ]


def test_the_newest_run_is_read_by_default(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commtrace-runs").mkdir()
    (tmp_path / "commtrace-runs" / "run").symlink_to(run)
    monkeypatch.chdir(tmp_path)

    assert f"commtrace-runs/{run.name}: the sizes of its model were not recorded" in run_search().stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("job.yaml",), "search commtrace-runs/latest job.yaml"),
        (("--", "pretrain_gpt.py", "--num-layers", "8"), "search commtrace-runs/latest -- pretrain_gpt.py …"),
        (("--", "train", "--num-layers", "8"), "search commtrace-runs/latest -- train …"),
    ],
)
def test_a_job_without_its_run_is_refused_with_the_command_for_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_search(*words)

    assert result.exit_code == 2
    assert result.stderr.endswith(f"is the job, not its run: name the run first, as in commtrace {command}\n")


def test_a_run_that_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    assert "absent: no such directory" in run_search(tmp_path / "absent", job(tmp_path)).stderr


def test_a_command_of_megatron_gives_the_model(run: Path) -> None:
    command = shlex.split(
        "pretrain_gpt.py --num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 "
        "--max-position-embeddings 4096 --vocab-size 32000 --tensor-model-parallel-size 2 --use-flash-attn "
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16"
    )
    printed = json.loads(run_search(run, "--gpus", "32", "--global-batch", "64", "--json", "--", *command).stdout)

    assert printed["global_batch"] == 64
    assert all(one["layout"]["tp"] * one["layout"]["pp"] * one["layout"]["dp"] == 32 for one in printed["best"])
    assert abs(printed["recorded"]["error"]) < 0.02


@pytest.mark.parametrize(("memory", "printed"), [("1", "1 GiB"), ("0.5GB", "0.4657 GiB")])
def test_if_nothing_fits_it_says_so_and_ends_with_1(run: Path, tmp_path: Path, memory: str, printed: str) -> None:
    result = run_search(run, job(tmp_path), "--memory", memory)

    assert result.exit_code == 1
    assert f"layouts fits into {printed}." in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the sizes of its model were not recorded"),
        (("JOB", "--memory", "0"), "--memory 0: give the memory of a GPU in GiB"),
        (("JOB", "--bandwidth", "tp"), "--bandwidth tp: write a role and a rate, as tp=300GB/s"),
        (("JOB", "--cp", "1,x"), "--cp 1,x: write sizes with commas between them"),
        (("JOB", "--cp", ""), "--cp : write sizes with commas between them"),
        (("JOB", "--ep", "2"), "the model has no experts to divide"),
        (("JOB", "--gpus", "4096", "--global-batch", "3"), "no layout divides 16 layers and a global batch of 3"),
    ],
)
def test_a_run_that_cannot_be_searched_is_an_error_of_the_user(
    run: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    path = str(job(tmp_path))
    result = run_search(run, *(path if word == "JOB" else word for word in words))

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_given_bandwidth_replaces_that_of_the_run(run: Path, all_layouts: Any, tmp_path: Path) -> None:
    words = (run, job(tmp_path), "--top", "1000", "--json", "--bandwidth", "tp=1")
    slow, usual = json.loads(run_search(*words).stdout)["best"], all_layouts["best"]

    assert {one["layout"]["tp"] for one in slow} == {2}
    assert min(one["step_ns"] for one in slow) > 5 * min(one["step_ns"] for one in usual)


def test_fixed_sizes_and_assumptions_are_named(run: Path, all_layouts: Any, tmp_path: Path) -> None:
    words, fixed = (run, job(tmp_path)), all_layouts
    tried = json.loads(run_search(*words, "--top", "1000", "--json", "--cp", "1,2").stdout)

    assert "In all layouts cp is 1, as in the run: --cp 1,2,4 would try others." in fixed["notes"]
    assert {one["layout"]["cp"] for one in fixed["best"]} == {1}
    assert {one["layout"]["cp"] for one in tried["candidates"]} == {1, 2}
    assert all(("cp 2" in one["assumed"]) == (one["layout"]["cp"] == 2) for one in tried["candidates"])
    assert any(note.startswith("Other sizes of cp: ") for note in tried["notes"])
    assert "  cp  " in run_search(*words, "--cp", "2").stdout


def test_parts_that_the_plans_leave_out_are_named(run: Path, tmp_path: Path) -> None:
    layout = replace(LAYOUT, sequence_parallel=True, expert_dispatcher="other")
    experts = job(tmp_path, replace(MODEL, experts=8), layout)
    notes = json.loads(run_search(run, experts, "--json").stdout)["notes"]

    for said in ("Only the communication of the all-to-all token dispatcher", "Tokens are taken to be divided evenly"):
        assert sum(note.startswith(said) for note in notes) == 1


def test_a_configuration_of_aceso(tmp_path: Path) -> None:
    small_profile(tmp_path)
    words = (tmp_path, "--aceso", configuration(tmp_path))
    printed, as_json = run_search(*words).stdout, json.loads(run_search(*words, "--json").stdout)

    sentence = "Aceso predicts 242.00 ms for an iteration of gpt_small and 1,448.00 MiB on the fullest"
    assert " ".join(printed.split()).startswith(sentence)
    assert "*1     1   15.000    30.000      0.000     2.000     2.000     242.00" in printed
    assert list(errors("search", as_json)) == []
    assert as_json["aceso"]["slowest_stage"] == 1


def test_the_search_of_a_profile_writes_what_it_predicts_again(tmp_path: Path) -> None:
    small_profile(tmp_path)
    words = (tmp_path, configuration(tmp_path), "--gpus", "2", "--memory", "2")
    written = tmp_path / "found.json"
    printed, as_json = run_search(*words, "-o", written).stdout, json.loads(run_search(*words, "--json").stdout)
    again = json.loads(run_search(tmp_path, "--aceso", written, "--json").stdout)["aceso"]
    best = as_json["aceso_search"]["best"][0]

    assert printed.startswith("Fastest of ")
    assert "--pipeline-model-parallel-size 2" in printed
    assert list(errors("search", as_json)) == []
    assert (again["iteration_ms"], again["our_iteration_ms"]) == (best["aceso_iteration_ms"], best["iteration_ms"])
    assert (again["memory_mib"], again["our_memory_mib"]) == (best["aceso_memory_mib"], best["memory_mib"])


def test_a_profile_of_which_nothing_fits_ends_with_1(tmp_path: Path) -> None:
    small_profile(tmp_path)
    result = run_search(tmp_path, configuration(tmp_path), "--gpus", "2", "--memory", "0.1")

    assert result.exit_code == 1
    assert result.stdout.startswith("None of ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "2"), "Name a JSON file of the model behind it"),
        (("JOB",), "and give --gpus"),
        (("JOB", "--gpus", "2", "--steps", "1:2"), "leave out --bandwidth, --baseline, --steps, --cp and --ep"),
        (("JOB", "--gpus", "31", "--global-batch", "4"), "no form of gpt_small divides 31 GPUs"),
        (("OTHER", "--gpus", "2"), "does not say which model it is"),
        (("JOB", "--gpus", "2", "--global-batch", "1000000"), "--global-batch: num_layers must be from 1 to 10,000"),
        (("HUGE", "--gpus", "2"), "num_layers must be from 1 to 10,000, global_batch_size from 1 to 65,536"),
        (("--aceso", "HUGE"), "num_layers must be from 1 to 10,000, global_batch_size from 1 to 65,536"),
    ],
)
def test_a_profile_that_cannot_be_searched_is_an_error_of_the_user(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    small_profile(tmp_path)
    other = tmp_path / "other.json"
    other.write_text("{}")
    huge = configuration(tmp_path, num_layers=10**30).rename(tmp_path / "huge.json")
    paths = {"JOB": configuration(tmp_path), "OTHER": other, "HUGE": huge}
    result = run_search(tmp_path, *(paths.get(word, word) for word in words))

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["gpt_small_mbs1_tp1_algo0.csv", "p2p_intra_node.csv"])
def test_a_damaged_file_of_a_profile_is_named(tmp_path: Path, name: str) -> None:
    small_profile(tmp_path)
    (tmp_path / name).write_bytes(b"op_name\n\xff\xfe\x00")
    result = run_search(tmp_path, configuration(tmp_path), "--gpus", "2")

    assert result.exit_code == 2
    assert f"{name} is no text of a profile" in result.stderr
    assert "Copy it again." in result.stderr


def test_a_folder_without_a_profile_is_an_error_of_the_user(tmp_path: Path) -> None:
    result = run_search(tmp_path, "--aceso", configuration(tmp_path))

    assert result.exit_code == 2
    assert "has no profile of Aceso" in result.stderr
