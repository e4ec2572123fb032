"""Casts between engines with other KV cache formats: the setting, and the scales that vLLM has for its layers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import BindError, PlanError
from ...planner.cast import Cast, Scale
from ...pool.pool import Pool
from ...reshard.casting import formats_of

__all__ = ["cast_of", "pool_formats", "require_scales"]

#: ``--kv-cache-dtype`` with one scale for K and one for V of each layer, which vLLM keeps beside the cache.
_STATIC = ("fp8", "fp8_e4m3", "fp8_e5m2")


def cast_of(extra: Mapping[str, Any]) -> Cast:
    """The setting ``cast``.

    Raises
    ------
    BindError
        It is neither absent, ``"amax"`` nor a number of a `kvbm.Scale`.
    """
    given = extra.get("cast")
    if given is None or given == "amax":
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            return Scale(float(given))
        except (PlanError, OverflowError):
            pass
    raise BindError(f"kv_connector_extra_config: cast: expected 'amax', or a scale from 2**-100 to 2**100, got {given!r:.100}")


def pool_formats(pool: Pool) -> list[str]:
    """The formats of a pool's elements."""
    return list(dict.fromkeys(formats_of(pool.layout, pool.shape.dtype).values()))


def require_scales(vllm_config: Any, names: Iterable[str], cast: Scale) -> None:
    """Raise `BindError` unless the layers whose scales are not in their cache have the scale of the cast, and no other.

    A layer may have a scale for each of its heads (checkpoints of the strategy ``attn_head``): vLLM's number for all of them, which
    is the largest, does not say so.

    Parameters
    ----------
    vllm_config
        vLLM's object, with its layers by name.
    names : iterable of str
        The layers of this worker.
    cast : Scale
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    for name in names:
        layer = layers.get(name)
        if str(getattr(layer, "kv_cache_dtype", "")) not in _STATIC:
            continue
        latent = hasattr(layer, "kv_lora_rank")  # MLA: it has no V, and nothing reads a scale of it
        held = {what: _scales(layer, what) for what in (("k",) if latent else ("k", "v"))}
        if not cast.is_given or any(found != [cast.value] for found in held.values()):
            texts = (f"{what} {', '.join(map(repr, found)):.200}" for what, found in held.items())
            raise BindError(
                f"kv_connector_extra_config: cast: {cast}: layer {name!r} has the scales {' and '.join(texts)}; "
                "expected one scale for K and V of all layers and heads, and that number as cast"
            )


def _scales(layer: Any, what: str) -> list[float]:
    """The different scales of a layer's K or V, in float32: what kernels read on the host, and what they read on the device."""
    on_host, on_device = (getattr(layer, f"_{what}_scale{suffix}", None) for suffix in ("_float", ""))
    found = [] if on_host is None else [float(on_host)]
    if on_device is not None:
        found += map(float, on_device.flatten().tolist())
    return sorted({struct.unpack("f", struct.pack("f", one))[0] for one in found}) or [1.0]
