"""Sections of pools: selected coordinates of axes, selected planes, or units of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._arguments import listed, quoted, require_a, whole, wholes
from ..digest.cells import Keys, Model, keys_of, require_model
from ..errors import LayoutError, PlanError
from ..layout.region import Coordinates, Section
from .digester import Digester

if TYPE_CHECKING:
    from .pool import Pool

#: Coordinates of an axis, as callers pass them.
Axis = int | range | Sequence[int]

#: Ids have 32 bits, and -1 means none.
_MOST_IDS = (1 << 31) - 1

#: Number of sections for which a pool keeps digesters.
_MOST_DIGESTERS = 256


class PoolSection:
    """A part of a pool.  Copies and digests accept it in place of the pool; it shares the pool's memory.

    `Pool.section` and `Pool.units` create it.

    Attributes
    ----------
    pool : Pool
        The pool that holds the memory.
    num_ids : int
        Number of ids, of blocks or of units.  Ids are ``0 … num_ids - 1``.
    tokens : int
        Tokens per block, or per unit.
    is_whole : bool
        True if the section is all of the pool.
    choices : tuple of (str, coordinates)
        The selections in their order: an axis and its coordinates, or an empty text and names of planes.
    """

    def __init__(
        self, pool: Pool, section: Section, *, is_whole: bool = False, choices: tuple[tuple[str, Any], ...] = (),
        calls: str = "",
    ) -> None:  # fmt: skip
        self.pool = pool
        self.of = section
        self.is_whole = is_whole
        self.choices = choices
        self._calls = calls  # the calls that created it, for messages
        self._keys: dict[Model | None, Keys] = {}

    @property
    def num_ids(self) -> int:
        return self.of.num_ids

    @property
    def tokens(self) -> int:
        return self.of.count("t")

    def section(
        self,
        *,
        l: Axis | None = None,  # noqa: E741  (the axis)
        o: Axis | None = None,
        h: Axis | None = None,
        t: Axis | None = None,
        d: Axis | None = None,
        planes: str | Iterable[str] | None = None,
        **others: Axis,
    ) -> PoolSection:
        """Select a part of this section, as `Pool.section` does."""
        section, choices = self.of, list(self.choices)
        axes = {"l": l, "o": o, "h": h, "t": t, "d": d, **others}
        try:
            if planes is not None:
                names = self._names(planes)
                section = section.of_planes(names)
                choices.append(("", tuple(names)))
            for axis, given in axes.items():
                if given is not None:
                    self._require_axis(axis)
                    coordinates = _coordinates(axis, given)
                    section = section.select(axis, coordinates)
                    choices.append((axis, coordinates))
        except LayoutError as error:
            raise PlanError(str(error)) from None
        named = {"planes": planes, **axes}
        selected = ", ".join(f"{what}={_short(some)}" for what, some in named.items() if some is not None)
        return PoolSection(self.pool, section, choices=tuple(choices), calls=f"{self._calls}.section({selected})")

    def units(self, tokens: int) -> PoolSection:
        """Units of this section's blocks, as for `Pool.units`."""
        if (found := whole(tokens)) is None:
            raise PlanError(f"{self.pool.layout.name}: units: expected a number of tokens, got {quoted(tokens)}")
        tokens = found
        try:
            section = self.of.cut(tokens)
        except LayoutError as error:
            raise PlanError(str(error)) from None
        if section.num_ids > _MOST_IDS:
            raise PlanError(
                f"{self.pool.layout.name}: units of {tokens} tokens: expected at most {_MOST_IDS} units, got {section.num_ids}: "
                "use more tokens per unit"
            )
        choices = (*self.choices, ("t", range(section.count("t"))))
        return PoolSection(self.pool, section, choices=choices, calls=f"{self._calls}.units({tokens})")

    def _names(self, planes: Any) -> list[str]:
        if isinstance(planes, str):
            return [planes]
        what = f"{self.pool.layout.name}: planes"
        names = listed(what, planes, "a name, or a list of names", error=PlanError)
        for name in names:
            require_a(str, what, name, "names", PlanError)
        return names

    def keys(self, model: Model | None = None) -> Keys:
        """The keys of this section's cells, for digests, if the pool holds this part of a model; default: all of it.

        Raises `PlanError` if the layout has no digests, or `model` does not fit the pool.
        """
        found = self._keys.get(model)
        if found is None:
            found = self._keys[model] = keys_of(self.pool.resolved.section, model, self.choices)
        return found

    def digest(
        self, ids: Any = None, *, tokens: Any = None, model: Model | None = None, out: Any = None, stream: Any = None,
        wait: Any = None,
    ) -> Any:  # fmt: skip
        """Digests of blocks or units of this section, as for `Pool.digest`."""
        self.pool.require_open()
        require_model(model)
        known: dict[Any, Digester] = self.pool.digesters
        what = self.of.units, self.choices, model
        found = known.get(what)
        if found is None:
            if len(known) >= _MOST_DIGESTERS:
                known.clear()
            found = known.setdefault(what, Digester(self, self.keys(model)))
        return found.digest(self.pool, ids, tokens, out, stream, wait)

    def _require_axis(self, axis: str) -> None:
        sizes = self.of.shape.sizes | dict.fromkeys(self.pool.layout.axes, 1)
        if axis not in sizes:
            hint = "; select blocks by their ids" if axis == "b" else ""
            raise PlanError(f"{self.pool.layout.name}: expected axes among {' '.join(sizes)}, got {quoted(axis)}{hint}")

    def __repr__(self) -> str:
        return f"PoolSection({self.pool.layout.name}{self._calls}, num_ids={self.num_ids})"


def _coordinates(axis: str, given: Any) -> Coordinates:
    if isinstance(given, range):
        if min(given.start, given.stop) < -(1 << 31) or max(given.start, given.stop) >= 1 << 31:
            raise PlanError(f"axis '{axis}': expected coordinates of the axis, got {quoted(given)}")
        return given
    if (one := whole(given)) is not None and abs(one) < 1 << 31:
        return range(one, one + 1)
    found = wholes(given)
    if found is None or any(abs(one) >= 1 << 31 for one in found):
        raise PlanError(f"axis '{axis}': expected an int, a range or a list of ints, got {quoted(given)}")
    if len(set(found)) != len(found):
        raise PlanError(f"axis '{axis}': expected each coordinate once, got {quoted(list(found))}")
    return found


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"
