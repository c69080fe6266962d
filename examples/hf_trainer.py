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

    step = None
    resumed = None  # the checkpoint to go on from

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        # The model stays without DDP: the step reduces the gradients.
        self.accelerator.prepare_model = lambda model, **_: model

    def start(self):
        model = self.model.train()
        optimizer = self.optimizer.optimizer  # Accelerate has wrapped it

        def loop_step(**inputs):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        mesh = zt.make_mesh("cpu", dp=-1)
        fsdp = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())
        step, state = zt.lift(loop_step, model, optimizer)
        self.step = fsdp(step)
        self.sharded = self.step.shard(state)
        if self.resumed:
            extras = {"scheduler": self.lr_scheduler}
            self.sharded = zt.load(f"{self.resumed}/state", self.sharded, self.step, extras=extras)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.step is None:
            self.start()
        self.sharded, loss = self.step(self.sharded, **self._prepare_inputs(inputs))
        # Gradients stay None, so the Trainer's own optimizer.step() changes nothing.
        return loss.detach()

    def save_model(self, output_dir, _internal_call=False):
        params = self.step.unshard(self.sharded)["params"]
        if torch.distributed.get_rank() == 0:
            self.model.save_pretrained(output_dir, state_dict=params)

    def _save_optimizer_and_scheduler(self, output_dir):
        extras = {"scheduler": self.lr_scheduler}
        zt.save(f"{output_dir}/state", self.sharded, extras=extras).result()

    def _load_optimizer_and_scheduler(self, checkpoint):
        self.resumed = checkpoint


def main(
    steps: int = 40, folder="hf_trainer", *, every: int = 20, trainer: type = ShardedTrainer
) -> list[float]:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    # The lifted step clips gradients itself.
    clip = 1.0 if trainer is Trainer else 0.0
    args = TrainingArguments(
        folder, max_steps=steps, save_steps=every, logging_steps=1, learning_rate=3e-3, warmup_steps=10,
        lr_scheduler_type="constant_with_warmup", use_cpu=True, report_to="none", disable_tqdm=True, max_grad_norm=clip,
    )  # fmt: skip
    rows = stdlib_bytes(1 << 19).long().unflatten(0, (-1, 64))  # each byte is a token
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    training = trainer(model, args, train_dataset=data)
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    training.train(resume_from_checkpoint=checkpoint)
    return [log["loss"] for log in training.state.log_history if "loss" in log]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
