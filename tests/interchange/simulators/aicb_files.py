"""Logs as AICB writes them."""

from __future__ import annotations

from pathlib import Path

from commtrace.interchange.simulators.aicb_csv import COLUMNS

INIT = "CommType.all_reduce,CommGroup.dp_group,4,8,init.model_setup,None,None,,1.5,0.0,0.0,1"
END = "CommType.epoch_end,None,None,0,,None,None,,{},0.0,0.0,1"
GATHER = "CommType.all_gather,CommGroup.tp_group,2,1073741824,forward,None,None,,2.0,500.0,250.0,1"
SEND = "CommType.isend,CommGroup.pp_group,2,512,forward,3,None,,0.25,0.0,0.0,1"
COMPUTE = "CommType.computation,CommGroup.all,None,((2 1 4) (4 8)),forward.Linear,None,None,,4.0,0,0,1"
AICB_LINES = (INIT, END.format(7.0), COMPUTE, GATHER, SEND, END.format(10.0), GATHER, END.format(2.0))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([",".join(COLUMNS), *lines, ""]))
    return path
