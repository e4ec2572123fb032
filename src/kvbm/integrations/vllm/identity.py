"""What K and V of a vLLM engine depend on: its weights, its configuration, and what a request has beside its tokens.

Two engines exchange caches only if all of it is the same.  What does not change K and V may differ: parallelism, the size of
blocks, their layout, the device, the longest sequence, schedules, tokens that end a text.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import BindError, escaping, printable
from .tier import key_of_files

__all__ = ["differing", "folder_of", "inputs_of", "long_factors", "model_of", "of_config", "push_name"]

logger = escaping(logging.getLogger("vllm.kvbm"))

#: Names in a configuration of Hugging Face, at any depth, that change neither K nor V.
_OTHER = frozenset({
    "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "decoder_start_token_id", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label", "initializer_range", "label2id",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix", "problem_type",
    "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
    "task_specific_params", "tie_word_embeddings", "torch_dtype", "torchscript", "transformers_version", "use_cache",
})  # fmt: skip

#: Kinds of RoPE that turn a position by the same angles, whatever the longest sequence is.
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "mrope", "proportional"})

#: Kinds of RoPE with other factors for long sequences.
_LONG_ROPE = frozenset({"longrope", "su"})

#: Ways to guess tokens without a model, whose K and V would be among those of the target.
_NO_DRAFT = ("ngram", "suffix")


def model_of(vllm_config: Any, given: Any = None) -> dict[str, Any]:
    """The fields for `Endpoint(model=)`.

    Parameters
    ----------
    vllm_config
        vLLM's object.
    given : str, optional
        The operator's name of the weights: they are not read.  The configuration is compared all the same.

    Raises
    ------
    BindError
        `given` is no text.
    """
    if given is not None and not (isinstance(given, str) and given):
        raise BindError(f"kv_connector_extra_config: model: expected a name of the weights, got {given!r:.100}")
    model, load = vllm_config.model_config, _get(vllm_config, "load_config")
    cache = str(_get(_get(vllm_config, "cache_config"), "cache_dtype"))
    found: dict[str, Any] = {
        **_fields(model, load, given),
        "kv_cache_dtype": {"auto": _dtype(model), "fp8": "fp8_e4m3"}.get(cache, cache),
    }
    pictures = getattr(model, "multimodal_config", None)
    if pictures is not None:
        of_files = getattr(pictures, "mm_processor_kwargs", None) or {}
        found["mm_processor_kwargs"] = {name: value for name, value in of_files.items() if name != "device"}
        found["video_pruning_rate"] = getattr(pictures, "video_pruning_rate", None)
    guesses = _get(vllm_config, "speculative_config")
    draft = getattr(guesses, "draft_model_config", None)
    if draft is not None and not str(guesses.method).startswith(_NO_DRAFT):
        found["draft"] = {"method": str(guesses.method), **_fields(draft, guesses.draft_load_config or load, given)}
    return found


def _fields(model: Any, load: Any, given: str | None) -> dict[str, Any]:
    """The fields of a target or of a draft."""
    held = model.hf_config.to_dict() if _get(model, "hf_config") is not None else {}
    config, ropes = of_config(held), _ropes(held)
    if ropes and _PLAIN_ROPE.issuperset(ropes):
        _drop(config, "max_position_embeddings")
    if (chosen := long_factors(model)) is not None:
        config["longrope: long factors"] = chosen
    return {
        "config": config,
        "dtype": _dtype(model),
        "quantization": [str(_get(model, "quantization")), _text(_get(model, "quantization_config"))],
        "disable_sliding_window": bool(_get(model, "disable_sliding_window")),
        "weights": f"named {given}" if given else _weights(
            str(getattr(model, "model_weights", "") or model.model), _get(model, "revision"), str(_get(load, "load_format")),
            _get(load, "download_dir"),
        ),
    }  # fmt: skip


def long_factors(model: Any) -> bool | None:
    """True if LongRoPE turns by its factors for long sequences; None if the model has none.

    vLLM chooses them by the longest sequence that the engine may hold, for all sequences.
    """
    held = model.hf_config.to_dict() if _get(model, "hf_config") is not None else {}
    if _LONG_ROPE.isdisjoint(_ropes(held)):
        return None
    return bool(model.max_model_len > min(_numbers(held, "original_max_position_embeddings"), default=0))


def _get(held: Any, name: str) -> Any:
    """A part of vLLM's objects; None if this version has none of this name: then both engines have None."""
    return getattr(held, name, None)


def _dtype(model: Any) -> str:
    return str(_get(model, "dtype")).removeprefix("torch.")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, Mapping | list) else str(value)


def of_config(held: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what does not matter."""
    return {
        name: of_config(value) if isinstance(value, Mapping) else value
        for name, value in held.items()
        if name not in _OTHER and not str(name).startswith("_")
    }


def _drop(held: dict[str, Any], name: str) -> None:
    held.pop(name, None)
    for value in held.values():
        if isinstance(value, dict):
            _drop(value, name)


def _numbers(held: Mapping[str, Any], name: str) -> Iterator[int]:
    """The numbers of a name, at any depth."""
    for key, value in held.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif key == name and isinstance(value, int):
            yield value


def _ropes(held: Mapping[str, Any]) -> list[str]:
    """The kinds of RoPE in a configuration; empty if it names none."""
    found = []
    for name, value in held.items():
        if isinstance(value, Mapping):
            if name in ("rope_parameters", "rope_scaling"):
                found += list(_kinds(value))
            else:
                found += _ropes(value)
    return found


def _kinds(rope: Mapping[str, Any]) -> Iterator[str]:
    inner = [one for one in rope.values() if isinstance(one, Mapping)]  # one for each kind of layer
    for one in inner or [rope]:
        yield str(one.get("rope_type", one.get("type", "default")))


def folder_of(name: str, revision: str | None, downloads: str | None) -> Path:
    """The folder or file of a model's weights on this machine: a path, or where Hugging Face's cache has them.

    Raises the errors of `huggingface_hub` if they are not here.
    """
    if Path(name).exists():
        return Path(name)
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))


@functools.lru_cache(8)
def _weights(name: str, revision: str | None, load_format: str, downloads: str | None) -> str:
    """A hash of the files of weights; the name if there are none."""
    if load_format == "dummy":
        return "dummy"
    try:
        return f"sha256:{key_of_files(folder_of(name, revision, downloads), '')[:32]}"
    except Exception as error:  # any error of a library that searches them
        logger.warning(
            "kvbm: the weights of %r are not compared with those of other engines, only name and revision: %s: %s. Set model in "
            "kv_connector_extra_config to a name that no other weights have",
            name, type(error).__name__, error,
        )  # fmt: skip
        return f"of {name} {revision or ''}".strip()


def inputs_of(request: Any) -> str:
    """Hashes of what the K and V of a request depend on beside its tokens and the model, each with its name.

    They are of the adapter, of each kind of input (``image``, ``audio``) and of embeddings: ``adapter=3f…,image=a0…``.  Empty if
    there is none of it.
    """
    found: dict[str, list[Any]] = {}
    if (adapter := getattr(request, "lora_request", None)) is not None:
        found["adapter"] = [str(adapter.lora_name), _adapter(str(adapter.lora_path))]
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        of_kind = found.setdefault(re.sub(r"\W", "_", str(feature.modality), flags=re.ASCII), [])
        of_kind.append([str(feature.modality), str(feature.identifier), int(place.offset), int(place.length)])
    if (embeds := getattr(request, "prompt_embeds", None)) is not None:
        data = embeds.detach().cpu().contiguous()
        bits = data.flatten().view(sys.modules["torch"].uint8).numpy().tobytes()
        found["embeddings"] = [list(data.shape), str(data.dtype), hashlib.sha256(bits).hexdigest()]
    hashes = {name: hashlib.sha256(json.dumps(held).encode()).hexdigest()[:32] for name, held in sorted(found.items())}
    return ",".join(f"{name}={found}" for name, found in hashes.items())


def differing(ours: str, theirs: str) -> str:
    """The names of what differs between two results of `inputs_of`, of which the second one may be anything."""
    here, there = ({part.partition("=")[::2] for part in text.split(",") if part} for text in (ours, theirs))
    return printable(", ".join(sorted({name for name, _ in here ^ there})))


def push_name(given: str, inputs: str) -> str:
    """The name by which both engines know a request that the router has named, with what `inputs_of` says of it."""
    plain = given.replace("%", "%25").replace("#", "%23")
    return f"push/{plain}{inputs and f'#{inputs}'}"


def _adapter(path: str) -> str:
    """A hash of an adapter's files; its name if there are none here."""
    try:
        folder = Path(path)
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        at = tuple((str(one), *_witness(one)) for one in files)
        return _adapter_key(path, at) if files else path
    except (OSError, BindError):
        return path


def _witness(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@functools.lru_cache(256)
def _adapter_key(path: str, files: tuple[tuple[Any, ...], ...]) -> str:  # noqa: ARG001  (files that changed are read again)
    config = Path(path, "adapter_config.json")
    return key_of_files(Path(path), config.read_text(encoding="utf-8") if config.exists() else "")
