"""The grammar of layout files: YAML → `Layout`.  Every error names file and line.  The axes are `axes.AXES`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import yaml

from ..errors import LayoutError, SpecError
from .axes import AXES
from .layout import Layout
from .naming import ITEMSIZE, meant_dtype
from .scales import why_not_scales
from .slips import meant_order
from .terms import Expression, Order, Pitch, Plane, Term
from .yamlfile import YamlFile

#: Keys of a layout file.
KEYS = ("title", "like", "order", "pitch", "axes", "planes", "used_by", "read_from", "notes")

#: Keys that say what a file is.  Those of a layout that it is like say nothing about it.
_OWN_KEYS = ("title", "like", "used_by", "read_from", "notes")

#: Keys of a plane.
PLANE_KEYS = ("order", "dtype", "offset", "pitch", "shared", "scales")

#: What reads the layout of a name: name, the file that names it → text, file.
Base: TypeAlias = "Callable[[str, str], tuple[str, str]]"

# An order is a sequence of these tokens; each becomes a bracket or a term.
_TOKEN = re.compile(
    r"\s*(?:(?P<open>\[)|(?P<close>\])|<(?P<planes>[^<>]*)>|\{(?P<opaque>[^{}]*)\}|(?:\((?P<fused>[^()]*)\)|(?P<axis>[A-Za-z]))(?P<steps>(?:[/%][0-9]{1,18}B?)*))"
)
_STEP = re.compile(r"([/%])([0-9]+)(B?)")


def parse(text: str, file: str = "<string>", name: str | None = None, base: Base | None = None) -> Layout:
    """Read the text of a layout file: YAML with the keys of `KEYS`, of which only ``order`` or ``like`` is required.

    `file` is its name in messages, and `name` that of the layout (default: the stem of the file).  `base` reads the
    layout that ``like`` names; without it, ``like`` is refused: a text from elsewhere must not read files.

    Raises `SpecError` if the text is not YAML, a key is unknown or repeated, a value has a wrong type, an axis is
    unknown or repeated, or a split has a wrong form.
    """
    reader = _File(file, base)
    with reader.guarded(text):
        return reader.layout(text, name or Path(file).stem)


def write(layout: Layout, *, scales: bool = False) -> str:
    """The text of a layout file that `parse` reads as an equal layout.

    Its notes for readers are left out, and, unless `scales` is true, so is `scales`: only casts use it, and peers with an earlier
    version read the text.
    """

    def orders(given: tuple[Order, ...]) -> Any:
        return str(given[0]) if len(given) == 1 else dict(zip("kv", map(str, given), strict=True))

    def pitch(given: tuple[tuple[str, Pitch], ...]) -> dict[str, str]:
        return {term: f"{one.expression.text}{' B' if one.in_bytes else ''}" for term, one in given}

    def plane(given: Plane) -> dict[str, Any]:
        offset = f"{given.offset.text} B" if given.offset else ""
        keys: tuple[Any, ...] = orders(given.orders), given.dtype, offset, pitch(given.pitch), " ".join(given.shared)
        keys += (given.scales,) if scales else ("",)
        return {key: value for key, value in zip(PLANE_KEYS, keys, strict=True) if value}

    keys = {
        "order": orders(layout.orders), "pitch": pitch(layout.pitch), "axes": layout.axes,
        "planes": {one.name: plane(one) for one in layout.planes},
    }  # fmt: skip
    return yaml.safe_dump({key: value for key, value in keys.items() if value}, sort_keys=False, width=1 << 20)


class _File(YamlFile):
    """One layout file being read."""

    def __init__(self, file: str, base: Base | None = None, derived: Sequence[str] = ()) -> None:
        super().__init__(file)
        self.base = base
        #: The files that derive from this one, the last first.
        self.derived = derived

    def keys(self, text: str) -> tuple[yaml.Node, dict[str, yaml.Node]]:
        """The root and the keys of a file.  If it derives from another, those of the other are among them."""
        root = self.root(text, "order: …")
        keys = self.mapping(root, "the file", KEYS, example='order: "[b l o] t h d"')
        return root, self.with_base(keys) if "like" in keys else keys

    def with_base(self, own: dict[str, yaml.Node]) -> dict[str, yaml.Node]:
        node = own["like"]
        name = self.scalar(node, "like")
        if self.base is None:
            self.fail(node, "like: expected the whole layout, because this text is no file that kvbm.load reads: write its order")
        planes = own.get("planes")
        for key, value in [("order", own.get("order")), *self.orders_of_planes(planes)]:
            if value is not None:
                self.fail(value, f"{key}: a layout that is like another has its order: remove the key, or 'like'")
        try:
            text, file = self.base(name, self.file)
        except SpecError as error:
            self.fail(node, f"like: {error}")
        files = [file, self.file, *self.derived]
        if file in files[1:]:
            circle = " → ".join(reversed(files[: files.index(file, 1) + 1]))
            self.fail(node, f"like: each of these files derives from the next: {circle}; name a layout that is not among them")
        reader = _File(file, self.base, files[1:])
        with reader.guarded(text):
            _, keys = reader.keys(text)
        if planes is not None and isinstance(keys.get("planes"), yaml.MappingNode):
            self.mapping(planes, "planes", list(self.mapping(keys["planes"], "planes")))
        return _derived({key: node for key, node in keys.items() if key not in _OWN_KEYS}, own)

    def orders_of_planes(self, planes: yaml.Node | None) -> Iterator[tuple[str, yaml.Node | None]]:
        for name, plane in self.mapping(planes, "planes").items() if planes is not None else ():
            yield f"order of plane '{name}'", self.mapping(plane, f"plane '{name}'", PLANE_KEYS).get("order")

    def layout(self, text: str, name: str) -> Layout:
        root, keys = self.keys(text)
        if "order" not in keys or getattr(keys["order"], "value", None) == "":
            what = f"key 'order' {'empty' if 'order' in keys else 'missing'}"
            self.fail(keys.get("order", root), f'{what}: add the axes, slowest first, for example order: "[b l o] t h d"')
        extra = self.extra_axes(keys.get("axes"))
        orders = self.orders(keys["order"], extra)
        planes = self.planes(keys.get("planes"), keys["order"], orders, extra)
        pitch = self.pitch(keys.get("pitch"), orders)
        if planes and orders[0].inner[-1:] and orders[0].inner[-1].planes:
            for term, declared in pitch:
                if not declared.in_bytes:
                    self.fail(
                        keys["pitch"],
                        f"pitch of '{term}': expected bytes such as '656 B', got {declared} elements: planes may have "
                        "elements of different sizes",
                    )
        return Layout(
            orders=orders,
            pitch=pitch,
            extra=tuple(sorted(extra.items())),
            planes=planes,
            name=name,
            title=self.scalar(keys["title"], "title") if "title" in keys else "",
            file=self.file,
            used_by=self.strings(keys.get("used_by"), "used_by"),
            read_from=self.scalar(keys["read_from"], "read_from") if "read_from" in keys else "",
        )

    def expression(self, node: yaml.Node, text: str, what: str) -> Expression:
        try:
            return Expression(text, self.line(node))
        except LayoutError as error:
            self.fail(node, f"{what}: {error}")

    # -- the keys

    def extra_axes(self, node: yaml.Node | None) -> dict[str, Expression]:
        extra: dict[str, Expression] = {}
        for axis, value in self.mapping(node, "axes", example="{s: hd // 16}").items() if node is not None else ():
            if not re.fullmatch("[A-Za-z]", axis) or axis in AXES:
                self.fail(
                    value, f"axes: expected one letter other than {' '.join(AXES)} as the name of a further axis, got {axis!r}"
                )
            extra[axis] = self.expression(value, self.scalar(value, f"size of axis '{axis}'"), f"size of axis '{axis}'")
        return extra

    def orders(self, node: yaml.Node, extra: dict[str, Expression], outer: Order | None = None) -> tuple[Order, ...]:
        """One order, or those of K and V.  For a plane, `outer` is the order that all planes share."""
        if isinstance(node, yaml.ScalarNode):
            return (self.order(node, extra, outer),)
        if isinstance(node, yaml.SequenceNode):
            axes = " ".join(str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode))
            self.fail(
                node,
                "order: expected a text, got a list: write the axes in quotation marks, with blanks between them, such as "
                f'"{axes if axes and len(axes) < 100 else "b l o t h d"}"; brackets go inside the quotation marks: "[b l] o t h d"',
            )
        halves = self.mapping(node, "order", ("k", "v"))
        for half in "kv":
            if half not in halves:
                self.fail(node, f"order: {half!r} missing: expected both k and v, or one text if K and V have the same order")
        k, v = self.order(halves["k"], extra, outer), self.order(halves["v"], extra, outer)
        if k == v:
            return (k,)  # canonical form, so that equal layouts are equal objects
        if k.table != v.table:
            self.fail(halves["v"], f"order: expected the same brackets in k and v, got '{k}' and '{v}'")
        for order, where in ((k, halves["k"]), (v, halves["v"])):
            if not any(term.axes == ("o",) and not term.steps for term in (outer or order).terms):
                self.fail(
                    where,
                    f"order '{order}': k and v differ: expected the axis 'o' alone and unsplit in "
                    f"{'the order that all planes share' if outer else 'both'}",
                )
        return (k, v)

    def order(self, node: yaml.Node, extra: dict[str, Expression], outer: Order | None = None) -> Order:
        text = self.scalar(node, "order")
        try:
            return self.order_of(node, text, extra, outer)
        except SpecError as error:
            meant, message = meant_order(text), str(error)
            if meant != text and len(text) < 200:
                with contextlib.suppress(SpecError):
                    self.order_of(node, meant, extra, outer)
                    message += f'. Did you mean "{meant}"?'
            raise SpecError(message) from None

    def order_of(self, node: yaml.Node, text: str, extra: dict[str, Expression], outer: Order | None) -> Order:
        table: list[Term] = []
        inner: list[Term] = []
        into, position, bracketed = inner, 0, False
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                rest = text[position:].strip()
                if rest[0] in "({<":
                    self.fail(
                        node, f"order {text!r}: '{rest[0]}' is not closed: expected '{')}>'['({<'.index(rest[0])]}'"
                    )
                self.fail(
                    node, f"order {text!r}: expected an axis, [, ], (…), {{…}} or a split such as d/16B, got {rest!r}"
                )
            position = match.end()
            if match["open"]:
                if bracketed or inner:
                    self.fail(node, f"order {text!r}: expected at most one pair of brackets, at the beginning")
                into, bracketed = table, True
            elif match["close"]:
                if into is inner:
                    self.fail(node, f"order {text!r}: found ']' without '['")
                into = inner
            elif match["planes"] is not None:
                into.append(self.planes_term(node, text, match["planes"].split()))
            else:
                into.append(self.term(node, text, match, extra))
        if into is table and bracketed:
            self.fail(node, f"order {text!r}: '[' is not closed: expected ']'")
        order = Order(tuple(table), tuple(inner), self.line(node))
        if outer is None:
            self.require_plausible(node, text, order)
        elif any(term.planes for term in order.terms):
            self.fail(node, f"order {text!r}: expected no <…> in the order of a plane")
        return order

    def planes_term(self, node: yaml.Node, text: str, names: list[str]) -> Term:
        for name in names:
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or names.count(name) > 1:
                self.fail(
                    node,
                    f"order {text!r}: expected different lower-case names of planes, such as data and scale, got {name!r}",
                )
        if len(names) < 2:
            self.fail(node, f"order {text!r}: expected two planes or more between <>, got {len(names)}")
        return Term(tuple(names), planes=True)

    def planes(
        self, node: yaml.Node | None, where: yaml.Node, orders: tuple[Order, ...], extra: dict[str, Expression]
    ) -> tuple[Plane, ...]:
        """The planes of an order, in the sequence in which the order names them."""
        terms = [(order, term) for order in orders for term in order.terms if term.planes]
        if not terms and node is None:
            return ()
        if not terms:
            self.fail(
                where, "order: expected a term such as <data scale> for the places of the planes, because the key 'planes' exists"
            )
        if node is None:
            names = ", ".join(terms[0][1].axes)
            self.fail(where, f"key 'planes' missing: the order has the planes {names}: declare them under 'planes:'")
        order, term = terms[0]
        if len(orders) > 1 or len(terms) > 1:
            self.fail(
                where, "order: expected a single term <…>, in one order for K and V; a plane may have its own orders k and v"
            )
        if term in order.inner and term is not order.inner[-1]:
            self.fail(where, f"order '{order}': expected '{term}' inside the brackets or at the end of the order")
        declared = self.mapping(node, "planes", term.axes)
        for name in term.axes:
            if name not in declared:
                self.fail(node, f"planes: {name!r} missing: the order names it, so declare it here")
        planes = tuple(self.plane(name, declared[name], order, extra) for name in term.axes)
        for plane in planes:
            if why := why_not_scales(plane, planes):
                self.fail(self.mapping(declared[plane.name], "", PLANE_KEYS)["scales"], f"plane '{plane.name}': scales: {why}")
        return planes

    def plane(self, name: str, node: yaml.Node, outer: Order, extra: dict[str, Expression]) -> Plane:
        what = f"plane '{name}'"
        keys = self.mapping(node, what, PLANE_KEYS)
        orders = self.orders(keys["order"], extra, outer) if "order" in keys else (Order((), (), self.line(node)),)
        for order in orders:
            if order.table:
                self.fail(
                    keys["order"], f"{what}: order '{order}': expected no brackets in a plane: put them into the layout's order"
                )
            self.require_plausible(
                keys.get("order", node), str(order), Order(outer.table, (*outer.inner, *order.inner))
            )
        dtype = self.scalar(keys["dtype"], f"dtype of {what}") if "dtype" in keys else None
        if dtype is not None and dtype not in ITEMSIZE:
            self.fail(
                keys["dtype"],
                f"dtype of {what}: expected a name such as bfloat16 or float32, got {dtype!r:.200}.{meant_dtype(dtype)}",
            )
        offset = None
        if "offset" in keys:
            if any(term.planes for term in outer.table):
                self.fail(keys["offset"], f"{what}: expected no offset, because each plane has its own arrays: remove the key")
            text = re.sub(r"(?<![A-Za-z_])\s*B\s*$", "", self.scalar(keys["offset"], f"offset of {what}"))
            offset = self.expression(keys["offset"], text, f"offset of {what}")
        shared = tuple(sorted(self.scalar(keys["shared"], f"shared of {what}").split())) if "shared" in keys else ()
        for axis in shared:
            if axis not in AXES or axis in "bd":
                self.fail(keys["shared"], f"{what}: shared: expected some of the axes l o h t, got {axis!r}")
        scales = self.scalar(keys["scales"], f"scales of {what}") if "scales" in keys else ""
        if "scales" in keys and not scales:
            self.fail(keys["scales"], f"{what}: scales: expected the name of another plane, got none")
        return Plane(name, orders, dtype, offset, self.pitch(keys.get("pitch"), orders), shared, scales)

    def term(self, node: yaml.Node, text: str, match: re.Match[str], extra: dict[str, Expression]) -> Term:
        opaque = match["opaque"] is not None
        group = match["opaque"] if opaque else match["fused"]
        axes = tuple((group if group is not None else match["axis"]).split())
        if not axes:
            self.fail(node, f"order {text!r}: expected axes between {'{}' if opaque else '()'}, got none")
        for axis in axes:
            if axis not in AXES and axis not in extra:
                self.fail(
                    node,
                    f"order {text!r}: axis {axis!r}: expected one of {' '.join([*AXES, *extra])}; declare others under 'axes:'",
                )
        steps = tuple((op, int(size), unit == "B") for op, size, unit in _STEP.findall(match["steps"] or ""))
        for op, size, _ in steps:
            if size < 1:
                self.fail(node, f"order {text!r}: split {op}{size}: expected a size of at least 1")
        return Term(axes, steps, opaque and len(axes) > 1)

    def require_plausible(self, node: yaml.Node, text: str, order: Order) -> None:
        """Raise errors that do not depend on sizes."""

        def refuse(what: str, rest: str) -> NoReturn:
            self.fail(node, f"order {text!r}: {what}: {rest}")

        whole = [str(term) for term in order.terms]
        home: dict[str, Term] = {}
        for term in order.terms:
            for axis in () if term.planes else term.axes:
                first = home.setdefault(axis, term)
                pieces_of_one_split = (
                    first.axes == term.axes and first.steps and term.steps and first.steps != term.steps
                )
                if (first is not term and not pieces_of_one_split) or term.axes.count(axis) > 1:
                    refuse(
                        f"axis {axis!r}", f"expected once, or in different pieces of one split, got '{first}' and '{term}'"
                    )
            if "b" in term.axes and str(term) != "b" and not term.planes:
                alone = f"; write 'b {' '.join(term.axes[1:])}'" if term.axes[0] == "b" and not (term.steps or term.opaque) else ""
                refuse("axis 'b'", f"expected alone and unsplit, because block ids index it, got '{term}'{alone}")
            if term.opaque and term in order.table:
                refuse(f"'{term}'", "expected outside the brackets: its axes are contiguous, so they cannot select allocations")
        if "b" not in whole:
            refuse("axis 'b' (block)", "expected once, got none: add b")

    def pitch(self, node: yaml.Node | None, orders: tuple[Order, ...]) -> tuple[tuple[str, Pitch], ...]:
        pitches: dict[str, Pitch] = {}
        inside = {str(term) for order in orders for term in order.inner if not term.planes}
        for term, value in self.mapping(node, "pitch", example="{b: 4096 B}").items() if node is not None else ():
            if term not in inside:
                self.fail(
                    value, f"pitch: expected one of {', '.join(sorted(inside))} (the terms outside brackets), got {term!r}"
                )
            text = self.scalar(value, f"pitch of '{term}'").strip()
            match = re.fullmatch(r"(?P<expression>.*?[^A-Za-z_])?\s*B", text)
            in_bytes = match is not None and match["expression"] is not None
            body = match["expression"].strip() if match and in_bytes else text
            pitches[term] = Pitch(self.expression(value, body, f"pitch of '{term}'"), in_bytes)
        return tuple(sorted(pitches.items(), key=lambda item: item[0]))


def _derived(base: Mapping[str, yaml.Node], own: Mapping[str, yaml.Node]) -> dict[str, yaml.Node]:
    """The keys of a layout, and beside them those of the layout that it is like.

    Mappings are merged key by key: a pitch of one axis leaves those of the others, a key of a plane leaves its other keys.
    """
    return {**base, **{key: _merged(base[key], node) if key in base else node for key, node in own.items()}}


def _merged(base: yaml.Node, own: yaml.Node) -> yaml.Node:
    if not (isinstance(base, yaml.MappingNode) and isinstance(own, yaml.MappingNode)):
        return own
    there = {key.value: value for key, value in base.value if isinstance(key, yaml.ScalarNode)}
    here = {key.value for key, _ in own.value if isinstance(key, yaml.ScalarNode)}
    pairs = [(key, value) for key, value in base.value if key.value not in here]
    pairs += [(key, _merged(there[key.value], value) if key.value in there else value) for key, value in own.value]
    return yaml.MappingNode(own.tag, pairs, own.start_mark, own.end_mark)
