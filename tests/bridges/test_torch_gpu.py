"""kvbm.torch on a GPU: bit for bit, in stream order, captured into graphs; tests show that each fence is needed."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_torch import CONVERT_, DTYPES, PAIRS, SIZES, SMALL, Stream, alike, expected, of, random, small  # noqa: E402

import kvbm  # noqa: E402
import kvbm.torch  # noqa: E402
import matrix  # noqa: E402
import oracle  # noqa: E402
from kvbm.torch import fences, operators  # noqa: E402
from memory import aligned, placed, torch_views  # noqa: E402

pytestmark = pytest.mark.gpu

#: Some 100 ms of a GPU that does nothing else: what is enqueued behind it is late, what is not waits for nothing.
LONG = 2_000_000_000


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch._dynamo.reset()


class Guarded:
    """Coded tensors on the GPU, between guard bytes."""

    def __init__(self, name: str, shape: kvbm.BlockShape, blocks: int, *, dst: bool = False):
        self.arena = placed(matrix.orders()[name], shape, blocks).layout_bytes(0)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.buffer = torch.from_numpy(aligned(self.before)).cuda()
        self.arrays = torch_views(self.arena, self.buffer, shape.dtype)
        torch.cuda.synchronize()

    def bytes(self) -> Any:
        torch.cuda.synchronize()
        return self.buffer.cpu().numpy()


def cuda(tensors: list[Any]) -> list[Any]:
    moved = [tensor.cuda() for tensor in tensors]
    torch.cuda.synchronize()
    return moved


def host(tensors: Any) -> list[Any]:
    torch.cuda.synchronize()
    return [tensor.cpu() for tensor in tensors]


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_convert_is_the_oracle_s_sanitize(pair: tuple[str, str], dtype: str) -> None:
    src = Guarded(pair[0], of(dtype), 3)
    out = kvbm.torch.convert(src.arrays, *pair, shape=SIZES)
    assert all(one.is_cuda for one in out)
    assert alike(host(out), expected(src, pair[1], of(dtype), 3)) and np.array_equal(src.bytes(), src.before)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["host", "gpu", "gpu int32", "gpu and host", "host and gpu", "one side", "all"])
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_convert_into_is_the_oracle_s_sanitize(pair: tuple[str, str], kind: str) -> None:
    """Ids on the host, on the GPU, on both; every other byte is unchanged."""
    shape = of("bfloat16")
    src, dst = Guarded(pair[0], shape, 5), Guarded(pair[1], shape, 5, dst=True)
    src_ids, dst_ids = ([0, 1, 2, 3, 4],) * 2 if kind == "all" else ([3, -1, 3, 1], [1, 4, 0, 2])
    if kind == "one side":
        src_ids = [0, 1, 2, 3]
    a, b = torch.tensor(src_ids), torch.tensor(dst_ids)
    given: Any = {
        "host": (src_ids, b),
        "gpu": (a.cuda(), b.cuda()),
        "gpu int32": (a.int().cuda(), b.int().cuda()),
        "gpu and host": (a.cuda(), b),
        "host and gpu": (a.int(), b.cuda()),
        "one side": (None, b.cuda()),
        "all": (None, None),
    }[kind]
    kvbm.torch.convert_(src.arrays, dst.arrays, *pair, shape, *given)
    kept = [(s, d) for s, d in zip(src_ids, dst_ids, strict=True) if s != -1]
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, *map(list, zip(*kept, strict=True)))
    got = dst.bytes()
    assert np.array_equal(got, want), oracle.explain(dst.arena, got, want)
    kvbm.torch.check_ids()


def test_many_tensors() -> None:
    shape = kvbm.load_shape("nl=4,no=2,nh=1,nt=2,hd=2,dtype=int32")
    src = Guarded("nhd", shape, 500)
    out = kvbm.torch.convert(src.arrays, "nhd", "universal", shape)
    assert alike(host(out), expected(src, "universal", shape, 500))  # type: ignore[arg-type]


def test_gradcheck_on_a_gpu() -> None:
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in small("nhd")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = lambda *t: tuple(kvbm.torch.convert(list(t), "nhd", "universal", SMALL))  # noqa: E731
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_opcheck_on_a_gpu() -> None:
    tensors, out = cuda(random("vllm/flash_attn_nhd", 3)), cuda(random("universal", 3))
    names = ("vllm/flash_attn_nhd", "universal", SIZES)
    ids = torch.tensor([2, 0]).cuda()
    assert set(torch.library.opcheck(operators.CONVERT, (tensors, *names)).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(CONVERT_, (tensors, out, *names, ids, ids)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_on_a_gpu(backend: str) -> None:
    def step(tensors: list[Any], out: list[Any], ids: Any) -> list[Any]:
        blocks = kvbm.torch.convert(tensors, "vllm/flash_attn_nhd", "universal", SIZES)
        kvbm.torch.convert_(tensors, out, "vllm/flash_attn_nhd", "universal", SIZES, ids, ids.flip(0))
        return blocks

    tensors, ids = cuda(random("vllm/flash_attn_nhd", 3)), torch.tensor([0, 2]).cuda()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
            out = cuda(random("universal", 3))
            results.append(host(run(tensors, out, ids)) + host(out))
    assert alike(*results)


def test_compiled_into_cuda_graphs() -> None:
    """Replays of graphs captured by mode="reduce-overhead": the operator costs the host nothing."""
    compiled = torch.compile(
        lambda layers: kvbm.torch.convert(layers, "vllm/flash_attn_nhd", "universal", SIZES),
        fullgraph=True,
        mode="reduce-overhead",
    )
    tensors = cuda(random("vllm/flash_attn_nhd", 3))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number in range(5):
            for tensor in tensors:
                tensor.mul_(1 + number)
            want = kvbm.torch.convert(tensors, "vllm/flash_attn_nhd", "universal", SIZES)
            torch.compiler.cudagraph_mark_step_begin()
            got = [one.clone() for one in compiled(tensors)]
            assert alike(host(got), host(want))


def test_pools_as_tensors_on_a_gpu() -> None:
    for dtype in ("bfloat16", "float8_e4m3fn", "float32"):
        pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), of(dtype), 3, "cuda:0")
        (tensor,) = kvbm.torch.tensors(pool)
        assert tensor.is_cuda and tensor.dtype == getattr(torch, dtype) and tensor.data_ptr() == int(pool.addresses[0])
        del tensor


def test_devices_that_are_mixed() -> None:
    tensors, names = cuda(random("vllm/flash_attn_nhd", 3)), ("vllm/flash_attn_nhd", "universal", SIZES)
    with pytest.raises(kvbm.BindError, match=r"convert: input #1 is on cpu, input #0 on cuda:0; .*kvbm\.Transfer"):
        kvbm.torch.convert([tensors[0], tensors[1].cpu()], *names)
    with pytest.raises(kvbm.BindError, match=r"convert: input #1 is on cuda:0, input #0 on cpu"):
        kvbm.torch.convert([tensors[0].cpu(), tensors[1]], *names)
    with pytest.raises(kvbm.BindError, match=r"convert_: output #0 is on cpu, input #0 on cuda:0"):
        kvbm.torch.convert_(tensors, random("universal", 3), *names)
    with pytest.raises(kvbm.BindError, match=r"convert_: src_ids is on cuda:0, input #0 on cpu"):
        kvbm.torch.convert_(
            [one.cpu() for one in tensors], random("universal", 3), *names, torch.tensor([0]).cuda(), torch.tensor([0])
        )
    if torch.cuda.device_count() > 1:
        with pytest.raises(kvbm.BindError, match=r"input #1 is on cuda:1, input #0 on cuda:0; .*between two GPUs"):
            kvbm.torch.convert([tensors[0], tensors[1].to("cuda:1")], *names)
        with pytest.raises(kvbm.BindError, match=r"convert: stream is on cuda:1, the tensors on cuda:0"):
            kvbm.torch.convert(tensors, *names, stream=torch.cuda.Stream("cuda:1"))
        other = [one.to("cuda:1") for one in tensors]
        assert alike(host(kvbm.torch.convert(other, *names)), host(kvbm.torch.convert(tensors, *names)))
    with pytest.raises(kvbm.BindError, match=r"convert: stream is on cuda:1, the tensors on cuda:0"):
        kvbm.torch.convert(tensors, *names, stream=Stream())


def test_two_gpus() -> None:
    """The tensors' GPU is used, whichever is current: its streams, fences and graphs; tensors on two GPUs are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    names, shape = ("nhd", "universal"), of("bfloat16")
    here, there = random("nhd", 3, "bfloat16"), torch.device("cuda", 1)
    want = kvbm.torch.convert(here, *names, SIZES)
    src = [tensor.to(there) for tensor in here]
    assert torch.cuda.current_device() == 0
    for stream in (None, torch.cuda.Stream(there)):
        out = kvbm.torch.convert(src, *names, SIZES, stream=stream)
        assert {tensor.device for tensor in out} == {there} and alike([tensor.cpu() for tensor in out], want)
    # In the order of that GPU's current stream, behind work that takes long.
    side, into = torch.cuda.Stream(there), [torch.zeros_like(tensor) for tensor in out]
    late, ids = [torch.zeros_like(tensor) for tensor in src], torch.arange(3, device=there)
    kvbm.torch.convert_(late, into, *names, shape, ids, [2, 1, 0])  # what is loaded for the first time is waited for
    torch.cuda.synchronize(there)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for one, value in zip(late, src, strict=True):
            one.copy_(value)
        with torch.cuda.device(0):
            kvbm.torch.convert_(late, into, *names, shape, ids, [2, 1, 0])
        assert not side.query()
    side.synchronize()
    kvbm.torch.check_ids()
    assert alike([tensor.cpu() for tensor in into], want[::-1])
    with pytest.raises(kvbm.BindError, match=r"stream is on cuda:0, the tensors on cuda:1"):
        kvbm.torch.convert(src, *names, SIZES, stream=torch.cuda.Stream(0))
    first = [tensor.to("cuda:0") for tensor in here]
    for given, message in (([*src[:-1], first[-1]], "cuda:0"), ([*first[:-1], src[-1]], "cuda:1")):
        with pytest.raises(kvbm.BindError, match=rf"input #\d+ is on {message}, .*kvbm\.Transfer"):
            kvbm.torch.convert(given, *names, SIZES)
    with pytest.raises(kvbm.BindError, match=r"on cuda:0, .* on cuda:1.*kvbm\.Transfer"):
        kvbm.torch.convert_(src, [tensor.to("cuda:0") for tensor in out], *names, SIZES)
    with pytest.raises(kvbm.BindError, match=r"src_ids is on cuda:0"):
        kvbm.torch.convert_(src, out, *names, SIZES, torch.arange(3, device="cuda:0"), None)


def test_ids_on_the_gpu_that_are_out_of_range_are_told_afterwards() -> None:
    src, dst = Guarded("nhd", of("float32"), 4), Guarded("universal", of("float32"), 5, dst=True)
    ids = torch.tensor([1, 9, 2]).cuda()
    kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SIZES, ids, torch.tensor([3, 0, 4]).cuda())
    with pytest.raises(kvbm.BindError, match=r"convert_: block ids on the device: pair 1 "):
        kvbm.torch.check_ids()
    kvbm.torch.check_ids()
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [1, 2], [3, 4])
    assert np.array_equal(dst.bytes(), want)


def test_routes_for_ids_on_the_gpu_do_not_pile_up() -> None:
    ids = torch.tensor([0]).cuda()
    kept = []
    for _ in range(operators._MOST_ROUTES + 10):
        out = cuda(random("vllm/BLHNC", 1))
        kept.append(out)  # so that every call has addresses of its own
        kvbm.torch.convert_(cuda(random("vllm/LBHNC", 1)), out, "vllm/LBHNC", "vllm/BLHNC", SIZES, ids, ids)
    assert len(operators._routes) <= operators._MOST_ROUTES
    torch.cuda.synchronize()
    kvbm.torch.check_ids()
    assert not any(not done.captured for done, _ in operators._unasked)
    assert all(alike(host(out), host(kept[0])) for out in kept)


# ---- streams ---------------------------------------------------------------------------------------------------------

NAMES = ("vllm/LBHNC", "vllm/BLHNC", SIZES)
SIDE = (2, 64, 4, 16, 2, 32)  # l b h t o d: 2 MiB, so that freed memory is taken again as it is


def warm() -> None:
    """Load everything before a test checks the order of work."""
    one = torch.zeros(SIDE, device="cuda")
    kvbm.torch.convert_(one, torch.zeros((64, 2, *SIDE[2:]), device="cuda"), *NAMES)
    torch.cuda.synchronize()


def value(tensor: Any) -> float:
    """The value of all elements; NaN if they differ."""
    torch.cuda.synchronize()
    low, high = tensor.min().item(), tensor.max().item()
    return float(low) if low == high else float("nan")


@pytest.mark.parametrize("fenced", [False, True])
def test_without_the_fence_before_the_copy_reads_too_early(fenced: bool) -> None:
    warm()
    current, side = torch.cuda.Stream(), torch.cuda.Stream()
    src, out = torch.full(SIDE, 1.0, device="cuda"), torch.zeros((64, 2, *SIDE[2:]), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        torch.cuda._sleep(LONG)
        src.fill_(2)
        if fenced:
            fences.before(side)
        with torch.cuda.stream(side):
            CONVERT_([src], [out], *NAMES)
    assert value(out) == (2.0 if fenced else 1.0)


@pytest.mark.parametrize("fenced", [False, True])
def test_without_the_fence_after_the_framework_reads_too_early(fenced: bool) -> None:
    warm()
    current, side = torch.cuda.Stream(), torch.cuda.Stream()
    src, out = torch.full(SIDE, 2.0, device="cuda"), torch.zeros((64, 2, *SIDE[2:]), device="cuda")
    seen = torch.empty_like(out)
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            CONVERT_([src], [out], *NAMES)
        if fenced:
            fences.after(side)
        seen.copy_(out)
    assert value(seen) == (2.0 if fenced else 0.0)


@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_is_not_kept_is_given_away_under_the_copy(kept: bool) -> None:
    warm()
    current, side = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.zeros((64, 2, *SIDE[2:]), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        src = torch.full(SIDE, 2.0, device="cuda")
        torch.cuda.synchronize()
        address = src.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            CONVERT_([src], [out], *NAMES)
        copied = side.record_event()
        if kept:
            fences.keep([src], side)
        del src
        gc.collect()
        others = [
            torch.full(SIDE, 9.0, device="cuda") for _ in range(16)
        ]  # one of them gets the memory, if it may be had
    given = any(other.data_ptr() == address for other in others)
    if copied.query():  # on a machine that is too slow for the delay, what was kept is given back in time
        assert value(out) in ((2.0,) if kept else (2.0, 9.0))  # it may have been taken first, and the copy have ended since
        pytest.skip("the copy was over before anybody looked")
    assert given is not kept
    assert value(out) == (2.0 if kept else 9.0)


@pytest.mark.parametrize("how", ["fence", "stream", "handle", "operator"])
def test_fenced_on_both_sides_and_the_host_waits_for_nothing(how: str) -> None:
    warm()
    current, side = torch.cuda.Stream(), torch.cuda.Stream()
    src = torch.full(SIDE, 1.0, device="cuda")
    seen = torch.zeros((64, 2, *SIDE[2:]), device="cuda")
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        torch.cuda._sleep(LONG)
        src.fill_(2)
        if how == "fence":
            with kvbm.torch.fence(side, src) as inside:
                assert torch.cuda.current_stream() == side == inside
                (out,) = kvbm.torch.convert(src, *NAMES)
            kvbm.torch.keep([out], current)
        elif how == "operator":
            out = torch.empty_like(seen)
            kvbm.torch.convert_(src, out, *NAMES, stream=side)
        else:
            (out,) = kvbm.torch.convert(src, *NAMES, stream=side if how == "stream" else side.cuda_stream)
        assert torch.cuda.current_stream() == current
        del src
        noise = torch.full(SIDE, 9.0, device="cuda")  # may have its memory, but only after the copy
        seen.copy_(out)
        done.record()
        assert not done.query()  # the GPU has not even begun: nobody waited
    assert value(seen) == 2.0 and value(noise) == 9.0


def test_streams_of_others() -> None:
    warm()
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    src = torch.full(SIDE, 3.0, device="cuda")
    (out,) = kvbm.torch.convert(src, *NAMES, stream=stream)
    assert value(out) == 3.0
    cupy = pytest.importorskip("cupy")
    (out,) = kvbm.torch.convert(src, *NAMES, stream=cupy.cuda.Stream(non_blocking=True))
    assert value(out) == 3.0


def test_an_exception_leaves_the_streams_as_they_were() -> None:
    side = torch.cuda.Stream()
    with pytest.raises(kvbm.BindError, match="convert: input #0"):
        kvbm.torch.convert(torch.zeros(3, device="cuda"), *NAMES, stream=side)
    assert torch.cuda.current_stream() != side


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_side", [False, True])
def test_capture_and_replay(on_side: bool) -> None:
    warm()
    src = torch.full(SIDE, 1.0, device="cuda")
    into = torch.zeros((64, 2, *SIDE[2:]), device="cuda")
    stream = torch.cuda.Stream() if on_side else None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = kvbm.torch.convert(src, *NAMES, stream=stream)
        kvbm.torch.convert_(src, into, *NAMES, [5, 1], [0, 3], stream=stream)
    for number in (2.0, 3.0):
        src.fill_(number)
        graph.replay()
        assert value(out) == number and value(into[[0, 3]]) == number and value(into[[1, 2]]) == 0.0


def test_a_graph_is_replayed_with_other_ids() -> None:
    warm()
    src = Guarded("nhd", of("bfloat16"), 6)
    dst = Guarded("universal", of("bfloat16"), 6, dst=True)
    ids = torch.tensor([0, 1], device="cuda"), torch.tensor([2, 3], device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", of("bfloat16"), *ids)
    want = dst.before
    for new in (([4, 5], [0, 1]), ([2, -1], [5, 4])):
        for tensor, numbers in zip(ids, new, strict=True):
            tensor.copy_(torch.tensor(numbers))
        graph.replay()
        pairs = [(s, d) for s, d in zip(*new, strict=True) if s >= 0]
        want = oracle.expected_bytes(src.arena, dst.arena, src.before, want, *map(list, zip(*pairs, strict=True)))
        got = dst.bytes()
        assert np.array_equal(got, want), oracle.explain(dst.arena, got, want)
    kvbm.torch.check_ids()
    ids[0].copy_(torch.tensor([1, 77]))
    graph.replay()
    with pytest.raises(kvbm.BindError, match=r"convert_: block ids on the device: pair 1"):
        kvbm.torch.check_ids()


def test_many_tensors_in_a_graph() -> None:
    """More addresses than fit a kernel's parameters: the graph keeps them as long as it exists."""
    shape = kvbm.load_shape("nl=4,no=2,nh=1,nt=2,hd=2,dtype=int32")
    src = Guarded("nhd", shape, 300)
    kvbm.torch.convert(src.arrays, "nhd", "universal", shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kvbm.torch.convert(src.arrays, "nhd", "universal", shape)
    for _ in range(3):  # other launches take other memory
        kvbm.torch.convert(src.arrays, "nhd", "hnd", shape)
    graph.replay()
    assert alike(host(out), expected(src, "universal", shape, 300))  # type: ignore[arg-type]


def test_threads_on_streams_of_their_own() -> None:
    warm()
    wrong: list[float] = []

    def work(k: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(10):
                src = torch.full(SIDE, float(10 * k + i), device="cuda")
                (out,) = kvbm.torch.convert(src, *NAMES)
                seen = out.clone()
                stream.synchronize()
                if not bool((seen == 10 * k + i).all()):
                    wrong.append(10 * k + i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
