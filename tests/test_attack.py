"""What an attack on sections and resharding found."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm
from kvbm import reshard

SHAPE = kvbm.BlockShape(nl=1, no=2, nh=2, nt=4, hd=4, dtype="float32")
LAYOUT = "vllm/flash_attn_nhd"


def _slot(nbytes: int) -> np.ndarray:
    whole = np.zeros(nbytes + 16, np.uint8)
    return whole[-whole.ctypes.data % 16 :][:nbytes]


def _packed(src_span: kvbm.Span, dst_span: kvbm.Span, a: np.ndarray, b: np.ndarray) -> None:
    place = reshard.vllm(SHAPE)
    made = reshard.plan(place, place)
    src, dst = (kvbm.Pool(kvbm.load(LAYOUT), SHAPE, array) for array in (a, b))
    pack, unpack = reshard.Packer(made, 0, src), reshard.Packer(made, 0, dst, side="dst")
    slot = _slot(pack.sizes(src_span, dst_span.origin)[0])
    pack(src_span, {0: slot}, origin=dst_span.origin)
    assert unpack.sizes(dst_span, src_span.origin) == {0: slot.size}
    unpack(dst_span, {0: slot}, origin=src_span.origin)


@pytest.mark.parametrize("origin", range(5))
def test_packer_where_tables_begin_at_other_positions(origin: int) -> None:
    a = np.arange(2 * 4 * 4 * 2 * 4, dtype=np.float32).reshape(2, 4, 4, 2, 4)
    b = np.zeros_like(a)
    _packed(kvbm.Span([3, 1, 2], range(4, 12)), kvbm.Span([2, 3, 0], range(4, 12), origin), a, b)
    for token in range(4, 12):
        block, slot = divmod(token - origin, 4)
        assert np.array_equal(b[:, [2, 3, 0][block], slot], a[:, [3, 1, 2][token // 4], token % 4])


def test_packer_leaves_what_is_read_only() -> None:
    a, b = np.ones((2, 2, 4, 2, 4), np.float32), np.zeros((2, 2, 4, 2, 4), np.float32)
    b.flags.writeable = False
    with pytest.raises(kvbm.BindError, match="read-only"):
        _packed(kvbm.Span([0], range(4)), kvbm.Span([0], range(4)), a, b)
    assert not b.any()


def test_units_of_chosen_tokens_are_refused() -> None:
    """Their ids would not tell which tokens of a block are read and written, where both ends are one pool."""
    pool = kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, 2)
    for tokens in (range(2), [1, 0], range(0, 4, 2)):
        with pytest.raises(kvbm.PlanError, match="take units first"):
            pool.section(t=tokens).units(1)
    assert pool.units(2).units(1).section(h=1).num_ids == 8


def test_coordinates() -> None:
    pool = kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, 2)
    for wrong in ([True, False], range(10**30), range(-(10**30), 0)):
        with pytest.raises(kvbm.PlanError, match="axis 'h': expected"):
            pool.section(h=wrong)
    assert pool.section(t=np.array([2, 0])).tokens == pool.section(t=[2, 0]).tokens == 2


def test_a_span_of_ids_beyond_64_bits() -> None:
    with pytest.raises(kvbm.BindError, match="table: expected a list of block ids"):
        kvbm.Span(np.array([2**64 - 1], np.uint64), range(4))
