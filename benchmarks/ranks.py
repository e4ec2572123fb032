"""A sequence from four ranks to two, in four processes on two GPUs, compared with a memcpy of the bytes between the GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvbm import _core, wire
from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import Memory, device_of, random_pool
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape
from kvbm.reshard import Endpoint, Placement, Span, vllm
from kvbm.system.clock import Timed

from .race import race, row_of
from .section import Row
from .ways import DECODE, LIMIT, PREFILL

__all__ = ["SENDERS", "sequences"]

#: Ranks of the engine that sends, one a process, on both GPUs in turns.
SENDERS = 4

#: The rank that receives, and the process that has it: none of those that send to it.
RECEIVERS = {0: 2, 1: 1}

#: Seconds from the command until all processes begin.
_SOON = 3e-3

_OWN_STREAM = 2  # the thread's default stream


class Setting(NamedTuple):
    """The parameters of a process."""

    number: int
    places: tuple[str, str]
    model: BlockShape
    tokens: int
    folder: str
    options: Mapping[str, int]

    @property
    def place(self) -> str:
        return self.places[self.number % 2]

    @property
    def far_bytes(self) -> int:
        """Bytes that a rank receives from the other GPU: a quarter of the sequence."""
        return self.tokens * replace(self.model, nt=1).nbytes // SENDERS


class End:
    """A rank with its pool and its endpoint."""

    def __init__(self, setting: Setting, place: Placement, rank: int, layout: str, stack: contextlib.ExitStack) -> None:
        self.part, self.on_gpu, blocks = place.part(rank), device_of(setting.place) >= 0, setting.tokens // place.nt
        self.pool = stack.enter_context(random_pool(spec.load(layout), place.shape(rank), blocks, setting.place, seed=rank))
        self.table, self.nt = np.random.default_rng(place.nt).permutation(blocks), place.nt
        name = f"{place.name}/{rank}"
        if importlib.util.find_spec("nixl"):
            below: wire.Wire = wire.nixl(name, drop_seconds=1)
        else:
            import torch.distributed

            store = torch.distributed.FileStore(f"{setting.folder}/wire", -1)
            below = wire.torch(name, store, backend="nccl" if self.on_gpu else "gloo", drop_seconds=1)
        made = Endpoint(place.name, place, rank, self.pool, wire=wire.mapped(below), **setting.options)
        self.me = stack.enter_context(made)

    def span(self, tokens: int) -> Span:
        return Span(self.table[: tokens // self.nt], range(tokens))

    def digest(self, tokens: int) -> int:
        """The digest of the first tokens, at the coordinates of the model."""
        some, stream = self.table[: tokens // self.nt], _OWN_STREAM if self.on_gpu else None
        found = self.pool.digest(some, tokens=range(0, tokens, self.nt), model=self.part, stream=stream)
        return sum(map(int, found)) % (1 << 64)


def serve(pipe: Any, setting: Setting) -> None:
    """The main function of a process: a rank that sends, and perhaps one that receives."""
    with contextlib.ExitStack() as stack:
        try:
            _serve(pipe, setting, stack)
        except EOFError:
            return
        except Exception as error:
            pipe.send(KvbmError(f"process {setting.number}: {type(error).__name__}: {error}"))


def _serve(pipe: Any, setting: Setting, stack: contextlib.ExitStack) -> None:
    device = device_of(setting.place)
    if device >= 0:
        from cuda.core import Device

        Device(device).set_current()
    (near, nt), (far, far_nt) = PREFILL, DECODE
    places = vllm(setting.model, tp=4, nt=nt, name="prefill"), vllm(setting.model, tp=2, nt=far_nt, name="decode")
    ends = [End(setting, places[0], setting.number, near, stack)]
    ends += [End(setting, places[1], rank, far, stack) for rank, number in RECEIVERS.items() if number == setting.number]
    held = [Memory(setting.far_bytes, setting.place) for _ in 2 * ends[1:]]  # copied by the other GPU; copied to
    for one in held:
        stack.callback(one.close)
    pipe.send(([end.me.card() for end in ends], _core.ipc_handle(device, held[0].address) if held and device >= 0 else b""))
    cards, handle = pipe.recv()
    links = [end.me.meet(cards[1 - side]) for side, end in enumerate(ends)]
    address = held[0].address if held else 0
    if held and device >= 0:
        address = _core.ipc_open(device, handle)
        stack.callback(_core.ipc_close, device, address)
    pipe.send([link.paths for link in links[1:]])
    numbers = iter(range(1 << 40))
    while True:
        what, tokens, at = pipe.recv()
        key = str(next(numbers))
        while time.monotonic() < at:
            pass
        if what == "digest":
            pipe.send([end.digest(tokens) for end in ends])
            continue
        if what == "memcpy":
            if held:
                nbytes = tokens * replace(setting.model, nt=1).nbytes // SENDERS
                _memcpy(held[1].address, address, nbytes, device)
        else:
            begun = [link.receive(key, end.span(tokens), timeout=LIMIT) for link, end in zip(links[1:], ends[1:], strict=True)]
            begun.append(links[0].send(key, ends[0].span(tokens), timeout=LIMIT))
            for handle_ in begun:
                handle_.synchronize()
        pipe.send(time.monotonic())


def _memcpy(dst: int, src: int, nbytes: int, device: int) -> None:
    if device < 0:
        import ctypes

        ctypes.memmove(dst, src, nbytes)
        return
    _core.memcpy_batch(np.array([dst], np.uint64), np.array([src], np.uint64), nbytes, 1, device, _OWN_STREAM)
    _core.synchronize(device, _OWN_STREAM)


class Processes:
    """The four processes, and the pipes to them."""

    def __init__(self, settings: list[Setting], stack: contextlib.ExitStack) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for setting in settings:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, setting), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.kill)
            stack.callback(process.join, 10)
            stack.callback(mine.close)
            self.pipes.append(mine)
        told = self.answers()
        cards = [[cards[side] for cards, _ in told if len(cards) > side] for side in (0, 1)]
        for number, pipe in enumerate(self.pipes):
            pipe.send((cards, told[3 - number][1]))
        self.paths = sorted({path for paths in self.answers() for one in paths for path in one.values()})

    def answers(self) -> list[Any]:
        """What each process says.  Raises the error of one that has failed."""
        found = []
        for pipe in self.pipes:
            if not pipe.poll(LIMIT):
                raise KvbmError("ranks: a process does not answer")
            found.append(pipe.recv())
            if isinstance(found[-1], KvbmError):
                raise found[-1]
        return found

    def ask(self, what: str, tokens: int) -> tuple[float, list[Any]]:
        """Make all processes do something at once: when they began, and what each says."""
        at = time.monotonic() + _SOON
        for pipe in self.pipes:
            pipe.send((what, tokens, at))
        return at, self.answers()

    def seconds(self, what: str, tokens: int) -> float:
        at, ends = self.ask(what, tokens)
        return float(max(ends) - at)

    def check(self, tokens: int) -> None:
        """Raise `WrongCopyError` unless both engines hold the same tokens after one message."""
        self.seconds("link", tokens)
        _, digests = self.ask("digest", tokens)
        sent, came = (sum(one[side] for one in digests if len(one) > side) % (1 << 64) for side in (0, 1))
        if sent != came:
            raise WrongCopyError(f"ranks: {tokens} tokens: what came is not what was sent")

    def runner(self, what: str, tokens: int) -> Callable[[int, int], Timed]:
        def run(iters: int, warmup: int) -> Timed:
            return Timed.of([self.seconds(what, tokens) for _ in range(warmup + iters)][warmup:], "clock")

        return run


def sequences(
    places: tuple[str, str], model: BlockShape, sizes: list[int], iters: int, options: Mapping[str, int]
) -> Iterator[Row]:
    """Rows of sequences of some numbers of tokens, with the default limit of multiprocessors, and without a limit."""
    for sms in ({}, {"max_sms": 1 << 16}) if device_of(places[0]) >= 0 else ({},):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-"))
            given = {**options, **sms}
            found = Processes([Setting(k, places, model, max(sizes), folder, given) for k in range(SENDERS)], stack)
            for tokens in sizes:
                found.check(tokens)
                times = race({what: found.runner(what, tokens) for what in ("memcpy", "link")}, iters)
                nbytes = tokens * replace(model, nt=1).nbytes // SENDERS
                by = f"link, {'direct' if found.paths == ['direct'] else 'chunks'}{', all multiprocessors' if sms else ''}"
                asked = 0.9 if device_of(places[0]) >= 0 else None
                yield row_of("tp 4 → 2, bytes of the other GPU", by, 2, nbytes, times["link"], "memcpy", times["memcpy"], asked)
