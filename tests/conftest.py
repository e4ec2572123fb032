"""Markers, profiles and fixtures.  The oracle and the matrix share no code with kvbm; see oracle.py."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent

# torch's TCPStore asks for the names of addresses.  Where no name server answers, that would take 5 s a time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Threads of PyTorch, and processes in which it compiles, cost more to start than these small tensors take.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Built kernels are what is tested, also where others could be compiled for odd structures; test_nvrtc.py turns it on.
os.environ.setdefault("KVBM_NVRTC", "0")

# What tests share: oracle, matrix, test_planes; also under --import-mode=importlib.
_SHARED = [str(HERE.parent / "tools"), str(HERE / "helpers"), str(HERE)]
for _folder in (*sorted({str(path.parent) for path in HERE.glob("*/test_*.py")}), *_SHARED):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import processes  # noqa: E402
from few import spread  # noqa: E402

# Derandomised: a red run stays red.  KVBM_HYPOTHESIS=explore looks for new cases.
_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("quick", derandomize=True, database=None, max_examples=8, **_common)
settings.register_profile("ci", derandomize=True, database=None, max_examples=50, **_common)
settings.register_profile("full", derandomize=True, database=None, max_examples=1000, **_common)
settings.register_profile("deep", derandomize=True, database=None, max_examples=5000, **_common)
settings.register_profile("explore", max_examples=2000, **_common)


@cache
def why_no_gpu() -> str:
    """Empty if this run can use a GPU, else the reason.  It asks the driver, without kvbm and before torch is imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    status = driver.cuInit(0)
    if status:
        return f"cuInit returned {status}"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value == 0:
        return f"no CUDA device (status {status}, {count.value} devices)"
    try:
        import torch
    except ImportError as error:
        return f"GPU memory for the tests comes from torch: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    from kvbm import kernels

    if kernels.is_using_stubs():
        return "kvbm was built without CUDA kernels"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job: programs that tests interrupt inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.getoption("-m") or ""
    few = any(name in chosen and f"not {name}" not in chosen for name in ("quick", "sample"))
    usual = "quick" if few else "full" if "full" in chosen else "ci"
    settings.load_profile(os.environ.setdefault("KVBM_HYPOTHESIS", usual))  # programs that tests start look at it
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU, torch, and kvbm built with CUDA kernels")
    config.addinivalue_line("markers", "full: more cases of what another test shows; runs only with full in -m")
    config.addinivalue_line("markers", "slow: a test of half a second or more, which sample and quick leave out")
    config.addinivalue_line("markers", "sanitize: all of its cases run under AddressSanitizer, not only the quick ones")
    config.addinivalue_line("markers", "threads: runs on several threads, without `thread` in its name: for ThreadSanitizer")
    config.addinivalue_line("markers", "sample: a few cases of every test that is not slow (given by conftest.py)")
    config.addinivalue_line("markers", f"quick: {QUICK} case of every test of the sample that starts no process, or marked by hand")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Processes of ``-n auto``: one more than there are processors, as tests of links and wires wait.  Few tests do not."""
    return None if is_of_few(config) else len(os.sched_getaffinity(0)) + 1


def is_of_few(config: pytest.Config) -> bool:
    """True if ``-m`` names a marker that `choose` gives."""
    chosen = config.getoption("-m") or ""
    return "quick" in chosen or "sample" in chosen


#: Cases of a test: of `sample`, which the sanitizers run five times as long as others, and of `quick`.
SAMPLE = 1 if "KVBM_SANITIZE" in os.environ else 3
QUICK = 1
#: Names by which tests and their helpers start processes.
PROCESSES = {"subprocess", "multiprocessing", "processes", "fork", "sshd", "server", "pytester", "fake_driver", "fake_gpu", "place"}


@cache
def starts_process(function: FunctionType) -> bool:
    """Whether a function of the tests names one of `PROCESSES`, itself or in what it calls of its own module's functions."""
    codes, seen = [function.__code__], {function}
    while codes:
        code = codes.pop()
        if PROCESSES.intersection((*code.co_names, *code.co_varnames)):
            return True
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:
            named = function.__globals__.get(name)
            for one in vars(named).values() if isinstance(named, type) else (named,):
                if isinstance(one, FunctionType) and one not in seen and one.__code__.co_filename.startswith(f"{HERE}{os.sep}"):
                    seen.add(one)
                    codes.append(one.__code__)
    return False


def is_in_process(item: pytest.Item) -> bool:
    """Neither the test nor a fixture that it uses starts a process."""
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    used = (item.function, *(found[-1].func for found in fixtures.values()))  # type: ignore[attr-defined]
    return PROCESSES.isdisjoint(fixtures) and not any(starts_process(one) for one in used if isinstance(one, FunctionType))


def choose(items: Iterable[pytest.Item]) -> None:
    """Give items the markers `sample` and `quick`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for some in cases.values():
        for item in spread(some, SAMPLE):
            item.add_marker("sample")
        if is_in_process(some[0]):
            for item in spread(some, QUICK):
                item.add_marker("quick")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in (config.getoption("-m") or ""):
        dropped = [item for item in items if item.get_closest_marker("full")]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    if is_of_few(config):
        choose(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: no garbage collection looks at it, which takes a third of a second."""
    gc.disable()
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So do the packages that the tests of a file have imported, and their caches."""
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        reason = why_no_gpu()
        if reason and os.environ.get("KVBM_REQUIRE_GPU") == "1":
            pytest.fail(f"KVBM_REQUIRE_GPU=1, but {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> processes.FakeDriver:
    """Runs programs on a machine whose CUDA driver is data/fake_driver.c."""
    if processes.COMPILER is None:
        pytest.skip("no C compiler for the fake driver")
    return processes.FakeDriver(processes.made_once(tmp_path_factory, "driver", processes.compile_fake_driver))


@pytest.fixture(scope="session")
def fake_gpu(fake_driver: processes.FakeDriver) -> processes.FakeDriver:
    """As `fake_driver`, for programs that launch kernels."""
    from kvbm import kernels

    if kernels.is_using_stubs():
        pytest.skip("kvbm was built without CUDA kernels: there is nothing to launch")
    return fake_driver


@pytest.fixture
def place() -> Iterator[str]:
    """The port of a store by which processes connect (`programs.meeting`)."""
    if find_spec("torch") is None:
        yield ""
        return
    from programs import meeting

    store = meeting.host()
    yield str(store.port)


@pytest.fixture
def torch():  # type: ignore[no-untyped-def]
    return pytest.importorskip("torch")


@pytest.fixture
def side_stream() -> Iterator[object]:
    """A torch stream that is not the default one, made current."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For benchmarks: caches smaller than small pools, and a fixed commit.  To overwrite those of a server takes half a second."""
    from benchmarks import messages
    from kvbm.bench import measure

    for module in (measure, messages):
        monkeypatch.setattr(module, "cache_bytes", lambda _: 64 << 10)
    monkeypatch.setattr("kvbm.system.machine.cache_bytes", lambda _: 64 << 10)
    monkeypatch.setattr(measure, "NOISE_BYTES", 1 << 20)
    monkeypatch.setenv("KVBM_COMMIT", "abc1234")
    measure._noise.cache_clear()
    yield
    measure._noise.cache_clear()
