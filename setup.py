"""Builds kvbm._core: layouts → generated kernels → nvcc → fatbins inside the extension. pyproject.toml says the rest.

Read from the environment: CUDACXX, CUDA_HOME, CUDA_PATH (the compiler), CUDA_ARCHS, CUDA_PTX_ARCHS (its targets),
KVBM_CUDA=0 (no CUDA), KVBM_REQUIRE_CUDA=1 (no CUDA is an error), KVBM_LAYOUTS (more layouts to build for: files or
folders), KVBM_BUILD_DIR (where compiled pieces are kept for the next build; build/ here if not given), KVBM_SANITIZE
(sanitizers that look at the host's code: `address,undefined` or `thread`; see `make sanitize`).
"""

import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CUDA = ROOT / "cuda"
SANITIZE = os.environ.get("KVBM_SANITIZE", "")
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has no stable ABI
# setuptools.build_meta does not; the describing half runs with nothing built.
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]


class BuildExt(build_ext):
    """Generates, compiles and embeds the kernels, then links the extension as usual."""

    def build_extension(self, ext):
        from kvbm.errors import KvbmError

        try:
            self.build_core(ext)
        except KvbmError as error:  # a sentence, not a traceback
            details = (str(error), getattr(error, "command", ""), getattr(error, "log", ""))
            sys.exit("\nkvbm: error: " + "\n".join(filter(None, details)))

    def build_core(self, ext):
        import fatbins

        work = Path(self.build_temp).resolve()
        self.cache = build_dir() or (ROOT / "build" if os.access(ROOT, os.W_OK) else work)
        compiler, target, why_not = find_cuda()
        layouts, extra = find_layouts()
        generated = self.generate(layouts, work / "generated")
        hosts = [path for path in generated if path.suffix == ".cpp"]
        kernels = [path for path in generated if path.suffix == ".cu"]
        kernels = [*kernels, *sorted(CUDA.glob("*.cu"))] if compiler else []  # generated ones first: they are numbered
        print(f"kvbm: {len(kernels)} files, {compiler}, for {target}" if compiler else f"kvbm: no CUDA: {why_not}")
        cores = os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            try:
                tasks = [pool.submit(self.compile, ext, path) for path in [*hosts, *sorted(CUDA.glob("*.cpp"))]]
                build = (CUDA, self.cache / "fatbins", compiler, target, -(-cores // max(1, len(kernels))))
                compiled = [pool.submit(fatbins.fatbin, path, *build) for path in kernels]
                tasks.append(pool.submit(self.compile, ext, self.cythonize(ext)))
                images = work / "generated" / "kvbm_images.cpp"
                images.write_text(embed(kernels, [task.result() for task in compiled]))
                tasks.append(pool.submit(self.compile, ext, images))
                ext.extra_objects = [task.result() for task in tasks]
            except BaseException:
                pool.shutdown(cancel_futures=True)  # one error is enough: do not compile the rest first
                raise
        result = Path(self.get_ext_fullpath(ext.name))
        result.unlink(missing_ok=True)  # link always: an object that was taken again may be older than the last extension
        ext.sources = []
        super().build_extension(ext)
        self.info = result.with_name("_build.json")  # `kvbm doctor` reads it
        info = {"nvcc": compiler and compiler.version, "targets": compiler and str(target), "why_not": why_not}
        self.info.write_text(json.dumps(info | {"extra_layouts": extra, "sanitize": SANITIZE}, indent=1) + "\n")

    def generate(self, layouts, folder):
        """Write the kernels' text and return its files; what was generated before, from the same inputs, is taken again."""
        import fatbins
        from kvbm.compile import codegen

        text = fatbins.generated(self.cache.resolve(), layouts)
        codegen.write(text, folder)
        return [folder / name for name in sorted(text)]

    def cythonize(self, ext):
        """Return the C++ text of the extension; what was made before, from the same text, is taken again."""
        from Cython import __version__
        from Cython.Build import cythonize

        import fatbins

        source = Path(ext.sources[0])
        digest = fatbins.digest([__version__], fatbins.sources(source))
        result = self.cache.resolve() / "cython" / digest / f"{source.stem}.cpp"
        if not result.exists():
            with fatbins.replacing(result) as part, tempfile.TemporaryDirectory(dir=result.parent) as folder:
                [made] = cythonize([ext], build_dir=folder, force=True)
                os.replace(made.sources[0], part)
        return result

    def compile(self, ext, source):
        """Compile one C++ file and return its object; what was compiled before, from the same text, is taken again."""
        import fatbins

        how = [*self.compiler.compiler_so_cxx, *ext.extra_compile_args, str(ext.define_macros), sys.version]
        result = self.cache.resolve() / "objects" / f"{source.stem}.{fatbins.digest(how, fatbins.sources(source, CUDA))}.o"
        if not result.exists():
            with fatbins.replacing(result) as part, tempfile.TemporaryDirectory(dir=result.parent) as folder:
                args = [*ext.extra_compile_args, f"-ffile-prefix-map={ROOT}=."]  # the same bytes wherever it is built
                dirs = [str(CUDA), str(source.parent)]
                [made] = self.compiler.compile([str(source)], folder, ext.define_macros, dirs, extra_postargs=args)
                os.replace(made, part)
        return str(result)

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        shutil.copy(self.info, ROOT / "src" / "kvbm")


class BuildPy(build_py):
    """Carries layouts/ and cuda/, which live at the root, into the package: `kvbm codegen` works from a wheel too."""

    def run(self):
        package = Path(self.build_lib, "kvbm")
        if not self.editable_mode:  # build/lib outlives a build: what is gone from the tree must be gone from the wheel
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        patterns = ("layouts/**/*.yaml", "layouts/**/*.json", "cuda/*.h", "cuda/*.cuh", "cuda/*.in")
        for pattern in () if self.editable_mode else patterns:
            for path in ROOT.glob(pattern):
                self.mkpath(str((package / path.relative_to(ROOT)).parent))
                self.copy_file(str(path), str(package / path.relative_to(ROOT)))


def build_dir():
    """Return KVBM_BUILD_DIR; None if it is not given, or if another user could have put code there.

    In the source tree it is as safe as the sources.
    """
    from kvbm.system.private import PrivateFolder

    given = os.environ.get("KVBM_BUILD_DIR")
    if not given or Path(given).resolve().is_relative_to(ROOT):
        return given and Path(given)
    os.umask(os.umask(0) | 0o022)  # what is made there is taken again
    try:
        with PrivateFolder(Path(given).resolve(), make=True) as folder:
            folder.require_private_inside()
    except OSError as error:
        print(f"kvbm: KVBM_BUILD_DIR={given} is not used: {error.strerror}")
        return None
    return Path(given).resolve()


def find_cuda():
    """Return (compiler, targets, None), or (None, None, why there is no CUDA)."""
    import fatbins
    from kvbm.compile import nvcc

    required = os.environ.get("KVBM_REQUIRE_CUDA", "0") not in {"", "0"}
    if os.environ.get("KVBM_CUDA") == "0":
        if required:
            raise nvcc.BuildError("KVBM_CUDA=0 and KVBM_REQUIRE_CUDA=1: expected one of them")
        return None, None, "built with KVBM_CUDA=0"
    target = fatbins.targets()
    try:
        return nvcc.find(), target, None
    except nvcc.BuildError as error:
        if required or os.environ.get("CUDACXX"):
            raise
        return None, None, str(error)


def find_layouts():
    """Return what `codegen.generate` takes (None: those shipped here) and the names of those in KVBM_LAYOUTS."""
    from kvbm.compile import nvcc
    from kvbm.layout import spec

    paths = [Path(entry) for entry in os.environ.get("KVBM_LAYOUTS", "").split(os.pathsep) if entry]
    if gone := [path for path in paths if not path.exists()]:
        raise nvcc.BuildError(f"KVBM_LAYOUTS: expected files or folders, got {gone[0]} (none such, seen from {ROOT})")
    shipped = spec.load_dir(spec.layouts_dir())
    layouts = spec.load_all([spec.layouts_dir(), *paths])
    extra = layouts[len(shipped) :]
    return layouts if extra else None, [layout.name for layout in extra]


def embed(kernels, fatbins):
    """Return the C++ text of kvbm_images: the fatbin of each .cu file, in the order that kernel.image counts."""
    lines = ['#include "kvbm.h"', 'extern "C" {']
    for i, path in enumerate(fatbins):
        lines.append(f'__asm__(".pushsection .nv_fatbin, \\"a\\"\\n.balign 8\\nkvbm_image_{i}:\\n"')
        lines.append(f'        ".incbin \\"{path.resolve()}\\"\\n.popsection\\n");')
        lines.append(f"extern const unsigned char kvbm_image_{i}[];")
    entries = [f'{{"{path.name}", kvbm_image_{i}}}' for i, path in enumerate(kernels)] or ["{nullptr, nullptr}"]
    lines.append(f"const kvbm_image kvbm_images[] = {{{', '.join(entries)}}};")
    lines.append(f"const int32_t kvbm_num_images = {len(fatbins)};")
    return "\n".join([*lines, '}  // extern "C"', ""])


def description():
    """Return README.md as a package index shows it: links into the tree become links to the repository, at this version's tag."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def absolute(match):
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({project['urls']['Repository']}/{kind}/v{project['version']}/{match[3]})"

    link = re.compile(r"(!?)\[([^\]\n]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
    parts = re.split(r"(^```.*?^```)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else link.sub(absolute, part) for part in parts)


def sanitizers():
    """Return what the compiler and the linker are told beside the usual.

    -O1 keeps more accesses, -g1 has lines for reports.  AddressSanitizer finds what the checks left out would find, and they take
    a quarter of the time to compile.
    """
    if not SANITIZE:
        return []
    return [f"-fsanitize={SANITIZE}", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all", "-fno-wrapv", "-O1", "-g1"]


core = Extension(
    "kvbm._core",
    ["src/kvbm/_core.pyx"],
    include_dirs=["cuda"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-Wno-psabi", "-fvisibility=hidden", "-pthread", *sanitizers()],
    extra_link_args=["-ldl", "-pthread", *sanitizers()],
    language="c++",
    py_limited_api=ABI3,
)
setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[core],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
