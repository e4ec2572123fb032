"""What K and V of an SGLang engine depend on: its weights, its configuration, and its adapters."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_server_args

from ...errors import BindError
from ..identity import (
    code_of,
    configs_beside,
    files_in,
    folder_of,
    get,
    key_of_adapter,
    key_of_files,
    stored_model,
    weights,
)

__all__ = ["stored_model_of"]

#: Arguments of the server that change K and V, beside those in the model's configuration.
_ARGUMENTS = (
    "custom_weight_loader", "dllm_algorithm", "enable_multimodal", "enable_precise_embedding_interpolation", "forward_hooks",
    "is_embedding", "mm_process_config", "model_impl", "modelopt_quant", "prefill_kv_cache_dequant_dtype", "quantize_and_serve",
    "rl_quant_profile", "torchao_config", "weight_version",
)  # fmt: skip

#: Values of ``--kv-cache-dtype`` that the dtype of the host pool says as well.
_PLAIN = ("None", "auto", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float")

#: Arguments that name files from which SGLang takes weights or a configuration.
_FILES = ("decrypted_config_file", "modelopt_checkpoint_restore_path")

_ADVICE = "expected model_id in --hicache-storage-backend-extra-config, a name that no other weights have"


def stored_model_of(given: str, arguments: Any = None) -> dict[str, Any]:
    """The model of the contents of this process's engine in a folder that engines share: that of `identity.stored_model`.

    With `given`, the operator's name of the weights, they are not read; the configuration is compared all the same.  Default
    `arguments`: those with which this process was started.  Raises `BindError` if the weights, the model's code or an adapter
    are not on this machine.
    """
    arguments = get_server_args() if arguments is None else arguments
    if arguments is None:
        raise BindError("SGLang: its arguments are not known in this process, and they say which model computes the pages")
    overrides = get(arguments, "json_model_override_args")
    model, arguments = ModelConfig.from_server_args(arguments), resolving_view(arguments)
    config = model.hf_config.to_dict()
    more = {name: get(arguments, name) for name in _ARGUMENTS}
    if (cache := str(get(arguments, "kv_cache_dtype"))) not in _PLAIN:
        more["kv_cache_dtype"] = cache
    if scales := get(arguments, "quantization_param_path"):
        more["quantization_param_path"] = key_of_files(Path(scales), "")
    if path := get(arguments, "uno_lora_path"):
        more["uno_lora_path"] = _key_of_adapter(str(path))
    more |= {name: [str(path), files_in(str(path))] for name in _FILES if (path := get(arguments, name))}
    if adapters := get(arguments, "lora_paths"):
        more["adapters"] = dict(map(_adapter, adapters))
    files = None
    with contextlib.suppress(Exception):  # any error of a library that searches them: the configuration in effect counts
        files = folder_of(os.fspath(model.model_path), model.revision, get(arguments, "download_dir"))
    more["configs beside"] = configs_beside(files)
    if get(arguments, "trust_remote_code"):
        more["code"] = code_of(config, [os.fspath(model.model_path)], model.revision)
    return stored_model(
        config, files, json.loads(overrides) if isinstance(overrides, str) else overrides, model.dtype,
        (model.quantization, None), _weights(model, arguments, given), int(model.context_len), more,
    )  # fmt: skip


def _weights(model: Any, arguments: Any, given: str) -> str:
    if given:
        return f"named {given}"
    name, settings = os.fspath(model.model_path), get(arguments, "model_loader_extra_config")
    kind = get(arguments, "load_format")
    try:
        return weights(
            name, model.revision, str(getattr(kind, "value", kind)), get(arguments, "download_dir"), settings, "SGLang"
        )
    except BindError as error:
        raise BindError(f"SGLang: {error}; {_ADVICE}") from None


def _adapter(given: Any) -> tuple[str, str]:
    """Name and hash of an adapter.  SGLang's keys of pages have its name and path, and not what is there."""
    if isinstance(given, str):  # NAME=PATH, or a path
        name, _, path = given.rpartition("=")
    else:
        name, path = (
            str((given.get(key) if isinstance(given, dict) else get(given, key)) or "") for key in ("lora_name", "lora_path")
        )
    return name or path, _key_of_adapter(path)


def _key_of_adapter(path: str) -> str:
    if (key := key_of_adapter(path)) is None:
        raise BindError(
            f"SGLang: the adapter {path!r:.200} has no files here to tell it from others by; expected a folder with its weights, "
            "or a name in Hugging Face's cache: download it first"
        )
    return key
