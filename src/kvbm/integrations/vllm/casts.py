"""Casts between engines with other KV cache formats: the setting, and the scales that vLLM has for its layers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from ...errors import BindError, PlanError
from ...planner.cast import Scale, layers_of, of_layers, parsed
from ...pool.pool import Pool
from ...reshard.casting import formats_of

__all__ = ["cast_of", "pool_formats", "require_scales"]

#: ``--kv-cache-dtype`` with one scale for K and one for V of each layer, which vLLM keeps beside the cache.
_STATIC = ("fp8", "fp8_e4m3", "fp8_e5m2")


def cast_of(extra: Mapping[str, Any]) -> Scale | None:
    """The setting ``cast``; `BindError` if it is neither absent, ``"amax"`` nor numbers of a `kvbm.Scale`."""
    given = extra.get("cast")
    try:
        return None if given is None else parsed(given)
    except PlanError as error:
        raise BindError(
            "kv_connector_extra_config: cast: expected 'amax', a number, a list with one for each layer, or an object of both for "
            f"'k' and 'v': {error}"
        ) from None


def pool_formats(pool: Pool) -> list[str]:
    """The formats of a pool's elements."""
    return list(dict.fromkeys(formats_of(pool.layout, pool.shape.dtype).values()))


def require_scales(vllm_config: Any, layers: Mapping[str, int], cast: Scale) -> None:
    """Raise `BindError` unless the layers whose scales are not in their cache have those of the cast.

    `layers` are this worker's, with their numbers in the model.  A layer may have a scale for each of its heads (checkpoints of
    the strategy ``attn_head``): vLLM's number for all of them, which is the largest, does not say so.
    """
    known = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    held: dict[str, dict[str, list[float]]] = {}
    for name in layers:
        layer = known.get(name)
        if str(getattr(layer, "kv_cache_dtype", "")) in _STATIC:
            latent = hasattr(layer, "kv_lora_rank")  # MLA: it has no V, and nothing reads a scale of it
            held[name] = {what: _scales(layer, what) for what in (("k",) if latent else ("k", "v"))}
    count = layers_of(cast)
    for name, found in held.items():
        number, told = layers[name], None
        if cast.is_given and (count is None or number < count):
            told = dict(zip("kv", of_layers(cast, [number]).halves, strict=True))
        if told is None or any(of != [one[0] if isinstance(one := told[what], tuple) else one] for what, of in found.items()):
            texts = (f"{what} {', '.join(map(repr, of)):.200}" for what, of in found.items())
            raise BindError(
                f"kv_connector_extra_config: cast: {cast}: layer {name!r} has the scales {' and '.join(texts)}; expected them as "
                f"the numbers of layer {number}: {_setting(held, layers)}"
            )


def _setting(held: Mapping[str, Mapping[str, list[float]]], layers: Mapping[str, int]) -> str:
    """What the setting should say."""
    if several := next((name for name, found in held.items() if any(len(of) > 1 for of in found.values())), None):
        return f"a cast has one for K and one for V of a layer, and {several!r} has others for some heads"
    by_number = {layers[name]: found for name, found in held.items()}
    numbers = sorted(by_number)
    k, v = ([by_number[number].get(what, by_number[number]["k"])[0] for number in numbers] for what in "kv")
    value: Any = k if k == v else {"k": k, "v": v}
    if len({*k, *v}) == 1:
        return f'"cast": {json.dumps(k[0])} on both sides'
    some = ", ".join(map(str, numbers))
    others = "" if numbers == list(range(len(numbers))) else f" for the layers {some}, and those of the others,"
    return f'"cast": {json.dumps(value)}{others} on both sides'


def _scales(layer: Any, what: str) -> list[float]:
    """The different scales of a layer's K or V, in float32: what kernels read on the host, and what they read on the device."""
    on_host, on_device = (getattr(layer, f"_{what}_scale{suffix}", None) for suffix in ("_float", ""))
    found = [] if on_host is None else [float(on_host)]
    if on_device is not None:
        found += map(float, on_device.flatten().tolist())
    return sorted({struct.unpack("f", struct.pack("f", one))[0] for one in found}) or [1.0]
