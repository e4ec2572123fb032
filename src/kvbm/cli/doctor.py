"""Checks the installation: the extension, its kernels, the driver, the GPUs, the compilers, the packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import BuildError, CudaUnavailableError, KvbmError
from ..layout import spec

__all__ = ["exit_code", "findings"]

#: If one of these is broken, the installation is broken.  All other broken items concern the use of a GPU.
_PACKAGE = frozenset(("conflict", "extension", "layouts", "numpy"))
_NO_DRIVER = frozenset((-1, 34))  # KVBM_NO_DRIVER; CUDA_ERROR_STUB_LIBRARY
_NO_GPU = 100  # CUDA_ERROR_NO_DEVICE

_FOLDER = Path(__file__).parents[1]


def exit_code(marks: Iterable[tuple[str, str, str]]) -> int:
    """The exit code of ``kvbm doctor`` for what `findings` yields.

    0: everything that was built can be used, or there is no GPU.  16: the package is broken.  19: there are CUDA kernels and a
    driver, but no GPU can run the kernels.
    """
    broken = {what for mark, what, _ in marks if mark == "broken"}
    if broken & _PACKAGE:
        return BuildError.exit_code
    return CudaUnavailableError.exit_code if broken else 0


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield a mark, the checked item, and a sentence.

    The marks are ``"ok"``; ``"note"``; ``"missing"``: not found, the rest works without it; ``"broken"``: found but unusable, or
    not found and nothing works without it; and an empty text.  If no driver was found, this finding is the first.
    """
    core: Any = None
    why = ""
    try:
        from .. import _core as core
    except ImportError as error:
        why = str(error)
    no_driver = core is not None and _lacks_driver(core)
    if no_driver:
        yield (
            "missing",
            "driver",
            "no NVIDIA driver found (libcuda.so.1 cannot be loaded, or is too old): conversions run on the CPU. For a GPU, install "
            "the driver; in a container, start it with the GPUs",
        )
    yield "ok", "kvbm", f"{_version('kvbm-layouts') or 'not installed, run from a checkout'}, {_FOLDER}"
    yield "ok", "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()}, {os.cpu_count()} cores)"
    try:
        yield "ok", "layouts", f"{len(spec.layouts())} in {spec.layouts_dir()}"
    except KvbmError as error:
        yield "broken", "layouts", str(error)
    yield from _other_kvbm()
    build = _build_info()
    if core is None:
        yield "broken", "extension", f"kvbm._core does not import ({why}): pip install . (needs a C++ compiler)"
        yield from _compiler()
        yield from _packages()
        yield from _transports()
        return
    names = core.kernel_names()
    yield "ok", "extension", f"{len(names)} kernels for the CPU"
    targets = str(build.get("targets") or "")
    if has_images := bool(core.num_images()):
        built = f"{targets or 'targets unknown'}, nvcc {build.get('nvcc') or 'unknown'}"
        yield "ok", "CUDA kernels", f"{len(names)} kernels in {core.num_images()} images: {built}"
    else:
        because = build.get("why_not") or "built without CUDA"
        yield "missing", "CUDA kernels", f"stubs: a GPU call raises, everything else works ({because})"
        yield from _compiler()
    if not no_driver:
        yield from _gpus(core, targets, str(build.get("nvcc") or ""), has_images=has_images)
    yield _run_time_compiler()
    yield from _packages()
    yield from _transports()


def _lacks_driver(core: Any) -> bool:
    try:
        core.driver_version()
    except CudaUnavailableError as error:
        return error.code in _NO_DRIVER
    except KvbmError:
        return False
    return False


def _other_kvbm() -> Iterator[tuple[str, str, str]]:
    """Check for the other distribution ``kvbm``.  It breaks this one if both have their files in the same folder."""
    version = _version("kvbm")
    if version is None:
        return
    here = _FOLDER.resolve()
    files = importlib.metadata.files("kvbm") or ()
    shared = any(here in Path(str(file.locate())).resolve().parents for file in files)
    what = f"another project's distribution 'kvbm' ({version}) is installed, and its import name is the same"
    if shared:
        yield "broken", "conflict", f"{what}; it wrote into {here}: pip uninstall kvbm, then reinstall kvbm-layouts"
    else:
        yield "note", "conflict", f"{what}; which one is imported depends on sys.path: pip uninstall kvbm"


def _gpus(core: Any, targets: str, nvcc: str, *, has_images: bool = True) -> Iterator[tuple[str, str, str]]:
    unusable = "broken" if has_images else "missing"  # without images no kernels were built for a GPU
    try:
        version = core.driver_version()
    except KvbmError as error:
        yield unusable, "driver", str(error)
        return
    yield "ok", "driver", f"CUDA {version // 1000}.{version % 1000 // 10}"
    if nvcc and version // 1000 < int(nvcc.partition(".")[0]):
        needed = nvcc.partition(".")[0]
        release = " (release 580 or newer)" if needed == "13" else ""
        yield (
            "note",
            "",
            f"the kernels were built with nvcc {nvcc} and need a driver for CUDA {needed}{release}: update it, or reinstall "
            "kvbm-layouts with CUDA_HOME naming a toolkit of the driver's CUDA (12.8 or newer)",
        )
    try:
        count = core.device_count()
        if not count:
            yield "missing", "GPU", _NONE_VISIBLE
            return
        infos = [core.device_info(index) for index in range(count)]
        runs = [not targets or _runs_on(targets, *info["capability"]) for info in infos]
        for index, (info, can_run) in enumerate(zip(infos, runs, strict=True)):
            major, minor = info["capability"]
            text = f"{info['name']}, sm_{major}{minor}, {info['sms']} SMs, {info['memory'] / 2**30:.0f} GiB"
            if can_run:
                yield "ok", f"cuda:{index}", text
            else:
                rebuild = f"rebuild with CUDA_ARCHS={major}{minor} pip install ."
                mark = "missing" if any(runs) else unusable
                yield mark, f"cuda:{index}", f"{text}; no kernel image for it: {rebuild}"
        batch = core.has_memcpy_batch()
        text = "in the driver" if batch else "not in this driver (CUDA 12.8 has it): one copy per call"
        yield "ok" if batch else "note", "batched memcpy", text
        yield from _tables(count)
    except KvbmError as error:
        if isinstance(error, CudaUnavailableError) and error.code == _NO_GPU:
            yield "missing", "GPU", _NONE_VISIBLE
        else:
            yield unusable, "GPU", str(error)


def _tables(count: int) -> Iterator[tuple[str, str, str]]:
    """The tables that `kvbm tune` has measured on these GPUs."""
    from ..copy import cost_model
    from ..system import machine

    for gpu, driver in dict.fromkeys(map(machine.gpu_and_driver, range(count))):
        table = cost_model.load(gpu, driver)
        if table is not None:
            yield "ok", "tuning", f"{table.title}: {cost_model.path(gpu, driver)}"
        else:
            yield "note", "tuning", f"{gpu}: not measured yet; the first transfer does, or `kvbm tune`"


def _runs_on(targets: str, major: int, minor: int) -> bool:
    """True if a target is a cubin of the same major and the same or an earlier minor, or PTX that is not newer."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", targets):
        its = (int(number[:-1]), int(number[-1]))
        if (its[0] == major and its[1] <= minor) or (kind == "compute" and its <= (major, minor)):
            return True
    return False


def _compiler() -> Iterator[tuple[str, str, str]]:
    from ..compile import nvcc

    try:
        compiler = nvcc.find()
        what = "reinstall kvbm-layouts and the CUDA kernels are built"
        yield "note", "nvcc", f"{compiler.version} is here ({compiler.origin}): {what}"
    except KvbmError as error:
        yield "note", "nvcc", str(error)


def _run_time_compiler() -> tuple[str, str, str]:
    """The run-time compiler for kernels of layouts whose structure was not built, and the folder of these kernels."""
    from ..compile import nvrtc

    try:
        compiler, folder = nvrtc.find(), nvrtc.folder()
    except (KvbmError, RuntimeError) as error:  # RuntimeError: no home folder
        return "note", "NVRTC", f"{error}: new structures run on general kernels"
    count = len(list(folder.glob("*.cubin")))
    return "ok", "NVRTC", f"{compiler.version}, {compiler.path}; {count} kernel{'s' if count != 1 else ''} in {folder}"


def _packages() -> Iterator[tuple[str, str, str]]:
    for name, what in (
        ("numpy", "needed"),
        ("cuda-core", "streams"),
        ("cuda-bindings", "streams"),
        ("torch", "kvbm accepts its tensors; `kvbm demo` needs it"),
        ("cupy", "kvbm accepts its arrays"),
        ("transformers", "`kvbm demo` needs it"),
    ):
        version = _version(name) or next(filter(None, map(_version, _OTHER_NAMES.get(name, ()))), None)
        yield ("ok" if version else "broken" if what == "needed" else ""), name, version or f"not installed ({what})"


def _transports() -> Iterator[tuple[str, str, str]]:
    """The available wires, according to the installed packages.  No package is imported."""
    yield "ok", "wire.memory", "between threads of a process"
    shares = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    text = "together with another wire, between processes of this host" if shares else "needs Linux 5.3 or newer"
    yield "ok" if shares else "", "wire.mapped", text
    version = _version("torch")
    text = f"torch {version}: gloo between hosts, NCCL between GPUs" if version else "not installed: pip install torch"
    yield "ok" if version else "", "wire.torch", text
    found = [name for name in ("nixl-cu12", "nixl-cu13") if _version(name)]
    if not _version("nixl") or not found:
        yield "", "wire.nixl", "not installed: pip install 'kvbm-layouts[nixl]'"
        return
    files = [file.name for name in found for file in importlib.metadata.files(name) or ()]
    backends = sorted({match[1] for file in files if (match := re.fullmatch(r"libplugin_(\w+)\.so", file))})
    yield "ok", "wire.nixl", f"{_version('nixl')} ({', '.join(found)}): {', '.join(backends)}"


_NONE_VISIBLE = "none visible (CUDA_VISIBLE_DEVICES hides some?): conversions run on the CPU"
_OTHER_NAMES = {"cupy": ("cupy-cuda13x", "cupy-cuda12x")}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_info() -> dict[str, Any]:
    """Return the build information beside the extension."""
    try:
        info = json.loads((_FOLDER / "_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}
