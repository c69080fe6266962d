"""Finetune a small Llama with LoRA adapters of peft, sharded over all ranks. Needs the extra `models`.

The weights of the base model are frozen: they are sharded and gathered as all parameters are, but have neither a
gradient to reduce nor a state of the optimizer. Only the adapters are saved.

python examples/finetune_lora.py                                        # one process
torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py      # two processes
"""

from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from text import draw, stdlib_bytes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ztrans as zt


def make_base() -> LlamaForCausalLM:
    """The model to finetune. A real one comes from LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


Loop = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]]


def make_loop(lr: float = 1e-2) -> Loop:
    """The model with its adapters, their optimizer, and the body of an ordinary loop."""
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules="all-linear", modules_to_save=["lm_head"]
    )
    model = get_peft_model(make_base(), adapters)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)

    def loop_step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, loop_step


def main(steps: int = 60, batch: int = 16, folder: str = "adapters") -> list[float]:
    mesh = zt.make_mesh("cpu", dp=-1)
    model, optimizer, loop_step = make_loop()
    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    text = stdlib_bytes()
    losses = []
    for i in range(steps):
        tokens = draw(text, i, batch, 63).chunk(mesh.size())[mesh.get_rank()]
        state, loss = step(state, tokens)
        losses.append(loss.item())
        if mesh.get_rank() == 0 and (i % 10 == 0 or i == steps - 1):
            print(f"step {i:4d}   loss {losses[-1]:.4f}")
    zt.write_back(model, optimizer, step.unshard(state))
    if mesh.get_rank() == 0:
        model.save_pretrained(folder)  # PeftModel.from_pretrained reads it
    return losses


if __name__ == "__main__":
    main()
