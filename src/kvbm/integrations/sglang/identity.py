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
from ..identity import folder_of, get, key_of_adapter, key_of_files, stored_model, weights

__all__ = ["stored_model_of"]

#: Arguments of the server that change K and V, beside those in the model's configuration.
_ARGUMENTS = (
    "custom_weight_loader", "dllm_algorithm", "enable_multimodal", "enable_precise_embedding_interpolation", "forward_hooks",
    "is_embedding", "mm_process_config", "model_impl", "modelopt_quant", "prefill_kv_cache_dequant_dtype", "quantize_and_serve",
    "rl_quant_profile", "torchao_config", "weight_version",
)  # fmt: skip

#: Values of ``--kv-cache-dtype`` that the dtype of the host pool says as well.
_PLAIN = ("None", "auto", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float")

_ADVICE = "expected model_id in --hicache-storage-backend-extra-config, a name that no other weights have"


def stored_model_of(given: str, arguments: Any = None) -> dict[str, Any]:
    """The model of the contents of this process's engine in a folder that engines share: `kvbm.integrations.identity.stored_model`.

    Parameters
    ----------
    given : str
        The operator's name of the weights: they are not read.  The configuration is compared all the same.  Empty: none.
    arguments : ServerArgs, optional
        Default: those with which this process was started.

    Raises
    ------
    BindError
        The weights are not on this machine.
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
        more["uno_lora_path"] = key_of_adapter(str(path))
    if adapters := get(arguments, "lora_paths"):
        more["adapters"] = dict(map(_adapter, adapters))
    files = None
    with contextlib.suppress(Exception):  # any error of a library that searches them: the configuration in effect counts
        files = folder_of(os.fspath(model.model_path), model.revision, get(arguments, "download_dir"))
    return stored_model(
        config, files, json.loads(overrides) if isinstance(overrides, str) else overrides, model.dtype,
        (model.quantization, config.get("quantization_config")), _weights(model, arguments, given), int(model.context_len), more,
    )  # fmt: skip


def _weights(model: Any, arguments: Any, given: str) -> str:
    if given:
        return f"named {given}"
    name = os.fspath(model.model_path)
    try:
        return weights(name, model.revision, str(get(arguments, "load_format")), get(arguments, "download_dir"))
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
    return name or path, key_of_adapter(path)
