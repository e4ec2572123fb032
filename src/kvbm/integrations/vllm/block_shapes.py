"""Shapes of blocks from vLLM's specs of groups of layers, in the scheduler as in a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from ...engines.vllm import fp8_format, specs_of
from ...errors import BindError
from ...layout.shapes import BlockShape
from ..host_values import HostValues
from .host_layout import row_bytes

__all__ = ["block_of", "cached_groups", "host_bytes"]


def cached_groups(kv_cache_config: Any) -> list[Any]:
    """The groups of layers that vLLM offloads."""
    return [group for group in kv_cache_config.kv_cache_groups if group.kv_cache_spec.prefix_cacheable]


def block_of(group: Any, setting: str, fate: str, vllm_config: Any = None) -> BlockShape:
    """The shape of a rank's block of a group of vLLM, with all layers of the group.

    Messages name the `setting` that asks for it, and the `fate` of other blocks: "it is not …".  With `vllm_config`, caches of
    eight-bit floats with one scale for a layer are welcome, too.  Raises `BindError` unless it is attention with K and V of one
    size, or a latent, in the elements of the model or such floats.
    """
    what = f"{setting}: layer {group.layer_names[0]!r}"
    shapes = {_of_layer(one, what, fate, vllm_config) for one in specs_of(group.kv_cache_spec)}
    if len(shapes) != 1:
        raise BindError(f"{what}: expected layers of one size in a group, got {len(shapes)}; they are not {fate}")
    return replace(shapes.pop(), nl=len(group.layer_names))


def _of_layer(cache_spec: Any, what: str, fate: str, vllm_config: Any) -> BlockShape:
    kind = type(cache_spec)
    if kind not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise BindError(
            f"{what}: expected attention over all tokens, a sliding window or a latent (MLA), got {kind.__name__}; it is not {fate}"
        )
    mode, dtype = cache_spec.kv_quant_mode.name, str(cache_spec.dtype).removeprefix("torch.")
    if mode == "FP8_PER_TENSOR" and vllm_config is not None and (known := fp8_format(vllm_config, cache_spec)) is not None:
        mode, dtype = "NONE", known
    if mode != "NONE" or getattr(cache_spec, "state_content_bytes", None) is not None:
        more, others = ("", "") if vllm_config is None else (", or fp8 with one scale for a layer", "other ")
        raise BindError(
            f"{what}: kv_cache_dtype: expected elements as the model has them{more}, got {cache_spec.kv_quant_mode.name}; "
            f"{others}quantised ones are not {fate}"
        )
    width, width_v = int(cache_spec.head_size), int(cache_spec.head_size_v or cache_spec.head_size)
    is_latent = kind is MLAAttentionSpec
    if getattr(cache_spec, "tokens_per_state", 1) != 1 or not (is_latent or width == width_v):
        raise BindError(f"{what}: expected a state a token, K and V of one size; others are not {fate}")
    halves, heads = (1, 1) if is_latent else (2, int(cache_spec.num_kv_heads))
    return BlockShape(1, halves, heads, int(cache_spec.block_size), width, dtype)


def host_bytes(kv_cache_config: Any, values: HostValues) -> int:
    """Bytes of host memory that a rank needs for a block of any group with quantised values; `BindError` if there is none."""
    found = []
    for group in cached_groups(kv_cache_config):
        shape = block_of(group, "host_values", "quantised on the way to host memory: leave host_values out")
        values.require(shape, f"layer {group.layer_names[0]!r}")
        parts = [tensor.layers for tensor in kv_cache_config.kv_cache_tensors if tensor.layers[0] in group.layer_names]
        found.append([replace(shape, nl=len(layers)) for layers in parts])  # a pool each
    return row_bytes(values.layout, found)
