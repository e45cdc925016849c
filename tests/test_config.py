from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from commtrace.config import EXPORTERS, VARIABLES, Config
from commtrace.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]


def test_without_variables_the_defaults_hold() -> None:
    assert Config.from_env({"PATH": "/bin", "NCCL_DEBUG": "INFO"}) == Config()


def test_every_variable_sets_its_option() -> None:
    environment = {
        "COMMTRACE_ENABLED": "0",
        "COMMTRACE_DIR": " runs/a ",
        "COMMTRACE_RUN_ID": "r1",
        "COMMTRACE_STEPS": "100:110",
        "COMMTRACE_NODE_ID": "n2",
        "COMMTRACE_BUFFER_SPANS": "5000",
        "COMMTRACE_STEPS_PER_SEGMENT": "20",
        "COMMTRACE_MODULES": "depth=2 ",
        "COMMTRACE_EXPORT": "prometheus",
        "COMMTRACE_SAMPLE": "50",
        "COMMTRACE_KEEP_STEPS": "1000",
        "COMMTRACE_KEEP_BYTES": "2G",
        "COMMTRACE_SKIP_ROLES": "tp, ep",
        "COMMTRACE_TRIGGER_SIGNAL": "sigusr2",
        "COMMTRACE_HANG_SECONDS": "0",
        "COMMTRACE_MONITOR_SECONDS": "2.5",
        "COMMTRACE_MONITOR_STORE": "login1:29555",
        "COMMTRACE_MONITOR_TOKEN": "0123456789abcdef",
        "COMMTRACE_MONITOR_WEBHOOK": "http://hook",
        "COMMTRACE_PROMETHEUS_PORT": "9400",
        "COMMTRACE_PROMETHEUS_ADDRESS": "0.0.0.0",
        "COMMTRACE_PROMETHEUS_TARGETS": "targets",
        "COMMTRACE_PROMETHEUS_IDENTITY": "yes",
        "COMMTRACE_PROMETHEUS_TEXTFILE": "textfiles",
        "COMMTRACE_PROMETHEUS_CERTFILE": "c.pem",
        "COMMTRACE_PROMETHEUS_KEYFILE": "k.pem",
        "COMMTRACE_PROMETHEUS_CLIENT_CAFILE": "ca.pem",
        "COMMTRACE_PROMETHEUS_AUTH_FILE": "auth",
        "COMMTRACE_OTLP_LEVEL": "Modules",
        "COMMTRACE_OTLP_SAMPLE": "10",
        "COMMTRACE_OTLP_RANKS": "0, 8:64:8 ",
        "COMMTRACE_OTLP_FILE": "lines",
        "COMMTRACE_OTLP_METRICS": "1",
        "COMMTRACE_OTLP_PROCESS": "0",
        "COMMTRACE_OTLP_PROVIDER": "0",
    }

    assert set(environment) == set(VARIABLES)
    assert Config.from_env(environment) == Config(
        enabled=False,
        dir="runs/a",
        run_id="r1",
        steps="100:110",
        node_id="n2",
        buffer_spans=5000,
        steps_per_segment=20,
        modules="depth=2",
        export="prometheus",
        sample=50,
        keep_steps=1000,
        keep_bytes=2_000_000_000,
        skip_roles=("tp", "ep"),
        trigger_signal="SIGUSR2",
        hang_seconds=0.0,
        monitor_seconds=2.5,
        monitor_store="login1:29555",
        monitor_token="0123456789abcdef",
        monitor_webhook="http://hook",
        prometheus_port=9400,
        prometheus_address="0.0.0.0",
        prometheus_targets="targets",
        prometheus_identity=True,
        prometheus_textfile="textfiles",
        prometheus_certfile="c.pem",
        prometheus_keyfile="k.pem",
        prometheus_client_cafile="ca.pem",
        prometheus_auth_file="auth",
        otlp_level="modules",
        otlp_sample=10,
        otlp_ranks="0, 8:64:8",
        otlp_file="lines",
        otlp_metrics=True,
        otlp_process=False,
        otlp_provider=False,
    )


def test_every_option_has_a_variable() -> None:
    assert {f"COMMTRACE_{field.name.upper()}" for field in fields(Config)} == set(VARIABLES)


@pytest.mark.parametrize(
    ("word", "enabled"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off ", False),
    ],
)
def test_words_for_on_and_off(word: str, enabled: bool) -> None:
    assert Config.from_env({"COMMTRACE_ENABLED": word}).enabled is enabled


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMMTRACE_ENABLED", "maybe", "COMMTRACE_ENABLED='maybe': write 1 or 0"),
        ("COMMTRACE_STEPS", "5", None),
        ("COMMTRACE_STEPS", "ten", "steps 'ten': write A:B"),
        ("COMMTRACE_STEPS", "9:3", "steps '9:3' holds no step"),
        ("COMMTRACE_BUFFER_SPANS", "0", "COMMTRACE_BUFFER_SPANS='0': write a whole number of at least 1"),
        ("COMMTRACE_STEPS_PER_SEGMENT", "1.5", "COMMTRACE_STEPS_PER_SEGMENT='1.5': write a whole number"),
        ("COMMTRACE_PROMETHEUS_PORT", "70000", "COMMTRACE_PROMETHEUS_PORT='70000': write a port number, or 0"),
        ("COMMTRACE_OTLP_LEVEL", "all", "COMMTRACE_OTLP_LEVEL='all': write one of none, steps, phases, communication"),
        ("COMMTRACE_OTLP_RANKS", "0,x", "COMMTRACE_OTLP_RANKS='0,x': write ranks, such as 0,8 or 0:64:8"),
        ("COMMTRACE_OTLP_SAMPLE", "0", "COMMTRACE_OTLP_SAMPLE='0': write a whole number of at least 1"),
        ("COMMTRACE_MODULES", "depth=two", "modules 'depth=two': write depth=N"),
        ("COMMTRACE_MODULES", "layers.,x", "modules 'layers.': write depth=2, or names"),
        ("COMMTRACE_MODULES", "re:layers[", "modules 're:layers[' is no regular expression"),
        ("COMMTRACE_PROMETHEUS_PORT", "²", "COMMTRACE_PROMETHEUS_PORT='\\xb2': write a port number"),
        ("COMMTRACE_PROMETHEUS_PORT", "٣", "COMMTRACE_PROMETHEUS_PORT='\\u0663': write a port number"),
        ("COMMTRACE_KEEP_STEPS", "9" * 5_000, "999'…: write a whole number of at least 0"),
        ("COMMTRACE_STEPS", "9" * 5_000, "write A:B"),
        ("COMMTRACE_STEPS", "٣:٤", "write A:B"),
        ("COMMTRACE_KEEP_BYTES", "9" * 5_000, "write bytes"),
        ("COMMTRACE_HANG_SECONDS", "9" * 5_000, "from 0.5 to 3600"),
        ("COMMTRACE_BUFFER_SPANS", "1000000000000", "write a whole number of at least 1, at most 10000000"),
        ("COMMTRACE_TRIGGER_SIGNAL", "SIGKILL", "write one of SIGUSR1, SIGUSR2"),
        ("COMMTRACE_TRIGGER_SIGNAL", "SIGSTOP", "write one of SIGUSR1, SIGUSR2"),
        ("COMMTRACE_TRIGGER_SIGNAL", "SIGSEGV", "write one of SIGUSR1, SIGUSR2"),
        ("COMMTRACE_TRIGGER_SIGNAL", "SIGCHLD", "write one of SIGUSR1, SIGUSR2"),
        ("COMMTRACE_TRIGGER_SIGNAL", "SIG_DFL", "write one of SIGUSR1, SIGUSR2"),
        ("COMMTRACE_NODE_ID", "a\x1b]0;b", "COMMTRACE_NODE_ID='a\\x1b]0;b': write at most 200 printable"),
        ("COMMTRACE_NODE_ID", "\udcff", "COMMTRACE_NODE_ID='\\udcff': write at most 200 printable"),
        ("COMMTRACE_MONITOR_TOKEN", "a secret", "COMMTRACE_MONITOR_TOKEN: write 16 to 256"),
        ("COMMTRACE_MONITOR_WEBHOOK", "file:///etc/a-secret", "COMMTRACE_MONITOR_WEBHOOK: write a URL that begins"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_to_write(name: str, value: str, said: str | None) -> None:
    if said is None:
        assert Config.from_env({name: value}).steps == value
        return
    with pytest.raises(ConfigurationError, match=re.escape(said)) as error:
        Config.from_env({name: value})
    assert "secret" not in str(error.value)
    assert len(str(error.value)) < 300


def test_an_empty_choice_of_steps_is_all_steps() -> None:
    assert Config.from_env({"COMMTRACE_STEPS": ""}).steps == ""


def _table() -> list[list[str]]:
    text = (ROOT / "docs" / "environment-variables.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `COMMTRACE_")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def _as_default(variable: str, cell: str) -> Any:
    return VARIABLES[variable](variable, "" if cell == "–" else cell)


def test_the_documented_variables_are_those_that_are_read() -> None:
    assert [row[0] for row in _table()] == list(VARIABLES)


@pytest.mark.parametrize("row", _table(), ids=lambda row: row[0])
def test_a_documented_variable_has_its_meaning_its_default_and_an_example_that_works(row: list[str]) -> None:
    variable, meaning, default, example = row
    field = variable.removeprefix("COMMTRACE_").lower()

    assert len(meaning) > 20
    assert _as_default(variable, default) == getattr(Config(), field)
    assert getattr(Config.from_env({variable: example}), field) != getattr(Config(), field)


def test_only_the_configuration_reads_variables_of_commtrace() -> None:
    """`commtrace run`, `commtrace bench` and the OTLP exporter set them, for the processes that they start."""
    package = ROOT / "commtrace"
    roots = [package, ROOT / "integrations", ROOT / "exporters", ROOT / "viewer"]
    sources = {path for root in roots for path in root.rglob("*.py")}
    named = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"COMMTRACE_\w+", node.value)
    }

    assert named == {
        "commtrace/config.py",
        "commtrace/cli/bench.py",
        "commtrace/cli/run.py",
        "exporters/otlp/process.py",
    }


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("500M", 5 * 10**8), ("2GB", 2 * 10**9), ("1500000", 1500000), ("0", 0)]
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert Config.from_env({"COMMTRACE_KEEP_BYTES": text}).keep_bytes == num_bytes


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("COMMTRACE_KEEP_BYTES", "100K"),
        ("COMMTRACE_KEEP_BYTES", "lots"),
        ("COMMTRACE_KEEP_STEPS", "-1"),
        ("COMMTRACE_SAMPLE", "1/2"),
        ("COMMTRACE_TRIGGER_SIGNAL", "USR9"),
    ],
)
def test_control_that_cannot_be_meant_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        Config.from_env({variable: value})


def test_an_exporter_that_is_not_known_is_refused_before_the_job_starts() -> None:
    with pytest.raises(
        ConfigurationError, match="COMMTRACE_EXPORT='promethues': write any of monitor, otlp, prometheus"
    ):
        Config.from_env({"COMMTRACE_EXPORT": "promethues"})
    assert Config.from_env({"COMMTRACE_EXPORT": " Monitor, otlp "}).export == "Monitor, otlp"


def test_exporters_that_can_be_named_are_those_that_can_be_opened() -> None:
    from commtrace.exporters.live import LISTENERS

    assert sorted(EXPORTERS) == sorted(LISTENERS)


def test_a_variable_that_is_not_known_is_a_warning_that_names_the_nearest_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Config.from_env({"COMMTRACE_SAMPEL": "5", "COMMTRACE_QXZ\x1b": "1", "COMMTRACE_STEPS": "5:9"}) == Config(
        steps="5:9"
    )
    assert [record.getMessage() for record in caplog.records] == [
        "commtrace does not know the variable 'COMMTRACE_QXZ\\x1b', and ignores it; "
        "docs/environment-variables.md lists what it reads.",
        "commtrace does not know the variable 'COMMTRACE_SAMPEL', and ignores it; did you mean COMMTRACE_SAMPLE?",
    ]


def test_variables_that_our_examples_use_are_known(caplog: pytest.LogCaptureFixture) -> None:
    files = [
        path
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and path.suffix in (".yml", ".sh", ".py", ".md")
    ]
    used = {name for path in files for name in re.findall(r"\bCOMMTRACE_[A-Z_]+", path.read_text())}
    assert used
    assert used <= set(VARIABLES)


def test_secrets_are_not_in_what_is_printed_of_a_configuration() -> None:
    config = Config(monitor_token="a-secret-of-the-ranks", monitor_webhook="https://hooks/a-secret-of-the-ranks")
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    "options", [{"buffer_spans": 10**12}, {"trigger_signal": "SIGKILL"}, {"monitor_token": "short"}]
)
def test_a_configuration_that_a_script_makes_is_checked_as_well(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Config(**options).check()
