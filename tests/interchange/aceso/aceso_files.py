"""Profiles and configurations as Aceso writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADER = (
    "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved\n"
)


def operators(*names: str) -> str:
    return HEADER + "".join(f"{name},1000,2000,4,4,8,16,0,0\n" for name in names)


LAYER = (
    "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax", "enc-attention-dropout",
    "enc-attention-context", "enc-attention-dense", "enc-post-attention-dropout", "enc-2nd-layernorm",
    "enc-MLP-GEMM-1", "enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout",
)  # fmt: skip
GPT = ("encoder-embedding", *LAYER, "final-layernorm", "gpt-post-process")


def small_profile(folder: Path) -> None:
    for tp in (1, 2):
        (folder / f"gpt_small_mbs1_tp{tp}_algo0.csv").write_text(operators(*GPT))
    (folder / "p2p_intra_node.csv").write_text("1,2,4,8\n1,2,4,8\n")


def configuration(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "model_name": "gpt",
        "model_size": "small",
        "num_layers": 2,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "num_gpus": [1, 1],
        "num_ops_in_each_stage": [14, 15],
        "model_parallel_size_of_each_op": [[1] * 14, [1] * 15],
        "data_parallel_size_of_each_op": [[1] * 14, [1] * 15],
        "recompute_ops": [[0] * 14, [0] * 15],
        "algo_of_each_op": [[0] * 14, [0] * 15],
    }
    path = folder / "configuration.json"
    path.write_text(json.dumps({**content, **changes}))
    return path
