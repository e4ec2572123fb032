"""What identifies a model: named texts, which two engines compare one by one, so that an error names what differs.

A card has them, so their number and sizes are limited: a long text is replaced by its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .._arguments import quoted
from ..errors import BindError, printable

#: Most fields of a model, and most characters of a name and of a text, as JSON writes them.
_MOST: Final = 192
_MOST_TEXT: Final = 96

#: Differences that an error lists.
_SHOWN: Final = 4

#: The name of the field if a model is one text, and of the field with the hash of those that are too many.
_ALONE, _REST = "model", "others"


def named(model: str | Mapping[str, Any]) -> dict[str, str]:
    """The fields of a model: of a text one; of a mapping one for each value, ``"outer.inner"`` for those inside others.

    Raises `BindError` if it is something else, or a name is not a text.
    """
    if isinstance(model, str):
        return {_ALONE: _short(model)}
    if not isinstance(model, Mapping):
        raise BindError(f"model: expected a text, or fields with names, got a {type(model).__name__}")
    found = dict(sorted((_short(name), _short(text)) for name, text in _flat(model, "")))
    if len(found) > _MOST:
        fields = list(found.items())
        rest = json.dumps(fields[_MOST - 1 :])
        found = {**dict(fields[: _MOST - 1]), _REST: _hash(rest)}
    return found


def read(fields: object) -> dict[str, str]:
    """The fields of another engine's card, which is not trusted.  Raises `BindError` if they are not fields."""
    if isinstance(fields, str):
        return {_ALONE: _short(fields)}
    if not isinstance(fields, dict) or len(fields) > _MOST:
        raise BindError(f"card: 'model': expected a text, or at most {_MOST} fields, got {quoted(fields, 60)}")
    for name, text in fields.items():
        if not isinstance(text, str) or max(len(name), len(text)) > _MOST_TEXT:
            raise BindError(
                f"card: 'model': expected texts of at most {_MOST_TEXT} characters, got {quoted(name, 60)}: {quoted(text, 60)}"
            )
    return fields


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The fields that differ, and how.  Empty if none does."""
    if here == there:
        return ""
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    shown = [
        f"{printable(name)}: {_value_text(here, name)} here and {_value_text(there, name)} on the other side"
        for name in names[:_SHOWN]
    ]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return "; ".join(shown + more)


def _value_text(fields: Mapping[str, str], name: str) -> str:
    return repr(fields[name]) if name in fields else "nothing"


def _flat(fields: Mapping[Any, Any], before: str) -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if not isinstance(name, str | int):
            raise BindError(f"model: expected names that are texts, got {quoted(name, 60)}")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(_plain(value), sort_keys=True, default=str)
            yield f"{before}{name}", text


def _plain(value: Any) -> Any:
    """A value in which equal numbers are the same text: 10000 and 10000.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value


def _short(text: str) -> str:
    """The text, or its beginning and its hash.  JSON writes no more characters than `_MOST_TEXT`."""
    if len(json.dumps(text)) <= _MOST_TEXT + 2:
        return text
    begins = "".join(letter if letter.isascii() and letter.isprintable() and letter not in '"\\' else "?" for letter in text[:52])
    return f"{begins}... {_hash(text)}"


def _hash(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:32]}"
