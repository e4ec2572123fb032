"""Read layout, layers, sizes and ranks of KV caches from vLLM's config objects.  For vLLM 0.26 and newer.

vLLM is not imported: its objects are read by the names of their attributes.  Missing information is not guessed: an error says
what to pass.

vLLM keeps layers in groups.  The layers of a group share one block table.  The groups of a hybrid model share one allocation: a
block id belongs to one group at a time.  Layers of a group with different sizes are in separate parts, so there is one `Group`
per ``KVCacheTensor``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import BindError, LayoutError
from ..layout import spec
from ..layout.layout import Layout
from ..layout.resolved import Resolved
from ..layout.shapes import BlockShape
from ..layout.terms import Expression, Pitch

__all__ = ["Group", "fp8_format", "groups", "number_of_layer", "total_heads"]

#: The orders to which vLLM resolves a layout.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

#: Older names that vLLM still accepts.
ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}

#: Attention backends that store K and V of a token and head side by side, in the order that vLLM reports.
SIDE_BY_SIDE = (
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "HPC_ATTN", "TRITON_FLASH_ATTN", "TRITON_FLASHINFER",
)  # fmt: skip

#: Attention backends that store a latent with its rope part, token by token.
LATENT = (
    "CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE",
)  # fmt: skip

#: Instruction set of the CPU backend → its layout.  Only x86 was compared.
_CPU = {"vec": "vllm/cpu_vec", "vec16": "vllm/cpu_vec", "amx": "vllm/cpu_amx"}

#: Bytes per token of a quantised latent → its layout, and the elements per token.
_RECORDS = {
    656: ("vllm/fp8_ds_mla", 576),
    352: ("vllm/nvfp4_ds_mla", 576),
    584: ("vllm/deepseek_v4", 512),
    528: ("vllm/mla_v41", 512),
}

#: Modes with one scale per token and head.
_PER_TOKEN_HEAD = {"FP8_PER_TOKEN_HEAD": "vllm/per_token_head_fp8", "INT8_PER_TOKEN_HEAD": "vllm/per_token_head_int8"}

_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class Group:
    """Layers of vLLM with the same layout, which become one pool.

    Parameters
    ----------
    index : int
        Index in ``kv_cache_config.kv_cache_groups``.
    names : tuple of str
        vLLM's names of the layers, in the order of memory.
    layers : tuple of int
        Their numbers in the model, in that order.
    layout : Layout
        A layout of the catalogue, with an added pitch if there are other layers or padding between.
    shape : BlockShape
        Sizes of a block on this rank.
    num_blocks : int
        Number of blocks.
    order : str
        The order that vLLM reports, such as ``"LBHNC"``.
    backend : str
        The attention backend.
    view : tuple of int
        Shape of a layer's view ``(num_blocks, heads, tokens, content)``, content in bytes.
    strides : tuple of int
        Bytes between layers, blocks, heads, tokens and content.
    offset : int
        Bytes from the beginning of the allocation to its first layer.
    sliding_window : int or None
        Tokens of the sliding window; None for full attention.
    tp, pp, dcp, interleave, rank : int
        The parallel configuration.  The rank counts within the ranks of one replica (``pp tp``).
    heads : int or None
        KV heads of these layers on all ranks together; None if the config allows several numbers (`total_heads`).
    model_layers : int
        Layers of the whole model.
    """

    index: int
    names: tuple[str, ...]
    layers: tuple[int, ...]
    layout: Layout
    shape: BlockShape
    num_blocks: int
    order: str
    backend: str
    view: tuple[int, int, int, int]
    strides: tuple[int, int, int, int, int]
    offset: int
    sliding_window: int | None
    tp: int
    pp: int
    dcp: int
    interleave: int
    rank: int
    heads: int | None
    model_layers: int

    def __str__(self) -> str:
        return f"group {self.index} of vLLM ({len(self.names)} layers from {self.names[0]!r} on, {self.layout.name}, {self.shape})"

    def arrays(self, kv_caches: Mapping[str, Any]) -> list[Any]:
        """The tensors of `kv_caches` for a `Pool` with this layout and shape: views of the same memory.

        `kv_caches` is the argument of a connector's ``register_kv_caches``.  It may contain other layers, too.  Raises
        `BindError` if a layer is missing, or shapes, strides or offsets differ from the config.
        """
        if missing := [name for name in self.names if name not in kv_caches]:
            raise BindError(f"{self}: layer {missing[0]!r}: expected it in kv_caches, got {_some(kv_caches)}")
        first = kv_caches[self.names[0]]
        for number, name in enumerate(self.names):
            self._require(name, kv_caches[name], first, number)
        resolved = self.layout.resolve(self.shape, self.num_blocks)
        if resolved.first.itemsize != first.element_size():  # several planes: bytes
            first = first.view(sys.modules["torch"].uint8)
        size = first.element_size()
        made = []
        for kind, number in zip(resolved.allocations, range(resolved.table_size), strict=True):
            at = first.storage_offset() + number * self.strides[0] // size
            steps = [step // size for step in kind.strides]
            made.append(first.as_strided(kind.shape, steps, at))
        return made

    def _require(self, name: str, tensor: Any, first: Any, number: int) -> None:
        size = tensor.element_size()
        shape = (*self.view[:3], self.view[3] // size)
        steps = (*(step // size for step in self.strides[1:4]), 1)
        if tuple(tensor.shape) != shape or any(
            length > 1 and is_ != want for length, is_, want in zip(shape, tensor.stride(), steps, strict=True)
        ):
            raise BindError(
                f"{self}: layer {name!r}: expected a view of shape {shape} and strides {steps}, as the config says, got "
                f"{tuple(tensor.shape)} and {tuple(tensor.stride())}"
            )
        step = tensor.data_ptr() - first.data_ptr()
        if (tensor.dtype, step) != (first.dtype, number * self.strides[0]):
            raise BindError(
                f"{self}: layer {name!r}: expected {first.dtype} {number * self.strides[0]} bytes after {self.names[0]!r}, got "
                f"{tensor.dtype} {step} bytes after it"
            )


def groups(
    vllm_config: Any, kv_cache_config: Any, *, group: int | None = None, layout: str | Layout | None = None
) -> list[Group]:
    """The groups of a worker's KV cache, from the config objects that vLLM passes to its connectors.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        vLLM's config.
    kv_cache_config : vllm.v1.kv_cache_interface.KVCacheConfig
        vLLM's config of the KV cache.
    group : int, optional
        Read only this group.  Default: all.
    layout : str or Layout, optional
        The layout of the contents of a view, instead of the config's.  Needed for attention backends that kvbm does not know.

    Returns
    -------
    list of Group
        One per ``KVCacheTensor``, in their order.

    Raises
    ------
    BindError
        The config does not contain what is needed, or kvbm does not know a value.  The message says what to pass.
    """
    kv_groups = list(_of(kv_cache_config, "kv_cache_config", "kv_cache_groups"))
    if group is not None and group not in range(len(kv_groups)):
        raise BindError(f"vLLM: group: expected one of 0 to {len(kv_groups) - 1}, got {group!r}")
    order = _order(vllm_config, kv_cache_config)
    found = []
    for tensor in _of(kv_cache_config, "kv_cache_config", "kv_cache_tensors"):
        names = tuple(_of(tensor, "kv_cache_config.kv_cache_tensors[…]", "layers"))
        indices = [index for index, one in enumerate(kv_groups) if names[0] in one.layer_names]
        if len(indices) != 1:
            raise BindError(f"vLLM: layer {names[0]!r}: expected it in one group of kv_cache_groups, got it in {len(indices)}")
        if group in (None, indices[0]):
            found.append(
                _group(vllm_config, kv_cache_config, kv_groups[indices[0]], indices[0], tensor, names, order, layout)
            )
    if not found:
        raise BindError(
            "vLLM: kv_cache_config: expected tensors of "
            + ("at least one group" if group is None else f"group {group}")
            + ", got none"
        )
    return found


def _group(
    vllm_config: Any, kv_cache_config: Any, kv_group: Any, index: int, tensor: Any, names: tuple[str, ...], order: str,
    layout: Any,
) -> Group:  # fmt: skip
    what = f"vLLM: group {index}, layer {names[0]!r}"
    cache_spec = kv_group.kv_cache_spec
    cache_spec = getattr(cache_spec, "kv_cache_specs", {}).get(names[0], cache_spec)  # layers of one type with different sizes
    if getattr(cache_spec, "num_kv_heads", None) is None:
        raise BindError(
            f"{what}: {type(cache_spec).__name__}: expected attention with keys and values or a latent; it has no layout here"
            + _readable(kv_cache_config)
        )
    if getattr(tensor, "host_resident", False):
        raise BindError(f"{what}: its blocks are in a host pool with separate numbers; expected blocks on the device")
    tokens, per_state = int(cache_spec.block_size), getattr(cache_spec, "tokens_per_state", 1)
    if per_state != 1:
        raise BindError(f"{what}: {per_state} tokens share a state (compressed); expected one state per token: no layout is known")
    heads = int(getattr(cache_spec, "num_head_slots", None) or cache_spec.num_kv_heads)
    blocks = int(kv_cache_config.num_blocks)
    content = int(cache_spec.state_content_size_bytes)
    view = (blocks, heads, tokens, content)
    strides = _strides(order, len(names), view, int(tensor.layer_stride), int(tensor.block_stride))
    known = _Spec(what, order, _backend(vllm_config, names, what), cache_spec, heads, tokens, content)
    name, shape = _content(vllm_config, known, names, layout)
    shape = replace(shape, nl=len(names))
    chosen = spec.as_layout(name)
    parallel = vllm_config.parallel_config
    if (pcp := getattr(parallel, "prefill_context_parallel_size", 1)) != 1:
        raise BindError(f"{what}: prefill_context_parallel_size: expected 1, got {pcp}: a placement cannot describe its ranks")
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    model, layers = vllm_config.model_config, tuple(number_of_layer(name) for name in names)
    return Group(
        index=index, names=names, layers=layers,
        layout=_pitched(chosen, shape, view, strides, what), shape=shape, num_blocks=blocks, order=order, backend=known.backend,
        view=view, strides=strides, offset=int(tensor.offset),
        sliding_window=getattr(cache_spec, "sliding_window", None), tp=tp, pp=pp,
        dcp=int(parallel.decode_context_parallel_size) if getattr(cache_spec, "dcp_sharded", True) else 1,
        interleave=int(getattr(parallel, "cp_kv_cache_interleave_size", 1)), rank=int(parallel.rank) % (tp * pp),
        heads=1 if hasattr(cache_spec, "cache_dtype_str") else total_heads(model, layers, int(cache_spec.num_kv_heads), tp),
        model_layers=int(model.get_total_num_hidden_layers()),
    )  # fmt: skip


def specs_of(cache_spec: Any) -> list[Any]:
    """The specs of a group's layers: its own, or one for each layer where they differ in size."""
    return list((getattr(cache_spec, "kv_cache_specs", None) or {"": cache_spec}).values())


def _readable(kv_cache_config: Any) -> str:
    """The advice to read only the groups that have a layout; empty if none has."""
    each = [specs_of(getattr(one, "kv_cache_spec", None)) for one in kv_cache_config.kv_cache_groups]
    found = [str(i) for i, some in enumerate(each) if all(getattr(one, "num_kv_heads", None) is not None for one in some)]
    return f"; pass group= with one of {', '.join(found)} to read a group that has one" if found else ""


class _Spec(NamedTuple):
    """A group's spec, and further data of it."""

    what: str
    order: str
    backend: str
    cache_spec: Any
    heads: int
    tokens: int
    content: int

    def refuse(self, why: str, use: str = "a layout that says where it writes") -> BindError:
        return BindError(f"{self.what}: {self.backend}, {self.order}: {why}; pass layout= with {use}")


def _content(vllm_config: Any, known: _Spec, names: Sequence[str], layout: Any) -> tuple[str | Layout, BlockShape]:
    """The layout of a view, and the shape of a block and layer."""
    cache_spec, order = known.cache_spec, known.order
    mode = getattr(getattr(cache_spec, "kv_quant_mode", None), "name", "NONE")
    width = int(cache_spec.head_size)
    both = BlockShape(1, 2, int(cache_spec.num_kv_heads), known.tokens, width, _dtype(vllm_config, known, mode))
    if layout is not None:
        given = spec.load(layout) if isinstance(layout, str) else layout
        latent = hasattr(cache_spec, "cache_dtype_str")
        return given, replace(both, no=1, nh=1) if latent else both
    if hasattr(cache_spec, "cache_dtype_str"):
        return _latent(known, both)
    if known.backend == "CPU_ATTN":
        return _cpu(vllm_config, known, names), both
    if "DIFFKV" in known.backend or cache_spec.head_size_v != cache_spec.head_size:
        if order != "LBNHC" or 3 * cache_spec.head_size_v != 2 * width or not known.backend.endswith("DIFFKV"):
            raise known.refuse(
                f"heads of {width} in K and {cache_spec.head_size_v} in V: expected LBNHC with V two thirds of K (vllm/diff_kv)"
            )
        return "vllm/diff_kv", replace(both, no=1)
    if known.backend not in SIDE_BY_SIDE:
        raise known.refuse("kvbm does not know the order in which this backend writes a block")
    if mode == "NVFP4":
        raise known.refuse(
            "NVFP4: the scales of V are interleaved on SM100 and not on SM120, and the config does not say which",
            "'vllm/nvfp4' or 'vllm/nvfp4_sm120'",
        )
    if name := _PER_TOKEN_HEAD.get(mode):
        if order != "LBNHC":
            raise known.refuse(f"{mode}: expected LBNHC, the order of {name}", "its order")
        return name, replace(both, dtype="uint8")
    if mode not in ("NONE", "FP8_PER_TENSOR"):
        raise known.refuse(f"{mode}: no layout is known")
    if known.heads != cache_spec.num_kv_heads or known.content != 2 * width * both.itemsize:
        raise known.refuse(
            f"expected {cache_spec.num_kv_heads} heads of {2 * width * both.itemsize} bytes, got {known.heads} of {known.content}"
        )
    return f"vllm/{order}", both


def _latent(known: _Spec, both: BlockShape) -> tuple[str, BlockShape]:
    cache_spec, content = known.cache_spec, known.content
    one = replace(both, no=1, nh=1)
    if known.heads != 1:
        raise known.refuse(f"a latent: expected 1 head, got {known.heads}")
    if cache_spec.state_content_bytes is not None:
        if content not in _RECORDS:
            raise known.refuse(
                f"{cache_spec.cache_dtype_str}: expected one of {', '.join(map(str, _RECORDS))} bytes per token, got {content}"
            )
        name, width = _RECORDS[content]
        return name, replace(one, hd=width, dtype="uint8")
    if known.backend == "DEEPSEEK_V32_INDEXER" and content == 132:
        return "vllm/dsa_indexer", replace(one, hd=128, dtype="uint8")
    if known.backend not in LATENT:
        raise known.refuse(
            "kvbm does not know the order in which this backend writes a block", "'vllm/mla' if it is one latent per token"
        )
    return "vllm/mla", one


def _cpu(vllm_config: Any, known: _Spec, names: Sequence[str]) -> str:
    """The layout of the CPU backend.  It reports LBHNC, but writes in an order that depends on the machine's instruction set."""
    if known.order != "LBHNC":
        raise known.refuse("the CPU backend: expected LBHNC")
    found = {str(getattr(_layer(vllm_config, name), "isa", None)) for name in names}
    if len(found) != 1 or not found & set(_CPU):
        raise known.refuse(
            f"the CPU backend orders K and V by its instruction set (isa of the layers): expected {', '.join(_CPU)}, got "
            f"{', '.join(sorted(found))}",
            "'vllm/cpu_vec' or 'vllm/cpu_amx' if it is one of them",
        )
    return _CPU[found.pop()]


def _dtype(vllm_config: Any, known: _Spec, mode: str) -> str:
    if mode != "FP8_PER_TENSOR":
        return str(known.cache_spec.dtype).removeprefix("torch.")
    name = _cache_dtype(vllm_config, known.cache_spec)
    if (found := fp8_format(vllm_config, known.cache_spec)) is None:
        raise known.refuse(f"cache_dtype {name!r}: kvbm does not know this format of eight-bit floats")
    return found


def fp8_format(vllm_config: Any, cache_spec: Any) -> str | None:
    """The format of a cache of eight-bit floats with one scale for a layer (FP8_PER_TENSOR); None if kvbm does not know it."""
    torch = sys.modules.get("torch")
    return None if torch is not None and torch.version.hip else _FP8.get(_cache_dtype(vllm_config, cache_spec))


def _cache_dtype(vllm_config: Any, cache_spec: Any) -> str:
    return str(getattr(cache_spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype)


def _pitched(layout: Layout, shape: BlockShape, view: Sequence[int], strides: Sequence[int], what: str) -> Layout:
    """The layout with the config's steps between layers and blocks, if they differ from those of the layout."""
    layer, block = strides[:2]
    try:
        resolved = layout.resolve(shape, view[0])
        pitches = dict(layout.pitch)
        if view[0] > 1 and resolved.id_steps[1] != block:
            pitches["b"] = Pitch(Expression(str(block)), in_bytes=True)
        if shape.nl > 1 and _layer_step(resolved) not in (0, layer):
            pitches["l"] = Pitch(Expression(str(layer)), in_bytes=True)
        if pitches != dict(layout.pitch):
            layout = replace(layout, pitch=tuple(sorted(pitches.items())))
            resolved = layout.resolve(shape, view[0])
        steps = _layer_step(resolved), resolved.id_steps[1]
        if (shape.nl > 1 and steps[0] not in (0, layer)) or (view[0] > 1 and steps[1] != block):
            raise LayoutError(f"{layout.name} ({layout.order_text}): layers {steps[0]} and blocks {steps[1]} bytes apart")
    except LayoutError as error:
        raise BindError(f"{what}: {error}; expected layers {layer} and blocks {block} bytes apart") from None
    if (nbytes := resolved.block_bytes // shape.nl) != view[1] * view[2] * view[3]:
        raise BindError(
            f"{what}: {layout.name} ({layout.order_text}): expected {view[1] * view[2] * view[3]} bytes per block and layer, as "
            f"the config says, got {nbytes} at {shape}; pass another layout="
        )
    return layout


def _layer_step(resolved: Resolved) -> int:
    """Bytes between layers inside an allocation; 0 if each layer has its own allocation, or if there are several planes."""
    if resolved.layout.planes:
        return 0
    return next((piece.stride for piece in resolved.pieces() if piece.term.axes == ("l",)), 0)


def _strides(order: str, layers: int, view: Sequence[int], layer: int, block: int) -> tuple[int, int, int, int, int]:
    """Bytes between layers, blocks, heads, tokens and content, by vLLM's rule; those of layers and blocks are given."""
    sizes = dict(zip("LBHNC", (layers, *view), strict=True))
    fixed = {"L": layer, "B": block}
    found, step = {}, 1
    for axis in reversed(order):
        found[axis] = fixed.get(axis, step)
        step = found[axis] * sizes[axis]
    return found["L"], found["B"], found["H"], found["N"], found["C"]


def _order(vllm_config: Any, kv_cache_config: Any) -> str:
    cache = _of(vllm_config, "vllm_config", "cache_config")
    found = {getattr(cache, "kv_cache_layout", None), getattr(kv_cache_config, "kv_cache_layout", None)} - {None}
    names = {ALIASES.get(name, name) for name in map(str, found)}
    if not names:
        raise BindError(
            "vLLM: kv_cache_layout: expected the layout that vLLM has resolved, in cache_config or kv_cache_config, got none: vLLM "
            "before 0.26, or not resolved yet; bind with Pool.from_vllm(kv_caches, layout), such as 'vllm/flash_attn_nhd'"
        )
    if len(names) > 1 or not names <= set(ORDERS):
        raise BindError(f"vLLM: kv_cache_layout: expected one of {', '.join(ORDERS)}, got {' and '.join(sorted(names))}")
    return names.pop()


def _layer(vllm_config: Any, name: str) -> Any:
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    return layers.get(name)


def _backend(vllm_config: Any, names: Sequence[str], what: str) -> str:
    """The attention backend of the layers.  It determines the order inside a block."""
    found = set()
    for name in names:
        ask = getattr(_layer(vllm_config, name), "get_attn_backend", None)
        found.add(str(ask().get_name()) if ask is not None else None)
    if len(found) == 1 and None not in found:
        return str(found.pop())
    if None in found:
        raise BindError(
            f"{what}: expected the layer in vllm_config.compilation_config.static_forward_context, which names its attention "
            "backend, got none: the config of a worker has it; elsewhere bind with Pool.from_vllm(kv_caches, layout)"
        )
    raise BindError(f"{what}: expected one attention backend for all layers of a tensor, got {', '.join(sorted(map(str, found)))}")


def total_heads(model_config: Any, layers: Sequence[int], held: int, tp: int) -> int | None:
    """KV heads of some layers on all ranks together.  In some models layers differ: in Gemma 4 and MiMo V2 by their windows.

    A rank has `held` of them.  With one head per rank the ranks may hold different heads or copies, and only the model's config
    can tell; None if it names several numbers that give a rank one head, or none.
    """
    if held > 1 or tp == 1:
        return held * tp
    arch: Any = getattr(model_config, "model_arch_config", None)
    text = getattr(model_config, "hf_text_config", None)
    if overrides := getattr(arch, "per_layer_overrides", None):
        said = {int(arch[layer].total_num_kv_heads) for layer in layers if layer < len(overrides)}
    elif getattr(text, "block_configs", None):  # Nemotron of NAS: each layer has its own
        return None
    else:
        named = [value for name, value in getattr(text, "__dict__", {}).items() if re.search("num_(key_value|kv)_heads$", name)]
        said = {int(model_config.get_total_num_kv_heads()), *(value for value in named if type(value) is int)}
    fits = [heads for heads in said if 0 < heads <= tp and tp % heads == 0]
    return fits[0] if len(fits) == 1 else None


def number_of_layer(name: str) -> int:
    """A layer's number in the model, from its name; `BindError` unless the name has exactly one number."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise BindError(f"vLLM: layer {name!r}: expected one number between dots, got {len(numbers)}; pass a list in order")
    return int(numbers[0])


def _of(config: Any, where: str, attribute: str) -> Any:
    found = getattr(config, attribute, None)
    if found is None:
        raise BindError(
            f"vLLM: {where}: expected the attribute {attribute!r} of vLLM 0.26 and newer, got {type(config).__name__} without it; "
            "bind with Pool.from_vllm(kv_caches, layout)"
        )
    return found


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(names)[:3])) + (" …" if len(names) > 3 else "")
