"""What K and V of a vLLM engine depend on: its weights, its configuration, and what a request has beside its tokens."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BindError, escaping, printable
from ..identity import (
    code_of,
    configs_beside,
    files_in,
    folder_of,
    get,
    key_of_adapter,
    of_model,
    stored_model,
    weights,
)

__all__ = ["differing", "inputs_of", "model_of", "push_name", "stored_model_of"]

logger = escaping(logging.getLogger("vllm.kvbm"))

#: Ways to guess tokens without a model, whose K and V would be among those of the target.
_NO_DRAFT = ("ngram", "suffix")


def model_of(vllm_config: Any, given: Any = None, *, must: bool = False, casts: bool = False) -> dict[str, Any]:
    """The fields of an engine, for `Endpoint(model=)`; without the format of the cache if it `casts`.

    With `given`, the operator's name of the weights, they are not read; the configuration is compared all the same.  If the
    weights are not known, that is a `BindError` with `must`, else a warning in the log.
    """
    if given is not None and not (isinstance(given, str) and given):
        raise BindError(f"kv_connector_extra_config: model: expected a name of the weights, got {given!r:.100}")
    model, load = vllm_config.model_config, get(vllm_config, "load_config")
    found = _fields(model, load, given, must)
    if not casts:
        cache = str(get(get(vllm_config, "cache_config"), "cache_dtype"))
        named = {"auto": str(get(model, "dtype")).removeprefix("torch."), "fp8": "fp8_e4m3"}
        found["kv_cache_dtype"] = named.get(cache, cache)
    pictures = getattr(model, "multimodal_config", None)
    if pictures is not None:
        of_files = getattr(pictures, "mm_processor_kwargs", None) or {}
        found["mm_processor_kwargs"] = {name: value for name, value in of_files.items() if name != "device"}
        found["video_pruning_rate"] = getattr(pictures, "video_pruning_rate", None)
    guesses = get(vllm_config, "speculative_config")
    draft = getattr(guesses, "draft_model_config", None)
    if draft is not None and not str(guesses.method).startswith(_NO_DRAFT):
        found["draft"] = {"method": str(guesses.method), **_fields(draft, guesses.draft_load_config or load, given, must)}
    return found


def stored_model_of(vllm_config: Any, given: str) -> dict[str, Any]:
    """The model of the contents of an engine in a folder that engines share: `kvbm.integrations.identity.stored_model`.

    With `given`, the operator's name of the weights, they are not read.  Raises `BindError` if they are not known.
    """
    model, load = vllm_config.model_config, get(vllm_config, "load_config")
    files = None
    if get(model, "config_format") in (None, "auto", "hf"):
        files = _folder(str(get(model, "hf_config_path") or model.model), model, load)
    held = model.hf_config.to_dict() if get(model, "hf_config") is not None else {}
    return stored_model(
        held, files, get(model, "hf_overrides"),
        get(model, "dtype"), (get(model, "quantization"), get(model, "quantization_config")),
        f"named {given}" if given else _weights(model, load, True), int(get(model, "max_model_len") or 0),
        {
            "disable_sliding_window": get(model, "disable_sliding_window"), "scales of fp8": _scales_of(vllm_config),
            **_beside(model, load, held, True),
        },
    )  # fmt: skip


def _folder(name: str, model: Any, load: Any) -> Path | None:
    """The folder of a model or of its configuration; None if it is not here."""
    with contextlib.suppress(Exception):  # any error of a library that searches them
        return folder_of(name, get(model, "revision"), get(load, "download_dir"))
    return None


def _beside(model: Any, load: Any, held: dict[str, Any], must: bool) -> dict[str, Any]:
    """What changes K and V beside the weights and `held`, the configuration; nothing in the usual case.

    With `must`, raises `BindError` if the code of the model is not on this machine.
    """
    names = [str(get(model, "hf_config_path") or model.model), str(model.model)]
    found: dict[str, Any] = {"configs beside": configs_beside(*(_folder(name, model, load) for name in dict.fromkeys(names)))}
    if get(model, "trust_remote_code"):
        try:
            found["code"] = code_of(held, names, get(model, "code_revision") or get(model, "revision"))
        except BindError as error:
            if must:
                raise
            logger.warning("kvbm: no cache of another engine is used: %s", str(error))
            found["code"] = f"not known {secrets.token_hex(16)}"
    if classes := get(model, "model_class_overrides"):
        found["model_class_overrides"] = {name: [str(target), _source_of(str(target))] for name, target in classes.items()}
    if (kind := str(get(model, "model_impl"))) not in ("None", "auto", "vllm"):
        found["model_impl"] = kind
    return {name: value for name, value in found.items() if value}


def _source_of(target: str) -> str:
    """A hash of the file of a class that is given as ``module:class``; empty if it is not found."""
    with contextlib.suppress(Exception):  # any error of a module that is imported
        spec = importlib.util.find_spec(target.partition(":")[0])
        return next(iter(files_in({"": spec.origin if spec is not None else None}).values()), "")
    return ""


def _scales_of(vllm_config: Any) -> str:
    """Whose rule makes the scales of an fp8 cache, which are in no file: vLLM reads them from the weights, or takes 1."""
    cache_dtype = str(get(get(vllm_config, "cache_config"), "cache_dtype"))
    return "vLLM" if cache_dtype.startswith("fp8") else ""


def _fields(model: Any, load: Any, given: str | None, must: bool) -> dict[str, Any]:
    """The fields of a target or of a draft."""
    held = model.hf_config.to_dict() if get(model, "hf_config") is not None else {}
    name = f"named {given}" if given else _weights(model, load, must)
    longest = int(get(model, "max_model_len") or 0)
    return {
        **of_model(held, get(model, "dtype"), get(model, "quantization"), get(model, "quantization_config"), name, longest),
        "disable_sliding_window": bool(get(model, "disable_sliding_window")),
        **_beside(model, load, held, must),
        **({"files of overrides": files} if (files := files_in(get(model, "hf_overrides"))) else {}),
    }


def _weights(model: Any, load: Any, must: bool) -> str:
    """A hash of the files of weights; the name if there are none."""
    name, revision, kind = str(get(model, "model_weights") or model.model), get(model, "revision"), str(get(load, "load_format"))
    settings = get(load, "model_loader_extra_config")
    try:
        return weights(name, revision, kind, get(load, "download_dir"), settings, "vLLM")
    except BindError as error:
        if must:
            raise
        if kind == "dummy":
            return "dummy"
        logger.warning(
            "kvbm: the weights of %r are not compared with those of other engines, only name and revision: %s. Set model in "
            "kv_connector_extra_config to a name that no other weights have",
            name, str(error),
        )  # fmt: skip
        usual = kind in ("auto", "hf", "safetensors") and not settings
        return f"of {name} {revision or ''}".strip() + ("" if usual else f", load_format {kind}, {settings}")


def inputs_of(request: Any, tokens: int | None) -> str:
    """Hashes of what the K and V of a request depend on beside the model, each with its name.

    They are of the prompt's first `tokens` (None: of no tokens, and the result may be empty), of the adapter, of each kind of
    input (``image``, ``audio``) and of embeddings: ``adapter=3f…,image=a0…,tokens=77…``.  An adapter whose files are not here
    is equal to no other, not even to itself.
    """
    found: dict[str, list[Any]] = {}
    if tokens is not None:
        ids = np.array((getattr(request, "prompt_token_ids", None) or [])[:tokens], "<i8")  # none beside embeddings
        found["tokens"] = [tokens, hashlib.sha256(ids.tobytes()).hexdigest()]
    if (adapter := getattr(request, "lora_request", None)) is not None:
        found["adapter"] = [str(adapter.lora_name), _key_of_adapter(str(adapter.lora_path))]
        found["adapter"] += ["3d"] if get(adapter, "is_3d_lora_weight") else []
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


def _key_of_adapter(path: str) -> str:
    """`key_of_adapter`; a text that no other request has if the adapter is not known."""
    if (key := key_of_adapter(path)) is None:
        _say_unknown(path)
    return f"not known {secrets.token_hex(16)}" if key is None else key


@functools.lru_cache(256)
def _say_unknown(path: str) -> None:
    """Log, once for each adapter, that it is not compared."""
    logger.warning(
        "kvbm: the adapter %s has no files here, so caches of requests with it are not shared: expected a folder with its "
        "weights, or a name in Hugging Face's cache",
        printable(path),
    )


def differing(own: str, other: str) -> str:
    """The names of what differs between two results of `inputs_of`, of which the second one may be anything."""
    here, there = ({part.partition("=")[::2] for part in text.split(",") if part} for text in (own, other))
    return printable(", ".join(sorted({name for name, _ in here ^ there})))


def push_name(given: str, inputs: str) -> str:
    """The name by which both engines know a request that the router has named, with what `inputs_of` says of it."""
    plain = given.replace("%", "%25").replace("#", "%23")
    if len(plain) > 1000:  # names have a limit on the other side
        plain = hashlib.sha256(plain.encode(errors="surrogatepass")).hexdigest()
    return f"push/{plain}{inputs and f'#{inputs}'}"
