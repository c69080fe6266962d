"""The names and shapes of the weights of a Llama, as transformers saves them."""

from __future__ import annotations


def shapes(
    hidden: int = 4096, ffn: int = 14336, layers: int = 32, vocab: int = 128256, kv: int = 1024
) -> dict[str, tuple[int, ...]]:
    """By default the shapes of Llama-3-8B."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        result |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return {**result, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


# Four ranks divide none of these sizes, and one of them has no row of `kv`.
SMALL = {"hidden": 66, "ffn": 170, "layers": 3, "vocab": 501, "kv": 5}
