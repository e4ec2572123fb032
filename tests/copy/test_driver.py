"""Launches without a GPU: real calls of a CUDA driver that is a few hundred lines of C (data/fake_driver.c).

Each test is a function of programs/launches.py in a separate process, in which libcuda.so.1 is that file.  It cannot test
the kernels.  It tests everything before them: parameters, rings, contexts, batches, errors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from few import few
from processes import FakeDriver, server


def alone(fake_gpu: FakeDriver, code: str, **knobs: str) -> str:
    """Run code in a process that was not forked from a server, and return its output."""
    env = server(library=fake_gpu.folder).environment(**knobs)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-3000:] + done.stderr)
    return done.stdout


@pytest.mark.parametrize(
    ("src", "dst"),
    [("nhd", "universal"), ("universal", "vllm/LBHNC"), ("hnd", "vllm/paged_attn_v0"), ("vllm/paged_attn_v0", "nhd")],
)
def test_launches_move_what_the_host_moves(fake_gpu: FakeDriver, src: str, dst: str) -> None:
    """One launch per batch, the same bytes as on the host, skipped pairs skipped, contexts pushed and popped."""
    fake_gpu("launches.launches_move_what_the_host_moves", src, dst)


def test_ids_beyond_the_parameters_go_through_a_ring(fake_gpu: FakeDriver) -> None:
    """The caller overwrites ids of deferred launches: each launch has its own copy, and the ring stays bounded."""
    fake_gpu("launches.ids_beyond_the_parameters_go_through_a_ring")


def test_lists_of_tensors(fake_gpu: FakeDriver) -> None:
    fake_gpu("launches.lists_of_tensors")


@pytest.mark.parametrize(
    ("backend", "counter"), [("batch", "batches"), ("cuda_memcpy_async", "single_copies"), (None, "launches")]
)
def test_backends(fake_gpu: FakeDriver, backend: str | None, counter: str) -> None:
    """Each backend does what it says, alone."""
    fake_gpu("launches.backends", backend, counter)


@pytest.mark.parametrize(
    ("operator", "knobs", "start", "words"),
    [
        (False, {"FAKE_LOAD": "209"}, "CudaError 209 CUDA_ERROR_NO_BINARY_FOR_GPU", ["CUDA_ARCHS"]),
        (False, {"FAKE_INIT": "100"}, "CudaUnavailableError 100 CUDA_ERROR_NO_DEVICE", ["CUDA_VISIBLE_DEVICES"]),
        (False, {"FAKE_DEVICES": "0"}, "CudaUnavailableError 100 CUDA_ERROR_NO_DEVICE", ["CUDA_VISIBLE_DEVICES"]),
        (False, {"FAKE_LAUNCH": "1"}, "CudaError 1 CUDA_ERROR_INVALID_VALUE", ["copy_o1_w16"]),
        (True, {"FAKE_VERSION": "12040"}, "CudaError", ["KVBM_NO_FUNCTION", "12.8"]),
    ],
    ids=[
        "no kernel image for this GPU",
        "no GPU",
        "a driver that counts no GPU",
        "a launch that fails",
        "the batch call and an old driver",
    ],
)
def test_what_fails_says_why(
    fake_gpu: FakeDriver, operator: bool, knobs: dict[str, str], start: str, words: list[str]
) -> None:
    """Exactly one error, and the destination is unchanged."""
    text = fake_gpu("launches.what_fails", operator, **knobs)
    assert text.startswith(start) and all(word in text for word in words), text


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_the_batch_call_and_default_streams(fake_gpu: FakeDriver, stream: int) -> None:
    """The legacy stream refuses the call, so another stream is used: after earlier work, before later work."""
    fake_gpu("launches.the_batch_call_and_default_streams", stream)


def test_the_batch_call_and_a_capture(fake_gpu: FakeDriver) -> None:
    """Refused before the driver is called, which would end the capture; the other backends are captured."""
    fake_gpu("launches.the_batch_call_and_a_capture")


@pytest.mark.parametrize("step", few([2, 1], 1))
def test_every_call_fails_once(fake_gpu: FakeDriver, step: int) -> None:
    """Any failing call of the driver raises an exception, the next try is right, and nothing leaks."""
    met = set(alone(fake_gpu, f"from programs import failing_calls; failing_calls.main({step})", FAKE_DEVICES="2").split())
    assert {"cuMemAlloc_v2", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuMemcpyPeerAsync"} <= met, met


def test_fork_after_cuda(fake_gpu: FakeDriver) -> None:
    """A child of a process that used CUDA gets an error; a child of one that only imported kvbm may use CUDA."""
    assert fake_gpu("launches.fork_after_cuda").split() == ["0", "7"]


def test_files_are_converted_on_the_gpu(fake_gpu: FakeDriver, tmp_path: Path) -> None:
    """`kvbm convert --device`: several steps, a shorter last one, and the same bytes as on the CPU."""
    fake_gpu("launches.files_are_converted_on_the_gpu", str(tmp_path), KVBM_TUNE="0")


def test_files_of_a_pool_on_the_gpu(fake_gpu: FakeDriver, tmp_path: Path) -> None:
    fake_gpu("launches.files_of_a_pool_on_the_gpu", str(tmp_path))


# ---- what the GPU still uses when its owner lets go of it ------------------------------------------------------------


@pytest.mark.quick
def test_what_is_dropped_is_not_waited_for(fake_gpu: FakeDriver) -> None:
    """A ring is freed when its copies are done and memory of any kind is next allocated; many tables are freed at once."""
    alone(fake_gpu, "from programs import retired; retired.what_is_dropped_is_not_waited_for()", MALLOC_PERTURB_="85")


def test_threads_that_drop_transfers(fake_gpu: FakeDriver) -> None:
    """Each thread makes transfers, copies, and drops them while copies run: results are right, and nothing leaks."""
    fake_gpu("retired.threads_that_drop_transfers")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_graph_that_is_destroyed_while_the_driver_allocates(fake_gpu: FakeDriver, on_gpu: bool) -> None:
    """It is freed on a thread for which the driver waits: meanwhile kvbm must not hold a lock that freeing needs."""
    fake_gpu("retired.a_graph_that_is_destroyed_while_the_driver_allocates", on_gpu)


def test_a_graph_that_outlives_the_process_s_memory(fake_gpu: FakeDriver) -> None:
    """A graph that is freed when the process ends must not write to lists that no longer exist."""
    alone(fake_gpu, "from programs import retired; retired.a_graph_that_outlives_the_process_s_memory()")


FREED = """
import gc, itertools, weakref
gc.disable()
import kvbm
from kvbm import _core
shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
def made(layout, device):
    return kvbm.Pool.allocate(kvbm.load(layout), shape, 4, device)
def convert(src, dst):
    kvbm.convert(src, dst, [0, 1], [2, 3])
def transfer(src, dst):
    kvbm.Transfer(src, dst, verify=True).copy([0, 1], [2, 3]).synchronize()
def digest(src, dst):
    src.digest([0]), dst.digest([1])
def refused(src, dst):
    try:
        kvbm.convert(src, dst, [9], [0])
    except kvbm.BindError:
        pass
def section(src, dst):
    kvbm.convert(src.section(l=1), dst.section(l=1), [0], [1])
for call, devices in itertools.product(
    (convert, transfer, digest, refused, section),
    (("cuda:0",) * 2, ("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cpu",) * 2, ("pinned", "cuda:0")),
):
    if call is convert and "cpu" in devices and devices != ("cpu",) * 2:
        continue
    pools = [made("nhd", devices[0]), made("vllm/LBHNC", devices[1])]
    try:
        call(*pools)
    except kvbm.BindError:  # memory that the other side does not reach
        continue
    _core.synchronize(0)
    seen = [(weakref.ref(pool), [one.close for one in pool._owned if pool.device != "cpu"]) for pool in pools]
    del pools
    for pool, closes in seen:
        kept = pool()
        freed = kept is None and not any(close.alive for close in closes)
        assert freed, (call.__name__, devices, kept, kept and [repr(one)[:300] for one in gc.get_referrers(kept)])
print("freed")
"""


@pytest.mark.quick
def test_memory_is_freed_with_the_last_reference_to_its_pool(fake_gpu: FakeDriver) -> None:
    """Without the garbage collector, also behind the first copy of a process: no cycle and no error that was kept holds a pool."""
    assert alone(fake_gpu, FREED).strip() == "freed"
