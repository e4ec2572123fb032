"""A kernel that reads beyond its tensor: nothing runs on the GPU in this process afterwards."""

import torch

from kvbm.testing import benchmark_kernel, make_match_reference

x, far = torch.ones(4, device="cuda"), torch.tensor([10**6], device="cuda")
print(make_match_reference(lambda x: x, limit_s=20)(lambda x: x[far], x)[1])
try:
    print(benchmark_kernel(lambda x: x[far], x, 1, 2, limit_s=20).error)
except RuntimeError:
    print("nothing can be copied on this GPU any more")
