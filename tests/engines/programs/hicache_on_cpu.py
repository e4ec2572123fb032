"""What SGLang's HiCache needs where there is no GPU: host memory that is not registered, and copies by torch.

Imported in each process, behind `standins`.  The copies know pools of keys and values in ``page_first_direct`` alone.
"""

from __future__ import annotations

from typing import Any

import standins  # noqa: F401  (before SGLang)
import torch
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost


def allocate(dims: Any, dtype: Any, **_: Any) -> Any:
    return torch.zeros(dims, dtype=dtype)


def load(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *_: Any, **__: Any
) -> None:
    page, token = host_indices // self.page_size, host_indices % self.page_size
    self.device_k_buffers[layer_id][device_indices] = self.kv_buffer[0][page, layer_id, token]
    self.device_v_buffers[layer_id][device_indices] = self.kv_buffer[1][page, layer_id, token]


def backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, *_: Any) -> None:
    page, token = host_indices // self.page_size, host_indices % self.page_size
    for layer in range(self.layer_num):
        self.kv_buffer[0][page, layer, token] = self.device_k_buffers[layer][device_indices]
        self.kv_buffer[1][page, layer, token] = self.device_v_buffers[layer][device_indices]


torch.cpu.Stream.synchronize = lambda _: None
common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
MHATokenToKVPoolHost.load_to_device_per_layer = load
MHATokenToKVPoolHost.backup_from_device_all_layer = backup
