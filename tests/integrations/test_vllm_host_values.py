"""Blocks that are quantised on the way to host memory and to files, without vLLM: every bit, by the oracle of casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cast_oracle  # noqa: E402
from kvbm import BindError, BlockShape, Pool, Transfer, load, store  # noqa: E402
from kvbm.integrations.host_values import FORMATS, HostValues, latent_and_rope  # noqa: E402
from kvbm.integrations.vllm.copier import Copier, HostMemory  # noqa: E402
from kvbm.integrations.vllm.host_layout import row_bytes  # noqa: E402
from kvbm.integrations.vllm.pages import Pages  # noqa: E402
from kvbm.layout.spec import parse  # noqa: E402
from kvbm.store.folder import Folder  # noqa: E402
from kvbm.store.keys import Chain, Content  # noqa: E402
from kvbm.store.shelf import Shelf, Shelved  # noqa: E402

KV = BlockShape(nl=2, no=2, nh=4, nt=8, hd=64, dtype="bfloat16")
LATENT = BlockShape(nl=2, no=1, nh=1, nt=4, hd=256 + 32, dtype="bfloat16")
ROPE = 32
LBHNC = parse('order: "[l] b h t o d"', name="pages")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = ["bfloat16", "float16", "float32"]
WIDTH = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}

#: Setting → elements, scales, and elements that share one, of K and V and of the latent.
GROUPS = {
    "fp8": ("float8_e4m3fn", "float32", 64, 128),
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32, 32),
    "nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16, 16),
}


def pages(shape: BlockShape, device: str, blocks: int = 12) -> tuple[Any, Pages]:
    """A cache ``(l, b, h, t, o, d)``, or of a latent ``(l, b, t, d)``: random, with a group of zeros, NaN and infinities."""
    size = (blocks, shape.nh, shape.nt, 2, shape.hd) if shape.no == 2 else (blocks, shape.nt, shape.hd)
    cache = torch.randn(shape.nl, *size, generator=torch.Generator().manual_seed(1)).to(getattr(torch, shape.dtype))
    rows = cache.view(shape.nl, blocks, -1, shape.hd)
    rows[0, 1, 0] = 0
    rows[0, 1, 1, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    rows[0, 1, -1] *= 1e-6
    cache = cache.to(device)
    if shape.no == 2:
        return cache, Pages(Pool(LBHNC, shape, list(cache)))
    return cache, Pages(Pool(latent_and_rope(ROPE), shape, [layer.view(torch.uint8) for layer in cache]))


def bits(cache: Any) -> np.ndarray:
    """The bits of elements, in the order of the cache."""
    width = cache.element_size()
    return cache.cpu().contiguous().view(torch.int16 if width == 2 else torch.int32).numpy().view(f"uint{8 * width}")  # type: ignore[no-any-return]


def expected(name: str, elements: np.ndarray, dtype: str, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes as bytes, scales as bytes, and the bits that come back, of elements ``(…, n)``."""
    fmt, scale, *_ = GROUPS[name]
    x = cast_oracle.to_float32(elements, dtype).reshape(*elements.shape[:-1], -1, group)
    codes, scales, _ = cast_oracle.quantise(x, fmt, scale)
    assert scales is not None
    back = cast_oracle.dequantise(codes, scales, fmt, scale, dtype).reshape(elements.shape)
    flat = codes.reshape(elements.shape)
    if fmt == "float4_e2m1fn":
        flat = flat[..., ::2] | flat[..., 1::2] << 4
    return flat, np.ascontiguousarray(scales).view(np.uint8).reshape(*elements.shape[:-1], -1), back


def block_bytes(name: str, cache: Any, block: int, shape: BlockShape) -> tuple[np.ndarray, np.ndarray]:
    """What a block is in host memory, ``(h, l, o, bytes)``, and what comes back of it, as in the cache: restated in NumPy."""
    data = bits(cache)[:, block]
    if shape.no == 2:
        ordered = data.transpose(1, 0, 3, 2, 4)  # h l o t d
        codes, scales, back = expected(name, ordered, shape.dtype, GROUPS[name][2])
        planes = [codes, scales]
        back = back.transpose(1, 0, 3, 2, 4)
    else:
        ordered = data[None, :, None]  # h l o t d
        codes, scales, back = expected(name, ordered[..., :-ROPE], shape.dtype, GROUPS[name][3])
        kept = ordered[..., -ROPE:]
        planes = [codes, scales, np.ascontiguousarray(kept).view(np.uint8)]
        back = np.concatenate([back, kept], -1)[0, :, 0]
    around = planes[0].shape[:3]
    return np.concatenate([plane.reshape(*around, -1) for plane in planes], -1), back


@pytest.fixture
def copiers() -> Iterator[list[Copier]]:
    made: list[Copier] = []
    yield made
    for copier in made:
        copier.close()


def host(values: HostValues, groups: Any, device: str, units: int = 8, **options: Any) -> HostMemory:
    where = "pinned" if device == "cuda" else "cpu"
    return HostMemory(values.layout, groups, units, where, cast="amax", **options)


def moved(copier: Copier, job: int, ids: list[int], chunks: list[int], sizes: Any = None, *, is_load: bool) -> Any:
    """A job, when it is done."""
    sizes = sizes or [len(ids)]
    copier.submit(job, np.array(ids), np.array(chunks), sizes, [0] * len(sizes), is_load=is_load)
    copier.wait({job})
    while not (found := copier.finished()):
        pass
    return found[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape", [*(replace(KV, dtype=dtype) for dtype in DTYPES), *(replace(LATENT, dtype=dtype) for dtype in DTYPES)], ids=str
)
def test_what_lies_in_host_memory_and_what_comes_back(
    copiers: list[Copier], device: str, name: str, shape: BlockShape
) -> None:
    """Every bit, of elements that are zero, NaN, infinite and small, too; the positions of a latent are kept."""
    values = HostValues(name, ROPE if shape.no == 1 else 0)
    cache, engine = pages(shape, device)
    copiers.append(copier := Copier(host(values, [[engine]], device), 1))
    before = bits(cache).copy()
    out = moved(copier, 1, [1, 4, 2], [7, 0, 3], is_load=False)
    [[held]] = copier.memory.stores
    for block, unit in ((1, 7), (4, 0), (2, 3)):
        wanted, back = block_bytes(name, cache, block, shape)
        found = held.host.arrays[unit]
        assert found.dtype == np.uint8 and np.array_equal(found, wanted)
        before[:, 10 if block == 1 else block] = back if block == 1 else before[:, block]
    size = wanted.size
    assert out.nbytes == 3 * size == 3 * values.block_bytes(shape) and size < shape.nbytes * (0.6 if name == "nvfp4" else 0.75)
    found = moved(copier, 2, [10], [7], is_load=True)
    assert (found.nbytes, found.wrong_blocks) == (size, []) and np.array_equal(bits(cache), before)
    assert np.array_equal(held.digests[[7, 0, 3]], held.host.digest([7, 0, 3]))


@pytest.mark.parametrize("name", FORMATS)
def test_what_comes_back_and_leaves_again_is_the_same(copiers: list[Copier], name: str) -> None:
    """Blocks that go to and fro do not drift: of finite elements the second time has the bits of the first."""
    for shape in (KV, LATENT):
        engine = pages(shape, "cpu")[1]
        values = HostValues(name, ROPE if shape.no == 1 else 0)
        copiers.append(copier := Copier(host(values, [[engine]], "cpu"), 1))
        moved(copier, 1, [2, 3], [0, 1], is_load=False)
        moved(copier, 2, [7, 8], [0, 1], is_load=True)
        moved(copier, 3, [7, 8], [4, 5], is_load=False)
        held = copier.memory.stores[0][0]
        assert np.array_equal(held.digests[[4, 5]], held.digests[[0, 1]])
        assert np.array_equal(held.host.arrays[4], held.host.arrays[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("plane", ["code", "scale"])
def test_a_flipped_bit(copiers: list[Copier], device: str, verify: bool, plane: str) -> None:
    """Of an element or of a scale: the digests are those of the quantised blocks; a chunk that was never stored is wrong."""
    cache, engine = pages(KV, device)
    copiers.append(copier := Copier(host(HostValues("fp8"), [[engine]], device, verify=verify), 1))
    moved(copier, 1, [2, 3], [1, 4], is_load=False)
    copier.memory.stores[0][0].host.arrays[4][3, 1, 1, 0 if plane == "code" else -1] ^= 1
    found = moved(copier, 2, [8, 9, 10], [1, 4, 5], is_load=True)
    assert (found.wrong_blocks, found.wrong_chunks) == (([9, 10], {4, 5}) if verify else ([10], {5}))
    assert bool((cache[:, 9] == 0).all()) is verify and bool((cache[:, 10] == 0).all())
    assert np.array_equal(bits(cache)[:, 8], block_bytes("fp8", cache, 2, KV)[1])


@pytest.mark.parametrize("device", DEVICES)
def test_groups_share_rows_of_quantised_blocks(copiers: list[Copier], device: str) -> None:
    """Layers of two sizes lie behind each other in a row, which is as long as quantised blocks need."""
    other = replace(KV, nl=3, nh=1, hd=32)
    (one, wide), (two, narrow) = pages(KV, device), pages(other, device)
    values = HostValues("mxfp8")
    row = row_bytes(values.layout, [[KV], [KV, other]])
    assert row == 2 * 2 * 4 * 8 * 66 + 3 * 2 * 8 * 33 + (256 - 48)  # of the second one; the rest up to a multiple of 256
    copiers.append(copier := Copier(host(values, [[wide], [wide, narrow]], device), 1))
    moved(copier, 1, [2, 3], [1, 6], [1, 1], is_load=False)
    (first,), (_, second) = copier.memory.stores
    assert first.host.addresses[2] - first.host.addresses[1] == row
    assert np.array_equal(first.host.arrays[6], block_bytes("mxfp8", one, 3, KV)[0])
    assert np.array_equal(second.host.arrays[6][0], expected_rows(two, 3, other))
    moved(copier, 2, [9], [6], [0, 1], is_load=True)
    assert np.array_equal(bits(two)[:, 9], block_bytes("mxfp8", two, 3, other)[1])


def expected_rows(cache: Any, block: int, shape: BlockShape) -> np.ndarray:
    found: np.ndarray = block_bytes("mxfp8", cache, block, shape)[0][0]
    return found


def test_ranks_that_share_a_latent(copiers: list[Copier]) -> None:
    """One stores, the other loads what it stored, from memory that holds only quantised blocks."""
    values, ranks = HostValues("fp8", ROPE), [pages(LATENT, "cpu") for _ in range(2)]
    ranks[1][0].zero_()
    nbytes = HostMemory.shared_bytes(values.layout, [[ranks[0][1]]], 8)
    assert nbytes == 8 * (row_bytes(values.layout, [[LATENT]]) + 9)
    shared = np.zeros(nbytes, np.uint8)
    one, other = (Copier(host(values, [[engine]], "cpu", shared=shared), 1) for _, engine in ranks)
    copiers += [one, other]
    moved(one, 1, [2, 3], [0, 5], is_load=False)
    assert not moved(other, 1, [7, 8], [5, 0], is_load=True).wrong_blocks
    for block, source in ((7, 3), (8, 2)):
        assert np.array_equal(bits(ranks[1][0])[:, block], block_bytes("fp8", ranks[0][0], source, LATENT)[1])


# ---- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"host_values": "fp9"}, r"host_values: expected one of fp8, mxfp8, nvfp4, got 'fp9'; leave it out"),
        ({"host_values": True}, r"host_values: expected one of .* got True"),
        ({"host_values": ["fp8"]}, r"host_values: expected one of .* got \['fp8'\]"),
        ({"host_values": "fp8", "host_layout": "universal"}, r"host_layout: expected none beside host_values, .* got 'universal'"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(BindError, match=says):
        HostValues.of(extra)


def test_the_setting() -> None:
    assert HostValues.of({}) is None and HostValues.of({"host_values": None, "host_layout": "nhd"}) is None
    assert HostValues.of({"host_values": "mxfp8"}) == HostValues("mxfp8", 0)
    assert HostValues.of({"host_values": "fp8"}, 64) == HostValues("fp8", 64)


@pytest.mark.parametrize(
    ("values", "shape", "says"),
    [
        (HostValues("fp8"), replace(KV, dtype="float8_e4m3fn"), "a cache of bfloat16, float16, float32, got float8_e4m3fn"),
        (HostValues("fp8"), replace(KV, dtype="uint8"), "got uint8; leave host_values out"),
        (HostValues("mxfp8"), replace(KV, hd=80), "expected a multiple of 32 elements per token and head, .* got 80"),
        (HostValues("nvfp4"), replace(KV, hd=72), "expected a multiple of 16 elements per token and head, .* got 72"),
        (HostValues("fp8", 32), replace(LATENT, hd=192 + 32), "a multiple of 128 elements .* beside the 32 .* got 192"),
        (HostValues("fp8", 32), replace(LATENT, hd=32), "got 0"),
        (HostValues("fp8"), LATENT, "got a latent, and the configuration of the model no qk_rope_head_dim"),
        (HostValues("fp8", 32), KV, "got K and V, and the configuration of the model a latent"),
    ],
    ids=str,
)  # fmt: skip
def test_caches_that_are_refused(values: HostValues, shape: BlockShape, says: str) -> None:
    with pytest.raises(BindError, match=f"host_values {values.name}: layer 3: .*{says}"):
        values.require(shape, "layer 3")


@pytest.mark.parametrize("hd", [16, 40, 64, 80, 96, 112, 128, 192, 256, 5])
def test_sizes_of_heads(hd: int) -> None:
    """One scale for a whole head fits any size, also where scales are not aligned: 5 bytes, then a float32."""
    shape = replace(KV, hd=hd, nt=1, nl=1, nh=1)
    HostValues("fp8").require(shape, "")
    assert HostValues("fp8").block_bytes(shape) == 2 * (hd + 4)
    cache, engine = pages(shape, "cpu", 3)
    copier = Copier(host(HostValues("fp8"), [[engine]], "cpu", 2), 1)
    moved(copier, 1, [2], [1], is_load=False)
    codes, scales, _ = expected("fp8", bits(cache)[:, 2].transpose(1, 0, 3, 2, 4), shape.dtype, hd)
    row = copier.memory.stores[0][0].host.arrays[1].reshape(2, -1)
    assert np.array_equal(row, np.concatenate([codes.reshape(2, -1), scales.reshape(2, -1)], 1))
    copier.close()


# ---- files -----------------------------------------------------------------------------------------------------------

UNIT = replace(KV, nt=4)
NAMES = Chain(4, range(32)).keys(0, 32)


def content(name: str | None, shape: BlockShape = UNIT, rope: int = 0) -> Content:
    if not name:
        return Content("weights", "org/a model", (0, 1), shape)
    values = HostValues(name, rope)
    return Content("weights", "org/a model", (0, 1), shape, values.layout, values.text(shape.dtype))


def quantised(values: HostValues, nt: int, heads: range) -> Pool:
    """Quantised blocks of a rank with 32 tokens."""
    generator = np.random.default_rng(3)
    whole = generator.standard_normal((KV.nl, KV.no, 32, KV.nh, KV.hd)).astype(np.float32)
    shape = replace(KV, nt=nt, nh=len(heads), dtype="float32")
    plain = Pool.allocate(load("universal"), shape, 32 // nt)
    for block, array in enumerate(plain.arrays):
        array[...] = whole[:, :, block * nt : (block + 1) * nt, heads].transpose(3, 0, 1, 2, 4)
    pool = Pool.allocate(values.layout, replace(shape, dtype="bfloat16"), 32 // nt)
    Transfer(plain, pool, cast="amax").copy()
    return pool


def shelved(of: Content, pool: Pool, heads: range, tier: Folder, *, reads: bool) -> Shelved:
    shelf = Shelf(of, pool, heads, threads=1)
    ids, firsts = np.arange(pool.num_blocks), [4 * unit for unit in range(8)]
    return shelf.read(tier, ids, NAMES, firsts) if reads else shelf.write(tier, ids, pool.digest(ids), NAMES, firsts)


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_other_ranks_and_block_sizes(tmp_path: Path, name: str) -> None:
    """Two ranks with blocks of 8 tokens write quantised units, one with blocks of 16 reads them: the same bits, and the reverse.

    And with blocks that are smaller than a unit.
    """
    of, values = content(name), HostValues(name)
    for at, (writes, reads) in enumerate((((2, 8), (1, 16)), ((1, 32), (4, 4)), ((4, 2), (2, 1)))):
        folder = tmp_path / str(at)
        tier = Folder(folder, of, 1 << 30)
        size = values.block_bytes(UNIT)
        for rank in range(writes[0]):
            heads = range(4 * rank // writes[0], 4 * (rank + 1) // writes[0])
            done = shelved(of, quantised(values, writes[1], heads), heads, tier, reads=False)
            assert done.good.all() and not done.why and 8 * size // writes[0] < done.nbytes < 8 * (size // writes[0] + 4096 + 512)
        assert all(map(tier.holds, NAMES))
        for rank in range(reads[0]):
            heads = range(4 * rank // reads[0], 4 * (rank + 1) // reads[0])
            wanted = quantised(values, reads[1], heads)
            pool = Pool.allocate(wanted.layout, wanted.shape, wanted.num_blocks)
            done = shelved(of, pool, heads, tier, reads=True)
            assert done.good.all() and done.nbytes == 8 * size // reads[0]
            assert np.array_equal(done.digests, wanted.digest())
            assert all(np.array_equal(one, other) for one, other in zip(pool.arrays, wanted.arrays, strict=True))


def test_a_file_of_a_quantised_unit(tmp_path: Path) -> None:
    """It says what its values are, and `kvbm.store` reads it as what it is; a flipped bit is a miss, and the file is removed."""
    of, values = content("nvfp4"), HostValues("nvfp4")
    tier, heads = Folder(tmp_path, of, 1 << 30), range(4)
    shelved(of, quantised(values, 4, heads), heads, tier, reads=False)
    path = tier.home(NAMES[2]) / "heads-0-3.safetensors"
    with store.read(path) as file:
        assert file.metadata["store.values"] == "fp4 e2m1, one e4m3 per 16 elements, from bfloat16"
        assert file.layout_name == "record/nvfp4_universal"
        held = file.pool("record/nvfp4_universal")
        assert np.array_equal(held.arrays[0], quantised(values, 4, heads).arrays[2])
        assert file.digests is not None and np.array_equal(file.digests.blocks, held.digest())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pool = quantised(values, 4, heads)
    for array in pool.arrays:
        array[...] = 0
    done = shelved(of, pool, heads, tier, reads=True)
    assert done.good.tolist() == [unit != 2 for unit in range(8)] and "digest: expected" in done.why and not path.exists()
    assert not pool.arrays[2].any()


def test_other_values_share_nothing(tmp_path: Path) -> None:
    """Each value of the setting, and none, has a key of its own; a file that was moved to another folder is refused by its name."""
    latent = replace(LATENT, nt=4)
    known = [content(None), *map(content, FORMATS), content("fp8", replace(UNIT, dtype="float16"))]
    known += [content(None, latent), *(content(name, latent, rope) for name in FORMATS for rope in (32, 160))]
    assert len({one.key for one in known}) == len({one.key[:16] for one in known}) == len(known)
    assert content(None).fields["values"] == "bfloat16"
    assert content("fp8").fields["values"] == "fp8 e4m3, one float32 per token and head, from bfloat16"
    heads, values = range(4), HostValues("fp8")
    fp8, plain = (Folder(tmp_path, of, 1 << 30) for of in (content("fp8"), content(None)))
    shelved(content("fp8"), quantised(values, 4, heads), heads, fp8, reads=False)
    assert all(map(fp8.holds, NAMES)) and not any(map(plain.holds, NAMES))
    plain.root.parent.mkdir(exist_ok=True)
    fp8.root.rename(plain.root)
    pool = Pool.allocate(load("universal"), replace(UNIT, nt=4), 8)
    for array in pool.arrays:
        array[...] = 0
    done = shelved(content(None), pool, heads, plain, reads=True)
    assert not done.good.any() and "kvbm.fingerprint: expected" in done.why
    assert not any(array.view(np.uint8).any() for array in pool.arrays)


def test_blocks_that_do_not_fit_a_content_are_refused() -> None:
    """Host memory with other values than the files, in both directions."""
    values, heads = HostValues("fp8"), range(4)
    plain = Pool.allocate(load("universal"), replace(UNIT, nt=8), 2)
    with pytest.raises(BindError, match=r"expected blocks in the layout record/per_token_head_fp8_planes, got universal"):
        Shelf(content("fp8"), plain, heads)
    with pytest.raises(BindError, match=r"expected blocks in the layout universal, got record/per_token_head_fp8_planes"):
        Shelf(content(None), quantised(values, 8, heads), heads)
    with pytest.raises(BindError, match=r"expected blocks in the layout record/mxfp8_universal, got record/per_token"):
        Shelf(content("mxfp8"), quantised(values, 8, heads), heads)
