"""Blocks leave an engine for host memory, the engine reuses them, and they come back layer by layer.

    python examples/offload_loop.py [--device cpu | cuda]

Needs PyTorch.  The engine has the layout of vLLM's FlashAttention before 0.26, the store has one buffer per block.  For vLLM 0.26
and newer (vllm/LBHNC and other orders), kvbm.Pool.from_vllm makes the engine's pool.
"""

from __future__ import annotations

import argparse

import torch

import kvbm

SHAPE = kvbm.load_shape("nl=4,no=2,nh=8,nt=16,hd=64,dtype=float16")


def main() -> None:
    """Offload block 7 three times, load the second version, and compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    cuda = device == "cuda"

    cache = [torch.randn(2, 16, 16, 8, 64, device=device).half() for _ in range(SHAPE.nl)]  # one per layer: o b t h d
    engine = kvbm.Pool("vllm/flash_attn_nhd", SHAPE, cache)
    store = kvbm.Pool.allocate("universal", SHAPE, 8, device="pinned" if cuda else "cpu")
    offload, load = kvbm.Transfer(engine, store), kvbm.Transfer(store, engine)
    compute = torch.cuda.current_stream() if cuda else None
    side = {"stream": torch.cuda.Stream(), "wait": compute} if cuda else {}

    versions = []
    for slot in range(3):
        for layer in cache:  # stands for the model, which writes block 7
            layer[:, 7] = torch.randn(2, 16, 8, 64, device=device).half()
        versions.append(torch.stack([layer[:, 7] for layer in cache]))
        saved = offload.copy([7], [slot], **side)
        if cuda:
            saved.wait(compute)  # the model may write the block again after this point of the stream

    for layer in range(SHAPE.nl):
        loaded = load.copy([1], [7], layers=range(layer, layer + 1), **side)
        if cuda:
            loaded.wait(compute)  # the model may read this layer
    assert torch.equal(torch.stack([layer[:, 7] for layer in cache]), versions[1])
    print(f"{offload.stats()['blocks']} blocks out, 1 block in, {SHAPE.nl} layers one by one: the same bits")


if __name__ == "__main__":
    main()
