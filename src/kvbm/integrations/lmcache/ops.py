"""LMCache's device operations, with kvbm's copy between paged blocks and objects."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.platform.devices.cpu.device_ops import CpuDeviceOps
from lmcache.v1.platform.devices.cuda.device_ops import CudaDeviceOps

from ...errors import BindError
from .blocks import Copies

__all__ = ["KvbmCpuOps", "KvbmCudaOps"]


class _Blocks:
    """The replaced operation.  From the annotations of its arguments LMCache reads if objects may be tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()

    def multi_layer_block_kv_transfer(
        self, paged_buffer_ptrs_tensor: torch.Tensor | list[Any], lmcache_objects_ptrs: list[int] | list[torch.Tensor],
        block_ids: torch.Tensor | list[int], device: torch.device | str, direction: Any, shape_desc: Any,
        lmcache_chunk_size: int, engine_kv_format: Any, skip_prefix_n_blocks: int,
    ) -> None:  # fmt: skip
        if int(direction) not in (int(TransferDirection.D2H), int(TransferDirection.H2D)):
            raise BindError(f"LMCache: direction: expected H2D or D2H, got {direction!r}")
        self.copies.copy(
            paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, torch.device(device), shape_desc,
            lmcache_chunk_size, getattr(engine_kv_format, "name", str(engine_kv_format)), skip_prefix_n_blocks,
            to_objects=int(direction) == int(TransferDirection.D2H),
        )  # fmt: skip


class KvbmCpuOps(_Blocks, CpuDeviceOps):  # type: ignore[misc]  # LMCache is not typed
    """On the CPU."""


#: Native functions that LMCache would call instead of the replaced operation.
_REPLACED = ("multi_layer_block_kv_transfer", "execute_object_group_transfer", "execute_direct_copy_transfer")


class KvbmCudaOps(_Blocks, CudaDeviceOps):  # type: ignore[misc]
    """On a GPU: the objects are pinned, or on the GPU."""

    def ensure_native(self) -> None:
        """Load LMCache's compiled operations, except those that copy blocks."""
        super().ensure_native()
        for name in _REPLACED:
            self.__dict__.pop(name, None)

    def multi_layer_block_kv_transfer(
        self,
        paged_buffer_ptrs_tensor: Any,
        lmcache_objects_ptrs: list[int],  # no tensors
        block_ids: Any,
        device: Any,
        direction: Any,
        shape_desc: Any,
        lmcache_chunk_size: int,
        engine_kv_format: Any,
        skip_prefix_n_blocks: int,
    ) -> None:
        super().multi_layer_block_kv_transfer(
            paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, device, direction, shape_desc, lmcache_chunk_size,
            engine_kv_format, skip_prefix_n_blocks,
        )  # fmt: skip
