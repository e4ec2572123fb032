"""The kernels' device code, run on the host (emulation.py): correct without a GPU, and within its arguments' memory.

`make sanitize` runs it under AddressSanitizer and UndefinedBehaviorSanitizer.  Only a GPU can test nvcc's machine code and races
between threads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import emulation
import processes
from few import few
from kvbm import _core

pytestmark = pytest.mark.slow

SANITIZED = "KVBM_SANITIZE" in os.environ
KERNELS = [name for name in _core.kernel_names() if name != "kvbm_copy_pairs"]
if SANITIZED:  # each takes a second to compile, and kernels that differ in their numbers of loops run the same lines
    KERNELS = emulation.shallowest_and_deepest(KERNELS)

TOOL = Path(__file__).resolve().parents[2] / "tools" / "torture.py"


@pytest.fixture(scope="module")
def emulated(fake_gpu: processes.FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> partial[str]:
    """Runs programs on the fake driver, with the kernels' own code."""
    folder = processes.made_once(tmp_path_factory, "kernels", partial(emulation.compile_kernels, names=KERNELS))
    knobs = {"FAKE_KERNELS": ":".join(map(str, sorted(folder.glob("*.so"))))}
    return partial(fake_gpu, **knobs, **({"FAKE_KERNELS_ARE_SOME": "1"} if SANITIZED else {}))


PROGRAMS: list[tuple[str, tuple[object, ...]]] = [
    ("nests.each", (tuple(KERNELS), (True,)) if SANITIZED else ()),  # long nests take minutes there
    ("nests.each_of_planes_is_launched", ()),
    ("launches.launches_move_what_the_host_moves", ("hnd", "vllm/paged_attn_v0")),
    ("launches.lists_of_tensors", ()),
    ("launches.backends", (None, "launches")),
    ("stacked.transposes", ()),
    ("stacked.layers", ()),
    ("planes.every_strategy", ("d2d", "direct")),
    ("planes.every_strategy", ("h2d", "staged")),
    ("sections.every_strategy", ("d2d", "direct")),
    ("sections.ids_on_the_gpu", ("d2d", "direct")),
    ("sections.kernels_of_planes", ()),
    ("reshards.every_byte", (30_000, 20, "device")),
    ("digests.every_strategy", ("d2d", "direct")),
    ("digests.every_strategy", ("d2h", "staged")),
    ("digests.pools", ()),
    ("digests.turned", ()),
    ("digests.rows", ("d2d", "direct", 1)),
    ("digests.rows", ("d2h", "staged", 1)),
    ("digests.all_planes", ()),
    ("digests.ids_on_the_gpu", ("d2d", "direct")),
    ("digests.graphs", ("d2d", "direct")),
    ("digests.verified", ("h2d", "staged")),
    ("casts.codes", (3,)),
    ("casts.shipped", ("d2d", "direct", 9)),
    ("casts.shipped", ("d2h", "direct", 15)),
    ("casts.shipped", ("d2h", "staged", 15)),
    ("casts.shipped", ("h2d", "staged", 15)),
    ("casts.owns", ("d2d", "direct")),
    ("casts.owns", ("h2d", "staged")),
    ("casts.parts", ("d2h", "staged")),
    ("casts.parts", ("h2d", "direct")),
    ("casts.scales", ("d2d", "direct")),
    ("casts.scales", ("h2d", "staged")),
    ("casts.scales_of_parts", ("d2d", "direct")),
    ("casts.scales_of_parts", ("d2h", "staged")),
    ("casts.scales_of_parts", ("h2d", "staged")),
    ("casts.scales_of_turns", ()),
    ("casts.reports", ("d2d",)),
    ("casts.reports", ("d2h",)),
    ("casts.random", (0, 60)),
    ("casts.ids_on_the_gpu", ("d2d", "direct")),
    ("casts.ids_on_the_gpu", ("d2h", "direct")),
    ("casts.fused_digests", (1,)),
    ("casts.fused_digests", (None,)),
    ("casts.random_digests", (0, 60)),
    ("casts.digests", ("d2d", "direct")),
    ("casts.digests", ("h2d", "staged")),
    ("casts.digests", ("d2h", "staged")),
    ("reshards.casts_on_few", (1500, 1)),
    ("reshards.out_of_another_gpu", (700, 16)),
]


#: Programs that take two seconds of processor time or more; `MUTANTS` have a part of some.
LONG = {"casts.fused_digests", "casts.random_digests", "digests.rows", "reshards.casts_on_few", "reshards.out_of_another_gpu"}


def first_or_full(number: int) -> list[pytest.MarkDecorator]:
    """Each program runs once under sanitizers, which are part of .ci/run; without them, short ones; in all forms in `make full`."""
    program = PROGRAMS[number][0]
    is_first = program not in [one for one, _ in PROGRAMS[:number]]
    return [] if is_first and (program not in LONG or SANITIZED) else [pytest.mark.full]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(program, arguments, id="-".join(map(str, (program, *arguments)))[:60], marks=first_or_full(number))
        for number, (program, arguments) in enumerate(PROGRAMS)
    ],
)
def test_programs(emulated: partial[str], program: str, arguments: tuple[object, ...]) -> None:
    emulated(program, *arguments, FAKE_DEVICES="2")


@pytest.mark.sanitize
def test_rounds(emulated: partial[str], tmp_path: Path) -> None:
    """Copies and digests of the torture campaign: random layouts, shapes, addresses, strategies, orders of streams."""
    command = [sys.executable, TOOL, "--device", "fake", "--kind", "copies", "--rounds", "30", "--seed", "7"]
    done = subprocess.run(
        [*command, "--state", tmp_path / "state.json"],
        env={**os.environ, **emulated.keywords},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and "30 right" in done.stdout, done.stdout + done.stderr


# Not under sanitizers: what is broken there says nothing of the code that is shipped.

ROWS, NARROW, TILE, SUM_ROWS = "rows_o1_i3_w16", "rows_o1_i3_w8", "tile_o1_r1_e2_w16", "sum_rows_o1_i3_w16"
FEW_ROWS = "few_rows_o4_i8_w16"
TO_FP8, TO_FP4, TO_INT8 = (f"cast_bf16_{name}_o4_i6_e8" for name in ("e4m3_f32", "e2m1_e4m3", "i8_f32"))
FROM_FP8, FROM_FP4, FROM_INT8 = (f"cast_{name}_o4_i6_e8" for name in ("e4m3_bf16_f32", "e2m1_bf16_e4m3", "i8_bf16_f32"))
TO_ANY = "cast_any_plain_o4_i8_e1"

#: Kernels, what of their code is replaced, by what, and what `programs.nests.each` then says of them.
BROKEN = [
    (ROWS, "    __syncthreads();\n    const bool copies", "    const bool copies", "bytes differ"),
    (ROWS, "index + u * width < last) load(", "index + u * width + 1 < last) load(", "bytes differ"),
    (NARROW, "load(v[u], at.src + from[u])", "load(v[u], at.src + from[u] + 4)", "multiple of its word"),
    (TILE, "words[slot[u] + j * tb]", "words[slot[u] + j]", "bytes differ"),
    (TILE, "    Mine::sync();\n\n    const uint32_t stores", "    const uint32_t stores", "bytes differ"),
    (SUM_ROWS, "distance = width / 2; distance;", "distance = width / 2; distance > 1;", "digests"),
    (SUM_ROWS, "  wait_for_clear();\n", "", "digests"),
    (SUM_ROWS, "    if (!SUMS && !copies) return;", "    if (!copies) return;", "never comes"),
    (FEW_ROWS, "      wait_for_fetches<kFewAhead - 1>();\n", "", "does not wait"),
    (FEW_ROWS, "wait_for_fetches<kFewAhead - 1>", "wait_for_fetches<kFewAhead>", "does not wait"),
    (FEW_ROWS, "inside * width + lane) >> log", "inside * width) >> log", "bytes differ"),
    (FEW_ROWS, "start_key = rest *", "start_key = 0 *", "digests"),
]

#: The same of kernels that cast, and `programs.casts.few`.
BROKEN_CASTS = [
    (TO_FP8, "other = 1; other < width", "other = 2; other < width"),
    (TO_FP8, "other = 1; other < width", "other = 1; 2 * other < width"),
    (TO_ANY, "i += mine.width) cast_item(p, of, at, i, factor);", "i += 2 * mine.width) cast_item(p, of, at, i, factor);"),
    (TO_FP8, "mine.lane < 2 && (odd", "mine.lane < 1 && (odd"),
    (TO_FP8, "factor[1] = odd ? own : other", "factor[1] = own"),
    (TO_FP8, "has[u] = has_group[u] && mine.lane <", "has[u] = has_group[u] && mine.lane + 1 <"),
    (TO_FP8, "if (p.inner[kGroup].extent.n % 2) {", "if (false) {"),
    (TO_FP8, "item = mine.lane + p.tile[1].n", "item = mine.lane + 1"),
    (TO_FP8, "if (item >= items_of(p)) item = mine.lane;", ""),
    (TO_FP8, "? items_of(p) : 0", "? p.tile[1].n : 0"),
    (FROM_FP8, "to = place[u].dst + k * items.second_dst", "to = place[u].dst"),
    (FROM_FP4, "p.inner[0].extent.n == 2 && p.inner[kGroup].extent.n % 2 == 0", "p.inner[0].extent.n == 2"),
    (TO_FP4, "has_group[u] = group + u < tile.last", "has_group[u] = true"),
    (TO_ANY, "min((tile + 1) * p.tile_words, p.words)", "p.words - 1"),
    (TO_FP8, "if (code < FROM::kInfinite) most = larger(most, code);", "most = larger(most, code);"),
    (TO_FP8, "most[1] = of_two >> 16", "most[1] = of_two & 0xffff"),
    (TO_ANY, "second * uint32_t(p.inner[1].dst)", "0"),
    (TO_FP8, "(size >> kShift & 1)", "1"),
    (TO_FP8, "bits_of(scale) < kLeastNormal ? kLeastNormal : bits_of(scale)", "bits_of(scale)"),
    (TO_FP8, "return size > kInfinity ? all<U>(NOT_A_NUMBER) : code;", "return code;"),
    (TO_FP4, "normal < LARGEST ? normal : all<U>(LARGEST)", "normal"),
    (TO_FP8, "bits_of(float_of(size) + float_of(kUnit)) - kUnit", "all<U>(0u)"),
    (TO_FP4, "limited_sum(half, -2.0f)", "half - 2.0f"),
    (TO_FP4, "limited_sum(half, -1.0f)", "limited_sum(half, -1.5f)"),
    (TO_FP4, "limited_product(size, by), 4.0f", "half, 4.0f"),
    (TO_FP4, "0x7351", "0x7531"),
    (TO_FP4, "(codes) & 0x88888888", "(codes) & 0"),
    (TO_FP4, "drop_signs_of_nan(codes[i / 2][i % 2]);", "static_cast<void>(i);"),
    (FROM_FP4, "1.5f * by", "by"),
    (FROM_FP4, "four << 4, 0x1504", "four << 4, 0x5140"),
    (FROM_FP4, "(odd == k ? own : other)", "own"),
    (TO_INT8, "12582912.0f));  // 1.5 * 2^23", "12582913.0f));"),
    (FROM_INT8, "codes[i] ^ 0x80808080", "codes[i]"),
]

#: The same of kernels that also digest, after the layouts of their format for `programs.casts.fused_digests`, and what it says.
OF_FP8, OF_MXFP8, OF_FP4, OF_MXFP4 = range(8), range(16, 26), range(26, 38), range(38, 46)
DIGESTS, BYTES = "found == wanted", "bytes differ"
BROKEN_SUMS = [
    (OF_MXFP8, "bf16_e4m3_e8m0", "number_ % 2 ? 0x3715", "number_ % 2 ? 0x6240", DIGESTS),
    (OF_MXFP8, "bf16_e4m3_e8m0", "row % 2 ? 0x3276", "row % 2 ? 0x5410", DIGESTS),
    (OF_MXFP8, "bf16_e4m3_e8m0", "from_lane(cell.x[0], 2 * width_)", "from_lane(cell.x[0], width_)", DIGESTS),
    (OF_MXFP8, "bf16_e4m3_e8m0", "from_lane(cell.x[1], 4 * width_)", "from_lane(cell.x[1], 2 * width_)", DIGESTS),
    (OF_MXFP8, "bf16_e4m3_e8m0", "turn + 1 < turns_ && !is_last", "turn + 1 < turns_", DIGESTS),
    (OF_MXFP8, "f16_e4m3_e8m0", "turns_ = count_ < 4 ? count_ : 4", "turns_ = 4", DIGESTS),
    (OF_FP8, "bf16_e4m3_f32", "if (p.inner[kGroup].extent.n % 2) {", "if (false) {", BYTES),
    (OF_FP8, "bf16_e4m3_f32", "factor[0] = odd ? other : own", "factor[0] = own", BYTES),
    (OF_FP8, "bf16_e4m3_f32", "if (has[1]) sum +=", "sum +=", DIGESTS),
    (OF_FP8, "bf16_e4m3_f32", "mine.width * mine.rows, sums", "32, sums", DIGESTS),
    (OF_FP8, "e4m3_bf16_f32", "second = odd ? second : got", "second = odd ? got : second", BYTES),
    (OF_FP8, "e4m3_bf16_f32", "stored_item(mine) + 2 * k <", "stored_item(mine) <", BYTES),
    (OF_FP4, "bf16_e2m1_e4m3", "number_ % 2 ? 0x3276 : 0x5410", "0x5410", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "second ? got : mine", "mine", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "rows_ > 4", "rows_ > 8", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "number_ < 4)", "true)", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "turn < 2 ? two : 0", "two", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "turn + 1 < turns_ && !is_last", "turn + 1 < turns_", DIGESTS),
    (OF_FP4, "bf16_e2m1_e4m3", "odd ? got : words[i]", "words[i]", DIGESTS),
    (OF_FP4, "e2m1_bf16_e4m3", "(odd == k ? own : other)", "own", BYTES),
    (OF_FP4, "bf16_e2m1_e4m3", "sums.take()", "0", DIGESTS),
    (OF_MXFP4, "bf16_e2m1_e8m0", "if (is_single_) {", "if (false) {", DIGESTS),
]

MUTANTS = [
    *(("nests.each", ((kernel,),), kernel, *rest) for kernel, *rest in BROKEN),
    *(("casts.few", (), *each, "bytes differ") for each in BROKEN_CASTS),
    *(
        ("casts.fused_digests", (1, "fake", some), f"sum_cast_{values}_o4_i6_e8", *each)
        for some, values, *each in BROKEN_SUMS
    ),
]


@pytest.fixture(scope="module")
def mutants(emulated: partial[str], tmp_path_factory: pytest.TempPathFactory) -> partial[str]:
    """As `emulated`, with the kernels of FAKE_MUTANT broken: all mutants are in one library, which is compiled once."""
    broken = [(kernel, code, instead) for *_, kernel, code, instead, _ in MUTANTS]
    folder = processes.made_once(tmp_path_factory, "mutants", partial(emulation.compile_mutants, mutants=broken))
    return partial(emulated.func, FAKE_KERNELS=f"{folder / 'libmutants.so'}:{emulated.keywords['FAKE_KERNELS']}")


def test_nothing_is_broken_without_a_mutant(mutants: partial[str]) -> None:
    mutants("nests.each", (ROWS, NARROW, TILE, SUM_ROWS), FAKE_MUTANT="-1")
    mutants("casts.few", FAKE_MUTANT="-1")
    mutants("casts.fused_digests", 1, "fake", OF_FP4[:2], FAKE_MUTANT="-1")
    mutants("casts.fused_digests", 1, "fake", OF_MXFP8[:2], FAKE_MUTANT="-1")


@pytest.mark.parametrize("number", few(range(len(MUTANTS)), 15))
def test_what_is_broken_is_seen(mutants: partial[str], number: int) -> None:
    program, arguments, *_, said = MUTANTS[number]
    with pytest.raises(AssertionError, match=re.escape(said)):
        mutants(program, *arguments, FAKE_MUTANT=str(number))
