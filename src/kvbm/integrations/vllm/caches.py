"""vLLM's caches as pools, by group (to be replaced by what reads the layout from vLLM's configuration)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ... import spec
from ...pool import Pool
from ...reshard import Placement, vllm
from ...shapes import BlockShape


class Caches:
    def __init__(self, config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> None:
        parallel = config.parallel_config
        self.groups: dict[str, tuple[Placement, Pool]] = {}
        self._windows: dict[str, int | None] = {}
        self._nt: dict[str, int] = {}
        for number in kv_cache_config.transfer_group_ids:
            group = kv_cache_config.kv_cache_groups[number]
            held = group.kv_cache_spec
            names = sorted(group.layer_names, key=lambda name: int(re.findall(r"\.(\d+)\.", name)[0]))
            tensors = [kv_caches[name] for name in names]
            blocks, nh, nt, hd2 = tensors[0].shape
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            shape = BlockShape(len(names), 2, nh, nt, hd2 // 2, dtype)
            pool = Pool(spec.load("vllm/cpu_vec"), shape, [tensor.flatten() for tensor in tensors])
            heads = config.model_config.get_total_num_kv_heads()
            model = BlockShape(len(names), 2, heads, nt, hd2 // 2, dtype)
            self.groups[str(number)] = vllm(model, tp=parallel.tensor_parallel_size, nt=nt, name="vllm"), pool
            self._windows[str(number)] = getattr(held, "sliding_window", None)
            self._nt[str(number)] = nt

    def tables(
        self, blocks: tuple[list[int], ...], last: int, first: int | None = None
    ) -> dict[str, tuple[np.ndarray, int]]:
        """By group: its table, -1 where vLLM holds no block, and the first token that is sent, or that is to come."""
        found = {}
        for name, ids in zip(self.groups, blocks, strict=True):
            table = np.array(ids, np.int64)
            table[table == 0] = -1
            held = np.flatnonzero(table >= 0)
            start = int(held[0]) * self._nt[name] if held.size else last
            if first is not None:
                window = self._windows[name]
                start = max(start, first, last - window + 1 if window else 0)
            found[name] = table, start
        return found
