# memory.pxi: Device and pinned memory, the copy engine's batches, and what the machine has.

def memcpy_batch(const uint64_t[::1] dst not None, const uint64_t[::1] src not None, sizes, int mode, int device,
                 uint64_t stream, bint merge=False, bint by_peer=False):
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
    by_peer : bool
        Some memory is another GPU's and not granted (`find_ungranted`): one call a copy, the one that is right for it.

    Returns
    -------
    int
        The mode that ran: 1 or 2.

    Raises
    ------
    BindError
        If the arrays differ in length.
    CudaError
        If a copy is refused; with mode 2, also where the driver has no batched copies, or none of the memory or in a
        capture.
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
        status = kvbm_memcpy_batch(&dst[0], &src[0], size_of, size, count, mode, merge, by_peer, device, stream,
                                   &used)
    check(status, f"copying {count} ranges on cuda:{device}")
    return used


def copy_now(const uint64_t[::1] dst not None, const uint64_t[::1] src not None, uint64_t size, int device):
    """Copy `size` bytes to each address of `dst` from that of `src`, and wait.

    It waits for no stream, and no stream waits for it: for sources that nothing else writes, and destinations that
    nothing else uses.

    Parameters
    ----------
    dst, src : contiguous uint64 array
        Addresses, device or pinned host memory.

    Raises
    ------
    BindError
        If the arrays differ in length.
    CudaError
        If a copy is refused.
    """
    cdef Py_ssize_t count = dst.shape[0]
    cdef int status
    if src.shape[0] != count:
        raise BindError(f"{src.shape[0]} source addresses: expected {count}, one a destination")
    if count == 0:
        return
    with nogil:
        status = kvbm_copy_now(device, &dst[0], &src[0], size, count)
    check(status, f"copying {count} pieces on cuda:{device}")


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


def ipc_handle(int device, uint64_t address):
    """What another process opens memory of `alloc_device` with: 64 bytes."""
    cdef bytearray handle = bytearray(KVBM_IPC_BYTES)
    check(kvbm_ipc_handle(device, address, <char*> handle), f"sharing memory of cuda:{device} with other processes")
    return bytes(handle)


def ipc_open(int device, bytes handle not None):
    """Map memory of another process for kernels of this GPU, on whichever GPU it lies; returns its address here."""
    cdef uint64_t address = 0
    cdef const char* data = handle
    cdef int status
    if len(handle) != KVBM_IPC_BYTES:
        raise BindError(f"ipc_open: expected a handle of {KVBM_IPC_BYTES} bytes, got {len(handle)}")
    with nogil:
        status = kvbm_ipc_open(device, data, &address)
    check(status, f"mapping memory of another process on cuda:{device}")
    return address


def ipc_close(int device, uint64_t address):
    """Unmap what `ipc_open` mapped, once no work uses it."""
    cdef int status
    with nogil:
        status = kvbm_ipc_close(device, address)
    check(status, f"unmapping memory of another process on cuda:{device}")


def fence():
    """A full memory fence: what this thread has written is seen by others before it reads anything behind the fence."""
    kvbm_fence()


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
