"""Direct copies whose other side is killed or stopped in the middle: stated errors, right data or none, and one that goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.errors import TransferError
from processes import LIMIT, context
from programs.mortal import Engine, peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux"),
]

ROUNDS = 4

#: No other test uses the GPU's memory.
IS_ALONE = "PYTEST_XDIST_WORKER" not in os.environ


def places(where: str) -> tuple[str, str, str, int]:
    """Places of the survivor and of its peer; a model; tokens of the sequence."""
    if where == "cpu":
        return "shared", "shared", "nl=4,no=2,nh=4,nt=16,hd=64,dtype=uint16", 2048
    import torch

    return "cuda:0", f"cuda:{torch.cuda.device_count() - 1}", "nl=8,no=2,nh=8,nt=16,hd=128,dtype=uint16", 4096


class Peer:
    """A process that can be killed, and the survivor's link to it."""

    def __init__(self, engine: Engine, place: str, model: str, name: str, seed: int) -> None:
        self.pipe, theirs = context().Pipe()
        role = "decode" if engine.role == "prefill" else "prefill"
        arguments = theirs, role, place, model, engine.tokens, name, seed
        self.process = context().Process(target=peer, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        card = self.hear()
        self.pipe.send(engine.end.card())
        self.link = engine.end.meet([card])
        for paths in (self.hear(), self.link.paths):
            assert set(paths.values()) <= {"direct"}, paths

    def hear(self) -> Any:
        assert self.pipe.poll(120), "the peer does not answer"
        return self.pipe.recv()

    def signal(self, what: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, what)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("survivor", ["prefill", "decode"])
def test_the_other_side_ends_in_the_middle(survivor: str, how: str, where: str) -> None:
    """After each death the survivor's endpoint meets the next process, and its blocks are its own.

    A stopped reader that goes on later must not take what its owner has written meanwhile for what it was sent.

    The survivor is a process of its own: once, after a peer had been killed, a descriptor that was not NIXL's was closed in it.
    """
    pytest.importorskip("nixl")
    if where == "gpu":
        pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, survivor, how, where]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a peer that is stopped, too
    assert process.returncode == 0, printed[-8000:]
    assert f"{survivor} {how} {where}: " in printed


@pytest.mark.parametrize(
    ("where", "count"), [("cpu", 300), pytest.param("gpu", 10_000, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_nothing_is_left_of_many_messages(where: str, count: int) -> None:
    """No loan, no descriptor, no memory."""
    pytest.importorskip("nixl")
    near, far, model, _ = places(where)
    engine = Engine("prefill", near, model, 64, "many")
    engine.fill(5)
    with contextlib.closing(Peer(engine, far, model, "many", 5)) as other:

        def state() -> tuple[int, int, int]:
            held = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            loans = sum(engine.end.wire._peers[peer].has_loans() for peer in other.link.peers)
            return len(list(Path("/proc/self/fd").iterdir())), loans, int(held) * os.sysconf("SC_PAGE_SIZE")

        def go(number: int) -> tuple[int, int, int]:
            other.pipe.send(number)
            engine.many(other.link, number)
            assert other.hear() == ("right", ""), "the last one is what was sent"
            return state()

        files, loans, memory = go(count // 3)
        end = go(count)
        assert end[0] <= files and (loans, end[1]) == (0, 0)  # fewer files: what an earlier test left is collected meanwhile
        assert end[2] - memory < 32 << 20, f"{(end[2] - memory) / count:.0f} bytes a message are kept"
        assert not other.link.handles and not other.link._ahead and not other.link._inflows
    engine.end.close()
    engine.pool.close()


def survive(survivor: str, how: str, where: str) -> None:
    """Run by the test above, in a process of its own."""
    near, far, model, tokens = places(where)
    rng, free, ends = random.Random(f"{survivor} {how} {where}"), [], Counter()
    engine = Engine(survivor, near, model, tokens, "survivor")
    for number in range(ROUNDS):
        engine.fill(number) if survivor == "prefill" else engine.clear()
        with contextlib.closing(Peer(engine, far, model, f"{number}", number)) as other:
            for key in ("a", "b"):
                other.pipe.send((key, 60.0))
                engine.begin(other.link, key, 60.0).synchronize(90)
                assert other.hear() == ("right", "")
                if survivor == "decode":
                    assert np.array_equal(engine.held(), engine.contents(number))
                    engine.clear()
            other.pipe.send(("c", 5.0))
            handle = engine.begin(other.link, "c", 0.5 if how == "stopped" else 60.0)
            time.sleep(rng.random() * 0.004)
            other.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            if how == "stopped":
                time.sleep(0.8)
                if handle.has_ended and survivor == "prefill":  # its blocks may be used for others: nobody reads them any more
                    engine.fill(1000 + number)
                other.signal(signal.SIGCONT)
            try:
                handle.synchronize(90)
            except TransferError as error:
                gone = f"{'decode' if survivor == 'prefill' else 'prefill'}-{number}#"
                assert handle.has_ended and (gone in str(error) or "'c'" in str(error)), error
                assert survivor == "prefill" or not engine.held().any(), "a part of a message that failed is left"
                ends["failed"] += 1
            else:
                assert survivor == "prefill" or np.array_equal(engine.held(), engine.contents(number))
                ends["right"] += 1
            if survivor == "prefill":
                engine.fill(2000 + number)
            if how == "stopped":
                assert other.hear()[0] != "wrong"
            other.link.leave()
        free.append(left(engine))
    engine.fill(77)
    assert np.array_equal(engine.held(), engine.contents(77)), "its device works"
    assert not any(known.opened for known in engine.end.wire._peers.values()), "memory of peers that are gone is mapped"
    if IS_ALONE:
        assert min(free[2:]) > free[1] - (64 << 20), f"memory of peers that are gone is kept: {free}"
    engine.end.close()
    engine.pool.close()
    print(f"{survivor} {how} {where}: {dict(ends)}")


def left(engine: Engine) -> int:
    """Free bytes of the survivor's GPU; 0 on the CPU."""
    if not engine.on_gpu:
        return 0
    import torch

    deadline = time.monotonic() + 20
    while engine.end.dropping and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(torch.cuda.mem_get_info(0)[0])


if __name__ == "__main__":
    survive(*sys.argv[1:])
