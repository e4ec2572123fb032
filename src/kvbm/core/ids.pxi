# ids.pxi: The block ids of a copy: read from any kind of object, checked, and stored as 32 bits.

cdef struct Given:
    const void *data  # ids in host memory, or NULL
    uint64_t device   # or their address on a GPU, or 0
    Py_ssize_t count  # -1: no ids were given, so they are 0, 1, 2, ...
    uint32_t nbytes   # of an id: 4 or 8, signed
    int64_t few[64]   # memory for converted ids, if they are no array of int32 or int64
    int64_t *more     # the same for more than 64 ids
    Py_buffer buffer
    bint has_buffer
    bint by_fields    # `data` is what an array of NumPy has now: code of Python's may change that


cdef void _drop(Given *ids) noexcept:
    free(ids.more)
    ids.more = NULL
    if ids.has_buffer:
        PyBuffer_Release(&ids.buffer)
        ids.has_buffer = False


@cython.no_gc  # one is made per copy, and what it keeps alive never refers to it
@cython.final
cdef class Pairs:
    """The blocks of one copy: block ``src_ids[i]`` goes into block ``dst_ids[i]``.

    Each id is read once, into memory of this object: what is checked is what is copied.

    Parameters
    ----------
    src_ids, dst_ids : None, int, sequence of int, array or tensor of one axis
        None means 0, 1, 2, …; -1 skips a pair.  Ids on a GPU are int32 or int64, and the kernel reads them when it
        runs.
    src_blocks, dst_blocks : int
        Number of blocks of each pool.
    same_pool : bool
        Whether both pools share memory: then a block may not be both read and written.
    device : int
        CUDA device whose kernels read the ids; -1: the host, and ids on a GPU are refused.

    Raises
    ------
    BindError
        Ids that are not integers of one axis, that are out of range, repeated in the destination, or both read and
        written; or the two sides have different numbers of ids.
    """

    cdef kvbm_side src, dst  # without tables
    cdef readonly uint32_t count
    cdef readonly uint32_t kept
    """Pairs that are not skipped, counting only ids in host memory."""
    cdef uint32_t id_bytes   # of ids on the GPU
    cdef int32_t few[128]    # the ids of both sides
    cdef int32_t *more       # the same for more than 64 pairs
    cdef object keep         # owners of ids on the GPU

    def __cinit__(self):
        self.more = NULL
        self.count = self.kept = self.id_bytes = 0
        memset(&self.src, 0, sizeof(kvbm_side))
        memset(&self.dst, 0, sizeof(kvbm_side))

    def __init__(self, src_ids, dst_ids, int64_t src_blocks, int64_t dst_blocks, bint same_pool=False, int device=-1):
        if self.count:
            raise TypeError("Pairs are initialised once")
        self.take(src_ids, dst_ids, src_blocks, dst_blocks, same_pool, device)

    def __dealloc__(self):
        free(self.more)

    def __len__(self):
        return self.count

    def ids(self):
        """Source and destination ids; None for ids on a GPU."""
        return _listed(&self.src, self.count), _listed(&self.dst, self.count)

    cdef bint on_device(self) noexcept:
        return self.src.ids_device != 0 or self.dst.ids_device != 0

    cdef int take(self, src_ids, dst_ids, int64_t src_blocks, int64_t dst_blocks, bint same_pool,
                  int device) except -1:
        cdef Given src, dst
        src.more = dst.more = NULL
        src.has_buffer = dst.has_buffer = False
        try:
            keep_src = _read(&src, src_ids, "src_ids", src_blocks, device)
            keep_dst = _read(&dst, dst_ids, "dst_ids", dst_blocks, device)
            if src.by_fields and not _read_numpy(&src, src_ids):
                _read_buffer(&src, src_ids, "src_ids", src_blocks)
            self._count(src.count, dst.count, src_blocks, dst_blocks)
            if src.device and dst.device and src.nbytes != dst.nbytes:
                raise BindError(
                    f"ids: src_ids have {src.nbytes * 8} bits and dst_ids {dst.nbytes * 8}; on the device expected one "
                    "width"
                )
            if src.device or dst.device:
                self.id_bytes = src.nbytes if src.device else dst.nbytes
                self.keep = keep_src, keep_dst
            if self.count > 64:
                self.more = <int32_t *> malloc(2 * sizeof(int32_t) * self.count)
                if self.more == NULL:
                    raise MemoryError(f"{self.count} pairs of block ids")
            self._take_side(&self.src, &src, 0, "src_ids", src_blocks)
            if src_ids is dst_ids and src_blocks <= dst_blocks:
                self.dst = self.src
                self.dst.blocks = <uint32_t> min(max(dst_blocks, 0), INDEX_LIMIT)
            else:
                self._take_side(&self.dst, &dst, self.count, "dst_ids", dst_blocks)
        finally:
            _drop(&src)
            _drop(&dst)
        return self._check(dst_blocks, same_pool and not self.on_device())

    cdef int _count(self, Py_ssize_t src, Py_ssize_t dst, int64_t src_blocks, int64_t dst_blocks) except -1:
        cdef int64_t n = src if src >= 0 else dst if dst >= 0 else src_blocks
        if src >= 0 and dst >= 0 and src != dst:
            raise BindError(f"ids: expected as many source as destination ids, got {src} and {dst}")
        if src < 0 and dst < 0 and src_blocks != dst_blocks:
            raise BindError(
                f"ids: source and destination hold {src_blocks} and {dst_blocks} blocks; say which by src_ids and "
                "dst_ids"
            )
        if n < 0 or n > INDEX_LIMIT:
            raise BindError(f"{n} pairs of blocks: expected 0 to {INDEX_LIMIT}")
        self.count = <uint32_t> n
        return 0

    cdef int _take_side(self, kvbm_side *side, Given *given, uint32_t first, str what, int64_t blocks) except -1:
        cdef int64_t index = 0, id = 0
        cdef int32_t *out = self.more
        side.blocks = <uint32_t> min(max(blocks, 0), INDEX_LIMIT)
        if self.count == 0:
            return 0
        if out == NULL:
            out = self.few
        out += first
        if given.device:
            side.ids_device = given.device
        elif given.count < 0:
            if self.count > blocks:
                _refuse_range(what, max(blocks, 0), max(blocks, 0), blocks)
        else:
            side.ids = out
            if kvbm_take_ids(given.data, given.nbytes, self.count, blocks, out, &index, &id) != KVBM_ID_OK:
                _refuse_range(what, index, id, blocks)
        return 0

    cdef int _check(self, int64_t dst_blocks, bint same_pool) except -1:
        cdef int64_t index = 0, first = 0
        cdef int found
        cdef const int32_t *src = self.src.ids
        cdef const int32_t *dst = self.dst.ids
        if self.count > 1024:
            with nogil:
                found = kvbm_check_ids(src, dst, self.count, dst_blocks, same_pool, &self.kept, &index)
        else:
            found = kvbm_check_ids(src, dst, self.count, dst_blocks, same_pool, &self.kept, &index)
        if found == KVBM_ID_OK:
            return 0
        if found < 0:
            check(found, f"checking {self.count} pairs of block ids")
        if found == KVBM_ID_DST_TWICE:
            id = dst[index]
            while dst[first] != id or (src != NULL and src[first] == -1):
                first += 1
            raise BindError(
                f"dst_ids[{index}] is {id}, as is dst_ids[{first}]: expected every destination once a batch"
            )
        id = index if src == NULL else src[index]
        raise BindError(
            f"src_ids[{index}] is {id}, which is also a destination of this batch: expected no block of one pool to be "
            "both read and written (split the batch)"
        )


cdef object _listed(const kvbm_side *side, uint32_t count):
    cdef uint32_t i
    if side.ids_device:
        return None
    return [i if side.ids == NULL else side.ids[i] for i in range(count)]


@cython.final
cdef class Positions:
    """The positions of the first tokens of blocks in their sequences, for digests.

    Parameters
    ----------
    given : int, sequence of int, array or tensor of one axis
        One for all, or one for each.  Positions on a GPU are int32 or int64, and the kernel reads them when it runs.
    count : int
        How many blocks.
    device : int
        CUDA device whose kernels read them; -1: the host.

    Raises
    ------
    BindError
        They are not integers, are below 0, or their number is not `count`.
    """

    cdef int64_t *on_host
    cdef uint64_t on_device
    cdef uint32_t nbytes  # of a position on the GPU
    cdef object keep

    def __cinit__(self):
        self.on_host = NULL
        self.on_device = 0
        self.nbytes = 0

    def __init__(self, given, uint32_t count, int device=-1):
        cdef Given read
        cdef uint32_t i
        cdef int64_t one
        if self.on_host != NULL or self.on_device:
            raise TypeError("Positions are initialised once")
        read.more = NULL
        read.has_buffer = False
        try:
            keep = _read(&read, given, "tokens", INDEX_LIMIT, device)
            single = read.count == 1 and not read.device and not hasattr(given, "__len__")
            if read.count != count and not single:
                raise BindError(f"tokens: expected {count}, the position of each block's first token, got {read.count}")
            if read.device:
                self.on_device, self.nbytes, self.keep = read.device, read.nbytes, keep
                return
            self.on_host = <int64_t *> malloc((<size_t> count + 1) * sizeof(int64_t))
            if self.on_host == NULL:
                raise MemoryError(f"{count} positions")
            for i in range(count):
                if read.nbytes == 4:
                    one = (<const int32_t *> read.data)[0 if single else i]
                else:
                    one = (<const int64_t *> read.data)[0 if single else i]
                if one < 0:
                    raise BindError(f"tokens[{i}] is {one}: expected a position from 0 on")
                self.on_host[i] = one
        finally:
            _drop(&read)

    def __dealloc__(self):
        free(self.on_host)


def blocks_fit(const int64_t[::1] table not None, int64_t blocks, bint once):
    """Whether a block table has only blocks below `blocks`, and -1; with `once`, also no block twice."""
    cdef Py_ssize_t count = table.shape[0], i
    cdef int64_t index = 0
    cdef uint32_t kept = 0
    cdef int32_t *ids
    cdef int found
    for i in range(count):
        if not -1 <= table[i] < blocks:
            return False
    if not once or count < 2:
        return True
    if count > INDEX_LIMIT or blocks > INDEX_LIMIT:
        raise BindError(f"a table of {count} blocks: expected at most {INDEX_LIMIT}")
    ids = <int32_t *> malloc(count * sizeof(int32_t))
    if ids == NULL:
        raise MemoryError(f"{count} block ids")
    for i in range(count):
        ids[i] = <int32_t> table[i]
    found = kvbm_check_ids(NULL, ids, <uint32_t> count, blocks, False, &kept, &index)
    free(ids)
    if found < 0:
        check(found, f"checking {count} block ids")
    return found == KVBM_ID_OK


cdef int _refuse_range(str what, int64_t index, id, int64_t blocks) except -1:
    if what == "tokens":
        raise BindError(f"tokens[{index}] is {id}: expected a position below 2**63")
    if blocks <= 0:
        raise BindError(f"{what}[{index}] is {id}: the pool has no blocks")
    raise BindError(
        f"{what}[{index}] is {id}: expected 0 to {blocks - 1} (the pool's blocks, or units), or -1 to skip the pair"
    )


# ---- reading ------------------------------------------------------------------------------------------------------

cdef enum IdsKind:
    ITEMS = 1  # list or tuple
    NUMBER     # int
    NUMPY      # numpy.ndarray itself, whose fields are where NumpyArray has them
    BUFFER     # other arrays of NumPy, array.array, memoryview
    TENSOR     # torch
    ON_GPU     # __cuda_array_interface__
    ARRAY      # __array__
    SEQUENCE   # range and the like
    NEITHER

cdef dict _kind_of_ids = {list: ITEMS, tuple: ITEMS, int: NUMBER}  # type -> IdsKind


# NumPy's own descriptors of int32 and int64, which their arrays have: others go through a buffer.
cdef PyObject *_descriptors[2]
_descriptors[0] = _descriptors[1] = NULL


cdef bint _is_numpy(kind) except -1:
    """Whether it is numpy.ndarray, and its arrays can be read by their fields."""
    numpy = sys.modules.get("numpy")
    if numpy is None or kind is not getattr(numpy, "ndarray", None):  # not there while another thread imports NumPy
        return False
    from kvbm.memory.liveness import numpy_fits

    if not numpy_fits():
        return False
    global _kept_descriptors
    _kept_descriptors = numpy.dtype("int32"), numpy.dtype("int64")
    _descriptors[0], _descriptors[1] = <PyObject *> _kept_descriptors[0], <PyObject *> _kept_descriptors[1]
    return True


cdef bint _read_numpy(Given *ids, object given) noexcept:
    """A dense axis of aligned int32 or int64, as it is.  Else False."""
    cdef const NumpyArray *array = <const NumpyArray *> (<char *> <PyObject *> given + sizeof(PyObject))
    cdef uint32_t nbytes = 4 if array.descr == _descriptors[0] else 8
    ids.by_fields = False
    if array.nd != 1 or (nbytes == 8 and array.descr != _descriptors[1]) or <uint64_t> array.data % nbytes:
        return False
    if array.strides[0] != <Py_ssize_t> nbytes and array.dimensions[0] != 1:
        return False
    ids.data, ids.count, ids.nbytes, ids.by_fields = array.data, array.dimensions[0], nbytes, True
    return True


cdef int _is_on_gpu(given, str what) except -1:
    try:
        return hasattr(given, "__cuda_array_interface__")
    except Exception as error:  # code of the object may raise anything
        raise BindError(
            f"{what}: expected integers, got a {type(given).__name__} that cannot be read: {error!r}"
        ) from None


#: They have items that are no ids: characters, truth values.
_NO_IDS = (str, bytes, bytearray, bool)


cdef bint _is_time(kind) except -1:
    """Whether it is a class of NumPy's times, whose bytes are no ids.  NumPy is not imported for that."""
    numpy = sys.modules.get("numpy")
    return issubclass(kind, (getattr(numpy, "datetime64", ()), getattr(numpy, "timedelta64", ())))


cdef int _ids_kind(given, str what) except -1:
    kind = type(given)
    found = NEITHER
    if issubclass(kind, _NO_IDS) or hasattr(kind, "filled") or _is_time(kind):  # "filled": masked arrays
        pass
    elif hasattr(kind, "is_cuda") and hasattr(kind, "data_ptr"):
        found = TENSOR
    elif _is_on_gpu(given, what):
        found = ON_GPU
    elif PyObject_CheckBuffer(given):
        found = NUMPY if _is_numpy(kind) else BUFFER
    elif hasattr(kind, "__array__"):
        found = ARRAY
    elif hasattr(kind, "__index__"):
        found = NUMBER
    elif hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not hasattr(kind, "keys"):
        found = SEQUENCE
    _kind_of_ids[kind] = found
    return found


cdef object _read(Given *ids, object given, str what, int64_t blocks, int device):
    """Find the ids in an object of any kind.  Returns the object that must stay alive while they are read."""
    ids.data = NULL
    ids.device, ids.count, ids.nbytes, ids.by_fields = 0, -1, 8, False
    if given is None:
        return None
    known = _kind_of_ids.get(type(given))
    cdef int kind = _ids_kind(given, what) if known is None else known
    if kind == ITEMS or kind == NUMBER:
        items = given if kind == ITEMS else (given,)
        if not _read_ints(ids, items):
            _read_items(ids, tuple(items), what, blocks)
    elif kind == NUMPY:
        if not _read_numpy(ids, given):
            _read_buffer(ids, given, what, blocks)
    elif kind == BUFFER:
        _read_buffer(ids, given, what, blocks)
    elif kind == TENSOR:
        return _read_tensor(ids, given, what, blocks, device)
    elif kind == ON_GPU:
        return _read_device(ids, given, what, device)
    elif kind == ARRAY:
        _read_buffer(ids, given.__array__(), what, blocks)
    elif kind == SEQUENCE:
        _read_items(ids, tuple(given), what, blocks)
    else:
        _refuse_kind(what, type(given).__name__)
    return given


cdef int _refuse_kind(str what, got) except -1:
    raise BindError(f"{what}: expected integers, got {got}")


cdef int64_t *_room(Given *ids, Py_ssize_t count) except NULL:
    ids.count = count
    ids.data = ids.few
    if count > 64:
        ids.more = <int64_t *> malloc(count * sizeof(int64_t))
        if ids.more == NULL:
            raise MemoryError(f"{count} block ids")
        ids.data = ids.more
    return <int64_t *> ids.data


cdef PyTypeObject *_int_type = <PyTypeObject *> <PyObject *> int

cdef extern from "Python.h":  # as `cpython.list` and `cpython.tuple` have them, but for the borrowed reference
    PyObject *PyList_GetItem(list items, Py_ssize_t index) except NULL
    PyObject *PyTuple_GetItem(tuple items, Py_ssize_t index) except NULL


cdef bint _read_ints(Given *ids, object given) except -1:
    """Read a list or tuple of ints, without running Python code.  False if an item is not an int of 64 bits."""
    cdef Py_ssize_t count = len(given), i
    cdef int64_t *out = _room(ids, count)
    cdef PyObject *item
    try:
        if type(given) is list:
            for i in range(count):
                item = PyList_GetItem(<list> given, i)
                if Py_TYPE(<object> item) != _int_type:
                    raise TypeError
                out[i] = PyLong_AsLongLong(<object> item)
        else:
            for i in range(count):
                item = PyTuple_GetItem(<tuple> given, i)
                if Py_TYPE(<object> item) != _int_type:
                    raise TypeError
                out[i] = PyLong_AsLongLong(<object> item)
    except (OverflowError, TypeError):
        free(ids.more)
        ids.more = NULL
        return False
    return True


cdef int _read_items(Given *ids, tuple items, str what, int64_t blocks) except -1:
    cdef Py_ssize_t i
    cdef int64_t *out = _room(ids, len(items))
    for i in range(len(items)):
        item = items[i]
        try:
            if isinstance(item, bool):
                raise TypeError
            item = PyNumber_Index(item)
        except (TypeError, ValueError):
            raise BindError(f"{what}[{i}]: expected an integer, got {type(item).__name__}") from None
        try:
            out[i] = PyLong_AsLongLong(item)
        except OverflowError:
            _refuse_range(what, i, "an integer of more than 64 bits", blocks)
    return 0


cdef bint _is_plain(const Py_buffer *buffer) noexcept:
    """Whether the items are aligned int32 or int64 in the byte order of this machine."""
    cdef const char *code = buffer.format
    if code == NULL or (buffer.itemsize != 4 and buffer.itemsize != 8) or <uint64_t> buffer.buf % buffer.itemsize:
        return False
    if code[0] == c"@" or code[0] == c"=" or code[0] == c"<":
        code += 1
    return code[0] != 0 and code[1] == 0 and code[0] in (c"i", c"l", c"q", c"n")


cdef int _read_buffer(Given *ids, object given, str what, int64_t blocks) except -1:
    cdef Py_ssize_t i, count, step
    cdef int64_t *out
    cdef const char *at
    try:
        PyObject_GetBuffer(given, &ids.buffer, PyBUF_STRIDES | PyBUF_FORMAT)
    except (BufferError, TypeError, ValueError) as error:
        _refuse_kind(what, f"a {type(given).__name__} that cannot be read: {error}")
    ids.has_buffer = True
    if ids.buffer.ndim > 1:
        _refuse_axes(what, tuple([ids.buffer.shape[i] for i in range(ids.buffer.ndim)]))
    count = ids.buffer.shape[0] if ids.buffer.ndim else 1
    step = 0
    if ids.buffer.ndim:  # without strides (ctypes) the items are contiguous
        step = ids.buffer.strides[0] if ids.buffer.strides != NULL else ids.buffer.itemsize
    ids.count = count
    if count == 0:
        return 0
    if _is_plain(&ids.buffer) and (count == 1 or step == ids.buffer.itemsize):  # fast: no Python string is made
        ids.data = ids.buffer.buf
        ids.nbytes = <uint32_t> ids.buffer.itemsize
        return 0
    code = (<bytes> ids.buffer.format).decode("ascii", "replace") if ids.buffer.format != NULL else "B"
    swapped = code[0] in ">!" and ids.buffer.itemsize > 1
    code = code.lstrip("@=<>!^")
    signed = code in ("b", "h", "i", "l", "q", "n")
    if not signed and code not in ("B", "H", "I", "L", "Q", "N"):
        _refuse_kind(what, f"dtype {getattr(given, 'dtype', code)}")
    out = _room(ids, count)
    at = <const char *> ids.buffer.buf
    order = "big" if swapped else "little"
    for i in range(count):
        number = int.from_bytes((at + i * step)[:ids.buffer.itemsize], order, signed=signed)
        if number > 0x7FFFFFFFFFFFFFFF:
            _refuse_range(what, i, number, blocks)
        out[i] = number
    return 0


cdef int _refuse_axes(str what, tuple shape) except -1:
    raise BindError(f"{what}: expected one axis, got shape {shape}")


cdef str NOT_HELD = "it is the negative of what its memory holds (pass .resolve_neg()), or its storage was resized"


cdef bint _holds(object given, int64_t items, int64_t width) except -1:
    """Whether the memory of a tensor has its values: it is not a lazy negative, and its storage has all `items`."""
    return (not given.is_neg() and
            (<int64_t> given.storage_offset() + items) * width <= <int64_t> given.untyped_storage().nbytes())


cdef object _read_tensor(Given *ids, object given, str what, int64_t blocks, int device):
    cdef DLTensor found
    cdef Exchange *api = _exchange(type(given))
    try:
        if api != NULL and api.look(<PyObject *> given, &found) != 0:
            PyErr_Clear()
        elif (api != NULL and found.ndim == 1 and (found.device_type == KDL_CPU or found.device_type == KDL_CUDA_HOST)
                and found.code == 0 and (found.bits == 64 or found.bits == 32) and found.lanes == 1
                and (found.strides == NULL or found.strides[0] == 1 or found.shape[0] < 2)
                and (<uint64_t> found.data + found.byte_offset) % (found.bits // 8) == 0
                and (found.data != NULL or found.shape[0] == 0) and _holds(given, found.shape[0], found.bits // 8)):
            ids.data = <const char *> found.data + found.byte_offset
            ids.count, ids.nbytes = found.shape[0], found.bits // 8
            return given
        if given.is_cuda:
            return _read_device(ids, given, what, device)
        if given.dim() > 1:
            _refuse_axes(what, tuple(given.shape))
        if not _holds(given, given.numel() and 1 + (given.numel() - 1) * (given.stride(0) if given.dim() else 0),
                      given.element_size()):
            raise RuntimeError(NOT_HELD)
        array = given.detach().numpy()
    except (RuntimeError, TypeError) as error:
        _refuse_kind(what, f"a {given.dtype} tensor on {given.device} that cannot be read: {error}")
    _read_buffer(ids, array, what, blocks)
    return array


cdef object _read_device(Given *ids, object given, str what, int device):
    cdef int index = -1, status
    cdef uint64_t address
    if hasattr(type(given), "data_ptr"):
        shape, strides, dtype = tuple(given.shape), tuple(given.stride()), str(given.dtype).rpartition(".")[2]
        address, index = given.data_ptr(), given.device.index or 0
        width = {"int64": 8, "int32": 4}.get(dtype, 0)
        dense = len(shape) == 1 and (shape[0] < 2 or strides[0] == 1)
        if dense and not _holds(given, shape[0], width):
            _refuse_kind(what, f"a tensor that cannot be read: {NOT_HELD}")
    else:
        try:
            interface = given.__cuda_array_interface__
            shape, dtype, address = tuple(interface["shape"]), interface["typestr"], interface["data"][0]
            strides = interface.get("strides")
            width = {"i8": 8, "i4": 4}.get(dtype[1:], 0) if dtype[0] != ">" else 0
            dense = len(shape) == 1 and (shape[0] < 2 or strides is None or strides[0] == width)
            where = getattr(given, "device", None)
            where = getattr(where, "id", where)
            if isinstance(where, int):
                index = where
        except Exception as error:  # code of the object may raise anything
            raise BindError(f"{what}: malformed __cuda_array_interface__: {error!r}") from None
    if device < 0:
        raise BindError(
            f"{what}: expected ids in host memory, got a {type(given).__name__} on a GPU; pass {what}.cpu()"
        )
    if len(shape) != 1 or not width:
        raise BindError(f"{what}: expected one axis of int32 or int64, got shape {shape} of {dtype}")
    if not dense:
        raise BindError(f"{what}: expected contiguous ids; call .contiguous()")
    if index < 0 and shape[0]:
        with nogil:
            status = kvbm_pointer_device(address, &index)
        check(status, f"asking where {what} lie")
    if shape[0] and max(index, 0) != device:
        raise BindError(
            f"{what}: the ids are on cuda:{max(index, 0)}, the copy's kernel on cuda:{device}; pass them from there"
        )
    ids.device, ids.count, ids.nbytes = address, shape[0], width
    return given
