"""Models of a few layers with random weights: ``models.py llama|mla|sliding|deep FOLDER [SEED]``.

Or the config.json of one of `structures.STRUCTURES`, whose weights are made when an engine loads it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import standins  # noqa: F401  (before transformers, which loads torchvision in SGLang's environment)
import structures
import torch
import transformers

COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.08,  # with 0.02 a wrong cache hardly changes a token
}  # fmt: skip


def llama() -> transformers.PreTrainedModel:
    """Grouped queries: 8 heads, 4 of K and V."""
    config = transformers.LlamaConfig(
        **{**COMMON, "num_attention_heads": 8}, num_hidden_layers=4, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False
    )
    return transformers.LlamaForCausalLM(config)


def mla() -> transformers.PreTrainedModel:
    """A latent in place of K and V.  vLLM decodes it on the CPU in another way than it prefills: larger weights would show it."""
    config = transformers.DeepseekV2Config(
        **{**COMMON, "initializer_range": 0.02}, num_hidden_layers=3, num_key_value_heads=4,
        moe_intermediate_size=128, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_group=1, topk_group=1,
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config)


def sliding() -> transformers.PreTrainedModel:
    """Two layers of three see 64 tokens: several groups of layers, which share tensors."""
    config = transformers.Gemma3TextConfig(
        **COMMON, num_hidden_layers=6, num_key_value_heads=2, head_dim=64, sliding_window=64, pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def deep() -> transformers.PreTrainedModel:
    """As many layers and heads as Llama 3.1 8B, so as many bytes of K and V a token, and a twentieth of its weights."""
    config = transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 1024, "num_attention_heads": 32}, num_hidden_layers=32, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


if __name__ == "__main__":
    if sys.argv[1] in structures.STRUCTURES:
        structures.write(sys.argv[1], Path(sys.argv[2]))
        sys.exit()
    torch.manual_seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    made = {"llama": llama, "mla": mla, "sliding": sliding, "deep": deep}[sys.argv[1]]()
    made.to(torch.float32).save_pretrained(sys.argv[2])
