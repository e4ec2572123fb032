"""Checks an installed wheel on a machine without a GPU: CUDA kernels are built in, and the host kernels convert there and back."""

import sys

import numpy as np

import kvbm
from kvbm import _core

PAIRS = [("nhd", "universal"), ("nhd", "vllm/paged_attn_v0"), ("hnd", "hf/dynamic_cache")]
SHAPE = kvbm.BlockShape(nl=3, no=2, nh=4, nt=16, hd=64, dtype="float16")


def main() -> int:
    """Return 0 if everything is as it should be."""
    print(f"{_core.num_images()} images, {len(_core.kernel_names())} kernels, {len(kvbm.layouts())} layouts")
    if not (_core.num_images() and kvbm.layouts()):
        print("expected CUDA images and layouts in the wheel, found none of one of them", file=sys.stderr)
        return 1
    random = np.random.default_rng(0)
    for names in PAIRS:
        src, dst = (kvbm.Pool.allocate(kvbm.load(name), SHAPE, num_blocks=6) for name in names)
        back = kvbm.Pool.allocate(kvbm.load(names[0]), SHAPE, num_blocks=6)
        for array in src.arrays:
            array[:] = random.standard_normal(array.shape)
        kvbm.convert(src, dst)
        kvbm.convert(dst, back)
        same = all(np.array_equal(a, b) for a, b in zip(src.arrays, back.arrays, strict=True))
        digests = np.array_equal(src.digest(), dst.digest())
        print(f"{names[0]} → {names[1]} → {names[0]}: same bytes {same}, same digests {digests}")
        if not (same and digests):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
