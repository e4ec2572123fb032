# watch.pxi: Before each copy, checks that the arrays of a pool still have the memory that they were bound with.  Keeps
# that memory until the call has ended.

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)

cdef extern from *:
    """
    static inline void kvbm_users_add(int *users, int more) { __atomic_fetch_add(users, more, __ATOMIC_ACQ_REL); }
    static inline int kvbm_users(const int *users) { return __atomic_load_n(users, __ATOMIC_ACQUIRE); }
    """
    void kvbm_users_add(int *users, int more) noexcept nogil
    int kvbm_users(const int *users) noexcept nogil


cdef enum WatchedKind:
    BY_NOTHING = 0  # not checked here: there is no cheap way (`Pool.check` checks it)
    BY_NUMPY        # numpy.ndarray
    BY_TORCH        # torch.Tensor, by its `TorchFields`
    BY_OWNER        # checked in Python by `kvbm.memory.liveness`, before each copy

cdef enum:
    NUMPY_WRITEABLE = 0x0400  # NPY_ARRAY_WRITEABLE

# The first fields of NumPy's PyArrayObject, which is part of its binary interface.
cdef struct NumpyArray:
    char *data
    int nd
    Py_ssize_t *dimensions
    Py_ssize_t *strides
    void *base
    PyObject *descr
    int flags

cdef struct Watched:
    char *array
    int kind
    uint64_t words[5]  # torch: tensor, storage, offset, data, nbytes; NumPy: data, and a hash of the shape


cdef inline NumpyArray *_numpy_fields(const Watched *one) noexcept nogil:
    return <NumpyArray *> (one.array + sizeof(PyObject))


cdef inline uint64_t _sizes(const NumpyArray *array) noexcept nogil:
    cdef uint64_t mixed = array.nd
    cdef int i
    for i in range(array.nd):
        mixed = mixed * 1000003 + <uint64_t> array.dimensions[i]
    return mixed


cdef inline bint _is_same(const Watched *one, const TorchFields *at) noexcept nogil:
    # A pointer is followed only if it has not changed.  Then the object that it points to is alive.  `Foreseen` reads
    # so without Python's lock: who replaces the storage of a tensor during a receive may be seen late.
    if one.kind == BY_TORCH:
        return (_word(<uint64_t> one.array, at.tensor) == one.words[0]
                and _word(one.words[0], at.storage) == one.words[1]
                and _word(one.words[0], at.offset) == one.words[2]
                and _word(one.words[1], at.data) == one.words[3]
                and _word(one.words[1], at.nbytes) == one.words[4])
    if one.kind == BY_NUMPY:
        return (<uint64_t> _numpy_fields(one).data == one.words[0]
                and _sizes(_numpy_fields(one)) == one.words[1])
    return one.kind == BY_NOTHING


cdef inline void lock_in_python(uint32_t *lock) noexcept:
    """`kvbm_lock` for a thread that holds Python's lock.

    It lets Python's lock go while it waits: another thread may hold `lock` during a launch, which may wait for the GPU,
    and that may wait for a thread of Python.
    """
    while not kvbm_try_lock(lock):
        with nogil:
            kvbm_lock(lock)
            kvbm_unlock(lock)


@cython.final
cdef class Watch:
    """The arrays of a pool, with the addresses and sizes of their memory at the last check.

    All arrays are compared before each copy: a few loads for each, and no call.  If one differs, `Pool.require_open`
    checks it in Python.  It raises an error, or records the new state with `note`.

    Parameters
    ----------
    pool : weakref to Pool
        Its `require_open` and `require_writable` are called if an array differs.
    arrays : list
        They are kept alive.
    kinds : bytes
        The `WatchedKind` of each: 0 not checked, 1 NumPy, 2 torch, 3 checked in Python.
    fields : tuple of 5 ints or None
        See `TorchFields`; required for kind 2.
    versioned : list of torch.Tensor
        Tensors whose version counters are increased after each copy into the pool.
    bump : int
        Address of torch's function that increases the version counter of a tensor; 0: call it in Python.
    readonly : bool
        Whether an array may not be written.
    """

    cdef object __weakref__
    cdef readonly object pool
    cdef list arrays, versioned
    cdef void **versions  # the tensors of `versioned`, as arguments of `bump`
    cdef Watched *each    # up to the last one that is checked
    cdef Py_ssize_t count
    cdef TorchFields fields
    cdef void (*bump)(const void *tensor) noexcept
    cdef bint readonly
    cdef readonly bint closed
    cdef bint has_numpy
    cdef int users        # calls that read or write the memory, or enqueue copies that do: see `kvbm_users_add`
    cdef uint32_t process  # in which they are: a child has not the threads of its parent
    cdef uint32_t lock    # held by a thread that begins a copy without a lock of Python's, and by `close`

    def __cinit__(self):
        self.each = NULL
        self.versions = NULL
        self.count = 0

    def __init__(self, pool, list arrays not None, const unsigned char[::1] kinds not None, fields,
                 list versioned not None, uint64_t bump, bint readonly):
        cdef Py_ssize_t i
        if self.each != NULL or kinds.shape[0] != len(arrays):
            raise TypeError("a Watch is initialised once, with a kind for each array")
        self.pool, self.arrays, self.versioned, self.readonly = pool, arrays, versioned, readonly
        memset(&self.fields, 0, sizeof(TorchFields))
        if fields is not None:
            (self.fields.tensor, self.fields.storage, self.fields.offset, self.fields.data,
             self.fields.nbytes) = fields
        self.bump = <void (*)(const void *) noexcept> bump
        self.each = <Watched *> calloc(len(arrays) + 1, sizeof(Watched))
        self.versions = <void **> calloc(len(versioned) + 1, sizeof(void *))
        if self.each == NULL or self.versions == NULL:
            raise MemoryError(f"{len(arrays)} arrays")
        for i in range(len(versioned)):
            self.versions[i] = <char *> <PyObject *> versioned[i] + self.fields.tensor
        for i in range(len(arrays)):
            self.each[i].array = <char *> <PyObject *> arrays[i]
            self.each[i].kind = kinds[i]
            if kinds[i] > BY_OWNER or (kinds[i] == BY_TORCH and fields is None):
                raise TypeError(f"array {i}: expected a kind of 0 to 3, and fields for 2, got {kinds[i]}")
            if kinds[i] != BY_NOTHING:
                self.has_numpy = self.has_numpy or kinds[i] == BY_NUMPY
                self.count = i + 1
                self.note(i)

    def __dealloc__(self):
        free(self.each)
        free(self.versions)
        self.each = NULL
        self.versions = NULL

    def note(self, Py_ssize_t index):
        """Record the present state of an array as the expected one; of a closed pool nothing."""
        lock_in_python(&self.lock)
        if 0 <= index < self.count:
            self._note(&self.each[index])
        kvbm_unlock(&self.lock)

    cdef void _note(self, Watched *one) noexcept nogil:
        if one.kind == BY_NUMPY:
            one.words[0] = <uint64_t> _numpy_fields(one).data
            one.words[1] = _sizes(_numpy_fields(one))
        elif one.kind == BY_TORCH:
            one.words[0] = _word(<uint64_t> one.array, self.fields.tensor)
            one.words[1] = _word(one.words[0], self.fields.storage)
            if one.words[1] == 0:
                one.kind = BY_OWNER
                return
            one.words[2] = _word(one.words[0], self.fields.offset)
            one.words[3] = _word(one.words[1], self.fields.data)
            one.words[4] = _word(one.words[1], self.fields.nbytes)

    def changed(self, Py_ssize_t first=0):
        """Index of the next array, from `first` on, that must be checked in Python; -1: there is none."""
        return self._changed(first)

    cdef Py_ssize_t _changed(self, Py_ssize_t first) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(max(first, 0), self.count):
            if not _is_same(&self.each[i], &self.fields):
                return i
        return -1

    @property
    def locked(self):
        """Whether an array is read-only, or was when it was bound."""
        return self._locked()

    cdef bint _locked(self) noexcept nogil:
        cdef Py_ssize_t i
        if self.readonly:
            return True
        if self.has_numpy:
            for i in range(self.count):
                if self.each[i].kind == BY_NUMPY and not _numpy_fields(&self.each[i]).flags & NUMPY_WRITEABLE:
                    return True
        return False

    def written(self):
        """Increase the version counters of the tensors, so that autograd refuses graphs that have saved one of them."""
        self._written(self.versioned)

    cdef int _written(self, list tensors) except -1:
        """`tensors` are those of `versioned`, also if the pool was closed since the caller has looked."""
        cdef Py_ssize_t i
        if not tensors:
            return 0
        if self.bump == NULL:
            sys.modules["torch"].autograd.graph.increment_version(tensors)
            return 0
        for i in range(len(tensors)):
            self.bump(self.versions[i])
        return 0

    def close(self):
        """Release the arrays, after the calls that use their memory: on the CPU these last as long as their copies.

        Later checks raise the error of a closed pool, and no copy begins (see `Foreseen`).  No thread needs Python's
        lock to end such a call: when Python exits, threads do not get it any more.
        """
        lock_in_python(&self.lock)
        self.closed = True
        self.count = 0
        kvbm_unlock(&self.lock)
        while self.process == kvbm_own_process() and kvbm_users(&self.users):
            with nogil:
                usleep(50)
        self.arrays, self.versioned = [], []

    cdef void enter(self) noexcept:
        if self.process != kvbm_own_process():
            self.process, self.users = kvbm_own_process(), 0
        kvbm_users_add(&self.users, 1)

    cdef bint require(self, bint writes) except -1:
        """Whether code of Python ran: it may have changed the memory of another pool that was checked before."""
        cdef bint is_asked = self.closed or self._changed(0) >= 0
        if is_asked:
            self.pool().require_open()
        if writes and self._locked():
            self.pool().require_writable()
        return is_asked

    cdef bint has_changed(self) noexcept:
        """Whether the pool was closed, or the memory of an array has changed that is compared here."""
        cdef Py_ssize_t i
        if self.closed:
            return True
        for i in range(self.count):
            if self.each[i].kind != BY_OWNER and not _is_same(&self.each[i], &self.fields):
                return True
        return False


cdef int use_memory(Watch src, Watch dst, bint writes) except -1:
    """Check the memory of both sides, and keep it until `leave_memory`; no Python code may run in between.

    Raises `BindError` if a pool is closed, or the memory of an array has changed, or one of `dst` is read-only.
    """
    cdef bint is_asked = True
    while is_asked:
        is_asked = src is not None and src.require(False)
        if dst is not None:
            is_asked |= dst.require(writes)
        # Code of Python, and of other threads meanwhile, may have changed what was checked before.
        is_asked = is_asked and (src is not None and src.has_changed() or dst is not None and dst.has_changed())
    if src is not None:
        src.enter()
    if dst is not None:
        dst.enter()
    return 0


cdef inline void leave_memory(Watch src, Watch dst) noexcept nogil:
    if src is not None:
        kvbm_users_add(&src.users, -1)
    if dst is not None:
        kvbm_users_add(&dst.users, -1)
