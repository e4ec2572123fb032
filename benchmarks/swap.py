"""The method of vLLM 0.32 to load small pages: one Triton kernel that reads a list of descriptors.  Needs Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["swap"]

#: Programs per launch, and bytes that a program moves at a time.
PROGRAMS, CHUNK = 12, 8192


@triton.jit  # type: ignore[untyped-decorator]
def _follow(src, dst, sizes, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.arange(0, WORDS)
    one = tl.program_id(0)
    while one < count:
        source = tl.load(src + one).to(tl.pointer_type(tl.int64))
        target = tl.load(dst + one).to(tl.pointer_type(tl.int64))
        words = tl.load(sizes + one) // 8
        for first in range(0, words, WORDS):
            inside = first + at < words
            tl.store(target + first + at, tl.load(source + first + at, mask=inside, other=0), mask=inside)
        one += tl.num_programs(0)


def swap(src: Any, dst: Any, sizes: Any, nbytes: int) -> None:
    """Copy ranges on torch's current stream.

    Parameters
    ----------
    src, dst, sizes : torch.Tensor
        Pinned int64 tensors: addresses, and sizes in bytes, which are multiples of 8.
    nbytes : int
        Bytes of the largest range.
    """
    words = min(triton.next_power_of_2(nbytes), CHUNK) // 8
    lists = [each.to("cuda", non_blocking=True) for each in (src, dst, sizes)]
    _follow[(min(PROGRAMS, len(src)),)](*lists, len(src), WORDS=words)
