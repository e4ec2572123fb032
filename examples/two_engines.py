"""A sequence moves from an engine at tp 4 with blocks of 16 tokens to one at tp 2 with blocks of 64 and another layout.

python examples/two_engines.py
"""

from __future__ import annotations

import numpy as np

import kvbm
from kvbm import reshard

TOKENS = 100


def main() -> None:
    """Fill the source with values that name their coordinates, copy, and look every value up in the destination."""
    model = kvbm.load_shape("nl=3,no=2,nh=8,nt=16,hd=16,dtype=int32")
    prefill, decode = reshard.vllm(model, tp=4, nt=16, name="prefill"), reshard.vllm(model, tp=2, nt=64, name="decode")
    src = [kvbm.Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), prefill.shape(rank), 8) for rank in range(4)]
    dst = [kvbm.Pool.allocate(kvbm.load("vllm/flash_attn_hnd"), decode.shape(rank), 2) for rank in range(2)]
    here = kvbm.Span([5, 0, 7, 2, 1, 3, 4], tokens=range(TOKENS))  # block tables, as the engines keep them
    there = kvbm.Span([1, 0], tokens=range(TOKENS))

    def value(layer: int, which: int, head: int, token: int) -> int:
        return ((layer * 2 + which) * 8 + head) * TOKENS + token + 1

    every = [(o, h, p) for o in range(2) for h in range(8) for p in range(TOKENS)]
    for layer in range(3):
        for o, h, p in every:  # a rank of prefill holds two heads; its arrays are o b t h d
            src[h // 2].arrays[layer][o, [5, 0, 7, 2, 1, 3, 4][p // 16], p % 16, h % 2] = value(layer, o, h, p)

    made = reshard.plan(prefill, decode)
    reshard.Local(made, src, dst)(here, there)
    for layer in range(3):
        for o, h, p in every:  # a rank of decode holds four heads; its arrays are o b h t d
            found = dst[h // 4].arrays[layer][o, [1, 0][p // 64], h % 4, p % 64]
            assert np.array_equal(found, np.full(16, value(layer, o, h, p))), (layer, o, h, p)
    print(f"{len(made.messages)} messages, {len(every) * 3:,} rows compared: all in place")


if __name__ == "__main__":
    main()
