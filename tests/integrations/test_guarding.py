"""`integrations.vllm.guarding`: digests of tokens that one side keeps and the other compares, over pools and without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import BindError, KvbmError, Pool, Span, reshard
from kvbm.integrations.vllm.guarding import Keeper, Kept, Origin, compare, cuts, digests_of
from kvbm.link.secret import Secret
from kvbm.link.talk import connect

MODEL = kvbm.BlockShape(nl=3, no=2, nh=4, nt=4, hd=8, dtype="float32")
TOKENS = 30

#: The prompt's cache, by coordinates of the model: layer, K or V, head, token, element.
VALUES = np.random.default_rng(7).standard_normal((3, 2, 4, 64, 8)).astype("f4")


class Rank:
    """A rank's pool that holds the prompt in blocks that are not in order."""

    def __init__(self, tp: int, rank: int, nt: int, layout: str, first: int = 0) -> None:
        self.place, self.rank = reshard.vllm(replace(MODEL, nt=nt), tp=tp, name="e"), rank
        self.pool = Pool.allocate(layout, replace(MODEL, nt=nt, nh=MODEL.nh // tp), 24)
        self.table = np.random.default_rng(nt + rank).permutation(24)[: -(-TOKENS // nt)]
        self.table[: first // nt] = -1
        each = MODEL.nh // tp
        self.universal = Pool.allocate("universal", self.pool.shape, 24)
        for at, block in enumerate(self.table):
            part = VALUES[:, :, rank * each : (rank + 1) * each, at * nt : (at + 1) * nt]
            if block >= 0:
                self.put(int(block), part)

    def _block(self, block: int) -> np.ndarray[Any, Any]:
        """A block of ``universal``, which is ``[b] h l o t d``."""
        return np.asarray(self.universal.arrays[block]).reshape(self.pool.shape.nh, 3, 2, self.pool.shape.nt, 8)

    def put(self, block: int, part: np.ndarray[Any, Any]) -> None:
        """Write a block: layer, K or V, head, token, element."""
        self._block(block)[...] = part.transpose(2, 0, 1, 3, 4)
        kvbm.convert(self.universal, self.pool, [block], [block])

    def flip(self, token: int, by: float = 1.0) -> None:
        """Another value in one token of the last head."""
        block, at = int(self.table[token // self.pool.shape.nt]), token % self.pool.shape.nt
        self._block(block)[-1, 1, 1, at, 3] = np.float32(by) - self._block(block)[-1, 1, 1, at, 3]
        kvbm.convert(self.universal, self.pool, [block], [block])

    def kept(self, first: int = 0, last: int = TOKENS) -> Kept:
        return digests_of(self.place, self.rank, self.pool, Span(self.table, range(first, last)))

    def own(self, first: int = 0, last: int = TOKENS) -> Callable[[], dict[str, tuple[Kept, int]]]:
        return lambda: {"0.0": (self.kept(first, last), self.pool.shape.nt)}


Sender = Callable[..., Origin]


@pytest.fixture
def sender() -> Iterator[Sender]:
    """Keepers of all ranks at ports in a row, with the digests of the request ``r``."""
    keepers: list[Keeper] = []

    def start(
        tp: int = 1, nt: int = 4, layout: str = "nhd", first: int = 0, secret: Any = None, put: bool = True, **kept: int
    ) -> Origin:
        for _ in range(20):
            port = 0
            try:
                for rank in range(tp):
                    keepers.append(Keeper("127.0.0.1", port + rank if port else 0, 0.5, secret, is_insecure=False))
                    port = port or keepers[-1].port
                break
            except OSError:
                continue
        for rank, keeper in enumerate(keepers[-tp:]):
            if put:
                keeper.put("r", {"0.0": Rank(tp, rank, nt, layout, first).kept(first, **kept)})
        return Origin("r", "127.0.0.1", port, tp, TOKENS, "")

    yield start
    for keeper in keepers:
        keeper.close()


def compared(own: Any, origin: Origin, secret: Any = None, settle: float = 0.0, whole: Any = ()) -> str:
    return compare(own, origin, 5.0, secret, settle, whole)


@pytest.mark.parametrize(("tp", "to"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize(("nt", "other"), [(4, 8), (8, 4), (4, 4)])
def test_other_layouts_block_sizes_and_tensor_parallelism(sender: Sender, tp: int, to: int, nt: int, other: int) -> None:
    """Equal tokens are found equal, and one other element is found; the prompt ends within a block."""
    origin = sender(tp, nt)
    for rank in range(to):
        here = Rank(to, rank, other, "hnd")
        assert compared(here.own(), origin) == ""
        here.flip(29)
        assert compared(here.own(last=29), origin) == ""
        total = -(-TOKENS // other) * max(1, tp // to)  # each block is compared with each rank that has heads of it
        assert compared(here.own(), origin) == (
            f"1 of {total} digests of blocks differ from those of the engine that computed them: "
            f"group 0.0, from token {29 // other * other} on"
        )


def test_only_what_was_loaded_is_compared(sender: Sender) -> None:
    """A prefix that was here is not: nobody has sent it."""
    origin, here = sender(), Rank(1, 0, 8, "hnd")
    here.flip(7)
    assert compared(here.own(first=8), origin) == ""
    assert "1 of 4 digests of blocks differ" in compared(here.own(), origin)


def test_blocks_in_another_order_are_found(sender: Sender) -> None:
    """All tokens are there, at other positions: the public mistake of another block size."""
    origin, here = sender(), Rank(1, 0, 8, "hnd")
    here.table[[0, 1]] = here.table[[1, 0]]
    assert "2 of 4 digests of blocks differ" in compared(here.own(), origin)


def test_tokens_in_another_order_within_a_block_are_found(sender: Sender) -> None:
    origin, here = sender(), Rank(1, 0, 8, "hnd")
    here.put(int(here.table[1]), VALUES[:, :, :, [8, 9, 11, 10, 12, 13, 14, 15]])
    assert "1 of 4 digests of blocks differ" in compared(here.own(), origin)


def test_behind_a_window_what_both_have_is_compared(sender: Sender) -> None:
    origin, here = sender(first=12), Rank(1, 0, 8, "hnd", first=8)
    assert compared(here.own(first=8), origin) == ""
    here.flip(9)  # the other side has not got it
    assert compared(here.own(first=8), origin) == ""
    here.flip(12)
    assert "1 of 3 digests of blocks differ" in compared(here.own(first=8), origin)


def test_more_than_a_block_that_is_not_digested_is_refused(sender: Sender) -> None:
    """It would be loaded without a comparison."""
    with pytest.raises(BindError, match=r"group 0\.0: expected tokens 0 to 30, got digests of 12 to 30"):
        compared(Rank(1, 0, 8, "hnd").own(), sender(first=12))


@pytest.mark.parametrize(("first", "whole"), [(1, True), (7, True), (8, False)])
def test_tokens_that_nobody_has_digested_are_refused(sender: Sender, first: int, whole: bool) -> None:
    """Without a window each loaded token is compared; behind one, less than a block of it is not."""
    here = Rank(1, 0, 8, "hnd")
    here.flip(0)  # nobody would see it
    with pytest.raises(BindError, match=rf"group 0\.0: expected tokens 0 to 30, got digests of {first} to 30"):
        compared(here.own(), sender(first=first), whole={"0.0"} if whole else ())


def test_what_comes_late_is_given_time(sender: Sender) -> None:
    """The connector says too early that it has loaded."""
    origin, here = sender(), Rank(1, 0, 8, "hnd")
    block = int(here.table[0])
    right = here._block(block).copy()
    here.flip(3)

    def arrive() -> None:
        here.put(block, right.transpose(1, 2, 0, 3, 4))

    timer = threading.Timer(0.2, arrive)
    timer.start()
    assert compared(here.own(), origin, settle=1.0) == ""
    timer.join()


def test_digests_that_are_not_ready_are_waited_for(sender: Sender) -> None:
    with pytest.raises(KvbmError, match=r"r: no digests of it within 0\.5 s"):
        compared(Rank(1, 0, 8, "hnd").own(), sender(put=False))


def test_fewer_tokens_than_were_loaded(sender: Sender) -> None:
    with pytest.raises(BindError, match=r"group 0\.0: expected tokens 0 to 30, got digests of 0 to 28"):
        compared(Rank(1, 0, 8, "hnd").own(), sender(last=28))


def test_nobody_is_there(sender: Sender) -> None:
    origin = sender()
    with pytest.raises(KvbmError, match="the guard of a worker"):
        compared(Rank(1, 0, 8, "hnd").own(), replace(origin, port=1))
    with pytest.raises(KvbmError, match=r"heads \[2, 3\] of it are on no rank"):
        compared(Rank(1, 0, 8, "hnd").own(), replace(sender(2), workers=1))


def test_why_there_are_none_is_said() -> None:
    keeper = Keeper("127.0.0.1", 0, 1.0, None, is_insecure=False)
    try:
        keeper.put("r", "it has no digests: a table with gaps")
        with pytest.raises(KvbmError, match="it has no digests: a table with gaps"):
            compared(Rank(1, 0, 8, "hnd").own(), Origin("r", "127.0.0.1", keeper.port, 1, TOKENS, ""))
    finally:
        keeper.close()


def test_a_secret(sender: Sender, tmp_path: Path) -> None:
    secrets = []
    for name in ("one", "two"):
        (file := tmp_path / name).write_text(f"the secret number {name}, long enough\n")
        file.chmod(0o600)
        secrets.append(Secret.read(file))
    origin, here = sender(secret=secrets[0]), Rank(1, 0, 8, "hnd")
    assert compared(here.own(), origin, secrets[0]) == ""
    for other in (secrets[1], None):
        with pytest.raises(KvbmError):
            compared(here.own(), origin, other)
    with pytest.raises(BindError, match=r"0\.0\.0\.0"):
        Keeper("0.0.0.0", 0, 1.0, None, is_insecure=False)


@pytest.mark.parametrize("asked", [
    {"group": "1.0"}, {"heads": [9]}, {"heads": 3}, {"heads": [0] * 5}, {"heads": [[0]]}, {"heads": [True]},
    {"first": -1}, {"last": 31}, {"step": 0}, {"step": 1.5}, {"first": True},
])  # fmt: skip
def test_questions_that_are_none_are_refused(sender: Sender, asked: dict[str, Any]) -> None:
    origin = sender()
    with connect(origin.host, origin.port, 5.0) as talk:
        talk.say(ask="r")
        assert talk.hear("groups")["groups"] == {"0.0": [[0, 1, 2, 3], [0, 1, 2], 0, 30]}
        talk.say(**{"group": "0.0", "heads": [0], "first": 0, "last": 30, "step": 4, **asked})
        with pytest.raises(KvbmError, match="expected a group, heads and tokens that are here"):
            talk.hear("sums")


@pytest.mark.parametrize("given", [
    None, "x", {}, {"key": 3}, {"port": True}, {"port": 70000}, {"workers": 0}, {"workers": 1 << 40}, {"host": "h" * 2000},
    {"inputs": 0},
])  # fmt: skip
def test_parameters_that_are_nonsense(given: Any) -> None:
    right = {"key": "k", "host": "h", "port": 7, "workers": 1, "tokens": 30, "inputs": ""}
    if isinstance(given, dict) and given:
        given = {**right, **given}
    with pytest.raises(BindError, match=r"kv_transfer_params: kvbm_guard: expected|kvbm_guard: [a-z]+: expected"):
        Origin.of(given)


def test_the_oldest_digests_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.integrations.vllm.guarding._MOST_KEPT", 3000 + 3 * 1024)
    keeper = Keeper("127.0.0.1", 0, 0.1, None, is_insecure=False)
    try:
        for name in "abcd":
            keeper.put(name, {"0.0": Rank(1, 0, 4, "nhd").kept()})  # 4 * 30 * 8 bytes
        assert list(keeper._kept) == ["b", "c", "d"] and keeper._nbytes == 3 * (960 + 1024)
        keeper.put("d", {"0.0": Rank(1, 0, 4, "nhd").kept()})
        assert list(keeper._kept) == ["b", "c", "d"] and keeper._nbytes == 3 * (960 + 1024)
    finally:
        keeper.close()


@pytest.mark.parametrize("what", ["one token each", "reasons"])
def test_many_small_requests_are_bounded(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Each takes memory beside its digests, if it has any."""
    monkeypatch.setattr("kvbm.integrations.vllm.guarding._MOST_KEPT", 1 << 20)
    keeper, small = Keeper("127.0.0.1", 0, 0.1, None, is_insecure=False), Kept((0,), (0,), 0, np.zeros((1, 1), np.uint64))
    try:
        for number in range(100_000):
            keeper.put(str(number), {"0.0": small} if what.startswith("one") else "it has no digests")
        assert 900 < len(keeper._kept) <= 1024 and next(reversed(keeper._kept)) == "99999"
    finally:
        keeper.close()


def test_long_prompts_take_several_messages(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.integrations.vllm.guarding._MOST_IN_MESSAGE", 3)
    origin, here = sender(), Rank(1, 0, 4, "hnd")
    assert compared(here.own(first=2), origin) == ""
    here.flip(29)
    assert compared(here.own(first=2), origin).startswith("1 of 8 digests")


def test_cuts() -> None:
    assert [cuts(*one) for one in ((0, 9, 4), (2, 9, 4), (4, 8, 4), (3, 3, 4))] == [[0, 4, 8], [2, 4, 8], [4], []]
