"""kvbm.integrations.host_store: what a load brings back, and what it says of units that changed, by an oracle of bytes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvbm import BindError, BlockShape, Pool, load  # noqa: E402
from kvbm.integrations.host_store import HostStore  # noqa: E402

SHAPE = BlockShape(nl=3, no=2, nh=2, nt=4, hd=8, dtype="float32")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(device: str, **options: bool) -> tuple[object, HostStore]:
    """A cache of 8 blocks in one tensor ``[nb, nl, no, nt, nh, hd]``, and a store of 6 units."""
    tensor = torch.randn(8, 3, 2, 4, 2, 8).to(device)
    engine = Pool(load("operational_nhd"), SHAPE, list(tensor))
    host = Pool.allocate(load("universal"), SHAPE, 6, "cpu" if device == "cpu" else "pinned")
    return tensor, HostStore(engine, host, **options)


def bits(tensor: object) -> np.ndarray:
    return tensor.cpu().numpy().view(np.uint32)  # type: ignore[attr-defined,no-any-return]


def put(store: HostStore, ids: list[int], units: list[int]) -> None:
    copying = store.store(ids, units)
    copying.synchronize()
    store.stored(copying)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("parts", [(None,), (range(2), range(2, 2), range(2, 3))], ids=["whole", "by layers"])
def test_what_was_stored_comes_back(device: str, verify: bool, parts: tuple[range | None, ...]) -> None:
    tensor, store = made(device, verify=verify)
    before = bits(tensor).copy()
    put(store, [1, 6, 3], [5, 0, 2])
    *_, copying = store.load([2, 5, 0], [0, 7, 3], parts)
    copying.synchronize()
    assert copying.is_done() and not store.wrong(copying).any() and not store.changed([0, 2, 5]).any()
    before[[0, 7, 3]] = before[[3, 1, 6]]
    assert (bits(tensor) == before).all()
    store.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", [True, False])
def test_units_that_changed_and_units_that_were_never_stored(device: str, verify: bool) -> None:
    tensor, store = made(device, verify=verify)
    put(store, [1, 2, 3], [0, 1, 2])
    store.host.arrays[1].view(np.uint8).reshape(-1)[77] ^= 0x80
    assert store.changed([0, 1, 2, 4]).tolist() == [False, verify, False, True]
    before = bits(tensor).copy()
    [copying] = store.load([0, 1, 2, 4], [4, 5, 6, 7])
    copying.synchronize()
    assert store.wrong(copying).tolist() == [False, verify, False, True]
    now = bits(tensor)
    assert (now[[4, 6]] == before[[1, 3]]).all() and (now[[0, 1, 2, 3, 7]] == before[[0, 1, 2, 3, 7]]).all()
    if device == "cpu" and verify:  # compared before: nothing of it was copied
        assert (now[5] == before[5]).all()
    store.zeros(copying.ids[store.wrong(copying)])
    assert not bits(tensor)[7].any() and bits(tensor)[5].any() is np.bool_(not verify)
    store.close()


def test_a_unit_that_is_being_stored_is_not_loaded() -> None:
    """Until the copy is done nobody knows what the unit holds."""
    _, store = made("cpu")
    put(store, [1], [3])
    store.store([2], [3])
    assert store.changed([3]).tolist() == [True]
    [copying] = store.load([3], [0])
    assert copying.refused.tolist() == [True] == store.wrong(copying).tolist()


@pytest.mark.parametrize("unit", [-1, 6, 1 << 40])
def test_units_that_do_not_exist(unit: int) -> None:
    tensor, store = made("cpu")
    before = bits(tensor).copy()
    for act in (lambda: store.store([0], [unit]), lambda: next(store.load([unit], [0])), lambda: store.changed([unit])):
        with pytest.raises(BindError, match=r"expected blocks from 0 to 5, got"):
            act()
    assert (bits(tensor) == before).all() and not store.known.any()
