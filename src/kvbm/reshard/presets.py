"""Placements of engines, as their own code spreads a cache over ranks; and placements as the command line writes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..shapes import BlockShape, is_file
from ..vllm_groups import Group
from .placement import Placement

__all__ = ["PRESETS", "dynamo", "load", "of_vllm", "sglang", "trtllm", "vllm"]


def vllm(
    model: BlockShape,
    *,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    interleave: int = 1,
    nt: int | None = None,
    layers: Iterable[int] | None = None,
    name: str = "vllm",
) -> Placement:
    """vLLM: ranks are ``pp tp``; a decode context parallel group (DCP) is `dcp` neighbours that hold the same heads.

    Parameters
    ----------
    model : BlockShape
        Of the whole model.
    tp, pp, dcp : int
        Ranks.  Layers that `pp` does not divide go one each to the stages before the last.
    interleave : int
        Tokens that one rank of a DCP group holds at a time (``cp_kv_cache_interleave_size``).
    nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        What `Placement` refuses; a DCP group whose ranks hold other heads; turns that do not divide a block.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> str(vllm(load_shape("llama-3.1-70b"), pp=3).strips(1).l)
    '27–53'
    """
    _require_sizes(name, tp=tp, pp=pp, dcp=dcp, interleave=interleave)
    # The last stage has the norm and the logits: what is left over goes to those before it.
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


def of_vllm(group: Group, *, model: BlockShape | None = None, layers: Iterable[int] | None = None) -> tuple[Placement, int]:
    """The placement of a group of a running vLLM's layers, and the rank of the process that it was read in.

    Parameters
    ----------
    group : Group
        Of `kvbm.vllm_groups.groups`.
    model : BlockShape, optional
        Of the whole model, where its layers do not all have the heads that vLLM's model config says.
    layers : iterable of int, optional
        The layers of the group on all ranks: of a hybrid model with several stages, where a rank knows its own alone.

    Raises
    ------
    SpecError
        Layers or heads that the preset would not give to this rank; what the config does not say.
    """
    whole = model or replace(group.shape, nl=group.model_layers, nh=group.heads)
    if layers is None and len(group.layers) != vllm(whole, tp=group.tp, pp=group.pp).strips(group.rank).l.size:
        if group.pp > 1:
            raise SpecError(f"{group}: {group.pp} stages: a rank knows its own layers alone; expected layers=, those of all ranks")
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
    model: BlockShape,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    order: str = "pp tp cp",
    nt: int | None = None,
    layers: Iterable[int] | None = None,
    name: str = "trtllm",
) -> Placement:
    """TensorRT-LLM: context parallel ranks hold whole blocks in turns; the first stages have a layer more.

    Parameters
    ----------
    model : BlockShape
        Of the whole model.
    tp, pp, cp : int
        Ranks.
    order : str
        The mesh, slowest first: ``"pp tp cp"`` in the C++ runtime and newer versions of its Python, ``"pp cp tp"`` in older ones.
    nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        What `Placement` refuses; another order than these axes have.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> model = load_shape("llama-3.1-70b")
    >>> [str(trtllm(model, tp=2, cp=2, nt=32, order=order).strips(1).h) for order in ("pp tp cp", "pp cp tp")]
    ['0–3', '4–7']
    """
    sizes = {"tp": tp, "pp": pp, "cp": cp}
    _require_sizes(name, **sizes)
    given: object = order
    axes = given.split() if isinstance(given, str) else []
    if sorted(axes) != sorted(sizes):
        raise SpecError(f"{name}: order: expected the axes pp, tp and cp, slowest first, got {order!r:.200}")
    extra = range(_left_over(model, pp, name))
    tokens = {"t": "cp by nt"} if cp > 1 else {}
    return _placement(model, {axis: sizes[axis] for axis in axes}, extra, tokens, nt, layers, name)


def sglang(
    model: BlockShape,
    *,
    tp: int = 1,
    pp: int = 1,
    nt: int | None = None,
    layers: Iterable[int] | None = None,
    name: str = "sglang",
) -> Placement:
    """SGLang: ranks are ``pp tp``; the last stages have a layer more.

    Parameters
    ----------
    model : BlockShape
        Of the whole model.
    tp, pp : int
        Ranks.
    nt, layers, name
        As for `Placement`.

    Raises
    ------
    SpecError
        What `Placement` refuses.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> [sglang(load_shape("llama-3.1-70b"), pp=3).shape(stage).nl for stage in range(3)]
    [26, 27, 27]
    """
    _require_sizes(name, tp=tp, pp=pp)
    extra = range(pp - _left_over(model, pp, name), pp)
    return _placement(model, {"pp": pp, "tp": tp}, extra, {}, nt, layers, name)


def dynamo(model: BlockShape, *, engine: str = "vllm", name: str = "dynamo", **options: Any) -> Placement:
    """Dynamo: it has no rule of its own, and holds what the engine behind it does.

    Parameters
    ----------
    model : BlockShape
        Of the whole model.
    engine : str
        ``"vllm"``, ``"trtllm"`` or ``"sglang"``.
    name, **options
        Of the engine's preset.

    Raises
    ------
    SpecError
        No such engine; what the engine's preset refuses.
    """
    if engine not in list(_ENGINES):
        raise SpecError(f"{name}: engine: expected one of {', '.join(_ENGINES)}, got {engine!r:.200}")
    known = (*_NUMBERS[engine], *_TEXTS.get(engine, ()), "layers")
    if other := [key for key in options if key not in known]:
        raise SpecError(f"{name}: expected options of {engine}, {', '.join(known)}, got {other[0]!r:.200}")
    return _ENGINES[engine](model, name=name, **options)


_ENGINES: dict[str, Callable[..., Placement]] = {"vllm": vllm, "trtllm": trtllm, "sglang": sglang}

#: Name → preset.
PRESETS: dict[str, Callable[..., Placement]] = {**_ENGINES, "dynamo": dynamo}

#: What a text may say of each: numbers follow their names, texts follow ``=``.
_NUMBERS = {
    "vllm": ("tp", "pp", "dcp", "interleave", "nt"),
    "trtllm": ("tp", "pp", "cp", "nt"),
    "sglang": ("tp", "pp", "nt"),
    "dynamo": ("tp", "pp", "cp", "dcp", "interleave", "nt"),
}
_TEXTS = {"trtllm": ("order",), "dynamo": ("engine", "order")}


def load(text: str, model: BlockShape, **overrides: Any) -> Placement:
    """A placement as the command line writes it: a file, or a preset with its sizes.

    Parameters
    ----------
    text : str
        The path of a file, or for example ``"vllm:tp8,pp2,dcp4,nt16"``, ``"trtllm:tp2,cp4,order=pp cp tp"``.
    model : BlockShape
        Of the whole model.
    **overrides
        As for `Placement.load`; the name is the text if not given.

    Raises
    ------
    SpecError
        No such file or preset; what these refuse.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> print(load("vllm:tp8,pp2,nt32", load_shape("llama-3.1-70b")))
    vllm:tp8,pp2,nt32 (pp2 tp8, 32 tokens a block)
    """
    if not isinstance(text, str):
        raise SpecError(f"placement: expected a file, or a preset such as 'vllm:tp8,pp2', got {text!r:.200}")
    kind, colon, rest = text.partition(":")
    if kind not in PRESETS or is_file(Path(text)):
        if not text.endswith((".yaml", ".yml")) and not is_file(Path(text)):
            raise SpecError(
                f"placement {text!r:.200}: expected a .yaml file, or a preset such as 'vllm:tp8,pp2' ({', '.join(PRESETS)})"
            )
        return Placement.load(text, model, **overrides)
    if other := [key for key in overrides if key not in ("nt", "layers", "name", *_NUMBERS[kind], *_TEXTS.get(kind, ()))]:
        raise SpecError(f"placement {text!r:.200}: expected nt, layers or name in place of its own, got {other[0]!r:.200}")
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        key, value = _option(kind, item.strip(), text)
        if key in options:
            raise SpecError(f"placement {text!r:.200}: {key}: expected once, got twice")
        options[key] = value
    return PRESETS[kind](model, **{"name": text, **options, **overrides})


def _option(kind: str, item: str, text: str) -> tuple[str, Any]:
    if (match := re.fullmatch(r"([a-z]+)([0-9]{1,9})", item)) and match[1] in _NUMBERS[kind]:
        return match[1], int(match[2])
    key, _, value = item.partition("=")
    if key in _TEXTS.get(kind, ()) and value:
        return key, value
    known = [f"{key}N" for key in _NUMBERS[kind]] + [f"{key}=…" for key in _TEXTS.get(kind, ())]
    raise SpecError(f"placement {text!r:.200}: expected {', '.join(known)}, got {item!r:.200}")


def _require_sizes(name: str, **given: Any) -> None:
    for what, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 17:
            raise SpecError(f"{name}: {what}: expected a number from 1 on, got {value!r:.200}")


def _left_over(model: Any, pp: int, name: str) -> int:
    """Layers that stages in equal shares would leave over."""
    if not isinstance(model, BlockShape):
        raise SpecError(
            f"{name}: model: expected a BlockShape of the whole model (kvbm.load_shape), got {model!r:.200}"
        )
    if pp > model.nl:
        raise SpecError(f"{name}: pp: expected at most {model.nl} stages for {model.nl} layers, got {pp}")
    return model.nl % pp


def _placement(
    model: BlockShape,
    mesh: dict[str, int],
    extra: range,
    tokens: dict[str, str],
    nt: int | None,
    layers: Iterable[int] | None,
    name: str,
) -> Placement:
    """Stages of equal shares, those of `extra` with one layer more; heads by ``tp``."""
    stages = [model.nl // mesh["pp"] + (stage in extra) for stage in range(mesh["pp"])]
    shard: dict[str, Any] = {"h": "tp", **tokens}
    if mesh["pp"] > 1:
        shard["l"] = {"over": "pp", "bounds": [0, *itertools.accumulate(stages)]}
    return Placement(
        {axis: size for axis, size in mesh.items() if size > 1 or axis == "tp"},
        shard=shard, model=model, nt=nt, layers=layers, name=name,
    )  # fmt: skip
