"""Plan a model of Hugging Face for N GPUs: whether it fits, how fast it is, and what to change. Needs no GPU.

It needs the extra `models`, and reads only the configuration of the model, from the Hub or from a folder.

python examples/your_model.py meta-llama/Llama-3.1-8B 8
python examples/your_model.py ./my_model 64 --sequence 4096 --stage auto --device a100
"""

import argparse

import torch

import ztrans as zt


def fits(model, gpus, *more, batch=1, sequence=8192, device="h100", stage=3):
    """The program of one of `gpus` devices; a step that does not fit raises an error that says what does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step(tokens):  # the body of your loop
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    fsdp = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=gpus), stage=stage),
        zt.overlap_grads(),
        zt.prefetch(),
        zt.fuse_cast_gather(),
        zt.remat(memory="auto"),  # recompute only what does not fit
        *more,
    )
    step, state = zt.lift(train_step, model, optimizer)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    links = zt.by_host(8, inside="nvlink4", between="infiniband")
    return fsdp(step).lower(state, tokens, cluster=zt.cluster(device, dp=links))


def on_meta(name: str) -> torch.nn.Module:
    """A model that only has shapes: it takes no memory, and its weights are not downloaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).float()


def main(model: torch.nn.Module, gpus: int, **options) -> None:
    try:
        lowered = fits(model, gpus, **options)
    except ValueError as error:
        print(error)
    else:
        print(lowered.summary(), *lowered.plan.notes, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a name on the Hub, or a folder with a config.json")
    parser.add_argument("gpus", type=int)
    parser.add_argument("--batch", type=int, default=1, help="sequences on each GPU")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens")
    parser.add_argument("--device", default="h100", help="a name that zt.cluster knows")
    parser.add_argument(
        "--stage", type=lambda text: text if text == "auto" else int(text), default=3
    )
    args = vars(parser.parse_args())
    main(on_meta(args.pop("model")), **args)
