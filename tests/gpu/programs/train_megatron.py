"""The example that trains with megatron-core, with all of its ranks on the first GPU.

torchrun --nproc-per-node 4 tests/gpu/programs/train_megatron.py --tensor 2 --pipeline 2
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.e2e.launch import REPOSITORY
from tests.gpu.programs.nccl_operations import share_one_gpu

if __name__ == "__main__":
    share_one_gpu()
    os.environ["LOCAL_RANK"] = "0"
    script = REPOSITORY / "examples" / "train_megatron_gpt.py"
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
