"""A child of a process that copies: it may not, and is told so; its parent goes on."""

import os
import sys
from pathlib import Path

import kvbm

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in (".", "helpers", "copy", "bridges"))  # the tests
from test_transfer_gpu import check, ends, stream_of

s, d = ends("d2h", "nhd", "universal", 4, 4)
move, stream = kvbm.Transfer(s.pool, d.pool, "staged"), stream_of()
done = move.copy([0], [0], stream=stream)
handle = stream.cuda_stream
pid = os.fork()
if not pid:
    code = 0
    for call in (
        lambda: move.copy([1], [1], stream=handle),
        lambda: done.synchronize(),
        lambda: kvbm.Transfer(s.pool, d.pool),
    ):
        try:
            call()
        except kvbm.CudaError as error:
            code += "before it forked" in str(error)
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
move.copy([1], [1], stream=stream)
check(s, d, [0, 1], [0, 1])
print("right")
