"""Parts of kvbm.integrations.sglang and .lmcache that need neither engine: copies, checks, and supported versions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import kvbm  # noqa: E402
from kvbm.integrations.lmcache.blocks import FORMATS, Copies  # noqa: E402
from kvbm.integrations.sglang.host import HostPages  # noqa: E402
from kvbm.integrations.versions import require_version  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
NL, NB, BS, NH, HS = 5, 9, 4, 2, 8


def test_versions() -> None:
    for right in ("0.5.6", "0.5.6.post1", "0.5.6rc1+cu13", "0.5.6.1"):
        require_version("LMCache", right, "0.5.6", "0.5.7")
    for wrong in ("0.5.5", "0.5.7", "0.6", "1.0", "unknown", ""):  # LMCache is not here
        with pytest.raises(
            kvbm.BindError, match=r"lmcache: expected LMCache 0\.5\.6 or newer, before 0\.5\.7, got .*, which lacks lmcache"
        ):
            require_version("LMCache", wrong, "0.5.6", "0.5.7")


def pages(device: str, count: int = 4) -> tuple[list[Any], HostPages]:
    tensors = [torch.randint(0, 255, (NB, BS, NH, HS), dtype=torch.uint8, device=device) for _ in range(2 * NL)]
    pool = kvbm.Pool(kvbm.load("sglang/mha_pool"), kvbm.BlockShape(NL, 2, NH, BS, HS, "uint8"), tensors)
    return tensors, HostPages(pool, kvbm.load("universal"), count)


def stream_of(device: str) -> Any:
    if device == "cpu":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@pytest.mark.parametrize("device", DEVICES)
def test_host_pages(device: str) -> None:
    """Copies out, and back by parts of the layers: the parts' digests add up to the pages'; a flipped bit is found on each side."""
    tensors, held = pages(device)
    before = [tensor.clone() for tensor in tensors]
    storing = held.store(["a", "b"], [3, 7], stream_of(device))
    assert held.missing(["a", "c"]) == ["c"] and "a" not in held
    storing.copying.synchronize()
    held.stored(storing)
    held.check(["a", "b", "c"])
    assert "a" in held and len(held) == 2 and not held.wrong
    *_, loading = held.load(["b", "a"], [1, 2], [range(2), range(2, 2), range(2, 5)], stream_of(device))
    assert len(loading.copying.dones) == 2 and held.loaded(loading)
    for tensor, was in zip(tensors, before, strict=True):
        was[1], was[2] = was[7], was[3]
        assert torch.equal(tensor, was)
    held.host.arrays[held._pages["a"]].view("u1").reshape(-1)[0] ^= 1
    *_, loading = held.load(["b", "a"], [1, 2], [range(5)], stream_of(device))
    assert not held.loaded(loading) and held.wrong == 1 and "a" not in held and "b" in held
    for tensor, was in zip(tensors, before, strict=True):  # nothing of it is left, and no other page has changed
        was[2] = 0
        assert torch.equal(tensor, was)
    held.host.arrays[held._pages["b"]].view("u1").reshape(-1)[0] ^= 1
    held.check(["b"])
    assert "b" not in held and held.wrong == 2 and held.room(4)
    held.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["lbhtd", "blhtd", "lhbtd", "bhltd", "lbthd"])
@pytest.mark.parametrize("by", ["tensors", "addresses"])
def test_blocks(device: str, order: str, by: str) -> None:
    """Blocks to objects and back, in each memory order that LMCache's formats allow; also objects on the device."""
    sizes = {"l": NL, "b": NB, "h": NH, "t": BS, "d": HS}
    if by == "addresses" and order not in ("lbhtd", "blhtd"):
        pytest.skip("what LMCache hands out by addresses has tokens and heads inside blocks")
    memory = torch.randint(0, 99, [sizes[axis] for axis in order], device=device).to(torch.int32)
    view = memory.permute([order.index(axis) for axis in "lbhtd"])
    before = view.clone()
    desc = SimpleNamespace(nl=NL, nb=NB, bs=BS, nh=NH, hs=HS, element_size=4, block_stride_elems=view.stride(1))
    objects = [torch.zeros(NL, 2 * BS, NH * HS, dtype=torch.int32, device=device) for _ in range(2)]
    paged: Any = list(view)
    given: list[Any] = objects
    if by == "addresses":
        paged = torch.tensor([one.data_ptr() for one in view], dtype=torch.int64, device=device)
        given = [one.data_ptr() for one in objects]
    copies, where = Copies(), torch.device(device)
    ids = torch.tensor([5, 2, 7], device=device)
    copies.copy(paged, given, ids, where, desc, 2 * BS, "NL_X_NB_NH_BS_CS", 0, to_objects=True)
    for at, block in enumerate([5, 2, 7]):
        part = objects[at // 2][:, (at % 2) * BS : (at % 2 + 1) * BS].view(NL, BS, NH, HS)
        assert torch.equal(part, before[:, block].permute(0, 2, 1, 3))
    copies.copy(
        paged,
        given,
        torch.tensor([1, 0, 8], device=device),
        where,
        desc,
        2 * BS,
        "NL_X_NB_NH_BS_CS",
        1,
        to_objects=False,
    )
    before[:, [0, 8]] = before[:, [2, 7]]
    assert torch.equal(view, before)


@pytest.mark.gpu
def test_pinned_objects_of_a_gpu() -> None:
    layers = [torch.randint(0, 99, (NB, NH, BS, HS), dtype=torch.int32, device="cuda:0") for _ in range(NL)]
    desc = SimpleNamespace(nl=NL, nb=NB, bs=BS, nh=NH, hs=HS, element_size=4, block_stride_elems=0)
    held = torch.zeros(NL, 2 * BS, NH * HS, dtype=torch.int32).pin_memory()
    paged = torch.tensor([one.data_ptr() for one in layers], dtype=torch.int64, device="cuda:0")
    ids = torch.tensor([5, 2], device="cuda:0")
    where = torch.device("cuda:0")
    Copies().copy(paged, [held.data_ptr()], ids, where, desc, 2 * BS, "NL_X_NB_NH_BS_CS", 0, to_objects=True)
    torch.cuda.synchronize()
    for layer, one in zip(held, layers, strict=True):
        assert torch.equal(layer.view(2, BS, NH, HS), one[[5, 2]].permute(0, 2, 1, 3).cpu())


def refused(**changes: Any) -> Callable[[], None]:
    usual: dict[str, Any] = {
        "paged": [torch.zeros(NB, NH, BS, HS)], "objects": [torch.zeros(1, BS, NH * HS)], "block_ids": [1],
        "device": torch.device("cpu"), "desc": SimpleNamespace(bs=BS), "chunk": BS, "name": "NL_X_NB_NH_BS_CS", "skip": 0,
        "to_objects": True,
    }  # fmt: skip
    return lambda: Copies().copy(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "NL_X_NB_UNKNOWN"}, f"NL_X_NB_UNKNOWN: expected one of {next(iter(FORMATS))}"),
        ({"chunk": BS + 1}, "objects of whole blocks"),
        ({"paged": [torch.zeros(NB, NH, BS)]}, "expected the dimensions b h t d"),
        ({"paged": [torch.zeros(NB, NH, BS, 2 * HS)[..., ::2]]}, "behind each other"),
        ({"paged": [torch.zeros(NB, NH, BS, HS), torch.zeros(NB, NH, BS, HS + 1)]}, "of one shape"),
        (
            {"paged": [torch.zeros(NB, NH, BS, HS).double()], "objects": [torch.zeros(1, BS, NH * HS).double()]},
            "of 1, 2 or 4 bytes",
        ),
        ({"objects": [torch.zeros(1, BS, NH)]}, "contiguous object of 64 elements"),
        ({"paged": [torch.zeros(NB, NH, BS + 1, HS)], "objects": [torch.zeros(1, BS + 1, NH * HS)]}, "blocks of 4 tokens"),
    ],
    ids=range(8),
)  # fmt: skip
def test_blocks_refuse(changes: dict[str, Any], message: str) -> None:
    refused()()
    with pytest.raises(kvbm.BindError, match=message):
        refused(**changes)()
