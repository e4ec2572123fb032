# tensors.pxi: Lists of torch tensors, read through DLPack's C interface.

# The fields of dlpack.h (1.3) that are needed to inspect a tensor.  They are the same in all versions 1.x.
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
    int (*look)(void *tensor, DLTensor *out) noexcept  # 0, or -1 with a Python exception; `out` borrows the memory
    int (*stream)(int32_t device_type, int32_t device_id, void **out) noexcept

cdef extern from *:
    """
    /* While one tensor is inspected, the next ones are prefetched: the object, and then the memory that its first
     * fields point to, which in torch is the tensor itself.  A wrong guess does no harm: a prefetch never faults. */
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
    FAR_AHEAD = 6   # prefetch the object of the tensor at this distance
    NEAR_AHEAD = 3  # prefetch the fields of the tensor at this distance

cdef dict DTYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
    (4, 16): "bfloat16", (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}

# Offsets, in bytes, of fields in torch's C++ objects.
cdef struct TorchFields:
    Py_ssize_t tensor   # in the Python object: pointer to the tensor
    Py_ssize_t storage  # in the tensor: pointer to the storage
    Py_ssize_t offset   # in the tensor: offset of its first item in the storage, in items
    Py_ssize_t data     # in the storage: address of its memory
    Py_ssize_t nbytes   # in the storage: its size

cdef TorchFields _torch_at
cdef bint _torch_known = False


cdef inline uint64_t _word(uint64_t at, Py_ssize_t offset) noexcept nogil:
    return (<uint64_t *> (at + <uint64_t> offset))[0]


def know_torch(fields):
    """Set the `TorchFields` that `kvbm.memory.liveness` has found."""
    global _torch_known
    _torch_at.tensor, _torch_at.storage, _torch_at.offset, _torch_at.data, _torch_at.nbytes = fields
    _torch_known = True


cdef bint _has_memory(tensor, const DLTensor *found) noexcept:
    """Whether the storage of a tensor, which may have been resized, has all bytes that its shape and strides span."""
    cdef uint64_t storage, begin, data
    cdef int64_t items = 1, dense = 1
    cdef int32_t axis
    if not _torch_known:
        return False  # the caller then inspects it in Python
    for axis in range(found.ndim - 1, -1, -1):
        if found.shape[axis] == 0:
            return True
        items += (found.shape[axis] - 1) * (dense if found.strides == NULL else found.strides[axis])
        dense *= found.shape[axis]
    storage = _word(_word(<uint64_t> <PyObject *> tensor, _torch_at.tensor), _torch_at.storage)
    if storage == 0:
        return False
    begin = <uint64_t> found.data + found.byte_offset
    data = _word(storage, _torch_at.data)
    return data != 0 and data <= begin and (
        begin + (<uint64_t> items * found.bits + 7) // 8 <= data + _word(storage, _torch_at.nbytes))


cdef dict _exchange_of = {}  # type -> capsule of its Exchange, or None


cdef Exchange *_exchange(kind) except? NULL:
    """The C functions of a type of torch tensors (``__dlpack_c_exchange_api__``), or NULL."""
    cdef Exchange *api
    capsule = _exchange_of.get(kind, _exchange_of)
    if capsule is _exchange_of:
        # Only for torch: this interface does not tell whether memory is read-only, and that of torch never is.
        torch = sys.modules.get("torch")
        capsule = None
        if issubclass(kind, getattr(torch, "Tensor", ())):  # not there while another thread imports torch
            capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
            if not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
                capsule = None
            else:
                from kvbm.memory.liveness import torch_fields
                torch_fields()
        _exchange_of[kind] = capsule
    if capsule is None:
        return NULL
    api = <Exchange *> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and api.major != 1:
        api = api.older
    return api if api != NULL and api.look != NULL else NULL


# The properties that all tensors of a list must have.
cdef struct Alike:
    PyTypeObject *kind  # the type of `api`, kept alive by _exchange_of
    Exchange *api
    uint8_t code, bits
    int32_t device_id, ndim
    int64_t shape[8]
    int64_t elements
    bint exact         # True: the shape must be equal; False: only the number of elements
    uint64_t together  # all addresses so far, combined with OR: its lowest set bit is their alignment


cdef int _look(tensor, Alike *want, DLTensor *found) except -1:
    """1 if the object is a contiguous CUDA tensor that can be inspected from C, else 0."""
    cdef int32_t i
    cdef int64_t dense = 1
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
        if found.strides != NULL and found.shape[i] != 1 and found.strides[i] != dense:
            return 0
        dense *= found.shape[i]
    want.elements = want.elements if want.elements else dense
    return dense == want.elements and dense > 0 and _has_memory(tensor, found)


cdef uint64_t _address(tensor, Alike *want) except? 0:
    """Address of a tensor with the properties `want`; 0 if it has others."""
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
    """A borrowed item of a list or tuple.  IndexError if it has become shorter."""
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
    """Set `want` to the properties of the first tensor.  Returns (sizes, dtype), or None."""
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


@cython.boundscheck(True)  # inspecting a tensor may run Python code, which may shorten the list
def whole_tensors(tensors, int rank):
    """Inspect a batch of tensors, one per block: of one shape and dtype, contiguous, and on one GPU.

    Parameters
    ----------
    tensors : list or tuple of tensors, or one tensor
        Tensors of ``rank`` axes, one per block; or one tensor of ``rank + 1`` axes with all blocks.
    rank : int
        Number of axes of a block.

    Returns
    -------
    tuple or None
        ``(Table, sizes, dtype, device, alignment)``.  None if a tensor differs, or cannot be inspected from C: the
        caller then inspects each in Python, and reports the error.
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
    """Inspect the chunks of a batch of blocks: all of one shape and dtype, contiguous, and on this GPU.

    Parameters
    ----------
    blocks : list or tuple of lists or tuples of tensors
        ``batch`` lists of ``chunks`` tensors; for one block also a flat list.
    batch, chunks : int
    shape : tuple of int
        Shape of a chunk.
    exact : bool
        False: only the number of elements must be that of `shape`.
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
    int64_t whole       # items of a contiguous tensor that may have any shape; 0: it must have this shape
    uint8_t code, bits  # DLPack's dtype, set at the first tensor


cdef int _read_kind(kind, Kind *out) except -1:
    """Read (shape, strides, dtype, whole).  0 if there are too many axes, else 1."""
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
    cdef int64_t dense = 1
    if found.ndim != kind.ndim:
        return False
    for axis in range(kind.ndim - 1, -1, -1):
        if found.shape[axis] != kind.shape[axis]:
            return False
        if kind.shape[axis] != 1 and (dense if found.strides == NULL else found.strides[axis]) != kind.strides[axis]:
            return False
        dense *= kind.shape[axis]
    return True


cdef bint _is_dense(const DLTensor *found, int64_t items) noexcept:
    """Whether a tensor is contiguous and has so many items, in any shape."""
    cdef int32_t axis
    cdef int64_t dense = 1
    for axis in range(found.ndim - 1, -1, -1):
        if found.strides != NULL and found.shape[axis] != 1 and found.strides[axis] != dense:
            return False
        dense *= found.shape[axis]
    return dense == items


@cython.boundscheck(True)
def strided_tensors(tensors, Py_ssize_t count, tuple kinds not None, const unsigned char[::1] which, str dtype not None,
                    int device, frozenset types=None, bint gradients=True):
    """Inspect one side of a copy: torch tensors, each of the shape and strides that its layout gives it.

    Parameters
    ----------
    tensors : list or tuple of tensors
    count : int
        Their expected number.
    kinds : tuple of (tuple of int, tuple of int, str, int)
        Up to 16 tuples of shape, strides in items, dtype if it is not `dtype`, and the number of items of a contiguous
        tensor that may have any shape, else 0.  Strides of axes of one item are ignored.
    which : bytes or None
        The index in `kinds` of each tensor; None: `kinds` has one.
    dtype : str
    device : int
        CUDA device ordinal, -1 for the host.
    types : frozenset of type, optional
        The allowed types of tensors.
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
        if address == 0 or not _has_memory(tensor, &found):
            return None
        table.addresses[i] = address
        want.together |= address
    return table, _alignment(want.together)


def tables_clash(Table src not None, uint64_t src_bytes, Table dst not None, uint64_t dst_bytes):
    """Whether two allocations of the destination overlap, or one of the destination and one of the source.

    Parameters
    ----------
    src, dst : Table
    src_bytes, dst_bytes : int
        Bytes of each allocation.
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
    """Fill `out` with addresses: for each of the table, those of its pieces, `step` bytes from piece to piece."""
    cdef Py_ssize_t pieces = out.shape[0] // max(table.count, 1), i, k
    if pieces * table.count != out.shape[0]:
        raise BindError(f"{out.shape[0]} pieces of {table.count} allocations: expected as many of each")
    for i in range(table.count):
        for k in range(pieces):
            out[i * pieces + k] = table.addresses[i] + k * step
