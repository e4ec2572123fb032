"""Locating differences of pools: errors of all kinds are written to destinations, and must be found from digests alone."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import kvbm
from few import few
from kvbm.bench.measure import random_pool
from kvbm.copy import diff
from kvbm.digest import run
from kvbm.errors import BindError, DigestError, PlanError
from kvbm.testing import locate

SHAPE = kvbm.load_shape("nl=3,no=2,nh=4,nt=16,hd=16,dtype=bfloat16")
NAMES = (
    "nhd", "hnd", "universal", "operational_nhd", "vllm/LBHNC", "vllm/BHLNC", "vllm/flash_attn_nhd", "vllm/paged_attn_v0",
    "hf/dynamic_cache",
)  # fmt: skip
PAIRS = [
    *zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True),
    ("nhd", "universal"),
    ("vllm/paged_attn_v0", "vllm/paged_attn_v0"),
]
SIZES = {"l": 3, "o": 2, "h": 4, "t": 16}


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[kvbm.Pool, kvbm.Pool]]:
    """Source and destination; block i is copied into block 5 - i."""
    src, dst = getattr(request, "param", ("nhd", "universal"))
    with bound(src, dst, SHAPE) as made:
        yield made


class bound:  # noqa: N801
    def __init__(self, src: str, dst: str, shape: kvbm.BlockShape, blocks: int = 6) -> None:
        self.made = [
            random_pool(kvbm.load(name), shape, blocks, "cpu", seed=seed) for seed, name in enumerate((src, dst), 1)
        ]

    def __enter__(self) -> tuple[kvbm.Pool, kvbm.Pool]:
        src, dst = (each.__enter__() for each in self.made)
        kvbm.convert(src, dst, list(range(src.num_blocks)), list(reversed(range(src.num_blocks))))
        return src, dst

    def __exit__(self, *_: object) -> None:
        for each in self.made:
            each.__exit__(None, None, None)


BATCH = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]


def address(pool: kvbm.Pool, block: int, at: Mapping[str, int], plane: str = "") -> int:
    """The address of an element."""
    maps = [access for access in pool.resolved.section.accesses if access.plane == plane]
    access = next(one for one in maps if one.half in (None, at.get("o", 0)))
    entry, offset = access.address(block, at)
    return int(pool.addresses[entry]) + int(offset)


def flip(pool: kvbm.Pool, block: int, at: Mapping[str, int], plane: str = "", bit: int = 1) -> None:
    byte = ctypes.c_uint8.from_address(address(pool, block, at, plane))
    byte.value ^= bit


def product(at: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    return [dict(zip(at, each, strict=True)) for each in itertools.product(*at.values())]


def rows(found: kvbm.copy.diff.Mismatch) -> list[tuple[int, ...]]:
    """The rows of the reported regions, as (l, o, h, t)."""
    axes = [[region.at.get(axis, (0,)) for axis in "loht"] for region in found.regions]
    return [row for each in axes for row in itertools.product(*each)]


@pytest.mark.parametrize("pools", PAIRS, indirect=True, ids=" → ".join)
def test_the_example(pools: Any) -> None:
    src, dst = pools
    assert not locate(src, dst, *BATCH) and str(locate(src, dst, *BATCH)) == "no difference"
    for at in product({"l": (1, 2), "o": (1,), "h": (2,), "t": range(8, 16)}):
        flip(dst, 2, {**at, "d": random.randrange(16)})
    found = locate(src, dst, *BATCH)
    assert found.pairs == (3,) and len(found) == 1
    assert str(found).startswith("pair 3 (block 3 → block 2): layers 1–2, V, head 2, tokens 8–15")
    assert found.found[0].regions[0].exact


@pytest.mark.parametrize("pools", PAIRS, indirect=True, ids=" → ".join)
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_random_rectangles_are_found_exactly(pools: Any, seed: int) -> None:
    """Up to three rectangles in two blocks: exactly the rows that differ are reported, each once."""
    src, dst = pools
    pick = random.Random(f"{src.layout.name} {seed}")
    wrong: dict[int, set[tuple[int, ...]]] = {}
    for block in pick.sample(range(6), 2):
        for _ in range(pick.randint(1, 3)):
            at = {
                axis: sorted(pick.sample(range(n), pick.choice((1, 1, n, pick.randint(1, n)))))
                for axis, n in SIZES.items()
            }
            for row in product(at):
                if tuple(row.values()) not in wrong.setdefault(block, set()):
                    flip(dst, block, {**row, "d": pick.randrange(16)})
                    wrong[block].add(tuple(row.values()))
    found = locate(src, dst, *BATCH)
    assert {5 - one.dst: one.dst for one in found.found} == {one.pair: one.dst for one in found.found}
    assert sorted(one.dst for one in found.found) == sorted(wrong)
    for one in found.found:
        named = rows(one)
        if all(region.exact for region in one.regions):
            assert sorted(named) == sorted(wrong[one.dst])
        else:
            assert len(one.regions) == diff.MOST_REGIONS and set(named) >= wrong[one.dst]
        assert len(named) == len(set(named))


def swap(pool: kvbm.Pool, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Exchange the contents of two products of rows of block 1."""
    for a, b in zip(product(one), product(other), strict=True):
        for d in range(16):
            places = [(ctypes.c_uint16 * 1).from_address(address(pool, 1, {**at, "d": d})) for at in (a, b)]
            places[0][0], places[1][0] = places[1][0], places[0][0]


ALL = {axis: range(n) for axis, n in SIZES.items()}


@pytest.mark.parametrize("pools", [("nhd", "universal"), ("universal", "vllm/paged_attn_v0")], indirect=True)
def test_errors_as_they_happen(pools: Any) -> None:
    src, dst = pools
    before = [array.copy() for array in dst.arrays]

    def said() -> str:
        text = str(locate(src, dst, *BATCH))
        for array, whole in zip(dst.arrays, before, strict=True):
            array[...] = whole
        assert text.startswith("pair 4 (block 4 → block 1): ") and "\n" not in text
        return text.partition("): ")[2]

    flip(dst, 1, {"l": 2, "o": 0, "h": 3, "t": 7, "d": 9})
    assert said() == "layer 2, K, head 3, token 7, elements 8–15"
    swap(dst, {**ALL, "h": [1]}, {**ALL, "h": [3]})
    assert said() == "all layers, K and V, heads 1, 3, all tokens"
    for t in range(15):
        swap(dst, {**ALL, "t": [t]}, {**ALL, "t": [t + 1]})
    assert said() == "all layers, K and V, all heads, all tokens"
    swap(dst, {**ALL, "o": [0], "l": [0]}, {**ALL, "o": [0], "l": [2]})
    assert said() == "layers 0, 2, K, all heads, all tokens"
    swap(dst, {**ALL, "o": [0]}, {**ALL, "o": [1]})
    assert said() == "all layers, K and V, all heads, all tokens"
    for at in product({"l": [1], "o": [0, 1], "h": range(4), "t": range(4, 16)}):  # a layer that stopped early
        for d in range(16):
            ctypes.c_uint16.from_address(address(dst, 1, {**at, "d": d})).value = 0
    assert said() == "layer 1, K and V, all heads, tokens 4–15"
    flip(dst, 1, {"l": 0, "o": 0, "h": 0, "t": 0, "d": 0})
    flip(dst, 1, {"l": 1, "o": 1, "h": 1, "t": 1, "d": 15})
    assert said() == "layer 0, K, head 0, token 0, elements 0–7; layer 1, V, head 1, token 1, elements 8–15"
    for c in range(16):  # a checkerboard: no few products
        flip(dst, 1, {"l": c % 3, "o": c % 2, "h": c % 4, "t": c})
    text = said()
    assert "within " in text and text.count(";") == diff.MOST_REGIONS - 1


PLANAR = [
    ("vllm/per_token_head_fp8", "record/per_token_head_fp8_planes", "nl=2,no=2,nh=4,nt=16,hd=64,dtype=float8_e4m3fn"),
    ("vllm/fp8_ds_mla", "record/mla_fp8_planes", "nl=3,no=1,nh=1,nt=64,hd=576,dtype=float8_e4m3fn"),
    ("record/deepseek_v4_tokens", "record/deepseek_v4_planes", "nl=2,no=1,nh=1,nt=64,hd=512,dtype=uint8"),
    ("vllm/nvfp4", "record/nvfp4_universal", "nl=2,no=2,nh=2,nt=16,hd=128,dtype=uint8"),
]


@pytest.mark.parametrize(("src", "dst", "shape"), PLANAR)
def test_planes(src: str, dst: str, shape: str) -> None:
    with bound(src, dst, kvbm.load_shape(shape)) as (one, other):
        planes = list(dict.fromkeys(access.plane for access in other.resolved.section.accesses))
        assert not locate(one, other, *BATCH)
        tokens = {"o": (0,), "h": (0,), "l": (1,), "t": (3, 4)}
        for at in product(tokens):
            flip(other, 2, at, planes[-1])
        text = str(locate(one, other, *BATCH))
        assert text.startswith(f"pair 3 (block 3 → block 2): plane {planes[-1]}, layer 1, ") and "tokens 3–4" in text
        for at in product({**tokens, "t": range(one.shape.nt)}):
            for plane in planes:
                flip(other, 2, at, plane, bit=2)
        text = str(locate(one, other, *BATCH))
        assert f"planes {', '.join(planes[:2])}" in text or f"plane {planes[0]}" in text
        assert "all tokens" in text and "layer 1, " in text and "\n" not in text


def test_what_has_no_order_is_not_told_apart() -> None:
    with bound("operational", "operational", SHAPE) as (src, dst):
        flip(dst, 1, {"l": 2, "o": 1, "h": 3, "t": 5})
        found = locate(src, dst, *BATCH)
        assert str(found).startswith("pair 4 (block 4 → block 1): layer 2, V, somewhere along h t")
        assert "opaque group {t h d}" in str(found) and found.found[0].regions[0].unresolved == ("h", "t")


def test_units_and_sections_count_as_the_source_does() -> None:
    with bound("nhd", "nhd", kvbm.load_shape("nl=2,no=2,nh=4,nt=16,hd=16,dtype=bfloat16")) as (src, _):
        big = kvbm.load_shape("nl=3,no=2,nh=8,nt=64,hd=16,dtype=bfloat16")
        dst = kvbm.Pool.allocate(kvbm.load("hnd"), big, 3)
        for array in dst.arrays:
            array[...] = 0
        ours = src.section(h=range(2, 4), l=1)
        theirs = dst.units(16).section(h=range(4, 6), l=2)
        kvbm.Transfer(ours, theirs).copy([0, 5, 3], [4, 2, 7])
        assert not locate(ours, theirs, [0, 5, 3], [4, 2, 7])
        flip(dst, 1, {"l": 2, "o": 1, "h": 5, "t": 48 + 9})
        text = "(block 3 → unit 7): layer 1, V, head 3, token 9, elements 0–7"
        assert str(locate(ours, theirs, [0, 5, 3], [4, 2, 7])) == f"pair 2 {text}"
        assert str(locate(ours, theirs, 3, 7, tokens=[160])) == f"pair 0 {text.replace('token 9', 'token 169')}"
        back = locate(theirs, ours, [4, 2, 7], [0, 5, 3])
        assert str(back) == "pair 2 (unit 7 → block 3): layer 2, V, head 5, token 9, elements 0–7"


def test_many_pairs_and_few_digests(pools: Any) -> None:
    """Parts that are not searched are reported: further pairs, and products with too many rows."""
    src, dst = pools
    for block in range(6):
        for at in product(ALL):
            flip(dst, block, at)
    text = str(diff._located(src.whole, dst.whole, *BATCH, None, None, most_pairs=2))
    assert text.splitlines()[2] == "and 4 more: pairs 2–5"
    text = str(diff._located(src.whole, dst.whole, [0], [5], None, None, most_digests=60))
    assert text == "pair 0 (block 0 → block 5): within all layers, K and V, all heads, all tokens, elements 0–7"
    text = str(diff._located(src.whole, dst.whole, [0], [5], None, None, most_digests=10))
    assert text == "pair 0 (block 0 → block 5): within all layers, K and V, all heads, all tokens"


def test_pairs_that_are_skipped_and_ids_that_do_not_fit(pools: Any) -> None:
    src, dst = pools
    flip(dst, 0, {})
    assert locate(src, dst, [4, -1, 5], [1, 2, 0]).pairs == (2,)
    assert not locate(src, dst, [5, 1], [-1, 4])
    assert not locate(src, dst, [], [])
    with pytest.raises(BindError, match=r"dst_ids\[0\] is 6"):
        locate(src, dst, [0], [6])
    with pytest.raises(BindError, match="stream: the pools are on the CPU"):
        locate(src, dst, [0], [5], stream=2)
    for name in ("src_pool", "dst_pool", "src_ids", "dst_ids", "tokens", "stream"):
        for wrong in (object(), 1.5, "x", b"x", [None], [1.5], {"a": 1}, slice(2), 1 << 70, 1j, True, np.zeros((2, 2)), kvbm):
            with pytest.raises(BindError, match=r"expected|leave stream out"):
                locate(**{"src_pool": src, "dst_pool": dst, "src_ids": [0], "dst_ids": [5]} | {name: wrong})
    for tokens in ([1, 2], 1.5, [[1]], [[1], [1, 2]], -1, [-1]):
        with pytest.raises(BindError, match="tokens: expected 1 integers"):
            locate(src, dst, [0], [5], tokens=tokens)
    with pytest.raises(PlanError, match="axis 'h'"):
        locate(src.section(h=range(2)), dst, [0], [5])
    dst.close()
    with pytest.raises(BindError, match="closed"):
        locate(src, dst, [0], [5])


def test_blocks_that_change_while_they_are_looked_into(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = pools
    flip(dst, 5, {})
    plain, calls = diff._digest, []

    def digest(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:  # after the first look at both
            flip(dst, 5, {})
        return plain(*given)

    monkeypatch.setattr(diff, "_digest", digest)
    text = "pair 0 (block 0 → block 5): nothing any more: it changed while it was looked into"
    assert str(locate(src, dst, *BATCH)) == text


def test_products_cover_and_are_disjoint() -> None:
    random_ = np.random.default_rng(1)
    for _ in range(200):
        wrong = random_.random(tuple(random_.integers(1, 5, 3))) < random_.random()
        covered = np.zeros(wrong.shape, int)
        for box, exact in diff._products(wrong, 6):
            where = np.ix_(*box)
            assert not exact or wrong[where].all()
            covered[where] += 1
            inexact = not exact
        assert (covered >= wrong).all() and (not wrong.any() or inexact or (covered == wrong).all())


# ---- a transfer that verifies ----------------------------------------------------------------------------------------


class Disturbed:
    """A route whose destination is changed after the copy and before the digest."""

    def __init__(self, wrote: Any) -> None:
        self.wrote = wrote

    def __enter__(self) -> pytest.MonkeyPatch:
        self.patch = pytest.MonkeyPatch()
        plain = run.Proof.watch

        def watch(proof: Any, done: Any) -> None:
            self.wrote(proof)
            plain(proof, done)

        self.patch.setattr(run.Proof, "watch", watch)
        return self.patch

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def test_a_transfer_that_verifies_says_where(pools: Any) -> None:
    src, dst = pools
    with kvbm.Transfer(src, dst, verify=True) as move:
        ids = np.array([3, 1, 0])

        def spoil(proof: Any) -> None:
            """Write a wrong token to memory and to the digest, as a wrong kernel would."""
            flip(dst, 4, {"l": 2, "o": 1, "h": 3, "t": 5})
            flip(dst, 2, {"l": 2, "o": 1, "h": 3, "t": 5})  # after it was verified, by its owner
            proof._memory[proof.count + 1] ^= np.uint64(1)
            ids[...] = 5  # the caller's, who may

        with Disturbed(spoil):
            done = move.copy(ids, [2, 4, 5])
        with pytest.raises(DigestError) as caught:
            done.synchronize()
        first, second = str(caught.value).splitlines()
        assert first.startswith(
            "nhd → universal: 1 of 3 pairs differ, the first is pair 1 (1 → 4): the source's digest is 0x"
        )
        assert second == "pair 1 (block 1 → block 4): layer 2, V, head 3, token 5, elements 0–7"
        assert caught.value.pairs == (1,)
        flip(dst, 4, {"l": 2, "o": 1, "h": 3, "t": 5})
        with pytest.raises(DigestError, match="the blocks are equal now: "):
            done.synchronize()
        dst.close()
        with pytest.raises(DigestError, match=r"where they differ cannot be told: .* closed"):
            done.synchronize()


def test_ranges_of_layers_that_differ_are_the_sources(pools: Any) -> None:
    src, dst = pools
    with kvbm.Transfer(src, dst, verify=True) as move:

        def spoil(proof: Any) -> None:
            flip(dst, 4, {"l": 1, "o": 1, "h": 3, "t": 5})
            proof._memory[proof.count] ^= np.uint64(1)

        with Disturbed(spoil):
            done = move.copy([1], [4], layers=(range(1, 3), range(2)))
        with pytest.raises(DigestError, match=r"\(block 1 → block 4\): layer 2, V, head 3, token 5"):
            done.synchronize()


def test_a_copy_that_nobody_waits_for_is_told_of_at_the_next_one(pools: Any) -> None:
    """Without a search, which would delay an unrelated copy."""
    src, dst = pools
    with kvbm.Transfer(src, dst, verify=True) as move:

        def spoil(proof: Any) -> None:
            proof._memory[proof.count] ^= np.uint64(1)

        with Disturbed(spoil):
            move.copy([1], [4])
        with pytest.raises(DigestError, match=r"pair 0 \(1 → 4\): the source's digest is .*[0-9a-f]$"):
            move.copy([0], [5])
        move.copy([0], [5]).synchronize()


def test_whoever_waits_is_told_and_no_later_copy(pools: Any) -> None:
    src, dst = pools
    with kvbm.Transfer(src, dst, verify=True) as move:

        def spoil(proof: Any) -> None:
            proof._memory[proof.count] ^= np.uint64(1)

        with Disturbed(spoil):
            done = move.copy([1], [4])
        for _ in range(2):
            with pytest.raises(DigestError, match=r"pair 0 \(1 → 4\)"):
                done.synchronize()
        move.copy([0], [5]).synchronize()


@pytest.mark.slow  # 0.7 s
@pytest.mark.sanitize
def test_a_transfer_keeps_no_more_alive_than_before() -> None:
    shape = kvbm.load_shape("nl=1,no=2,nh=1,nt=4,hd=16,dtype=bfloat16")
    src, dst = (kvbm.Pool.allocate(kvbm.load("nhd"), shape, 2) for _ in range(2))
    done = kvbm.Transfer(src, dst, verify=True).copy([0], [1])
    seen = weakref.ref(src)
    del src
    gc.collect()
    assert seen() is not None  # by the proof
    del done
    gc.collect()
    assert seen() is None


def test_ids_on_the_device_are_said_to_be_there() -> None:
    class Pairs:
        def ids(self) -> Any:
            return None, [1]

    assert "ids are on the device" in diff.where_different(None, None, Pairs(), None, (0,))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("vllm/LBHNC", "nhd")])
@pytest.mark.parametrize("place", ["pinned", "cuda:0"])
def test_on_a_gpu(names: tuple[str, str], place: str) -> None:
    """Between GPU and host, and between two pools of the GPU."""
    with random_pool(kvbm.load(names[0]), SHAPE, 6, "pinned") as src:
        dst = kvbm.Pool.allocate(kvbm.load(names[1]), SHAPE, 6, "cuda:0")
        kvbm.Transfer(src, dst).copy(*BATCH, stream=0).synchronize()
        assert not locate(src, dst, *BATCH, stream=0)
        for at in product({"l": (1, 2), "o": (1,), "h": (2,), "t": range(8, 16)}):
            flip(src, 3, at)
        if place == "cuda:0":
            with_errors = kvbm.Pool.allocate(kvbm.load(names[0]), SHAPE, 6, "cuda:0")
            kvbm.Transfer(src, with_errors).copy(stream=0).synchronize()
            found = locate(with_errors, dst, *BATCH, stream=0)
        else:
            found = locate(src, dst, *BATCH, stream=0)
        assert str(found) == "pair 3 (block 3 → block 2): layers 1–2, V, head 2, tokens 8–15, elements 0–7"


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True])
def test_a_transfer_on_a_gpu_says_where(on_device: bool) -> None:
    torch = pytest.importorskip("torch")
    src, dst = (kvbm.Pool.allocate(kvbm.load(name), SHAPE, 6, "cuda:0") for name in ("nhd", "universal"))
    with random_pool(src.layout, SHAPE, 6, "pinned") as host, kvbm.Transfer(src, dst, verify=True) as move:
        kvbm.Transfer(host, src).copy(stream=0).synchronize()
        ids = torch.tensor([1, 3], device="cuda:0") if on_device else [1, 3]
        done = move.copy(ids, ids, stream=0)
        done.synchronize()
        flip(host, 3, {"l": 2, "o": 0, "h": 1, "t": 9})
        kvbm.Transfer(host, src).copy([3], [3], stream=0).synchronize()
        done.proof._memory[1] ^= np.uint64(1)  # as if it had been so when the copy was verified
        where = "ids are on the device" if on_device else r"pair 1 \(block 3 → block 3\): layer 2, K, head 1, token 9"
        with pytest.raises(DigestError, match=where):
            done.synchronize()
