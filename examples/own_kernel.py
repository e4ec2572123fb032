"""Test a copy kernel of your own, here in NumPy: is it right, and is it fast.

python examples/own_kernel.py

`kvbm.testing` gives it inputs, expected bytes and guard words for any pair of declared layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvbm.testing import LayoutCase, benchmark_kernel, layout_cases


def right(case: LayoutCase) -> None:
    """From nhd, one array per chunk of axes t h d, to universal, one array per block of axes h l o t d."""
    chunks = case.shape.nl * case.shape.no
    for i, j in zip(case.src_ids, case.dst_ids, strict=True):
        block = np.stack(case.src_arrays[i * chunks : (i + 1) * chunks])
        block = block.reshape(case.shape.nl, case.shape.no, *block.shape[1:])
        case.dst_arrays[j][...] = block.transpose(3, 0, 1, 2, 4)


def wrong(case: LayoutCase) -> None:
    """The same, with K and V exchanged."""
    right(case)
    for j in case.dst_ids:
        case.dst_arrays[j][...] = case.dst_arrays[j][:, :, ::-1].copy()


def errors(kernel: Callable[[LayoutCase], None]) -> list[str]:
    """What is wrong, one message per case."""
    found = []
    for case in layout_cases(pairs=[("nhd", "universal")], dtypes=["float32", "bfloat16"], batches=[1, 7]):
        kernel(case)
        if error := case.error():
            found.append(error)
    return found


def main() -> None:
    """Test both kernels, and time the right one."""
    assert errors(right) == []
    told = errors(wrong)
    assert len(told) == 4
    print(told[0])

    case = next(iter(layout_cases(pairs=[("nhd", "universal")], dtypes=["float32"], batches=[64])))
    result = benchmark_kernel(lambda _: right(case), case.src_ids, num_warmup=1, num_runs=5)
    assert result.record.error is None, result.record.error
    print(f"{result.avg_time_ms:.3f} ms for 64 blocks")


if __name__ == "__main__":
    main()
