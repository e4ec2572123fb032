"""Blocks go to a file with digests, the file is converted, and a damaged byte is found.

python examples/files.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import kvbm
from kvbm import store


def main() -> None:
    """Save, convert, load, damage, verify."""
    shape = kvbm.load_shape("nl=4,no=2,nh=8,nt=16,hd=64,dtype=float16")
    pool = kvbm.Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), shape, 16)
    for layer, array in enumerate(pool.arrays):
        array[:] = np.random.default_rng(layer).standard_normal(array.shape)

    with tempfile.TemporaryDirectory() as folder:
        saved, converted = Path(folder, "blocks.safetensors"), Path(folder, "universal.safetensors")
        store.save(saved, pool, [7, 3, 12])
        store.convert(saved, converted, kvbm.load("universal"))
        back = store.load(converted, layout=kvbm.load("nhd"))  # verified: another layout, the same digests
        assert np.array_equal(back.digest(), pool.digest([7, 3, 12]))

        content = bytearray(converted.read_bytes())
        content[-100] ^= 1
        converted.write_bytes(content)
        (damage,) = store.verify(converted)
        print(f"block {damage.block}, layers {damage.layers}, tokens {damage.tokens}: found")
        try:
            store.load(converted)
        except kvbm.DigestError as error:
            print(f"not loaded: {str(error).partition(': ')[2]}")
        else:
            raise AssertionError("a damaged file was loaded")


if __name__ == "__main__":
    main()
