"""What is here and what is missing: the extension, its kernels, the driver, the GPUs, the compilers, the packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import spec
from .errors import KvbmError

__all__ = ["findings"]


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield a mark (``"ok"``, ``"note"``, ``"missing"`` or none), what was looked at, and a sentence."""
    yield "ok", "kvbm", f"{_version('kvbm-layouts') or 'not installed, run from a checkout'}, {Path(__file__).parent}"
    yield "ok", "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()}, {os.cpu_count()} cores)"
    yield "ok", "layouts", f"{len(spec.layouts())} in {spec.layouts_dir()}"
    if _version("kvbm"):
        yield (
            "missing",
            "conflict",
            f"another distribution called 'kvbm' ({_version('kvbm')}) is installed under the same import name: "
            "pip uninstall kvbm, then reinstall kvbm-layouts",
        )
    build = _build_info()
    try:
        from . import _core
    except ImportError as error:
        yield "missing", "extension", f"kvbm._core does not import ({error}): pip install . (needs a C++ compiler)"
        yield from _compiler()
        yield from _packages()
        yield from _transports()
        return
    names = _core.kernel_names()
    yield "ok", "extension", f"{len(names)} kernels for the CPU"
    targets = str(build.get("targets") or "")
    if _core.num_images():
        built = f"{targets or 'targets unknown'}, nvcc {build.get('nvcc') or 'unknown'}"
        yield "ok", "CUDA kernels", f"{len(names)} kernels in {_core.num_images()} images: {built}"
    else:
        why = build.get("why_not") or "built without CUDA"
        yield "missing", "CUDA kernels", f"stubs: a GPU call raises, everything else works ({why})"
        yield from _compiler()
    yield from _gpus(_core, targets, str(build.get("nvcc") or ""))
    yield _run_time_compiler()
    yield from _packages()
    yield from _transports()


def _gpus(core: Any, targets: str, nvcc: str) -> Iterator[tuple[str, str, str]]:
    try:
        version = core.driver_version()
    except KvbmError as error:
        yield "missing", "driver", str(error)
        return
    yield "ok", "driver", f"CUDA {version // 1000}.{version % 1000 // 10}"
    if nvcc and version // 1000 < int(nvcc.partition(".")[0]):
        yield "note", "", f"the kernels were built with nvcc {nvcc}: update the driver if they do not load"
    try:
        count = core.device_count()
        if not count:
            yield "missing", "GPU", "none visible (CUDA_VISIBLE_DEVICES hides some?): conversions run on the CPU"
        for index in range(count):
            info = core.device_info(index)
            major, minor = info["capability"]
            text = f"{info['name']}, sm_{major}{minor}, {info['sms']} SMs, {info['memory'] / 2**30:.0f} GiB"
            if targets and not _runs_on(targets, major, minor):
                rebuild = f"rebuild with CUDA_ARCHS={major}{minor} pip install ."
                yield "missing", f"cuda:{index}", f"{text}; no kernel image for it: {rebuild}"
            else:
                yield "ok", f"cuda:{index}", text
        batch = core.has_memcpy_batch()
        text = "in the driver" if batch else "not in this driver (CUDA 12.8 has it): one copy a call"
        yield "ok" if batch else "note", "batched memcpy", text
        yield from _tables(count)
    except KvbmError as error:
        yield "missing", "GPU", str(error)


def _tables(count: int) -> Iterator[tuple[str, str, str]]:
    """What `kvbm tune` has measured on these GPUs."""
    from . import tuning

    for gpu, driver in dict.fromkeys(map(tuning.machine, range(count))):
        table = tuning.load(gpu, driver)
        if table is not None:
            yield "ok", "tuning", f"{table.title}: {tuning.path(gpu, driver)}"
        else:
            yield "note", "tuning", f"{gpu}: not measured yet; the first transfer does, or `kvbm tune`"


def _runs_on(targets: str, major: int, minor: int) -> bool:
    """Whether a cubin of the same major and no later minor is there, or PTX that is no newer."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", targets):
        its = (int(number[:-1]), int(number[-1]))
        if (its[0] == major and its[1] <= minor) or (kind == "compute" and its <= (major, minor)):
            return True
    return False


def _compiler() -> Iterator[tuple[str, str, str]]:
    from . import nvcc

    try:
        compiler = nvcc.find()
        what = "reinstall kvbm-layouts and the CUDA kernels are built"
        yield "note", "nvcc", f"{compiler.version} is here ({compiler.origin}): {what}"
    except KvbmError as error:
        yield "note", "nvcc", str(error)


def _run_time_compiler() -> tuple[str, str, str]:
    """Whether layouts whose structure was not built get kernels of their own, and where these are kept."""
    from . import runtime

    try:
        compiler, folder = runtime.find(), runtime.folder()
    except (KvbmError, RuntimeError) as error:  # RuntimeError: no home
        return "note", "NVRTC", f"{error}: new structures run on general kernels"
    count = len(list(folder.glob("*.cubin")))
    return "ok", "NVRTC", f"{compiler.version}, {compiler.path}; {count} kernel{'s' if count != 1 else ''} in {folder}"


def _packages() -> Iterator[tuple[str, str, str]]:
    for name, what in (
        ("numpy", "needed"),
        ("cuda-core", "streams"),
        ("cuda-bindings", "streams"),
        ("torch", "its tensors are taken; the demo"),
        ("cupy", "its arrays are taken"),
        ("transformers", "the demo"),
    ):
        version = _version(name) or next(filter(None, map(_version, _OTHER_NAMES.get(name, ()))), None)
        yield ("ok" if version else "missing" if what == "needed" else ""), name, version or f"not installed ({what})"


def _transports() -> Iterator[tuple[str, str, str]]:
    """Which wires are here, by what is installed: nothing is imported for it."""
    yield "ok", "wire.memory", "between threads of a process"
    shares = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    yield "ok" if shares else "", "wire.mapped", "around another, for peers on this host" if shares else "needs Linux 5.3 or newer"
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


_OTHER_NAMES = {"cupy": ("cupy-cuda13x", "cupy-cuda12x")}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_info() -> dict[str, Any]:
    """Return what the build wrote beside the extension."""
    try:
        info = json.loads(Path(__file__).with_name("_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}
