# ruff: noqa: ARG002  (the engine says what it gives)
"""A connector that moves nothing: it binds the caches, records what layers write, and compares after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

import kvbm
from kvbm.engines.vllm import Group, groups
from kvbm.reshard import presets
from kvbm.testing.engines import vllm_writes


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes what it finds to ``folder/RANK.json`` of its extra config."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.config = self._vllm_config
        held = (self.config, self._kv_cache_config)
        self.bound: list[tuple[Group, kvbm.Pool]] = [
            (one, kvbm.Pool.from_vllm(kv_caches, group=one)) for one in groups(*held)
        ]
        self.written: dict[str, list[Any]] = {name: [] for name in kv_caches}
        placements = [presets.of_vllm(one) for one, _ in self.bound]
        self.found: dict[str, Any] = {
            "layout": self.config.cache_config.kv_cache_layout,
            "groups": [[one.index, list(one.layers), one.layout.name, str(one.shape)] for one, _ in self.bound],
            "placements": [[rank, str(made), str(made.strips(rank).h)] for made, rank in placements],
            "writes": [[bool(one), str(one)] for one in vllm_writes(kv_caches, *held)],
            "refused": [[bool(one), str(one)] for one in vllm_writes(kv_caches, *held, layout="vllm/LBHNC")]
            if self.bound[0][0].backend == "CPU_ATTN" else [],
            "tokens": 0, "wrong": 0, "digests": 0,
        }  # fmt: skip
        for name in kv_caches:
            self.record(name, self.config.compilation_config.static_forward_context[name].impl)

    def record(self, name: str, impl: Any) -> None:
        write = impl.do_kv_cache_update

        def recorded(*given: Any) -> None:
            if isinstance(given[0], torch.Tensor):  # latent, rope, cache, slots, …
                row, slots = torch.cat([given[0], given[1].flatten(1)], -1)[None, :, None], given[3]
            else:  # layer, K, V, cache, slots
                row, slots = torch.stack([given[1], given[2]]), given[4]
            slots = slots.flatten()
            self.written[name].append((row[:, : len(slots)].clone(), slots.clone()))
            write(*given)

        impl.do_kv_cache_update = recorded

    def wait_for_save(self) -> None:
        """All that this step wrote is where the pools say; and in a pool of another layout, with the same digests."""
        for one, pool in self.bound:
            slots = torch.cat([slots for _, slots in self.written[one.names[0]]])
            slots = slots[slots >= 0]
            ids = torch.unique(slots // one.shape.nt).tolist()
            out = kvbm.Pool.allocate(kvbm.load("operational_hnd"), one.shape, len(ids))
            kvbm.convert(pool, out, ids)
            self.found["digests"] += int((pool.digest(ids) == out.digest()).sum())
            size = f"int{8 * one.shape.itemsize}"
            held = torch.stack([torch.from_numpy(array.view(size)) for array in out.arrays])  # b l o h t d
            at = {block: index for index, block in enumerate(ids)}
            for number, name in enumerate(one.names):
                for rows, where in self.written[name]:
                    for token, slot in enumerate(where.tolist()):
                        if slot >= 0:
                            got = held[at[slot // one.shape.nt], number, :, :, slot % one.shape.nt]
                            self.found["wrong"] += int((got != rows[:, token].view(getattr(torch, size))).sum())
                            self.found["tokens"] += 1
                self.written[name].clear()
        folder = Path(self.config.kv_transfer_config.kv_connector_extra_config["folder"])
        (folder / f"{self.bound[0][0].rank}.json").write_text(json.dumps(self.found))

    def start_load_kv(self, *given: Any, **named: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *given: Any, **named: Any) -> None: ...
    def update_state_after_alloc(self, *given: Any) -> None: ...

    def get_num_new_matched_tokens(self, *given: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, *given: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, *given: Any) -> tuple[bool, None]:
        return False, None
