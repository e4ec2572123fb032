"""Pinned memory on the NUMA node of a GPU: which node, and what the system is told.

The machine of two nodes is emulated: its sysfs is a folder, and its node 0 is the real one.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sysfs
from kvbm import _core
from kvbm.memory import numa
from kvbm.system.machine import host_beside
from processes import FakeDriver

#: As the fake driver has them, in lower case.
GPUS = ("0000:3b:00.0", "0000:3c:00.0")
MIB = 1 << 20


@pytest.fixture
def pages() -> Iterator[int]:
    """The address of 4 MiB that nobody has touched."""
    memory = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield np.frombuffer(memory, np.uint8).ctypes.data
    memory.close()


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "pci_address", GPUS.__getitem__)
    monkeypatch.setattr(numa, "_refused", set())
    monkeypatch.setattr(_core, "device_count", lambda: len(GPUS))


@pytest.mark.parametrize(("text", "want"), [("0", {0}), ("0-1", {0, 1}), ("0-1,4", {0, 1, 4}), ("", set()), ("x", set())])
def test_nodes(tmp_path: Path, text: str, want: set[int]) -> None:
    assert numa.nodes(sysfs.machine(tmp_path, text, {})) == want


def test_memory_of_a_gpu_that_is_a_node_of_its_own_is_not_host_memory(tmp_path: Path) -> None:
    """On Grace Hopper."""
    root = sysfs.machine(tmp_path, "0-1", {})
    (root / "sys/devices/system/node/has_cpu").write_text("0\n", encoding="ascii")
    assert numa.nodes(root) == {0}


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == set() and numa.node_of_gpu(0, tmp_path) == -1


def test_the_node_of_a_gpu(tmp_path: Path) -> None:
    root = sysfs.machine(tmp_path, "0-1", {GPUS[0]: -1, GPUS[1]: 1})
    assert [numa.node_of_gpu(device, root) for device in (0, 1)] == [-1, 1]


def test_the_system_prefers_the_node_for_the_range_and_no_more(pages: int) -> None:
    sysfs.require_mbind(pages + MIB, MIB)
    assert [sysfs.policy(pages + at * MIB) for at in range(4)] == ["default", "prefer:0", "default", "default"]


def test_a_node_that_the_machine_does_not_have_is_refused(pages: int) -> None:
    for node in (63, 64, 1000):
        assert numa.bind(pages, 4 * MIB, node), "the mask has the bit of the node"
    assert sysfs.policy(pages) == "default"


@pytest.mark.parametrize("device", [0, None])
def test_memory_is_placed_on_the_node_of_the_gpu(
    tmp_path: Path, pages: int, device: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all GPUs, if they are on one node."""
    sysfs.require_mbind(pages, 4096)
    root = sysfs.machine(tmp_path, "0-1", dict.fromkeys(GPUS, 0))
    with caplog.at_level(logging.INFO, "kvbm"):
        assert numa.place(pages, 4 * MIB, device, root) == 0
    assert sysfs.policy(pages) == sysfs.policy(pages + 4 * MIB - 1) == "prefer:0"
    assert "4194304 bytes of pinned memory are placed on node 0" in caplog.text


@pytest.mark.parametrize(
    ("nodes", "of_gpus", "device", "words"),
    [
        ("0", (0, 0), 0, ""),  # one node: nothing to say
        ("", (0, 0), 0, ""),
        ("0-1", (0, 1), None, "the GPUs on nodes [0, 1] of [0, 1]; device='pinned:N'"),
        ("0-1", (-1, 0), 0, "cuda:0 on nodes [-1] of [0, 1]"),
        ("0-1", (-1, -1), None, "the GPUs on nodes [-1]"),
        ("0-1", (0, 2), 1, "cuda:1 on nodes [2]"),  # memory of a GPU
    ],
)
def test_memory_that_is_left_where_it_is_touched(
    tmp_path: Path, pages: int, nodes: str, of_gpus: tuple[int, int], device: int | None, words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    root = sysfs.machine(tmp_path, nodes, dict(zip(GPUS, of_gpus, strict=True)))
    with caplog.at_level(logging.DEBUG, "kvbm"):
        assert numa.place(pages, 4 * MIB, device, root) is None
    assert sysfs.policy(pages) == "default"
    assert (words in caplog.text) if words else not caplog.text


def test_a_policy_of_the_thread_stands(
    tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "_has_policy", lambda: True)
    root = sysfs.machine(tmp_path, "0-1", dict.fromkeys(GPUS, 0))
    with caplog.at_level(logging.INFO, "kvbm"):
        assert numa.place(pages, 4 * MIB, 0, root) is None
    assert sysfs.policy(pages) == "default" and "this thread's memory policy" in caplog.text


def test_a_policy_is_seen(fake_driver: FakeDriver) -> None:
    """In a process of its own, as the policy stays with the thread."""
    fake_driver("placed.a_policy_is_seen")


def test_a_refusal_is_a_warning_that_says_what_to_do_once(
    tmp_path: Path, pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 63 of the emulated machine does not exist here."""
    root = sysfs.machine(tmp_path, "0,63", dict.fromkeys(GPUS, 63))
    for _ in range(2):
        assert numa.place(pages, 4 * MIB, 1, root) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert all(words in record.getMessage() for words in ("cuda:1 on node 63", "mbind: ", "SYS_NICE", "numactl"))


def test_a_processor_whose_calls_are_not_known(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert numa.bind(pages, 4 * MIB, 0) == "its number on riscv64 is not known" and not numa._has_policy()


def test_host_memory_beside_a_place() -> None:
    assert [host_beside(place) for place in ("cpu", "cuda:0", "cuda:3")] == ["cpu", "pinned:0", "pinned:3"]


def test_pools_are_placed_before_they_are_touched(fake_driver: FakeDriver, tmp_path: Path, pages: int) -> None:
    sysfs.require_mbind(pages, 4096)
    root = sysfs.machine(tmp_path, "0,63", {GPUS[0]: 63, GPUS[1]: 0})
    fake_driver("placed.pools_are_placed_before_they_are_touched", str(root), GPUS, FAKE_DEVICES="2")


def test_a_gpu_that_does_not_exist(fake_driver: FakeDriver) -> None:
    fake_driver("placed.a_gpu_that_does_not_exist", FAKE_DEVICES="2")
