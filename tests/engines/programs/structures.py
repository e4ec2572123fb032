"""Engines of a few random layers with the structure of public models: ``structures.py SETTINGS`` (JSON), one after another.

Settings: ``folder``, ``names`` (keys of `STRUCTURES`), ``llm`` (arguments of `vllm.LLM`) and ``new`` (generated tokens).  It prints
JSON behind RESULT, by name: what `offloaded` finds, or the reason why vLLM does not build or run the model.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import transformers
from generate import arguments, logprobs, prompt

#: Lengths of the prompts.  Where layers keep a state, vLLM makes blocks of more than 100 tokens: of 288, if it keeps the states in
#: float32 because the processor has bfloat16 in AVX-512.
LENGTHS = (400, 300)

_COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WITHOUT_MLP = {key: value for key, value in _COMMON.items() if key != "intermediate_size"}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_EXPERTS = {
    "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DSA = {**_COMMON, **_LATENT, **_EXPERTS, "num_hidden_layers": 3, "num_key_value_heads": 4} | {
    "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4,
}  # fmt: skip
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_DELTA = {
    "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64, "layer_types": [*[_LINEAR] * 3, _FULL],
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
_GEMMA = {
    **_COMMON, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 64, "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 32,
}  # fmt: skip
_GEMMA_4 = {
    **_GEMMA, "num_hidden_layers": 6, "global_head_dim": 128, "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
}  # fmt: skip

#: Name → class of the model, class of its configuration, its arguments, and arguments of the engine.
STRUCTURES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", "DeepseekV32Config", _DSA, {}),
    "deepseek-v4": (
        "DeepseekV4ForCausalLM", "",
        {**_WITHOUT_MLP, "model_type": "deepseek_v4", "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 512,
         "qk_rope_head_dim": 64, "compress_ratios": [0, 0, 4, 128], "compress_rope_theta": 160000.0, "num_hash_layers": 1,
         "n_shared_experts": 1, "index_head_dim": 128, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6,
         "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
         "hidden_act": "silu", "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 4, "index_topk": 64, "sliding_window": 64},
        {},
    ),
    "glm-5": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _DSA, {}),
    "kimi-k2": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**_COMMON, **_LATENT, **_EXPERTS, "num_hidden_layers": 3, "num_key_value_heads": 4}, {},
    ),
    "kimi-linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {**_COMMON, **_LATENT, "q_lora_rank": None, "num_hidden_layers": 4, "num_key_value_heads": 4, "moe_intermediate_size": 128,
         "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 4,
                                "short_conv_kernel_size": 4}},
        {"dtype": "bfloat16", "enable_prefix_caching": False},
    ),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_COMMON, **_DELTA, **_FEW}, {"dtype": "bfloat16"}),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_COMMON, **_DELTA}, {"dtype": "bfloat16"}),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_WITHOUT_MLP, **_DELTA, **_FEW}, {"dtype": "bfloat16"}),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM", "MiniMaxM2Config",
        {**_COMMON, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4,
         "num_experts_per_tok": 2, "rotary_dim": 32, "use_qk_norm": True, "qk_norm_type": "per_layer",
         "scoring_func": "softmax", "use_routing_bias": False},
        {},
    ),
    "gemma-3n": (
        "Gemma3nForCausalLM", "Gemma3nTextConfig",
        {**_GEMMA, "num_hidden_layers": 10, "layer_types": [*[_SLIDING] * 4, _FULL] * 2, "num_kv_shared_layers": 5,
         "laurel_rank": 16},
        {},
    ),
    "gemma-4": ("Gemma4ForCausalLM", "Gemma4TextConfig", _GEMMA_4, {}),
    "gemma-4-shared": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**_GEMMA_4, "num_kv_shared_layers": 3}, {}),
    "nemotron-h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {**_COMMON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"], "num_key_value_heads": 2, "head_dim": 64,
         "ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2},
        {},
    ),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**_COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 64,
         "layer_types": [_SLIDING, _FULL] * 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "mimo-v2": (
        "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
        {**_COMMON, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 96, "v_head_dim": 64,
         "layer_types": [_FULL, _SLIDING, _SLIDING] * 2,
         "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
         "sliding_window": 64, "sliding_window_size": 64, "hybrid_layer_pattern": [0, 1, 1] * 2,
         "moe_layer_freq": [0, 1, 1, 1, 1, 1],
         "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 96, "swa_v_head_dim": 64,
         "layernorm_epsilon": 1e-5, "attention_bias": False},
        {},
    ),
}  # fmt: skip


def write(name: str, folder: Path) -> None:
    """Write the config.json of a structure.  It has no weights: `register` makes them."""
    architecture, kind, given, _ = STRUCTURES[name]
    common = {"architectures": [architecture], "dtype": "float32"}
    config = getattr(transformers, kind)(**given).to_diff_dict() if kind else given
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | common))


def register() -> None:
    """Tell vLLM of the load format ``kvbm_random``: weights by the hash of their names, large enough that a wrong cache shows."""
    import torch
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if "kvbm_random" in _LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @register_model_loader("kvbm_random")
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: Any, model_config: Any) -> None:
            deviation = 0.02 if model_config.use_mla else 0.08  # a latent is decoded on the CPU in another way than it is prefilled
            for name, value in model.state_dict().items():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                if not value.is_floating_point():
                    value.zero_()
                elif value.ndim > 1:
                    value.copy_(torch.randn(value.shape, generator=generator) * deviation)
                else:
                    value.copy_(torch.rand(value.shape, generator=generator) / 2 + 0.5)


def bound(worker: Any) -> list[dict[str, Any]]:
    """In a worker: how `Pool.from_vllm` binds each group of layers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    import kvbm.vllm_groups

    known = get_kv_transfer_group()
    config, found = known._kv_cache_config, []
    for index, group in enumerate(config.kv_cache_groups):
        kinds = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        one = {"kinds": sorted({type(kind).__name__ for kind in kinds}), "layers": len(group.layer_names)}
        try:
            read = kvbm.vllm_groups.groups(worker.vllm_config, config, group=index)
            pools = [kvbm.Pool.from_vllm(known.kv_caches, group=part) for part in read]
            one |= {"layouts": [part.layout.name for part in read], "shapes": [str(pool.shape) for pool in pools]}
        except kvbm.KvbmError as error:
            one["refused"] = str(error)
        found.append(one)
    return found


def keeps_caches() -> None:
    """Let the connector keep the tensors that it is given: `kv_caches`."""
    from kvbm.integrations.vllm import KvbmOffloadingConnector as Connector

    register_caches = Connector.register_kv_caches

    def kept(self: Any, kv_caches: Any) -> None:
        self.kv_caches = kv_caches
        register_caches(self, kv_caches)

    Connector.register_kv_caches = kept


def damage(_: Any, verify: bool) -> None:
    """In a worker: set the lowest bit of all stored bytes; without `verify` loads do not look at digests any more."""
    import numpy as np
    from offload import worker

    for stores in worker().copier.memory.stores:
        for store in stores:
            store.verify = verify
            for array in store.host.arrays:
                array.view(np.uint8)[...] |= 1


def generated(llm: Any, lengths: tuple[int, ...], new: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, logprobs=3)
    found = llm.generate([{"prompt_token_ids": prompt(length)} for length in lengths], sampling, use_tqdm=False)
    return [
        {"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens, "logprobs": logprobs(one.outputs[0])}
        for one in found
    ]


def offloaded(llm: Any, new: int) -> dict[str, Any]:
    """Prompts, then again after a reset: loaded; loaded from what has changed; and the same without a check, the control."""

    def again(damaged: bool = False, verify: bool = True) -> list[dict[str, Any]]:
        time.sleep(0.1)  # what was offloaded is told at the next step
        generated(llm, (40,), 2)
        assert llm.reset_prefix_cache()
        if damaged:
            llm.collective_rpc(damage, args=(verify,))
        return generated(llm, LENGTHS, new)

    runs = [generated(llm, LENGTHS, new), again(), again(damaged=True), again(), again(damaged=True, verify=False)]
    metrics = {one.name: one.value for one in llm.get_metrics() if "kvbm" in one.name and hasattr(one, "value")}
    return {"runs": runs, "counters": metrics, "groups": llm.collective_rpc(bound)[0]}


def main(settings: dict[str, Any]) -> None:
    keeps_caches()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": False,
    }  # fmt: skip
    results: dict[str, Any] = {}
    for name in settings["names"]:
        folder, began, llm = Path(settings["folder"]) / name, time.monotonic(), None
        try:
            write(name, folder)
            wanted = {"model": str(folder), "load_format": "kvbm_random", **STRUCTURES[name][3], **settings["llm"]}
            llm = LLM(**arguments(usual, wanted))
            results[name] = offloaded(llm, settings["new"])
        except Exception as error:
            traceback.print_exc()
            results[name] = {"reason": f"{type(error).__name__}: {error}"}
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            gc.collect()
        results[name]["seconds"] = time.monotonic() - began
        print("PART", name, json.dumps(results[name]), flush=True)
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
