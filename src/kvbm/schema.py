"""JSON schemas of layout files and shape files, for editors: made from what the parser knows, so that the two agree.

A schema never refuses what the parser takes.  It cannot see everything that the parser refuses: no pattern knows whether
a pitch belongs to an axis of the order, or whether a split divides a size.  `kvbm check` does.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from .layout import AXES, FUNCTIONS, OPERATORS, SIZES
from .shapes import ITEMSIZE, OPTIONAL_KEYS, REQUIRED_KEYS
from .spec import KEYS

__all__ = ["SCHEMAS", "layout_schema", "shape_schema", "text"]

_Schema = dict[str, Any]

# The patterns are read by JavaScript too, with its flag "u": no named groups, and nothing escaped that needs it not.
_DRAFT = "http://json-schema.org/draft-07/schema#"  # what editors know best
_OWN = "".join(AXES)
_ANY = "A-Za-z"
_TEXT = {"type": ["string", "number", "boolean", "null"]}  # the parser takes every scalar as it is written


def layout_schema() -> _Schema:
    """The schema of a layout file."""
    described: dict[str, _Schema] = {
        "title": {**_TEXT, "description": "What it is, in a line."},
        "order": {
            "description": "The axes, slowest first: "
            + ", ".join(f"{axis} {what}" for axis, what in AXES.items())
            + ". "
            "[b l] picks an allocation, d/16B and d%16B split, (h d)/16 fuses and splits, {t h d} promises no order. "
            "{k: …, v: …} where K and V differ."
        },
        "pitch": {
            "type": "object",
            "description": "Axis outside brackets → distance between neighbours, in elements, or in bytes with B at the end.",
            "additionalProperties": _expression(r"(?:\s*B)?"),
        },
        "axes": {
            "type": "object",
            "description": "Further axes, one letter each, and their sizes.",
            "propertyNames": {"pattern": f"^(?![{_OWN}])[{_ANY}]$"},
            "additionalProperties": _expression(""),
        },
        "used_by": {"type": "array", "items": _TEXT, "description": "Engines and stores that have it."},
        "read_from": {**_TEXT, "description": "What it was read from, and at which version."},
        "notes": {"description": "Whatever else a reader should know."},
    }
    return {
        "$schema": _DRAFT,
        "title": "kvbm layout",
        "description": "Where every element of a KV-cache block lies.",
        "type": "object",
        "properties": {key: described[key] for key in KEYS},
        "required": ["order"],
        "additionalProperties": False,
        # Letters beyond those of the language are axes only where they are declared.
        "if": {"required": ["axes"]},
        "then": {"properties": _with_letters(_ANY)},
        "else": {"properties": _with_letters(_OWN)},
        "definitions": {"once": {"allOf": _rules(_ONCE)}},
    }


def shape_schema() -> _Schema:
    """The schema of a shape file."""
    size = {"type": "integer", "minimum": 1}
    described: dict[str, _Schema] = {
        "title": {**_TEXT, "description": "The model."},
        "nl": {**size, "description": "Layers."},
        "no": {**size, "description": "2 for K and V, 1 for a latent."},
        "nh": {**size, "description": "KV heads."},
        "nt": {**size, "description": "Tokens in a block."},
        "hd": {**size, "description": "Elements of a head."},
        "dtype": {"enum": list(ITEMSIZE), "description": "Of an element."},
        "tp": {"type": "array", "items": size, "description": "Usual numbers of tensor-parallel ranks."},
        "read_from": {**_TEXT, "description": "What it was read from."},
        "notes": {"description": "Whatever else a reader should know."},
    }
    return {
        "$schema": _DRAFT,
        "title": "kvbm block shape",
        "description": "The sizes of a model's KV-cache block.",
        "type": "object",
        "properties": {key: described[key] for key in (*REQUIRED_KEYS, *OPTIONAL_KEYS)},
        "required": list(REQUIRED_KEYS),
        "additionalProperties": False,
    }


#: What there is a schema of.
SCHEMAS = {"layout": layout_schema, "shape": shape_schema}


def text(kind: str) -> str:
    """A schema as it is checked in: ``text("layout")`` is ``layouts/schema.json``."""
    return json.dumps(SCHEMAS[kind](), indent=2, ensure_ascii=False) + "\n"


# ---- orders --------------------------------------------------------------------------------------------------------


# In a whole term nothing splits the letter, and it stands in no (…). The unit B is no axis, so that letter is not looked at.
_LETTER, _WHOLE = "([AC-Za-z])", r"(?![/%])(?![^()]*\))"

#: Pattern → what an editor says in its place: what holds whatever the letters are.
_ONCE = {
    r"^[^b]*b(?![/%])[^b]*$": "expected the axis b (block) once, unsplit",
    r"^(?![\s\S]*[({](?:\s*b\s+[A-Za-z]|[^(){}]*[A-Za-z]\s+b))": "expected the axis b (block) alone: block ids index it",
    rf"^(?![\s\S]*{_LETTER}{_WHOLE}[\s\S]*\1)(?![\s\S]*{_LETTER}[\s\S]*\2{_WHOLE})": "expected every axis once, or in the "
    "pieces of one split",
    r"^(?![\s\S]*\([^()]*([A-Za-z])[^()]*\1)": "expected every axis once inside (…)",
    r"^(?![\s\S]*([A-Za-z](?:[/%][0-9]+B?)+)(?![0-9B/%])[\s\S]*\1(?![0-9B/%]))": "expected every piece of a split once",
}


def _rules(rules: Mapping[str, str]) -> list[_Schema]:
    return [{"pattern": pattern, "patternErrorMessage": said} for pattern, said in rules.items()]


def _with_letters(letters: str) -> _Schema:
    """What depends on which letters are axes."""
    axis = f"[{letters}]"
    axes = rf"\s*{axis}(?:\s+{axis})*\s*"
    term = rf"(?:\({axes}\)|{axis})(?:[/%]0*[1-9][0-9]*B?)*"
    opaque = rf"\{{{axes}\}}"
    table = rf"\[(?:\s*(?:{term}|\{{\s*{axis}\s*\}}))*\s*\]"
    known = f" ({' '.join(AXES)}; others are declared under axes)" if letters == _OWN else ""
    said = f"expected axes{known}, one pair of brackets in front, splits such as d/16B, (…) and {{…}}"
    order = {
        "allOf": [*_rules({rf"^\s*(?:{table})?(?:\s*(?:{term}|{opaque}))*\s*$": said}), {"$ref": "#/definitions/once"}]
    }
    halves = {half: {"type": "string", **order} for half in "kv"}
    return {
        "order": {
            "type": ["string", "object"],
            **order,  # patterns are for texts, the rest is for {k: …, v: …}
            "properties": halves,
            "required": list(halves),
            "additionalProperties": False,
        },
        "pitch": {"propertyNames": {"pattern": f"^(?:{term}|{opaque})$"}},
    }


# ---- expressions ---------------------------------------------------------------------------------------------------


def _expression(end: str) -> _Schema:
    """Operands with operators between them; a pattern cannot count parentheses."""
    symbols = [ast.unparse(ast.BinOp(ast.Name("x"), operator(), ast.Name("x"))).split()[1] for operator in OPERATORS]
    between = "|".join(_escaped(symbol) for symbol in [*symbols, ","])
    opened = rf"(?:(?:{'|'.join(FUNCTIONS)})?\s*\(\s*)*"
    operand = rf"(?:(?:{'|'.join(SIZES)})(?![A-Za-z0-9_])|0[xX][0-9a-fA-F]+|[0-9][0-9_]*)"
    one = rf"{opened}{operand}(?:\s*\))*"
    return {
        "type": ["integer", "string"],
        "minimum": 1,
        "pattern": rf"^\s*{one}(?:\s*(?:{between})\s*{one})*{end}\s*$",
        "patternErrorMessage": f"expected integers, {', '.join(SIZES)}, {' '.join(symbols)}, {', '.join(FUNCTIONS)}"
        + (", and B at the end for bytes" if end else ""),
    }


def _escaped(symbol: str) -> str:
    return re.sub(r"[*+]", r"\\\g<0>", symbol)
