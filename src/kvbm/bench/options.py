"""Options that take lists: callbacks for click.  They need no other package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click


def listed(_: click.Context, parameter: click.Parameter, values: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts of an option that takes a comma list and may be repeated.  Empty if it is not given."""
    given = [values] if isinstance(values, str) else values or ()
    found = [text.strip() for value in given for text in value.split(",")]
    if "" in found:
        raise click.BadParameter(f"expected a list such as a,b,c, got {','.join(given)!r}", param=parameter)
    return tuple(dict.fromkeys(found))


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Numbers from 1 on, in the given order."""
    found = [text.replace("_", "") for text in listed(context, parameter, value)]
    for text in found:
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise click.BadParameter(f"expected numbers from 1 on, such as 1,4,64, got {value!r}", param=parameter)
    return tuple(dict.fromkeys(map(int, found)))


def comma_list(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    """A callback for options that take some of these names."""

    def parse(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
        names = listed(context, parameter, value)
        for name in names:
            if name not in known:
                raise click.BadParameter(f"expected some of {', '.join(known)}, got {name!r}", param=parameter)
        return names

    return parse
