"""kvbm.testing: cases, comparison, timing.  A kernel that raises, hangs or returns NaN gives a sentence, never an exception."""

# ruff: noqa: ARG005  (a kernel has an argument, whether it looks at it or not)
from __future__ import annotations

import collections
import concurrent.futures
import csv
import ctypes
import dataclasses
import doctest
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

import kvbm.testing
import processes
from kvbm.cli.app import main
from kvbm.errors import SpecError
from kvbm.testing import (
    CORRECTNESS_TESTS,
    PERFORMANCE_TESTS,
    SMOKE_TESTS,
    TestCase,
    allclose_with_error,
    benchmark_kernel,
    cases,
    compare,
    data,
    limits,
    make_match_reference,
    timing,
    write_csv,
)

pytestmark = pytest.mark.usefixtures("small_caches")


#: As `small_caches`, in a program.
SMALL = "from kvbm.system import machine; machine.cache_bytes = lambda place: 64 << 10\n"


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- imports -------------------------------------------------------------------------------------------------------


def test_importing_it_imports_nothing() -> None:
    loaded = fresh("import sys, kvbm.testing as t; t.__all__, dir(t); print(sorted(sys.modules))")
    for name in ("numpy", "torch", "click", "pytest", "fabric", "kvbm._core", "kvbm.testing.cases"):
        assert f"'{name}'" not in loaded, name


def test_importing_kvbm_imports_nothing_of_it() -> None:
    assert "kvbm.testing" not in fresh("import sys, kvbm; kvbm.load('nhd'); print(sorted(sys.modules))")


def test_cases_and_comparison_need_no_torch() -> None:
    code = "import sys; from kvbm.testing import *; import kvbm.testing as t; [getattr(t, n) for n in t.__all__]; "
    assert "'torch'" not in fresh(code + "allclose_with_error([1.0], [1.0]); print(sorted(sys.modules))")


def test_public_names() -> None:
    for name in kvbm.testing.__all__:
        assert getattr(kvbm.testing, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        kvbm.testing.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["", ".cases", ".compare", ".data", ".timing", ".layouts", ".nvfp4", ".remote"])
@pytest.mark.usefixtures("torch")
def test_doctests(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"kvbm.testing{name}"))
    assert not found.failed and (found.attempted or name == ".data")


# ---- cases ---------------------------------------------------------------------------------------------------------

SUITES = {
    SMOKE_TESTS: {"tiny_single": (128, 256, 1), "small_batch": (256, 512, 2)},
    CORRECTNESS_TESTS: {
        "min_size": (128, 256, 1), "medium": (256, 512, 4), "large": (512, 1024, 8), "xlarge": (1024, 2048, 16),
    },
    PERFORMANCE_TESTS: {"perf_medium": (512, 2048, 32), "perf_large": (1024, 4096, 64)},
}  # fmt: skip


def test_the_suites_are_those_of_the_issue() -> None:
    for suite, want in SUITES.items():
        assert {case.name: (case.m, case.k, case.l) for case in suite} == want
    seeds = [case.seed for suite in SUITES for case in suite]
    assert len(set(seeds)) == len(seeds)
    assert set(cases.SUITES.values()) == set(SUITES)


def test_a_case_is_frozen_and_has_no_data() -> None:
    case = SMOKE_TESTS[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.m = 256  # type: ignore[misc]
    assert case == dataclasses.replace(case) and hash(case) == hash(dataclasses.replace(case))
    assert TestCase.__test__ is False and str(case) == "tiny_single 128×256×1"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("m", 100, "m: expected a multiple of 128, got 100"),
        ("m", 0, "m: expected an integer from 1 on, got 0"),
        ("k", 6, "k: expected a multiple of 4, got 6"),
        ("k", -4, "k: expected an integer from 1 on, got -4"),
        ("l", 0, "l: expected an integer from 1 on, got 0"),
        ("l", True, "l: expected an integer from 1 on, got True"),
        ("m", 128.0, "m: expected an integer from 1 on, got 128.0"),
        ("seed", -1, "seed: expected an integer from 0 on, got -1"),
        ("seed", None, "seed: expected an integer from 0 on, got None"),
        ("name", " ", "name: expected a text that is not empty, got ' '"),
        ("name", 7, "name: expected a text that is not empty, got 7"),
    ],
)
def test_no_case(field: str, value: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        TestCase(**{"m": 128, "k": 256, "l": 1, "seed": 0, "name": "x", field: value})
    assert str(caught.value).startswith("test case") and str(caught.value).endswith(said)


def test_data_are_made_when_they_are_asked_for() -> None:
    asked = []

    def generate(**sizes: Any) -> object:
        asked.append(sizes)
        return object()

    case = TestCase(128, 4, 3, seed=9, name="mine")
    assert not asked
    assert case.data(generate, device="cpu") is not case.data(generate)
    assert asked == [{"m": 128, "k": 4, "l": 3, "seed": 9, "device": "cpu"}, {"m": 128, "k": 4, "l": 3, "seed": 9}]


# ---- comparison ----------------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "want"),
    [
        ([1.0, 2.5], [1.0, 2.0], (True, 0.5, 0.25)),
        ([1.0, 4.5], [1.0, 2.0], (False, 2.5, 1.25)),
        ([], [], (True, 0.0, 0.0)),
        ([NAN], [NAN], (False, NAN, NAN)),
        ([NAN, 1.0], [1.0, 1.0], (False, NAN, NAN)),
        ([1.0], [NAN], (False, NAN, NAN)),
        ([INF], [INF], (True, 0.0, 0.0)),
        ([-INF], [INF], (False, INF, INF)),
        ([1.0], [INF], (False, INF, INF)),
        ([INF], [1.0], (False, INF, INF)),
        ([0.5], [0.0], (True, 0.5, INF)),
        ([0.0], [0.0], (True, 0.0, 0.0)),
        ([[1.0]], [1.0], (False, INF, INF)),
        ([1.0], [1], (False, INF, INF)),
        ([True, False], [True, True], (True, 1.0, 1.0)),
        ([2**62 + 3], [2**62], (True, 1.0, 2.0**-62)),
        ([2 + 1j], [2 + 0j], (True, 1.0, 0.5)),
        ([complex(INF, 1)], [complex(INF, 2)], (False, INF, INF)),
        ([complex(INF, INF)], [complex(INF, -INF)], (False, INF, INF)),
        ([complex(INF, 1)], [complex(INF, 1)], (True, 0.0, 0.0)),
        ([complex(INF, NAN)], [complex(INF, 1)], (False, NAN, NAN)),
    ],
)
def test_allclose_with_error(actual: Any, expected: Any, want: tuple[Any, ...]) -> None:
    got = allclose_with_error(np.array(actual), np.array(expected), rtol=0.0, atol=1.0)
    assert isinstance(got[0], bool) and got[0] is want[0]
    np.testing.assert_array_equal(got[1:], want[1:])


@pytest.mark.parametrize("rtol", [0.0, 0.5])
@pytest.mark.parametrize("atol", [0.0, 0.25])
def test_it_agrees_with_numpy(rtol: float, atol: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        pair = random.integers(-3, 4, (2, 3)) / 4
        assert allclose_with_error(pair[0], pair[1], rtol, atol)[0] is bool(np.allclose(*pair, rtol=rtol, atol=atol))


def test_no_integer_difference_is_lost() -> None:
    one, other = np.array([2**62]), np.array([2**62 + 1])
    assert allclose_with_error(one, other, 0.0, 0.0)[:2] == (False, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_a_thread_that_flushes_subnormals_sees_that_they_differ(torch: Any, dtype: str) -> None:
    """Red: all of them were equal to zero, and to each other."""
    least = float(np.finfo("float64" if dtype == "float64" else "float32").tiny) / 4
    zero, one, two = (np.full(4, factor * least, dtype) for factor in (0, 1, 2))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    try:
        assert zero[0] == one[0], "the test does not flush anything"
        near, twice = allclose_with_error(zero, one, 0, 0), allclose_with_error(two, one, 0, 0)
        is_right, said = make_match_reference(lambda _: one, 0, 0)(lambda _: zero, 0)
    finally:
        torch.set_flush_denormal(False)
    assert near == twice == (False, least, 1.0) and not is_right and "4 of 4 elements are wrong" in str(said)


def test_pieces_are_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    one, other = random.standard_normal((2, 7, 11))
    one[6, 10] += 100
    whole = allclose_with_error(one, other), make_match_reference(lambda _: other)(lambda _: one, 0)
    monkeypatch.setattr(compare, "CHUNK", 5)
    assert (allclose_with_error(one, other), make_match_reference(lambda _: other)(lambda _: one, 0)) == whole
    assert "wrong at (6, 10)" in whole[1][1]


@pytest.mark.parametrize("tolerances", [(-1.0, 0.0), (0.0, NAN)])
def test_no_tolerance(tolerances: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected a number from 0 on"):
        allclose_with_error(np.ones(1), np.ones(1), *tolerances)
    with pytest.raises(ValueError, match="expected a number from 0 on"):
        make_match_reference(abs, *tolerances)


def test_tensors_of_any_dtype(torch: Any) -> None:
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64", "int8", "bool"):
        one = torch.tensor([1.0, 0.0, 1.0]).to(getattr(torch, name))
        other = torch.tensor([1.0, 1.0, 1.0]).to(getattr(torch, name))
        assert allclose_with_error(one, one.clone()) == (True, 0.0, 0.0), name
        assert allclose_with_error(one, other) == (False, 1.0, 1.0), name
        if name.startswith(("float", "bfloat")):
            assert not allclose_with_error(torch.tensor([NAN]).to(one.dtype), torch.tensor([NAN]).to(one.dtype))[0]
    packed = torch.tensor([0x21], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert allclose_with_error(packed, kvbm.testing.data.clone(packed)) == (True, 0.0, 0.0)
    assert not allclose_with_error(packed, torch.tensor([0x12], dtype=torch.uint8).view(packed.dtype))[0]
    assert not allclose_with_error(torch.ones(1), torch.ones(1, dtype=torch.float16))[0], "dtypes must agree"
    assert allclose_with_error(torch.ones(1), np.ones(1, np.float32))[0], "whose they are does not matter"


# ---- against a reference -------------------------------------------------------------------------------------------

X = np.arange(6.0).reshape(2, 3)


def check(kernel: Any, value: Any = X, reference: Any = lambda x: x * 2, **rest: Any) -> str:
    ok, error = make_match_reference(reference, **rest)(kernel, value)
    assert isinstance(error, str) and ok is False
    return error


def raises(x: Any) -> Any:
    raise LookupError("no row 7")


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise LookupError


def mute(x: Any) -> Any:
    raise Mute


def itself(x: Any) -> Any:
    found: list[Any] = []
    found.append(found)
    return found


class Shapeless:
    dtype = "float64"
    __cuda_array_interface__: Any = None

    @property
    def shape(self) -> Any:
        raise LookupError("no row 7")


def test_what_is_no_array() -> None:
    for value in (None, "text", b"bytes", True, 3, 2.5j):
        assert make_match_reference(lambda x, value=value: value)(lambda x, value=value: value, X) == (True, None)
    assert check(lambda x: "b", reference=lambda x: "a") == "expected 'a', got 'b'"
    assert check(lambda x: x, reference=lambda x: None) == "expected None, got a ndarray"
    assert check(lambda x: None, reference=lambda x: 1.0) == "dtype: expected float64, got object"


@pytest.mark.slow  # 0.8 s
def test_inputs_of_any_container() -> None:
    given = collections.defaultdict(list, x=X, y=[X])
    given["y"].append(X)

    def kernel(data: Any) -> Any:
        assert type(data) is collections.defaultdict and data["z"] == [] and data["x"] is not X
        return data["x"] + data["y"][1]

    assert make_match_reference(kernel)(kernel, given) == (True, None) and "z" not in given
    assert benchmark_kernel(kernel, given, 0, 1).error is None
    with pytest.raises(ValueError, match="contains itself"):
        benchmark_kernel(kernel, itself(0), 0, 1)


def test_no_limit_at_all() -> None:
    assert make_match_reference(lambda x: x * 2, limit_s=math.inf)(lambda x: x + x, X) == (True, None)
    assert benchmark_kernel(lambda x: x, X, 0, 1, limit_s=math.inf).error is None


def test_a_result_that_cannot_be_looked_at() -> None:
    assert "a list that contains itself" in str(benchmark_kernel(itself, X, 0, 1).error)


@pytest.mark.quick
def test_processes_that_a_kernel_forks_end(tmp_path: Path) -> None:
    """Red: each of them continued the loop and forked again; the last one reported its own result."""
    code = (
        "import os, sys\nfrom kvbm.testing import benchmark_kernel, make_match_reference\n"
        f"{SMALL}def kernel(x):\n    if os.fork() == 0:\n        os.write(1, b'child ')\n    return x\n"
        "make_match_reference(lambda x: x)(kernel, 1)\nbenchmark_kernel(kernel, 1, 1, 3)\n"
        "for _ in range(5): os.wait()\nos.write(1, b'parent')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert sorted(done.stdout.split()) == ["child"] * 5 + ["parent"], done.stderr


def test_what_is_right() -> None:
    assert make_match_reference(lambda x: x * 2)(lambda x: x + x, X) == (True, None)
    assert make_match_reference(lambda x: x * 2)(lambda x: x * 2.001, X) == (True, None)


def test_the_worst_element_is_told() -> None:
    error = check(lambda x: x * 2 + np.eye(2, 3) * [[1], [5]])
    assert error == (
        "wrong at (1, 1): expected 8.0, got 13.0 (absolute error 5, relative 0.625; rtol=0.001, atol=0.001); "
        "2 of 6 elements are wrong"
    )


def test_worst_is_the_farthest_outside_its_tolerance() -> None:
    """Not the largest error: 1,000 may be off by 100, and 1 may not be off by 50."""
    error = check(lambda x: np.array([1101.0, 51.0]), 0, lambda x: np.array([1000.0, 1.0]), rtol=0.1, atol=0.0)
    assert error.startswith("wrong at (1,): expected 1.0, got 51.0") and "2 of 2" in error


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (raises, r"the kernel raised LookupError: no row 7 \(line \d+ of test_testing.py\)"),
        (lambda x: sys.exit(3), r"the kernel raised SystemExit: 3 \(line \d+ of test_testing.py\)"),
        (
            lambda x: np.where(x == 4, np.nan, x * 2),
            r"NaN at \(1, 1\), where 8.0 was expected; 1 of 6 elements are NaN",
        ),
        (lambda x: x[:1] * 2, r"shape: expected \(2, 3\), got \(1, 3\)"),
        (lambda x: (x * 2).astype(np.float32), "dtype: expected float64, got float32"),
        (lambda x: None, r"the kernel returned nothing \(None\); expected an array of shape \(2, 3\)"),
        (lambda x: (x * 2, x), "the kernel returned a tuple of 2; expected a ndarray, as the reference returns"),
        (mute, r"the kernel raised Mute: \(its message cannot be read: LookupError\) \(line \d+ of test_testing.py\)"),
        (itself, r"looking at what the kernel returned raised ValueError: \[0\]: a list that contains itself.*"),
        (lambda x: Shapeless(), r"looking at what the kernel returned raised LookupError: no row 7.*"),
    ],
)
def test_what_is_wrong(kernel: Any, said: str) -> None:
    assert re.fullmatch(said, check(kernel)), check(kernel)


def test_several_results_are_named() -> None:
    def reference(x: Any) -> Any:
        return {"sum": x.sum(), "rows": [x, x + 1]}

    assert make_match_reference(reference)(reference, X) == (True, None)
    wrong = check(lambda x: {"sum": x.sum(), "rows": [x, x + 2]}, reference=reference)
    assert wrong.startswith("['rows'][1]: wrong at (0, 0): expected 1.0, got 2.0")


def test_neither_sees_what_the_other_writes() -> None:
    def in_place(x: Any) -> Any:
        x *= 2
        return x

    value = X.copy()
    assert make_match_reference(in_place)(in_place, value) == (True, None)
    assert np.array_equal(value, X)


def test_a_failure_of_the_reference_is_thrown() -> None:
    with pytest.raises(LookupError, match="no row 7"):
        make_match_reference(raises)(lambda x: x, X)


@pytest.fixture
def hanging() -> Iterator[Any]:
    """A kernel that returns only when the test is over."""
    over = threading.Event()
    yield lambda x: over.wait()
    over.set()


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE", 0.01)


@pytest.mark.usefixtures("no_grace")
def test_a_kernel_that_hangs(hanging: Any) -> None:
    said = "the kernel hangs: it did not return within its limit of 0.05 s"  # on a busy machine: ", and 0.1 s more in which …"
    assert str(check(hanging, limit_s=0.05)).startswith(said)
    average, error = benchmark_kernel(hanging, X, 2, 3, limit_s=0.05)
    assert math.isnan(average)
    assert error is not None and error.startswith(said)
    assert " (after 0 of 5 calls), and no longer computes; limit_s= " in error


def computes(seconds: float, over: threading.Event | None = None) -> None:
    """Use a core, or wait for one, until the time or the test is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (over is not None and over.is_set()):
        pass


def on_a_thread(seconds: float) -> None:
    worker = threading.Thread(target=computes, args=(seconds,), daemon=True)
    worker.start()
    worker.join()


@pytest.mark.slow  # three limits each
@pytest.mark.usefixtures("no_grace")
def test_a_kernel_that_computes_for_longer_than_its_limit_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a slow machine was a hang, also for kvbm's own copies.  Threads of a pool and threads that have ended count, too."""
    monkeypatch.setattr("kvbm.system.machine.cache_bytes", lambda device: 1 << 20)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the pool's thread is there before the call
        kernels = [
            lambda x: computes(0.6) or x,
            lambda x: pool.submit(computes, 0.6).result() or x,
            lambda x: [on_a_thread(0.05) for _ in range(12)] and x,
        ]
        for kernel in kernels:
            assert make_match_reference(lambda x: x, limit_s=0.2)(kernel, X) == (True, None)
    assert benchmark_kernel(lambda x: computes(0.2) or x, X, 1, 2, limit_s=0.2).error is None


@pytest.mark.slow  # ten limits, twice
@pytest.mark.usefixtures("no_grace")
def test_a_kernel_that_computes_for_ever_is_too_slow_and_does_not_hang(hanging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it a sign, while it goes on, that the next one computes."""
    monkeypatch.setattr("kvbm.system.machine.cache_bytes", lambda device: 1 << 20)
    over = threading.Event()
    try:
        error = check(lambda x: computes(math.inf, over), limit_s=0.3)
        said = "the kernel is too slow: it did not return within 10 times its limit of 0.3 s: it computed all the time"
        assert error.startswith(said) and "limit_s=" in error
        assert check(hanging, limit_s=0.3).startswith("the kernel hangs: it did not return within its limit of 0.3 s")
        _, error = benchmark_kernel(lambda x: computes(0.02, over), 1, 0, 1000, limit_s=0.3)
        assert error is not None
        assert re.match(r"the kernel is too slow: .* within 10 times its limit of 0.3 s \(after \d+ of 1000 calls\)", error), error
    finally:
        over.set()


@pytest.mark.usefixtures("no_grace")
def test_a_thread_that_waits_for_a_gpu_by_polling_is_no_sign_that_the_gpu_computes() -> None:
    over = threading.Event()
    try:
        with pytest.raises(limits.KernelFailure, match=r"the kernel hangs: .* its limit of 0.05 s"):
            limits.run(lambda _: computes(math.inf, over), 0.05, on_gpu=True)
    finally:
        over.set()


@pytest.mark.slow  # half a second
def test_many_calls_that_take_too_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single call hangs; the loop ends by itself, and no thread continues."""
    monkeypatch.setattr("kvbm.system.machine.cache_bytes", lambda device: 1 << 20)  # the time to overwrite a large one counts
    pause = threading.Event()
    _, error = benchmark_kernel(lambda x: pause.wait(0.02), 1, 0, 1000, limit_s=1.5)
    assert error is not None
    assert "is too slow: its calls were not done within its limit of 1.5 s" in error and "of 1000 calls" in error
    assert not [
        thread for thread in threading.enumerate() if thread.name == "kvbm.testing kernel" and thread.is_alive()
    ]


@pytest.mark.parametrize("limit", [0, -1.0, NAN])
def test_no_limit(limit: float) -> None:
    with pytest.raises(ValueError, match="limit_s: expected a number of seconds above 0"):
        make_match_reference(abs, limit_s=limit)
    with pytest.raises(ValueError, match="limit_s"):
        benchmark_kernel(abs, 1, limit_s=limit)


def test_kernels_run_as_if_on_the_thread_that_asks(torch: Any) -> None:
    """Gradients, autocast and context variables are those of the caller."""
    import contextvars

    variable = contextvars.ContextVar("variable", default=1)
    variable.set(2)

    def kernel(x: Any) -> Any:
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((*state, variable.get()))
        return x

    match, seen = make_match_reference(lambda x: x), []
    match(kernel, X)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        match(kernel, X)
    with torch.inference_mode():
        match(kernel, X)
    assert seen == [(True, False, False, 2), (False, False, True, 2), (False, True, False, 2)]


def test_kernels_have_as_many_helpers_as_the_caller(torch: Any) -> None:
    """Torch's number of threads is per process; OpenMP's is per thread, and matrix products use it."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"\S*/torch\S*/libgomp\S*$", maps, re.MULTILINE) or re.search(
        r"\S*/libgomp\S*$", maps, re.MULTILINE
    )
    if found is None:
        pytest.skip("this torch goes without GNU's OpenMP")
    library, before = ctypes.CDLL(found[0]), torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads((os.cpu_count() or 1) + 1)
        make_match_reference(lambda x: x)(lambda x: seen.append(library.omp_get_max_threads()) or x, X)
    finally:
        torch.set_num_threads(before)
    assert seen == [(os.cpu_count() or 1) + 1]


# ---- copies of inputs ----------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    a: Any
    rest: dict[str, Any]


def test_clones_have_values_strides_and_containers() -> None:
    made = data.clone(Inputs(np.asfortranarray(X), {"x": [X.T, 7, None]}))
    assert type(made) is Inputs and made.rest["x"][1:] == [7, None]
    assert made.a.strides == np.asfortranarray(X).strides and np.array_equal(made.a, X)
    made.rest["x"][0][...] = 0
    assert X.any() and data.nbytes(made) == 2 * X.nbytes


def test_clones_of_tensors(torch: Any) -> None:
    packed = torch.arange(24, dtype=torch.uint8).view(2, 3, 4).permute(1, 2, 0).view(torch.float4_e2m1fn_x2)
    padded = torch.arange(24.0).view(4, 6)[:, :4]
    for tensor in (packed, padded, torch.ones(3).to(torch.float8_e4m3fn), torch.ones((), requires_grad=True)):
        made = data.clone([tensor])[0]
        assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert made.data_ptr() != tensor.data_ptr() and made.requires_grad == tensor.requires_grad
        assert allclose_with_error(made, tensor, 0, 0)[0]


# ---- timing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock in nanoseconds that only the kernel advances."""
    now = [0]
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr("kvbm.system.machine.cache_bytes", lambda place: 1000)
    return now


def test_the_average_is_that_of_the_timed_runs(clock: list[int]) -> None:
    takes = iter([900, 900, 1, 2, 3, 6])  # milliseconds; the first two are warm-ups

    def kernel(x: Any) -> Any:
        clock[0] += next(takes) * 1_000_000
        return x

    result = benchmark_kernel(kernel, X, num_warmup=2, num_runs=4)
    average, error = result
    assert (average, error) == (3.0, None) == tuple(result)
    record = result.record
    assert (record.avg_time_ms, record.median_time_ms, record.min_time_ms, record.max_time_ms) == (3.0, 2.5, 1.0, 6.0)
    assert (record.num_warmup, record.num_runs, record.timing, record.input_bytes) == (2, 4, "clock", X.nbytes)
    assert record.name.endswith("kernel") and record.device and next(takes, None) is None


@pytest.mark.parametrize(
    ("nbytes", "runs", "sets"),
    [(8, 100, 100), (80, 100, 25), (800, 100, 3), (1600, 100, 2), (80_000, 100, 2), (80_000, 1, 1), (8, 3, 3)],
)
def test_inputs_take_turns(clock: list[int], nbytes: int, runs: int, sets: int) -> None:
    """Enough sets for twice the cache (1,000 bytes here), and never the same set twice in a row."""
    seen = []

    def kernel(x: Any) -> Any:
        seen.append(x["x"].ctypes.data)
        assert x["x"][0] == 7, "each has the values"

    value = np.full(nbytes // 8, 7.0)
    result = benchmark_kernel(kernel, {"x": value}, 0, runs)
    assert result.error is None and result.record.input_sets == sets
    assert len(set(seen)) == sets and value.ctypes.data not in seen
    assert all(a != b for a, b in zip(seen, seen[1:], strict=False))


@pytest.mark.slow  # 1 s
def test_inputs_without_arrays() -> None:
    result = benchmark_kernel(lambda x: x + 1, 1, 1, 2)
    assert result.error is None and result.avg_time_ms > 0 and result.record.input_sets == 1


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (raises, "the kernel raised LookupError: no row 7 (line"),
        (lambda x: np.full(3, np.nan), "the kernel returned NaN at (0,); 3 of 3 elements are NaN"),
        (lambda x: {"y": np.array([1, np.nan])}, "the kernel returned ['y']: NaN at (1,); 1 of 2 elements are NaN"),
    ],
)
def test_failures_are_returned(kernel: Any, said: str) -> None:
    result = benchmark_kernel(kernel, X, 1, 2)
    average, error = result
    assert math.isnan(average) and error is not None and error.startswith(said)
    assert result.record.avg_time_ms is None and result.record.error == error


@pytest.mark.parametrize(
    ("name", "value"), [("num_warmup", -1), ("num_runs", 0), ("num_runs", 2.0), ("num_runs", True)]
)
def test_no_number_of_runs(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an integer from"):
        benchmark_kernel(abs, 1, **{name: value})


def test_records_as_json_and_csv() -> None:
    good = benchmark_kernel(lambda x: x, X, 0, 1, name="good, fast").record
    bad = benchmark_kernel(raises, X, 0, 1).record
    assert json.loads(good.to_json()) == dataclasses.asdict(good)
    assert json.loads(bad.to_json())["avg_time_ms"] is None
    out = io.StringIO()
    write_csv([good, bad], out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [row["name"] for row in rows] == ["good, fast", "raises"]
    assert float(rows[0]["avg_time_ms"]) == good.avg_time_ms and rows[0]["error"] == ""
    assert rows[1]["avg_time_ms"] == "" and rows[1]["error"] == bad.error
    assert set(rows[0]) == {field.name for field in dataclasses.fields(good)}


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    benchmark_kernel(lambda x: x, X, 1, 1)
    assert dict(os.environ) == before


# ---- the document --------------------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "testing.md").read_text(encoding="utf-8")


def blocks(fence: str) -> list[str]:
    return re.findall(rf"^```{fence}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_what_the_document_says_runs(tmp_path: Path) -> None:
    """All Python blocks as one script; their output is that of the comments."""
    script = "\n".join(blocks("python"))
    done = processes.script(SMALL + script, tmp_path, module="torch")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^# ((?:wrong|nhd|pair|vllm/\S+) .*)$", script, re.MULTILINE)
    assert len(said) == 4
    for line in said:
        assert re.search("^" + ".*".join(map(re.escape, line.split("…"))) + "$", done.stdout, re.MULTILINE), line


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_the_document_s_test_passes(tmp_path: Path) -> None:
    (test,) = blocks('python title="test_mine.py"')
    (tmp_path / "test_mine.py").write_text(test, encoding="utf-8")
    (command,) = [block for block in blocks("sh") if block.startswith("pytest")]
    options = ["-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and f"{3 * 3 * 2 * 2} passed" in done.stdout, done.stdout


def test_the_document_s_commands_print_what_it_says() -> None:
    for block in blocks("console"):
        command, *expected = block.splitlines()
        printed = CliRunner().invoke(main, command.split()[2:], env={"COLUMNS": "100"}).output.splitlines()
        assert expected[-1] == "…" and printed[: len(expected) - 1] == expected[:-1]


def test_the_document_s_options_and_sentences_are_there() -> None:
    helped = CliRunner().invoke(main, ["smoke", "--help"]).output
    for option in set(
        re.findall(r"--[a-z-]+", "".join(block for block in blocks("sh") if block.startswith("kvbm smoke")))
    ):
        assert option in helped, option
    from kvbm import errors

    codes = {int(code) for code in re.findall(r"^\| .* \| (\d+) \|$", DOCUMENT, re.MULTILINE)}
    names = ("RemoteError", "UnreachableError", "HostKeyError", "AuthenticationError", "DeviceNotFoundError")
    assert codes == {getattr(errors, name).exit_code for name in names}
    for suite, cases_ in SUITES.items():
        for name, sizes in cases_.items():
            assert f"`{name}` {'×'.join(map(str, sizes))}" in DOCUMENT, suite


@pytest.mark.slow
def test_a_process_ends_with_its_own_exit_code_after_a_hang() -> None:
    """Python ends the hung thread inside a destructor of PyTorch that forbids it: without care, that is SIGABRT."""
    program = """
import sys, torch
from kvbm.testing import make_match_reference
def kernel(data):
    a = torch.ones(200, 200)
    while True:
        a = a @ a * 0
print(make_match_reference(lambda data: data[0], limit_s=0.2)(kernel, (torch.ones(3),)))
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 7 and "the kernel is too slow" in ended.stdout, ended


@pytest.mark.slow  # half a second
def test_seconds_without_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that needs 0.3 s on a machine that gives its threads no core meanwhile does not hang; one that never ends does."""
    start = time.monotonic()
    monkeypatch.setattr(limits, "GRACE", 0.0)
    monkeypatch.setattr(limits, "_tasks", lambda: {"1": (0.0, time.monotonic() - start)})
    ended = {False: r"too slow.* 10 times .*0.01 s.* waited for a core", True: r"hangs.*0.01 s, and .* more in which it waited"}
    for on_gpu, said in ended.items():
        assert limits.run(lambda _: time.sleep(0.3) or 5, 0.1, on_gpu=on_gpu) == 5
        with pytest.raises(limits.KernelFailure, match=said):
            limits.run(lambda _: threading.Event().wait(30), 0.01, on_gpu=on_gpu)
    monkeypatch.setattr(limits, "_tasks", dict)  # Linux does not count them
    for on_gpu in ended:
        with pytest.raises(limits.KernelFailure, match=r"hangs: it did not return within its limit of 0.02 s"):
            limits.run(lambda _: threading.Event().wait(30), 0.02, on_gpu=on_gpu)


def test_memory_is_compared_before_inputs_and_cases_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: copies of an input, and the arrays of a case, were made until the machine had no memory left."""
    from kvbm.bench import measure
    from kvbm.errors import NotEnoughMemoryError
    from kvbm.memory import allocation

    monkeypatch.setattr(allocation, "available_bytes", lambda: (3 << 20, "of this machine"))
    data = np.zeros(2 << 20, np.uint8)
    with pytest.raises(NotEnoughMemoryError, match="copies of the kernel's input: needs 4194304 bytes of host memory"):
        make_match_reference(lambda x: x)(lambda x: x, data)
    with pytest.raises(NotEnoughMemoryError, match="copies of the kernel's input"):
        benchmark_kernel(lambda x: x, data, 0, 5)
    case = kvbm.testing.LayoutCase(kvbm.load("nhd"), kvbm.load("hnd"), kvbm.BlockShape(nl=2, no=2, nh=4, nt=64, hd=128), 7)
    with pytest.raises(NotEnoughMemoryError, match="layout case nhd->hnd"):
        case.error()
    monkeypatch.setattr(measure, "available_bytes", lambda: (77, "of this machine"))
    assert measure.free_bytes("cpu") == 77


def test_a_tensor_without_its_memory_is_an_error_and_no_crash(torch: Any) -> None:
    """Torch itself reads behind a storage that was freed or made smaller; views that end before that end are right."""
    for count in (0, 8):
        gone, whole = torch.zeros(4, 4), torch.zeros(4, 4)
        view = gone[:1, :2]
        gone.untyped_storage().resize_(count)
        with pytest.raises(ValueError, match=f"expected a storage of 64 bytes or more, got {count}"):
            allclose_with_error(gone, whole)
        with pytest.raises(kvbm.BindError, match="freed or resized"):
            data.clone([{"x": gone}])
        if count:
            assert data.clone(view).shape == (1, 2)
    assert data.clone(torch.zeros(3, 0)).shape == (3, 0)
