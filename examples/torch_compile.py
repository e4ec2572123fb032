"""`kvbm.torch.convert` inside a compiled function, with gradients.

python examples/torch_compile.py
"""

from __future__ import annotations

import torch

import kvbm.torch

SIZES = "nl=4,no=2,nh=8,nt=16,hd=64"


@torch.compile(fullgraph=True)
def store(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Twice the cache, one tensor per layer (o b t h d), as one tensor per block (h l o t d)."""
    return kvbm.torch.convert([2 * layer for layer in layers], src="vllm/flash_attn_nhd", dst="universal", shape=SIZES)


def main() -> None:
    """Compare with PyTorch's own operators, forward and backward."""
    layers = [torch.randn(2, 6, 16, 8, 64, requires_grad=True) for _ in range(4)]
    blocks = store(layers)
    assert torch.equal(torch.stack(blocks), 2 * torch.stack(layers).permute(2, 4, 0, 1, 3, 5))
    blocks[1].sum().backward()
    assert all(torch.equal(layer.grad[:, 1], torch.full((2, 16, 8, 64), 2.0)) for layer in layers)
    assert not any(layer.grad[:, [0, 2, 3, 4, 5]].any() for layer in layers)
    print(f"{len(blocks)} blocks in one graph, and their gradients: the same bits")


if __name__ == "__main__":
    main()
