"""JSON schemas of layout, shape and placement files, for editors.  They use the names that the parser knows, so both agree.

A schema accepts every file that the parser accepts.  It also accepts some files that the parser refuses: a pattern cannot check
that a pitch belongs to an axis of the order, or that a split divides a size.  `kvbm check` checks everything.

``layouts/**/schema.json`` are these schemas; ``KVBM_UPDATE_GOLDEN=1 pytest tests/cli/test_schema.py`` writes them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvbm.layout.axes import AXES
from kvbm.layout.grammar import KEYS, PLANE_KEYS
from kvbm.layout.shapes import ITEMSIZE, OPTIONAL_KEYS, REQUIRED_KEYS
from kvbm.layout.terms import FUNCTIONS, OPERATORS, SIZES
from kvbm.reshard import placement

__all__ = ["SCHEMAS", "layout_schema", "placement_schema", "shape_schema", "text"]

_Schema = dict[str, Any]

# JavaScript reads these patterns, too, with its flag "u": no named groups, no unnecessary escapes.
_DRAFT = "http://json-schema.org/draft-07/schema#"  # the version that most editors support
_KNOWN_AXES = "".join(AXES)
_ANY = "A-Za-z"
_NAME = "[a-z][a-z0-9_]*"  # name of a plane
_SHARED = "[" + "".join(axis for axis in AXES if axis not in "bd") + "]"
_TEXT = {"type": ["string", "number", "boolean", "null"]}  # the parser reads every scalar as its text


def layout_schema() -> _Schema:
    """The schema of a layout file."""
    described: dict[str, _Schema] = {
        "title": {**_TEXT, "description": "What it is, in a line."},
        "like": {
            "type": "string",
            "description": "The layout that this one derives from: a name, or the path of a .yaml file from this file's folder. "
            "Its order stays; pitches, axes and keys of planes that are given here replace its own.",
        },
        "order": {
            "description": "The axes, slowest first: "
            + ", ".join(f"{axis} {what}" for axis, what in AXES.items())
            + ". "
            "[b l] picks an allocation, d/16B and d%16B split, (h d)/16 fuses and splits, {t h d} promises no order. "
            "{k: …, v: …} where K and V differ. <data scale> says where planes lie, in brackets or at the end."
        },
        "pitch": {
            "type": "object",
            "description": "Axis outside brackets → distance between neighbours, in elements, or in bytes with B at the end.",
            "additionalProperties": _expression(r"(?:\s*B)?"),
        },
        "axes": {
            "type": "object",
            "description": "Further axes, one letter each, and their sizes.",
            "propertyNames": {"pattern": f"^(?![{_KNOWN_AXES}])[{_ANY}]$"},
            "additionalProperties": _expression(""),
        },
        "planes": {
            "type": "object",
            "description": "The planes that the order names: kinds of elements, each with a dtype and an order of its own.",
            "propertyNames": {"pattern": f"^{_NAME}$"},
            "additionalProperties": _plane(),
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
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"required": ["like"]},
                "then": {"properties": {"order": False, "planes": {"additionalProperties": {"properties": {"order": False}}}}},
                "else": {"required": ["order"], "properties": {"planes": {"minProperties": 2}}},
            }
        ],
        # Other letters than those of the language are axes only if the key 'axes' declares them, here or in the file of 'like'.
        "if": {"anyOf": [{"required": ["axes"]}, {"required": ["like"]}]},
        "then": {"properties": _with_letters(_ANY)},
        "else": {"properties": _with_letters(_KNOWN_AXES)},
        "definitions": {"block": {"allOf": _rules(_BLOCK)}, "once": {"allOf": _rules(_ONCE)}},
    }


def _plane() -> _Schema:
    described: dict[str, _Schema] = {
        "order": {"description": "Its own axes, inside what all planes share; none if one element is all there is."},
        "dtype": {"enum": list(ITEMSIZE), "description": "Of its elements; the shape's if not given."},
        "offset": {
            **_expression(r"(?:\s*B)?", minimum=0),
            "description": "Bytes from the record's start; behind the plane before if not given.",
        },
        "pitch": {
            "type": "object",
            "description": "Axis of its order → distance between neighbours, in elements, or in bytes with B at the end.",
            "additionalProperties": _expression(r"(?:\s*B)?"),
        },
        "shared": {
            "type": ["string", "null"],
            "pattern": rf"^\s*(?:{_SHARED}(?:\s+{_SHARED})*\s*)?$",
            "patternErrorMessage": "expected axes among l o h t",
            "description": "Axes along which one element serves all: l o h t.",
        },
        "scales": {
            "type": "string",
            "pattern": r"^\s*[a-z][a-z0-9_]*\s*$",
            "description": "The plane whose elements this plane scales; casts need it.",
        },
    }
    return {
        "type": "object",
        "properties": {key: described[key] for key in PLANE_KEYS},
        "additionalProperties": False,
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


def placement_schema() -> _Schema:
    """The schema of a placement file."""
    name, size, spaces = "[a-z][a-z_]*", "[1-9][0-9]{0,8}", r"\s"
    digit = f"{name}(?:[/%]{size})*"
    number = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]{1,9}$"}
    some = {**number, "pattern": rf"^[0-9]{{1,9}}(?:{spaces}*-{spaces}*[0-9]{{1,9}}(?:{spaces}+by{spaces}+{size})?)?$"}
    uneven = {
        "over": {"type": "string", "pattern": f"^{spaces}*{digit}{spaces}*$"},
        "bounds": {"type": "array", "items": number},
    }
    shares: dict[str, _Schema] = {
        "l": {
            "type": ["string", "object"],
            "pattern": f"^{spaces}*{digit}{spaces}*$",
            "properties": uneven,
            "required": list(placement.SHARE_KEYS),
            "additionalProperties": False,
            "description": "Layers: pp in equal shares, or {over: pp, bounds: [0, 20, 48, 80]}.",
        },
        "h": {
            "type": "string",
            "pattern": f"^{spaces}*{digit}{spaces}*$",
            "description": "KV heads, in equal shares; of more ranks than heads, neighbours hold the same.",
        },
        "t": {
            "type": "string",
            "pattern": f"^{spaces}*{digit}{spaces}+by{spaces}+(?:nt|{size}){spaces}*$",
            "description": "Tokens, in turns: tp%4 by 1, cp by nt.",
        },
    }
    described: dict[str, _Schema] = {
        "title": {**_TEXT, "description": "What it is, in a line."},
        "mesh": {
            "type": "string",
            "pattern": f"^{spaces}*{name}{size}(?:{spaces}+{name}{size})*{spaces}*$",
            "description": "The ranks, slowest axis first: pp2 tp8.",
        },
        "shard": {
            "type": "object",
            "properties": {axis: shares[axis] for axis in placement.SHARED},
            "additionalProperties": False,
            "description": "Axis of the cache → axis of the mesh that shares it, or a digit of it: tp/4, tp%4.",
        },
        "layers": {
            **some,
            "type": ["integer", "string", "array"],
            "items": some,
            "minItems": 1,
            "description": "The layers of the model that the pools hold, ascending: [0-3, 5-77 by 6]; all if not given.",
        },
        "nt": {**number, "minimum": 1, "description": "Tokens of a block on a rank; the model's if not given."},
        "read_from": {**_TEXT, "description": "What it was read from."},
        "notes": {"description": "Whatever else a reader should know."},
    }
    return {
        "$schema": _DRAFT,
        "title": "kvbm placement",
        "description": "Which part of a model's cache each rank of an engine holds.",
        "type": "object",
        "properties": {key: described[key] for key in placement.KEYS},
        "required": ["mesh"],
        "additionalProperties": False,
    }


#: The kinds of files that have a schema.
SCHEMAS = {"layout": layout_schema, "shape": shape_schema, "placement": placement_schema}


def text(kind: str) -> str:
    """The text of a schema file: ``text("layout")`` is ``layouts/schema.json``."""
    return json.dumps(SCHEMAS[kind](), indent=2, ensure_ascii=False) + "\n"


# ---- orders --------------------------------------------------------------------------------------------------------


# A whole term is a letter without a split, outside (…). The letter B is a unit and not an axis, so the patterns skip it. They also
# skip the names between <>.
_NO_PLANE = "(?![^<>]*>)"
_LETTER, _WHOLE = f"([AC-Za-z]){_NO_PLANE}", r"(?![/%])(?![^()]*\))"
_NOT_B = "(?:[^b<]|<[^<>]*>)*"

#: Rules for the order of a layout: pattern → the message that an editor shows instead of it.
_BLOCK = {
    rf"^{_NOT_B}b(?![/%]){_NOT_B}$": "expected the axis b (block) once, unsplit",
    r"^[^<]*(?:<[^<]*)?$": "expected one term <…> that says where the planes lie",
}

#: Rules for any order, for any letters.
_ONCE = {
    r"^(?![\s\S]*[({](?:\s*b\s+[A-Za-z]|[^(){}]*[A-Za-z]\s+b))": "expected the axis b (block) alone: block ids index it",
    rf"^(?![\s\S]*{_LETTER}{_WHOLE}[\s\S]*\1{_NO_PLANE})(?![\s\S]*{_LETTER}[\s\S]*\2{_NO_PLANE}{_WHOLE})": "expected every axis "
    "once, or in the pieces of one split",
    r"^(?![\s\S]*\([^()]*([A-Za-z])[^()]*\1)": "expected every axis once inside (…)",
    r"^(?![\s\S]*([A-Za-z](?:[/%][0-9]+B?)+)(?![0-9B/%])[\s\S]*\1(?![0-9B/%]))": "expected every piece of a split once",
}


def _rules(rules: Mapping[str, str]) -> list[_Schema]:
    return [{"pattern": pattern, "patternErrorMessage": message} for pattern, message in rules.items()]


def _with_letters(letters: str) -> _Schema:
    """The rules that depend on the letters that are axes."""
    axis = f"[{letters}]"
    axes = rf"\s*{axis}(?:\s+{axis})*\s*"
    term = rf"(?:\({axes}\)|{axis})(?:[/%]0*[1-9][0-9]*B?)*"
    opaque = rf"\{{{axes}\}}"
    planes = rf"<\s*{_NAME}(?:\s+{_NAME})+\s*>"
    table = rf"\[(?:\s*(?:{term}|{planes}|\{{\s*{axis}\s*\}}))*\s*\]"
    inner = rf"(?:\s*(?:{term}|{opaque}))*"
    known = f" ({' '.join(AXES)}; others are declared under axes)" if letters == _KNOWN_AXES else ""
    message = f"expected axes{known}, one pair of brackets in front, splits such as d/16B, (…), {{…}}, and <…> at the end"
    whole = [
        *_rules({rf"^\s*(?:{table})?{inner}(?:\s*{planes})?\s*$": message}),
        {"$ref": "#/definitions/block"},
        {"$ref": "#/definitions/once"},
    ]
    message = f"expected axes{known} other than b, splits such as d/16B, (…) and {{…}}"
    own = [*_rules({rf"^(?:\s*\[\s*\])?{inner}\s*$": message, "^[^b]*$": message}), {"$ref": "#/definitions/once"}]
    pitch = {"propertyNames": {"pattern": f"^(?:{term}|{opaque})$"}}
    # A plane's order may be empty, which YAML reads as null. The text "true", which YAML reads as a boolean, is the axes t r u e.
    plane = {"properties": {"order": _halved(["string", "boolean", "null"], own), "pitch": pitch}}
    return {"order": _halved(["string"], whole), "pitch": pitch, "planes": {"additionalProperties": plane}}


def _halved(types: Sequence[str], rules: Sequence[_Schema]) -> _Schema:
    """An order, or {k: …, v: …}.  The patterns apply to a text, the other keywords to the mapping."""
    halves = {half: {"type": list(types) if len(types) > 1 else types[0], "allOf": list(rules)} for half in "kv"}
    return {
        "type": [*types, "object"],
        "allOf": list(rules),
        "properties": halves,
        "required": list(halves),
        "additionalProperties": False,
    }


# ---- expressions ---------------------------------------------------------------------------------------------------


def _expression(end: str, minimum: int = 1) -> _Schema:
    """Operands with operators between them.  A pattern cannot check that parentheses match."""
    symbols = [ast.unparse(ast.BinOp(ast.Name("x"), operator(), ast.Name("x"))).split()[1] for operator in OPERATORS]
    between = "|".join(_escaped(symbol) for symbol in [*symbols, ","])
    opened = rf"(?:(?:{'|'.join(FUNCTIONS)})?\s*\(\s*)*"
    operand = rf"(?:(?:{'|'.join(SIZES)})(?![A-Za-z0-9_])|0[xX][0-9a-fA-F]+|[0-9][0-9_]*)"
    one = rf"{opened}{operand}(?:\s*\))*"
    return {
        "type": ["integer", "string"],
        "minimum": minimum,
        "pattern": rf"^\s*{one}(?:\s*(?:{between})\s*{one})*{end}\s*$",
        "patternErrorMessage": f"expected integers, {', '.join(SIZES)}, {' '.join(symbols)}, {', '.join(FUNCTIONS)}"
        + (", and B at the end for bytes" if end else ""),
    }


def _escaped(symbol: str) -> str:
    return re.sub(r"[*+]", r"\\\g<0>", symbol)
