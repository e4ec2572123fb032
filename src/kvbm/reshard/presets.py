"""Placements of engines, by the rules of the engines' code; and texts of placements, as the command line accepts them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._arguments import number, quoted, require_a
from ..engines.vllm import Group
from ..errors import SpecError
from ..layout.naming import suggestion
from ..layout.shapes import BlockShape, as_shape, is_file
from .placement import Placement


def vllm(
    model: BlockShape | str, *, tp: int = 1, pp: int = 1, dcp: int = 1, interleave: int = 1, nt: int | None = None,
    layers: Iterable[int] | None = None, name: str = "vllm",
) -> Placement:  # fmt: skip
    """The placement of vLLM.  The mesh is ``pp tp``.  A decode context parallel (DCP) group is `dcp` ranks with the same heads.

    Parameters
    ----------
    tp, pp, dcp : int
        Number of ranks.  If `pp` does not divide the layers, stages before the last get one layer more.
    interleave : int
        Tokens per turn of one rank of a DCP group (``cp_kv_cache_interleave_size``).
    model, nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        As `Placement`; also if ranks of a DCP group hold different heads, or if turns do not divide a block.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> str(vllm(load_shape("llama-3.1-70b"), pp=3).strips(1).l)
    '27–53'
    """
    model = as_shape(model, f"{name}: model")
    _require_sizes(name, tp=tp, pp=pp, dcp=dcp, interleave=interleave)
    # The last stage has the norm and the logits: remaining layers go to the stages before it.
    extra = range(pp - 1 - _left_over(model, pp, name), pp - 1)
    if dcp > 1 and tp % (model.nh * dcp):
        raise SpecError(
            f"{name}: dcp: {model.nh} heads by {tp} ranks, {dcp} in a group: expected the ranks of a group to hold one head: tp a "
            f"multiple of {model.nh} × {dcp}"
        )
    tokens = {"t": f"tp%{dcp} by {interleave}"} if dcp > 1 else {}
    made = _placement(model, {"pp": pp, "tp": tp}, extra, tokens, nt, layers, name)
    if made.nt % interleave:
        raise SpecError(f"{name}: interleave: expected a divisor of the {made.nt} tokens of a block, got {interleave}")
    return made


def of_vllm(
    group: Group, *, model: BlockShape | str | None = None, layers: Iterable[int] | None = None
) -> tuple[Placement, int]:
    """The placement of a group of layers of a running vLLM (`kvbm.vllm_groups.groups`), and the rank of this process.

    `model` is the shape of the whole model, needed if not all of its layers have the heads of vLLM's model config.
    `layers` are those of the group on all ranks, needed for a hybrid model with several stages: a rank knows only its
    own.

    Raises `SpecError` if the rank has other layers or heads than the preset gives it, or the config lacks what is
    needed.
    """
    if len(set(group.layers)) < len(group.layers):
        raise SpecError(
            f"{group}: expected each layer once, got {', '.join(map(str, group.layers))}: some are those of a draft model, which "
            "counts its own; run without speculative decoding, or offload only (KvbmOffloadingConnector needs no numbers of layers)"
        )
    if model is not None:
        whole = as_shape(model, "model")
    elif group.heads is not None:
        # Layers of a draft model in the target's group follow those of the target.  Without stages every rank holds them.
        behind = group.pp == 1 and max(group.layers) >= group.model_layers
        whole = replace(group.shape, nl=max(group.layers) + 1 if behind else group.model_layers, nh=group.heads)
    else:
        raise SpecError(
            f"{group}: expected one number of KV heads in the config that gives each rank of tp{group.tp} one head, got several or "
            "none; use less tensor parallelism, so that a rank holds several heads, or pass model=, a shape with the heads of "
            "these layers on all ranks"
        )
    if layers is None and len(group.layers) != vllm(whole, tp=group.tp, pp=group.pp).strips(group.rank).l.size:
        if group.pp > 1:
            raise SpecError(f"{group}: {group.pp} stages: a rank knows only its own layers; expected layers=, those of all ranks")
        layers = group.layers
    try:
        made = vllm(
            whole, tp=group.tp, pp=group.pp, dcp=group.dcp, interleave=group.interleave if group.dcp > 1 else 1, layers=layers
        )
    except SpecError as error:
        raise SpecError(f"{group}: {error}") from None
    held = made.strips(group.rank)
    if tuple(held.l) != group.layers or made.shape(group.rank) != group.shape:
        raise SpecError(
            f"{group}: rank {group.rank} of pp{group.pp} tp{group.tp}: expected layers {held.l} and {made.shape(group.rank)}, got "
            f"layers {', '.join(map(str, group.layers))}; pass model= or layers=, or make a Placement"
        )
    return made, group.rank


def trtllm(
    model: BlockShape | str, *, tp: int = 1, pp: int = 1, cp: int = 1, order: str = "pp tp cp", nt: int | None = None,
    layers: Iterable[int] | None = None, name: str = "trtllm",
) -> Placement:  # fmt: skip
    """The placement of TensorRT-LLM.  Context parallel ranks hold whole blocks in turns; the first stages have one layer more.

    Parameters
    ----------
    tp, pp, cp : int
        Number of ranks.
    order : str
        Axes of the mesh, slowest first: ``"pp tp cp"`` in the C++ runtime and newer Python versions, ``"pp cp tp"`` in older ones.
    model, nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        As `Placement`; also if `order` does not name the three axes.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> model = load_shape("llama-3.1-70b")
    >>> [str(trtllm(model, tp=2, cp=2, nt=32, order=order).strips(1).h) for order in ("pp tp cp", "pp cp tp")]
    ['0–3', '4–7']
    """
    sizes = {"tp": tp, "pp": pp, "cp": cp}
    model = as_shape(model, f"{name}: model")
    _require_sizes(name, **sizes)
    given: object = order
    axes = given.split() if isinstance(given, str) else []
    if sorted(axes) != sorted(sizes):
        raise SpecError(f"{name}: order: expected the axes pp, tp and cp, slowest first, got {quoted(order)}")
    extra = range(_left_over(model, pp, name))
    tokens = {"t": "cp by nt"} if cp > 1 else {}
    return _placement(model, {axis: sizes[axis] for axis in axes}, extra, tokens, nt, layers, name)


def sglang(
    model: BlockShape | str, *, tp: int = 1, pp: int = 1, nt: int | None = None, layers: Iterable[int] | None = None,
    name: str = "sglang",
) -> Placement:  # fmt: skip
    """The placement of SGLang.  The mesh is ``pp tp``; the last stages have one layer more.

    Parameters
    ----------
    tp, pp : int
        Number of ranks.
    model, nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        As `Placement`.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> [sglang(load_shape("llama-3.1-70b"), pp=3).shape(stage).nl for stage in range(3)]
    [26, 27, 27]
    """
    model = as_shape(model, f"{name}: model")
    _require_sizes(name, tp=tp, pp=pp)
    extra = range(pp - _left_over(model, pp, name), pp)
    return _placement(model, {"pp": pp, "tp": tp}, extra, {}, nt, layers, name)


def dynamo(model: BlockShape | str, *, engine: str = "vllm", name: str = "dynamo", **options: Any) -> Placement:
    """The placement of Dynamo.  It is that of the engine that Dynamo runs.

    Parameters
    ----------
    model : BlockShape or str
        Shape of the whole model, or its text.
    engine : str
        ``"vllm"``, ``"trtllm"`` or ``"sglang"``.
    name, **options
        As for the engine's preset.

    Raises
    ------
    SpecError
        There is no such engine, or its preset raises it.
    """
    if not isinstance(engine, str) or engine not in _ENGINES:  # type: ignore[redundant-expr]
        raise SpecError(f"{name}: engine: expected one of {', '.join(_ENGINES)}, got {quoted(engine)}")
    known = (*_NUMBERS[engine], *_TEXTS.get(engine, ()), "layers")
    if other := [key for key in options if key not in known]:
        raise SpecError(f"{name}: expected options of {engine}, {', '.join(known)}, got {quoted(other[0])}")
    return _ENGINES[engine](model, name=name, **options)


_ENGINES: dict[str, Callable[..., Placement]] = {"vllm": vllm, "trtllm": trtllm, "sglang": sglang}

#: Name → preset.
PRESETS: dict[str, Callable[..., Placement]] = {**_ENGINES, "dynamo": dynamo}

#: The options of each preset in a text, see `options`.
_NUMBERS = {
    "vllm": ("tp", "pp", "dcp", "interleave", "nt"),
    "trtllm": ("tp", "pp", "cp", "nt"),
    "sglang": ("tp", "pp", "nt"),
    "dynamo": ("tp", "pp", "cp", "dcp", "interleave", "nt"),
}
_TEXTS = {"trtllm": ("order",), "dynamo": ("engine", "order")}


def load(text: str, model: BlockShape | str, **overrides: Any) -> Placement:
    """Read a placement from a text, as the command line does: a file, or a preset with its sizes.

    Parameters
    ----------
    text : str
        The path of a file, or for example ``"vllm:tp8,pp2,dcp4,nt16"``, ``"trtllm:tp2,cp4,order=pp cp tp"``.
    model : BlockShape or str
        Shape of the whole model, or its text.
    **overrides
        As for `Placement.load`.  The default name is the text.

    Raises
    ------
    SpecError
        There is no such file or preset, or it is wrong.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> print(load("vllm:tp8,pp2,nt32", load_shape("llama-3.1-70b")))
    vllm:tp8,pp2,nt32 (pp2 tp8, 32 tokens per block)
    """
    require_a(str, "placement", text, "a file, or a preset such as 'vllm:tp8,pp2'", SpecError)
    kind, colon, rest = text.partition(":")
    if kind not in PRESETS or is_file(Path(text)):
        if not text.endswith((".yaml", ".yml")) and not is_file(Path(text)):
            raise SpecError(
                f"placement {quoted(text)}: expected a .yaml file, or a preset such as 'vllm:tp8,pp2' ({', '.join(PRESETS)})"
            )
        return Placement.load(text, model, **overrides)
    if other := [key for key in overrides if key not in ("nt", "layers", "name", *_NUMBERS[kind], *_TEXTS.get(kind, ()))]:
        raise SpecError(f"placement {quoted(text)}: expected nt, layers or name as overrides, got {quoted(other[0])}")
    given = options(rest, _NUMBERS[kind], _TEXTS.get(kind, ()), f"placement {quoted(text)}") if colon else {}
    return PRESETS[kind](model, **{"name": text, **given, **overrides})


def options(text: str, numbers: Sequence[str], texts: Sequence[str], where: str) -> dict[str, Any]:
    """Read ``tp8,pp2,order=pp cp tp``: a number stands behind its name, a text behind ``=``.

    ``tp=8`` is ``tp8``, and ``block-size`` is ``nt``.  `numbers` and `texts` are the names that may be there.  Raises
    `SpecError`, with `where` in front, if an item is no such name with a value, or a name is there twice.

    >>> options("tp8,block-size=32,layout=LBHNC", ("tp", "nt"), ("layout",), "--to")
    {'tp': 8, 'nt': 32, 'layout': 'LBHNC'}
    """
    found: dict[str, Any] = {}
    for item in map(str.strip, text.split(",")):
        sized = re.fullmatch(r"([a-z-]+)=?([0-9]{1,9})", item)
        key, _, value = (sized[1], "", sized[2]) if sized else item.partition("=")
        name = "nt" if key == "block-size" else key
        if not value or name not in (numbers if sized else texts):
            names = [*numbers, *["block-size"] * ("nt" in numbers), *texts]
            known = [f"{one}=…" if one in texts else f"{one}=N" if "-" in one else f"{one}N" for one in names]
            said = item.partition("=")[0].rstrip("0123456789")
            meant = "" if said in names else suggestion(said, names)
            raise SpecError(f"{where}: expected {', '.join(known)}, got {quoted(item)}.{meant}")
        if name in found:
            raise SpecError(f"{where}: {name}: expected once, got twice")
        found[name] = int(value) if sized else value
    return found


def _require_sizes(name: str, **given: Any) -> None:
    for what, value in given.items():
        number(f"{name}: {what}", value, 1, (1 << 17) - 1, SpecError)


def _left_over(model: BlockShape, pp: int, name: str) -> int:
    """The remainder of the layers divided by the stages."""
    if pp > model.nl:
        raise SpecError(f"{name}: pp: expected at most {model.nl} stages for {model.nl} layers, got {pp}")
    return model.nl % pp


def _placement(
    model: BlockShape, mesh: dict[str, int], extra: range, tokens: dict[str, str], nt: int | None,
    layers: Iterable[int] | None, name: str,
) -> Placement:  # fmt: skip
    """Stages with equal numbers of layers, those in `extra` with one more; heads shared by ``tp``."""
    stages = [model.nl // mesh["pp"] + (stage in extra) for stage in range(mesh["pp"])]
    shard: dict[str, Any] = {"h": "tp", **tokens}
    if mesh["pp"] > 1:
        shard["l"] = {"over": "pp", "bounds": [0, *itertools.accumulate(stages)]}
    return Placement(
        {axis: size for axis, size in mesh.items() if size > 1 or axis == "tp"},
        shard=shard, model=model, nt=nt, layers=layers, name=name,
    )  # fmt: skip
