"""Read a model's KV cache from its Hugging Face config.json, in the groups that vLLM makes.  vLLM is not imported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import SpecError
from ...layout.shapes import BlockShape, is_file

__all__ = ["CACHE_DTYPES", "Layers", "Model", "read"]

#: ``--kv-cache-dtype`` of vLLM → dtype; ``auto`` is the model's.  Dtypes with separate scales are not supported here.
CACHE_DTYPES = {
    "auto": "", "float16": "float16", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # fmt: skip

#: ``model_type`` of models whose layers all keep K and V, or a latent, per token.  Others are refused: Mamba, encoders, …
_PLAIN = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gpt_oss", "phi3", "olmo2", "granite", "minimax_m2", "deepseek_v2", "deepseek_v3", "kimi_k2",
)  # fmt: skip



class _Cache(NamedTuple):
    """What is in a cache that vLLM alone sizes, and which of kvbm's connectors take it."""

    what: str
    connectors: str

    def why(self) -> str:
        return (
            f"{self.what}: vLLM decides how much of them a block holds, so nothing can be shown before it runs. {self.connectors}. "
            "The log of an engine that has started has the number of blocks; the page on models says what has run "
            "(docs/engines/models.md)"
        )


_BOTH = "KvbmOffloadingConnector and KvbmConnector read the sizes when the engine starts"
_AS_BYTES = (
    "KvbmOffloadingConnector copies them as bytes: leave host_layout, host_values and folder out. KvbmConnector refuses them: "
    "prefill and decode in one engine"
)
_LINEAR, _MAMBA = _Cache("states of linear attention", _AS_BYTES), _Cache("Mamba states", _AS_BYTES)
_HEADS, _K_AND_V = _Cache("heads that differ by layer", _BOTH), _Cache("K and V of different sizes", _BOTH)
_INDEXER = _Cache("the keys of an indexer beside the latent", _BOTH)
_INDEXER_OF_KV = _Cache("the keys of an indexer beside K and V", _BOTH)
_COMPRESSED = _Cache("compressed states", _AS_BYTES)

#: ``model_type`` of models whose caches vLLM alone sizes.
_SIZED_BY_VLLM = {
    "qwen3_next": _LINEAR, "qwen3_5": _LINEAR, "qwen3_5_text": _LINEAR, "qwen3_5_moe": _LINEAR, "qwen3_5_moe_text": _LINEAR,
    "kimi_linear": _LINEAR, "minimax": _LINEAR, "nemotron_h": _MAMBA, "deepseek_v32": _INDEXER, "glm_moe_dsa": _INDEXER,
    "deepseek_v4": _COMPRESSED, "minimax_m3_vl": _INDEXER_OF_KV, "minimax_m3_text": _INDEXER_OF_KV, "gemma4": _HEADS,
    "gemma4_text": _HEADS, "mimo_v2_flash": _K_AND_V, "mimo_v2": _K_AND_V,
}  # fmt: skip

#: ``model_type`` of models that contain a text model, in ``text_config``.
_MULTIMODAL = ("gemma3", "gemma3n", "mistral3", "llava")

#: ``model_type`` → defaults for keys that its config.json may omit.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n_text": {
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 5, "num_kv_shared_layers": 15,
    },
}  # fmt: skip

#: Keys of caches that vLLM alone sizes.
_KEYS_SIZED_BY_VLLM = {
    "index_topk": _INDEXER, "compress_ratios": _COMPRESSED, "global_head_dim": _HEADS, "num_global_key_value_heads": _HEADS,
    "attention_chunk_size": _Cache("chunks of local attention", _BOTH), "mamba_d_state": _MAMBA, "attn_layer_indices": _MAMBA,
}  # fmt: skip

#: Most layers of a model.
_MOST_LAYERS = 4096

_KINDS = {"full_attention": False, "sliding_attention": True}


class Layers(NamedTuple):
    """A group of vLLM: numbers of layers that share a block table, and tokens of their sliding window; None without one."""

    layers: tuple[int, ...]
    sliding_window: int | None


@dataclass(frozen=True)
class Model:
    """A model's KV cache."""

    name: str  # the argument of `read`
    kind: str  # its ``model_type``
    shape: BlockShape  # block shape of the whole model, with one token per block
    attention_heads: int  # number of query heads, which tensor parallelism divides
    groups: tuple[Layers, ...]  # the groups that vLLM makes
    rope: int = 0  # elements of a latent that hold positions; 0 for K and V
    #: Number of layers behind those of `shape` that keep nothing: they read the cache of a layer before them.
    readers: int = 0

    @property
    def served(self) -> str:
        """The model in a command of vLLM: its name, or the folder of its config.json; ``MODEL`` for a config of another name."""
        path = Path(self.name)
        if not is_file(path):
            return self.name
        return os.fspath(path.parent) if path.name == "config.json" else "MODEL"

    @property
    def is_latent(self) -> bool:
        return self.shape.no == 1


def read(given: str, cache_dtype: str = "auto", dtype: str | None = None) -> Model:
    """Read the KV cache of a model: from a config.json, its folder, or the name of a model in Hugging Face's local cache.

    `cache_dtype` and `dtype` are those of vLLM's command; by default the config's.  Raises `SpecError` if the file does not
    exist or lacks what is needed, or the model's cache is not supported here.
    """
    path = _find(given)
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: expected the config.json of a model, or its folder, got no JSON: {error!s:.300}") from None
    if not isinstance(whole, dict):
        raise SpecError(f"{path}: expected an object with model_type, got {type(whole).__name__}")
    return _Reader(path, whole).model(given, cache_dtype, dtype)


def _find(given: str) -> Path:
    path = Path(given)
    for one in (path, path / "config.json"):
        if is_file(one):
            return one
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        folder = home / "hub" / f"models--{given.replace('/', '--')}"
        found = sorted(folder.glob("snapshots/*/config.json"), key=lambda one: one.stat().st_mtime)
        if found:
            return found[-1]
    why = ""
    if path.is_dir():
        why = "no config.json in it: "
    elif path.suffix == ".json" or path.is_absolute():
        why = "no such file: "
    raise SpecError(
        f"model {given!r:.200}: {why}expected a config.json, its folder, or a model that lies in Hugging Face's cache; nothing is "
        "downloaded here: get its config.json first"
    )


class _Reader:
    """Reads one file.  Its errors name the file."""

    def __init__(self, path: Path, whole: Mapping[str, Any]) -> None:
        self.path = path
        self.kind = whole.get("model_type")
        config = whole
        if self.kind in _MULTIMODAL and isinstance(whole.get("text_config"), dict):
            config = {"torch_dtype": whole.get("torch_dtype"), "dtype": whole.get("dtype"), **whole["text_config"]}
            usual = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text"}.get(self.kind)
            self.kind = config.get("model_type", usual)
        if self.kind in _SIZED_BY_VLLM:
            raise SpecError(f"{path}: model_type: {self.kind}: {_SIZED_BY_VLLM[self.kind].why()}")
        if self.kind not in _PLAIN:
            raise SpecError(
                f"{path}: model_type: expected one whose cache is known here ({', '.join(_PLAIN)}; text_config of "
                f"{', '.join(_MULTIMODAL)}), got {self.kind!r:.100}"
            )
        self.config: Mapping[str, Any] = {**_DEFAULTS.get(self.kind, {}), **config}
        for key, cache in _KEYS_SIZED_BY_VLLM.items():
            if self.config.get(key):
                raise SpecError(f"{path}: {key}: {cache.why()}")
        if self.config.get("is_encoder_decoder"):
            raise SpecError(f"{path}: is_encoder_decoder: expected a model that decodes alone; states of an encoder are not copied")

    def number(self, key: str, usual: int | None = None, most: int = 1 << 24) -> int:
        value = self.config.get(key)
        value = usual if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise SpecError(f"{self.path}: {key}: expected a number from 1 on, got {value!r:.100}")
        return value

    def model(self, name: str, cache_dtype: str, dtype: str | None) -> Model:
        heads, layers = self.number("num_attention_heads"), self.number("num_hidden_layers", most=_MOST_LAYERS)
        readers = self.number("num_kv_shared_layers", most=layers - 1) if self.config.get("num_kv_shared_layers") else 0
        if readers and self.kind != "gemma3n_text":
            raise SpecError(f"{self.path}: num_kv_shared_layers: {_Cache('layers that share a cache', _BOTH).why()}")
        nl, no, nh, rope = layers - readers, 2, self.number("num_key_value_heads", heads), 0
        if self.config.get("kv_lora_rank") is not None:
            rope = self.number("qk_rope_head_dim")
            no, nh, hd = 1, 1, self.number("kv_lora_rank") + rope
        elif self.kind in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
            raise SpecError(f"{self.path}: kv_lora_rank: expected the size of the latent of {self.kind}, got none")
        elif self.config.get("head_dim") is not None:
            hd = self.number("head_dim")
        elif self.number("hidden_size") % heads:
            raise SpecError(f"{self.path}: head_dim: expected it where {heads} heads do not divide hidden_size, got none")
        else:
            hd = self.number("hidden_size") // heads
        shape = BlockShape(nl, no, nh, 1, hd, self._dtype(cache_dtype, dtype))
        return Model(name, str(self.kind), shape, heads, self._groups(self._slides(layers)[:nl]), rope, readers)

    def _dtype(self, cache_dtype: str, dtype: str | None) -> str:
        if cache_dtype not in CACHE_DTYPES:
            raise SpecError(f"kv-cache-dtype: expected one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r:.100}")
        if found := CACHE_DTYPES[cache_dtype]:
            return found
        quantised = self.config.get("quantization_config")
        if isinstance(quantised, dict) and quantised.get("kv_cache_scheme"):
            raise SpecError(
                f"{self.path}: quantization_config: kv_cache_scheme: the model says how its cache is quantised; pass "
                "--kv-cache-dtype, such as fp8"
            )
        found = str(dtype or self.config.get("dtype") or self.config.get("torch_dtype")).removeprefix("torch.")
        if found not in ("float16", "bfloat16") and found != dtype:
            raise SpecError(
                f"{self.path}: torch_dtype: expected float16 or bfloat16, got {found!r:.100}, for which vLLM takes what the "
                "machine likes; pass --dtype"
            )
        return found

    def _groups(self, slides: list[bool]) -> tuple[Layers, ...]:
        """The groups of vLLM's ``get_kv_cache_groups``, for layers whose pages have the same size."""
        window = None
        if any(slides):
            window = self.number("sliding_window")
        buckets: dict[bool, list[int]] = {}
        for layer, is_sliding in enumerate(slides):
            buckets.setdefault(is_sliding, []).append(layer)
        sizes = [len(bucket) for bucket in buckets.values()]
        size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
        found = []
        for is_sliding, bucket in buckets.items():
            count = -(-len(bucket) // size)
            found += [Layers(tuple(bucket[i::count]), window if is_sliding else None) for i in range(count)]
        return tuple(found)

    def _slides(self, nl: int) -> list[bool]:
        """For each layer, True if it has a sliding window."""
        config = self.config
        if (types := config.get("layer_types")) is not None:
            if not isinstance(types, list) or len(types) != nl or not all(isinstance(one, str) and one in _KINDS for one in types):
                raise SpecError(
                    f"{self.path}: layer_types: expected {', '.join(_KINDS)} for each of {nl} layers, got {types!r:.200}"
                )
            return [_KINDS[one] for one in types]
        if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
            return [False] * nl
        if self.kind == "gemma2":
            return [layer % 2 == 0 for layer in range(nl)]
        if self.kind in _DEFAULTS:
            pattern = self.number("sliding_window_pattern")
            return [(layer + 1) % pattern != 0 for layer in range(nl)]
        if self.kind in ("mistral", "mixtral", "phi3"):
            return [True] * nl
        raise SpecError(f"{self.path}: sliding_window: expected layer_types, which say the layers that have it, got none")
