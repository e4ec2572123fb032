"""Adds kernels until no more go in; prints the error."""

import kvbm
from kvbm import _core

built = len(_core.kernel_names())
form = ("rows", 2, 3, 0, 16, False)
assert [_core.add_kernel(f"k{i}", [form], b"code", 90) for i in range(4096)] == list(range(built, built + 4096))
assert _core.add_kernel("k7", [form], b"other", 80) == _core.add_kernel("k7", [form], b"code", 90) == built + 7
assert len(_core.kernel_names()) == built and _core.kernel_index("k4095") == built + 4095
_core.Copy("k9", [((0, 0, 0, 0), [], [(1, 1, 1)])], (1, 0), (1, 0))
try:
    _core.add_kernel("one more", [form], b"code", 90)
except kvbm.CudaError as error:
    print(error)
