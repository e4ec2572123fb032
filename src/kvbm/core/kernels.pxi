# kernels.pxi: Kernels by name, tables of base addresses, and copies: loop nests bound to kernels.

MAX_OUTER, MAX_INNER, MAX_PARTS, MAX_UNIT_DIGITS = KVBM_MAX_OUTER, KVBM_MAX_INNER, KVBM_MAX_PARTS, KVBM_UNIT_DIGITS
MAX_SCALES = KVBM_MAX_SCALES

cdef dict _index_of = None  # name -> index; filled at first use


cdef dict _kernels():
    global _index_of
    if _index_of is None:
        _index_of = {kvbm_kernels[i].name.decode("ascii"): i for i in range(kvbm_num_kernels)}
    return _index_of


def kernel_names():
    """The kernels that were built.

    Returns
    -------
    tuple of str
        Names; the position of a name is the index of the kernel.
    """
    return tuple(_kernels())[:kvbm_num_kernels]


def kernel_index(str name not None):
    """Index of a kernel; -1 if it was neither built nor added."""
    return _kernels().get(name, -1)


def add_kernel(str name not None, forms, const uint8_t[::1] cubin not None, int capability):
    """Add a kernel that was compiled at run time.  Its name then works like that of a built kernel.

    Parameters
    ----------
    name : str
        The symbol in the cubin.
    forms : sequence of (kind, outer, inner, element, word, sm_limited)
        One per part; ``kind`` is ``"rows"`` or ``"tile"``.
    cubin : contiguous bytes
        The code.  It is copied.
    capability : int
        Architecture: 90 for sm_90.  A known name gets the code of one more architecture.

    Returns
    -------
    int
        The kernel's index.

    Raises
    ------
    CudaError
        No template has such a structure, or there are too many kernels.
    """
    cdef kvbm_form form[KVBM_MAX_PARTS]
    cdef int index = -1, status
    forms = tuple(forms)
    if not 0 < len(forms) <= KVBM_MAX_PARTS or not cubin.shape[0]:
        raise PlanError(f"kernel {name!r}: expected 1 to {KVBM_MAX_PARTS} parts and its code, got {len(forms)} parts")
    if -1 < _kernels().get(name, -1) < kvbm_num_kernels:
        raise PlanError(f"kernel {name!r} was built: nothing is to be added")
    for i, (kind, outer, inner, element, word, sm_limited) in enumerate(forms):
        form[i].kind = KVBM_TILE if kind == "tile" else KVBM_ROWS
        form[i].outer, form[i].inner, form[i].element = outer, inner, element
        form[i].word, form[i].sm_limited = word, sm_limited
    status = kvbm_add_kernel(name.encode("ascii"), form, <uint32_t> len(forms), &cubin[0],
                             <uint64_t> cubin.shape[0], capability, &index)
    check(status, f"adding the kernel {name!r}")
    _kernels()[name] = index
    return index


def num_images():
    """Number of embedded CUDA images; 0 means that the extension was built without CUDA."""
    return kvbm_num_images


def warm(kernel, int device):
    """Load every CUDA image on a device and find a kernel, so that later copies load nothing.

    Parameters
    ----------
    kernel : str, int or None
        Name or index of a kernel; None loads all of them.
    device : int
        CUDA device ordinal.

    Raises
    ------
    MissingKernelError
        There is no kernel of this name.
    CudaError
        An image does not load, for example because none was built for this GPU.
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
        One address per allocation, in table order.  They are copied.
    device : int
        CUDA device of the allocations, or -1 for the host.
    upload : bool
        True: upload the table to the device now.  False: every launch uploads it.
    watch : Watch, optional
        Of the pool whose memory it is.  A `Route` checks it before each copy, and closing the pool waits for the call.
        It is not kept alive: with it a cache of routes would keep the arrays.

    Notes
    -----
    A launch is asynchronous, and its kernel may read the table on the device later.  So keep the table as long as its
    pool. When the last reference is gone, the memory on the device is retired and freed later, because freeing waits
    for the GPU.
    """

    cdef uint64_t *addresses
    cdef uint64_t device_address
    cdef uint32_t count
    cdef readonly int device
    cdef object watch  # a weakref to it, or None

    def __cinit__(self):
        self.addresses = NULL
        self.device_address = 0
        self.count = 0
        self.device = -1

    def __init__(self, const uint64_t[::1] addresses not None, int device=-1, bint upload=True, Watch watch=None):
        cdef int status
        if self.addresses != NULL:
            raise TypeError("a Table is initialised once")
        self.watch = None if watch is None else weakref.ref(watch)
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
            kvbm_retire_device(device, address, self.count * sizeof(uint64_t))

    cdef Watch watched(self):
        """The Watch of the pool, or None if the table is not one of a pool."""
        if self.watch is None:
            return None
        found = <object> PyWeakref_GetObject(self.watch)  # a call of `watch` takes 20 ns more
        if found is None:
            raise BindError("a copy needs its pools, and one of them is gone")
        return <Watch> found

    def __len__(self):
        return self.count

    def __repr__(self):
        where = "the host" if self.device < 0 else f"cuda:{self.device}"
        return f"<kvbm Table of {self.count} addresses on {where}>"


# ---- copies -------------------------------------------------------------------------------------------------------

@cython.final
cdef class Copy:
    """A loop nest bound to the kernel that runs it.  Each call says which blocks to copy.

    Parameters
    ----------
    kernel : str or None
        Name of a kernel.  None: a loop nest of bytes for the copy engine.
    parts : sequence of (offsets, outer, inner) or (offsets, outer, inner, strides, words)
        One part or several: K and V, or planes.  ``offsets`` is ``(src, dst, src_table, dst_table)``.  ``outer`` has
        ``(extent, src, dst, src_table, dst_table)`` for each mode that selects a chunk.  ``inner`` has
        ``(extent, src, dst)`` for each mode inside a chunk, fastest first.  ``src`` and ``dst`` are bytes, tables are
        entries. ``strides``: for each side the stride of blocks, and of each digit of a unit, fastest first, in bytes.
        ``words``: for kernels of records the bytes of a word; for kernels of pages also the bytes of an item, the
        stride of its words in shared memory, the offset of the part there, and the bytes of its segment; for kernels
        that cast whether codes are less aligned than their word, the bytes between the elements of an item, the scale
        of the caller, and numbers of the formats.  Several scales are a tuple of the steps of their number in the outer
        and in the inner modes, and the scales.
    src_id, dst_id : tuple of two ints
        The strides of a block id: ``(table entries, bytes)``.  The bytes are used for parts without ``strides``.
    units : tuple of two tuples of int
        If ids count units of a block: for each side the extents of the digits inside the block, fastest first.
    digest : tuple of (int, sequence of (first, outer, inner, steps, along_b)), optional
        For kernels that digest: the keys of a token, and for each part the key of its first cell, the key steps of its
        outer and inner modes, the strides of the binary digits of a word's number in its cell, in bytes, and whether
        the cells of a tile are along the destination.
    sm_limited : bool
        Launches use a limited number of multiprocessors: for kernels that cast, and ``few_`` kernels.

    Raises
    ------
    MissingKernelError
        The kernel was not built; the message names the command that builds it.
    PlanError
        The loop nest does not fit the parameters of a kernel.
    """

    cdef kvbm_args args
    cdef int index
    cdef readonly str kernel

    def __init__(self, str kernel, parts, src_id, dst_id, units=((), ()), digest=None, bint sm_limited=False):
        cdef int index = _find_kernel(kernel) if kernel is not None else -1
        cdef kvbm_part *part
        parts = tuple(parts)
        if not 0 < len(parts) <= KVBM_MAX_PARTS or (
                index >= 0 and kvbm_kernel_at(index).parts not in (0, len(parts))):
            raise PlanError(f"kernel {kernel!r} does not copy {len(parts)} part(s)")
        cdef bint may_digest = kernel is not None and kernel.startswith("few_rows_")
        if kernel is not None and not may_digest and kernel.startswith(("digest_", "sum_")) != (digest is not None):
            raise PlanError(f"kernel {kernel!r}: expected keys for a kernel that digests, and none for another")
        cdef bint casts = kernel is not None and kernel.startswith(("cast_", "sum_cast_"))
        memset(&self.args, 0, sizeof(kvbm_args))
        self.args.src_id_table, self.args.dst_id_table = src_id[0], dst_id[0]
        self.args.num_parts = <uint32_t> len(parts)
        if sm_limited:
            self.args.inline_mask |= KVBM_SM_LIMITED
        cdef kvbm_units *digits = <kvbm_units *> &self.args.part[len(parts)] if units[0] or units[1] else NULL
        if digits != NULL:
            self.args.inline_mask |= (KVBM_SRC_UNITS if units[0] else 0) | (KVBM_DST_UNITS if units[1] else 0)
            _fill_digits(digits.src, tuple(units[0]))
            _fill_digits(digits.dst, tuple(units[1]))
        for number, (offsets, outer, inner, *rest) in enumerate(parts):
            strides, words = rest or (((src_id[1],), (dst_id[1],)), (0,))
            (src_block, *src_steps), (dst_block, *dst_steps) = strides
            if len(src_steps) != len(units[0]) or len(dst_steps) != len(units[1]):
                raise PlanError(f"part {number} of the plan for {kernel!r}: expected a stride for each digit of a unit")
            try:
                blocks = src_block, dst_block
                widths = tuple(words[:1]) if casts else tuple(words)
                _fill_part(&self.args.part[number], offsets, tuple(outer), tuple(inner), blocks, widths)
                if casts:
                    part = &self.args.part[number]
                    _, part.element_step, scale, part.formats = words
                    if isinstance(scale, tuple):
                        _fill_scales(&self.args, number, scale)
                    else:
                        part.given_scale = scale
                for digit, step in enumerate(src_steps):
                    digits.part[number].src[digit] = step
                for digit, step in enumerate(dst_steps):
                    digits.part[number].dst[digit] = step
            except OverflowError as error:
                raise PlanError(f"part {number} of the plan for {kernel!r}: {error}") from None
        if digest is not None:
            lanes, keys = digest
            if len(keys) != len(parts):
                raise PlanError(f"kernel {kernel!r}: expected keys of {len(parts)} part(s), got {len(keys)}")
            self.args.inline_mask |= KVBM_DIGEST
            self.args.digest.lanes = lanes
            for number, (first, outer, inner, steps, along_b) in enumerate(keys):
                try:
                    self.args.digest.first[number] = first
                    _fill_keys(&self.args.part[number], tuple(outer), tuple(inner), tuple(steps))
                    if along_b:
                        self.args.part[number].cell_words = 0
                    if casts and number == 0:
                        self.args.part[number].given_scales = 0  # it shares memory with cell_words
                except OverflowError as error:
                    raise PlanError(f"keys of part {number} of the plan for {kernel!r}: {error}") from None
        self.index = index
        self.kernel = kernel

    def __repr__(self):
        return f"<kvbm Copy by {self.kernel}>"

    def launch(self, Table src not None, Table dst not None, Pairs pairs not None, int device, uint64_t stream,
               int max_sms=0, uint64_t digests=0):
        """Copy blocks on a GPU with one kernel, in the order of the stream.  Does not wait for it.

        Parameters
        ----------
        src, dst : Table
            Base addresses of the two pools.  Keep them until the copy is done.
        pairs : Pairs
            Which blocks; their ids are in host memory.
        device : int
            CUDA device ordinal.
        stream : int
            Handle of the stream.
        max_sms : int
            Most multiprocessors that a ``few_`` kernel, or one that is `sm_limited`, uses; 0: all.
        digests : int
            For kernels that digest: device address of one uint64 per pair, which are written.

        Raises
        ------
        BindError
            A table is on another device.
        CudaError
            The launch fails.
        """
        cdef kvbm_batch batch
        cdef int status
        if pairs.kept == 0 and not digests:
            return
        _fill_batch(&batch, src, dst, pairs, device)
        batch.max_ctas = <uint32_t> max(max_sms, 0)
        self._fill_digests(&batch, digests)
        with nogil:
            status = kvbm_launch(self.index, &self.args, &batch, device, stream)
        if status != KVBM_OK:
            check(status, f"launching {self.kernel} on cuda:{device}")

    cdef int _fill_digests(self, kvbm_batch *batch, uint64_t digests) except -1:
        if bool(self.args.inline_mask & KVBM_DIGEST) != (digests != 0):
            raise PlanError(
                f"kernel {self.kernel!r}: expected an address of digests for a kernel that digests, none for another"
            )
        batch.digests = digests
        return 0

    def run(self, Table src not None, Table dst not None, Pairs pairs not None, int threads=0, uint64_t digests=0):
        """Copy blocks on the host, and return when the copy is done.

        Parameters
        ----------
        src, dst : Table
            Base addresses of the two pools, in host memory.
        pairs : Pairs
            Which blocks.
        threads : int
            Most threads; 0: one per core that the process may use.
        digests : int
            For kernels that digest: address of one uint64 per pair, which are written.

        Raises
        ------
        BindError
            The batch is too large for 31-bit indices.
        """
        cdef kvbm_batch batch
        cdef int status
        if threads < 0:
            raise BindError(f"threads: expected 0 (every core) or more, got {threads}")
        if pairs.on_device():
            raise BindError("pairs: their ids lie on a GPU, which the host does not read")
        if pairs.kept == 0 and not digests:
            return
        _fill_batch(&batch, src, dst, pairs, -1)
        self._fill_digests(&batch, digests)
        with nogil:
            status = kvbm_run_host(self.index, &self.args, &batch, threads)
        if status != KVBM_OK:
            check(status, f"running {self.kernel} on the host")


cdef int _fill_part(kvbm_part *part, offsets, tuple outer, tuple inner, strides, tuple words) except -1:
    cdef int i
    if len(outer) > KVBM_MAX_OUTER or len(inner) > KVBM_MAX_INNER:
        raise PlanError(
            f"a part has {len(outer)} outer and {len(inner)} inner modes: "
            f"expected at most {KVBM_MAX_OUTER} and {KVBM_MAX_INNER}"
        )
    part.src_offset, part.dst_offset, part.src_table_offset, part.dst_table_offset = offsets
    part.src_id_stride, part.dst_id_stride = strides
    part.word, part.item, part.word_stride, part.segment_offset, part.segment_bytes = words + (0,) * (5 - len(words))
    # Unused modes have extent 1 and stride 0, so that loops over all modes are correct.
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


cdef int _fill_keys(kvbm_part *part, tuple outer, tuple inner, tuple steps) except -1:
    cdef int i
    if len(outer) > KVBM_MAX_OUTER or len(inner) > KVBM_MAX_INNER or len(steps) > 4:
        raise PlanError(f"keys of {len(outer)} outer and {len(inner)} inner modes, and {1 << len(steps)} words a cell")
    for i in range(len(outer)):
        part.outer[i].key = outer[i]
    for i in range(len(inner)):
        part.inner[i].key = inner[i]
    for i in range(len(steps)):
        part.cell[i] = steps[i]
    part.cell_words = 1 << len(steps)
    return 0


cdef int _fill_scales(kvbm_args *args, int number, tuple given) except -1:
    outer, inner, scales = given
    if number or not 0 < len(scales) <= KVBM_MAX_SCALES:
        raise PlanError(f"{len(scales)} scales of part {number}: expected 1 to {KVBM_MAX_SCALES}, of part 0")
    cdef float *table = <float *> args.payload + KVBM_INLINE_BYTES // sizeof(float) - len(scales)
    cdef int i
    for i in range(len(scales)):
        table[i] = scales[i]
    _fill_keys(&args.part[number], outer, inner, ())
    args.part[number].given_scales = <uint32_t> len(scales)
    args.inline_mask |= KVBM_SCALES
    return 0


cdef int _fill_digits(kvbm_div *digits, tuple extents) except -1:
    cdef int i
    if len(extents) > KVBM_UNIT_DIGITS:
        raise PlanError(f"units of {len(extents)} digits: expected at most {KVBM_UNIT_DIGITS}")
    for i in range(KVBM_UNIT_DIGITS):
        digits[i] = _divisor(extents[i] if i < len(extents) else 1)
    return 0


cdef kvbm_div _divisor(extent) except *:
    if not 1 <= extent <= INDEX_LIMIT:
        raise PlanError(f"a mode of extent {extent}: expected 1 to {INDEX_LIMIT}")
    return kvbm_make_div(<uint32_t> extent)


cdef int _fill_batch(kvbm_batch *batch, Table src, Table dst, Pairs pairs, int device) except -1:
    if pairs.kept and (src.count == 0 or dst.count == 0):
        raise BindError(
            f"{pairs.count} pairs of blocks between tables of {src.count} and {dst.count} addresses: expected at least "
            "one each"
        )
    memset(batch, 0, sizeof(kvbm_batch))
    batch.num_pairs, batch.kept, batch.id_bytes = pairs.count, pairs.kept, pairs.id_bytes
    batch.src, batch.dst = pairs.src, pairs.dst
    _fill_side(&batch.src, src, "source", device)
    _fill_side(&batch.dst, dst, "destination", device)
    return 0


cdef int _fill_side(kvbm_side *side, Table table, str what, int device) except -1:
    side.table, side.entries = table.addresses, table.count
    if table.device_address:
        if table.device != device:
            raise BindError(f"the {what}'s table lies on cuda:{table.device}: expected cuda:{device}")
        side.table_device = table.device_address
    return 0
