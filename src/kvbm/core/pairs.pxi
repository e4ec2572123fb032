# pairs.pxi: Copies of pairs of addresses.

def check_pairs(const uint64_t[::1] src not None, const uint64_t[::1] dst not None, sizes):
    """Refuse copies with overlapping bytes, and address 0.

    Parameters
    ----------
    src, dst : contiguous uint64 array
        Addresses of each copy.
    sizes : contiguous uint64 array or int
        Bytes of each copy, or of every copy.  Copies of 0 bytes are ignored.

    Raises
    ------
    BindError
        A byte is written twice, or both read and written, or an address is 0.  The message names the positions.
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
    """Find the GPU of addresses.

    Parameters
    ----------
    addresses : contiguous uint64 array
    what : str
        Their name in error messages.

    Returns
    -------
    tuple
        The device of the first address that is on a GPU, or -2 if all are in pinned host memory; and an int with a bit
        for each GPU that has some of them.

    Raises
    ------
    BindError
        An address is in memory that no GPU can access.
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
    """Copy the same number of bytes from each source to its destination with one kernel, in the order of the stream.

    Parameters
    ----------
    src, dst : contiguous uint64 array
        Addresses that the device can access, already checked (see `check_pairs`).  They are copied before the call
        returns.
    size : int
        Bytes of every copy.
    device : int
        CUDA device ordinal, where the kernel runs.
    stream : int
        Handle of the stream.

    Raises
    ------
    BindError
        The arrays differ in length.
    CudaError
        The launch fails.
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
