"""Train a small Llama with the Trainer of transformers, whose step ztrans shards. Needs the extra `models`.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py       # 40 steps, and a checkpoint every 20 steps
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py 60    # goes on from the last checkpoint
"""

import sys
from pathlib import Path

import torch
from text import stdlib_bytes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import ztrans as zt


class ShardedTrainer(Trainer):
    """A Trainer whose training step is a lifted loop step: forward, backward, clipping and update in one program."""

    step, resumed = None, None

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: (
            model
        )  # without DDP: the step reduces the gradients

    def start(self):
        optimizer, model = (
            self.optimizer.optimizer,
            self.model.train(),
        )  # Accelerate has wrapped the optimizer

        def loop_step(**inputs):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        fsdp = zt.chain(
            zt.shard_params(zt.make_mesh("cpu", dp=-1)), zt.overlap_grads(), zt.prefetch()
        )
        step, state = zt.lift(loop_step, model, optimizer)
        self.step = fsdp(step)
        self.sharded = self.step.shard(state)
        if self.resumed:
            self.sharded = zt.load(f"{self.resumed}/state", self.sharded, self.step)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.step is None:
            self.start()
        self.sharded, loss = self.step(self.sharded, **self._prepare_inputs(inputs))
        return (
            loss.detach()
        )  # gradients stay None, so the Trainer's own optimizer.step() changes nothing

    def save_model(self, output_dir, _internal_call=False):
        params = self.step.unshard(self.sharded)["params"]
        if torch.distributed.get_rank() == 0:
            self.model.save_pretrained(output_dir, state_dict=params)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        zt.save(f"{output_dir}/state", self.sharded).result()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        self.resumed = checkpoint


def main(
    steps: int = 40, folder="hf_trainer", *, every: int = 20, trainer: type = ShardedTrainer
) -> list[float]:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    args = TrainingArguments(
        folder, max_steps=steps, save_steps=every, logging_steps=1, learning_rate=3e-3, warmup_steps=10,
        lr_scheduler_type="constant_with_warmup", use_cpu=True, report_to="none", disable_tqdm=True,
        max_grad_norm=1.0 if trainer is Trainer else 0.0,
    )  # fmt: skip
    rows = (
        stdlib_bytes(1 << 19).long().unflatten(0, (-1, 64))
    )  # a text of which each byte is a token
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    training = trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )
    training.train(
        resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None
    )
    return [log["loss"] for log in training.state.log_history if "loss" in log]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
