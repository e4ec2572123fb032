"""Names that users write: dtypes in every framework's spelling, strings for layouts and shapes, suggestions for unknown names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvbm
from kvbm.layout import naming

SHAPE = "nl=2,no=2,nh=4,nt=16,hd=32,dtype=bf16"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bfloat16", "bfloat16"), ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("fp8_e4m3", "float8_e4m3fn"),
        (np.float16, "float16"), (np.dtype("uint8"), "uint8"), (np.bool_, "bool"),
        (ml_dtypes.bfloat16, "bfloat16"), (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"), (ml_dtypes.int4, "int4"),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_of_everyone(given: Any, name: str) -> None:
    shape = kvbm.BlockShape(2, 2, 4, 16, 32, given)
    assert shape.dtype == name and shape == kvbm.BlockShape(2, 2, 4, 16, 32, name)
    assert hash(shape) == hash(kvbm.BlockShape(2, 2, 4, 16, 32, name))


def test_dtypes_of_torch(torch: Any) -> None:
    for name in naming.ITEMSIZE:
        if hasattr(torch, name) and isinstance(getattr(torch, name), torch.dtype):
            assert naming.dtype_name(getattr(torch, name)) == name
    assert naming.dtype_name(torch.half) == "float16"


def test_dtypes_of_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert naming.dtype_name(jnp.bfloat16) == naming.dtype_name(jnp.zeros(1, jnp.bfloat16).dtype) == "bfloat16"


@pytest.mark.parametrize(
    "given",
    ["float", "float7", "", "x" * 5000, None, [], float, int, np.floating, np.complex64, np.dtype(">f2"), object, b"bf16", np,
     np.dtype([("a", "f2")]), ml_dtypes.float8_e4m3, np.dtype("S3")],
    ids=lambda given: repr(given)[:20],
)  # fmt: skip
def test_dtypes_of_nobody(given: Any) -> None:
    """``float`` has different widths in torch and NumPy: it is refused, because a guess would be wrong for one of them."""
    with pytest.raises(kvbm.DTypeError, match=r"^shape: dtype: expected") as info:
        kvbm.BlockShape(2, 2, 4, 16, 32, given)
    assert len(str(info.value)) < 400


def test_every_spelling_means_something_known() -> None:
    assert set(naming.SPELLINGS.values()) <= set(naming.ITEMSIZE) and not set(naming.SPELLINGS) & set(naming.ITEMSIZE)


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("b", ["a", "ab", "xbx", "b"], ["b", "ab", "xbx"]),
        ("Attn", ["ATTN_x", "other"], ["ATTN_x"]),
        ("vlm/nhd", ["vllm/nhd", "nhd"], ["vllm/nhd", "nhd"]),
        ("zzz", ["nhd", "hnd"], []),
        ("", ["nhd"], []),
    ],
)
def test_nearest(name: str, known: list[str], found: list[str]) -> None:
    assert naming.nearest(name, known) == found


def test_strings_for_layouts_and_shapes(tmp_path: Path) -> None:
    """Every function that takes a Layout or a BlockShape also takes its name, text or file, with the same result."""
    layout, shape = kvbm.load("nhd"), kvbm.load_shape(SHAPE)
    file = tmp_path / "mine.yaml"
    file.write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    pool = kvbm.Pool.allocate(file, SHAPE, 3)
    assert (pool.layout, pool.shape) == (layout, shape)
    assert kvbm.Pool("nhd", SHAPE, pool.arrays).layout == layout
    assert kvbm.plan("nhd", "universal", SHAPE) == kvbm.plan(layout, kvbm.load("universal"), shape)
    assert kvbm.plan("nhd", "nhd", (SHAPE, shape), layers=range(1)) == kvbm.plan(layout, layout, (shape, shape), layers=range(1))
    assert layout.resolve(SHAPE, 3).nbytes == layout.resolve(shape, 3).nbytes
    assert kvbm.Placement("tp2", shard={"h": "tp"}, model=SHAPE).model == shape
    assert kvbm.reshard.vllm(SHAPE, tp=2).fingerprint == kvbm.reshard.vllm(shape, tp=2).fingerprint
    kvbm.store.save(tmp_path / "f", pool, layout="hnd")
    assert kvbm.store.load(tmp_path / "f", layout=str(file)).layout == layout
    kvbm.store.convert(tmp_path / "f", tmp_path / "g", "universal", src_layout="hnd", shape=SHAPE)
    assert kvbm.store.read(tmp_path / "g").pool("universal", SHAPE).num_blocks == 3


@pytest.mark.parametrize("wrong", [None, 5, b"nhd", ["nhd"], object()], ids=lambda one: type(one).__name__)
def test_neither_a_layout_nor_a_name(wrong: Any) -> None:
    with pytest.raises(kvbm.KvbmError, match="expected"):
        kvbm.Pool.allocate(wrong, SHAPE, 3)
    with pytest.raises(kvbm.KvbmError, match="expected"):
        kvbm.Pool.allocate("nhd", wrong, 3)
    with pytest.raises(kvbm.KvbmError, match="expected"):
        kvbm.plan("nhd", wrong, SHAPE)


def test_bridges_guess_nothing() -> None:
    """Red: without src they assumed NHD."""
    for convert in (kvbm.numpy.convert, kvbm.numpy.convert_):
        with pytest.raises(TypeError, match="missing"):
            convert([], shape=SHAPE)  # type: ignore[call-arg]


def test_bridges_take_layouts(tmp_path: Path) -> None:
    """A Layout that was loaded; one made from a text has no file from which it can be loaded again."""
    arrays = [np.arange(2 * 16 * 4 * 32, dtype="uint16").reshape(2, 16, 4, 32)[0]] * 4
    file = tmp_path / "mine.yaml"
    file.write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    want = kvbm.numpy.convert(arrays, "nhd", "universal", SHAPE)
    for src in (kvbm.load("nhd"), kvbm.load(file), file):
        assert np.array_equal(kvbm.numpy.convert(arrays, src, kvbm.load("universal"), SHAPE)[0], want[0])
    with pytest.raises(kvbm.SpecError, match="was not loaded from a file"):
        kvbm.numpy.convert(arrays, kvbm.layout.spec.parse('order: "[b l o] t h d"'), "universal", SHAPE)
