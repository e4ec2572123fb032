"""Converts layouts that are not in the catalogue, on the GPU: their orders as JSON, the folder of their files."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

import kvbm

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in (".", "helpers", "copy", "bridges"))  # the tests
import oracle
from memory import placed, torch_views

shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=32, hd=64, dtype="bfloat16")
orders = json.loads(sys.argv[1])


class Side:
    def __init__(self, name, blocks, dst, align=0):
        order = orders.get(name) or [kvbm.load(name).order_text]
        path = str(Path(sys.argv[2], name + ".yaml"))
        self.layout = kvbm.load(path if name in orders else name)
        self.arena = placed(oracle.Order(*order), shape, blocks).layout_bytes(align)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.buffer = torch.from_numpy(self.before).to("cuda:0")
        self.pool = kvbm.Pool(self.layout, shape, torch_views(self.arena, self.buffer, shape.dtype))


torch.zeros(1, device="cuda:0")
warm = [Side("nhd", 2, False), Side("universal", 2, True)]
kvbm.convert(warm[0].pool, warm[1].pool)  # images and context: what every process pays
torch.cuda.synchronize()
src_ids, dst_ids = [4, 0, -1, 2], [1, 3, 2, 0]
for name in orders:
    for pair in ((name, "nhd"), ("universal", name)):
        for align in (0, 8):
            s, d = Side(pair[0], 5, False, align), Side(pair[1], 4, True, align)
            torch.cuda.synchronize()
            began = time.perf_counter()
            kvbm.convert(s.pool, d.pool, src_ids, dst_ids)
            seconds = time.perf_counter() - began
            torch.cuda.synchronize()
            kept = [i for i in range(4) if src_ids[i] >= 0]
            want = oracle.expected_bytes(s.arena, d.arena, s.before, d.before, [4, 0, 2], [1, 3, 0])
            got = d.buffer.cpu().numpy()
            assert np.array_equal(got, want), oracle.explain(d.arena, got, want)
            assert np.array_equal(s.buffer.cpu().numpy(), s.before)
            text = kvbm.Transfer(s.pool, d.pool).explain()
            how = [word for word in ("compiled it for", "came from the cache", "in place of") if word in text]
            print(json.dumps([*pair, align, round(1e3 * seconds, 2), how]), flush=True)
