# cython: language_level=3, embedsignature=True, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled half: kernels by name, pointers, streams and status codes.  It has never heard of a layout.

Every function here is called from Python code that has already checked its arguments; the checks below guard memory,
not manners.  Below the line everything is ``noexcept nogil``; every status passes through `check`.
"""

import sys

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.long cimport PyLong_AsLongLong, PyLong_AsUnsignedLongLong
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from kvbm.errors import BindError, CudaError, CudaUnavailableError, MissingKernelError, PlanError

__all__ = [
    "Copy",
    "Done",
    "Ring",
    "Route",
    "Table",
    "add_kernel",
    "alloc_device",
    "check_ids",
    "check_pairs",
    "chunk_tensors",
    "copy_pairs",
    "device_count",
    "device_info",
    "driver_version",
    "find_device",
    "enable_peer",
    "finished",
    "free_device",
    "has_memcpy_batch",
    "host_register",
    "host_touch",
    "host_unregister",
    "kernel_index",
    "kernel_names",
    "memcpy_batch",
    "num_images",
    "memory_range",
    "pointer_device",
    "spread",
    "stream_handle",
    "synchronize",
    "tables_clash",
    "upload",
    "warm",
    "whole_tensors",
]


cdef extern from "kvbm.h" nogil:
    enum:
        KVBM_MAX_OUTER
        KVBM_MAX_INNER
        KVBM_MAX_PARTS
        KVBM_OK
        KVBM_NO_DRIVER
        KVBM_NOT_BUILT
        KVBM_TOO_LARGE
        KVBM_NO_MEMORY
        KVBM_ID_OK
        KVBM_ID_SRC_RANGE
        KVBM_ID_DST_RANGE
        KVBM_ID_DST_TWICE
        KVBM_ID_READ_AND_WRITTEN
        KVBM_SPAN_OK
        KVBM_SPAN_NULL_SRC
        KVBM_SPAN_NULL_DST
        KVBM_SPAN_DST_TWICE
        KVBM_SPAN_READ_AND_WRITTEN

    ctypedef struct kvbm_div:
        uint32_t n

    ctypedef struct kvbm_inner:
        kvbm_div extent
        int64_t src, dst

    ctypedef struct kvbm_outer:
        kvbm_div extent
        int64_t src, dst
        int32_t src_table, dst_table

    ctypedef struct kvbm_part:
        uint32_t word, item, place, held, apart
        int64_t src_offset, dst_offset
        int64_t src_id_stride, dst_id_stride
        int32_t src_table_offset, dst_table_offset
        kvbm_outer *outer
        kvbm_inner *inner

    ctypedef struct kvbm_args:
        int64_t src_id_table, dst_id_table
        uint32_t num_parts
        uint32_t src_blocks, dst_blocks
        kvbm_part *part

    ctypedef struct kvbm_kernel:
        const char *name
        uint32_t parts

    enum:
        KVBM_ROWS
        KVBM_TILE

    ctypedef struct kvbm_form:
        int32_t kind, outer, inner, element, word, few

    ctypedef struct kvbm_batch:
        uint32_t num_pairs
        uint32_t id_bytes
        const void *src_ids
        const void *dst_ids
        const uint64_t *src_table
        const uint64_t *dst_table
        uint64_t src_ids_device, dst_ids_device
        uint64_t src_table_device, dst_table_device
        uint32_t src_entries, dst_entries
        uint64_t fault
        uint32_t max_ctas

    ctypedef struct kvbm_ring:
        pass

    ctypedef struct kvbm_route:
        int device, crosses, same_pool
        int64_t src_blocks, dst_blocks
        uint32_t max_ctas
        uint32_t num_direct
        const int *direct_kernel
        const kvbm_args **direct
        int gathers
        uint32_t num_permute
        const int *permute_kernel
        const kvbm_args **permute
        uint32_t num_moves
        const kvbm_args **moves
        uint64_t slot_block_bytes
        kvbm_ring *ring
        uint32_t num_runs
        const kvbm_args **runs
        const uint64_t *src_bases
        const uint64_t *dst_bases
        const uint64_t *cuts
        uint32_t num_cuts

    ctypedef struct kvbm_outcome:
        int refused
        int64_t index
        uint64_t submissions
        uint32_t pairs

    enum:
        KVBM_DIRECT
        KVBM_STAGED
        KVBM_ENGINE

    ctypedef struct kvbm_spans:
        const uint64_t *addresses
        const uint64_t *sizes
        uint64_t size, count

    const kvbm_kernel *kvbm_kernels
    int kvbm_num_kernels
    int kvbm_num_images

    kvbm_div kvbm_make_div(uint32_t n) noexcept
    const char *kvbm_last_call() noexcept
    const char *kvbm_status_name(int status) noexcept
    const char *kvbm_status_text(int status) noexcept
    int kvbm_driver_version(int *version) noexcept
    int kvbm_device_count(int *count) noexcept
    int kvbm_device_info(int device, char *name, int name_bytes, int *major, int *minor, int *sms,
                         uint64_t *memory) noexcept
    int kvbm_pointer_device(uint64_t address, int *device) noexcept
    int kvbm_has_memcpy_batch() noexcept
    int kvbm_add_kernel(const char *name, const kvbm_form *forms, uint32_t parts, const void *cubin, uint64_t nbytes,
                        int capability, int *index) noexcept
    const kvbm_kernel *kvbm_kernel_at(int kernel) noexcept
    int kvbm_warm(int kernel, int device) noexcept
    int kvbm_launch(int kernel, const kvbm_args *args, const kvbm_batch *batch, int device, uint64_t stream) noexcept
    int kvbm_run_host(int kernel, const kvbm_args *args, const kvbm_batch *batch, int threads) noexcept
    int kvbm_memcpy_batch(const uint64_t *dst, const uint64_t *src, const uint64_t *sizes, uint64_t size,
                          uint64_t count, int mode, bint merge, int device, uint64_t stream, int *used) noexcept
    int kvbm_launch_pairs(const uint64_t *dst, const uint64_t *src, uint64_t size, uint64_t count, int device,
                          uint64_t stream) noexcept
    int kvbm_check_spans(const kvbm_spans *src, const kvbm_spans *dst, uint64_t *first, uint64_t *second) noexcept
    int kvbm_find_device(const uint64_t *addresses, uint64_t count, int *device, uint64_t *gpus,
                         uint64_t *index) noexcept
    int kvbm_check_ids(const void *src_ids, const void *dst_ids, uint32_t id_bytes, uint32_t num_pairs,
                       int64_t src_blocks, int64_t dst_blocks, int same_pool, int64_t *index) noexcept
    int kvbm_ring_create(int device, uint64_t slot_bytes, uint32_t slots, kvbm_ring **ring) noexcept
    void kvbm_ring_destroy(kvbm_ring *ring) noexcept
    void kvbm_ring_retire(kvbm_ring *ring) noexcept
    void kvbm_retire_device(int device, uint64_t address) noexcept
    int kvbm_transfer(const kvbm_route *route, const kvbm_batch *batch, int strategy, uint64_t stream,
                      const uint64_t *waits, uint32_t num_waits, uint64_t done, kvbm_outcome *outcome) noexcept
    int kvbm_fault_create(int device, uint32_t **fault) noexcept
    void kvbm_fault_destroy(int device, uint32_t *fault) noexcept
    int kvbm_event_take(int device, int timed, uint64_t *event) noexcept
    void kvbm_event_give(int device, int timed, uint64_t event) noexcept
    int kvbm_event_record(int device, uint64_t event, uint64_t stream) noexcept
    int kvbm_event_query(int device, uint64_t event, int *is_done) noexcept
    int kvbm_event_synchronize(int device, uint64_t event) noexcept
    int kvbm_stream_wait(int device, uint64_t stream, uint64_t event) noexcept
    int kvbm_stream_device(uint64_t stream, int *device) noexcept
    int kvbm_enable_peer(int device, int peer, int *can) noexcept
    int kvbm_alloc_device(int device, uint64_t nbytes, uint64_t *address) noexcept
    int kvbm_free_device(int device, uint64_t address) noexcept
    int kvbm_upload(int device, uint64_t dst, const void *src, uint64_t nbytes) noexcept
    int kvbm_synchronize(int device, uint64_t stream) noexcept
    int kvbm_host_touch(uint64_t address, uint64_t nbytes, int how, int threads) noexcept
    int kvbm_host_register(uint64_t address, uint64_t nbytes, int read_only) noexcept
    int kvbm_host_unregister(uint64_t address) noexcept
    int kvbm_memory_range(uint64_t address, int pinned, uint64_t *begin, uint64_t *end) noexcept


cdef int64_t INDEX_LIMIT = 0x7FFFFFFF  # kernels index with 31 bits

# CUresults that mean "there is no CUDA here" rather than "CUDA failed": stub library, no device, unusable driver.
cdef frozenset UNAVAILABLE = frozenset((KVBM_NO_DRIVER, KVBM_NOT_BUILT, 34, 46, 100, 803, 804))


# ---- statuses -----------------------------------------------------------------------------------------------------

cdef int check(int status, what) except -1:
    """Turn a status into an exception that names the request, the call, the error and what to do next.

    Must be called on the thread that got the status: the failing call's name is kept a thread.
    """
    if status == KVBM_OK:
        return 0
    text = kvbm_status_text(status).decode("utf-8", "replace")
    if status == KVBM_NO_MEMORY:
        raise MemoryError(f"{what}: {text}")
    if status == KVBM_TOO_LARGE:
        raise BindError(f"{what}: {text}")
    name = kvbm_status_name(status).decode("utf-8", "replace")
    call = kvbm_last_call().decode("utf-8", "replace")
    error = CudaUnavailableError if status in UNAVAILABLE else CudaError
    raise error(f"{what}: {call} failed with {name} ({status}). {text}", code=status, name=name)


# ---- kernels ------------------------------------------------------------------------------------------------------

cdef dict _index_of = None  # name -> index, made at first use


cdef dict _kernels():
    global _index_of
    if _index_of is None:
        _index_of = {kvbm_kernels[i].name.decode("ascii"): i for i in range(kvbm_num_kernels)}
    return _index_of


def kernel_names():
    """Every kernel that was compiled in.

    Returns
    -------
    tuple of str
        Names in table order; position is the kernel's index.
    """
    return tuple(_kernels())[:kvbm_num_kernels]


def kernel_index(str name not None):
    """Position of a kernel in the table, or -1 if it was neither compiled in nor added."""
    return _kernels().get(name, -1)


def add_kernel(str name not None, forms, const uint8_t[::1] cubin not None, int capability):
    """Make a kernel known that was compiled at run time; from then on its name works as any other.

    Parameters
    ----------
    name : str
        The symbol in the cubin.
    forms : sequence of (kind, outer, inner, element, word, few)
        One a part; ``kind`` is ``"rows"`` or ``"tile"``.
    cubin : contiguous bytes
        The code.  Copied.
    capability : int
        What it was compiled for: 90 for sm_90.  A name that is known takes the code of one more architecture.

    Returns
    -------
    int
        The kernel's index.

    Raises
    ------
    CudaError
        A structure that no template has, or too many kernels.
    """
    cdef kvbm_form form[KVBM_MAX_PARTS]
    cdef int index = -1, status
    forms = tuple(forms)
    if not 0 < len(forms) <= KVBM_MAX_PARTS or not cubin.shape[0]:
        raise PlanError(f"kernel {name!r}: expected 1 to {KVBM_MAX_PARTS} parts and its code, got {len(forms)} parts")
    if -1 < _kernels().get(name, -1) < kvbm_num_kernels:
        raise PlanError(f"kernel {name!r} was built: nothing is to be added")
    for i, (kind, outer, inner, element, word, few) in enumerate(forms):
        form[i].kind = KVBM_TILE if kind == "tile" else KVBM_ROWS
        form[i].outer, form[i].inner, form[i].element = outer, inner, element
        form[i].word, form[i].few = word, few
    status = kvbm_add_kernel(name.encode("ascii"), form, <uint32_t> len(forms), &cubin[0],
                             <uint64_t> cubin.shape[0], capability, &index)
    check(status, f"adding the kernel {name!r}")
    _kernels()[name] = index
    return index


def num_images():
    """Number of embedded CUDA images; 0 means that the extension was built without CUDA."""
    return kvbm_num_images


def warm(kernel, int device):
    """Load every CUDA image on a device and find a kernel, so that nothing is loaded later beside a running model.

    Parameters
    ----------
    kernel : str, int or None
        Name or index of a kernel; None loads all of them.
    device : int
        CUDA device ordinal.

    Raises
    ------
    MissingKernelError
        If there is no kernel of this name.
    CudaError
        If an image does not load, e.g. because none was built for this GPU.
    """
    cdef int index, status
    if kernel is None:
        index = -1
    elif isinstance(kernel, str):
        index = _find_kernel(kernel)
    else:
        index = kernel
        if kvbm_kernel_at(index) == NULL:
            raise MissingKernelError(f"kernel {index}: expected 0 to {len(_kernels()) - 1}")
    with nogil:
        status = kvbm_warm(index, device)
    check(status, f"loading kernels on cuda:{device}")


cdef int _find_kernel(str name) except -1:
    cdef int index = _kernels().get(name, -1)
    if index < 0:
        raise MissingKernelError(
            f"kernel {name!r} is not among the {kvbm_num_kernels} that were built. Add the layouts to a folder, write "
            "their kernels with 'kvbm codegen --layouts DIR --out DIR', and rebuild kvbm with them (pip install .)"
        )
    return index


# ---- tables -------------------------------------------------------------------------------------------------------

@cython.final
cdef class Table:
    """The base addresses of a pool's allocations.

    Parameters
    ----------
    addresses : array of uint64
        One address an allocation, in table order.  Copied.
    device : int
        CUDA device that they lie on, or -1 for the host.
    upload : bool
        Keep a copy on the device, made now; otherwise every launch carries the table along.

    Notes
    -----
    A launch is asynchronous and may read the copy on the device after it returns: whoever launches keeps the table as
    long as its pool.  After the last reference the copy is freed when something is next allocated: freeing waits for
    running work.
    """

    cdef uint64_t *addresses
    cdef uint64_t device_address
    cdef uint32_t count
    cdef readonly int device

    def __cinit__(self):
        self.addresses = NULL
        self.device_address = 0
        self.count = 0
        self.device = -1

    def __init__(self, const uint64_t[::1] addresses not None, int device=-1, bint upload=True):
        cdef int status
        if self.addresses != NULL:
            raise TypeError("a Table is initialised once")
        cdef Py_ssize_t count = addresses.shape[0]
        if count > INDEX_LIMIT // 8:
            raise BindError(f"{count} allocations in a table: expected at most {INDEX_LIMIT // 8}")
        self.addresses = <uint64_t *> malloc((count + 1) * sizeof(uint64_t))
        if self.addresses == NULL:
            raise MemoryError(f"a table of {count} addresses")
        self.device = device if device >= 0 else -1
        self.count = <uint32_t> count
        if count == 0:
            return
        memcpy(self.addresses, &addresses[0], count * sizeof(uint64_t))
        if device < 0 or not upload:
            return
        with nogil:
            status = kvbm_alloc_device(device, count * sizeof(uint64_t), &self.device_address)
            if status == KVBM_OK:
                status = kvbm_upload(device, self.device_address, self.addresses, count * sizeof(uint64_t))
        check(status, f"uploading a table of {count} addresses to cuda:{device}")

    def __dealloc__(self):
        cdef uint64_t address = self.device_address
        cdef int device = self.device
        self.device_address = 0
        free(self.addresses)
        self.addresses = NULL
        if address:
            kvbm_retire_device(device, address)

    def __len__(self):
        return self.count

    def __repr__(self):
        where = "the host" if self.device < 0 else f"cuda:{self.device}"
        return f"<kvbm Table of {self.count} addresses on {where}>"

    @property
    def is_uploaded(self):
        """Whether a copy lies on the device."""
        return self.device_address != 0


# ---- copies -------------------------------------------------------------------------------------------------------

@cython.final
cdef class Copy:
    """A loop nest bound to the kernel that runs it; which blocks it moves is said at every call.

    Parameters
    ----------
    kernel : str or None
        Name of a compiled kernel.  None: a loop nest of bytes for the copy engine, which a `Route` walks.
    parts : sequence of (offsets, outer, inner) or (offsets, outer, inner, strides, words)
        One part, or several: K and V, or planes.  ``offsets`` is ``(src, dst, src_table, dst_table)``; ``outer`` holds
        ``(extent, src, dst, src_table, dst_table)`` a mode that picks a chunk and ``inner`` holds
        ``(extent, src, dst)`` a mode inside it, fastest first.  ``src`` and ``dst`` are bytes, tables are entries.
        ``strides``: bytes that a block id contributes in this part.  ``words``: for kernels of records the bytes of a
        word; of pages also of an item, from word to word of one in shared memory, where the part starts there, and the
        bytes of its segment.
    src_id, dst_id : tuple of two ints
        What one block id contributes: ``(table entries, bytes)``; the bytes where the parts do not say their own.
    src_blocks, dst_blocks : int
        Ids on the device that are not below these are not followed.

    Raises
    ------
    MissingKernelError
        If the kernel was not compiled in; the message names the command that makes it.
    PlanError
        If the loop nest does not fit a kernel's parameters.
    """

    cdef kvbm_args args
    cdef int index
    cdef readonly str kernel

    def __init__(self, str kernel, parts, src_id, dst_id, int64_t src_blocks=INDEX_LIMIT,
                 int64_t dst_blocks=INDEX_LIMIT):
        cdef int index = _find_kernel(kernel) if kernel is not None else -1
        parts = tuple(parts)
        if not 0 < len(parts) <= KVBM_MAX_PARTS or (
                index >= 0 and kvbm_kernel_at(index).parts not in (0, len(parts))):
            raise PlanError(f"kernel {kernel!r} does not copy {len(parts)} part(s)")
        memset(&self.args, 0, sizeof(kvbm_args))
        self.args.src_id_table, self.args.dst_id_table = src_id[0], dst_id[0]
        self.args.src_blocks = <uint32_t> min(max(src_blocks, 0), INDEX_LIMIT)
        self.args.dst_blocks = <uint32_t> min(max(dst_blocks, 0), INDEX_LIMIT)
        self.args.num_parts = <uint32_t> len(parts)
        for number, (offsets, outer, inner, *rest) in enumerate(parts):
            strides, words = rest or ((src_id[1], dst_id[1]), (0,))
            try:
                _fill_part(&self.args.part[number], offsets, tuple(outer), tuple(inner), strides, tuple(words))
            except OverflowError as error:
                raise PlanError(f"part {number} of the plan for {kernel!r}: {error}") from None
        self.index = index
        self.kernel = kernel

    def __repr__(self):
        return f"<kvbm Copy by {self.kernel}>"

    def launch(self, Table src not None, Table dst not None, const int64_t[::1] src_ids, const int64_t[::1] dst_ids,
               Py_ssize_t n, int device, uint64_t stream, int max_sms=0):
        """Copy blocks on a GPU: one kernel, ordered by the stream, not waited for.

        Parameters
        ----------
        src, dst : Table
            Base addresses of the two pools.  Keep them until the copy is done.
        src_ids, dst_ids : contiguous int64 array or None
            Block ids of the pairs, already checked (see `check_ids`); -1 skips a pair; None stands for 0 to n-1.
            Copied before the call returns.
        n : int
            Number of pairs; 0 returns at once.
        device : int
            CUDA device ordinal.
        stream : int
            Handle of the stream.
        max_sms : int
            Multiprocessors that a ``few_`` kernel keeps to; 0: all.

        Raises
        ------
        BindError
            If the ids do not number n, or a table lies on another device.
        CudaError
            If the launch fails.
        """
        cdef kvbm_batch batch
        cdef int status
        if n == 0:
            return
        _fill_batch(&batch, src, dst, src_ids, dst_ids, n)
        _take_uploaded(&batch, src, dst, device)
        batch.max_ctas = <uint32_t> max(max_sms, 0)
        with nogil:
            status = kvbm_launch(self.index, &self.args, &batch, device, stream)
        if status != KVBM_OK:
            check(status, f"launching {self.kernel} on cuda:{device}")

    def run(self, Table src not None, Table dst not None, const int64_t[::1] src_ids, const int64_t[::1] dst_ids,
            Py_ssize_t n, int threads=0):
        """Copy blocks on the host, and return when they are copied.

        Parameters
        ----------
        src, dst : Table
            Base addresses of the two pools, in host memory.
        src_ids, dst_ids : contiguous int64 array or None
            As in `launch`.
        n : int
            Number of pairs; 0 returns at once.
        threads : int
            At most so many threads; 0 takes every core that the process may use.

        Raises
        ------
        BindError
            If the ids do not number n, or the batch is too large for 31-bit indices.
        """
        cdef kvbm_batch batch
        cdef int status
        if n == 0:
            return
        if threads < 0:
            raise BindError(f"threads: expected 0 (every core) or more, got {threads}")
        _fill_batch(&batch, src, dst, src_ids, dst_ids, n)
        with nogil:
            status = kvbm_run_host(self.index, &self.args, &batch, threads)
        if status != KVBM_OK:
            check(status, f"running {self.kernel} on the host")


cdef int _take_uploaded(kvbm_batch *batch, Table src, Table dst, int device) except -1:
    if src.device_address:
        if src.device != device:
            raise BindError(f"the source's table lies on cuda:{src.device}: expected cuda:{device}")
        batch.src_table_device = src.device_address
    if dst.device_address:
        if dst.device != device:
            raise BindError(f"the destination's table lies on cuda:{dst.device}: expected cuda:{device}")
        batch.dst_table_device = dst.device_address
    return 0


cdef int _fill_part(kvbm_part *part, offsets, tuple outer, tuple inner, strides, tuple words) except -1:
    cdef int i
    if len(outer) > KVBM_MAX_OUTER or len(inner) > KVBM_MAX_INNER:
        raise PlanError(
            f"a part has {len(outer)} outer and {len(inner)} inner modes: "
            f"expected at most {KVBM_MAX_OUTER} and {KVBM_MAX_INNER}"
        )
    part.src_offset, part.dst_offset, part.src_table_offset, part.dst_table_offset = offsets
    part.src_id_stride, part.dst_id_stride = strides
    part.word, part.item, part.apart, part.place, part.held = words + (0,) * (5 - len(words))
    # Modes that are not used have extent 1 and stride 0, so that a loop over all of them is right too.
    for i in range(KVBM_MAX_OUTER):
        extent, src, dst, src_table, dst_table = outer[i] if i < len(outer) else (1, 0, 0, 0, 0)
        part.outer[i].extent = _divisor(extent)
        part.outer[i].src, part.outer[i].dst = src, dst
        part.outer[i].src_table, part.outer[i].dst_table = src_table, dst_table
    for i in range(KVBM_MAX_INNER):
        extent, src, dst = inner[i] if i < len(inner) else (1, 0, 0)
        part.inner[i].extent = _divisor(extent)
        part.inner[i].src, part.inner[i].dst = src, dst
    return 0


cdef kvbm_div _divisor(extent) except *:
    if not 1 <= extent <= INDEX_LIMIT:
        raise PlanError(f"a mode of extent {extent}: expected 1 to {INDEX_LIMIT}")
    return kvbm_make_div(<uint32_t> extent)


cdef int _fill_batch(kvbm_batch *batch, Table src, Table dst, const int64_t[::1] src_ids, const int64_t[::1] dst_ids,
                     Py_ssize_t n) except -1:
    if n < 0 or n > INDEX_LIMIT:
        raise BindError(f"{n} pairs of blocks: expected 0 to {INDEX_LIMIT}")
    memset(batch, 0, sizeof(kvbm_batch))
    batch.num_pairs = <uint32_t> n
    if src_ids is not None:
        if src_ids.shape[0] != n:
            raise BindError(f"{src_ids.shape[0]} source ids: expected {n}")
        batch.src_ids = &src_ids[0]
        batch.id_bytes = 8
    if dst_ids is not None:
        if dst_ids.shape[0] != n:
            raise BindError(f"{dst_ids.shape[0]} destination ids: expected {n}")
        batch.dst_ids = &dst_ids[0]
        batch.id_bytes = 8
    if src.count == 0 or dst.count == 0:
        raise BindError(
            f"{n} pairs of blocks between tables of {src.count} and {dst.count} addresses: expected at least one each"
        )
    batch.src_table, batch.dst_table = src.addresses, dst.addresses
    batch.src_entries, batch.dst_entries = src.count, dst.count
    return 0


# ---- block ids ----------------------------------------------------------------------------------------------------

def check_ids(const int64_t[::1] src_ids, const int64_t[::1] dst_ids, Py_ssize_t n, int64_t src_blocks,
              int64_t dst_blocks, bint same_pool):
    """Refuse block ids that are out of range or that would race.

    Parameters
    ----------
    src_ids, dst_ids : contiguous int64 array or None
        None stands for 0 to n-1; an id of -1 on either side skips its pair.
    n : int
        Number of pairs.
    src_blocks, dst_blocks : int
        Number of blocks of each pool.
    same_pool : bool
        Whether both pools share memory: then a block may not be both read and written.

    Raises
    ------
    BindError
        Naming the position, the id and what was expected.
    """
    cdef int64_t index = 0
    cdef int found
    cdef const void *src = NULL
    cdef const void *dst = NULL
    if n < 0 or n > INDEX_LIMIT:
        raise BindError(f"{n} pairs of blocks: expected 0 to {INDEX_LIMIT}")
    if src_ids is not None and src_ids.shape[0] != n:
        raise BindError(f"{src_ids.shape[0]} source ids: expected {n}")
    if dst_ids is not None and dst_ids.shape[0] != n:
        raise BindError(f"{dst_ids.shape[0]} destination ids: expected {n}")
    if n == 0:
        return
    if src_ids is not None:
        src = &src_ids[0]
    if dst_ids is not None:
        dst = &dst_ids[0]
    with nogil:
        found = kvbm_check_ids(src, dst, 8, <uint32_t> n, src_blocks, dst_blocks, same_pool, &index)
    if found == KVBM_ID_OK:
        return
    if found < 0:
        check(found, f"checking {n} pairs of block ids")
    _refuse(found, index, src_ids, dst_ids, src_blocks, dst_blocks)


cdef int _refuse(int found, int64_t index, src_ids, dst_ids, int64_t src_blocks, int64_t dst_blocks) except -1:
    """Say which id of a batch is wrong; ids are sequences, or None where they are counted."""
    cdef int64_t first = 0
    src_id = index if src_ids is None else int(src_ids[index])
    dst_id = index if dst_ids is None else int(dst_ids[index])
    if found == KVBM_ID_SRC_RANGE:
        raise BindError(f"src_ids[{index}] is {src_id}: {_expected_range(src_blocks)}")
    if found == KVBM_ID_DST_RANGE:
        raise BindError(f"dst_ids[{index}] is {dst_id}: {_expected_range(dst_blocks)}")
    if found == KVBM_ID_DST_TWICE:
        while dst_ids[first] != dst_id or (src_ids is not None and src_ids[first] == -1):
            first += 1
        raise BindError(
            f"dst_ids[{index}] is {dst_id}, as is dst_ids[{first}]: expected every destination once a batch"
        )
    raise BindError(
        f"src_ids[{index}] is {src_id}, which is also a destination of this batch: expected no block of one pool to be "
        "both read and written (split the batch)"
    )


cdef str _expected_range(int64_t blocks):
    if blocks <= 0:
        return "the pool has no blocks"
    return f"expected 0 to {blocks - 1} (the pool's blocks), or -1 to skip the pair"


cdef struct Ids:
    const void *data  # host memory, or NULL
    uint64_t device   # address on a GPU, or 0
    Py_ssize_t count  # -1: none given, ids are counted
    uint32_t bytes
    int64_t few[64]   # where ids of a list are written; longer ones are `more`
    int64_t *more
    Py_buffer buffer
    bint has_buffer


cdef void _drop_ids(Ids *ids) noexcept:
    free(ids.more)
    ids.more = NULL
    if ids.has_buffer:
        PyBuffer_Release(&ids.buffer)
        ids.has_buffer = False


cdef enum IdsKind:
    SEQUENCE = 1  # list or tuple
    NUMBER
    BUFFER        # NumPy, array.array, memoryview
    TENSOR        # torch
    ON_GPU        # __cuda_array_interface__
    OTHER

cdef dict _width_of_dtype = {}  # torch.dtype -> bytes of an id, or 0

cdef dict _kind_of_ids = {list: SEQUENCE, tuple: SEQUENCE, int: NUMBER}  # type -> IdsKind


cdef int _ids_kind(given) except -1:
    kind = type(given)
    found = OTHER
    if hasattr(kind, "is_cuda") and hasattr(kind, "data_ptr"):
        found = TENSOR
    elif hasattr(kind, "__cuda_array_interface__") or hasattr(given, "__cuda_array_interface__"):
        found = ON_GPU
    elif PyObject_CheckBuffer(given):
        found = BUFFER
    _kind_of_ids[kind] = found
    return found


cdef object _read_ids(object given, str what, int device, Ids *ids):
    """Find the ids in whatever holds them; returns what must be kept alive while they are read."""
    ids.data = NULL
    ids.more = NULL
    ids.device, ids.count, ids.bytes, ids.has_buffer = 0, -1, 8, False
    if given is None:
        return None
    known = _kind_of_ids.get(type(given))
    cdef int kind = _ids_kind(given) if known is None else known
    if kind == SEQUENCE:
        if _read_sequence(given, ids):
            return None
    elif kind == BUFFER:
        if _read_buffer(given, ids):
            return given
    elif kind == TENSOR:
        if given.is_cuda:
            return _read_device_ids(given, what, device, ids)
        if given.dim() == 1 and given.is_contiguous():
            width = _width_of_dtype.get(given.dtype)
            if width is None:
                width = _width_of_dtype[given.dtype] = {"torch.int64": 8, "torch.int32": 4}.get(str(given.dtype), 0)
            if width:
                ids.bytes = width
                ids.count = given.numel()
                ids.data = <const void *> <uint64_t> given.data_ptr()
                return given
    elif kind == NUMBER:
        if -1 <= given <= INDEX_LIMIT:
            ids.few[0] = given
            ids.data = ids.few
            ids.count = 1
            return None
    elif kind == ON_GPU:
        return _read_device_ids(given, what, device, ids)
    from kvbm.pool import as_ids

    array = as_ids(given, what)  # anything else that holds integers, or the error that says what is wrong
    if array.shape[0] == 0:
        ids.count = 0
        return None
    if not _read_buffer(array, ids):
        raise BindError(f"{what}: expected integers of 32 or 64 bits, got {array.dtype}")
    return array


cdef bint _read_sequence(object given, Ids *ids) except -1:
    cdef Py_ssize_t count = len(given), i
    cdef int64_t *out = ids.few
    if count > 64:
        ids.more = <int64_t *> malloc(count * sizeof(int64_t))
        if ids.more == NULL:
            raise MemoryError(f"{count} block ids")
        out = ids.more
    try:
        if type(given) is list:
            for i in range(count):
                out[i] = _as_id((<list> given)[i])
        else:
            for i in range(count):
                out[i] = _as_id((<tuple> given)[i])
    except (OverflowError, TypeError):
        free(ids.more)
        ids.more = NULL
        return False
    ids.data = out
    ids.count = count
    return True


cdef inline int64_t _as_id(object item) except? -1:
    if type(item) is not int:
        raise TypeError
    return PyLong_AsLongLong(item)


cdef bint _read_buffer(object given, Ids *ids) except -1:
    """Contiguous int32 or int64 in one axis."""
    try:
        PyObject_GetBuffer(given, &ids.buffer, PyBUF_ND | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except (BufferError, ValueError):
        return False
    cdef const char *code = ids.buffer.format
    cdef bint fits = ids.buffer.ndim == 1 and code != NULL
    if fits:
        if code[0] == c"=" or code[0] == c"<" or code[0] == c"@":
            code += 1
        fits = code[0] != 0 and code[1] == 0 and (
            (ids.buffer.itemsize == 8 and (code[0] == c"l" or code[0] == c"q"))
            or (ids.buffer.itemsize == 4 and (code[0] == c"i" or code[0] == c"l")))
    if not fits:
        PyBuffer_Release(&ids.buffer)
        return False
    ids.has_buffer = True
    ids.data = ids.buffer.buf
    ids.count, ids.bytes = ids.buffer.shape[0], <uint32_t> ids.buffer.itemsize
    return True


cdef object _read_device_ids(object given, str what, int device, Ids *ids):
    from kvbm.pool import describe

    array = describe(given, what)
    if len(array.shape) != 1 or array.dtype not in ("int32", "int64"):
        raise BindError(f"{what}: expected one axis of int32 or int64, got shape {array.shape} of {array.dtype}")
    ids.bytes = 8 if array.dtype == "int64" else 4
    if array.shape[0] > 1 and array.strides[0] != ids.bytes:
        raise BindError(f"{what}: expected contiguous ids, got strides of {array.strides[0]} bytes; call .contiguous()")
    if array.device != f"cuda:{device}":
        raise BindError(
            f"{what}: the ids are on {array.device}, the copy's kernel on cuda:{device}; pass them from there"
        )
    ids.device, ids.count = array.address, array.shape[0]
    return given


# ---- lists of tensors ---------------------------------------------------------------------------------------------

# dlpack.h (1.3), as far as an inspection goes.  Not a copy of the header: only what stays the same throughout 1.x.
cdef struct DLTensor:
    void *data
    int32_t device_type, device_id
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct Exchange:  # DLPackExchangeAPI
    uint32_t major, minor
    Exchange *older
    void *allocate
    void *export_tensor
    void *import_tensor
    int (*look)(void *tensor, DLTensor *out) noexcept  # 0, or -1 with a Python exception; owns nothing
    int (*stream)(int32_t device_type, int32_t device_id, void **out) noexcept

cdef extern from *:
    """
    /* While one tensor is looked at, the next ones are fetched: the object, and then what its first fields point to,
     * which in torch is the tensor itself.  It is a guess that costs nothing: a prefetch faults nowhere. */
    static inline void kvbm_prefetch(void *object) { __builtin_prefetch(object); }
    static inline void kvbm_prefetch_fields(void *object) {
      char **field = (char **)((char *)object + sizeof(PyObject));
      for (int i = 0; i < 2; ++i)
        for (int line = 0; line < 3; ++line) __builtin_prefetch(field[i] + 64 * line);
    }
    """
    void kvbm_prefetch(void *item) noexcept
    void kvbm_prefetch_fields(void *item) noexcept
    PyObject *PyList_GetItem(object row, Py_ssize_t i) except NULL
    PyObject *PyTuple_GetItem(object row, Py_ssize_t i) except NULL

cdef enum:
    KDL_CPU = 1
    KDL_CUDA = 2
    KDL_CUDA_HOST = 3
    MOST_AXES = 8
    FAR_AHEAD = 6   # tensors whose objects are being fetched
    NEAR_AHEAD = 3  # and whose fields are

cdef dict DTYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
    (4, 16): "bfloat16", (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}

cdef dict _exchange_of = {}  # type -> capsule of its Exchange, or None


cdef Exchange *_exchange(kind) except? NULL:
    """What a type of torch tensors offers for looking at them from C, or NULL."""
    cdef Exchange *api
    capsule = _exchange_of.get(kind, _exchange_of)
    if capsule is _exchange_of:
        # Tensors of torch alone: this way does not tell whether memory may be written, and theirs always may.
        torch = sys.modules.get("torch")
        capsule = None
        if torch is not None and issubclass(kind, torch.Tensor):
            capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
            if not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
                capsule = None
        _exchange_of[kind] = capsule
    if capsule is None:
        return NULL
    api = <Exchange *> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and api.major != 1:
        api = api.older
    return api if api != NULL and api.look != NULL else NULL


# What a list's tensors have in common, and what is gathered of them.
cdef struct Alike:
    PyTypeObject *kind  # the type that `api` is for, kept by _exchange_of
    Exchange *api
    uint8_t code, bits
    int32_t device_id, ndim
    int64_t shape[8]
    int64_t elements
    bint exact         # the shape counts, and not only the number of elements
    uint64_t together  # the bits that any address has


cdef int _look(tensor, Alike *want, DLTensor *found) except -1:
    """1 if the object is a dense CUDA tensor that C can look at, else 0."""
    cdef int32_t i
    cdef int64_t held = 1
    if Py_TYPE(tensor) != want.kind:
        want.api = _exchange(type(tensor))
        want.kind = Py_TYPE(tensor)
    if want.api == NULL:
        return 0
    if want.api.look(<PyObject *> tensor, found) != 0:
        PyErr_Clear()
        return 0
    if (found.device_type != KDL_CUDA or found.lanes != 1 or found.data == NULL or found.ndim < 1
            or found.ndim > MOST_AXES):
        return 0
    for i in range(found.ndim - 1, -1, -1):
        if found.strides != NULL and found.shape[i] != 1 and found.strides[i] != held:
            return 0
        held *= found.shape[i]
    want.elements = want.elements if want.elements else held
    return held == want.elements and held > 0


cdef uint64_t _address(tensor, Alike *want) except? 0:
    """Address of a tensor that is what all are expected to be, else 0."""
    cdef DLTensor found
    cdef uint64_t address
    if not _look(tensor, want, &found):
        return 0
    if found.code != want.code or found.bits != want.bits or found.device_id != want.device_id:
        return 0
    if want.exact and (found.ndim != want.ndim or memcmp(found.shape, want.shape, found.ndim * sizeof(int64_t)) != 0):
        return 0
    address = <uint64_t> found.data + found.byte_offset
    want.together |= address
    return address


cdef inline PyObject *_item(row, Py_ssize_t i) except NULL:
    """Borrowed from a list or tuple; IndexError where it has become shorter."""
    return PyList_GetItem(row, i) if type(row) is list else PyTuple_GetItem(row, i)


cdef Table _empty_table(Py_ssize_t count, int device):
    cdef Table table = Table.__new__(Table)
    if count > INDEX_LIMIT // 8:
        return None
    table.addresses = <uint64_t *> malloc((count + 1) * sizeof(uint64_t))
    if table.addresses == NULL:
        raise MemoryError(f"a table of {count} addresses")
    table.count = <uint32_t> count
    table.device = device
    return table


cdef _start(Alike *want, tensor, int rank, DLTensor *first):
    """Take the first tensor for the measure of all: (sizes, dtype), or None."""
    memset(want, 0, sizeof(Alike))
    if not _look(tensor, want, first):
        return None
    dtype = DTYPES.get((first.code, first.bits))
    if dtype is None or not rank <= first.ndim <= rank + 1:
        return None
    want.code, want.bits, want.device_id = first.code, first.bits, first.device_id
    want.exact = True
    want.ndim = rank
    memcpy(want.shape, first.shape + (first.ndim - rank), rank * sizeof(int64_t))
    return tuple([want.shape[i] for i in range(rank)]), dtype


cdef int _alignment(uint64_t together):
    return <int> ((together | 16) & -(together | 16))


@cython.boundscheck(True)  # looking at a tensor may run Python, which may shorten the list
def whole_tensors(tensors, int rank):
    """Look at the whole tensors of a batch: all alike, dense, and on one GPU.

    Parameters
    ----------
    tensors : list or tuple of tensors, or one tensor
        One of ``rank`` axes a block; one of ``rank + 1`` axes holds all of them.
    rank : int
        Axes of a whole tensor.

    Returns
    -------
    tuple or None
        ``(Table, sizes, dtype, device, alignment)``.  None where anything is otherwise, or cannot be seen from here:
        then look at each by itself, and say what is wrong.
    """
    cdef Alike want
    cdef DLTensor first
    cdef Table table
    cdef Py_ssize_t i, count
    cdef uint64_t step
    if type(tensors) is list or type(tensors) is tuple:
        count = len(tensors)
        if count == 0:
            return None
        start = _start(&want, tensors[0], rank, &first)
        if start is None or first.ndim != rank:
            return None
        table = _empty_table(count, want.device_id)
        if table is None:
            return None
        for i in range(count):
            table.addresses[i] = _address(tensors[i], &want)
            if table.addresses[i] == 0:
                return None
    else:
        start = _start(&want, tensors, rank, &first)
        if start is None:
            return None
        count = first.shape[0] if first.ndim > rank else 1
        table = _empty_table(count, want.device_id)
        if table is None:
            return None
        step = <uint64_t> (want.elements // count) * (first.bits // 8)
        for i in range(count):
            table.addresses[i] = <uint64_t> first.data + first.byte_offset + i * step
            want.together |= table.addresses[i]
    return table, *start, want.device_id, _alignment(want.together)


@cython.boundscheck(True)
def chunk_tensors(blocks, Py_ssize_t batch, Py_ssize_t chunks, tuple shape not None, bint exact, str dtype not None,
                  int device):
    """Look at the chunks of a batch of blocks: all of one shape and dtype, dense, and on this GPU.

    Parameters
    ----------
    blocks : list or tuple of lists or tuples of tensors
        ``batch`` lists of ``chunks`` tensors; a flat list where there is one block.
    batch, chunks : int
    shape : tuple of int
        Of a chunk; where not `exact`, only its number of elements counts.
    exact : bool
    dtype : str
    device : int

    Returns
    -------
    tuple or None
        ``(Table, alignment)``, in table order.  None as for `whole_tensors`.
    """
    cdef Alike want
    cdef DLTensor found
    cdef Table table
    cdef Py_ssize_t i, k, n = 0
    cdef PyObject *item
    if (type(blocks) is not list and type(blocks) is not tuple) or not 0 < chunks < INDEX_LIMIT or not blocks:
        return None
    if batch == 1 and len(blocks) == chunks and type(blocks[0]) is not list and type(blocks[0]) is not tuple:
        blocks = (blocks,)
    if len(blocks) != batch or len(shape) > MOST_AXES:
        return None
    row = blocks[0]
    if (type(row) is not list and type(row) is not tuple) or not row:
        return None
    memset(&want, 0, sizeof(Alike))
    if not _look(row[0], &want, &found) or DTYPES.get((found.code, found.bits)) != dtype:
        return None
    want.code, want.bits, want.device_id = found.code, found.bits, device
    want.exact = exact
    want.ndim = <int32_t> len(shape)
    want.elements = 1
    for i in range(want.ndim):
        want.shape[i] = shape[i]
        want.elements *= want.shape[i]
    table = _empty_table(batch * chunks, device)
    if table is None:
        return None
    for i in range(batch):
        row = blocks[i]
        if (type(row) is not list and type(row) is not tuple) or len(row) != chunks:
            return None
        for k in range(chunks):
            if k + FAR_AHEAD < chunks:
                kvbm_prefetch(_item(row, k + FAR_AHEAD))
                item = _item(row, k + NEAR_AHEAD)
                if Py_TYPE(<object> item) == want.kind:
                    kvbm_prefetch_fields(item)
            table.addresses[n] = _address(<object> _item(row, k), &want)
            if table.addresses[n] == 0:
                return None
            n += 1
    return table, _alignment(want.together)


cdef struct Kind:
    int32_t ndim
    int64_t shape[8]
    int64_t strides[8]  # items
    int64_t whole       # bytes of records that may come in any shape, or 0
    uint8_t code, bits  # of an item, once one was seen


cdef int _read_kind(kind, Kind *out) except -1:
    """1 if (shape, strides, dtype, whole) have few enough axes, else 0."""
    cdef tuple shape = kind[0], strides = kind[1]
    cdef Py_ssize_t i
    if len(shape) > MOST_AXES or len(shape) != len(strides):
        return 0
    out.ndim = <int32_t> len(shape)
    out.whole = kind[3]
    out.code = out.bits = 0
    for i in range(out.ndim):
        out.shape[i], out.strides[i] = shape[i], strides[i]
    return 1


cdef bint _fits(const DLTensor *found, const Kind *kind) noexcept:
    """Whether a tensor has the shape and strides of its kind."""
    cdef int32_t axis
    cdef int64_t held = 1
    if found.ndim != kind.ndim:
        return False
    for axis in range(kind.ndim - 1, -1, -1):
        if found.shape[axis] != kind.shape[axis]:
            return False
        if kind.shape[axis] != 1 and (held if found.strides == NULL else found.strides[axis]) != kind.strides[axis]:
            return False
        held *= kind.shape[axis]
    return True


cdef bint _is_dense(const DLTensor *found, int64_t items) noexcept:
    """Whether a tensor is so many items one after the other, in whatever shape."""
    cdef int32_t axis
    cdef int64_t held = 1
    for axis in range(found.ndim - 1, -1, -1):
        if found.strides != NULL and found.shape[axis] != 1 and found.strides[axis] != held:
            return False
        held *= found.shape[axis]
    return held == items


@cython.boundscheck(True)
def strided_tensors(tensors, Py_ssize_t count, tuple kinds not None, const unsigned char[::1] which, str dtype not None,
                    int device, frozenset types=None, bint gradients=True):
    """Look at one side of a copy: torch's tensors, each of the shape and strides that its layout gives it.

    Parameters
    ----------
    tensors : list or tuple of tensors
    count : int
        How many are expected.
    kinds : tuple of (tuple of int, tuple of int, str, int)
        Up to 16: shape, strides in items, dtype where it is not `dtype`, and the bytes of records that may come in any
        dense shape, else 0.  Strides of axes of one item do not count.
    which : bytes or None
        Which of `kinds` each tensor is; None: all are the only one.
    dtype : str
    device : int
        CUDA device ordinal, -1 for the host.
    types : frozenset of type, optional
        The only types that tensors may be of.
    gradients : bool
        Whether a tensor may require a gradient.

    Returns
    -------
    tuple or None
        ``(Table, alignment)``.  None as for `whole_tensors`.
    """
    cdef Alike want
    cdef DLTensor found
    cdef Kind kind[16]
    cdef Kind *mine
    cdef Table table
    cdef PyObject *item
    cdef Py_ssize_t i
    cdef uint64_t address
    if (type(tensors) is not list and type(tensors) is not tuple) or len(tensors) != count or count < 1:
        return None
    if not 0 < len(kinds) <= (1 if which is None else 16) or (which is not None and which.shape[0] != count):
        return None
    for i in range(len(kinds)):
        if not _read_kind(kinds[i], &kind[i]):
            return None
    memset(&want, 0, sizeof(Alike))
    table = _empty_table(count, device)
    if table is None:
        return None
    for i in range(count):
        if i + FAR_AHEAD < count:
            kvbm_prefetch(_item(tensors, i + FAR_AHEAD))
            item = _item(tensors, i + NEAR_AHEAD)
            if Py_TYPE(<object> item) == want.kind:
                kvbm_prefetch_fields(item)
        tensor = <object> _item(tensors, i)
        if Py_TYPE(tensor) != want.kind:
            if types is not None and type(tensor) not in types:
                return None
            want.api = _exchange(type(tensor))
            want.kind = Py_TYPE(tensor)
        if want.api == NULL:
            return None
        if not gradients and tensor.requires_grad:
            return None
        if want.api.look(<PyObject *> tensor, &found) != 0:
            PyErr_Clear()
            return None
        if which is not None and which[i] >= len(kinds):
            return None
        mine = &kind[0 if which is None else which[i]]
        if mine.bits == 0:
            if DTYPES.get((found.code, found.bits)) != (kinds[mine - kind][2] or dtype):
                return None
            mine.code, mine.bits = found.code, found.bits
        if device >= 0:
            if found.device_type != KDL_CUDA or found.device_id != device:
                return None
        elif found.device_type != KDL_CPU and found.device_type != KDL_CUDA_HOST:
            return None
        if found.code != mine.code or found.bits != mine.bits or found.lanes != 1:
            return None
        if not _fits(&found, mine) and (mine.whole == 0 or not _is_dense(&found, mine.whole)):
            return None
        address = <uint64_t> found.data + found.byte_offset
        if address == 0:
            return None
        table.addresses[i] = address
        want.together |= address
    return table, _alignment(want.together)


def tables_clash(Table src not None, uint64_t src_bytes, Table dst not None, uint64_t dst_bytes):
    """Whether two allocations of the destination share bytes with each other, or one of them with one of the source.

    Parameters
    ----------
    src, dst : Table
    src_bytes, dst_bytes : int
        Bytes of each allocation, from its first to its last.
    """
    cdef kvbm_spans read, written
    cdef uint64_t first = 0, second = 0
    cdef int found
    read.addresses, read.size, read.count = src.addresses, src_bytes, src.count
    written.addresses, written.size, written.count = dst.addresses, dst_bytes, dst.count
    read.sizes = written.sizes = NULL
    with nogil:
        found = kvbm_check_spans(&read, &written, &first, &second)
    if found < 0:
        check(found, f"checking {src.count} and {dst.count} allocations")
    return found != KVBM_SPAN_OK


def spread(Table table not None, uint64_t[::1] out not None, uint64_t step):
    """Fill `out` with the addresses of a table, each followed by those of its further pieces, `step` bytes apart."""
    cdef Py_ssize_t pieces = out.shape[0] // max(table.count, 1), i, k
    if pieces * table.count != out.shape[0]:
        raise BindError(f"{out.shape[0]} pieces of {table.count} allocations: expected as many of each")
    for i in range(table.count):
        for k in range(pieces):
            out[i * pieces + k] = table.addresses[i] + k * step


# ---- raw copies ---------------------------------------------------------------------------------------------------

def check_pairs(const uint64_t[::1] src not None, const uint64_t[::1] dst not None, sizes):
    """Refuse raw copies that would race, or that start at address 0.

    Parameters
    ----------
    src, dst : contiguous uint64 array
        Addresses, one each a copy.
    sizes : contiguous uint64 array or int
        Bytes of each copy, or of every copy; copies of nothing are not looked at.

    Raises
    ------
    BindError
        Naming the two positions.
    """
    cdef kvbm_spans read, written
    cdef const uint64_t[::1] each
    cdef uint64_t first = 0, second = 0
    cdef int found
    memset(&read, 0, sizeof(kvbm_spans))
    if src.shape[0] != dst.shape[0]:
        raise BindError(f"{src.shape[0]} source and {dst.shape[0]} destination addresses: expected as many of each")
    read.count = src.shape[0]
    if read.count == 0:
        return
    if isinstance(sizes, int):
        read.size = sizes
    else:
        each = sizes
        if each.shape[0] != src.shape[0]:
            raise BindError(f"{each.shape[0]} sizes: expected {src.shape[0]}, one a copy")
        read.sizes = &each[0]
    read.addresses = &src[0]
    written = read
    written.addresses = &dst[0]
    with nogil:
        found = kvbm_check_spans(&read, &written, &first, &second)
    if found < 0:
        check(found, f"checking {src.shape[0]} copies")
    if found == KVBM_SPAN_NULL_SRC:
        raise BindError(f"src_ptrs[{first}] is 0: expected an address")
    if found == KVBM_SPAN_NULL_DST:
        raise BindError(f"dst_ptrs[{first}] is 0: expected an address")
    if found == KVBM_SPAN_DST_TWICE:
        raise BindError(
            f"dst_ptrs[{first}] is {dst[first]:#x} and dst_ptrs[{second}] is {dst[second]:#x}, whose bytes overlap: "
            "expected every byte to be written once a call"
        )
    if found == KVBM_SPAN_READ_AND_WRITTEN:
        raise BindError(
            f"src_ptrs[{first}] is {src[first]:#x} and dst_ptrs[{second}] is {dst[second]:#x}, whose bytes overlap: "
            "expected no byte to be both read and written (split the call)"
        )


def find_device(const uint64_t[::1] addresses not None, what):
    """Find the GPU that addresses lie on.

    Parameters
    ----------
    addresses : contiguous uint64 array
    what : str
        What errors call them.

    Returns
    -------
    tuple
        The device of the first one that lies on a GPU, or -2 where all lie in pinned host memory; and a bit for each
        GPU that some lie on.

    Raises
    ------
    BindError
        One lies in memory that no GPU reaches.
    """
    cdef uint64_t count = addresses.shape[0], index = 0, gpus = 0
    cdef int device = -2, status
    if count == 0:
        return -2, 0
    with nogil:
        status = kvbm_find_device(&addresses[0], count, &device, &gpus, &index)
    check(status, f"asking where {count} addresses lie")
    if device == -1:
        raise BindError(
            f"{what}[{index}] is {addresses[index]:#x}, which no GPU reaches: expected GPU memory or pinned host "
            "memory (allocate it pinned, or register it)"
        )
    return device, gpus


def copy_pairs(const uint64_t[::1] src not None, const uint64_t[::1] dst not None, uint64_t size, int device,
               uint64_t stream):
    """Copy the same number of bytes from each source to its destination by one kernel, ordered by the stream.

    Parameters
    ----------
    src, dst : contiguous uint64 array
        Addresses that the device reaches, already checked (see `check_pairs`).  Copied before the call returns.
    size : int
        Bytes of every copy.
    device : int
        CUDA device ordinal, where the kernel runs.
    stream : int
        Handle of the stream.

    Raises
    ------
    BindError
        If the arrays differ in length.
    CudaError
        If the launch fails.
    """
    cdef Py_ssize_t count = src.shape[0]
    cdef int status
    if dst.shape[0] != count:
        raise BindError(f"{count} source and {dst.shape[0]} destination addresses: expected as many of each")
    if count == 0 or size == 0:
        return
    with nogil:
        status = kvbm_launch_pairs(&dst[0], &src[0], size, count, device, stream)
    check(status, f"copying {count} pairs of addresses on cuda:{device}")


# ---- streams ------------------------------------------------------------------------------------------------------

cdef enum StreamKind:
    HANDLE = 1    # int, or converts losslessly with __index__
    PROTOCOL      # has __cuda_stream__
    BINDING       # cuda.bindings: CUstream, cudaStream_t
    TORCH         # torch.cuda.Stream before 2.10: cuda_stream
    CUPY          # cupy.cuda.Stream before 14: ptr

cdef dict _kind_of = {}  # type -> StreamKind


cdef int _stream_kind(stream) except -1:
    kind = type(stream)
    root = str(kind.__module__).partition(".")[0]
    # bool is an int, and None of this: passing True is a mistake.
    if isinstance(stream, bool) or stream is None:
        pass
    elif isinstance(stream, int):
        return HANDLE
    elif hasattr(kind, "__cuda_stream__"):
        return PROTOCOL
    elif root == "cuda" and hasattr(kind, "__int__"):
        return BINDING
    elif root == "torch" and hasattr(kind, "cuda_stream"):
        return TORCH
    elif root == "cupy" and hasattr(stream, "ptr"):
        return CUPY
    elif root == "numpy" and hasattr(kind, "__index__") and getattr(stream, "shape", None) == ():
        return HANDLE
    raise TypeError(
        f"stream: expected an int handle, an object with __cuda_stream__ (cuda.core, torch, CuPy) or a handle of "
        f"cuda.bindings, got {kind.__module__}.{kind.__qualname__}"
    )


def stream_handle(stream):
    """Handle of a CUDA stream as an int.

    Parameters
    ----------
    stream : int or object
        A handle; an object with ``__cuda_stream__`` (cuda.core, torch, CuPy); or a handle of cuda.bindings.  The caller
        keeps it alive for as long as the handle is used.

    Returns
    -------
    int
        0 is the legacy default stream.

    Raises
    ------
    TypeError
        If it is none of these, or its protocol's version is not 0.
    BindError
        If the handle is not a 64-bit unsigned integer.

    Examples
    --------
    >>> stream_handle(2)
    2
    """
    return _handle_of(stream)


cdef uint64_t _handle_of(stream) except? 0xFFFFFFFFFFFFFFFF:
    if type(stream) is int:
        try:
            return PyLong_AsUnsignedLongLong(stream)
        except OverflowError:
            raise BindError(f"stream: expected a handle of 64 bits, got {stream}") from None
    kind = _kind_of.get(type(stream))
    if kind is None:
        kind = _stream_kind(stream)
        _kind_of[type(stream)] = kind
    if kind == PROTOCOL:
        answer = stream.__cuda_stream__()
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"stream: expected __cuda_stream__() to return (0, handle), got {answer!r}")
        version, handle = answer
        if version != 0:
            raise TypeError(f"stream: expected version 0 of the __cuda_stream__ protocol, got {version!r}")
        handle = int(handle)
    elif kind == TORCH:
        handle = int(stream.cuda_stream)
    elif kind == CUPY:
        handle = int(stream.ptr)
    else:
        handle = int(stream)
    if not 0 <= handle < 1 << 64:
        raise BindError(f"stream: expected a handle of 64 bits, got {handle}")
    return handle


# ---- transfers ----------------------------------------------------------------------------------------------------

@cython.final
cdef class Ring:
    """Memory on a GPU that staged copies go through: slots, and a stream of their own.

    Parameters
    ----------
    device : int
        CUDA device ordinal.
    slot_bytes : int
        Size of a slot.
    slots : int
        Number of slots, at most 8.
    """

    cdef kvbm_ring *ring
    cdef readonly int device
    cdef readonly uint64_t slot_bytes
    cdef readonly int slots

    def __cinit__(self):
        self.ring = NULL

    def __init__(self, int device, uint64_t slot_bytes, int slots):
        cdef int status
        if self.ring != NULL:
            raise TypeError("a Ring is initialised once")
        self.device, self.slot_bytes, self.slots = device, slot_bytes, slots
        with nogil:
            status = kvbm_ring_create(device, slot_bytes, <uint32_t> slots, &self.ring)
        check(status, f"allocating {slots} slots of {slot_bytes} bytes on cuda:{device} for staged copies")

    def close(self):
        """Free the memory; waits for the copies that use it.  Nothing may be copied through it any more."""
        cdef kvbm_ring *ring = self.ring
        self.ring = NULL
        with nogil:
            kvbm_ring_destroy(ring)

    def __dealloc__(self):
        kvbm_ring_retire(self.ring)
        self.ring = NULL


cdef class _Fault:
    """A word of pinned memory in which kernels note an id on the device that is out of range."""

    cdef uint32_t *word
    cdef int device

    def __cinit__(self, int device):
        cdef int status
        self.word = NULL
        self.device = device
        with nogil:
            status = kvbm_fault_create(device, &self.word)
        check(status, f"allocating pinned memory for cuda:{device}")

    def __dealloc__(self):
        with nogil:
            kvbm_fault_destroy(self.device, self.word)

    cdef int report(self) except -1:
        cdef uint32_t found = self.word[0]
        if found:
            self.word[0] = 0
            raise BindError(
                f"block ids on the device: pair {found - 1} of an earlier copy named a block that its pool does not "
                "have; it was skipped, and nothing of it was copied"
            )
        return 0


@cython.final
cdef class Done:
    """The end of one copy, as an event: wait for it on a stream, or on the host.

    It keeps the pools of its copy alive.  On the CPU the copy is done before this exists.
    """

    cdef uint64_t event
    cdef int device  # of the stream
    cdef object keep
    cdef _Fault fault
    cdef readonly str strategy
    """What ran: ``direct``, ``staged`` or ``engine``."""

    def __cinit__(self):
        self.event = 0
        self.device = -1

    def __dealloc__(self):
        if self.event:
            kvbm_event_give(self.device, 0, self.event)

    def __repr__(self):
        return f"<kvbm Done, {self.strategy}>"

    def wait(self, stream):
        """Let a stream of any GPU wait for the copy; the host does not wait."""
        cdef int status, device = self.device
        if self.event == 0:
            return
        cdef uint64_t handle = stream_handle(stream)
        if handle <= 2:
            device = _device_of_default(stream, device)
        with nogil:
            status = kvbm_stream_wait(device, handle, self.event)
        check(status, "waiting for a copy on a stream")

    def synchronize(self):
        """Wait on the host until the copy is done.

        Raises
        ------
        CudaError
            What failed on the GPU.
        BindError
            A kernel met an id on the device that is out of range.
        """
        cdef int status
        if self.event == 0:
            return
        with nogil:
            status = kvbm_event_synchronize(self.device, self.event)
        check(status, "waiting for a copy")
        if self.fault is not None:
            self.fault.report()

    def query(self):
        """Whether the copy is done."""
        cdef int status, is_done = 1
        if self.event == 0:
            return True
        with nogil:
            status = kvbm_event_query(self.device, self.event, &is_done)
        check(status, "asking about a copy")
        return is_done != 0


def finished():
    """A `Done` of a copy that was done when its call returned."""
    cdef Done done = Done.__new__(Done)
    done.strategy = "direct"
    return done


cdef tuple STRATEGIES = ("direct", "staged", "engine")


@cython.final
cdef class Route:
    """One way from a pool to another: every strategy's launches, ready to run.

    Parameters
    ----------
    device : int
        CUDA device that kernels run on.
    src, dst : Table
        Base addresses of the two pools.
    src_blocks, dst_blocks : int
        Their numbers of blocks.
    direct : sequence of Copy
        Kernels from pool to pool; empty if no kernel can reach both.
    permute : sequence of Copy
        Kernels between the device's pool and a slot.
    moves, runs : sequence of Copy
        Loop nests of bytes: between a slot and the far pool, and from pool to pool.
    src_bases, dst_bases : contiguous uint64 array
        The tables as `moves` and `runs` count them.
    cuts : contiguous uint64 array
        Addresses that no copy of the engine may cross.
    gathers : bool
        Whether the kernel comes first and the engine second.
    slot_block_bytes : int
        Bytes of a block in a slot.
    ring : Ring or None
        For staged copies.
    max_sms : int
        For kernels that keep to a few multiprocessors; 0 otherwise.
    same_pool, crosses : bool
        Whether both sides are one memory; whether they are two GPUs'.
    limits : sequence of (int, int)
        ``(pairs, strategy)``: up to so many pairs strategy 0 (direct), 1 (staged) or 2 (engine) is taken, ascending.
    may_choose : bool
        Whether ids on the device, which the copy engine cannot read, make a copy direct instead of being refused.
    keep : object
        What the copies need alive.
    """

    cdef kvbm_route route
    cdef Table src, dst
    cdef Ring ring
    cdef _Fault fault
    cdef object keep, owned
    cdef bint may_choose
    cdef int num_limits
    cdef int64_t limit[8]
    cdef int strategy_of[8]
    cdef uint64_t copies[3]
    cdef uint64_t blocks[3]
    cdef uint64_t submissions
    cdef void *launches  # what the route's pointers to kernels and parameters point into

    def __cinit__(self):
        self.launches = NULL

    def __dealloc__(self):
        free(self.launches)

    def __init__(self, int device, Table src not None, Table dst not None, int64_t src_blocks, int64_t dst_blocks, *,
                 direct, permute, moves, runs, const uint64_t[::1] src_bases, const uint64_t[::1] dst_bases,
                 const uint64_t[::1] cuts, bint gathers, uint64_t slot_block_bytes, Ring ring, int max_sms,
                 bint same_pool, bint crosses, limits, bint may_choose, keep):
        cdef Copy copy
        cdef int i
        memset(&self.route, 0, sizeof(kvbm_route))
        memset(self.copies, 0, sizeof(self.copies))
        memset(self.blocks, 0, sizeof(self.blocks))
        self.submissions = 0
        direct, permute, moves, runs, limits = tuple(direct), tuple(permute), tuple(moves), tuple(runs), tuple(limits)
        if not 0 < len(limits) <= 8:
            raise PlanError(f"{len(limits)} limits: expected 1 to 8")
        if self.launches != NULL:
            raise TypeError("a Route is initialised once")
        every = (*direct, *permute, *moves, *runs)
        cdef size_t most = <size_t> len(every)
        self.launches = malloc((most + 1) * (sizeof(void *) + sizeof(int)))
        if self.launches == NULL:
            raise MemoryError(f"a route of {most} launches")
        cdef const kvbm_args **args = <const kvbm_args **> self.launches
        cdef int *numbers = <int *> (args + most)
        self.src, self.dst, self.ring, self.keep = src, dst, ring, keep
        self.owned = (direct, permute, moves, runs, src_bases, dst_bases, cuts)
        self.route.device, self.route.crosses, self.route.same_pool = device, crosses, same_pool
        self.route.src_blocks, self.route.dst_blocks = src_blocks, dst_blocks
        self.route.max_ctas = <uint32_t> max_sms
        self.route.gathers, self.route.slot_block_bytes = gathers, slot_block_bytes
        for i, copy in enumerate(every):
            numbers[i], args[i] = copy.index, &copy.args
        self.route.direct_kernel, self.route.direct = numbers, args
        self.route.num_direct = <uint32_t> len(direct)
        self.route.permute_kernel, self.route.permute = numbers + len(direct), args + len(direct)
        self.route.num_permute = <uint32_t> len(permute)
        args += len(direct) + len(permute)
        self.route.moves, self.route.num_moves = args, <uint32_t> len(moves)
        self.route.runs, self.route.num_runs = args + len(moves), <uint32_t> len(runs)
        if ring is not None:
            self.route.ring = ring.ring
        if src_bases is not None and src_bases.shape[0]:
            self.route.src_bases = &src_bases[0]
        if dst_bases is not None and dst_bases.shape[0]:
            self.route.dst_bases = &dst_bases[0]
        if cuts is not None and cuts.shape[0]:
            self.route.cuts, self.route.num_cuts = &cuts[0], <uint32_t> cuts.shape[0]
        for i, (pairs, strategy) in enumerate(limits):
            self.limit[i], self.strategy_of[i] = pairs, strategy
            if strategy not in (0, 1, 2) or (strategy == 0 and not direct) or (strategy == 1 and ring is None) or (
                    strategy == 2 and not runs):
                raise PlanError(f"strategy {strategy}: this route has nothing to run it with")
        self.num_limits, self.may_choose = <int> len(limits), may_choose

    def choose(self, int64_t pairs):
        """Name of the strategy for a batch of so many pairs of host ids."""
        return STRATEGIES[self._choose(pairs)]

    cdef int _choose(self, int64_t pairs) noexcept:
        cdef int i
        for i in range(self.num_limits - 1):
            if pairs <= self.limit[i]:
                return self.strategy_of[i]
        return self.strategy_of[self.num_limits - 1]

    def counters(self):
        """Copies and blocks by strategy, and calls of the driver that they took."""
        return tuple(self.copies), tuple(self.blocks), self.submissions

    def copy(self, src_ids, dst_ids, stream, wait=None):
        """Copy blocks, ordered by the stream.

        Parameters
        ----------
        src_ids, dst_ids : None, int, sequence of int, NumPy array, CPU or CUDA tensor
            int32 or int64; -1 skips a pair.  CUDA tensors are read when the kernel runs.
        stream : object
            See `stream_handle`.
        wait : optional
            An event, a stream, a `Done`, or a list of them.

        Returns
        -------
        Done

        Raises
        ------
        BindError
            Ids that are refused; nothing has been enqueued.
        CudaError
            A call of the driver failed.
        """
        cdef Ids src, dst
        cdef uint64_t handle = _handle_of(stream)
        src.more = NULL
        dst.more = NULL
        src.has_buffer = dst.has_buffer = False
        try:
            keep_src = _read_ids(src_ids, "src_ids", self.route.device, &src)
            keep_dst = _read_ids(dst_ids, "dst_ids", self.route.device, &dst)
            if src.count >= 0 and dst.count >= 0 and src.bytes != dst.bytes:
                keep_src = _widen(src_ids, dst_ids, &src, &dst, self.route.device)
            return self._copy(&src, &dst, handle, stream, wait, src_ids, dst_ids, keep_src, keep_dst)
        finally:
            _drop_ids(&src)
            _drop_ids(&dst)

    cdef Done _copy(self, Ids *src, Ids *dst, uint64_t stream, given_stream, wait, src_ids, dst_ids, keep_src,
                    keep_dst):
        cdef kvbm_batch batch
        cdef kvbm_outcome outcome
        cdef uint64_t waits[16]
        cdef uint32_t num_waits = 0
        cdef int status, strategy, home
        cdef Py_ssize_t n = src.count if src.count >= 0 else dst.count
        cdef list taken = None
        if src.count >= 0 and dst.count >= 0 and src.count != dst.count:
            raise BindError(f"ids: expected as many source as destination ids, got {src.count} and {dst.count}")
        if n < 0:
            if self.route.src_blocks != self.route.dst_blocks:
                raise BindError(
                    f"ids: the pools hold {self.route.src_blocks} and {self.route.dst_blocks} blocks; say which by "
                    "src_ids and dst_ids"
                )
            n = self.route.src_blocks
        if n > INDEX_LIMIT:
            raise BindError(f"{n} pairs of blocks: expected 0 to {INDEX_LIMIT}")
        memset(&batch, 0, sizeof(kvbm_batch))
        batch.num_pairs = <uint32_t> n
        batch.src_ids, batch.src_ids_device = src.data, src.device
        batch.dst_ids, batch.dst_ids_device = dst.data, dst.device
        batch.id_bytes = src.bytes if src.count >= 0 else dst.bytes
        batch.src_table, batch.src_entries = self.src.addresses, self.src.count
        batch.dst_table, batch.dst_entries = self.dst.addresses, self.dst.count
        _take_uploaded(&batch, self.src, self.dst, self.route.device)
        batch.max_ctas = self.route.max_ctas
        strategy = self._choose(n)
        if src.device or dst.device:
            strategy = self._choose_for_device_ids(strategy, src.device != 0, dst.device != 0)
            if self.fault is None:
                self.fault = _Fault.__new__(_Fault, self.route.device)
            batch.fault = <uint64_t> self.fault.word
        home = self.route.device
        if self.route.crosses:
            with nogil:
                status = kvbm_stream_device(stream, &home)
            check(status, "asking which GPU a stream is of")
            if home < 0:
                home = _device_of_default(given_stream, -2 if stream <= 2 else self.route.device)
                if home != self.route.device:
                    raise BindError(
                        f"stream: two GPUs take part, and the default stream of either has the handle {stream}; pass a "
                        f"stream of your own, or the default stream object of cuda:{self.route.device}"
                    )
        cdef Done done = Done.__new__(Done)
        try:
            if wait is not None:
                taken = []
                for event in wait if isinstance(wait, (list, tuple)) else (wait,):
                    if num_waits == 16:
                        raise BindError("wait: expected at most 16 events and streams")
                    waits[num_waits] = _event_of(event, taken, home)
                    num_waits += waits[num_waits] != 0
            with nogil:
                status = kvbm_event_take(home, 0, &done.event)
                done.device = home
                if status == KVBM_OK:
                    status = kvbm_transfer(&self.route, &batch, strategy, stream, waits, num_waits, done.event,
                                           &outcome)
        finally:
            if taken:
                for device, event in taken:
                    kvbm_event_give(device, 0, event)
        if status != KVBM_OK:
            used = () if strategy == KVBM_ENGINE else dict.fromkeys(copy.kernel for copy in self.owned[strategy])
            by = " and ".join(used) or "no kernel"
            check(status, f"copying {n} blocks on cuda:{self.route.device} ({STRATEGIES[strategy]}, {by})")
        if outcome.refused:
            if outcome.refused < 0:
                check(outcome.refused, f"checking {n} pairs of block ids")
            self._refuse(&outcome, src, dst, src_ids, dst_ids)
        self.copies[strategy] += 1
        self.blocks[strategy] += outcome.pairs
        self.submissions += outcome.submissions
        done.strategy = STRATEGIES[strategy]
        done.keep = (self, keep_src, keep_dst) if src.device or dst.device else self
        done.fault = self.fault if src.device or dst.device else None
        return done

    cdef str _kernels(self, int strategy):
        used = self.owned[0] if strategy == KVBM_DIRECT else self.owned[1] if strategy == KVBM_STAGED else ()
        return "".join(f", {copy.kernel}" for copy in used)

    cdef int _refuse(self, kvbm_outcome *outcome, Ids *src, Ids *dst, src_ids, dst_ids) except -1:
        found = outcome.refused
        if src.device and found == KVBM_ID_SRC_RANGE:
            found = KVBM_ID_DST_RANGE
        mine = None if src.count < 0 or src.device else _as_list(src_ids)
        others = None if dst.count < 0 or dst.device else _as_list(dst_ids)
        _refuse(found, outcome.index, mine, others, self.route.src_blocks, self.route.dst_blocks)
        return 0

    cdef int _choose_for_device_ids(self, int strategy, bint src, bint dst) except -1:
        """The copy engine's side of a copy must be known on the host."""
        if strategy == KVBM_DIRECT:
            return strategy
        if strategy == KVBM_STAGED and not self.route.gathers and dst and not src:
            return strategy
        if self.may_choose and self.route.num_direct:
            return KVBM_DIRECT
        if strategy == KVBM_ENGINE:
            raise BindError(
                "engine: block ids lie on the GPU, and the copy engine needs them on the host; pass .cpu() ids, or use "
                "strategy='direct'"
            )
        if self.route.gathers:
            raise BindError(
                "staged: block ids lie on the GPU, and whether a pair is skipped must be known on the host when the "
                "engine writes the destination; pass .cpu() ids, or use strategy='direct'"
            )
        raise BindError(
            "staged: src_ids lie on the GPU, and the copy engine that reads the source needs them on the host; pass "
            "src_ids.cpu(), or use strategy='direct'"
        )


cdef object _as_list(ids):
    if isinstance(ids, int):
        return [ids]
    return ids


cdef object _widen(src_ids, dst_ids, Ids *src, Ids *dst, int device):
    """Ids of two widths: bring those on the host to the other's."""
    from kvbm.pool import as_ids
    import numpy as np

    if src.device and dst.device:
        raise BindError(
            f"ids: src_ids have {src.bytes * 8} bits and dst_ids {dst.bytes * 8}; on the device expected one width"
        )
    if src.device or (not dst.device and src.bytes == 8):
        wanted, given, what, ids = src.bytes, dst_ids, "dst_ids", dst
    else:
        wanted, given, what, ids = dst.bytes, src_ids, "src_ids", src
    array = as_ids(given, what)
    if array.size and (array.min() < -1 or array.max() > INDEX_LIMIT):
        wrong = int(np.flatnonzero((array < -1) | (array > INDEX_LIMIT))[0])
        raise BindError(f"{what}[{wrong}] is {array[wrong]}: expected a block of the pool, or -1 to skip the pair")
    array = np.ascontiguousarray(array, np.int32 if wanted == 4 else np.int64)
    _drop_ids(ids)
    if array.shape[0] == 0:
        ids.count = 0
        ids.data = NULL
    else:
        _read_buffer(array, ids)
    return array


cdef int _device_of_default(stream, int otherwise) except? -1:
    """A default stream's handle is the same on every GPU; its object tells which one is meant."""
    for name in ("device_index", "device_id"):  # torch, CuPy
        index = getattr(stream, name, None)
        if isinstance(index, int) and index >= 0:
            return index
    return otherwise


cdef uint64_t _event_of(producer, list taken, int home) except? 0:
    """The event of a producer: its own, or one recorded now on its stream (and given back through `taken`).

    A default stream, whose handle is the same on all GPUs, is taken to be of the GPU of the copy's stream.
    """
    cdef uint64_t event = 0, stream
    cdef int status, device = -1
    if isinstance(producer, Done):
        return (<Done> producer).event
    root = str(type(producer).__module__).partition(".")[0]
    if not hasattr(producer, "__cuda_stream__"):
        if root == "torch" and hasattr(producer, "cuda_event"):
            event = producer.cuda_event
            if event == 0:
                raise BindError("wait: the event has not been recorded yet")
            return event
        # Only CuPy's streams have wait_event.
        if root == "cupy" and hasattr(producer, "ptr") and not hasattr(producer, "wait_event"):
            return producer.ptr
        if root == "cuda" and hasattr(producer, "is_timing_enabled"):  # cuda.core.Event
            return <uint64_t> int(producer.handle)
    if isinstance(producer, int):
        raise TypeError("wait: expected an event or a stream object, got an int, which could be either")
    stream = stream_handle(producer)
    with nogil:
        status = kvbm_stream_device(stream, &device)
        if status == KVBM_OK:
            if device < 0:
                device = home
            status = kvbm_event_take(device, 0, &event)
        if status == KVBM_OK:
            status = kvbm_event_record(device, event, stream)
    if event:
        taken.append((device, event))
    check(status, "recording an event on the producer's stream")
    return event


def enable_peer(int device, int peer):
    """Let kernels on one GPU reach another's memory; False where the machine does not allow it."""
    cdef int can = 0, status
    with nogil:
        status = kvbm_enable_peer(device, peer, &can)
    check(status, f"letting cuda:{device} reach the memory of cuda:{peer}")
    return can != 0


# ---- memory -------------------------------------------------------------------------------------------------------

def memcpy_batch(const uint64_t[::1] dst not None, const uint64_t[::1] src not None, sizes, int mode, int device,
                 uint64_t stream, bint merge=False):
    """Copy many ranges of bytes with the driver's copy engines, ordered by the stream, not waited for.

    Parameters
    ----------
    dst, src : contiguous uint64 array
        Addresses, device or pinned host memory.
    sizes : contiguous uint64 array or int
        Bytes of each copy, or of every copy.
    mode : int
        0: one batched call where the driver and the stream allow it, else one call a copy; 1: one call a copy;
        2: batched, or an error.
    device : int
        CUDA device ordinal.
    stream : int
        Handle of the stream.
    merge : bool
        Make one copy of neighbours: those where source and destination go on where the copy before ends.

    Returns
    -------
    int
        The mode that ran: 1 or 2.

    Raises
    ------
    BindError
        If the arrays differ in length.
    CudaError
        If a copy is refused; with mode 2, also where the driver has no batched copies or the stream is the legacy
        default.
    """
    cdef Py_ssize_t count = dst.shape[0]
    cdef const uint64_t[::1] each
    cdef const uint64_t *size_of = NULL
    cdef uint64_t size = 0
    cdef int status, used = mode
    if mode < 0 or mode > 2:
        raise BindError(f"mode: expected 0, 1 or 2, got {mode}")
    if src.shape[0] != count:
        raise BindError(f"{src.shape[0]} source addresses: expected {count}, one a destination")
    if isinstance(sizes, int):
        size = sizes
    else:
        each = sizes
        if each.shape[0] != count:
            raise BindError(f"{each.shape[0]} sizes: expected {count}, one a destination")
        if count:
            size_of = &each[0]
    if count == 0:
        return 2 if mode == 2 else 1
    with nogil:
        status = kvbm_memcpy_batch(&dst[0], &src[0], size_of, size, count, mode, merge, device, stream, &used)
    check(status, f"copying {count} ranges on cuda:{device}")
    return used


def alloc_device(int device, uint64_t nbytes):
    """Allocate device memory, aligned to 256 bytes and uninitialised; returns its address."""
    cdef uint64_t address = 0
    cdef int status
    with nogil:
        status = kvbm_alloc_device(device, nbytes, &address)
    check(status, f"allocating {nbytes} bytes on cuda:{device}")
    return address


def free_device(int device, uint64_t address):
    """Free memory of `alloc_device`; waits for work that may still use it.  Address 0 is nothing to free."""
    cdef int status
    with nogil:
        status = kvbm_free_device(device, address)
    check(status, f"freeing memory on cuda:{device}")


def upload(int device, uint64_t dst, const unsigned char[::1] data not None):
    """Copy host bytes to device memory, and return when they are there.

    It does not wait for other streams: order it yourself against work that uses the same memory.
    """
    cdef uint64_t nbytes = data.shape[0]
    cdef int status
    if nbytes == 0:
        return
    with nogil:
        status = kvbm_upload(device, dst, &data[0], nbytes)
    check(status, f"uploading {nbytes} bytes to cuda:{device}")


def host_touch(uint64_t address, uint64_t nbytes, int how=0, int threads=1):
    """Give host pages their memory now, on many threads, instead of at their first use.

    Parameters
    ----------
    address, nbytes : int
        Whole pages.
    how : int
        0: fresh memory, which is cleared; 1: what the pages hold is kept, and they can be written at once; 2: likewise,
        for memory that may only be read.
    threads : int
        At most so many.

    Raises
    ------
    MemoryError
        With how=0, if there is not as much memory.  The others take what they get.
    """
    cdef int status
    with nogil:
        status = kvbm_host_touch(address, nbytes, how, threads)
    check(status, f"touching {nbytes} bytes at {address:#x}")


def host_register(uint64_t address, uint64_t nbytes, bint read_only=False):
    """Page-lock host memory so that every GPU reaches it; undone by `host_unregister`.

    Parameters
    ----------
    address, nbytes : int
        Whole pages, none of them page-locked yet.
    read_only : bool
        GPUs only read it: what memory that may not be written needs.
    """
    cdef int status
    with nogil:
        status = kvbm_host_register(address, nbytes, read_only)
    check(status, f"page-locking {nbytes} bytes at {address:#x}")


def host_unregister(uint64_t address):
    """Undo `host_register` of this address.  No copy may still use the memory."""
    cdef int status
    with nogil:
        status = kvbm_host_unregister(address)
    check(status, f"releasing page-locked memory at {address:#x}")


def memory_range(uint64_t address, bint pinned=True):
    """First and last byte (exclusive) of the memory around an address.

    Parameters
    ----------
    address : int
    pinned : bool
        Ask for pinned host memory; otherwise for a GPU's.

    Returns
    -------
    tuple of two ints
        Of one allocation or registration; ``(0, 0)`` where the address is not in such memory, and
        ``(address, address + 1)`` where the driver says no more than that it is.
    """
    cdef uint64_t begin = 0, end = 0
    cdef int status
    with nogil:
        status = kvbm_memory_range(address, pinned, &begin, &end)
    check(status, f"asking what memory address {address:#x} is in")
    return begin, end


def synchronize(int device, uint64_t stream=0):
    """Wait until everything on a stream is done; raises what failed on it."""
    cdef int status
    with nogil:
        status = kvbm_synchronize(device, stream)
    check(status, f"waiting for a stream of cuda:{device}")


# ---- the machine --------------------------------------------------------------------------------------------------

def driver_version():
    """CUDA version of the driver, e.g. 13000 for 13.0.

    Looks the driver up without starting CUDA: safe before a fork.

    Raises
    ------
    CudaUnavailableError
        If there is no driver.
    """
    cdef int version = 0, status
    with nogil:
        status = kvbm_driver_version(&version)
    check(status, "looking for the NVIDIA driver")
    return version


def has_memcpy_batch():
    """Whether the driver has batched copies (CUDA 12.8 or later).  False without a driver; safe before a fork."""
    cdef int found
    with nogil:
        found = kvbm_has_memcpy_batch()
    return found != 0


def device_count():
    """Number of GPUs that this process may use.

    Raises
    ------
    CudaUnavailableError
        If there is no driver or no GPU.
    """
    cdef int count = 0, status
    with nogil:
        status = kvbm_device_count(&count)
    check(status, "counting GPUs")
    return count


def device_info(int device):
    """What the driver says about a GPU.

    Returns
    -------
    dict
        ``name`` (str), ``capability`` (major, minor), ``sms`` (multiprocessors), ``memory`` (bytes).
    """
    cdef char name[256]
    cdef int major = 0, minor = 0, sms = 0, status
    cdef uint64_t memory = 0
    memset(name, 0, sizeof(name))
    with nogil:
        status = kvbm_device_info(device, name, sizeof(name) - 1, &major, &minor, &sms, &memory)
    check(status, f"asking about cuda:{device}")
    return {
        "name": (<bytes> (<char *> name)).decode("utf-8", "replace"),
        "capability": (major, minor),
        "sms": sms,
        "memory": memory,
    }


def pointer_device(uint64_t address):
    """Device that an address lies on: its ordinal, -1 for ordinary host memory, -2 for pinned host memory."""
    cdef int device = -1, status
    with nogil:
        status = kvbm_pointer_device(address, &device)
    check(status, f"asking where address {address:#x} lies")
    return device
