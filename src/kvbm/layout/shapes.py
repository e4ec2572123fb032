"""Block shapes: sizes and dtype of a KV-cache block, and presets for real models."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from .._arguments import number, quoted, whole
from ..errors import DTypeError, SpecError
from .axes import BLOCK_SIZES, OF_A_BLOCK, SIZE_OF
from .naming import ITEMSIZE as ITEMSIZE
from .naming import dtype_name, suggestion
from .slips import meant_shape

#: Keys of a shape file: required ones, and optional ones.
REQUIRED_KEYS = ("title", *BLOCK_SIZES, "dtype", "tp")
OPTIONAL_KEYS = ("read_from", "notes")

#: Limit of sizes and of the bytes of a block, so that sums of some of them fit into 64 bits.
LIMIT = 1 << 62

#: Elements per item of `ITEMSIZE` bytes, if more than one: neighbours along the fastest axis.
PACKED: Mapping[str, int] = MappingProxyType({"float4_e2m1fn": 2, "int4": 2, "uint4": 2})


#: dtypes that NumPy does not have.
_NOT_IN_NUMPY = frozenset(name for name in ITEMSIZE if name.startswith(("bfloat", "float8", "float4", "int4", "uint4")))


def numpy_name(dtype: str) -> str:
    """NumPy's own name for the bits of a dtype: for a dtype that NumPy lacks, unsigned integers of the same width.

    >>> numpy_name("float16"), numpy_name("bfloat16")
    ('float16', 'uint16')
    """
    return f"uint{8 * ITEMSIZE[dtype]}" if dtype in _NOT_IN_NUMPY else dtype


def round_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The sizes of one KV block.

    Parameters
    ----------
    nl, no, nh, nt, hd : int
        Layers, K and V (2; 1 for MLA), KV heads, tokens per block, elements per head.
    dtype : str, or a dtype of torch, NumPy or ml_dtypes
        Such as ``"bfloat16"``, ``"bf16"`` or ``torch.bfloat16``.  The attribute is its name, a key of `ITEMSIZE`.

    Raises
    ------
    SpecError
        A size is not an integer, or is out of range.
    DTypeError
        The dtype is unknown.

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
        for name in BLOCK_SIZES:
            value = getattr(self, name)
            if type(value) is not int:
                if (found := whole(value)) is None:
                    raise SpecError(f"shape: {name}: expected an integer, got {quoted(value)}")
                object.__setattr__(self, name, value := found)
            if not 1 <= value < LIMIT:
                got = f"at least 1, got {value}" if abs(value) < LIMIT else "1 to 2**62"
                raise SpecError(f"shape: {name}: expected {got}")
        if type(self.dtype) is not str or self.dtype not in ITEMSIZE:
            object.__setattr__(self, "dtype", dtype_name(self.dtype, "shape: dtype"))
        if self.nbytes >= LIMIT:
            raise SpecError(f"shape: expected a block of less than 2**62 bytes, got {self}")

    @property
    def itemsize(self) -> int:
        """Bytes per item: an element, or `pack` elements."""
        return ITEMSIZE[self.dtype]

    @property
    def pack(self) -> int:
        """Elements per item: 2 for dtypes of four bits, else 1."""
        return PACKED.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of a block without padding.  Layouts with planes may have other sizes."""
        return self.nl * self.no * self.nh * self.nt * self.hd * self.itemsize // self.pack

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → size.  It does not contain ``b``, which belongs to a pool."""
        return {axis: getattr(self, SIZE_OF[axis]) for axis in OF_A_BLOCK}

    def __str__(self) -> str:
        return f"nl={self.nl},no={self.no},nh={self.nh},nt={self.nt},hd={self.hd},dtype={self.dtype}"


@functools.cache
def data_dir() -> Path:
    """Folder of the shipped layouts: in the package in a wheel, in the checkout's root for an editable install."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "layouts", here.parents[1] / "layouts"):
        if candidate.is_dir():
            return candidate
    raise SpecError(f"the shipped layouts are missing: expected the folder {here / 'layouts'}; reinstall kvbm-layouts")


def is_file(path: Path) -> bool:
    """True if the file exists.  False for an illegal name, such as one of 5,000 characters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def heads_of_rank(heads: int, degree: int, rank: int) -> range:
    """The KV heads of a model that one tensor-parallel rank holds.

    Ranks hold equal shares, in order: rank ``r`` of `degree` holds the heads from ``r * heads // degree`` on.  With fewer heads
    than ranks, heads are replicated: every rank holds one head, and ``degree // heads`` neighbouring ranks hold the same one.  Only
    the first of these needs to write it to a store that all ranks share.  The latent of multi-head latent attention is one head, so
    every rank holds it.

    Parameters
    ----------
    heads : int
        KV heads of the model.
    degree : int
        Number of ranks.  It divides `heads`, or is a multiple of `heads`.
    rank : int
        The rank, from 0.

    Returns
    -------
    range
        Heads of the model.  The length is the ``nh`` of the rank's block shape.

    Raises
    ------
    SpecError
        The heads cannot be shared evenly, or there is no such rank.

    Examples
    --------
    >>> heads_of_rank(8, 4, 3)
    range(6, 8)
    >>> [heads_of_rank(2, 4, rank)[0] for rank in range(4)]
    [0, 0, 1, 1]
    """
    heads, degree = (number(name, n, -LIMIT, LIMIT, SpecError) for name, n in (("heads", heads), ("degree", degree)))
    rank = number("rank", rank, -LIMIT, LIMIT, SpecError)
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
    """Names of the shipped block shapes, also with the usual tensor-parallel degrees as ``name/tpN``."""
    names: list[str] = []
    for path in sorted((data_dir() / "shapes").glob("*.yaml"), key=lambda path: path.stem):
        names.append(path.stem)
        names.extend(f"{path.stem}/tp{n}" for n in _preset(path)["tp"] if n > 1)
    return names


def shape_title(name: str) -> str:
    """The model of a shipped block shape: ``"Llama 3.1 8B"`` for ``llama-3.1-8b`` and for ``llama-3.1-8b/tp2``."""
    return str(_preset(data_dir() / "shapes" / f"{name.partition('/')[0]}.yaml")["title"])


def load_shape(text: str) -> BlockShape:
    """Read a shape from a text, as the command line does.

    Parameters
    ----------
    text : str
        A preset, optionally with a tensor-parallel degree or changed sizes; or all sizes: ``llama-3.1-70b``, ``llama-3.1-70b/tp8``,
        ``llama-3.1-8b,nt=32,dtype=float8_e4m3fn``, ``nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16``.

    Returns
    -------
    BlockShape
        The shape.  With ``/tpN``, the shape of one of N ranks.  N divides the KV heads, or is a multiple of them; then heads are
        replicated, and every rank holds one head (`heads_of_rank`).

    Raises
    ------
    SpecError
        A preset or size is unknown, or the heads cannot be shared by the degree.
    """
    if not isinstance(text, str):
        raise SpecError(
            f"shape: expected a text such as 'llama-3.1-8b' or 'nl=2,no=2,nh=4,nt=16,hd=32', got {quoted(text)}"
        )
    try:
        return _shape_of(text)
    except (DTypeError, SpecError) as error:
        meant = meant_shape(text) if type(text) is str and len(text) < 200 else text
        if meant is text or meant == text:
            raise
        try:
            _shape_of(meant)
        except (DTypeError, SpecError):
            raise error from None
        raise type(error)(f"{str(error).partition(' Did you mean ')[0].rstrip('.')}. Did you mean {meant}?") from None


def _shape_of(text: str) -> BlockShape:
    """Implements `load_shape` for texts without slips."""
    head, *rest = [part.strip() for part in text.split(",")]
    values: dict[str, Any] = {}
    if "=" in head:
        rest.insert(0, head)
    else:
        match = re.fullmatch(r"(?P<name>[^/]+)(?:/tp(?P<tp>[0-9]{1,9}))?", head)
        path = data_dir() / "shapes" / f"{match['name']}.yaml" if match else None
        if match is None or path is None or not is_file(path):
            if head.isdecimal():
                raise SpecError(f"shape {quoted(text)}: expected a name before every number (nl=…,no=…,nh=…,nt=…,hd=…)")
            meant = suggestion(
                head.partition("/")[0 if "/tp" in head or "/pp" in head else 2] or head,
                [p.stem for p in sorted((data_dir() / "shapes").glob("*.yaml"))],
            )
            raise SpecError(
                f"shape {quoted(head)}: expected a preset that `kvbm shapes` lists, or every size "
                f"(nl=…,no=…,nh=…,nt=…,hd=…).{meant}"
            )
        preset = _preset(path)
        values = {key: preset[key] for key in (*BLOCK_SIZES, "dtype")}
        if match["tp"]:
            try:
                values["nh"] = len(heads_of_rank(values["nh"], int(match["tp"]), 0))
            except SpecError as error:
                raise SpecError(f"shape {head!r}: {error}") from None
    names, given = [f.name for f in fields(BlockShape)], set[str]()
    for item in rest:
        key, _, value = item.partition("=")
        if key not in names:
            raise SpecError(f"shape {quoted(text)}: expected one of {', '.join(names)}, got {quoted(key)}")
        if key in given:
            raise SpecError(f"shape {quoted(text)}: {key}: expected once, got twice")
        given.add(key)
        if key != "dtype" and not (value.isascii() and value.isdecimal() and len(value) < 19):
            raise SpecError(f"shape {quoted(text)}: {key}: expected a positive integer below 2^63, got {quoted(value)}")
        values[key] = value if key == "dtype" else int(value)
    missing = [name for name in names if name not in values and name != "dtype"]
    if missing:
        raise SpecError(f"shape {text!r}: {', '.join(missing)} missing; start from a preset or give every size")
    return BlockShape(**values)


def as_shape(given: Any, what: str = "shape") -> BlockShape:
    """The block shape for a BlockShape or a text for `load_shape`.  Raises `SpecError` for anything else."""
    if isinstance(given, BlockShape):
        return given
    if isinstance(given, str):
        return load_shape(given)
    advice = ""
    if type(given) is dict and given and all(type(key) is str and key in (*BLOCK_SIZES, "dtype") for key in given):
        advice = ": pass kvbm.BlockShape(**shape)"
    elif type(given) in (list, tuple) and len(given) in (5, 6):
        advice = ": pass kvbm.BlockShape(nl=…, no=…, nh=…, nt=…, hd=…, dtype=…)"
    raise SpecError(f"{what}: expected a BlockShape or a text such as 'llama-3.1-8b', got {quoted(given)}{advice}")


@functools.cache
def _preset(path: Path) -> Mapping[str, Any]:
    # BaseLoader returns every scalar as text: in YAML 1.1 a bare `no` is the value false.
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506  (it builds nothing but texts)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SpecError(f"{path}: not YAML: {error!s:.500}") from None
    wanted = set(REQUIRED_KEYS)
    if not isinstance(data, dict) or set(data) - set(OPTIONAL_KEYS) != wanted:
        raise SpecError(
            f"{path}: expected the keys {', '.join(sorted(wanted))}, and optionally {' and '.join(OPTIONAL_KEYS)}, "
            f"got {quoted(data)}"
        )
    try:
        values: dict[str, Any] = {key: int(data[key]) for key in BLOCK_SIZES} | {"dtype": data["dtype"]}
        degrees = [int(degree) for degree in data["tp"]]
    except (TypeError, ValueError) as error:
        raise SpecError(f"{path}: expected integers: {error!s:.500}") from None
    try:
        BlockShape(**values)  # raises an error if it is not a shape
        for degree in degrees:
            heads_of_rank(values["nh"], degree, 0)
    except (DTypeError, SpecError) as error:
        raise type(error)(f"{path}: {error}") from None
    return MappingProxyType({**values, "title": data["title"], "tp": degrees})
