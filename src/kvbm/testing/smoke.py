"""``kvbm smoke``, also ``python -m kvbm.testing.smoke``: are the kernels right on this machine, or on another one.

Only click is imported here before something runs: ``kvbm --help`` shows this command, and must need neither NumPy nor torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cli.click_classes import Command, Group, Real, Whole, is_quiet, print_error
from ..cli.common import json_option, note
from ..cli.complete import some_of
from ..cli.values import usable_device
from ..errors import CudaUnavailableError, KvbmError, SpecError
from .report import Report, Result

if TYPE_CHECKING:
    from .layouts import LayoutCase
    from .timing import Benchmark

#: Copies that every run makes: rows, a transposed tile, and the swizzle of scale factors.
PAIRS = (
    ("nhd", "universal"),
    ("universal", "vllm/LBHNC"),
    ("nhd", "vllm/paged_attn_v0"),
    ("swizzle/linear", "swizzle/128x4"),
)


#: The suite without products.
COPIES = "copies"


def run(
    suite: str = "smoke", *, device: str = "cpu", kernel: Callable[[Any], Any] | None = None, num_runs: int = 20,
    limit_s: float = 60.0, step: Callable[[Result], object] | None = None,
) -> Report:  # fmt: skip
    """Run a suite, and then some copies between layouts.  `step` is called with each result.

    "copies" are the copies alone, which need no torch on the CPU.  `kernel` is ``kernel(data) -> c`` for the data of
    `kvbm.testing.nvfp4`, by default the example kernel.  `limit_s` is its time limit in seconds, for the test and again for its
    `num_runs` measured runs.  On the CPU a kernel that computes has ten times as long (see `kvbm.testing.limits`).

    Raises `MissingPackageError` or `CudaUnavailableError` if torch is not installed, or cannot use the device.
    """
    from .._version import __version__
    from ..system.machine import machine
    from . import nvfp4
    from .cases import SUITES
    from .compare import make_match_reference
    from .timing import benchmark_kernel

    start = time.perf_counter()
    torch = nvfp4.torch_module() if device != "cpu" or suite != COPIES else None
    if torch is not None and device != "cpu" and not torch.cuda.is_available():
        raise CudaUnavailableError(f"torch {torch.__version__} cannot use {device}: expected a torch built for CUDA")
    kernel = kernel or nvfp4.example_kernel
    results: list[Result] = []

    def add(name: str, dimensions: str, error: str | None, timed: Callable[[], Benchmark]) -> None:
        milliseconds = None
        if error is None:
            average, error = timed()
            milliseconds = None if math.isnan(average) else average
        timing = "events" if device != "cpu" else "clock"
        results.append(Result(name, dimensions, error is None, milliseconds, timing, error))
        if step is not None:
            step(results[-1])

    with torch.cuda.device(device) if torch is not None and device != "cpu" else contextlib.nullcontext():
        check = make_match_reference(nvfp4.ref_kernel, limit_s=limit_s)
        for case in (case for name, some in SUITES.items() if suite in (name, "all") for case in some):
            data = case.data(device=device)
            _, error = check(kernel, data)
            timed = functools.partial(benchmark_kernel, kernel, data, 3, num_runs, limit_s=limit_s)
            add(case.name, case.sizes, error, timed)
        for copy in _copies(device, "numpy" if torch is None else "torch"):
            convert, arrays = _converter(copy), [copy.src_arrays, copy.dst_arrays]
            convert(arrays)
            timed = functools.partial(benchmark_kernel, convert, arrays, num_runs, num_runs, limit_s=limit_s)
            title = f"{copy.src.name} → {copy.dst.name}"
            add(title, f"{copy.batch} blocks of {copy.shape}", copy.error(), timed)
    name, driver = machine(device)
    return Report(__version__, device, name, driver, time.perf_counter() - start, tuple(results))


def _copies(device: str, framework: str) -> Iterator[LayoutCase]:
    from .layouts import layout_cases

    for pair in PAIRS:
        dtype = "float8_e4m3fn" if pair[0].startswith("swizzle") else "bfloat16"
        yield from layout_cases(pairs=[pair], dtypes=[dtype], batches=[64], device=device, framework=framework)


def _converter(case: LayoutCase) -> Callable[[Any], None]:
    """A copy by kvbm as a kernel of arrays.  Pools are bound once per set of arrays, before the measurement."""
    from ..copy.transfer import convert
    from ..pool.pool import Pool

    pools: dict[int, tuple[Pool, Pool]] = {}

    def kernel(data: Any) -> None:
        if id(data) not in pools:
            src, dst = data
            pools[id(data)] = Pool(case.src, case.shape, src), Pool(case.dst, case.shape, dst)
        convert(*pools[id(data)], case.src_ids, case.dst_ids)

    return kernel


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command(
    cls=Command, examples=["kvbm smoke", "kvbm smoke --cpu --suite copies --json", "kvbm smoke --ssh me@gpu-box"]
)
@click.option(
    "--suite",
    type=click.Choice(["smoke", "correctness", "performance", "all", COPIES]),
    help="Which sizes of the NVFP4 example, or the copies between layouts alone.  [default: smoke; copies on a CPU without torch]",
)
@click.option("--gpu", type=Whole(0, 9999), metavar="N", help="Which GPU.  [default: the first one; the CPU without any]")
@click.option("--cpu", is_flag=True, help="Test the CPU's kernels, also where there is a GPU.")
@click.option(
    "--kernel",
    metavar="FUNCTION",
    shell_complete=some_of(files=True),
    help="Test your own NVFP4 kernel, MODULE:FUNCTION or FILE.py:FUNCTION, instead of the example.",
)
@click.option("--iters", "runs", default=20, show_default=True, type=Whole(1), help="Timed runs of each test.")
@click.option(
    "--limit", default=60.0, show_default=True, type=Real(0, min_open=True),
    help="Seconds after which a kernel counts as hung. One that still computes on the CPU has ten times as long.",
)  # fmt: skip
@json_option()
@click.option("--ssh", "target", metavar="USER@HOST:PORT", help="Run on another machine: needs kvbm-layouts[remote].")
@click.option("--ssh-key", type=click.Path(path_type=Path), metavar="FILE", help="Private key.  [default: ssh's own]")
@click.option("--known-hosts", type=click.Path(path_type=Path), metavar="FILE", help="Host keys.  [default: ~/.ssh/known_hosts]")
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The wheel of kvbm to install there.  [default: this one, packed again]",
)
@click.option(
    "--python", metavar="PATH", shell_complete=some_of("python3"),
    help="Python on that machine, 3.11 or newer.  [default: python3]",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the environment there, and print its path.")
@click.option("--report", type=click.Path(path_type=Path), hidden=True, help="Run here, and write the JSON there, too.")
def smoke(
    suite: str | None, gpu: int | None, cpu: bool, kernel: str | None, runs: int, limit: float, as_json: bool,
    target: str | None, ssh_key: Path | None, known_hosts: Path | None, wheel: Path | None, python: str | None,
    keep: bool, report: Path | None,
) -> None:  # fmt: skip
    """Test kvbm on this machine, or with --ssh on another: a suite of NVFP4 products, and copies between layouts.

    Prints the sizes, the result and the time of each test. Exits with 1 if a test fails, or if your kernel ends its process.
    Products need torch 2.8 or newer, and so does every test on a GPU: pip install 'kvbm-layouts[testing]'.

    With --ssh a wheel of this kvbm is copied to the other machine and installed in a new environment, with the packages that
    are missing there (such as torch). Everything is removed afterwards. The machine's key must be in known_hosts.
    """
    if cpu and gpu is not None:
        raise click.UsageError("--cpu and --gpu: expected one of them")
    if target is None:
        given = {
            "--ssh-key": ssh_key,
            "--known-hosts": known_hosts,
            "--wheel": wheel,
            "--python": python,
            "--keep": keep,
        }
        if alone := [name for name, value in given.items() if value]:
            raise click.UsageError(f"{', '.join(alone)}: expected together with --ssh")
        if kernel is not None and report is None:
            options = ["--suite", suite or "smoke", "--iters", str(runs), "--limit", str(limit), "--kernel", kernel]
            options += ["--cpu"] * cpu + ["--json"] * as_json + (["--gpu", str(gpu)] if gpu is not None else [])
            sys.exit(_in_subprocess(kernel, options))
        try:
            device, function = "cpu" if cpu else usable_device(f"--gpu {gpu}", gpu, "testing the CPU's"), load_kernel(kernel)
            step = None if as_json else _print
            suite = suite or _suite(device, function)
            done = run(suite, device=device, kernel=function, num_runs=runs, limit_s=limit, step=step)
        except KvbmError:
            if report is not None:
                report.touch()  # empty: the run ended with an error, which is printed
            raise
    else:
        from . import remote

        asked = remote.Options(
            target=target, key=ssh_key, known_hosts=known_hosts, wheel=wheel, python=python or "python3", gpu=gpu,
            cpu=cpu, kernel=kernel, keep=keep, arguments=("--suite", suite or "smoke", "--iters", str(runs), "--limit", str(limit)),
        )  # fmt: skip
        done = remote.run(asked, note=lambda line: None if is_quiet() else click.echo(line, err=True))
        for result in () if as_json else done.tests:
            _print(result)
    if as_json:
        click.echo(done.to_json())
    else:
        where = f"{done.machine} ({done.device}{' of ' + done.host if done.host else ''})"
        click.echo(f"{done.correct} of {len(done.tests)} correct in {done.seconds:.1f} s, on {where}, kvbm {done.kvbm}")
    if report is not None:
        report.write_text(done.to_json(), encoding="utf-8")
    sys.exit(0 if done.correct == len(done.tests) else 1)


def _suite(device: str, kernel: Any) -> str:
    """The default suite: without torch the copies alone, where they need none."""
    if device != "cpu" or kernel is not None or importlib.util.find_spec("torch") is not None:
        return "smoke"
    note("torch is not installed: only copies are tested, no NVFP4 products. For all of it: pip install 'kvbm-layouts[testing]'")
    return COPIES


def _in_subprocess(kernel: str, options: Sequence[str]) -> int:
    """Run the same command in a separate process, and return its exit code: the kernel may end its process."""
    with tempfile.TemporaryDirectory(prefix="kvbm-smoke-") as folder:
        file = Path(folder, "report.json")
        command = [sys.executable, "-P", "-m", __spec__.name, *options, "--report", str(file)]
        code = subprocess.call(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        if file.exists():
            if not (text := file.read_text(encoding="utf-8")):
                return code
            report = Report.from_json(text)
            return 0 if report.correct == len(report.tests) else 1
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    print_error(KvbmError(f"--kernel {kernel}: the process ended {how} before the last test"))
    return 1


def _print(result: Result) -> None:
    mark = click.style("ok   ", fg="green") if result.correct else click.style("WRONG", fg="red", bold=True)
    took = f"{result.avg_time_ms:,.4f} ms" if result.avg_time_ms is not None else "-"
    click.echo(f"{mark}  {result.name:<32} {took:>16}  {result.dimensions}")
    if result.error:
        click.echo(f"       {result.error}")


def load_kernel(text: str | None) -> Callable[[Any], Any] | None:
    """``module:function`` or ``file.py:function``.

    Raises `SpecError`: the text is neither, or there is no such function.
    """
    if text is None:
        return None
    from .limits import error_text

    module, _, name = text.rpartition(":")
    if not module or not name:
        raise SpecError(f"--kernel {text}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        kernel = getattr(_file(Path(module)) if module.endswith(".py") else importlib.import_module(module), name)
    except OSError as error:
        raise SpecError(f"--kernel {text}: {error.filename}: {error.strerror}") from error
    except (AttributeError, ImportError) as error:
        raise SpecError(f"--kernel {text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise SpecError(f"--kernel {text}: it cannot be loaded: {error_text(error, __file__)}") from error
    if not callable(kernel):
        raise SpecError(f"--kernel {text}: expected a function, got a {type(kernel).__name__}")
    function: Callable[[Any], Any] = kernel
    return function


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    Group(commands=[smoke]).main(["smoke", *sys.argv[1:]], prog_name="kvbm")
