"""A peer that is stopped or killed while its blocks are copied out of its pool, or while it copies (test_deaths.py).

What it receives is compared with what the other side's seed says, token by token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import kvbm
from kvbm import Span, wire
from kvbm.errors import TransferError
from kvbm.reshard import Endpoint, Placement

#: Of the two engines: layout, and tokens per block.
ROLES = {"prefill": ("vllm/flash_attn_nhd", 16), "decode": ("vllm/flash_attn_hnd", 64)}


class Engine:
    """One side: a pool with a sequence, and its endpoint.

    Parameters
    ----------
    role : {"prefill", "decode"}
    place : str
        Device of the pool: ``"shared"`` on the CPU, or ``"cuda:N"``.
    model : str
    tokens : int
        Length of the sequence, a multiple of 64.
    incarnation : str
        Whose name is part of the wire's, so that a new process is a new peer.
    """

    def __init__(self, role: str, place: str, model: str, tokens: int, incarnation: str) -> None:
        layout, self.nt = ROLES[role]
        self.shape, self.tokens, self.role = dataclasses.replace(kvbm.load_shape(model), nt=self.nt), tokens, role
        self.on_gpu = place.startswith("cuda")
        if self.on_gpu:
            from cuda.core import Device

            Device(int(place.partition(":")[2])).set_current()
        self.pool = kvbm.Pool.allocate(layout, self.shape, tokens // self.nt + 3, place)
        self.table = np.random.default_rng(self.nt).permutation(self.pool.num_blocks)[: tokens // self.nt]
        carrier = wire.mapped(wire.nixl(f"{role}-{incarnation}", drop_seconds=0.5), drop_seconds=0.5)
        self.end = Endpoint(
            role, Placement("tp1", model=model, nt=self.nt, name=role), 0, self.pool, wire=carrier, incarnation=incarnation,
            chunk_bytes=1 << 20, ring_bytes=1 << 23,
        )  # fmt: skip

    # ---- contents ----------------------------------------------------------------------------------------------------

    def contents(self, seed: int) -> np.ndarray:
        """What a seed says: layer, K or V, token, head, element."""
        shape = self.shape
        size = (shape.nl, 2, self.tokens, shape.nh, shape.hd)
        return np.random.default_rng(seed).integers(1, 1 << 16, size, np.uint16)

    def fill(self, seed: int) -> None:
        """Make the sequence that of a seed, and the blocks that are not its own zero."""
        made = self.contents(seed)
        for layer, array in enumerate(self._views()):
            blocks = np.zeros(array.shape, np.uint16)
            at = np.arange(self.tokens)
            by_token = blocks if self.role == "prefill" else np.swapaxes(blocks, 2, 3)
            by_token[:, self.table[at // self.nt], at % self.nt] = made[layer]
            self._write(array, blocks)

    def held(self) -> np.ndarray:
        """What the pool has of the sequence, in the order of `contents`; what is not the sequence's must be zero."""
        found = []
        at = np.arange(self.tokens)
        for array in self._views():
            blocks = array.view(self._int16).cpu().numpy().view(np.uint16) if self.on_gpu else np.array(array)
            by_token = blocks if self.role == "prefill" else np.swapaxes(blocks, 2, 3)
            found.append(by_token[:, self.table[at // self.nt], at % self.nt])
            others = np.setdiff1d(np.arange(self.pool.num_blocks), self.table)
            assert not blocks[:, others].any(), "a block that is not the sequence's was written"
        return np.stack(found)

    def clear(self) -> None:
        for array in self._views():
            self._write(array, np.zeros(array.shape, np.uint16))

    def _views(self) -> Any:
        if not self.on_gpu:
            return [np.asarray(array).view(np.uint16) for array in self.pool.arrays]
        import kvbm.torch

        return kvbm.torch.tensors(self.pool)

    def _write(self, array: Any, blocks: np.ndarray) -> None:
        if not self.on_gpu:
            array[...] = blocks
            return
        import torch

        array.view(torch.int16).copy_(torch.from_numpy(blocks.view(np.int16)))
        torch.cuda.synchronize(array.device)

    @property
    def _int16(self) -> Any:
        import torch

        return torch.int16

    # ---- messages ----------------------------------------------------------------------------------------------------

    def many(self, link: Any, count: int) -> None:
        """That many messages, one after the other."""
        for number in range(count):
            self.begin(link, f"many {number}", 60.0).synchronize(90)

    def begin(self, link: Any, key: str, timeout: float) -> Any:
        call = link.send if self.role == "prefill" else link.receive
        return call(key, Span(self.table, range(self.tokens)), timeout=timeout)


def peer(pipe: Any, role: str, place: str, model: str, tokens: int, name: str, seed: int) -> None:
    """The process that is killed or stopped.  Its messages have the names that it is told; the answer is what became of each.

    A number instead of a name and a timeout: so many messages.
    """
    engine = Engine(role, place, model, tokens, name)
    if role == "prefill":
        engine.fill(seed)
    pipe.send(engine.end.card())
    link = engine.end.meet([pipe.recv()])
    pipe.send(link.paths)
    for told in iter(pipe.recv, None):
        try:
            if isinstance(told, int):
                engine.many(link, told)
            else:
                key, timeout = told
                engine.begin(link, key, timeout).synchronize(timeout + 30)
        except TransferError as error:
            pipe.send((type(error).__name__, str(error)))
            continue
        is_right = role == "prefill" or bool(np.array_equal(engine.held(), engine.contents(seed)))
        pipe.send(("right" if is_right else "wrong", ""))
    engine.end.close()
    engine.pool.close()
