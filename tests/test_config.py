from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import commtrace
from commtrace.config import (
    VARIABLES,
    BaselineConfig,
    Config,
    MonitorConfig,
    OtlpConfig,
    PrometheusConfig,
    TensorboardConfig,
)
from commtrace.errors import ConfigurationError
from commtrace.recording.options import EXPORTERS

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
        "COMMTRACE_QUIET": "1",
        "COMMTRACE_KEEP_STEPS": "1000",
        "COMMTRACE_KEEP_BYTES": "2G",
        "COMMTRACE_SKIP_ROLES": "tp, ep",
        "COMMTRACE_LAYOUT": " pp=4, dp=2",
        "COMMTRACE_TRIGGER_SIGNAL": "sigusr2",
        "COMMTRACE_HANG_SECONDS": "0",
        "COMMTRACE_FINDINGS_SECONDS": "1.5",
        "COMMTRACE_ENGINE": " Native",
        "COMMTRACE_MONITOR_SECONDS": "2.5",
        "COMMTRACE_MONITOR_STORE": "login1:29555",
        "COMMTRACE_MONITOR_TOKEN": "0123456789abcdef",
        "COMMTRACE_MONITOR_WEBHOOK": "http://hook",
        "COMMTRACE_MONITOR_WEBHOOK_FORMAT": " Slack",
        "COMMTRACE_MONITOR_WEBHOOK_KEY": "key",
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
        "COMMTRACE_TENSORBOARD_DIR": "tb",
        "COMMTRACE_BASELINE_FILE": "baseline.json",
        "COMMTRACE_GRAPHS": "OFF",
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
        quiet=1,
        keep_steps=1000,
        keep_bytes=2_000_000_000,
        skip_roles=("tp", "ep"),
        layout="pp=4, dp=2",
        trigger_signal="SIGUSR2",
        hang_seconds=0.0,
        findings_seconds=1.5,
        engine="native",
        graphs="off",
        monitor=MonitorConfig(
            seconds=2.5,
            store="login1:29555",
            token="0123456789abcdef",
            webhook="http://hook",
            webhook_format="slack",
            webhook_key="key",
        ),
        prometheus=PrometheusConfig(
            port=9400,
            address="0.0.0.0",
            targets="targets",
            identity=True,
            textfile="textfiles",
            certfile="c.pem",
            keyfile="k.pem",
            client_cafile="ca.pem",
            auth_file="auth",
        ),
        otlp=OtlpConfig(
            level="modules",
            sample=10,
            ranks="0, 8:64:8",
            file="lines",
            metrics=True,
            process=False,
            provider=False,
        ),
        tensorboard=TensorboardConfig(dir="tb"),
        baseline=BaselineConfig(file="baseline.json"),
    )


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
def test_an_unusable_value_is_named_with_what_to_write(name: str, value: str, said: str | None) -> None:
    if said is None:
        assert Config.from_env({name: value}).steps == value
        return
    with pytest.raises(ConfigurationError, match=re.escape(said)) as error:
        Config.from_env({name: value})
    assert "secret" not in str(error.value)
    assert len(str(error.value)) < 300


def test_an_empty_choice_of_steps_is_all_steps() -> None:
    assert Config.from_env({"COMMTRACE_STEPS": ""}).steps == ""


def _value(config: Config, variable: str) -> Any:
    section, name, _ = VARIABLES[variable]
    return getattr(getattr(config, section) if section else config, name)


def _row(variable: str) -> str:
    """The row of docs/environment-variables.md that says what is declared of an option."""
    default = _value(Config(), variable)
    shown = f"`{default:g}`" if isinstance(default, int | float) else f"`{default}`" if default else "–"
    declared = VARIABLES[variable].option
    return f"| `{variable}` | {declared.meaning} | {shown} | `{declared.example}` |"


def test_the_documentation_says_what_is_declared() -> None:
    text = (ROOT / "docs" / "environment-variables.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `COMMTRACE_")]

    assert table == [_row(variable) for variable in VARIABLES]


def test_every_example_is_one_and_changes_its_option() -> None:
    together = {"COMMTRACE_PROMETHEUS_CERTFILE": "c.pem", "COMMTRACE_PROMETHEUS_KEYFILE": "k.pem"}
    for variable, (_, _, declared) in VARIABLES.items():
        given = {**(together if "FILE" in variable else {}), variable: declared.example}
        assert _value(Config.from_env(given), variable) != _value(Config(), variable), variable


def test_only_the_configuration_reads_variables_of_commtrace() -> None:
    """`commtrace run` and `commtrace bench overhead` set them, as a rank does for the processes beside it."""
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
        "commtrace/cli/commands/bench_overhead.py",
        "commtrace/cli/commands/run.py",
        "commtrace/cli/ended_command.py",
        "commtrace/trace/side_process.py",
    }


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("500M", 5 * 10**8), ("2GB", 2 * 10**9), ("1.5GiB", 3 << 29), ("1500000", 1500000), ("0", 0)],
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
        ConfigurationError,
        match="COMMTRACE_EXPORT='promethues': write any of mlflow, monitor, otlp, prometheus, tensorboard, wandb",
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
    monitor = MonitorConfig(token="a-secret-of-the-ranks", webhook="https://hooks/a-secret-of-the-ranks")
    assert "secret" not in repr(Config(monitor=monitor))


GIVEN: Any = Config
"""Whatever its types say, people write other values."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GIVEN(buffer_spans=0), "buffer_spans=0: write a whole number of at least 1, at most 10000000"),
        (lambda: GIVEN(buffer_spans=10**12), "buffer_spans=1000000000000: write a whole number"),
        (lambda: GIVEN(buffer_spans=True), "buffer_spans=True: write a whole number"),
        (lambda: GIVEN(steps_per_segment=0), "steps_per_segment=0: write a whole number of at least 1"),
        (lambda: GIVEN(sample=-1), "sample=-1: write a whole number of at least 0"),
        (lambda: GIVEN(keep_steps=1.5), "keep_steps=1.5: write a whole number of at least 0"),
        (lambda: GIVEN(keep_bytes=-5), "keep_bytes=-5: write bytes, at least 1M"),
        (lambda: GIVEN(skip_roles="tp"), "skip_roles='tp': write names"),
        (lambda: GIVEN(dir=5), "dir=5: write a path"),
        (lambda: GIVEN(steps="5:1"), "steps '5:1' holds no step"),
        (lambda: GIVEN(modules="depth=-1"), "modules 'depth=-1': write depth=N"),
        (
            lambda: GIVEN(export="carrier pigeon"),
            "export='carrier pigeon': write any of mlflow, monitor, otlp, prometheus, tensorboard, wandb",
        ),
        (lambda: GIVEN(trigger_signal="SIGKILL"), "trigger_signal='SIGKILL': write one of SIGUSR1"),
        (lambda: GIVEN(hang_seconds=-1.0), "hang_seconds=-1.0: write a number of seconds from 0.5 to 3600, or 0"),
        (lambda: MonitorConfig(seconds=0), "monitor.seconds=0: write a number of seconds from 0.5 to 3600"),
        (lambda: MonitorConfig(seconds=float("nan")), "monitor.seconds=nan: write a number of seconds"),
        (lambda: MonitorConfig(token="a secret"), "monitor.token: write 16 to 256"),
        (lambda: PrometheusConfig(port=70_000), "prometheus.port=70000: write a port number"),
        (lambda: PrometheusConfig(certfile="c.pem"), "prometheus: TLS needs both, certfile and keyfile"),
        (lambda: OtlpConfig(level="all"), "otlp.level='all': write one of none, steps"),
        (lambda: OtlpConfig(ranks="0,x"), "otlp.ranks='0,x': write ranks, such as 0,8"),
        (lambda: GIVEN(monitor={"seconds": 2}), "monitor={'seconds': 2}: write MonitorConfig(…), of commtrace.config"),
        (
            lambda: GIVEN(monitor_seconds=2),
            "monitor_seconds is now monitor=MonitorConfig(seconds=…), with "
            "`from commtrace.config import MonitorConfig`",
        ),
        (
            lambda: GIVEN(otlp_level="steps"),
            "otlp_level is now otlp=OtlpConfig(level=…), with `from commtrace.config import OtlpConfig`",
        ),
    ],
)
def test_a_wrong_configuration_raises_where_the_script_writes_it(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        make()
    assert isinstance(error.value, commtrace.CommtraceError)
    assert "secret" not in str(error.value)


def test_a_name_that_no_option_ever_had_is_a_type_error() -> None:
    wrong: Any = {"monitor_sekonds": 2}
    with pytest.raises(TypeError, match="monitor_sekonds"):
        Config(**wrong)


def test_usual_configurations_of_scripts_are_taken(tmp_path: Path) -> None:
    config = Config(
        dir=tmp_path, hang_seconds=0, skip_roles=("tp",), keep_bytes=10**7, monitor=MonitorConfig(seconds=5)
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, steps="3:5").monitor.seconds == 5
