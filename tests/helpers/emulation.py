"""The kernels' device code, compiled for the host: emulated_gpu.h emulates the GPU, and the fake driver launches it (FAKE_KERNELS).

The source is the one that nvcc compiles, except that functions in PTX are replaced by the same functions in C++.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
from kvbm.compile import codegen

CUDA = processes.HERE.parent / "cuda"  #: copy.cu is in no package.
FILES = 8  #: Libraries that the kernels are dealt to.

#: Functions, by what stands before their bodies, and their bodies instead of PTX.
_INSTEAD = (
    (r"\bevict_last_policy\(\)", "return 0;"),
    (r"\bload\(\S+& v, const char\* p\)", "emulated::load(v, p);"),
    (r"\bstore\(char\* p, (const )?\S+ v\)", "emulated::store(p, v);"),
    (r"\bfetch\(char\* shared, const char\* src\)", "emulated::fetch<BYTES>(shared, src);"),
    (r"\bwait_for_fetches\(\)", "__syncthreads();"),
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


def compile_kernels(folder: Path, names: Sequence[str], broken: Callable[[str], str] = lambda text: text) -> str:
    """The value of FAKE_KERNELS for the kernels of these names; `broken` edits the device code."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.cuh", "*.cu", "kvbm.h"):
        for path in CUDA.glob(pattern):
            text = without_ptx(broken(path.read_text(encoding="utf-8")))
            (folder / path.name).write_text(text, encoding="utf-8")

    def library(number: int) -> Path:
        source, made = folder / f"kernels_{number}.cpp", folder / f"libkernels_{number}.so"
        lines = [codegen.source(name).splitlines()[-1] for name in names[number::FILES]]
        source.write_text("\n".join([_HEAD, "" if number else _COPY_PAIRS, *lines, ""]), encoding="utf-8")
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{folder}", f"-I{processes.HERE / 'data'}"]
        if sanitizers := os.environ.get("KVBM_SANITIZE"):
            command += ["-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
        subprocess.run([*command, "-o", made, source], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return ":".join(map(str, pool.map(library, range(min(FILES, len(names))))))
