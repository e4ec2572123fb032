"""Names from users: dtypes in the spellings of the frameworks, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .._arguments import imported, quoted
from ..errors import DTypeError

#: Bytes per item of every dtype that a block may hold.  A copy moves bits, so it needs only the width.
ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
        "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float4_e2m1fn": 1, "int4": 1, "uint4": 1,
        "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
        "int32": 4, "uint32": 4, "float32": 4,
        "int64": 8, "uint64": 8, "float64": 8,
    }
)  # fmt: skip

#: Other spellings with one meaning each.  ``float`` is not among them: it is 32 bits in torch and 64 in NumPy.
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
        "fp64": "float64", "f64": "float64", "double": "float64", "fp8_e4m3": "float8_e4m3fn", "f8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2", "f8_e5m2": "float8_e5m2", "f8_e8m0": "float8_e8m0fnu",
        "float4_e2m1fn_x2": "float4_e2m1fn",
    }
)  # fmt: skip


def dtype_name(dtype: Any, what: str = "dtype") -> str:
    """The name of a dtype of torch, NumPy, ml_dtypes or JAX, or of a text, as kvbm writes it.  No framework is imported.

    Raises `DTypeError`, with `what` in front, if it is not a dtype that a block may hold, or has the other byte order.

    >>> import numpy as np
    >>> dtype_name("bf16"), dtype_name("torch.float16"), dtype_name(np.float32), dtype_name(np.dtype("int8"))
    ('bfloat16', 'float16', 'float32', 'int8')
    """
    if isinstance(dtype, str):
        if dtype in ITEMSIZE:
            return dtype
        text = dtype.strip().removeprefix("torch.").lower()
    elif (torch := imported("torch")) is not None and isinstance(dtype, torch.dtype):
        text = str(dtype).removeprefix("torch.")
    else:
        text = _of_numpy(dtype, what)
    name = SPELLINGS.get(text, text)
    if name not in ITEMSIZE:
        raise DTypeError(
            f"{what}: expected a dtype such as bfloat16, float16 or float8_e4m3fn, got {quoted(dtype)}."
            f"{meant_dtype(text)}"
        )
    return name


def _of_numpy(dtype: Any, what: str) -> str:
    """The name of a NumPy dtype, or of a type that NumPy converts to a dtype; empty for anything else."""
    numpy = imported("numpy")
    own = isinstance(dtype, type) and dtype.__module__.partition(".")[0] in ("numpy", "ml_dtypes")
    if callable(dtype) and not own:
        dtype = getattr(dtype, "dtype", dtype)  # jax.numpy.bfloat16 is a function with a dtype
    if numpy is None or not (own or isinstance(dtype, numpy.dtype)):
        return ""
    try:
        found = numpy.dtype(dtype)
    except TypeError:  # an abstract type, such as numpy.floating
        return ""
    if not found.isnative:
        raise DTypeError(f"{what}: expected the byte order of this machine, got {found.str}")
    return str(found.name)


def meant_dtype(text: str) -> str:
    """The end of a message about an unknown dtype: the most similar names, or an empty text.

    >>> meant_dtype("bf17"), meant_dtype("fp8_e5m2fnuz")
    (' Did you mean bfloat16?', ' Did you mean float8_e5m2fnuz?')
    """
    if text in SPELLINGS:
        return f" Did you mean {SPELLINGS[text]}?"
    return suggestion(re.sub("^(fp|f|bf)(?=[0-9])", lambda m: "bfloat" if m[0] == "bf" else "float", text), ITEMSIZE)


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are most similar to an unknown one.  Names that contain it are first.

    >>> nearest("flash_attn_hnd", ["nhd", "vllm/flash_attn_nhd", "vllm/flash_attn_hnd"], 2)
    ['vllm/flash_attn_hnd', 'vllm/flash_attn_nhd']
    """
    by_key = {one.lower(): one for one in known}
    text = name[:200].strip().lower()
    containing = sorted((key for key in by_key if text and text in key), key=lambda key: (len(key), key))
    # The name without its folder is compared, too: users leave out the folder.
    tails = {key.rpartition("/")[2]: key for key in reversed(by_key)}
    similar = difflib.get_close_matches(text, by_key, most, 0.55)
    similar += [tails[tail] for tail in difflib.get_close_matches(text.rpartition("/")[2], tails, most, 0.55)]
    return [by_key[key] for key in dict.fromkeys([*containing, *similar])][:most]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known names, or an empty text.

    >>> suggestion("float61", ["float16", "int8"]), suggestion("zzz", ["float16"])
    (' Did you mean float16?', '')
    """
    found = nearest(name, known)
    if not found:
        return ""
    return f" Did you mean {' or '.join(filter(None, (', '.join(found[:-1]), found[-1])))}?"
