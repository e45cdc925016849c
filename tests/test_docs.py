"""The documentation promises only what is there: commands, options, files, links, variables."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import COMMANDS, GROUPS, app, load_command
from commtrace.config import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)


def _commands() -> Iterator[tuple[str, str]]:
    """Page and command line of everything behind a ``$`` in a console block."""
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    yield page.name, line.removeprefix("$ ").partition("  #")[0].strip()


COMMAND_LINES = sorted(set(_commands()))


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_a_command_in_the_documentation_can_be_given(page: str, line: str) -> None:
    words = shlex.split(line)
    checks = {
        "commtrace": _check_commtrace,
        "make": _check_make,
        "pip": _check_pip,
        "python": _check_script,
        "torchrun": _check_script,
        "git": lambda words: None,
        "cd": lambda words: None,
    }
    program = Path(words[0]).name
    assert program in checks, f"{page}: nothing here knows how to check `{line}`"
    checks[program](words[1:])


def _check_commtrace(words: list[str]) -> None:
    """The command exists and parses these arguments; nothing is executed."""
    if words[0].startswith("--"):
        assert words[0] in {"--version", "--help"}
        return
    number = 2 if words[0] in GROUPS else 1
    name, arguments = " ".join(words[:number]), words[number:]
    assert name in COMMANDS
    command = load_command(name)
    if name == "run":
        assert "--" in arguments
        _check_training_command(arguments[arguments.index("--") + 1 :])
    command.make_context(name, arguments, resilient_parsing=False)


def _check_training_command(words: list[str]) -> None:
    if words[0] in {"torchrun", "python"}:
        _check_script(words[1:])


def _check_script(words: list[str]) -> None:
    """The script is there, unless it is the reader's own ``train.py``, and names every option that it is given."""
    if "-m" in words:
        module, *arguments = words[words.index("-m") + 1 :]
        assert module == "commtrace"
        _check_commtrace(arguments)
        return
    scripts = [word for word in words if word.endswith(".py")]
    assert len(scripts) == 1
    if scripts == ["train.py"]:
        return
    source = (ROOT / scripts[0]).read_text()
    if "parse_known_args" in source:  # the demo hands what it does not know to the training script
        source += (ROOT / "examples" / "train_megatron_gpt.py").read_text()
    for option in words[words.index(scripts[0]) + 1 :]:
        if option.startswith("--"):
            assert f'"{option}"' in source, f"{scripts[0]} has no option {option}"


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets)
    variables = [word.partition("=")[0] for word in words if "=" in word]
    assert all(re.search(rf"^{re.escape(variable)} \?=", makefile, re.MULTILINE) for variable in variables)


def _check_pip(words: list[str]) -> None:
    extras = importlib.metadata.metadata("commtrace").get_all("Provides-Extra")
    assert extras is not None
    assert words[0] in {"install", "wheel"}
    for named in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(named.split(",")) <= set(extras)


def test_the_output_in_the_readme_is_that_of_the_job_in_its_picture(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(ROOT / "tools" / "pictures.py"))
    run = str(tmp_path / "gpt")
    runner = CliRunner()
    made = runner.invoke(app, ["synth", "-o", run, *pictures["JOB"], *pictures["FAULT"]])
    assert made.exit_code == 0, made.output
    printed = " ".join(runner.invoke(app, ["straggler", run]).stdout.split())

    (block,) = re.findall(r"^```text\n\$ commtrace straggler\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    place = 0
    for sentence in re.split(r"\n(?=\S|  Rank|  To keep)", block.strip()):  # other lines go on with the one before
        place = printed.find(" ".join(sentence.split()), place)
        assert place >= 0, sentence


def test_the_plan_in_the_documentation_is_what_is_printed() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    command, printed = re.findall(r"^```(?:console|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    words = shlex.split(command.removeprefix("$ commtrace ").replace("\\\n", " "))
    result = CliRunner().invoke(app, words)

    assert result.exit_code == 1, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.splitlines()


def test_the_times_of_a_plan_in_the_documentation_are_what_is_printed() -> None:
    _, section = (ROOT / "docs" / "plan.md").read_text().split("## Is the network fast enough?")
    command, printed = re.findall(r"^```(?:console|text)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:2]
    result = CliRunner().invoke(app, shlex.split(command.removeprefix("$ commtrace ").replace("\\\n", " ")))

    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[-len(printed.splitlines()) :] == printed.splitlines()


def test_the_prediction_in_the_documentation_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "whatif.md").read_text()
    commands, printed = re.findall(r"^```(?:console|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        result = CliRunner().invoke(app, shlex.split(line.removeprefix("$ commtrace ")))
        assert result.exit_code == 0, result.output

    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.splitlines()


def test_the_search_in_the_documentation_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "search.md").read_text()
    (job,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(Fastest of the .*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(job)
    for command in ("synth -o gpt ", "search gpt job.yaml --memory "):
        (words,) = re.findall(rf"^\$ commtrace ({command}.*)$", page, re.MULTILINE)
        result = CliRunner().invoke(app, shlex.split(words))
        assert result.exit_code == 0, result.output

    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.splitlines()


def test_every_command_is_documented() -> None:
    lines = [shlex.split(line) for _, line in COMMAND_LINES]
    behind = [words[words.index("commtrace") + 1 :] for words in lines if "commtrace" in words]
    used = {" ".join(words[: 2 if words[0] in GROUPS else 1]) for words in behind}

    assert set(COMMANDS) <= used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", page.read_text()):
        if target and "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_meet_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]*)\)", page.read_text()):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_variables_that_exist_are_named(page: Path) -> None:
    assert set(re.findall(r"(?<![A-Z]_)COMMTRACE_[A-Z][A-Z_]*[A-Z]", page.read_text())) <= set(VARIABLES)


@pytest.mark.parametrize("name", ["launchers.md", "slurm.md", "kubernetes.md"])
def test_a_recipe_is_run_by_a_test_or_says_that_it_is_not(name: str) -> None:
    before, *blocks = re.split(r"^```\w*\n", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)
    for block, words in zip(blocks[::2], [before, *blocks[1::2]], strict=False):
        is_run = re.search(r"^<!-- run: .* -->\n\Z", words, re.MULTILINE)
        assert is_run or "Not run by a test" in words, f"{name}: nobody runs\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_recipe_that_is_said_to_be_run_is(page: Path) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "e2e" / "launchers").glob("test_*.py"))
    names = re.findall(r"^<!-- run: (.*) -->$", page.read_text(), re.MULTILINE)
    assert [name for name in names if f'"{name}"' not in tests] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()

    assert [
        page.name for page in PAGES if page.parent.name == "docs" and page.name not in {"index.md"} | _linked(index)
    ] == []


def _linked(text: str) -> set[str]:
    return set(re.findall(r"\]\(([\w-]+\.md)\)", text))


def test_names_in_the_glossary_exist() -> None:
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    modules = [
        path for package in ("commtrace", "exporters", "integrations") for path in (ROOT / package).rglob("*.py")
    ]
    words = set(re.findall(r"\w+", "".join(module.read_text() for module in modules)))

    assert len(names) > 50
    assert sorted(names - words) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    present = {path.name for path in (ROOT / "tests").rglob("test_*.py")}

    assert set(re.findall(r"\btest_\w+\.py", page.read_text())) - present == set()
