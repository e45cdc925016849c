"""The exporter in a recording session, where the script has a TracerProvider of its own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.launch import run

STEPS = 12
SCRIPT = f"""
import sys
import time
from pathlib import Path

import commtrace.auto

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

provider = TracerProvider()
out = Path(sys.argv[1]).open("w")
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=out, formatter=lambda span: span.name + "\\n")))
trace.set_tracer_provider(provider)
for number in range({STEPS}):
    with commtrace.step(number):
        time.sleep(0.15)
"""


def test_a_provider_that_ends_with_python_gets_the_last_steps(tmp_path: Path) -> None:
    """It was installed after commtrace had begun; what is registered last ends first."""
    pytest.importorskip("torch")
    script, names = tmp_path / "train.py", tmp_path / "names"
    script.write_text(SCRIPT)
    environment = {
        "COMMTRACE_DIR": str(tmp_path / "run"),
        "COMMTRACE_EXPORT": "otlp",
        "COMMTRACE_OTLP_LEVEL": "steps",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    completed = run([sys.executable, str(script), str(names)], environment)

    assert completed.returncode == 0, completed.stdout
    assert Counter(names.read_text().split("\n")[:-1]) == {"step": STEPS, "job step": STEPS}, completed.stdout
    assert "were not exported" not in completed.stdout
