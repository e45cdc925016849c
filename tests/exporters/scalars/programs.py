"""Programs that log to real runs of W&B and MLflow, each in a process of its own, and print what is in the run then.

python -m tests.exporters.scalars.programs wandb
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from commtrace.exporters.scalars.series import DatedEvent, Point
from commtrace.exporters.scalars.trackers import MlflowRuns, WandbRuns
from commtrace.findings.status import LiveEvent
from tests.live.findings import SECOND, silent_finding

STOPPED = LiveEvent("found", SECOND, silent_finding(2), "Training has stopped.")


def write(sink: WandbRuns | MlflowRuns, step: int, *findings: DatedEvent) -> None:
    """Write a point if the place is ready, on a thread of its own as the exporter does."""

    def written() -> None:
        points = [Point("rank_0", step, 1_000.0 + step, {"step_seconds": step / 10})] if sink.is_ready() else []
        sink.write(points, findings)

    thread = threading.Thread(target=written)
    thread.start()
    thread.join()


def log_to_wandb() -> Any:
    import wandb

    sink = WandbRuns()
    write(sink, 1)  # no run is open
    wandb.init(project="p", mode="offline", settings=wandb.Settings(console="off", silent=True))
    write(sink, 2)
    write(sink, 3)  # its row is still open
    wandb.log({"loss": 0.1})
    write(sink, 4)
    wandb.log({"loss": 0.2}, step=50)
    write(sink, 5)
    wandb.log({"accuracy": 0.5}, step=50)
    wandb.log({"loss": 0.3}, step=60)
    write(sink, 6, DatedEvent(6, STOPPED))
    wandb.finish()
    write(sink, 7)
    wandb.teardown()
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")
    return rows_of(file)


def rows_of(file: Path) -> Any:
    """Return rows, x axes and the findings in a file of W&B: records of one block of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, at = file.read_bytes(), 7
    rows, axes, findings = [], {}, ""
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record of several blocks"
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            cells = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in cells.items() if name not in ("_timestamp", "_runtime")})
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.glob_name] = record.metric.step_metric
        for item in record.summary.update:
            if item.key == "commtrace/findings":
                findings = json.loads(item.value_json)
    return {"rows": rows, "axes": axes, "findings": findings}


def log_to_mlflow() -> Any:
    import mlflow

    mlflow.set_tracking_uri(Path("runs").absolute().as_uri())
    sink = MlflowRuns()
    write(sink, 1)  # no run is open
    with mlflow.start_run() as run:
        write(sink, 2)
        write(sink, 3, DatedEvent(3, STOPPED))
    write(sink, 4)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "commtrace/rank_0/step_seconds")
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    return {
        "points": [(metric.timestamp, metric.step, metric.value) for metric in history],
        "findings": (artifacts / "commtrace" / "findings.txt").read_text(),
    }


if __name__ == "__main__":
    result = {"wandb": log_to_wandb, "mlflow": log_to_mlflow}[sys.argv[1]]()
    print(json.dumps(result))
