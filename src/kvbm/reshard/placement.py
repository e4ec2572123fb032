"""Placements: which part of a model's cache each rank of an engine holds.  A placement is independent of layouts.

A rank's coordinates in the mesh determine its share of each axis.  A mesh axis that shares no axis of the cache is replication.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .._arguments import quoted, require_a, whole, wholes
from ..digest.cells import Model
from ..errors import SpecError
from ..layout.shapes import BlockShape, as_shape
from ..layout.yamlfile import YamlFile, read_text
from .strips import Runs, Turns

#: Keys of a placement file, and of a share in the form of a mapping.
KEYS = ("title", "mesh", "shard", "layers", "nt", "read_from", "notes")
SHARE_KEYS = ("over", "bounds")

#: Axes that ranks can share.
SHARED = {"l": "layers", "h": "KV heads", "t": "tokens"}

_NAME = re.compile(r"[a-z][a-z_]*")
_AXIS = re.compile(r"([a-z][a-z_]*)([1-9][0-9]{0,8})")
_DIGIT = re.compile(r"([a-z][a-z_]*)((?:[/%][1-9][0-9]{0,8})*)")
_SHARE = re.compile(r"\s*([^\s]+)(?:\s+by\s+(nt|[1-9][0-9]{0,8}))?\s*")
_SOME = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9})(?:\s+by\s+([1-9][0-9]{0,8}))?)?")

#: Limits of ranks, layers and heads of a placement, and of tokens per block: a typing error could otherwise use all memory.
_MOST, _MOST_TOKENS = 1 << 16, 1 << 20


class Digit(NamedTuple):
    """``(coordinate on a mesh axis // divisor) % extent``."""

    axis: str
    divisor: int
    extent: int

    def __str__(self) -> str:
        return self.axis + (f"/{self.divisor}" if self.divisor > 1 else "") + f"%{self.extent}"


class Share(NamedTuple):
    """How one axis of the cache is shared by ranks."""

    digit: Digit  # the number of the share that a rank holds
    every: int = 0  # for tokens: how many consecutive tokens a rank holds per turn
    #: For layers: the first layer of each share, then the number of layers.  Empty: equal shares.
    bounds: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = f" by {self.every}" if self.every else f" at {quoted(list(self.bounds))}" if self.bounds else ""
        return f"{self.digit}{more}"


class Strips(NamedTuple):
    """The coordinates that one rank holds of each axis."""

    l: Runs  # noqa: E741  (the axis)
    h: Runs
    t: Turns


@dataclass(frozen=True, init=False, repr=False)
class Placement:
    """Which part of a model's cache each rank of an engine holds.

    Parameters
    ----------
    mesh : str or mapping
        The mesh of ranks, slowest axis first: ``"pp2 tp8"``, or ``{"pp": 2, "tp": 8}``.
    shard : mapping, optional
        Axis of the cache → mesh axis that shares it: ``{"h": "tp"}``.  ``l`` and ``h`` are split into equal shares, in order; with
        more ranks than heads, neighbouring ranks hold the same head.  ``tp/4`` and ``tp%4`` are digits of the rank's coordinate,
        as in layouts.  ``t`` is shared in turns: ``"tp%4 by 1"``, ``"cp by nt"``.  Uneven shares of layers:
        ``{"over": "pp", "bounds": [0, 20, 48, 80]}``.  Every rank holds all of an axis that is not named.
    model : BlockShape or str
        Shape of the whole model (all layers, all KV heads), or a text that `kvbm.load_shape` reads.
    nt : int, optional
        Tokens per block on a rank.  Default: those of `model`.
    layers : iterable of int, optional
        The layers of the model that the pools hold, ascending, for a group of a hybrid model.  Default: all.
    title, name : str
        Texts for messages.

    Notes
    -----
    A placement file may also have ``layers:``, a list such as ``[0-3, 5-77 by 6]``.

    Raises
    ------
    SpecError
        The mesh or a share is not written correctly, or an axis cannot be shared in this way.

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
        self, mesh: str | Mapping[str, int], *, shard: Mapping[str, Any] | None = None, model: BlockShape | str,
        nt: int | None = None, layers: Iterable[int] | None = None, title: str = "", name: str = "placement",
        **others: Any,
    ) -> None:  # fmt: skip
        def put(**values: Any) -> None:
            for key, value in values.items():
                object.__setattr__(self, key, value)

        for what, value in (("name", name), ("title", title)):
            require_a(str, f"placement: {what}", value, "a text", SpecError)
        if others:  # dataclasses.replace passes the parsed shares
            raise SpecError(
                f"{name}: expected mesh, shard, model, nt, layers, title and name, got {quoted(next(iter(others)))}; to change a "
                "placement, create a new one from these"
            )
        put(title=title, name=name, model=_model(model, name), mesh=_mesh(mesh, name))
        put(nt=_tokens(self.model.nt if nt is None else nt, name), layers=_layers(layers, self.model.nl, name))
        put(shares=tuple(sorted((axis, self._share(axis, share)) for axis, share in _shard(shard, name).items())))
        self._require_all()

    @classmethod
    def load(cls, path: str | Path, model: BlockShape | str, **overrides: Any) -> Placement:
        r"""Read a placement file.

        Parameters
        ----------
        path : str or Path
            The file.
        model : BlockShape or str
            Shape of the whole model, or its text.
        **overrides
            ``nt``, ``layers`` or ``name``, instead of those of the file.

        Raises
        ------
        SpecError
            The file is wrong; the message has file and line.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> from kvbm import load_shape
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "decode.yaml"
        >>> _ = file.write_text("mesh: tp8\nshard: {h: tp/4, t: tp%4 by 1}\nnt: 64\n")
        >>> Placement.load(file, load_shape("llama-3.1-70b,nh=2")).strips(5).t
        Turns(every=1, over=4, index=1)
        """
        require_a((str, os.PathLike), "placement", path, "the path of a file", SpecError)
        file = Path(path)
        return cls.parse(read_text(file, str(file)), model, str(file), **{"name": file.stem, **overrides})

    @classmethod
    def parse(cls, text: str, model: BlockShape | str, file: str = "<string>", **overrides: Any) -> Placement:
        """Read the text of a placement file, as `load` does."""
        for what, given in (("text", text), ("file", file)):
            require_a(str, f"placement: {what}", given, "a text", SpecError)
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
        """The mesh as a text: ``pp2 tp8``."""
        return " ".join(f"{axis}{size}" for axis, size in self.mesh)

    def place(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on each axis of the mesh."""
        rank, found = self._rank(rank), {}
        for axis, size in reversed(self.mesh):
            rank, found[axis] = divmod(rank, size)
        return found

    def strips(self, rank: int) -> Strips:
        """The coordinates that a rank holds on each axis."""
        return _strips(self, self._rank(rank))

    def part(self, rank: int) -> Model:
        """The part of the model that a rank's pool holds, for digests.

        The digests of all ranks, each head once, add up to the digest of the model.  If ranks share tokens, pass the position of
        each block's first token with `tokens`.  Blocks with tokens that are not consecutive (turns of single tokens) have no digest
        of the model.
        """
        held = self.strips(rank)
        return Model(tuple(held.l), tuple(held.h), self.model.nl, self.model.nh)

    def shape(self, rank: int) -> BlockShape:
        """The block shape of a rank's pool.

        Raises
        ------
        SpecError
            There is no such rank, or it holds no layer of the group.
        """
        held = self.strips(rank)
        if not held.l.size:
            raise SpecError(f"{self.name}: rank {rank} holds none of the layers {self.layers}; it has no pool")
        return replace(self.model, nl=held.l.size, nh=held.h.size, nt=self.nt)

    def text(self) -> str:
        """The text of a placement file for this placement, in JSON (which is also YAML).  It does not contain the model.

        Examples
        --------
        >>> from kvbm import load_shape
        >>> model = load_shape("llama-3.1-70b")
        >>> decode = Placement("tp8", shard={"h": "tp/4", "t": "tp%4 by 1"}, model=model)
        >>> decode.text()
        '{"mesh": "tp8", "nt": 16, "shard": {"h": "tp/4%2", "t": "tp%4 by 1"}}'
        >>> Placement.parse(decode.text(), model).fingerprint == decode.fingerprint
        True
        """
        shard: dict[str, Any] = {}
        for axis, share in self.shares:
            over = str(share.digit) + (f" by {share.every}" if share.every else "")
            shard[axis] = {"over": over, "bounds": list(share.bounds)} if share.bounds else over
        held: dict[str, Any] = {"mesh": self.mesh_text, "nt": self.nt, "shard": shard}
        if self.layers.size < self.model.nl:
            held["layers"] = [str(layer) for run in self.layers.runs for layer in range(run.first, run.last + 1, run.step)]
        return json.dumps(held)

    @property
    def fingerprint(self) -> str:
        """A hash.  It is equal for placements in which every rank holds the same, in blocks of the same size."""
        meaning = (self.model, self.nt, [self.strips(rank) for rank in range(self.world)])
        return hashlib.sha256(repr(meaning).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name} ({self.mesh_text}, {self.nt} token{'s' if self.nt > 1 else ''} per block)"

    def __repr__(self) -> str:
        shard = ", ".join(f"{axis} by {share}" for axis, share in self.shares)
        layers = f", layers {self.layers}" if self.layers.size < self.model.nl else ""
        return f"Placement({self.mesh_text!r}, {shard or 'replicated'}, {self.model}, nt={self.nt}{layers})"

    # ---- reading arguments -----------------------------------------------------------------------------------------

    def _rank(self, rank: Any) -> int:
        found = whole(rank)
        if found is None or not 0 <= found < self.world:
            raise SpecError(f"{self.name}: rank {quoted(rank)}: expected 0 to {self.world - 1} (mesh {self.mesh_text})")
        return found

    def _share(self, axis: str, given: Any) -> Share:
        where = f"{self.name}: {axis}"
        bounds: tuple[int, ...] = ()
        if isinstance(given, Mapping):
            if axis != "l" or set(given) != set(SHARE_KEYS):
                raise SpecError(
                    f"{where}: expected a text such as 'tp', or {{over: pp, bounds: […]}} for layers, got {quoted(given)}"
                )
            given, bounds = given["over"], _bounds(given["bounds"], where)
        if not isinstance(given, str) or not (match := _SHARE.fullmatch(given)):
            raise SpecError(f"{where}: expected a text such as 'tp/4' or 'tp%4 by 1', got {quoted(given)}")
        digit = self._digit(match[1], where)
        if (axis == "t") != bool(match[2]):
            expected = f"expected turns, e.g. '{match[1]} by 1'" if axis == "t" else "expected no turns, which only tokens take"
            raise SpecError(f"{where}: {expected}, got {quoted(given)}")
        share = Share(digit, (self.nt if match[2] == "nt" else int(match[2])) if match[2] else 0, bounds)
        self._require_even(axis, share, where)
        return share

    def _digit(self, text: str, where: str) -> Digit:
        match = _DIGIT.fullmatch(text)
        sizes = dict(self.mesh)
        if not match or match[1] not in sizes:
            raise SpecError(
                f"{where}: expected an axis of the mesh {self.mesh_text}, such as {self.mesh[-1][0]!r}, got {quoted(text)}"
            )
        divisor, extent = 1, sizes[match[1]]
        for sign, number in re.findall(r"([/%])([0-9]+)", match[2]):
            by = int(number)
            if extent % by:
                raise SpecError(f"{where}: {quoted(text)}: {extent} ranks by {by}: expected a divisor of {extent}")
            divisor, extent = (divisor * by, extent // by) if sign == "/" else (divisor, by)
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
            bounds, last = share.bounds, self.model.nl
            ascending = all(a < b for a, b in itertools.pairwise(bounds))
            if len(bounds) != ranks + 1 or not ascending or bounds[0] or bounds[-1] != last:
                raise SpecError(
                    f"{where}: bounds: expected {ranks + 1} numbers that ascend from 0 to {last}, got {quoted(list(bounds))}"
                )
        if axis == "t" and share.digit.extent > 1 and share.every % self.nt and self.nt % share.every:
            raise SpecError(
                f"{where}: turns of {share.every} tokens, blocks of {self.nt}: expected one to divide the other"
            )

    def _require_all(self) -> None:
        """Raise `SpecError` unless the ranks hold all of the cache: shares by one mesh axis must occur in every combination."""
        for (axis, one), (other, two) in itertools.combinations(self.shares, 2):
            if one.digit.axis != two.digit.axis:
                continue
            places = range(dict(self.mesh)[one.digit.axis])
            pairs = {(self._part(axis, one.digit, at), self._part(other, two.digit, at)) for at in places}
            counts = [len({pair[i] for pair in pairs}) for i in (0, 1)]
            if len(pairs) != math.prod(counts):
                raise SpecError(
                    f"{self.name}: {axis} by {one.digit} and {other} by {two.digit}: expected ranks for all "
                    f"{counts[0]} × {counts[1]} combinations of {SHARED[axis]} and {SHARED[other]}, got {len(pairs)}; no rank "
                    "holds the rest of the cache"
                )

    def _part(self, axis: str, digit: Digit, at: int) -> int:
        """The share of an axis at a coordinate of a mesh axis.  With more ranks than heads, neighbours hold the same head."""
        index = at // digit.divisor % digit.extent
        return index * self.model.nh // digit.extent if axis == "h" and digit.extent > self.model.nh else index


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
    found = as_shape(model, f"{name}: model")
    if max(found.nl, found.nh) > _MOST:
        raise SpecError(f"{name}: model: expected at most {_MOST:,} layers and KV heads, got {found}")
    return found


def _tokens(nt: Any, name: str) -> int:
    found = whole(nt)
    if found is None or not 1 <= found <= _MOST_TOKENS:
        raise SpecError(f"{name}: nt: expected tokens of a block, from 1 to {_MOST_TOKENS:,}, got {quoted(nt)}")
    return found


def _mesh(given: Any, name: str) -> tuple[tuple[str, int], ...]:
    if isinstance(given, Mapping):
        found = [(axis, whole(size) or 0) for axis, size in itertools.islice(given.items(), 65)]
    else:
        matches = [_AXIS.fullmatch(word) for word in given.split()] if isinstance(given, str) else []
        found = [(match[1], int(match[2])) if match else ("", 0) for match in matches]
    names = [axis for axis, _ in found if isinstance(axis, str) and _NAME.fullmatch(axis)]
    if not found or len(set(names)) != len(found) or min(size for _, size in found) < 1 or len(found) > 64:
        raise SpecError(
            f"{name}: mesh: expected axes with their sizes, slowest first, e.g. 'pp2 tp8', got {quoted(given)}"
        )
    if math.prod(size for _, size in found) > _MOST:
        raise SpecError(f"{name}: mesh: expected at most {_MOST:,} ranks, got {quoted(given)}")
    return tuple(found)


def _shard(given: Any, name: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    unknown = [axis for axis in given if axis not in SHARED] if isinstance(given, Mapping) else [given]
    if unknown:
        known = ", ".join(f"{axis} ({what})" for axis, what in SHARED.items())
        raise SpecError(f"{name}: shard: expected a mapping with the axes {known}, got {quoted(unknown[0])}")
    found: Mapping[str, Any] = given
    return found


def _bounds(given: Any, where: str) -> tuple[int, ...]:
    found = wholes(given, _MOST + 1)
    if found is None:
        raise SpecError(f"{where}: bounds: expected a list of layers, got {quoted(given)}")
    return found


def _layers(given: Any, nl: int, name: str) -> Runs:
    if given is None:
        return Runs.of(range(nl))
    found = wholes(given, _MOST)
    if not found or not all(a < b for a, b in itertools.pairwise([-1, *found, nl])):
        raise SpecError(
            f"{name}: layers: expected layers from 0 to {nl - 1}, ascending, got {quoted(given if found is None else list(found))}"
        )
    return Runs.of(found)


class _File(YamlFile):
    """One placement file being read."""

    def placement(self, text: str, model: BlockShape | str, overrides: Mapping[str, Any]) -> Placement:
        root = self.root(text, "mesh: tp8")
        keys = self.mapping(root, "the file", KEYS)
        if "mesh" not in keys:
            self.fail(root, "key 'mesh' missing; expected e.g. mesh: pp2 tp8")
        for key in ("title", "read_from"):
            if key in keys:
                self.scalar(keys[key], key)
        if other := [key for key in overrides if key not in ("nt", "layers", "name", "title")]:
            self.fail(None, f"expected nt, layers, name or title as overrides, got {quoted(other[0])}")
        values: dict[str, Any] = {"name": Path(self.file).stem, **overrides, "model": model, "shard": {}}
        if "title" in keys:
            values.setdefault("title", self.scalar(keys["title"], "title"))
        # One by one, so that an error has the line of its share.
        values["mesh"] = self.scalar(keys["mesh"], "mesh")
        made = self.attempt(keys["mesh"], values)
        readers = {"nt": lambda node: self.integer(node, "nt"), "layers": self.layers}
        for key, read in readers.items():
            if key in keys:
                values[key] = overrides.get(key, read(keys[key]))
                made = self.attempt(keys[key], values)
        for axis, node in self.mapping(keys["shard"], "shard", tuple(SHARED)).items() if "shard" in keys else ():
            values["shard"][axis] = self.share(node, axis)
            made = self.attempt(node, values)
        return made

    def attempt(self, node: yaml.Node, values: Mapping[str, Any]) -> Placement:
        try:
            return Placement(**values)
        except SpecError as error:
            self.fail(node, str(error).removeprefix(f"{values['name']}: "))

    def layers(self, node: yaml.Node) -> list[int]:
        """``[0-3, 5-77 by 6]``, or one item of such a list."""
        found: list[int] = []
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            text = self.scalar(item, "layers")
            match = _SOME.fullmatch(text)
            if not match:
                self.fail(item, f"layers: expected layers such as 3, 4-20 or 5-77 by 6, got {quoted(text)}")
            first = int(match[1])
            found += itertools.islice(range(first, int(match[2] or first) + 1, int(match[3] or 1)), _MOST + 1)
            if len(found) > _MOST:
                self.fail(item, f"layers: expected at most {_MOST:,}")
        return found

    def share(self, node: yaml.Node, axis: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self.scalar(node, f"share of {axis}")
        keys = self.mapping(node, f"share of {axis}", SHARE_KEYS)
        for key in SHARE_KEYS:
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
            self.fail(node, f"{what}: expected a number, got {quoted(text)}")
        return int(text)
