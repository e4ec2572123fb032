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
from kvbm import _core

pytestmark = [pytest.mark.slow, pytest.mark.sanitize]

TOOL = Path(__file__).resolve().parents[2] / "tools" / "torture.py"


@pytest.fixture(scope="module")
def emulated(fake_gpu: processes.FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> partial[str]:
    """Runs programs on the fake driver, with the kernels' own code."""
    names = [name for name in _core.kernel_names() if name != "kvbm_copy_pairs"]
    folder = processes.made_once(tmp_path_factory, "kernels", partial(emulation.compile_kernels, names=names))
    return partial(fake_gpu, FAKE_KERNELS=":".join(map(str, sorted(folder.glob("*.so")))))


PROGRAMS: list[tuple[str, tuple[object, ...]]] = [
    ("nests.each", ()),
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
    ("casts.digests", ("d2d", "direct")),
    ("casts.digests", ("h2d", "staged")),
    ("casts.digests", ("d2h", "staged")),
]


@pytest.mark.parametrize(("program", "arguments"), PROGRAMS, ids=["-".join(map(str, (p, *a))) for p, a in PROGRAMS])
def test_programs(emulated: partial[str], program: str, arguments: tuple[object, ...]) -> None:
    emulated(program, *arguments, FAKE_DEVICES="2")


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


#: Kernels, what of their code is replaced, by what, and what then fails.
BROKEN = [
    ("rows_o1_i3_w16", "    Mine::sync();\n    const bool copies", "    const bool copies", "bytes differ"),
    ("rows_o1_i3_w16", "index + u * width < last) load(", "index + u * width + 1 < last) load(", "bytes differ"),
    ("rows_o1_i3_w8", "load(v[u], at.src + from[u])", "load(v[u], at.src + from[u] + 4)", "multiple of its word"),
    ("tile_o1_r1_e2_w16", "words[slot[u] + j * tb]", "words[slot[u] + j]", "bytes differ"),
    (
        "tile_o1_r1_e2_w16",
        "    Mine::sync();\n\n    const uint32_t stores",
        "    const uint32_t stores",
        "bytes differ",
    ),
    ("sum_rows_o1_i3_w16", "distance = width / 2; distance;", "distance = width / 2; distance > 1;", "digests"),
    ("sum_rows_o1_i3_w16", "    wait_for_clear();\n", "", "digests"),
    ("sum_rows_o1_i3_w16", "    if (!SUMS && !copies) return;", "    if (!copies) return;", "never comes"),
]


@pytest.mark.parametrize(("kernel", "code", "instead", "said"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_broken_is_seen(
    fake_gpu: processes.FakeDriver, tmp_path: Path, kernel: str, code: str, instead: str, said: str
) -> None:
    found = 0

    def broken(text: str) -> str:
        nonlocal found
        found += text.count(code)
        return text.replace(code, instead)

    libraries = emulation.compile_kernels(tmp_path, [kernel], broken)
    assert found
    with pytest.raises(AssertionError, match=re.escape(said)):
        fake_gpu("nests.each", (kernel,), FAKE_KERNELS=libraries)


#: What of the device code of casts is replaced, by what; all of `programs.casts.few` then differs.
BROKEN_CASTS = [
    ("other = 1; other < width", "other = 2; other < width"),
    ("other = 2; other < width", "other = 4; other < width"),
    ("i += mine.width) cast_item(p, of, at, i, factor);", "i += 2 * mine.width) cast_item(p, of, at, i, factor);"),
    ("mine.lane < 2 && (odd", "mine.lane < 1 && (odd"),
    ("factor[0] = odd ? other : own", "factor[0] = own"),
    ("if (has_item[u]) store_item(p, place[u].dst, cast(", "if (has_item[u] && mine.lane) store_item(p, place[u].dst, cast("),
    ("p.inner[kGroup].extent.n % 2 ?", "false ?"),
    ("has_group[u] = group + u < tile.last", "has_group[u] = true"),
    ("min((tile + 1) * p.tile_words, p.words)", "p.words - 1"),
    ("if (code < FROM::kInfinite) most = larger(most, code);", "most = larger(most, code);"),
    ("larger(both & 0xffff, both >> 16)", "both & 0xffff"),
    ("second * uint32_t(p.inner[1].dst)", "0"),
    ("(size >> kShift & 1)", "1"),
    ("bits_of(scale) < kLeastNormal ? kLeastNormal : bits_of(scale)", "bits_of(scale)"),
    ("return size > kInfinity ? all<U>(NOT_A_NUMBER) : code;", "return code;"),
    ("normal < LARGEST ? normal : all<U>(LARGEST)", "normal"),
    ("bits_of(float_of(size) + float_of(kUnit)) - kUnit", "all<U>(0u)"),
    ("4194307.0f", "4194306.0f"),
    ("whole < 6.0f ? whole : 6.0f", "whole"),
    ("size > 1.0f ? size : 1.0f", "size"),
    ("0x08080808", "0"),
    ("0xc0804000", "0xc0800000"),
    ("four << 4, 0x1504", "four << 4, 0x5140"),
    ("12582912.0f));  // 1.5 * 2^23", "12582913.0f));"),
    ("codes[i] ^ 0x80808080", "codes[i]"),
]


@pytest.mark.parametrize(("code", "instead"), BROKEN_CASTS, ids=range(len(BROKEN_CASTS)))
def test_broken_casts_are_seen(fake_gpu: processes.FakeDriver, tmp_path: Path, code: str, instead: str) -> None:
    found = 0

    def broken(text: str) -> str:
        nonlocal found
        found += text.count(code)
        return text.replace(code, instead)

    formats = "bf16_e4m3_f32", "e4m3_bf16_f32", "bf16_e2m1_e4m3", "e2m1_bf16_e4m3", "bf16_i8_f32", "i8_bf16_f32", "plain", "any"
    casts = tuple(f"cast_{each}_" for each in formats)
    names = [name for name in _core.kernel_names() if name.startswith(casts)]
    libraries = emulation.compile_kernels(tmp_path, names, broken)
    assert found
    with pytest.raises(AssertionError, match="bytes differ"):
        fake_gpu("casts.few", FAKE_KERNELS=libraries)
