"""Show what kvbm would do in a vLLM engine without starting it: layouts, host memory, copies, messages to another engine.

It needs only sizes: no cache is allocated, and vLLM need not be installed.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar

from ... import reshard
from ...copy import cost_model
from ...engines.vllm import ALIASES, LATENT, ORDERS, SIDE_BY_SIDE, Group, groups
from ...errors import BindError, CudaError, KvbmError, SpecError
from ...layout import spec
from ...layout.layout import Layout
from ...layout.naming import suggestion
from ...layout.resolved import Resolved
from ...layout.shapes import BlockShape, round_up
from ...planner.cast import AMAX, Cast, as_cast, to_json
from ...planner.lowering import engine_arguments
from ...planner.plan import Plan, plan
from ...reshard import presets, report
from ...reshard.placement import Placement
from ...system import machine
from ..host_values import HostValues, latent_and_rope
from .folder import Settings, require_ranks
from .host_layout import PAGES, one_array, row_bytes
from .models import Model

__all__ = ["PAGES", "Engine", "as_json", "notes"]

_Made = TypeVar("_Made")

#: Assumed number of the engine's blocks.  It determines the strides between layers, which do not affect the output.
_NUM_BLOCKS = 4096

#: vLLM rounds the bytes of a chunk of host memory up to a multiple of it.
_ROUND = 4096

#: Default attention backends: for K and V, and for a latent.
BACKENDS = ("FLASH_ATTN", "FLASH_ATTN_MLA")

#: Attention backends → the number of which vLLM 0.32 takes multiples as block sizes on CUDA.  Other backends are not checked.
_MULTIPLES = {
    "FLASH_ATTN": 16, "FLASHINFER": 16, "TRITON_ATTN": 16, "FLEX_ATTENTION": 16, "FLASH_ATTN_MLA": 16, "TRITON_MLA": 16,
    "FLASHINFER_MLA": 32, "FLASHMLA": 64, "CUTLASS_MLA": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """A vLLM engine, described by its flags.

    Raises `SpecError` or `BindError` if vLLM, or kvbm in vLLM, does not support them.  `tp`, `pp` and `dcp` are numbers of
    ranks, `nt` tokens per block, `order` and `cache_dtype` as ``VLLM_KV_CACHE_LAYOUT`` and ``--kv-cache-dtype``.  The default
    `backend` is FLASH_ATTN, or FLASH_ATTN_MLA for a latent.
    """

    model: Model
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    nt: int = 16
    order: str = "LBHNC"
    cache_dtype: str = "auto"
    backend: str = ""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            meant = ALIASES.get(self.order) or (name if (name := self.order.rpartition("/")[2]) in ORDERS else None)
            hint = "" if meant is None else f"; that is {meant}"
            raise SpecError(f"layout: expected one of {', '.join(ORDERS)}, got {self.order!r:.100}{hint}")
        if self.model.attention_heads % self.tp:
            raise SpecError(f"tp: expected a divisor of the {self.model.attention_heads} attention heads, got {self.tp}")
        if self.model.readers and self.pp > 1:
            raise SpecError(
                f"pp: expected 1, as {self.model.readers} layers read the caches of layers before them, got {self.pp} stages"
            )
        if self.tp % self.dcp:
            raise SpecError(f"dcp: expected a divisor of tp {self.tp}, got {self.dcp}")
        presets.vllm(self.whole, tp=self.tp, pp=self.pp, dcp=self.dcp)  # raises an error if heads or layers cannot be split

    @property
    def backend_name(self) -> str:
        """The attention backend, given or by default."""
        return self.backend or BACKENDS[self.model.is_latent]

    def require_block_size(self, where: str = "") -> None:
        """Raise `BindError` if vLLM's backend does not take this block size.  `where` is the start of the message."""
        multiple = _MULTIPLES.get(self.backend_name, 1)
        if self.nt % multiple:
            raise BindError(f"{where}block-size: expected a multiple of {multiple} for {self.backend_name}, got {self.nt}")

    def _require_backend(self) -> None:
        """Raise `BindError` if the order in which the backend writes a block is not known here."""
        known, name = LATENT if self.model.is_latent else SIDE_BY_SIDE, self.backend_name
        if name == "CPU_ATTN" and not self.model.is_latent:
            raise BindError(
                "backend: CPU_ATTN orders K and V by the instruction set of the engine's machine, which is not known here; kvbm "
                f"asks the engine when it starts. Backends that can be checked here: {', '.join(known)}"
            )
        if name not in known:
            raise BindError(
                f"backend: expected one of {', '.join(known)}, as kvbm does not know the order in which others write a block; got "
                f"{name!r:.100}.{suggestion(name, known)}"
            )

    @cached_property
    def whole(self) -> BlockShape:
        """Shape of a block of the whole model."""
        return replace(self.model.shape, nt=self.nt)

    @cached_property
    def placement(self) -> Placement:
        """The layers and heads that each rank holds, in all groups together."""
        return presets.vllm(self.whole, tp=self.tp, pp=self.pp)

    @property
    def is_shared(self) -> bool:
        """True if all ranks hold the same, so that host memory holds it once."""
        return self.model.is_latent and self.tp > 1 and self.pp == self.dcp == 1

    def groups(self, stage: int, layout: Layout | None = None) -> list[Group]:
        """The groups of a stage's first rank, as a connector on this rank reads them from vLLM's config, or in another layout."""
        if layout is None:
            self._require_backend()
        rank, model = stage * self.tp, self.model
        shape = self.placement.shape(rank)
        content = shape.no * shape.hd * shape.itemsize
        mode = "FP8_PER_TENSOR" if self.cache_dtype.startswith("fp8") else "NONE"
        cache_spec = SimpleNamespace(
            block_size=self.nt, num_kv_heads=shape.nh, head_size=shape.hd, head_size_v=shape.hd, dtype=shape.dtype,
            state_content_bytes=None, state_content_size_bytes=content, kv_quant_mode=SimpleNamespace(name=mode),
            **({"cache_dtype_str": self.cache_dtype} if model.is_latent else {}),
        )  # fmt: skip
        mine = set(self.placement.strips(rank).l)
        held, tensors, context = [], [], {}
        for one in model.groups:
            names = [f"model.layers.{layer}.self_attn.attn" for layer in one.layers if layer in mine]
            held.append(
                SimpleNamespace(
                    layer_names=names, kv_cache_spec=SimpleNamespace(**vars(cache_spec), sliding_window=one.sliding_window)
                )
            )
            if names:
                layer, block = self._steps(stage, len(names))
                tensors.append(SimpleNamespace(layers=names, layer_stride=layer, block_stride=block, offset=0))
            backend = SimpleNamespace(get_name=lambda: self.backend_name)
            context.update({name: SimpleNamespace(get_attn_backend=lambda found=backend: found) for name in names})
        parallel = SimpleNamespace(
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            decode_context_parallel_size=self.dcp,
            rank=rank,
        )
        config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=self.order, cache_dtype=self.cache_dtype), parallel_config=parallel,
            compilation_config=SimpleNamespace(static_forward_context=context),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: model.shape.nh, get_total_num_hidden_layers=lambda: model.shape.nl
            ),
        )  # fmt: skip
        held_blocks = SimpleNamespace(num_blocks=_NUM_BLOCKS, kv_cache_groups=held, kv_cache_tensors=tensors)
        return groups(config, held_blocks, layout=layout)

    def _steps(self, stage: int, layers: int) -> tuple[int, int]:
        """Strides of layers and of blocks in bytes, in vLLM's memory for a group of `layers` layers."""
        shape = self.placement.shape(stage * self.tp)
        sizes = {"L": layers, "B": _NUM_BLOCKS, "H": shape.nh, "N": self.nt, "C": shape.no * shape.hd * shape.itemsize}
        steps, step = {}, 1
        for axis in reversed(self.order):
            steps[axis] = step
            step *= sizes[axis]
        return steps["L"], self.block_bytes(stage) if self.order[0] == "B" else steps["B"]

    def block_bytes(self, stage: int) -> int:
        """Bytes of a block on a rank: those of the largest group, as all groups use the same memory."""
        held = self.placement.strips(stage * self.tp).l
        shape = self.placement.shape(stage * self.tp)
        most = max(sum(layer in held for layer in one.layers) for one in self.model.groups)
        return most * shape.nbytes // shape.nl

    @property
    def flags(self) -> list[str]:
        found = ["--tensor-parallel-size", str(self.tp), "--pipeline-parallel-size", str(self.pp)]
        if self.dcp > 1:
            found += ["--decode-context-parallel-size", str(self.dcp)]
        return [*found, "--block-size", str(self.nt), "--kv-cache-dtype", self.cache_dtype]

    def command(self, transfer: Mapping[str, Any]) -> str:
        """The command line that starts the engine."""
        text = json.dumps(transfer)
        words = ["vllm", "serve", self.model.served, *self.flags, "--kv-transfer-config", text]
        return f"VLLM_KV_CACHE_LAYOUT={self.order} {shlex.join(words)}"


# ---- offloading ----------------------------------------------------------------------------------------------------


def _host(engine: Engine, host_bytes: int, host_layout: str, values: HostValues | None = None) -> dict[str, Any]:
    """The number of blocks and tokens that fit into host memory."""
    copies = 1 if engine.is_shared else engine.tp * engine.pp
    if values is None:
        sizes = [engine.block_bytes(stage) for stage in range(engine.pp)]
    else:
        sizes = [row_bytes(values.layout, [[group.shape] for group in engine.groups(stage)]) for stage in range(engine.pp)]
    chunk = round_up(max(sizes) * copies, _ROUND)
    blocks = host_bytes // chunk
    if not blocks:
        raise BindError(f"host-gib: expected at least {chunk} bytes, which a block of all ranks takes, got {host_bytes}")
    notes = []
    if len(set(sizes)) > 1:
        notes.append(f"stages have blocks of {min(sizes)} to {max(sizes)} bytes: counted as if all had the largest")
    if len(engine.model.groups) > 1:
        notes.append(f"tokens are counted as if each of the {len(engine.model.groups)} groups kept all of its blocks")
    return {
        "layout": host_layout if values is None else values.layout.name, "bytes": host_bytes, "bytes_a_block": chunk,
        "values": None if values is None else values.text(engine.model.shape.dtype), "copies": copies, "blocks": blocks,
        "tokens": blocks // len(engine.model.groups) * engine.nt * engine.dcp, "notes": notes,
    }  # fmt: skip


def _pairs(
    engine: Engine, stage: int, host_layout: str, values: HostValues | None = None
) -> Iterator[tuple[list[str], Resolved, int, Resolved]]:
    """The transfers of a stage: groups, the engine's side, stride of its allocations (bytes), and the host's side of each."""
    found: dict[Any, tuple[list[str], Resolved, int, Resolved]] = {}
    is_pages = values is None and host_layout == PAGES
    target = values.layout if values is not None else spec.load("universal" if is_pages else host_layout)
    for group in engine.groups(stage, latent_and_rope(values.rope) if values is not None and values.rope else None):
        if is_pages:
            packed = engine.order[0] == "B" and len(group.names) > 1
            if group.order == "LHBNC" and group.shape.nh > 1:
                raise BindError(
                    f"{group}: heads of a page lie apart, and vLLM tells pages as if they did not; expected --host-layout with a "
                    "layout, such as universal, or another --layout"
                )
            page = engine.block_bytes(stage) if packed else group.shape.nbytes // group.shape.nl
            shape = BlockShape(1 if packed else group.shape.nl, 1, 1, 1, page, "uint8")
            layout = spec.parse('order: "[l] b d"', name=PAGES)
        else:
            layout, shape = group.layout, group.shape
        source = layout.resolve(shape, _NUM_BLOCKS)
        step = group.strides[0] if source.table_size > 1 else 0
        entry = found.setdefault((layout, shape), ([], source, step, target.resolve(shape, _NUM_BLOCKS)))
        entry[0].append(str(group.index))
    if not is_pages and (len(found) > 1 or engine.is_shared):
        for _, source, _, _ in found.values():
            one_array(target, source.shape)  # raises an error if host memory cannot hold the blocks side by side
    for names, source, step, dest in found.values():
        yield names, source, step, dest


def _table(device: int) -> cost_model.Table | None:
    """The tuning table that `kvbm tune` measured on this machine; None without one."""
    try:
        return cost_model.load(*machine.gpu_and_driver(device))
    except (CudaError, ImportError):
        return None


def _runs(made: Plan) -> int:
    """Number of contiguous runs of a block."""
    return sum(part.nbytes // part.run_bytes for part in made.parts)


def _way(
    src: Resolved, dst: Resolved, steps: tuple[int | None, int | None], direction: str, blocks: int, table: Any, cast: Cast = None
) -> dict[str, Any]:
    """The copy of a batch of blocks, with the strategy that `Transfer` would choose."""
    made = plan(src.layout, dst.layout, (src.shape, dst.shape), num_blocks=(src.num_blocks, dst.num_blocks), cast=cast)
    gathers = direction == "d2h"
    first, second = made.staged(gathers=gathers)
    move = first.flat(steps[0], None) if not gathers else second.flat(None, steps[1])
    runs = made if made.casts else made.flat(*steps)
    launches = len(made.launches())
    ways = {"direct": cost_model.Way(made.nbytes // _runs(made), launches)}
    for name, some in (("staged", move), ("engine", runs)):
        if not (some.casts and name == "engine") and engine_arguments(some.parts):
            ways[name] = cost_model.Way(made.nbytes // _runs(some))
    if made.casts and "staged" in ways:  # as for `Transfer`
        del ways["direct"]
    if "engine" in ways and ways["engine"].run_bytes < cost_model.ENGINE_RUN:
        del ways["engine"]
    choice = table.choose(direction, ways, made.nbytes) if table is not None and cast is None else None
    is_measured = choice is not None
    if choice is None:
        choice = cost_model.choose(cost_model.BUILT_IN, direction, ways, made.nbytes)
        assert choice is not None
    name = next((name for most, name in choice.limits if blocks <= most), choice.limits[-1][1])
    times = cost_model.groups_of(blocks, made.nbytes, gathers=gathers)
    gbps = None
    if is_measured:
        seconds = float(table.costs[direction, name].seconds(blocks, made.nbytes, ways[name]))
        gbps = float(f"{blocks * made.nbytes / seconds / 1e9:.3g}")
    return {
        "blocks": blocks, "bytes": blocks * made.nbytes, "kernels": made.kernels(), "strategy": name,
        "launches": {"direct": launches, "staged": times, "engine": 0}[name],
        "descriptors": {"direct": 0, "staged": blocks * _runs(move), "engine": blocks * _runs(runs)}[name],
        "gbps": gbps, "measured": table.title if is_measured else None,
    }  # fmt: skip


def _copies(
    engine: Engine, host_layout: str, blocks: int, device: int, values: HostValues | None = None
) -> list[dict[str, Any]]:
    """A store and a load of `blocks` blocks for each kind of rank."""
    table, found, seen, cast = _table(device), [], set(), None if values is None else AMAX
    for stage in range(engine.pp):
        for names, source, step, host in _pairs(engine, stage, host_layout, values):
            if (key := (tuple(names), source.layout, source.shape)) in seen:
                continue
            seen.add(key)
            row = host.nbytes // host.num_blocks if host.table_size == host.num_blocks else None
            sizes = {
                "stage": stage,
                "groups": names,
                "vllm_descriptors": blocks * _regions(engine, stage, int(names[0])),
            }
            found.append({"way": "store", **sizes, **_way(source, host, (step, row), "d2h", blocks, table, cast)})
            found.append({"way": "load", **sizes, **_way(host, source, (row, step), "h2d", blocks, table, cast)})
    return found


def _regions(engine: Engine, stage: int, group: int) -> int:
    """Number of ranges that vLLM's own copier lists per block: one per layer, or one if the layers of a block are contiguous."""
    if engine.order[0] == "B":
        return 1
    held = engine.placement.strips(stage * engine.tp).l
    return sum(layer in held for layer in engine.model.groups[group].layers)


# ---- another engine ------------------------------------------------------------------------------------------------


def _placements(engine: Engine, name: str, dtype: str | None = None) -> list[Placement]:
    """The placements of the groups, as `KvbmConnector` makes them; of another dtype if one is given."""
    if engine.pp > 1 and len(engine.model.groups) > 1:
        raise SpecError(
            f"{name}: pp: expected 1 for layers of {len(engine.model.groups)} groups, got {engine.pp} stages: KvbmConnector on a "
            "rank knows the layers of its own stage alone"
        )
    found = []
    try:
        held = engine.groups(0)
    except BindError as error:
        raise BindError(f"{name}: {error}") from None
    for group in held:
        if group.dcp != 1:
            raise BindError(f"{name}: dcp: expected 1, got {group.dcp}: KvbmConnector refuses decode context parallelism")
        made, _ = presets.of_vllm(group)
        model = made.model if dtype is None else replace(made.model, dtype=dtype)
        found.append(presets.vllm(model, tp=engine.tp, pp=engine.pp, layers=made.layers, name=name))
    return found


def _between(src: Engine, dst: Engine, tokens: int, cast: Cast) -> dict[str, Any]:
    """The messages between the ranks of two engines."""
    messages, plans, sentences, casts = [], [], [], []
    sides = zip(_placements(src, "prefill"), _placements(dst, "decode"), src.model.groups, strict=True)
    layouts = [[one.layout for one in engine.groups(0)] for engine in (src, dst)]
    for number, (src_place, dst_place, group) in enumerate(sides):
        told = cast if src_place.model.dtype != dst_place.model.dtype else None
        made = reshard.plan(src_place, dst_place, cast=told, layouts=[of[number] for of in layouts])
        casts += report.cast_texts(made)
        plans.append(report.as_json(made))
        sentences.append(report.sentence(made))
        if made.casts:  # chunks are those of a cache in the smaller format
            dtype = (src_place, dst_place)[made.coded].model.dtype
            made = reshard.plan(_placements(src, "prefill", dtype)[number], _placements(dst, "decode", dtype)[number])
        first = 0
        if group.sliding_window:  # blocks before the window are not held
            first = max(0, tokens - group.sliding_window + 1) // dst.nt * dst.nt
        for message in made.messages:
            count = made.nbytes(message, tokens) - made.nbytes(message, first)
            cut = reshard.chunks(made, message, range(first, tokens))
            messages.append(
                {"group": number, "from": message.src, "to": message.dst, "bytes": count, "chunks": len(cut)}
            )
    return {
        "tokens": tokens, "bytes": sum(one["bytes"] for one in messages), "chunks": sum(one["chunks"] for one in messages),
        "messages": messages, "plans": plans, "proofs": sentences, "casts": casts,
    }  # fmt: skip


# ---- all of it -----------------------------------------------------------------------------------------------------


def as_json(
    engine: Engine, host_bytes: int, host_layout: str = PAGES, *, blocks: int = 64, device: int = 0,
    to: Engine | None = None, tokens: int = 8192, host_values: str | None = None, cast: Cast = None,
    folder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what would happen as an object for JSON.

    `host_bytes` is the host memory of all ranks of the engine, and `host_layout` is `PAGES`, or a layout: a name of the
    catalogue, or a file.  A store and a load of `blocks` blocks are planned, with the tuning table of the GPU `device`, if one
    exists.  `to` is the decode engine, for which `engine` prefills a request of so many `tokens`.  `host_values`, `cast` and
    `folder` are the settings: values are quantised on the way to host memory, or change on the way between the two engines;
    ``folder`` and ``folder_bytes``, files behind host memory.

    The result has ``model``, ``engine``, ``offloading``, ``disaggregation`` and ``together`` (both None without `to`), and
    ``refused``: what is not possible, with the reasons.  Values that were not measured are None.
    """
    refused: list[dict[str, str]] = []
    disaggregation = together = None
    for one, where in ((engine, ""), (to, "--to: ")):
        if one is not None:
            _tried(refused, "vLLM", functools.partial(one.require_block_size, where))
    if to is not None:
        disaggregation = _tried(refused, "KvbmConnector", lambda: _disaggregation(engine, to, tokens, cast))
    found = _tried(refused, "Pool.from_vllm", lambda: _engine(engine))
    offloading = _tried(
        refused, "KvbmOffloadingConnector",
        lambda: _offloading(engine, host_bytes, host_layout, blocks, device, host_values, folder or {}),
    )  # fmt: skip
    if to is not None and disaggregation is not None and offloading is not None:
        told = offloading["kv_transfer_config"]
        together = {name: _together(side, disaggregation[name], told) for name, side in (("prefill", engine), ("decode", to))}
    return {
        "model": _model(engine.model),
        "engine": found,
        "offloading": offloading,
        "disaggregation": disaggregation,
        "together": together,
        "refused": refused,
    }


def notes(model: dict[str, Any]) -> list[str]:
    """What depends on the machine that serves a model, as in `as_json`."""
    found = []
    if model["readers"]:
        found.append(f"{model['readers']} more layers keep no cache: they read those of layers before them")
    if model["kv"] == 1:
        found.append(
            "on a platform without CUDA or ROCm, such as CPUs, vLLM switches prefix caching off for a latent (MLA), as it computes "
            'a prompt there in another way than it decodes: kvbm then refuses to start without "without_prefix_caching": true '
            "in kv_connector_extra_config, and tokens may differ"
        )
    return found


def _tried(refused: list[dict[str, str]], what: str, make: Callable[[], _Made]) -> _Made | None:
    try:
        return make()
    except KvbmError as error:
        refused.append({"what": what, "why": str(error), "error": type(error).__name__})
        return None


def _token_bytes(shape: BlockShape) -> int:
    return shape.nbytes // shape.nt


def _model(model: Model) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": model.name, "type": model.kind, "layers": shape.nl, "readers": model.readers, "kv": shape.no,
        "heads": shape.nh, "head_size": shape.hd,
        "dtype": shape.dtype, "token_bytes": shape.nbytes,
        "groups": [
            {"layers": list(one.layers), "sliding_window": one.sliding_window,
             "token_bytes": shape.nbytes // shape.nl * len(one.layers)}
            for one in model.groups
        ],
    }  # fmt: skip


def _engine(engine: Engine) -> dict[str, Any]:
    ranks = []
    for rank in range(engine.placement.world):
        held, shape = engine.placement.strips(rank), engine.placement.shape(rank)
        ranks.append({"rank": rank, "layers": list(held.l), "heads": list(held.h), "token_bytes": _token_bytes(shape)})
    pages = [
        {"stage": stage, "group": group.index, "layout": group.layout.name, "order": group.layout.order_text,
         "backend": group.backend, "shape": str(group.shape), "page_bytes": group.shape.nbytes // group.shape.nl}
        for stage in range(engine.pp) for group in engine.groups(stage)
    ]  # fmt: skip
    return {
        "tp": engine.tp, "pp": engine.pp, "dcp": engine.dcp, "block_size": engine.nt, "layout": engine.order,
        "kv_cache_dtype": engine.cache_dtype, "ranks": ranks, "pages": pages,
    }  # fmt: skip


def _offloading(
    engine: Engine, host_bytes: int, host_layout: str, blocks: int, device: int, host_values: str | None,
    folder: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, **folder}
    if host_layout != PAGES:
        extra["host_layout"] = host_layout
    if host_values is not None:
        extra["host_values"] = host_values
    values = HostValues.of(extra, engine.model.rope)
    if (files := Settings.of(extra)) is not None:
        require_ranks({"pipeline_parallel_size": engine.pp, "decode_context_parallel_size": engine.dcp})
        files.require_units(engine.nt, engine.nt)
        if values is None and host_layout == PAGES:
            raise BindError(f"host_layout: expected a layout, as folder is set, such as universal; got {PAGES!r}")
    if values is not None:
        for stage in range(engine.pp):
            for group in engine.groups(stage):
                values.require(group.shape, str(group))
    transfer = {"kv_connector": "KvbmOffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "host": _host(engine, host_bytes, host_layout, values),
        "copies": _copies(engine, host_layout, blocks, device, values),
        "kv_transfer_config": transfer,
        "command": engine.command(transfer),
    }


def _disaggregation(src: Engine, dst: Engine, tokens: int, cast: Cast) -> dict[str, Any]:
    between, scale = _between(src, dst, tokens, cast), as_cast(cast)
    extra = {"host": "127.0.0.1"} | ({} if scale is None else {"cast": to_json(scale)})
    made = []
    for side, port in ((src, 14600), (dst, 14700)):
        transfer = {
            "kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": port, "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
        made.append({"engine": _engine(side), "kv_transfer_config": transfer, "command": side.command(transfer)})
    return {"prefill": made[0], "decode": made[1], **between}


def _together(engine: Engine, side: Mapping[str, Any], offloading: Mapping[str, Any]) -> dict[str, Any]:
    """Both connectors in one engine.  The first connector that has a prompt loads it: the other engine has all of it.

    The policy stands outside, as a MultiConnector has one for all.
    """
    first = dict(side["kv_transfer_config"])
    policy = first.pop("kv_load_failure_policy")
    transfer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [first, dict(offloading)]},
    }  # fmt: skip
    return {"kv_transfer_config": transfer, "command": engine.command(transfer)}
