"""Types of the compiled half; its docstrings are in ``_core.pyx``."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# Contiguous items of the named type.  (Buffer alone does not match NumPy arrays before Python 3.12.)
_UInt64s: TypeAlias = NDArray[np.uint64] | Buffer
# Offsets (4 numbers), outer modes (5 each), inner modes (3 each).
_Part: TypeAlias = (
    tuple[Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]]
    | tuple[
        Sequence[int],
        Sequence[Sequence[int]],
        Sequence[Sequence[int]],
        tuple[Sequence[int], Sequence[int]],
        Sequence[object],
    ]
)

MAX_OUTER: int
MAX_INNER: int
MAX_PARTS: int
MAX_UNIT_DIGITS: int
MAX_SCALES: int

class _DeviceInfo(TypedDict):
    name: str
    capability: tuple[int, int]
    sms: int
    memory: int

@final
class Table:
    def __init__(self, addresses: _UInt64s, device: int = -1, upload: bool = True) -> None: ...
    def __len__(self) -> int: ...
    @property
    def device(self) -> int: ...

@final
class Watch:
    def __init__(
        self,
        pool: object,
        arrays: list[Any],
        kinds: bytes,
        fields: tuple[int, int, int, int, int] | None,
        versioned: list[Any],
        bump: int,
        readonly: bool,
    ) -> None: ...
    @property
    def pool(self) -> Any: ...
    @property
    def closed(self) -> bool: ...
    @property
    def locked(self) -> bool: ...
    def note(self, index: int) -> None: ...
    def changed(self, first: int = 0) -> int: ...
    def written(self) -> None: ...
    def close(self) -> None: ...

def know_torch(fields: tuple[int, int, int, int, int]) -> None: ...
def require_watched(src: Watch, dst: Watch) -> None: ...
@final
class Copy:
    def __init__(
        self,
        kernel: str | None,
        parts: Sequence[_Part],
        src_id: tuple[int, int],
        dst_id: tuple[int, int],
        units: tuple[Sequence[int], Sequence[int]] = ...,
        digest: tuple[int, Sequence[tuple[object, ...]]] | None = None,
        sm_limited: bool = False,
    ) -> None: ...
    @property
    def kernel(self) -> str | None: ...
    def launch(
        self, src: Table, dst: Table, pairs: Pairs, device: int, stream: int, max_sms: int = 0, digests: int = 0
    ) -> None: ...
    def run(self, src: Table, dst: Table, pairs: Pairs, threads: int = 0, digests: int = 0) -> None: ...

@final
class Pairs:
    def __init__(
        self,
        src_ids: object,
        dst_ids: object,
        src_blocks: int,
        dst_blocks: int,
        same_pool: bool = False,
        device: int = -1,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def kept(self) -> int: ...
    def ids(self) -> tuple[list[int] | None, list[int] | None]: ...

@final
class Positions:
    def __init__(self, given: object, count: int, device: int = -1) -> None: ...

@final
class Ring:
    def __init__(self, device: int, slot_bytes: int, slots: int) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def close(self) -> None: ...

@final
class Done:
    proof: Any
    @property
    def strategy(self) -> str: ...
    @property
    def captured(self) -> bool: ...
    @property
    def is_wrong(self) -> bool: ...
    def wait(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...

@final
class Route:
    def __init__(
        self,
        device: int,
        src: Table,
        dst: Table,
        src_blocks: int,
        dst_blocks: int,
        *,
        direct: Sequence[Copy],
        permute: Sequence[Copy] = (),
        moves: Sequence[Copy] = (),
        runs: Sequence[Copy] = (),
        src_bases: _UInt64s | None = None,
        dst_bases: _UInt64s | None = None,
        cuts: _UInt64s | None = None,
        gathers: bool = False,
        slot_block_bytes: int = 0,
        ring: Ring | None = None,
        max_sms: int = 0,
        same_pool: bool = False,
        crosses: bool = False,
        limits: Sequence[tuple[int, int]] = ((0, 0),),
        may_choose: bool = False,
        keep: object = None,
        by_peer: bool = False,
        sum_direct: Sequence[Copy] = (),
        sum_permute: Sequence[Copy] = (),
        slot_digests: Sequence[Copy] = (),
        digests: tuple[Sequence[Copy], Sequence[Copy]] = ...,
        digests_dst: bool = False,
    ) -> None: ...
    def digest(
        self,
        pairs: Pairs,
        positions: Positions | None,
        out: int,
        far: bool = False,
        stream: object = None,
        wait: object = None,
        keep: object = None,
    ) -> Done: ...
    def copy_digested(
        self,
        pairs: Pairs,
        positions: Positions | None,
        out: int,
        far: bool,
        both: tuple[int, int],
        stream: object = None,
        wait: object = None,
        keep: object = None,
    ) -> Done: ...
    def pairs_of(self, src_ids: object, dst_ids: object) -> Pairs: ...
    def choose(self, pairs: int) -> str: ...
    def counters(self) -> tuple[tuple[int, int, int], tuple[int, int, int], int]: ...
    def copy(
        self,
        src_ids: object,
        dst_ids: object,
        stream: object = None,
        wait: object = None,
        src: Watch | None = None,
        dst: Watch | None = None,
    ) -> Done: ...

def finished() -> Done: ...
def find_ungranted(device: int, spans: _UInt64s) -> tuple[int, str] | None: ...
def enable_peer(device: int, peer: int) -> bool: ...
def kernel_names() -> tuple[str, ...]: ...
def kernel_index(name: str) -> int: ...
def num_images() -> int: ...
def add_kernel(
    name: str, forms: Sequence[tuple[str, int, int, int, int, bool]], cubin: bytes, capability: int
) -> int: ...
def warm(kernel: str | int | None, device: int) -> None: ...
def stream_handle(stream: object) -> int: ...
def stream_device(stream: object) -> int: ...
def whole_tensors(tensors: object, rank: int) -> tuple[Table, tuple[int, ...], str, int, int] | None: ...
def chunk_tensors(
    blocks: object, batch: int, chunks: int, shape: tuple[int, ...], exact: bool, dtype: str, device: int
) -> tuple[Table, int] | None: ...
def strided_tensors(
    tensors: object,
    count: int,
    kinds: tuple[tuple[tuple[int, ...], tuple[int, ...], str, int], ...],
    which: bytes | None,
    dtype: str,
    device: int,
    types: frozenset[type] | None = None,
    gradients: bool = True,
) -> tuple[Table, int] | None: ...
def tables_clash(src: Table, src_bytes: int, dst: Table, dst_bytes: int) -> bool: ...
def spread(table: Table, out: NDArray[np.uint64], step: int) -> None: ...
def check_pairs(src: _UInt64s, dst: _UInt64s, sizes: _UInt64s | int) -> None: ...
def find_device(addresses: _UInt64s, what: str) -> tuple[int, int]: ...
def copy_pairs(src: _UInt64s, dst: _UInt64s, size: int, device: int, stream: int) -> None: ...
def memcpy_batch(
    dst: _UInt64s,
    src: _UInt64s,
    sizes: _UInt64s | int,
    mode: int,
    device: int,
    stream: int,
    merge: bool = False,
    by_peer: bool = False,
) -> int: ...
def copy_now(dst: _UInt64s, src: _UInt64s, size: int, device: int) -> None: ...
def alloc_device(device: int, nbytes: int) -> int: ...
def free_device(device: int, address: int) -> None: ...
def ipc_handle(device: int, address: int) -> bytes: ...
def ipc_open(device: int, handle: bytes) -> int: ...
def ipc_close(device: int, address: int) -> None: ...
def fence() -> None: ...
def host_touch(address: int, nbytes: int, how: int = 0, threads: int = 1) -> None: ...
def host_register(address: int, nbytes: int, read_only: bool = False) -> None: ...
def host_unregister(address: int) -> None: ...
def memory_range(address: int, pinned: bool = True) -> tuple[int, int]: ...
def synchronize(device: int, stream: int = 0) -> None: ...
def driver_version() -> int: ...
def has_memcpy_batch() -> bool: ...
def device_count() -> int: ...
def device_info(device: int) -> _DeviceInfo: ...
def pointer_device(address: int) -> int: ...
