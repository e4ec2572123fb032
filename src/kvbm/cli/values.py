"""The values of options: lists, numbers and devices.  These callbacks for click need no other package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import click

from .._arguments import quoted
from ..errors import CudaError, DeviceNotFoundError


def listed(_: click.Context, parameter: click.Parameter, values: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts of an option that takes a comma list and may be repeated.  Empty if it is not given."""
    given = [values] if isinstance(values, str) else values or ()
    found = [text.strip() for value in given for text in value.split(",")]
    if "" in found:
        raise click.BadParameter(f"expected a list such as a,b,c, got {quoted(','.join(given), 60)}", param=parameter)
    return tuple(dict.fromkeys(found))


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Numbers from 1 on, in the given order."""
    found = [text.replace("_", "") for text in listed(context, parameter, value)]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", text) for text in found):
        raise click.BadParameter(f"expected numbers from 1 on, such as 1,4,64, got {quoted(value, 60)}", param=parameter)
    return tuple(dict.fromkeys(map(int, found)))


def comma_list(
    known: Callable[[], Iterable[str]] | Iterable[str],
) -> Callable[[click.Context, click.Parameter, str | Sequence[str] | None], tuple[str, ...]]:
    """A callback for options that take some of these names, or of those that a function returns."""

    def parse(context: click.Context, parameter: click.Parameter, value: str | Sequence[str] | None) -> tuple[str, ...]:
        names = listed(context, parameter, value)
        every = tuple(known() if callable(known) else known) if names else ()
        for name in names:
            if name not in every:
                raise click.BadParameter(f"expected some of {', '.join(every)}, got {quoted(name, 60)}", param=parameter)
        return names

    return parse


def device(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """``cpu`` or ``cuda:N``; ``cuda`` is ``cuda:0``.  None if it is not given."""
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", value or "cpu", re.ASCII)
    if match is None:
        raise click.BadParameter(f"expected cpu or cuda:N, got {quoted(value, 60)}", param=parameter)
    return value if value in (None, "cpu") else f"cuda:{int(match[1] or 0)}"


def usable_device(option: str, index: int | None, otherwise: str) -> str:
    """``cuda:N`` for a given number; else the first GPU, or ``cpu`` if kvbm can use none.

    If kvbm was built without CUDA kernels, a message says what it does `otherwise`.  Raises `DeviceNotFoundError` if there is
    no such GPU.
    """
    from .. import _core

    try:
        count, why = _core.device_count(), ""
    except CudaError as error:
        count, why = 0, f": {error}"
    if index is not None and index >= count:
        there = f"{count} of them, from 0 on" if count else f"none that kvbm can use{why}"
        raise DeviceNotFoundError(f"{option}: no such GPU: this machine has {there}")
    if index is None and count and not _core.num_images():
        click.echo(f"kvbm was built without CUDA kernels: {otherwise} (see `kvbm doctor`)", err=True)
        return "cpu"
    return f"cuda:{index or 0}" if count else "cpu"
