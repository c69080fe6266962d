"""The Trainer of transformers alone, and as `examples/hf_trainer.py` shards it, with a checkpoint in the middle.

torchrun --standalone --nproc-per-node 2 tests/support/hf_training.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

if __name__ == "__main__":
    import hf_trainer
    from transformers import LlamaForCausalLM, Trainer

    torch.set_num_threads(1)
    folder = sys.argv[1]
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints what it logs
        plain = hf_trainer.main(6, f"{folder}/plain", every=6, trainer=Trainer)
        first = hf_trainer.main(3, f"{folder}/sharded", every=3)
        resumed = hf_trainer.main(6, f"{folder}/sharded", every=3)
    if os.environ["RANK"] == "0":
        models = [
            LlamaForCausalLM.from_pretrained(f"{folder}/{name}/checkpoint-6")
            for name in ("plain", "sharded")
        ]
        apart = max(
            (a - b).abs().max().item() for a, b in zip(*(model.parameters() for model in models))
        )
        sys.stdout.write(
            json.dumps({"plain": plain, "first": first, "resumed": resumed, "apart": apart}) + "\n"
        )
