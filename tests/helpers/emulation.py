"""The kernels' device code, compiled for the host: emulated_gpu.h emulates the GPU, and the fake driver launches it (FAKE_KERNELS).

The source is the one that nvcc compiles, except that functions in PTX are replaced by the same functions in C++.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fatbins
import processes
from kvbm.compile import codegen
from kvbm.system.cache import replacing

CUDA = processes.HERE.parent / "cuda"  #: copy.cu is in no package.
#: Libraries that the kernels are dealt to at most, and kernels that one compiles in about the time of the headers alone.
FILES, SOME = 8, 10

#: Functions, by what stands before their bodies, and their bodies instead of PTX.
_INSTEAD = (
    (r"\bevict_last_policy\(\)", "return 0;"),
    (r"\bload(_half)?\(\S+& v, const char\* p\)", "emulated::load(v, p);"),
    (r"\bstore\(char\* p, (const )?\S+ v\)", "emulated::store(p, v);"),
    (r"\bfetch\(char\* shared, const char\* src\)", "emulated::fetch<BYTES>(shared, src);"),
    (r"\bclose_fetches\(\)", "emulated::close_fetches();"),
    (r"\bwait_for_fetches\(\)", "emulated::wait_for_fetches(GROUPS);"),
    (r"\bwait_for_clear\(\)", "emulated::wait_for_clear();"),
    (r"\blet_next_start\(\)", ""),
    (r"\bsync\(\)", "emulated::wait_at(TEAMS == 1 ? 0 : 1 + number(), TEAMS == 1 ? 0 : THREADS);"),
)

#: In front of the kernels: each becomes a function that the fake driver calls.
_HEAD = r"""#include "emulated_gpu.h"
#include "permute.cuh"
using namespace kvbm;
#undef KVBM_KERNEL
#define KVBM_KERNEL(name, ...)                                                                               \
  extern "C" void emulated_##name(const kvbm_args* args, uint32_t ctas, uint32_t threads, uint32_t shared) { \
    const auto run = [](const kvbm_args& a, char* bytes) { Kernel<__VA_ARGS__>::run(a, bytes); };            \
    emulated::launch<kvbm_args>(run, args, ctas, threads, shared);                                           \
  }
"""
_COPY_PAIRS = """#include "copy.cu"
extern "C" void emulated_kvbm_copy_pairs(const kvbm_pairs* args, uint32_t ctas, uint32_t threads, uint32_t shared) {
  emulated::launch<kvbm_pairs>([](const kvbm_pairs& a, char*) { kvbm_copy_pairs(a); }, args, ctas, threads, shared);
}
struct Clear {
  uint64_t digests, count;
};
extern "C" void emulated_kvbm_clear(const Clear* args, uint32_t ctas, uint32_t threads, uint32_t shared) {
  const auto run = [](const Clear& a, char*) { kvbm_clear(reinterpret_cast<uint64_t*>(a.digests), a.count); };
  emulated::launch<Clear>(run, args, ctas, threads, shared);
}
"""


def without_ptx(text: str) -> str:
    """A file of device code with its PTX replaced."""
    made, done = "", 0
    for head in re.finditer(r"__device__ __forceinline__ [^;{}]*\) \{", text):
        body, end, depth = head.end() - 1, head.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        code = [instead for before, instead in _INSTEAD if re.search(before, head.group())]
        if "asm" in text[body:end]:
            assert len(code) == 1, f"nothing says in C++ what this does: {text[head.start() : end]}"
        if code:
            made += f"{text[done:body]}{{ {code[0]} }}"
            done = end
    return made + text[done:]


#: A kernel of which one launch runs the text of the mutant whose number is in FAKE_MUTANT, or its own.
_CHOICE = """extern "C" void emulated_{name}(const kvbm_args* args, uint32_t ctas, uint32_t threads, uint32_t shared) {{
  void (*run)(const kvbm_args&, char*) = kvbm::{name};
  switch (atoi(getenv("FAKE_MUTANT"))) {{
{cases}
  }}
  emulated::launch<kvbm_args>(run, args, ctas, threads, shared);
}}
"""


def _write(folder: Path, patterns: Sequence[str], edit: Callable[[str], str]) -> None:
    """Write files of cuda/ without their PTX; `edit` is called with their text before."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in patterns for path in CUDA.glob(pattern)):
        (folder / path.name).write_text(without_ptx(edit(path.read_text(encoding="utf-8"))), encoding="utf-8")


def _compile(folder: Path, name: str, text: str) -> Path:
    """The library of a source; what was compiled before, from the same text, is taken again from build/emulated."""
    source, made = folder / f"{name}.cpp", folder / f"lib{name}.so"
    source.write_text(text, encoding="utf-8")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w"]
    if sanitizers := os.environ.get("KVBM_SANITIZE"):
        command += ["-g1", f"-fsanitize={sanitizers}", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"]
    compiler = subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr
    headers = sorted(path for end in ("cuh", "cu", "h") for path in folder.rglob(f"*.{end}"))
    included = [source, processes.HERE / "data" / "emulated_gpu.h", *headers]
    places = [str(path.parent.relative_to(folder)) for path in headers]
    kept = CUDA.parent / "build" / "emulated" / f"{fatbins.digest(command, compiler, places, included)}.so"
    if not kept.exists():
        with replacing(kept) as part:
            includes = f"-I{folder}", f"-I{processes.HERE / 'data'}"
            subprocess.run([*command, *includes, "-o", part, source], check=True)
    shutil.copyfile(kept, made)
    return made


def shallowest_and_deepest(names: Sequence[str]) -> list[str]:
    """Of kernels that differ in their numbers of loops alone, the first and the last."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(re.sub(r"_o\d+(_[ir]\d+)?", "", name), []).append(name)
    return sorted({name for some in alike.values() for name in (some[0], some[-1])})


def compile_kernels(folder: Path, names: Sequence[str]) -> None:
    """Libraries, in a folder, for FAKE_KERNELS: the kernels of these names."""
    _write(folder, ("*.cuh", "*.cu", "kvbm.h"), str)
    files = min(FILES, -(-len(names) // SOME))

    def library(number: int) -> None:
        lines = [codegen.source(name).splitlines()[-1] for name in names[number::files]]
        _compile(folder, f"kernels_{number}", "\n".join([_HEAD, "" if number else _COPY_PAIRS, *lines, ""]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(library, range(files)))


def compile_mutants(folder: Path, mutants: Sequence[tuple[str, str, str]]) -> None:
    """One library for FAKE_KERNELS: kernels, each with what of its text is replaced, and by what.

    A program with FAKE_MUTANT=n runs the n-th; the library must stand before those of `compile_kernels`.
    """
    _write(folder, ("*.cuh", "kvbm.h"), str)
    text, choices = ['#include "emulated_gpu.h"', '#include "permute.cuh"'], dict.fromkeys(kernel for kernel, *_ in mutants)

    def function(space: str, kernel: str) -> str:
        kind = re.fullmatch(r"KVBM_KERNEL\(\w+, (.*)\)", codegen.source(kernel).splitlines()[-1])
        assert kind
        run = f"Kernel<{kind.group(1)}>::run(args, bytes);"
        return f"namespace {space} {{ void {kernel}(const kvbm_args& args, char* bytes) {{ {run} }} }}"

    for number, (kernel, code, instead) in enumerate(mutants):
        found = 0

        def edit(text: str, number: int = number, code: str = code, instead: str = instead) -> str:
            nonlocal found
            found += text.count(code)
            mine = re.sub(r"\bnamespace kvbm\b", f"namespace mutant_{number}", text.replace(code, instead))
            return f"// mutant {number}: no other file is the same, which `#pragma once` would leave out\n{mine}"

        _write(folder / str(number), ["*.cuh"], edit)
        assert found, f"mutant {number}: no header has {code!r}"
        text += [f'#include "{number}/permute.cuh"', function(f"mutant_{number}", kernel)]
    for kernel in choices:
        mine = [number for number, (name, *_) in enumerate(mutants) if name == kernel]
        cases = "\n".join(f"    case {number}: run = mutant_{number}::{kernel}; break;" for number in mine)
        text += [function("kvbm", kernel), _CHOICE.format(name=kernel, cases=cases)]
    _compile(folder, "mutants", "\n".join(text))
