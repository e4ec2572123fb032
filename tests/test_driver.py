"""The way to the GPU without one: real launches through a driver of some hundred lines of C (data/fake_driver.c).

Each test is a process of its own, in which libcuda.so.1 is that file.  What it cannot show is whether the kernels are
right; what it does show is everything before them: parameters, rings, contexts, batches, refusals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm import codegen, kernels
from processes import server

HERE = Path(__file__).resolve().parent
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.skipif(
        kernels.is_using_stubs(), reason="kvbm was built without CUDA kernels: there is nothing to launch"
    ),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake driver"),
]

#: What every test's code starts with: its text, so that code may give `shape` and `random` another value.
PRELUDE = (HERE / "programs" / "fake_gpu.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-w", f"-I{codegen.cuda_dir()}", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, HERE / "data" / "fake_driver.c"], check=True)
    return folder


def run(library: Path, code: str, *modules: str, **knobs: str) -> str:
    """Run `PRELUDE` and `code` in a process of its own, and return what it prints.

    `modules` are what the code imports that takes long to import: that is done once for all; `knobs` are environment variables.
    """
    return server(library, "programs.fake_gpu", *modules).run(PRELUDE + code, **knobs)


@pytest.mark.parametrize(
    ("src", "dst"),
    [("nhd", "universal"), ("universal", "vllm/LBHNC"), ("hnd", "vllm/paged_attn_v0"), ("vllm/paged_attn_v0", "nhd")],
)
def test_launches_move_what_the_host_moves(library: Path, src: str, dst: str) -> None:
    """One launch a batch, the same bytes as on the host, a skipped pair skipped, contexts pushed and popped."""
    run(
        library,
        f"""
(s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool({src!r}, 9), pool({dst!r}, 7)
for ids in (([8, 0, 3], [1, 6, 0]), ([4, -1], [2, 3]), ([], [])):
    kvbm.convert(s_cpu, d_cpu, *ids)
    kvbm.convert(s_gpu, d_gpu, *ids, stream=5)
    assert same(d, d_cpu)
assert same(s, s_cpu)
assert count("launches") == 2, count("launches")
assert count("pushes") == count("pops") > 0
""",
    )


def test_ids_beyond_the_parameters_go_through_a_ring(library: Path) -> None:
    """Deferred launches whose ids the caller overwrites: each still has its own, and the ring does not grow for ever."""
    run(
        library,
        """
n = 700  # more ids than fit the kernel's parameters
(s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("universal", n), pool("vllm/LBHNC", 4 * n)
src, dst = np.empty(n, np.int64), np.empty(n, np.int64)
def turn(quarter):  # each writes blocks of its own: none can hide what another did wrong
    src[:], dst[:] = random.permutation(n), quarter * n + random.permutation(n)
    kvbm.convert(s_cpu, d_cpu, src, dst)
    kvbm.convert(s_gpu, d_gpu, src, dst, stream=5)
    src[:] = dst[:] = 0
kvbm.convert(s_gpu, d_gpu, [0], [0], stream=5); kvbm.convert(s_cpu, d_cpu, [0], [0])
inline = count("slots")
defer(1)
for quarter in range(4):
    turn(quarter)
assert not same(d, d_cpu) and driver.fake_pump(-1) >= 4
assert same(d, d_cpu)
grown = count("slots")
assert grown > inline, "the batch was meant to be too large for the parameters"
for again in range(20):
    turn(again % 4)
    driver.fake_pump(-1)
assert same(d, d_cpu) and count("slots") == grown
""",
    )


def test_lists_of_tensors(library: Path) -> None:
    run(
        library,
        """
nb = 40  # their addresses do not fit the parameters
(b, b_gpu, b_cpu), (u, u_gpu, u_cpu) = pool("nhd", nb), pool("universal", nb)
chunks = [list(b_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(nb)]
kernels.block_to_universal(chunks, list(u_gpu.arrays), "nhd", stream=5)
kvbm.convert(b_cpu, u_cpu)
assert same(u, u_cpu) and count("launches") == 1
u[0][...] ^= 0xffff
u_cpu.arrays[0].view(np.uint16)[...] ^= 0xffff
kernels.universal_to_block(list(u_gpu.arrays), chunks, "NHD", stream=5)
kvbm.convert(u_cpu, b_cpu)
assert same(b, b_cpu)
""",
    )


@pytest.mark.parametrize(
    ("backend", "counter"), [("batch", "batches"), ("cuda_memcpy_async", "single_copies"), (None, "launches")]
)
def test_backends(library: Path, backend: str | None, counter: str) -> None:
    """Each backend does what it says, by itself."""
    run(
        library,
        f"""
(b, b_gpu, b_cpu), (o, o_gpu, o_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
chunks = [list(b_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(3)]
whole = [FakeCuda((3, 2, 256), "float16", address=a.address) for a in o_gpu.arrays]
kernels.block_to_operational(chunks, whole, {backend!r}, stream=5)
kvbm.convert(b_cpu, o_cpu)
assert same(o, o_cpu)
used = [name for name in ("batches", "single_copies", "launches") if count(name)]
assert used == [{counter!r}], used
""",
    )


def refused(library: Path, code: str, **knobs: str) -> str:
    """The one error that the code ends with, and that the destination was not touched."""
    return run(
        library,
        f"""
(s, s_gpu, _), (d, d_gpu, d_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
chunks = [list(s_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(3)]
whole = [FakeCuda((3, 2, 256), "float16", address=a.address) for a in d_gpu.arrays]
try:
    {code}
except kvbm.CudaError as error:
    print(type(error).__name__, error.code, error.name, error)
assert same(d, d_cpu)
assert count("pushes") == count("pops")
""",
        **knobs,
    )


CONVERT = "kvbm.convert(s_gpu, d_gpu, stream=5)"


def test_no_kernel_image_for_this_gpu(library: Path) -> None:
    text = refused(library, CONVERT, FAKE_LOAD="209")
    assert text.startswith("CudaError 209 CUDA_ERROR_NO_BINARY_FOR_GPU") and "CUDA_ARCHS" in text


@pytest.mark.parametrize("knobs", [{"FAKE_INIT": "100"}, {"FAKE_DEVICES": "0"}])
def test_no_gpu(library: Path, knobs: dict[str, str]) -> None:
    """Also from a driver that starts, and counts none."""
    text = refused(library, CONVERT, **knobs)
    assert text.startswith("CudaUnavailableError 100 CUDA_ERROR_NO_DEVICE") and "CUDA_VISIBLE_DEVICES" in text


def test_a_launch_that_fails(library: Path) -> None:
    text = refused(library, CONVERT, FAKE_LAUNCH="1")
    assert text.startswith("CudaError 1 CUDA_ERROR_INVALID_VALUE") and "copy_o1_w16" in text


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_the_batch_call_and_default_streams(library: Path, stream: int) -> None:
    """The legacy stream refuses the call, which goes beside it: after what came before, before what comes after."""
    run(
        library,
        f"""
(b, b_gpu, b_cpu), (o, o_gpu, o_cpu), (u, u_gpu, u_cpu) = pool("nhd", 3), pool("operational_nhd", 3), pool("universal", 3)
chunks = [list(b_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(3)]
whole = [FakeCuda((3, 2, 256), "float16", address=a.address) for a in o_gpu.arrays]
defer(1)
for seed in range(1, 9):
    ctypes.c_uint.in_dll(driver, "fake_seed").value = seed
    for memory, cpu in ((b, b_cpu), (o, o_cpu)):
        for m, a in zip(memory, cpu.arrays):
            m[...] = 0
            a.view(np.uint16)[...] = 0
    kvbm.convert(u_gpu, b_gpu, stream={stream})
    kernels.block_to_operational(chunks, whole, "batch", stream={stream})
    kernels.operational_to_block(whole, chunks, "batch", stream={stream})
    driver.fake_pump(-1)
    kvbm.convert(u_cpu, b_cpu)
    kvbm.convert(b_cpu, o_cpu)
    assert same(b, b_cpu) and same(o, o_cpu), seed
assert count("batches") == 16 and count("batch_on_legacy") == count("single_copies") == 0
""",
    )


def test_the_batch_call_and_a_capture(library: Path) -> None:
    """Refused before the driver is asked, which would end the capture; the other backends are captured."""
    run(
        library,
        """
(b, b_gpu, b_cpu), (o, o_gpu, o_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
chunks = [list(b_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(3)]
whole = [FakeCuda((3, 2, 256), "float16", address=a.address) for a in o_gpu.arrays]
kernels.block_to_operational(chunks, whole, stream=5)
o[0][...] = o[1][...] = o[2][...] = 0
driver.fake_end_capture.restype = ctypes.c_void_p
for stream in (6, 2):
    driver.fake_begin_capture(ctypes.c_void_p(stream))
    try:
        kernels.block_to_operational(chunks, whole, "batch", stream=stream)
    except kvbm.CudaError as error:
        assert error.code == 900 and "cannot be captured" in str(error), error
    else:
        raise AssertionError(stream)
    kernels.block_to_operational(chunks, whole, "async", stream=stream)
    graph = driver.fake_end_capture()
    assert graph and not o[0].any()
    driver.fake_launch_graph(ctypes.c_void_p(graph), ctypes.c_void_p(5))
    kvbm.convert(b_cpu, o_cpu)
    assert same(o, o_cpu)
    o[0][...] = 0
assert count("broken_captures") == 0
""",
    )


def test_the_batch_call_and_an_old_driver(library: Path) -> None:
    text = refused(library, 'kernels.block_to_operational(chunks, whole, "batch", stream=5)', FAKE_VERSION="12040")
    assert "KVBM_NO_FUNCTION" in text and "12.8" in text


def test_every_call_fails_once(library: Path) -> None:
    """Whichever call of the driver fails: an exception says so, what is tried again is right, and nothing is left behind."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_DEVICES": "2"}
    program = HERE / "programs" / "failing_calls.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    met = set(done.stdout.split())
    assert {"cuMemAlloc_v2", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuMemcpyPeerAsync"} <= met, met


def test_fork_after_cuda(library: Path) -> None:
    """A child of a process that used CUDA is told so; one of a process that only imported kvbm may use it."""
    code = """
def child():
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        kvbm.convert(s_gpu, d_gpu, stream=5)
    except kvbm.CudaError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(0)
(s, s_gpu, _), (d, d_gpu, _) = pool("nhd", 3), pool("universal", 3)
print(child())
kvbm.convert(s_gpu, d_gpu, stream=5)
print(child())
"""
    assert run(library, code).split() == ["0", "7"]


def test_files_are_converted_on_the_gpu(library: Path, tmp_path: Path) -> None:
    """`kvbm convert --device`: several steps, the last one shorter, and the bytes that the CPU writes."""
    run(
        library,
        f"""
from pathlib import Path
from kvbm import cli, store
folder = Path({str(tmp_path)!r})
(_, _, cpu) = pool("vllm/LBHNC", 7)
with store.create(folder / "in", cpu.layout, shape, 7) as out:
    kvbm.convert(cpu, out)
cli._CHUNK_BYTES = 3 * shape.nbytes
before = count("launches")
for device in ("cpu", "cuda:0"):
    to = ["--to", "vllm/paged_attn_v0", "--device", device]
    cli.main(["convert", str(folder / "in"), str(folder / device), *to], standalone_mode=False)
assert count("launches") - before >= 3
assert (folder / "cpu").read_bytes() == (folder / "cuda:0").read_bytes()
""",
        KVBM_TUNE="0",
    )


# ---- what the GPU still uses when its owner lets go of it ------------------------------------------------------------

RETIRED = """
from kvbm import _core
import gc, threading
live = (ctypes.c_long * 5).in_dll(driver, "live")
for name in ("fake_begin_capture", "fake_end_capture", "fake_launch_graph"): getattr(driver, name).restype = ctypes.c_void_p
handle = ctypes.c_void_p
(s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("nhd", 9), pool("universal", 9)
pinned = (ctypes.c_ulonglong * 2).in_dll(driver, "fake_pinned")

def captured(copy):
    driver.fake_begin_capture(handle(5))
    copy()
    return handle(driver.fake_end_capture())
"""


def test_what_is_dropped_is_not_waited_for(library: Path) -> None:
    """A ring is freed when its copies are done and memory is next allocated, of whatever kind; tables many at once."""
    run(
        library,
        RETIRED
        + """
before, sizes = d[0].copy(), []
for cycle in range(4):
    d[0][...] = before
    defer(1)
    kvbm.Transfer(s_gpu, d_gpu, "staged", chunk_bytes=2 * shape.nbytes).copy(range(9), range(9), stream=5)
    held = live[2]
    move = kvbm.Transfer(s_gpu, d_gpu, "staged", chunk_bytes=2 * shape.nbytes)
    assert np.array_equal(d[0], before), "who makes a transfer waits for the copies of another"
    driver.fake_pump(-1)
    kvbm.convert(s_cpu, d_cpu)
    assert same(d, d_cpu)
    defer(0)
    del move
    for _ in range(2): _core.free_device(0, _core.alloc_device(0, 64))
    assert live[2] == held - 3 + 2, "the slots are not freed, or tables are"
    sizes.append([*live[:2], live[2] - 4 * cycle, *live[3:]])
assert sizes[1] == sizes[-1], sizes
table = np.zeros(8192, np.uint64)
for _ in range(50):
    _core.Table(table, 0)
    assert live[2] <= held + 24
""",
        MALLOC_PERTURB_="85",
    )


def test_threads_that_drop_transfers(library: Path) -> None:
    """Each makes transfers, copies, and drops them with the copies in flight: right, and nothing is left at the end."""
    run(
        library,
        RETIRED
        + """
sys.setswitchinterval(1e-5)
failed = []
def work(k):
    try:
        for turn in range(25):
            move = kvbm.Transfer(s_gpu, d_gpu, ("staged", "direct")[turn % 2], chunk_bytes=shape.nbytes if turn % 2 == 0 else None)
            move.copy([k, k + 4], [k + 4, k], stream=5 + k)
    except BaseException as error: failed.append(error)
sizes = []
for _ in range(3):
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    for _ in range(2): _core.free_device(0, _core.alloc_device(0, 64))
    sizes.append([live[1], live[2] - 200 * len(sizes), live[3]])
assert not failed, failed
kvbm.convert(s_cpu, d_cpu, [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3])
assert same(d, d_cpu)
assert sizes == sizes[:1] * 3, sizes
""",
    )


@pytest.mark.parametrize("ids", ["FakeCuda((2,), 'int64', address=two.ctypes.data)", "np.arange(700)"])
def test_a_graph_that_is_destroyed_while_the_driver_allocates(library: Path, ids: str) -> None:
    """On a thread of the driver's, which the driver waits for: kvbm holds no lock then that giving back takes."""
    run(
        library,
        RETIRED
        + f"""
import signal
signal.alarm(60)  # red: for ever
two = np.array([1, 2])
n = 700
(s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("nhd", n), pool("universal", n)
move = kvbm.Transfer(s_gpu, d_gpu, "direct")
ids = {ids}
out = np.arange(len(ids) if isinstance(ids, np.ndarray) else 2)
move.copy(ids, out, stream=5)
graph = captured(lambda: move.copy(ids, out, stream=5))
gone, kept = ctypes.c_void_p.in_dll(driver, "fake_gone"), []
gone.value = graph.value
defer(1)
while gone.value: kept.append(move.copy(ids, out, stream=6))  # until the driver has to allocate
driver.fake_pump(-1)
""",
    )


def test_a_graph_that_outlives_the_process_s_memory(library: Path) -> None:
    """What a graph gives back when the process ends is not written into lists that are gone."""
    code = (
        PRELUDE
        + RETIRED
        + """
two = np.array([1, 2])
move = kvbm.Transfer(s_gpu, d_gpu, "direct")
graphs = captured(lambda: [move.copy(FakeCuda((2,), "int64", address=two.ctypes.data), [1, 2], stream=5) for _ in range(20)])
ctypes.c_void_p.in_dll(driver, "fake_last").value = graphs.value
"""
    )
    env = server(library, "programs.fake_gpu").environment()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
