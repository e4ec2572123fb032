"""kvbm.testing on a GPU: events, hangs of the GPU alone, the NVFP4 example, layout cases, kvbm smoke."""

# ruff: noqa: ARG005  (a kernel has an argument, whether it looks at it or not)
from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvbm
import matrix
from kvbm.cli.app import main
from kvbm.testing import CORRECTNESS_TESTS, SMOKE_TESTS, TestCase, benchmark_kernel, layout_cases, make_match_reference
from kvbm.testing.nvfp4 import example_kernel, generate_input, ref_kernel, swizzle_scales

pytestmark = pytest.mark.gpu

#: Some seconds of a GPU.
LONG = 6_000_000_000


# ---- timing --------------------------------------------------------------------------------------------------------


def test_events_around_each_run(torch: Any) -> None:
    value = torch.randn(1024, 1024, device="cuda")
    result = benchmark_kernel(lambda x: x @ x, value, 3, 20)
    average, error = result
    record = result.record
    assert error is None and 0 < record.min_time_ms <= average <= record.max_time_ms  # type: ignore[operator]
    assert record.timing == "events" and record.device == torch.cuda.get_device_name(0)
    assert record.input_bytes == 4 << 20 and 2 <= record.input_sets <= 20


@pytest.mark.usefixtures("side_stream")
def test_the_current_stream_and_device_are_the_caller_s(torch: Any) -> None:
    want, seen = torch.cuda.current_stream(), []
    value = torch.ones(4, device="cuda")
    assert benchmark_kernel(lambda x: seen.append(torch.cuda.current_stream()), value, 1, 2).error is None
    assert make_match_reference(lambda x: x)(lambda x: seen.append(torch.cuda.current_stream()) or x, value)[0]
    assert len(seen) == 4 and set(seen) == {want} and want != torch.cuda.default_stream()


def test_inputs_take_turns(torch: Any) -> None:
    seen: list[int] = []

    def kernel(x: Any) -> Any:
        seen.append(x.data_ptr())
        return x * 2

    value = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    result = benchmark_kernel(kernel, value, 0, 40)
    assert result.error is None and len(set(seen)) == result.record.input_sets > 2
    assert value.data_ptr() not in seen
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    assert result.record.input_sets == 40 or result.record.input_sets * value.nbytes >= 2 * l2


def test_a_kernel_that_hangs_on_the_gpu(torch: Any) -> None:
    """It returns at once, and the GPU is not done: the event is queried without waiting."""
    value = torch.ones(4, device="cuda")
    try:
        ok, error = make_match_reference(lambda x: x, limit_s=0.5)(lambda x: torch.cuda._sleep(LONG), value)
        # On a busy machine it goes on with the time in which threads waited for a core.
        assert not ok and error is not None and error.startswith(
            "the kernel hangs: it returned, but the GPU was not done with its work within its limit of 0.5 s"
        )  # fmt: skip
    finally:
        torch.cuda.synchronize()
    try:
        average, error = benchmark_kernel(lambda x: torch.cuda._sleep(LONG), value, 1, 3, limit_s=0.5)
        assert math.isnan(average) and error is not None and "the GPU was not done with its work" in error
    finally:
        torch.cuda.synchronize()


def test_a_kernel_that_waits_for_a_hanging_gpu(torch: Any) -> None:
    def kernel(x: Any) -> None:
        torch.cuda._sleep(LONG)
        torch.cuda.synchronize()

    try:
        _, error = make_match_reference(lambda x: x, limit_s=0.2)(kernel, torch.ones(4, device="cuda"))
        assert error is not None and error.startswith("the kernel hangs: it did not return within its limit of 0.2 s")
    finally:
        torch.cuda.synchronize()


def test_nan_and_exceptions(torch: Any) -> None:
    value = torch.ones(3, 5, device="cuda", dtype=torch.float16)

    def broken(x: Any) -> Any:
        x[2, 4] = math.nan
        return x

    assert benchmark_kernel(broken, value, 1, 2).error == "the kernel returned NaN at (2, 4); 1 of 15 elements are NaN"
    ok, error = make_match_reference(lambda x: x)(broken, value)
    assert not ok and error == "NaN at (2, 4), where 1.0 was expected; 1 of 15 elements are NaN"
    assert "the kernel raised" in str(benchmark_kernel(lambda x: x @ x, value, 1, 2).error)


def test_a_kernel_that_makes_the_gpu_fail() -> None:
    """In a separate process, because nothing runs on the GPU in it afterwards."""
    program = Path(__file__).parents[1] / "programs" / "gpu_fails.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=120)
    assert re.match(r"the (GPU failed while running the kernel|kernel raised)", done.stdout), done.stdout + done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(128, 256, 1), (256, 512, 2), (128, 20, 3)])
def test_the_same_data_on_the_gpu(torch: Any, sizes: tuple[int, int, int]) -> None:
    """Also the permuted scales, which another kernel has computed."""
    near, far = (generate_input(*sizes, seed=7, device=device) for device in ("cpu", "cuda"))
    for one, other in zip(near, far, strict=True):
        assert other.is_cuda and one.stride() == other.stride()
        bits = torch.uint8 if one.element_size() == 1 else torch.int16
        assert torch.equal(one.view(bits), other.cpu().view(bits))
    assert generate_input(*sizes, seed=7)[0].is_cuda, "the GPU where there is one"


@pytest.mark.parametrize("case", [*SMOKE_TESTS, *CORRECTNESS_TESTS, TestCase(128, 20, 2, seed=5, name="part")], ids=str)
def test_the_example_is_right(case: TestCase) -> None:
    assert make_match_reference(ref_kernel)(example_kernel, case.data(device="cuda")) == (True, None)


@pytest.mark.usefixtures("torch")
def test_the_reference_is_that_of_the_cpu() -> None:
    case = CORRECTNESS_TESTS[1]
    near, far = (ref_kernel(case.data(device=device)) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(far.cpu().float().numpy(), near.float().numpy(), rtol=2.0**-10, atol=2.0**-9)


@pytest.mark.usefixtures("side_stream")
@pytest.mark.parametrize("layout", ["swizzle/128x4", "swizzle/8x4"])
def test_swizzles_of_large_batches(torch: Any, layout: str) -> None:
    scales = torch.randint(0, 256, (16, 1000, 250), dtype=torch.uint8)
    near, far = swizzle_scales(scales, layout), swizzle_scales(scales.cuda(), layout)
    assert torch.equal(near, far.cpu())


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in matrix.further() if not matrix.latent(name)][::3])
@pytest.mark.usefixtures("side_stream")
def test_kvbm_s_copies_are_right(name: str) -> None:
    for case in layout_cases(
        pairs=[("nhd", name), (name, "nhd")], dtypes=["bfloat16", "uint8"], batches=[3], device="cuda"
    ):
        src = kvbm.Pool(case.src, case.shape, case.src_arrays)
        dst = kvbm.Pool(case.dst, case.shape, case.dst_arrays)
        assert case.error() is not None, "nothing is copied yet"
        kvbm.convert(src, dst, case.src_ids, case.dst_ids)
        case.check()
        case.dst_arrays[0].view(-1)[0].bitwise_not_() if case.shape.dtype == "uint8" else case.dst_arrays[0].neg_()
        with pytest.raises(AssertionError):
            case.check()


# ---- kvbm smoke ----------------------------------------------------------------------------------------------------


def test_smoke() -> None:
    done = CliRunner().invoke(main, ["smoke", "--gpu", "0", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["device"] == "cuda:0" and said["correct"] == said["total"] == 6 and said["driver"]
    assert all(test["timing"] == "events" and test["avg_time_ms"] > 0 for test in said["tests"])


@pytest.mark.timeout(300)
def test_smoke_over_ssh(tmp_path: Path) -> None:
    pytest.importorskip("fabric")
    pytest.importorskip("asyncssh")
    import sshd

    with sshd.serve(tmp_path) as server:
        arguments = ["smoke", "--ssh", server.target, "--ssh-key", server.user_key, "--known-hosts", server.known_hosts]
        done = CliRunner().invoke(main, [*map(str, arguments), "--python", sys.executable, "--gpu", "0"])
    assert done.exit_code == 0, done.output
    assert f"(cuda:0 of {server.target})" in done.stdout and "6 of 6 correct" in done.stdout
