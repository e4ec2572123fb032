"""Placements: which part of a model's cache each rank of an engine holds.  They stand beside layouts, and never in them.

A rank's place in the mesh says what it holds of each axis.  What no axis uses is replication.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import SpecError
from ..shapes import BlockShape
from ..yamlfile import YamlFile, read_text
from .strips import Runs, Turns

__all__ = ["KEYS", "SHARED", "Digit", "Placement", "Share", "Strips"]

#: Keys of a placement file, and of a share that is written as a mapping.
KEYS = ("title", "mesh", "shard", "nt", "read_from", "notes")
_SHARE_KEYS = ("over", "bounds")

#: Axes that can be shared by ranks.
SHARED = {"l": "layers", "h": "KV heads", "t": "tokens"}

_AXIS = re.compile(r"([a-z][a-z_]*)([1-9][0-9]{0,8})")
_DIGIT = re.compile(r"([a-z][a-z_]*)((?:[/%][1-9][0-9]{0,8})*)")
_SHARE = re.compile(r"\s*([^\s]+)(?:\s+by\s+(nt|[1-9][0-9]{0,8}))?\s*")

#: Ranks of a placement at most: a typing error would otherwise take all memory.
_MOST_RANKS = 1 << 16


class Digit(NamedTuple):
    """``(place on a mesh axis // divisor) % extent``."""

    axis: str
    divisor: int
    extent: int

    def __str__(self) -> str:
        return self.axis + (f"/{self.divisor}" if self.divisor > 1 else "") + f"%{self.extent}"


class Share(NamedTuple):
    """How one axis of the cache is shared by ranks.

    Attributes
    ----------
    digit : Digit
        Which share a rank holds.
    every : int
        Tokens: neighbours that one rank holds at a time.
    bounds : tuple of int
        Layers: where each share begins, and at last the number of layers; empty: equal shares.
    """

    digit: Digit
    every: int = 0
    bounds: tuple[int, ...] = ()


class Strips(NamedTuple):
    """What one rank holds of each axis."""

    l: Runs  # noqa: E741  (the axis)
    h: Runs
    t: Turns


@dataclass(frozen=True, init=False, repr=False)
class Placement:
    """Which part of a model's cache each rank of an engine holds.

    Parameters
    ----------
    mesh : str or mapping
        The ranks, slowest axis first: ``"pp2 tp8"``, or ``{"pp": 2, "tp": 8}``.  A rank is a place in the mesh.
    shard : mapping, optional
        Axis of the cache → what shares it: ``{"h": "tp"}``.  ``l`` and ``h`` go in equal shares, in order; where there are more
        ranks than heads, neighbours hold the same head.  ``tp/4`` and ``tp%4`` are digits of a place, as in layouts.  ``t``
        goes in turns: ``"tp%4 by 1"``, ``"cp by nt"``.  Layers in uneven shares: ``{"over": "pp", "bounds": [0, 20, 48, 80]}``.
        What is not named is held by all.
    model : BlockShape
        Of the whole model: all layers, all KV heads.
    nt : int, optional
        Tokens of a block on a rank; the model's if not given.
    layers : iterable of int, optional
        The layers of the model that the pools hold, ascending: a group of a hybrid model.  All of them if not given.
    title, name : str
        For people.

    Raises
    ------
    SpecError
        A mesh or a share that is not written as one; an axis that cannot be shared so.

    Examples
    --------
    >>> from kvbm import load_shape
    >>> decode = Placement("tp2", shard={"h": "tp"}, model=load_shape("llama-3.1-70b"), nt=64)
    >>> decode.shape(1).nh, str(decode.strips(1).h)
    (4, '4–7')
    """

    mesh: tuple[tuple[str, int], ...]
    shares: tuple[tuple[str, Share], ...]
    model: BlockShape
    nt: int
    layers: Runs
    title: str
    name: str

    def __init__(
        self,
        mesh: str | Mapping[str, int],
        *,
        shard: Mapping[str, Any] | None = None,
        model: BlockShape,
        nt: int | None = None,
        layers: Iterable[int] | None = None,
        title: str = "",
        name: str = "placement",
    ) -> None:
        def put(**values: Any) -> None:
            for key, value in values.items():
                object.__setattr__(self, key, value)

        put(title=title, name=name, model=_model(model, name), nt=_tokens(nt, model, name), mesh=_mesh(mesh, name))
        put(shares=tuple(sorted((axis, self._share(axis, share)) for axis, share in _shard(shard, name).items())))
        put(layers=self._layers(layers))

    @classmethod
    def load(cls, path: str | Path, model: BlockShape, **overrides: Any) -> Placement:
        r"""A placement file.

        Parameters
        ----------
        path : str or Path
        model : BlockShape
            Of the whole model.
        **overrides
            ``nt``, ``layers`` or ``name`` in place of the file's.

        Raises
        ------
        SpecError
            With file and line.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> from kvbm import load_shape
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "decode.yaml"
        >>> _ = file.write_text("mesh: tp8\nshard: {h: tp/4, t: tp%4 by 1}\nnt: 64\n")
        >>> Placement.load(file, load_shape("llama-3.1-70b,nh=2")).strips(5).t
        Turns(every=1, over=4, index=1)
        """
        file = Path(path)
        return cls.parse(read_text(file, str(file)), model, str(file), **{"name": file.stem, **overrides})

    @classmethod
    def parse(cls, text: str, model: BlockShape, file: str = "<string>", **overrides: Any) -> Placement:
        """The text of a placement file, as `load`."""
        reader = _File(file)
        with reader.guarded(text):
            return reader.placement(text, model, overrides)

    # ---- ranks -----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def mesh_text(self) -> str:
        """The mesh as it is written: ``pp2 tp8``."""
        return " ".join(f"{axis}{size}" for axis, size in self.mesh)

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis of the mesh."""
        self._require_rank(rank)
        found = {}
        for axis, size in reversed(self.mesh):
            rank, found[axis] = divmod(rank, size)
        return found

    def strips(self, rank: int) -> Strips:
        """What a rank holds of each axis."""
        return _strips(self, rank)

    def shape(self, rank: int) -> BlockShape:
        """The block shape of a rank's pool.

        Raises
        ------
        SpecError
            No such rank, or one that holds no layer of the group.
        """
        held = self.strips(rank)
        if not held.l.size:
            raise SpecError(f"{self.name}: rank {rank} holds none of the layers {self.layers}; it has no pool")
        return replace(self.model, nl=held.l.size, nh=held.h.size, nt=self.nt)

    @property
    def fingerprint(self) -> str:
        """Equal where every rank holds the same in blocks of the same size, however it is written."""
        meaning = (self.model, self.nt, [self.strips(rank) for rank in range(self.world)])
        return hashlib.sha256(repr(meaning).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name} ({self.mesh_text}, {self.nt} token{'s' if self.nt > 1 else ''} a block)"

    def __repr__(self) -> str:
        shard = ", ".join(f"{axis} by {share.digit}" for axis, share in self.shares)
        return f"Placement({self.mesh_text!r}, {shard or 'replicated'}, {self.model}, nt={self.nt})"

    # ---- reading what the caller says ------------------------------------------------------------------------------

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise SpecError(f"{self.name}: rank {rank!r}: expected 0 to {self.world - 1} (mesh {self.mesh_text})")

    def _share(self, axis: str, given: Any) -> Share:
        where = f"{self.name}: {axis}"
        bounds: tuple[int, ...] = ()
        if isinstance(given, Mapping):
            if axis != "l" or set(given) != set(_SHARE_KEYS):
                raise SpecError(
                    f"{where}: expected a text such as 'tp', or {{over: pp, bounds: […]}} for layers, got {given!r}"
                )
            given, bounds = given["over"], _bounds(given["bounds"], where)
        if not isinstance(given, str) or not (match := _SHARE.fullmatch(given)):
            raise SpecError(f"{where}: expected a text such as 'tp/4' or 'tp%4 by 1', got {given!r:.200}")
        digit = self._digit(match[1], where)
        if (axis == "t") != bool(match[2]):
            expected = f"expected turns, e.g. '{match[1]} by 1'" if axis == "t" else "only tokens take turns"
            raise SpecError(f"{where}: {expected}, got {given!r}")
        share = Share(digit, (self.nt if match[2] == "nt" else int(match[2])) if match[2] else 0, bounds)
        self._require_even(axis, share, where)
        return share

    def _digit(self, text: str, where: str) -> Digit:
        match = _DIGIT.fullmatch(text)
        sizes = dict(self.mesh)
        if not match or match[1] not in sizes:
            raise SpecError(
                f"{where}: expected an axis of the mesh {self.mesh_text}, such as {self.mesh[-1][0]!r}, got {text!r:.200}"
            )
        divisor, extent = 1, sizes[match[1]]
        for operator, number in re.findall(r"([/%])([0-9]+)", match[2]):
            by = int(number)
            if extent % by:
                raise SpecError(f"{where}: {text!r}: {extent} ranks by {by}: expected a divisor of {extent}")
            divisor, extent = (divisor * by, extent // by) if operator == "/" else (divisor, by)
        return Digit(match[1], divisor, extent)

    def _require_even(self, axis: str, share: Share, where: str) -> None:
        ranks = share.digit.extent
        if axis == "h" and self.model.nh % ranks and ranks % self.model.nh:
            raise SpecError(
                f"{where}: {self.model.nh} heads by {ranks} ranks: expected a number of ranks that divides {self.model.nh}, or a "
                f"multiple of {self.model.nh}"
            )
        if axis == "l" and not share.bounds and self.model.nl % ranks:
            raise SpecError(
                f"{where}: {self.model.nl} layers by {ranks} ranks: expected a number of ranks that divides {self.model.nl}, or "
                f"bounds, e.g. {{over: {share.digit.axis}, bounds: [0, …, {self.model.nl}]}}"
            )
        if axis == "l" and share.bounds:
            ascending = all(a < b for a, b in zip(share.bounds, share.bounds[1:], strict=False))
            if len(share.bounds) != ranks + 1 or not ascending or share.bounds[0] or share.bounds[-1] != self.model.nl:
                raise SpecError(
                    f"{where}: bounds: expected {ranks + 1} numbers that ascend from 0 to {self.model.nl}, got {list(share.bounds)}"
                )
        if axis == "t" and share.digit.extent > 1 and share.every % self.nt and self.nt % share.every:
            raise SpecError(
                f"{where}: turns of {share.every} tokens, blocks of {self.nt}: expected one to divide the other"
            )

    def _layers(self, given: Iterable[int] | None) -> Runs:
        if given is None:
            return Runs.of(range(self.model.nl))
        found = list(given)
        ascending = all(0 <= x < self.model.nl for x in found) and found == sorted(set(found))
        if not found or not ascending:
            raise SpecError(
                f"{self.name}: layers: expected layers from 0 to {self.model.nl - 1}, ascending, got {found!r:.200}"
            )
        return Runs.of(found)


@functools.lru_cache(maxsize=1 << 14)
def _strips(placement: Placement, rank: int) -> Strips:
    place, shares, model = placement.place(rank), dict(placement.shares), placement.model

    def index(axis: str) -> tuple[int, int]:
        digit = shares[axis].digit
        return place[digit.axis] // digit.divisor % digit.extent, digit.extent

    layers, heads, tokens = placement.layers, Runs.of(range(model.nh)), Turns()
    if "l" in shares:
        which, of = index("l")
        bounds = shares["l"].bounds or [model.nl * i // of for i in range(of + 1)]
        layers = Runs.of(x for x in layers if bounds[which] <= x < bounds[which + 1])
    if "h" in shares:
        which, of = index("h")
        first = which * model.nh // of
        heads = Runs.of(range(first, first + max(1, model.nh // of)))
    if "t" in shares:
        which, of = index("t")
        tokens = Turns(shares["t"].every, of, which) if of > 1 else Turns()
    return Strips(layers, heads, tokens)


def _model(model: Any, name: str) -> BlockShape:
    if not isinstance(model, BlockShape):
        raise SpecError(
            f"{name}: model: expected a BlockShape of the whole model (kvbm.load_shape), got {model!r:.200}"
        )
    return model


def _tokens(nt: Any, model: BlockShape, name: str) -> int:
    if nt is None:
        return model.nt
    if isinstance(nt, bool) or not isinstance(nt, int) or nt < 1:
        raise SpecError(f"{name}: nt: expected tokens of a block, from 1 on, got {nt!r:.200}")
    return nt


def _mesh(given: Any, name: str) -> tuple[tuple[str, int], ...]:
    if isinstance(given, Mapping):
        found = [(str(axis), size) for axis, size in given.items()]
    else:
        matches = [_AXIS.fullmatch(word) for word in given.split()] if isinstance(given, str) else []
        found = [(match[1], int(match[2])) for match in matches if match]
        if not found or len(found) != len(matches):
            found = []
    sizes = [size for _, size in found]
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not found or not whole or len({axis for axis, _ in found}) != len(found):
        raise SpecError(
            f"{name}: mesh: expected axes with their sizes, slowest first, e.g. 'pp2 tp8', got {given!r:.200}"
        )
    if math.prod(sizes) > _MOST_RANKS:
        raise SpecError(f"{name}: mesh: expected at most {_MOST_RANKS:,} ranks, got {given!r:.200}")
    return tuple(found)


def _shard(given: Any, name: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    unknown = set(given) - set(SHARED) if isinstance(given, Mapping) else {given}
    if unknown:
        known = ", ".join(f"{axis} ({what})" for axis, what in SHARED.items())
        raise SpecError(f"{name}: shard: expected a mapping with the axes {known}, got {next(iter(unknown))!r:.200}")
    found: Mapping[str, Any] = given
    return found


def _bounds(given: Any, where: str) -> tuple[int, ...]:
    try:
        return tuple(int(bound) for bound in given)
    except (TypeError, ValueError):
        raise SpecError(f"{where}: bounds: expected a list of layers, got {given!r:.200}") from None


class _File(YamlFile):
    """One placement file being read."""

    def placement(self, text: str, model: BlockShape, overrides: Mapping[str, Any]) -> Placement:
        root = self.root(text, "mesh: tp8")
        keys = self.mapping(root, "the file", KEYS)
        if "mesh" not in keys:
            self.fail(root, "key 'mesh' missing; expected e.g. mesh: pp2 tp8")
        values: dict[str, Any] = {"title": self.scalar(keys["title"], "title") if "title" in keys else ""}
        if "nt" in keys:
            values["nt"] = self.integer(keys["nt"], "nt")
        values = {**values, "name": Path(self.file).stem, **overrides}
        mesh = self.scalar(keys["mesh"], "mesh")
        shard: dict[str, Any] = {}
        # One after the other, so that what is wrong has a line.
        self.attempt(keys["mesh"], mesh, shard, model, values)
        for axis, node in self.mapping(keys["shard"], "shard", tuple(SHARED)).items() if "shard" in keys else ():
            shard[axis] = self.share(node, axis)
            self.attempt(node, mesh, shard, model, values)
        return self.attempt(root, mesh, shard, model, values)

    def attempt(
        self, node: yaml.Node, mesh: str, shard: Mapping[str, Any], model: BlockShape, values: Any
    ) -> Placement:
        try:
            return Placement(mesh, shard=shard, model=model, **values)
        except SpecError as error:
            self.fail(node, str(error).removeprefix(f"{values['name']}: "))

    def share(self, node: yaml.Node, axis: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self.scalar(node, f"share of {axis}")
        keys = self.mapping(node, f"share of {axis}", _SHARE_KEYS)
        for key in _SHARE_KEYS:
            if key not in keys:
                self.fail(node, f"share of {axis}: key {key!r} missing; expected over and bounds")
        bounds = keys["bounds"]
        if not isinstance(bounds, yaml.SequenceNode):
            self.fail(bounds, "bounds: expected a list of layers")
        return {
            "over": self.scalar(keys["over"], "over"),
            "bounds": [self.integer(bound, "a bound") for bound in bounds.value],
        }

    def integer(self, node: yaml.Node, what: str) -> int:
        text = self.scalar(node, what)
        if not re.fullmatch("[0-9]{1,9}", text):
            self.fail(node, f"{what}: expected a number, got {text!r:.200}")
        return int(text)
