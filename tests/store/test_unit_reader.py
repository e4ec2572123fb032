"""A folder of units by a reader of plain NumPy, which knows only the pages of the reference."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbm import BlockShape, Pool, load
from kvbm.store.folder import Folder
from kvbm.store.keys import Chain, Content, key_of_json
from kvbm.store.shelf import Shelf
from unit_reader import Reader

TOKENS = [3 * i % 89 for i in range(70)]
MODEL = {"weights": "named x", "config": {"theta": 0.5}}


def written(folder: Path, tp: int, shape: BlockShape, nt: int, salt: str = "") -> tuple[str, np.ndarray]:
    """Units of the whole model by the ranks of an engine with blocks of `nt` tokens; their content, and the bits by position."""
    content = Content(key_of_json(MODEL), "x", tuple(range(10, 10 + shape.nl)), shape)
    held = Folder(folder, content)
    held.make(MODEL)
    most = max(nt, shape.nt)
    count = len(TOKENS) // most * most // nt
    width = {"float32": "u4", "bfloat16": "u2"}[shape.dtype]
    generator = np.random.default_rng(7)
    bits = generator.integers(0, 1 << 14, (shape.nl, shape.no, shape.nh, count * nt, shape.hd)).astype(width)
    for rank in range(tp):
        heads = range(rank * shape.nh // tp, (rank + 1) * shape.nh // tp)
        pool = Pool.allocate(load("operational_nhd"), replace(shape, nh=len(heads), nt=nt), count)
        for block, array in enumerate(pool.arrays):  # l o t h d
            tokens = slice(block * nt, (block + 1) * nt)
            part = bits[:, :, heads[0] : heads[-1] + 1, tokens].transpose(0, 1, 3, 2, 4)
            array.view(width)[...] = part.reshape(array.shape)
        names = Chain(shape.nt, TOKENS, salt).keys(0, count * nt)
        done = Shelf(content, pool, heads).write(
            held, np.arange(count), pool.digest(), names, range(0, count * nt, shape.nt)
        )
        assert done.good.all() and not done.why
    return content.key, bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp", "nt", "hd", "salt"), [(1, 4, 8, ""), (2, 16, 3, ""), (4, 8, 6, "salt é"), (2, 2, 8, "")])
def test_heads_and_layers(tmp_path: Path, tp: int, nt: int, hd: int, salt: str, dtype: str) -> None:
    """Every bit of K and V, from files of other ranks and blocks."""
    shape = BlockShape(nl=2, no=2, nh=4, nt=4, hd=hd, dtype=dtype)
    key, bits = written(tmp_path, tp, shape, nt, salt)
    reader = Reader(tmp_path, key)
    whole = bits.shape[3]
    assert len(reader.units(TOKENS, salt)) == whole // 4 and reader.units(TOKENS, "other") == []
    assert len(reader.units([*TOKENS[:9], 99, *TOKENS[10:]], salt)) == 2
    for layer in range(2):
        for half in range(2):
            for head in range(4):
                found = reader.rows(TOKENS, 10 + layer, half, head, salt)
                assert np.array_equal(found, bits[layer, half, head, :whole])


def test_it_finds_what_was_changed(tmp_path: Path) -> None:
    """A byte of data, a file under another unit's name, a missing head: not read."""
    key, _ = written(tmp_path, 2, BlockShape(nl=2, no=2, nh=4, nt=4, hd=8, dtype="float32"), 4)
    reader = Reader(tmp_path, key)
    units = reader.units(TOKENS)
    [(_, _, path), (_, _, other)] = reader.files(units[3])
    kept = path.read_bytes()
    for wrong in (kept[:-1] + bytes([kept[-1] ^ 1]), reader.files(units[4])[0][2].read_bytes(), kept[:-9]):
        path.write_bytes(wrong)
        with pytest.raises(AssertionError):
            reader.rows(TOKENS, 10, 0, 0)
    path.write_bytes(kept)
    assert len(reader.rows(TOKENS, 10, 0, 0)) == 4 * len(units)
    other.unlink()
    assert reader.units(TOKENS) == units[:3]
    shutil.copytree(tmp_path / key, tmp_path / ("0" * 64))
    with pytest.raises(AssertionError, match=r"content.json is another's"):
        Reader(tmp_path, "0" * 64)
