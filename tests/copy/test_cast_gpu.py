"""Copies that cast, on real GPUs: the matrix of test_cast.py by every route, bit for bit.

The bits are those of the oracle, and so those of the CPU.
"""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from test_cast import (
    ALIGNS,
    E2M1,
    E4M3,
    FORMATS,
    IDS,
    LATENTS,
    NAMES,
    OWNS,
    PARTS,
    PLAINS,
    REFUSED,
    WAYS,
    are_apart,
    kernels_of,
    matrix_of,
    plain_of,
    plains_of,
    random_case,
    scaled,
    sides_of,
    sizes_of,
)
from test_cast_report import reported
from test_cast_scales import ORDERS, scales

import casting
import kvbm
import oracle
from cast_oracle import PLAIN
from casting import Given, Own, Part, Side, Sizes, expected, planar, plane
from coordinates import in_case

pytestmark = pytest.mark.gpu

SIDES = {"d2d": ("cuda", "cuda"), "d2h": ("cuda", "pinned"), "h2d": ("pinned", "cuda")}
DIRECTIONS = sorted(SIDES)
STRATEGIES = ("direct", "staged", "aside", "auto")


def stream_of() -> Any:
    import torch

    return torch.cuda.Stream()


def ends(
    direction: str,
    layout: Any,
    plain: Any,
    sizes: Sizes,
    dtype: str,
    quantises: bool,
    blocks: tuple[int, int] = (5, 7),
    **rest: Any,
) -> tuple[Side, Side]:
    """A plain pool and a quantised one, as source and destination."""
    both: Any = [(plain, dtype), (layout, "bfloat16")]
    (a, a_type), (b, b_type) = both if quantises else both[::-1]
    here, there = SIDES[direction]
    return (
        Side(a, sizes, a_type, blocks[0], where=here, **rest),
        Side(b, sizes, b_type, blocks[1], dst=True, where=there, **rest),
    )


def check(
    src: Side, dst: Side, src_ids: Any, dst_ids: Any, scale: casting.Scales = None, what: Any = "", **rest: Any
) -> None:
    import torch

    torch.cuda.synchronize()
    casting.check(src, dst, expected(src, dst, src_ids, dst_ids, scale, **rest), what)


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_layout(name: str) -> None:
    """Device to device, by `convert`."""
    stream = stream_of()
    for case in matrix_of(name):
        with in_case(name, case):
            src, dst = sides_of(name, case, src={"where": "cuda"}, dst={"where": "cuda"})
            ids = IDS[case[5] % 4]
            kvbm.convert(src.given, dst.given, *ids, stream=stream, cast=casting.cast_of(case[4]))
            stream.synchronize()
            check(src, dst, *ids, case[4])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_route(direction: str, strategy: str) -> None:
    """To, from and on the GPU, by every strategy; slots of one block and of more; ids that are skipped."""
    stream = stream_of()
    here, there = SIDES[direction]
    for turn, name in enumerate(NAMES):
        for number, case in enumerate(matrix_of(name, spread=5)):
            if (number + turn) % 2 and name == "sglang/mxfp8":
                continue
            with in_case(name, case):
                src, dst = sides_of(name, case, src={"where": here}, dst={"where": there})
                slot = max(side.pool.resolved.section.packed().accesses[0].block[0] for side in (src, dst))
                chunk = (None, slot, 3 * slot)[(turn + number) % 3] if strategy == "staged" else None
                ids = [np.array(side) for side in IDS[case[5] % 4]]
                with kvbm.Transfer(
                    src.pool, dst.pool, strategy, chunk_bytes=chunk, cast=casting.cast_of(case[4])
                ) as move:
                    given = [side.astype((np.int32, np.int64)[number % 2]) for side in ids]
                    done = move.copy(*given, stream=stream)
                    for one in given:
                        one[:] = 0
                    done.synchronize()
                    check(src, dst, *ids, case[4], chunk)
                    assert strategy in ("auto", "aside", done.strategy)


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_every_code_by_every_kernel(dtype: str, scale: str | None) -> None:
    """All 65,536 codes of 16 bits in groups in order and in random order; all codes and scales of quantised values."""
    sizes = (1, 1, 1, 16, 128)
    used = set()
    for plain, order, given in itertools.product(PLAIN, ("t d", "d t"), (None, 0.0416)):
        if given is not None and (scale != E4M3 if scale else False):
            continue
        given = given if scale or given else 1.0
        for quantises, make in (
            (True, casting.every(plain)),
            (True, casting.shuffled),
            (True, casting.values),
            (False, None),
        ):
            both: Any = [
                (Own(f"[b] l o h {order}"), plain),
                (scaled(dtype, scale, sizes), "bfloat16" if scale else dtype),
            ]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src = Side(a, sizes, a_type, 32, make=make, seed=len(order), where="cuda")
            dst = Side(b, sizes, b_type, 32, dst=True, where="cuda")
            with in_case(plain, order, given, quantises):
                kvbm.convert(
                    src.pool, dst.pool, range(32), range(31, -1, -1), stream=stream_of(), cast=casting.cast_of(given)
                )
                check(src, dst, range(32), range(31, -1, -1), given)
            used |= kernels_of(src, dst, given)
    assert len(used) == 8, used  # contiguous: three plain formats in two directions; by elements: two directions


@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_to_plain(dtype: str) -> None:
    sizes = (1, 1, 1, 16, 128)
    for other, order, given in itertools.product(PLAIN, ("t d", "d t"), (1.0, 0.37, 3e-9, 2.0**100, 2.0**-100)):
        if other == dtype:
            continue
        for make in (casting.every(dtype), casting.values):
            src = Side(Own("[b] l o h t d"), sizes, dtype, 32, make=make, where="cuda")
            dst = Side(Own(f"[b] l o h {order}"), sizes, other, 32, dst=True, where="cuda")
            with in_case(other, order, given):
                kvbm.convert(src.pool, dst.pool, range(32), range(32), stream=stream_of(), cast=kvbm.Scale(given))
                check(src, dst, range(32), range(32), given)


@pytest.mark.parametrize("number", range(len(OWNS)), ids=[what for what, _, _ in OWNS])
def test_own_layouts(number: int) -> None:
    """Groups of every form: of one element, of 4096, over tokens, heads and layers, at pitches, K and V different."""
    what, layout, sizes = OWNS[number]
    packs = any(one.dtype == E2M1 for one in layout.drawn.planes)
    done, stream = 0, stream_of()
    for turn, (other, quantises) in enumerate(itertools.product(PLAINS, (True, False))):
        dtype = PLAIN[(turn + number) % 3]
        made = plain_of(other, sizes, dtype)
        if (
            made is None
            or are_apart(made, layout)
            or (packs and isinstance(made, Own) and "d/" in made.k and sizes[4] % 8)
        ):
            continue
        scale = 0.61 if turn % 4 == 1 and casting.multiplies(layout) else None
        with in_case(what, made, dtype, quantises, scale):
            how = {"align": ALIGNS[turn % 6], "how": WAYS[turn % 3], "seed": turn}
            src, dst = ends(DIRECTIONS[turn % 3], layout, made, sizes, dtype, quantises, **how)
            ids = IDS[turn % 4]
            try:
                move = kvbm.Transfer(src.pool, dst.pool, "direct", cast=casting.cast_of(scale))
            except kvbm.MissingKernelError as error:
                assert "4 loops inside a group" in str(error)
                continue
            move.copy(*ids, stream=stream).synchronize()
            check(src, dst, *ids, scale)
            done += 1
    assert done >= 2, done


def test_random_layouts() -> None:
    """The random layouts of test_cast.py, on the GPU, in every direction and by every strategy."""
    done, stream = 0, stream_of()
    for seed in range(400):
        layout, plain, dtype, sizes, given, quantises = random_case(seed)
        with in_case(seed):
            rng = np.random.default_rng(seed + 1)
            how = {"how": str(rng.choice(WAYS)), "align": int(rng.choice(ALIGNS)), "seed": seed}
            try:
                src, dst = ends(DIRECTIONS[seed % 3], layout, plain, sizes, dtype, quantises, (4, 5), **how)
            except oracle.IllegalError:
                continue
            ids = [3, 0, -1, 2], [1, 4, 0, 2]
            try:
                move = kvbm.Transfer(
                    src.pool, dst.pool, ("direct", "staged")[seed // 3 % 2], cast=casting.cast_of(given)
                )
            except kvbm.MissingKernelError:
                continue
            except kvbm.PlanError as error:
                assert any(reason in str(error) for reason in REFUSED), error
                continue
            move.copy(*ids, stream=stream).synchronize()
            check(src, dst, *ids, given)
            done += 1
    assert done > 200


@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_each_cast_sanitize(dtype: str, scale: str | None, quantises: bool) -> None:
    """Small, for compute-sanitizer: groups of one row and of several, long groups, elements one by one, narrow addresses."""
    stream = stream_of()
    for number, (nt, hd, order) in enumerate(((3, 64, "t d"), (2, 1024, "t d"), (4, 32, "d t"))):
        sizes = (2, 2, 3, nt, hd)
        layout, plain = scaled(dtype, scale, sizes), Own(f"[b] l o h {order}")
        both: Any = [(plain, PLAIN[number % 3]), (layout, "bfloat16" if scale else dtype)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        for direction, (here, there) in SIDES.items():
            src = Side(a, sizes, a_type, 5, where=here, align=ALIGNS[number])
            dst = Side(b, sizes, b_type, 5, dst=True, where=there, align=ALIGNS[number])
            given = None if scale else 0.5
            with in_case(direction, sizes, order):
                move = kvbm.Transfer(src.pool, dst.pool, "direct", cast=casting.cast_of(given))
                move.copy([4, -1, 2], [0, 1, 3], stream=stream).synchronize()
                check(src, dst, [4, -1, 2], [0, 1, 3], given)


# ---- scales of the caller --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scales_by_layer_and_for_k_and_v(direction: str, strategy: str) -> None:
    """With ids and scales in the kernel's parameters, and with ids outside; as many scales as fit."""
    stream, rng = stream_of(), np.random.default_rng(4)
    here, there = SIDES[direction]
    for number, (plain, quantised, quantises) in enumerate(
        itertools.product(ORDERS, ("hnd", ORDERS[8], ORDERS[10], "record/nvfp4_tensors"), (True, False))
    ):
        layers, blocks, dtype = ((3, 6, "int8"), (4, 200, E4M3), (256, 3, "float8_e5m2"))[number % 3]
        if quantised == "record/nvfp4_tensors":
            layers, dtype = min(layers, 20), "bfloat16"
        sizes, given = (layers, 2, 1, 2, 32), scales(rng, layers, number // 2)
        both: Any = [(plain, PLAIN[number % 3]), (quantised, dtype)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, blocks, seed=number, where=here)
        dst = Side(b, sizes, b_type, blocks, dst=True, where=there)
        ids = rng.permutation(blocks), rng.permutation(blocks)
        with in_case(casting.title(a), casting.title(b), sizes, given):
            kvbm.Transfer(src.pool, dst.pool, strategy, cast=given.cast).copy(*ids, stream=stream).synchronize()
            check(src, dst, *ids, given)


def test_scales_by_layer_in_graphs() -> None:
    """A graph has the scales of its capture, also of a `convert` whose plan is forgotten since."""
    import torch

    for quantised, dtype in (("hnd", E4M3), ("record/nvfp4_tensors", "bfloat16")):
        src = Side("nhd", (4, 2, 2, 4, 64), "bfloat16", 8, where="cuda")
        dst = Side(quantised, (4, 2, 2, 4, 64), dtype, 8, dst=True, where="cuda")
        given = scales(np.random.default_rng(1), 4, 1)
        graph = torch.cuda.CUDAGraph()
        kvbm.convert(src.pool, dst.pool, [0], [0], stream=stream_of(), cast=given.cast)
        torch.cuda.synchronize()
        dst.put(dst.before)
        with torch.cuda.graph(graph):
            kvbm.convert(src.pool, dst.pool, [3, 0, 7], [1, 2, 5], stream=torch.cuda.current_stream(), cast=given.cast)
        for k in range(50):
            kvbm.convert(src.pool, dst.pool, [0], [0], stream=stream_of(), cast=kvbm.Scale(k=1 + k / 100, v=[1, 2, 3, 4]))
        torch.cuda.synchronize()
        gc.collect()
        dst.put(dst.before)
        graph.replay()
        check(src, dst, [3, 0, 7], [1, 2, 5], given)


@pytest.mark.parametrize("quantised", ["hnd", "record/nvfp4_universal"])
def test_scales_by_layer_in_batches_in_which_a_thread_takes_several_groups(quantised: str) -> None:
    """The CPU has no such turns, and writes the same bits."""
    import torch

    sizes, ids = (16, 2, 4, 16, 128), (list(range(31, -1, -1)), [(7 * k + 5) % 32 for k in range(32)])
    dtype = E4M3 if quantised == "hnd" else "bfloat16"
    for plain, quantises in itertools.product(("universal", Own("[b] t h l o d"), Own("[b] l h t o d")), (True, False)):
        given = scales(np.random.default_rng(2), 16, 1)
        both: Any = [(plain, "bfloat16"), (quantised, dtype)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 32, where="cuda"), Side(b, sizes, b_type, 32, dst=True, where="cuda")
        kvbm.convert(src.pool, dst.pool, *ids, stream=stream_of(), cast=given.cast)
        one, other = Side(a, sizes, a_type, 32), Side(b, sizes, b_type, 32, dst=True)
        torch.cuda.synchronize()
        kvbm.convert(one.pool, other.pool, *ids, cast=given.cast)
        assert np.array_equal(dst.after, other.after), quantises


@pytest.mark.parametrize("direction", ["d2d", "d2h"])
def test_reports(direction: str) -> None:
    """The counts of the oracle, for ids on the host and on the GPU."""
    import torch

    here, there = SIDES[direction]
    for (name, dtype), plain in itertools.product(
        (("vllm/nvfp4", "bfloat16"), ("hnd", "int8"), ("record/mxfp8_tensors", "bfloat16"), ("hnd", E4M3)), PLAIN
    ):
        sizes, ids = (2, 2, 2, 4, 64), ([3, -1, 0], [1, 2, 4])
        given = Given((0.5, 0.01), 0.25) if name != "record/mxfp8_tensors" else None
        src, dst = Side("nhd", sizes, plain, 4, where=here), Side(name, sizes, dtype, 5, dst=True, where=there)
        stream, cast = stream_of(), casting.cast_of(given)
        kvbm.convert(src.pool, dst.pool, *ids, stream=stream, cast=cast)
        want = reported(src, dst, *ids, given)
        assert kvbm.cast_report(src.pool, dst.pool, *ids, cast=cast, stream=stream) == want, (name, plain)
        on_gpu_ids = [torch.tensor(side, device="cuda") for side in ids]
        torch.cuda.synchronize()
        assert kvbm.cast_report(src.pool, dst.pool, *on_gpu_ids, cast=cast, stream=stream) == want


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_parts(direction: str, strategy: str) -> None:
    """Layers, heads, tokens, K or V, and units."""
    sizes, stream = (3, 2, 3, 8, 64), stream_of()
    names = "vllm/per_token_head_fp8", "record/nvfp4_tensors", "vllm/nvfp4", "record/mxfp8_universal"
    here, there = SIDES[direction]
    for number, (name, (mine, theirs), quantises) in enumerate(itertools.product(names, PARTS, (True, False))):
        if name == "vllm/nvfp4" and (mine.tokens == 2 or any(axis == "t" for axis, _ in mine.chosen)):
            continue  # four tokens are interleaved
        both: Any = [(("nhd", "vllm/LBHNC")[number // 2 % 2], PLAIN[number % 3]), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        with in_case(name, mine, theirs, quantises):
            src = Side(a, sizes, a_type, 3, part=mine, where=here, align=ALIGNS[number % 6], seed=number)
            dst = Side(b, sizes, b_type, 4, dst=True, part=theirs, where=there, align=ALIGNS[number % 5])
            ids = ([2, -1, 0], [1, 2, 3]) if not mine.tokens else ([5, 0, -1, 2], [0, 7, 1, 6])
            kvbm.Transfer(src.given, dst.given, strategy, cast="amax").copy(*ids, stream=stream).synchronize()
            check(src, dst, *ids)


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layers(direction: str, strategy: str) -> None:
    stream = stream_of()
    here, there = SIDES[direction]
    for name, quantises in itertools.product(
        ("vllm/nvfp4", "vllm/fp8_ds_mla", "vllm/per_token_head_int8", "record/mxfp8_tensors"), (True, False)
    ):
        base = sizes_of(name)[0]
        both: Any = [(plains_of(name)[0], "bfloat16"), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, (4, *base[1:]), a_type, 4, where=here)
        dst = Side(b, (2, *base[1:]), b_type, 5, dst=True, where=there)
        layers = range(1, 3), range(2)
        with kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax") as move:
            move.copy([3, 0], [1, 4], layers=layers, stream=stream).synchronize()
            check(src, dst, [3, 0], [1, 4], layers=layers, what=(name, quantises))


# ---- streams, ids, graphs, threads -----------------------------------------------------------------------------------

FEW: tuple[tuple[str, Any, Sizes, str], ...] = (
    ("vllm/per_token_head_fp8", "nhd", (2, 2, 3, 4, 128), "bfloat16"),
    ("vllm/nvfp4", "vllm/flash_attn_nhd", (2, 2, 3, 4, 64), "float16"),
    ("vllm/fp8_ds_mla", LATENTS[0], (2, 1, 1, 4, 576), "bfloat16"),
    ("record/per_token_head_int8_planes", Own("[l o] b h d t"), (2, 2, 3, 4, 64), "float32"),
)


def on_gpu(strategy: str, direction: str) -> tuple[bool, bool]:
    """Which ids may lie on the GPU: the copy engine needs those of its side on the host."""
    if strategy == "direct":
        return True, True
    return False, direction == "h2d"


@pytest.mark.parametrize(("direction", "strategy"), [*((one, "direct") for one in DIRECTIONS), ("h2d", "staged")])
def test_ids_on_the_gpu(direction: str, strategy: str) -> None:
    """Ids that another operation writes before the copy, on its stream."""
    import torch

    for (name, plain, sizes, dtype), quantises in itertools.product(FEW, (True, False)):
        stream = stream_of()
        src, dst = ends(direction, name, plain, sizes, dtype, quantises, (30, 40))
        rng = np.random.default_rng(3)
        ids = rng.permutation(30)[:25], rng.permutation(40)[:25]
        ids[0][4], ids[1][9] = -1, -1
        real = [torch.tensor(side, device="cuda") for side in ids]
        held = [torch.full((25,), -1, dtype=torch.int64, device="cuda") for _ in ids]
        given = [
            one if there else side for one, side, there in zip(held, ids, on_gpu(strategy, direction), strict=True)
        ]
        move = kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for one, values in zip(held, real, strict=True):
                one.copy_(values)
        move.copy(*given, stream=stream).synchronize()
        check(src, dst, *ids, what=(name, quantises))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_streams(direction: str) -> None:
    """The copy waits for work of its stream, and work of another stream waits for the copy."""
    import torch

    for (name, plain, sizes, dtype), quantises in itertools.product(FEW, (True, False)):
        src, dst = ends(direction, name, plain, sizes, dtype, quantises, (20, 20))
        if src.where != "cuda":
            continue
        first, second = stream_of(), stream_of()
        real = src.memory.clone()
        src.memory.zero_()
        move = kvbm.Transfer(src.pool, dst.pool, "direct", cast="amax")
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)
            src.memory.copy_(real)
        done = move.copy(range(20), range(20), stream=first)
        done.wait(second)
        with torch.cuda.stream(second):
            after = dst.memory.clone() if dst.where == "cuda" else None
        torch.cuda.synchronize()
        want = expected(src, dst, range(20), range(20))
        casting.check(src, dst, want, name)
        assert after is None or np.array_equal(after.cpu().numpy(), want)


@pytest.mark.parametrize("ids_on", ["host", "gpu"])
@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_graphs(direction: str, strategy: str, ids_on: str) -> None:
    """A replay casts the source's current contents, with the ids' current values; nothing is copied during the capture."""
    import torch

    where = on_gpu(strategy, direction) if ids_on == "gpu" else (False, False)
    if ids_on == "gpu" and not any(where):
        pytest.skip("refused: the copy engine needs these ids on the host")
    for (name, plain, sizes, dtype), quantises in itertools.product(FEW, (True, False)):
        src, dst = ends(direction, name, plain, sizes, dtype, quantises, (20, 30))
        rng = np.random.default_rng(2)
        ids = rng.permutation(20), rng.permutation(30)[:20]
        given: Any = [
            torch.tensor(side, device="cuda") if there else side.copy() for side, there in zip(ids, where, strict=True)
        ]
        move = kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax")
        move.copy([0], [0], stream=stream_of()).synchronize()  # what is loaded lazily is loaded here
        dst.put(dst.before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            move.copy(*given, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        assert dst.untouched, "the capture has copied"
        for turn in (1, 2):
            src.put(src._filled(turn, None))
            dst.put(oracle.noise(dst.before.size, turn))
            if any(where):
                fresh = rng.permutation(20), rng.permutation(30)[:20]
                fresh[where[0] ^ 1][turn] = -1
                ids = tuple(new if there else old for new, old, there in zip(fresh, ids, where, strict=True))
                for one, new, there in zip(given, ids, where, strict=True):
                    if there:
                        one.copy_(torch.from_numpy(new))
                torch.cuda.synchronize()
            graph.replay()
            check(src, dst, *ids, what=(name, quantises, turn))


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_threads_with_one_transfer(direction: str, strategy: str) -> None:
    for (name, plain, sizes, dtype), quantises in itertools.product(FEW, (True, False)):
        src, dst = ends(direction, name, plain, sizes, dtype, quantises, (40, 40))
        move = kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax")
        start, errors = threading.Barrier(2), []

        def copy(mine: list[int], start: Any = start, move: Any = move, errors: Any = errors) -> None:
            try:
                stream = stream_of()
                start.wait()
                for _ in range(10):
                    move.copy(mine, mine, stream=stream).synchronize()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=copy, args=(list(range(k, 40, 2)),)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        check(src, dst, range(40), range(40), what=(name, quantises))


@pytest.mark.parametrize("direction", ["d2d", "d2h"])
def test_many_blocks(direction: str) -> None:
    """More pairs than fit a kernel's parameters, and enough work that threads take several groups."""
    for (name, plain, sizes, dtype), quantises in itertools.product(FEW[:2], (True, False)):
        src, dst = ends(direction, name, plain, sizes, dtype, quantises, (600, 610))
        rng = np.random.default_rng(1)
        ids = rng.permutation(600), rng.permutation(610)[:600]
        kvbm.Transfer(src.pool, dst.pool, cast="amax").copy(*ids, stream=stream_of()).synchronize()
        check(src, dst, *ids, what=(name, quantises))


# ---- digests, and what the CPU writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "staged", "auto"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_digests_are_those_of_the_quantised_blocks(direction: str, strategy: str) -> None:
    import torch

    for (name, plain, sizes, dtype), quantises, skipped in itertools.product(FEW, (True, False), (-1, 2)):
        src, dst = ends(direction, name, plain, sizes, dtype, quantises)
        found = torch.ones(3, dtype=torch.int64, device="cuda")
        slot = max(side.pool.resolved.section.packed().accesses[0].block[0] for side in (src, dst))
        chunk = 2 * slot if strategy == "staged" else None  # without skipped pairs digests are taken in the slots
        move = kvbm.Transfer(src.pool, dst.pool, strategy, chunk_bytes=chunk, cast="amax")
        torch.cuda.synchronize()
        with in_case(name, quantises, skipped):
            mine, its, tokens = [3, skipped, 0], [1, 0, 4], [8, 4, 0]
            move.copy(mine, its, digests=found, tokens=tokens, stream=stream_of()).synchronize()
            check(src, dst, mine, its)
            side, ids = (dst, its) if quantises else (src, mine)
            ids = [one if other >= 0 else -1 for one, other in zip(ids, mine, strict=True)]
            on_host = Side(side.meant, side.sizes, side.dtype, side.blocks)
            on_host.put(side.after)
            assert found.cpu().numpy().view(np.uint64).tolist() == on_host.pool.digest(ids, tokens=tokens).tolist()


@pytest.mark.parametrize("most", [None, 1])
def test_digests_in_the_pass_of_the_cast(most: int | None) -> None:
    """All forms of cells, with one turn of the threads and with several."""
    import torch

    for (layout, order, sizes, scale), quantises in itertools.product(casting.digested(), (True, False)):
        small = "bfloat16" if isinstance(layout, casting.Planar) else E4M3
        both: Any = [(Own(order), "bfloat16"), (layout, small)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 4, where="cuda"), Side(b, sizes, b_type, 4, dst=True, where="cuda")
        ids, found = ([3, -1, 0], [1, 2, 3]), torch.ones(3, dtype=torch.int64, device="cuda")
        move = kvbm.Transfer(src.pool, dst.pool, max_sms=most, cast=casting.cast_of(scale))
        torch.cuda.synchronize()
        with in_case(sizes, order, quantises):
            move.copy(*ids, digests=found, tokens=[4, 8, 0], stream=stream_of()).synchronize()
            check(src, dst, *ids, scale)
            side, mine = (dst, ids[1]) if quantises else (src, ids[0])
            on_host = Side(side.meant, sizes, side.dtype, 4)
            on_host.put(side.after)
            wanted = on_host.pool.digest(mine, tokens=[4, 8, 0])
            wanted[1] = 0
            assert found.cpu().numpy().view(np.uint64).tolist() == wanted.tolist()
            assert "Digests are fused into direct copies (one launch of sum_cast_" in move.explain(3)


def test_the_cpu_writes_the_same_bits() -> None:
    for (name, plain, sizes, dtype), quantises in itertools.product(FEW, (True, False)):
        src, dst = ends("d2d", name, plain, sizes, dtype, quantises)
        scale = 0.7 if casting.multiplies(name) else None
        kvbm.convert(src.pool, dst.pool, [0, 1, 2], [4, 2, 0], stream=stream_of(), cast=casting.cast_of(scale))
        both: Any = [(plain, dtype), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        one, other = Side(a, sizes, a_type, 5), Side(b, sizes, b_type, 7, dst=True)
        kvbm.convert(one.pool, other.pool, [0, 1, 2], [4, 2, 0], cast=casting.cast_of(scale))
        check(src, dst, [0, 1, 2], [4, 2, 0], scale)
        assert np.array_equal(dst.after, other.after), (name, quantises)


@pytest.mark.parametrize("name", ["record/per_token_head_fp8_planes", "record/mxfp8_universal", "record/nvfp4_universal"])
def test_batches_in_which_a_thread_takes_several_groups(name: str) -> None:
    """The CPU has no such turns, and writes the same bits."""
    import torch

    sizes, ids = (16, 2, 8, 16, 128), (list(range(31, -1, -1)), [(7 * k + 5) % 32 for k in range(32)])
    for quantises in (True, False):
        src, dst = ends("d2d", name, "nhd", sizes, "bfloat16", quantises, blocks=(32, 32))
        kvbm.convert(src.pool, dst.pool, *ids, stream=stream_of(), cast="amax")
        both: Any = [("nhd", "bfloat16"), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        one, other = Side(a, sizes, a_type, 32), Side(b, sizes, b_type, 32, dst=True)
        torch.cuda.synchronize()
        kvbm.convert(one.pool, other.pool, *ids, cast="amax")
        assert np.array_equal(dst.after, other.after), quantises


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_few_multiprocessors(direction: str) -> None:
    """A limit of multiprocessors, with fewer CTAs than jobs: direct, and in the kernels of a staged copy."""
    stream = stream_of()
    for (name, plain, sizes, dtype), quantises, most in itertools.product(FEW, (True, False), (1, 3)):
        for strategy in ("direct", "staged")[: 1 if direction == "d2d" else 2]:
            src, dst = ends(direction, name, plain, sizes, dtype, quantises, (60, 60))
            ids = np.random.default_rng(most).permutation(60), np.random.default_rng(7).permutation(60)
            with kvbm.Transfer(src.pool, dst.pool, strategy, most, cast="amax") as move:
                move.copy(*ids, stream=stream).synchronize()
                check(src, dst, *ids, what=(name, quantises, most, strategy))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_options_that_are_refused(direction: str) -> None:
    src, dst = ends(direction, "vllm/per_token_head_fp8", "nhd", (1, 2, 1, 4, 64), "bfloat16", True)
    for given, words in (
        ({"strategy": "engine"}, r"strategy: 'engine' moves bytes as they are, and cast changes them; leave"),
        ({"verify": True}, r"verify: .*cast changes them; take digests="),
    ):
        with pytest.raises(kvbm.BindError, match=words):
            kvbm.Transfer(src.pool, dst.pool, cast="amax", **given)
    assert dst.untouched


def test_units_of_larger_blocks() -> None:
    for direction, quantises in itertools.product(DIRECTIONS, (True, False)):
        here, there = SIDES[direction]
        both: Any = [("nhd", "bfloat16"), ("record/nvfp4_tensors", "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, (2, 2, 3, 8, 32), a_type, 3, part=Part(tokens=4), where=here)
        dst = Side(b, (2, 2, 3, 4, 32), b_type, 7, dst=True, where=there)
        kvbm.Transfer(src.given, dst.given, cast="amax").copy(
            [5, 0, 3, 2], [1, 6, 2, 0], stream=stream_of()
        ).synchronize()
        check(src, dst, [5, 0, 3, 2], [1, 6, 2, 0], what=(direction, quantises))


def test_large_groups() -> None:
    """Groups of more items than the threads of a warp take at once, and of a number that is no power of two."""
    for width, tokens in ((576, 1), (576, 7), (1000, 3), (24, 5), (72, 3), (8, 33)):
        layout = planar(
            "[b] l o <>", plane("data", E4M3, "t h d", "d", width), plane("scale", "float32", "t", shared="h")
        )
        for order, quantises in itertools.product(("t h d", "h d t", "d h t"), (True, False)):
            src, dst = ends("d2d", layout, Own(f"[b l] o {order}"), (1, 2, 3, tokens, width), "bfloat16", quantises)
            with in_case(width, tokens, order, quantises):
                kvbm.convert(src.pool, dst.pool, [0, 4], [6, 1], stream=stream_of(), cast="amax")
                check(src, dst, [0, 4], [6, 1])
