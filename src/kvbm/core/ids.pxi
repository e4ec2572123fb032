# ids.pxi: Block ids: lists, arrays and tensors as 64-bit integers, and the rules for pairs of them.

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
