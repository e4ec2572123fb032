"""The oracle itself, compared with numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

import oracle
from oracle import IllegalError, Order, Placed

SIZES = {"l": 2, "o": 2, "h": 2, "t": 4, "d": 8}


def at(order: Order, itemsize: int = 2, nb: int = 3, sizes: dict[str, int] = SIZES, **coords: int) -> tuple[int, int]:
    placed = Placed(order, sizes, itemsize, nb)
    entry, offset = placed.address([coords.get("b", 0)])
    index = (0, *(coords.get(a, 0) for a in oracle.AXES[1:]))
    return int(entry[index]), int(offset[index])


def test_row_major() -> None:
    # b l o t h d: strides in elements d 1, h 8, t 16, o 64, l 128, b 256
    order = Order("b l o t h d")
    assert at(order, d=1) == (0, 2)
    assert at(order, h=1) == (0, 16)
    assert at(order, t=1) == (0, 32)
    assert at(order, o=1) == (0, 128)
    assert at(order, l=1) == (0, 256)
    assert at(order, b=1) == (0, 512)
    assert at(order, b=2, l=1, o=1, t=3, h=1, d=7) == (0, 2 * (512 + 128 + 64 + 48 + 8 + 7))


def test_brackets_are_the_pointer_table() -> None:
    assert at(Order("[b l o] t h d"), b=2, l=1, o=1, d=3) == (2 * 4 + 1 * 2 + 1, 6)
    assert at(Order("[o l] b t h d"), b=2, l=1, o=1) == (1 * 2 + 1, 2 * 64 * 2)
    assert len(Placed(Order("[b l o] t h d"), SIZES, 2, 3).spaces) == 12
    assert Placed(Order("[o l] b t h d"), SIZES, 2, 3).spaces[1].coords == {"o": 0, "l": 1}


def test_splits() -> None:
    # h d/4 t d%4: d%4 1, t 4, d/4 16, h 32
    order = Order("[b l o] h d/4 t d%4")
    assert at(order, itemsize=1, h=1, t=2, d=7)[1] == 32 + 2 * 4 + 1 * 16 + 3
    # 8 B of 2-byte elements are 4 elements
    assert at(Order("[b l o] h d/8B t d%8B"), itemsize=2, d=5) == at(Order("[b l o] h d/4 t d%4"), itemsize=2, d=5)
    # d/2%2 is (d/2)%2: 6 -> 3 -> 1
    placed = Placed(Order("b l o h t d/4 d%2 d/2%2"), SIZES, 1, 1)
    _, offset = placed.address([0])
    assert offset[0, 0, 0, 0, 0].tolist() == [(d // 4) * 4 + (d % 2) * 2 + (d // 2) % 2 for d in range(8)]


def test_fused() -> None:
    # (h d)/16 of 2*8: extent 1; (h d)/4: f = 8h + d
    order = Order("b l o (h d)/4 t (h d)%4")
    assert at(order, itemsize=1, h=1, d=5, t=3)[1] == (13 // 4) * 16 + 3 * 4 + 13 % 4


def test_k_and_v_of_their_own() -> None:
    order = Order("[l o] b h d/4 t d%4", "[l o] b h d t")
    assert at(order, itemsize=2, l=1, o=0, t=1, d=6) == (2, 2 * (16 + 4 + 2))
    assert at(order, itemsize=2, l=1, o=1, t=1, d=6) == (3, 2 * (6 * 4 + 1))
    spaces = Placed(order, SIZES, 2, 3).spaces
    assert [s.shape for s in spaces] == [(3, 2, 2, 4, 4), (3, 2, 8, 4)] * 2


def test_pitch() -> None:
    placed = Placed(Order("b l o h t d", pitch=(("t", 20), ("b", 1000))), SIZES, 2, 3)
    assert placed.spaces[0].strides == (1000, 320, 160, 80, 20, 2)
    assert placed.spaces[0].nbytes == 3000
    with pytest.raises(IllegalError, match="holds 16"):
        Placed(Order("b l o h t d", pitch=(("t", 15),)), SIZES, 2, 3)


def test_opaque_is_one_axis() -> None:
    placed = Placed(Order("[b] l o {t h d}"), SIZES, 2, 3)
    assert placed.spaces[0].shape == (2, 2, 64)
    assert oracle.parse_order("[b] l o {t h d}")[2] == ("t", "h", "d")


def test_depends_on_number_of_blocks() -> None:
    assert at(Order("[l o] h b t d"), nb=3, h=1, b=0)[1] == 3 * 4 * 8 * 2
    assert at(Order("[l o] h b t d"), nb=5, h=1, b=0)[1] == 5 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("order", "itemsize"),
    [
        (Order("b l o h t d/3 d%3"), 2),
        (Order("b l o h t d/16B d%16B"), 4 * 8),
        (Order("b l o h t"), 2),
        (Order("b l o h t d/4"), 2),
    ],
)
def test_illegal(order: Order, itemsize: int) -> None:
    with pytest.raises(IllegalError):
        Placed(order, SIZES, itemsize, 2).check()


def test_expected_bytes_by_hand() -> None:
    """Two elements of one byte, transposed: every byte of the destination is accounted for."""
    sizes = {"l": 1, "o": 1, "h": 1, "t": 2, "d": 3}
    src = Placed(Order("b l o h t d"), sizes, 1, 2).layout_bytes()
    dst = Placed(Order("b l o h d t"), sizes, 1, 3).layout_bytes(align=1)
    source, before = np.zeros(src.nbytes, np.uint8), np.full(dst.nbytes, 255, np.uint8)
    source[src.bases[0] : src.bases[0] + 12] = np.arange(12)
    want = before.copy()
    want[dst.bases[0] : dst.bases[0] + 18] = [255] * 12 + [6, 9, 7, 10, 8, 11]
    assert dst.bases[0] % 64 == 1
    assert np.array_equal(oracle.expected_bytes(src, dst, source, before, [1], [2]), want)


def test_opaque_bytes_stay() -> None:
    src = Placed(Order("[b] l o {t h d}"), SIZES, 1, 2).layout_bytes()
    dst = Placed(Order("[b l o] h t d"), SIZES, 1, 2).layout_bytes()
    source, before = oracle.source_bytes(src, 0), oracle.dest_bytes(dst, 0)
    got = oracle.expected_bytes(src, dst, source, before, [1], [0])
    for i in range(4):  # chunk i of block 1 -> allocation i of block 0
        chunk = source[src.bases[1] + 64 * i : src.bases[1] + 64 * (i + 1)]
        assert np.array_equal(got[dst.bases[i] : dst.bases[i] + 64], chunk)
    universal = Placed(Order("[b] h l o t d"), SIZES, 1, 2)
    assert not oracle.copyable(src.placed, universal)
    assert oracle.copyable(src.placed, dst.placed)
    assert oracle.copyable(src.placed, Placed(Order("[l o] b h d/4 t d%4"), SIZES, 1, 2))
    assert not oracle.copyable(Placed(Order("[l o] h b t d"), SIZES, 1, 2), src.placed)


def test_data_tell_their_coordinate() -> None:
    placed = Placed(Order("b l o h t d"), {"l": 4, "o": 2, "h": 8, "t": 16, "d": 64}, 8, 2)
    words = oracle.coded(placed, [0, 1], 0).view(np.uint64)
    assert np.unique(words).size == words.size
    one_byte = Placed(Order("b l o h t d"), {"l": 4, "o": 2, "h": 8, "t": 16, "d": 64}, 1, 2)
    salted = np.concatenate([oracle.coded(one_byte, [0, 1], s) for s in oracle.salts(1)], axis=-1).reshape(-1, 2)
    # Neighbours along every axis are told apart by at least one salt.
    grid = salted.reshape(2, 4, 2, 8, 16, 64, 2).astype(np.int64)
    for axis in range(6):
        same = (np.diff(grid, axis=axis) == 0).all(axis=-1)
        assert same.mean() < 1e-4
    assert not np.array_equal(oracle.coded(placed, [0], 0), oracle.coded(placed, [0], 1))


def test_explain_names_the_coordinate() -> None:
    dst = Placed(Order("b l o h t d"), SIZES, 2, 2).layout_bytes()
    want = oracle.dest_bytes(dst, 0)
    got = want.copy()
    got[dst.positions([1])[0, 1, 0, 1, 2, 3]] ^= 1
    assert "b=1, l=1, o=0, h=1, t=2, d=3" in oracle.explain(dst, got, want)
    got[0] ^= 1
    assert "guard or padding" in oracle.explain(dst, got, want)
