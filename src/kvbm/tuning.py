"""Which strategy is fastest on this machine: measured once, kept in the user's cache folder."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["limits"]


def limits(
    direction: str, device: int, shortest: Mapping[str, int], block_bytes: int
) -> tuple[list[tuple[int, str]], str]:
    """Up to how many pairs which strategy is the fastest, ascending, and why."""
    del device
    if direction == "d2d":
        return [(0, "direct")], "one kernel on one GPU is the fastest way there"
    if "direct" not in shortest:
        return [(0, "staged")], "the GPUs do not reach each other's memory"
    if direction == "p2p":
        return [(0, "direct")], "a kernel that writes to the other GPU is the fastest way there"
    few = max(1, (10 << 20) // block_bytes)
    return [(few, "direct"), (few + 1, "staged")], "the built-in rule"
