"""Train a small Llama with the Trainer of transformers, on bytes of the standard library's source, sharded by ztrans.

Only the training step is replaced; data, schedule, logs, callbacks and checkpoints are the Trainer's own. Needs
transformers and accelerate.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 40    # writes a checkpoint every 20 steps
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 60    # goes on from the last checkpoint
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --plain       # the Trainer alone, with equal losses
"""

import argparse

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
        self.accelerator.prepare_model = lambda model, **_: model  # without DDP: the step reduces the gradients

    def start(self):
        optimizer, model = self.optimizer.optimizer, self.model  # Accelerate has wrapped the optimizer

        def loop_step(input_ids, labels):
            optimizer.zero_grad()
            loss = model(input_ids=input_ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        step, state = zt.lift(loop_step, model.train(), optimizer)
        mesh = zt.make_mesh(self.args.device.type, dp=-1)
        self.step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
        self.sharded = self.step.shard(state)
        if self.resumed:
            self.sharded = zt.load(f"{self.resumed}/state", self.step, self.sharded)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.step is None:
            self.start()
        self.sharded, loss = self.step(self.sharded, **self._prepare_inputs(inputs))
        return loss.detach()  # gradients stay None, so the Trainer's own optimizer.step() changes nothing

    def save_model(self, output_dir=None, _internal_call=False):
        folder = output_dir or self.args.output_dir
        zt.save(f"{folder}/model.safetensors", self.sharded["params"]).result()
        self.model.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        zt.save(f"{output_dir}/state", self.sharded).result()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        self.resumed = checkpoint


def main(folder: str = "hf_trainer", *, steps: int = 40, plain: bool = False) -> list[float]:
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    rows = stdlib_bytes(1 << 19).long().unflatten(0, (-1, 64))
    settings = dict(max_steps=steps, save_steps=20, logging_steps=1, learning_rate=3e-3, max_grad_norm=1.0 if plain else 0)
    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, **settings)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = (Trainer if plain else ShardedTrainer)(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if torch.os.path.isdir(folder) else None)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="hf_trainer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plain", action="store_true")
    main(**vars(parser.parse_args()))
