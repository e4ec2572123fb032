# memory.pxi: Device memory and pinned memory, batches of the copy engine, and queries about the machine.

def memcpy_batch(const uint64_t[::1] dst not None, const uint64_t[::1] src not None, sizes, int mode, int device,
                 uint64_t stream, bint merge=False, bint by_peer=False):
    """Copy many ranges of bytes with the copy engines, in the order of the stream.  Does not wait for them.

    Parameters
    ----------
    dst, src : contiguous uint64 array
        Addresses of device memory or pinned host memory.
    sizes : contiguous uint64 array or int
        Bytes of each copy, or of every copy.
    mode : int
        0: one batched call if the driver and the stream allow it, else one call per copy; 1: one call per copy;
        2: batched, or an error.
    device : int
        CUDA device ordinal.
    stream : int
        Handle of the stream.
    merge : bool
        Make one copy of adjacent ones: both its source and its destination start where those of the previous copy end.
    by_peer : bool
        Some memory is on another GPU and not granted (`find_ungranted`): one call per copy, of the kind that can copy
        it.

    Returns
    -------
    int
        The mode that ran: 1 or 2.

    Raises
    ------
    BindError
        The arrays differ in length.
    CudaError
        The driver refuses a copy.  With mode 2 also if it has no batched copies, or none for this memory or in a
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
    """Copy `size` bytes from each address of `src` to that of `dst`, and wait.

    The copies are not ordered with any stream.  Nothing else may write the sources or use the destinations meanwhile.

    Parameters
    ----------
    dst, src : contiguous uint64 array
        Addresses of device memory or pinned host memory.

    Raises
    ------
    BindError
        The arrays differ in length.
    CudaError
        The driver refuses a copy.
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
    """Free memory of `alloc_device`; waits for work that may still use it.  Address 0 is ignored."""
    cdef int status
    with nogil:
        status = kvbm_free_device(device, address)
    check(status, f"freeing memory on cuda:{device}")


def ipc_handle(int device, uint64_t address):
    """The handle, 64 bytes, with which another process opens memory of `alloc_device`."""
    cdef bytearray handle = bytearray(KVBM_IPC_BYTES)
    check(kvbm_ipc_handle(device, address, <char*> handle), f"sharing memory of cuda:{device} with other processes")
    return bytes(handle)


def ipc_open(int device, bytes handle not None):
    """Map memory of another process, on any GPU, for kernels on this GPU; returns its address in this process."""
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
    """Unmap memory of `ipc_open`.  No work may still use it."""
    cdef int status
    with nogil:
        status = kvbm_ipc_close(device, address)
    check(status, f"unmapping memory of another process on cuda:{device}")


def fence():
    """A full memory fence: earlier stores of this thread are visible to others before its later loads."""
    kvbm_fence()


def host_touch(uint64_t address, uint64_t nbytes, int how=0, int threads=1):
    """Allocate host pages now, on several threads, instead of at their first use.

    Parameters
    ----------
    address, nbytes : int
        Whole pages.
    how : int
        0: new memory, which is cleared; 1: memory with contents, which are kept, for writing; 2: the same for memory
        that may only be read.
    threads : int
        Most threads.

    Raises
    ------
    MemoryError
        With how=0: there is not enough memory.  1 and 2 do not fail.
    """
    cdef int status
    with nogil:
        status = kvbm_host_touch(address, nbytes, how, threads)
    check(status, f"touching {nbytes} bytes at {address:#x}")


def host_register(uint64_t address, uint64_t nbytes, bint read_only=False):
    """Page-lock host memory so that all GPUs can access it; `host_unregister` undoes it.

    Parameters
    ----------
    address, nbytes : int
        Whole pages, none of them page-locked yet.
    read_only : bool
        GPUs only read it.  Required for memory that may not be written.
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
    """Begin and end of the memory around an address.

    Parameters
    ----------
    address : int
    pinned : bool
        True: pinned host memory.  False: GPU memory.

    Returns
    -------
    tuple of two ints
        Of the allocation or registration; ``(0, 0)`` if the address is not in such memory; ``(address, address + 1)``
        if the driver does not tell the range.
    """
    cdef uint64_t begin = 0, end = 0
    cdef int status
    with nogil:
        status = kvbm_memory_range(address, pinned, &begin, &end)
    check(status, f"asking what memory address {address:#x} is in")
    return begin, end


def synchronize(int device, uint64_t stream=0):
    """Wait until all work on a stream is done; raises `CudaError` if some of it failed."""
    cdef int status
    with nogil:
        status = kvbm_synchronize(device, stream)
    check(status, f"waiting for a stream of cuda:{device}")


# ---- the machine --------------------------------------------------------------------------------------------------

def driver_version():
    """CUDA version of the driver, such as 13000 for 13.0.

    Does not start CUDA, so it is safe before a fork.

    Raises
    ------
    CudaUnavailableError
        There is no driver.
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
        There is no driver or no GPU.
    """
    cdef int count = 0, status
    with nogil:
        status = kvbm_device_count(&count)
    check(status, "counting GPUs")
    return count


def device_info(int device):
    """Properties of a GPU.

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
    """Device of an address: its ordinal, -1 for other host memory, -2 for pinned host memory."""
    cdef int device = -1, status
    with nogil:
        status = kvbm_pointer_device(address, &device)
    check(status, f"asking where address {address:#x} lies")
    return device
