"""Block shapes: the sizes of one KV-cache block, its dtype, and presets for real models."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from .errors import DTypeError, SpecError

__all__ = [
    "ITEMSIZE",
    "LIMIT",
    "OPTIONAL_KEYS",
    "PACKED",
    "REQUIRED_KEYS",
    "BlockShape",
    "data_dir",
    "heads_of_rank",
    "is_file",
    "load_shape",
    "numpy_name",
    "shape_names",
]

#: Keys of a shape file: those that must be there, and those that may.
REQUIRED_KEYS = ("title", "nl", "no", "nh", "nt", "hd", "dtype", "tp")
OPTIONAL_KEYS = ("read_from", "notes")

#: Sizes, and bytes of a block, are below it: so are sums of a few of them in 64 bits.
LIMIT = 1 << 62

#: Bytes an item of every dtype that a block may hold.  A copy moves bits, so the width is all that matters to it.
ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
        "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float4_e2m1fn": 1, "int4": 1, "uint4": 1,
        "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
        "int32": 4, "uint32": 4, "float32": 4,
        "int64": 8, "uint64": 8, "float64": 8,
    }
)  # fmt: skip

#: Elements that share one item of `ITEMSIZE` bytes, where they do: neighbours along the fastest axis.
PACKED: Mapping[str, int] = MappingProxyType({"float4_e2m1fn": 2, "int4": 2, "uint4": 2})


#: dtypes that NumPy does not have.
_NOT_IN_NUMPY = frozenset(name for name in ITEMSIZE if name.startswith(("bfloat", "float8", "float4", "int4", "uint4")))


def numpy_name(dtype: str) -> str:
    """What NumPy calls a dtype, or the unsigned integers of the same width that stand in for one that it lacks.

    Examples
    --------
    >>> numpy_name("float16"), numpy_name("bfloat16")
    ('float16', 'uint16')
    """
    return f"uint{8 * ITEMSIZE[dtype]}" if dtype in _NOT_IN_NUMPY else dtype


def round_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The sizes of one KV block.

    Parameters
    ----------
    nl, no, nh, nt, hd : int
        Layers, outer (2 for K and V, 1 for MLA), KV heads, tokens in a block, elements of a head.
    dtype : str
        A key of `ITEMSIZE`, e.g. ``"bfloat16"``.

    Raises
    ------
    LayoutError, DTypeError
        A size below one; a dtype that is not known.

    Examples
    --------
    >>> BlockShape(nl=80, no=2, nh=8, nt=16, hd=128).nbytes
    5242880
    """

    nl: int
    no: int
    nh: int
    nt: int
    hd: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        dtype: object = self.dtype
        for name in ("nl", "no", "nh", "nt", "hd"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f"shape: {name}: expected an integer, got {value!r}")
            if not 1 <= value < LIMIT:
                got = f"at least 1, got {value}" if abs(value) < LIMIT else "1 to 2**62"
                raise SpecError(f"shape: {name}: expected {got}")
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise DTypeError(f"shape: dtype: expected one of {', '.join(ITEMSIZE)}, got {dtype!r:.200}")
        if self.nbytes >= LIMIT:
            raise SpecError(f"shape: expected a block of less than 2**62 bytes, got {self}")

    @property
    def itemsize(self) -> int:
        """Bytes an item: an element, or `pack` of them."""
        return ITEMSIZE[self.dtype]

    @property
    def pack(self) -> int:
        """Elements an item: 2 for dtypes of four bits, else 1."""
        return PACKED.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        """Bytes that one block of all elements holds, padding not counted; layouts with planes hold what these say."""
        return self.nl * self.no * self.nh * self.nt * self.hd * self.itemsize // self.pack

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by its letter; ``b`` belongs to a pool, not to a block."""
        return {"l": self.nl, "o": self.no, "h": self.nh, "t": self.nt, "d": self.hd}

    def __str__(self) -> str:
        return f"nl={self.nl},no={self.no},nh={self.nh},nt={self.nt},hd={self.hd},dtype={self.dtype}"


def data_dir() -> Path:
    """Folder of the shipped layouts: beside the module in a wheel, at the checkout's root in an editable install."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "layouts", here.parents[1] / "layouts"):
        if candidate.is_dir():
            return candidate
    raise SpecError(f"the shipped layouts are missing: expected the folder {here / 'layouts'}; reinstall kvbm-layouts")


def is_file(path: Path) -> bool:
    """Whether there is a file of this name: no for what can be none, such as one of 5,000 characters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def heads_of_rank(heads: int, degree: int, rank: int) -> range:
    """Which of a model's KV heads one tensor-parallel rank holds.

    Ranks hold equal shares, in order: rank ``r`` of `degree` holds the heads from ``r * heads // degree`` on.  Where there
    are fewer heads than ranks, heads are replicated: every rank holds one, and ``degree // heads`` neighbouring ranks hold
    the same one.  Of those the first writes it to a store that all ranks share; the others hold the same bytes.  The
    latent of multi-head latent attention is one head, so every rank holds it.

    Parameters
    ----------
    heads : int
        KV heads of the model.
    degree : int
        Number of ranks; `heads` is a multiple of it, or it of `heads`.
    rank : int
        From 0 on.

    Returns
    -------
    range
        Heads of the model; its length is the ``nh`` of the rank's block shape.

    Raises
    ------
    SpecError
        The heads cannot be shared evenly; no such rank.

    Examples
    --------
    >>> heads_of_rank(8, 4, 3)
    range(6, 8)
    >>> [heads_of_rank(2, 4, rank)[0] for rank in range(4)]
    [0, 0, 1, 1]
    """
    if heads < 1 or degree < 1 or (heads % degree and degree % heads):
        raise SpecError(
            f"{heads} KV heads cannot be shared by {degree} ranks: expected a number of ranks that divides {heads}, or a "
            f"multiple of {heads}"
        )
    if not 0 <= rank < degree:
        raise SpecError(f"rank {rank}: expected 0 to {degree - 1}")
    first = rank * heads // degree
    return range(first, first + max(1, heads // degree))


def shape_names() -> list[str]:
    """Names of the shipped block shapes, each also with its usual tensor-parallel degrees as ``name/tpN``."""
    names: list[str] = []
    for path in sorted((data_dir() / "shapes").glob("*.yaml")):
        names.append(path.stem)
        names.extend(f"{path.stem}/tp{n}" for n in _preset(path)["tp"] if n > 1)
    return names


def load_shape(text: str) -> BlockShape:
    """Read a shape as the command line writes it.

    Parameters
    ----------
    text : str
        A preset, a tensor-parallel degree, overrides, or all sizes: ``llama-3.1-70b``, ``llama-3.1-70b/tp8``,
        ``llama-3.1-8b,nt=32,dtype=float8_e4m3fn``, ``nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16``.

    Returns
    -------
    BlockShape
        With ``/tpN``, what each of N ranks holds.  N divides the KV heads, or is a multiple of them: then heads are
        replicated, and every rank holds one (`heads_of_rank` says which).

    Raises
    ------
    SpecError
        Unknown preset or size; a degree by which the heads cannot be shared.
    """
    if not isinstance(text, str):
        raise SpecError(
            f"shape: expected a text such as 'llama-3.1-8b' or 'nl=2,no=2,nh=4,nt=16,hd=32', got {text!r:.200}"
        )
    head, *rest = [part.strip() for part in text.split(",")]
    values: dict[str, Any] = {}
    if "=" in head:
        rest.insert(0, head)
    else:
        match = re.fullmatch(r"(?P<name>[^/]+)(?:/tp(?P<tp>[0-9]{1,9}))?", head)
        path = data_dir() / "shapes" / f"{match['name']}.yaml" if match else None
        if match is None or path is None or not is_file(path):
            known = ", ".join(p.stem for p in sorted((data_dir() / "shapes").glob("*.yaml")))
            raise SpecError(f"shape {head!r:.200}: expected a preset ({known}), NAME/tpN, or nl=…,no=…,nh=…,nt=…,hd=…")
        preset = _preset(path)
        values = {key: preset[key] for key in ("nl", "no", "nh", "nt", "hd", "dtype")}
        if match["tp"]:
            try:
                values["nh"] = len(heads_of_rank(values["nh"], int(match["tp"]), 0))
            except SpecError as error:
                raise SpecError(f"shape {head!r}: {error}") from None
    names, given = [f.name for f in fields(BlockShape)], set[str]()
    for item in rest:
        key, _, value = item.partition("=")
        if key not in names:
            raise SpecError(f"shape {text!r:.200}: expected one of {', '.join(names)}, got {key!r:.200}")
        if key in given:
            raise SpecError(f"shape {text!r:.200}: {key}: expected once, got twice")
        given.add(key)
        if key != "dtype" and not (value.isdecimal() and len(value) < 19):
            raise SpecError(f"shape {text!r:.200}: {key}: expected a positive integer below 2^63, got {value!r:.200}")
        values[key] = value if key == "dtype" else int(value)
    missing = [name for name in names if name not in values and name != "dtype"]
    if missing:
        raise SpecError(f"shape {text!r}: {', '.join(missing)} missing; start from a preset or give every size")
    return BlockShape(**values)


@functools.cache
def _preset(path: Path) -> Mapping[str, Any]:
    # BaseLoader leaves every scalar a text: in YAML 1.1 a bare `no` is the value false.
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506  (it builds nothing but texts)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SpecError(f"{path}: not YAML: {error!s:.500}") from None
    sizes = ("nl", "no", "nh", "nt", "hd")
    wanted = set(REQUIRED_KEYS)
    if not isinstance(data, dict) or set(data) - set(OPTIONAL_KEYS) != wanted:
        raise SpecError(
            f"{path}: expected the keys {', '.join(sorted(wanted))}, and none but {' and '.join(OPTIONAL_KEYS)} beside them, "
            f"got {data!r:.200}"
        )
    try:
        values: dict[str, Any] = {key: int(data[key]) for key in sizes} | {"dtype": data["dtype"]}
        degrees = [int(degree) for degree in data["tp"]]
    except (TypeError, ValueError) as error:
        raise SpecError(f"{path}: expected integers: {error!s:.500}") from None
    try:
        BlockShape(**values)  # refuses what is not a shape
        for degree in degrees:
            heads_of_rank(values["nh"], degree, 0)
    except (DTypeError, SpecError) as error:
        raise type(error)(f"{path}: {error}") from None
    return MappingProxyType({**values, "title": data["title"], "tp": degrees})
