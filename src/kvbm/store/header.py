"""The JSON of a safetensors header, and of a metadata text: parsed in time and memory in proportion to what a real file holds.

A JSON parser makes an object of every ``[]`` before anyone can refuse it.  Here each tensor is matched with its grammar first, so
the first piece that no header has ends the work.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["MAX_HEADER", "MAX_METADATA", "MIN_ENTRY", "Entry", "once", "parsed_header", "parsed_object"]

MAX_HEADER = 100_000_000  # the safetensors format's own limit
MAX_METADATA = 16 << 20
MIN_ENTRY = 100  # about the bytes of one tensor in the header
_MAX_TENSORS = MAX_HEADER // MIN_ENTRY
_MAX_DIGITS, _MAX_DIMENSIONS = 18, 64  # limits for a number and for a tensor: no real file exceeds them
_MAX_TEXT = 4096  # characters of an object in the metadata

_S = r"[ \t\n\r]*+"
_TEXT = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_NUMBER = rf"(?:0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}})"
_NUMBERS = rf"\[{_S}(?:{_NUMBER}{_S}(?:,{_S}{_NUMBER}{_S}){{0,{_MAX_DIMENSIONS - 1}}}+)?+\]"
_FIELD = rf"{_TEXT}{_S}:{_S}(?:{_TEXT}|{_NUMBERS}|{_NUMBER}){_S}"
_TENSOR = re.compile(rf"\{{{_S}{_FIELD}(?:,{_S}{_FIELD}){{2,7}}+\}}{_S}")
_PAIR = rf"{_TEXT}{_S}:{_S}{_TEXT}{_S}"
_METADATA = re.compile(rf"\{{{_S}(?:{_PAIR}(?:,{_S}{_PAIR})*+)?+\}}{_S}")
_NAME = re.compile(rf"({_TEXT}){_S}:{_S}")
_BEGIN, _MORE, _END = re.compile(rf"{_S}\{{{_S}"), re.compile(rf",{_S}"), re.compile(rf"\}}{_S}\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file's header: dtype, shape, and its range of bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parsed_header(data: bytes | bytearray, start: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata, and tensors by name, of a header whose tensors start at byte `start` of the file.

    Raises ValueError, which says where, if it is not the header of a safetensors file.
    """
    text = data.decode("utf-8")
    if (match := _BEGIN.match(text)) is None:
        raise ValueError(f"expected an object, got {text[:20]!r}")
    at, has_more = match.end(), False
    metadata: dict[str, str] | None = None
    entries: dict[str, Entry] = {}
    while (match := _END.match(text, at)) is None or has_more:
        match = _NAME.match(text, at)
        if match is None:
            raise ValueError(f"expected the name of a tensor, got {text[at : at + 20]!r} (character {at:,})")
        name, at = json.loads(match[1]), match.end()
        name.encode()  # JSON may contain half a surrogate pair: refuse it
        if name in entries or (name == "__metadata__" and metadata is not None):
            raise ValueError(f"{name!r:.60} is there twice")
        if name == "__metadata__":
            found = _METADATA.match(text, at, at + MAX_METADATA)
            if found is None:
                raise ValueError(f"__metadata__: expected texts, of {MAX_METADATA:,} characters at most")
            metadata = json.loads(found[0], object_pairs_hook=once)
            for one in (*metadata, *metadata.values()):
                one.encode()
        else:
            found = _TENSOR.match(text, at)
            if found is None:
                raise ValueError(
                    f"{name!r:.60}: expected a dtype, a shape of at most {_MAX_DIMENSIONS} sizes and two data_offsets, integers of "
                    f"at most {_MAX_DIGITS} digits, got {text[at : at + 60]!r}"
                )
            entries[name] = _entry(name, json.loads(found[0], object_pairs_hook=once), start)
            if len(entries) > _MAX_TENSORS:
                raise ValueError(f"expected at most {_MAX_TENSORS:,} tensors")
        at = found.end()
        more = _MORE.match(text, at)
        has_more, at = more is not None, more.end() if more else at
        if not has_more and _END.match(text, at) is None:
            raise ValueError(f"expected a comma or the end, got {text[at : at + 20]!r} (character {at:,})")
    return metadata or {}, entries


def _entry(name: str, fields: dict[str, Any], start: int) -> Entry:
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"{name!r:.60}: expected a dtype and a shape, got {dtype!r:.60} and {shape!r:.60}")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{name!r:.60}: expected two data_offsets, got {offsets!r:.60}")
    dtype.encode()
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def parsed_object(text: str, most: int = _MAX_TEXT) -> dict[str, Any]:
    """Parse a JSON object of at most `most` characters; ValueError with the reason if it is none."""
    if len(text) > most:
        raise ValueError(f"expected at most {most:,} characters, got {len(text):,}")
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got a {type(value).__name__}")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values of JSON; ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.60} is there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
