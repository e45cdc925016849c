"""``commtrace search``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.json_schemas import errors
from tests.search.test_aceso import configuration, small_profile


def run_search(*words: object) -> Result:
    return CliRunner().invoke(app, ["search", *map(str, words)])


def test_a_configuration_of_aceso(tmp_path: Path) -> None:
    small_profile(tmp_path)
    words = (tmp_path, "--aceso", configuration(tmp_path))
    printed, as_json = run_search(*words).stdout, json.loads(run_search(*words, "--json").stdout)

    assert printed.startswith("Aceso predicts 242.00 ms for an iteration of gpt_small and 1,448.00 MiB on the fullest")
    assert "*1     1   15.000    30.000      0.000     2.000     2.000     242.00" in printed
    assert list(errors("search", as_json)) == []
    assert as_json["aceso"]["slowest_stage"] == 1


def test_a_folder_without_a_profile_is_an_error_of_the_user(tmp_path: Path) -> None:
    result = run_search(tmp_path, "--aceso", configuration(tmp_path))

    assert result.exit_code == 2
    assert "has no profile of Aceso" in result.stderr
