"""Small models of Hugging Face's transformers are lifted and sharded, and train as in the plain loop.

The tests need `transformers`, which `make peers` installs.
"""

import pytest
import torch

import ztrans as zt
from tests.support.worlds import ALL, slices

hf = pytest.importorskip("transformers")

SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
WIDE = {"vocab_size": 128, "d_model": 32, "dropout": 0.0, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}),  # with dropout
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "BertForMaskedLM": ("BertConfig", {**SMALL, **QUIET}),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("BartConfig", WIDE),
}


def make(name):
    torch.manual_seed(0)
    config, sizes = MODELS[name]
    model = getattr(hf, name)(getattr(hf, config)(**sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop_step(tokens):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, optimizer, loop_step


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_an_unchanged_model_trains_as_in_the_plain_loop(name):
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randint(128, (4, 16), generator=draw),) for _ in range(3)]
    *_, plain = make(name)
    wanted = [plain(*batch).item() for batch in batches]
    model, optimizer, loop_step = make(name)
    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *ALL, zt.remat())(step)
    lowered = step.lower(state, *slices(batches[0], 2)[0])
    for batch, loss in zip(batches, wanted):
        state, outputs = lowered.lockstep(state, slices(batch, 2))
        assert sum(o.item() for o in outputs) / 2 == pytest.approx(loss, abs=2e-5)
