"""Layouts that nothing in the catalogue looks like (test_nvrtc.py): each is a file NAME.yaml in a folder.

NVRTC asks a driver for more than the fake one has, which runs kernels by their names, whatever their code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvbm
from kvbm import _core
from kvbm.compile import nvrtc as runtime
from programs.fake_gpu import count, pool, same

SHAPE = kvbm.BlockShape(nl=4, no=2, nh=8, nt=32, hd=64, dtype="float16")


def compiled(name: str, arch: int, compiler: Any) -> bytes:
    assert arch == 90, "the fake GPU is an sm_99"
    return b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + name.encode()


def let_compile(compile_: Any = compiled) -> None:
    runtime._found = runtime.Compiler("13.0", "/there/libnvrtc.so.13", 99, (80, 90))
    runtime._compile = compile_


def not_called(*arguments: Any) -> bytes:
    raise AssertionError(arguments)


def both(one: Path | str, other: Path | str) -> tuple[kvbm.Transfer, int]:
    """Convert on the host and by launches; the transfer, and how many launches there were."""
    (s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool(str(one), 5, SHAPE, apart=True), pool(str(other), 4, SHAPE, apart=True)
    before = count("launches")
    kvbm.convert(s_cpu, d_cpu, [4, 0, -1], [1, 2, 3])
    kvbm.convert(s_gpu, d_gpu, [4, 0, -1], [1, 2, 3], stream=5)
    assert same(d, d_cpu) and same(s, s_cpu), (one, other)
    return kvbm.Transfer(s_gpu, d_gpu), count("launches") - before


def every(folder: str, names: list[str], nvrtc: str) -> None:
    """Convert each both ways; `nvrtc`: it compiles, it must not be asked (`cached`), it is `missing`, or its knob says (`off`).

    Prints a line a conversion: the kernel that its plan wants, launches, and whether that is a new one, was compiled, came from
    the cache, had another run in its place; then what the last transfer says of itself.
    """
    if nvrtc in ("compiles", "cached"):
        let_compile(compiled if nvrtc == "compiles" else not_called)
    elif nvrtc == "missing":
        sys.modules["cuda.pathfinder"] = None  # type: ignore[assignment]
    for name in names:
        mine = Path(folder) / f"{name}.yaml"
        for pair in ((mine, "nhd"), ("universal", mine)):
            move, launches = both(*pair)
            wanted, text = move._executor.route(None).plan.kernels()[0], move.explain()
            new = _core.kernel_index(wanted) >= len(_core.kernel_names())
            said = (words in text for words in ("compiled it for sm_90", "came from the cache", "in place of"))
            print(wanted, launches, new, *said)
    print(text)


def more_modes_are_more_launches(folder: str) -> None:
    let_compile()
    move, launches = both(Path(folder) / "outside.yaml", "nhd")
    print(launches, move.stats())
    print(move.explain(7))
    ids = np.arange(3)
    move.copy(ids, ids, stream=5).synchronize()
    print(move.stats()["submissions"], move.stats()["blocks"])
    s, d = move._executor.keep
    for strategy in ("engine", "staged", "direct"):
        try:
            print(kvbm.Transfer(s, d, strategy))
        except kvbm.MissingKernelError as error:
            print(error)
    move, launches = both(Path(folder) / "inside.yaml", "nhd")
    print(launches, "engine" in repr(kvbm.Transfer(*move._executor.keep, "engine")))


def code_for_another_gpu(folder: str) -> None:
    form = ("rows", 3, 7, 0, 16, False)
    _core.add_kernel("rows_o3_i7_w16", [form], b"eighty", 80)
    try:
        _core.warm("rows_o3_i7_w16", 0)
    except kvbm.CudaError as error:
        print(error.name, error)
    _core.add_kernel("rows_o3_i7_w16", [form], b"ninety", 90)
    _core.warm("rows_o3_i7_w16", 0)
    _core.warm(_core.kernel_index("rows_o3_i7_w16"), 0)
    try:
        _core.warm(len(_core.kernel_names()) + 1, 0)
    except kvbm.MissingKernelError as error:
        print(error)


def few_multiprocessors_need_no_new_kernel(folder: str) -> None:
    let_compile(not_called)
    (_, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool(f"{folder}/rows.yaml", 5, SHAPE), pool("nhd", 4, SHAPE)
    move = kvbm.Transfer(s_gpu, d_gpu, "direct", max_sms=4)
    move.copy([4, 0], [1, 2], stream=5)
    kvbm.convert(s_cpu, d_cpu, [4, 0], [1, 2])
    assert same(d, d_cpu) and 0 < count("few_ctas") <= 4
    print(move.explain())
