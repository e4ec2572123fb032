# routes.pxi: Transfers: rings, events, and the route that a batch takes.

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
    by_peer : bool
        Whether the far GPU has memory that is not granted to the device (`find_ungranted`).
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
                 bint same_pool, bint crosses, limits, bint may_choose, keep, bint by_peer=False):
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
        self.route.src_blocks, self.route.dst_blocks, self.route.by_peer = src_blocks, dst_blocks, by_peer
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


cdef uint64_t _recorded(event) except? 0:
    cdef uint64_t handle = int(event or 0)
    if handle == 0:
        raise BindError("wait: the event has not been recorded yet, or is closed")
    return handle


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
            return _recorded(producer.cuda_event)
        # Only CuPy's streams have wait_event.
        if root == "cupy" and hasattr(producer, "ptr") and not hasattr(producer, "wait_event"):
            return producer.ptr
        if root == "cuda" and hasattr(producer, "is_done"):  # cuda.core.Event, of any release
            return _recorded(producer.handle)
        if root == "cuda" and type(producer).__name__ in ("CUevent", "cudaEvent_t"):  # cuda.bindings
            return _recorded(producer)
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


def find_ungranted(int device, const uint64_t[:, ::1] spans not None):
    """Find memory that kernels on a GPU do not reach, although its own GPU may be a peer.

    What comes from cuMemAlloc is granted by `enable_peer`.  Memory of a stream-ordered pool, and memory that was mapped
    through the virtual memory API, is granted by whoever made it: to each GPU, a pool or a mapping at a time.

    Parameters
    ----------
    device : int
        Where the kernels run.
    spans : contiguous uint64 array, (n, 2)
        First and last byte (exclusive) of each array, sorted by the first; of another GPU's memory, or pinned.

    Returns
    -------
    tuple of int and str, or None
        The position of the first one that has a byte without a grant, and what it lies in; None if there is none.
    """
    cdef uint64_t count = spans.shape[0], index = 0
    cdef int how = KVBM_GRANTED, status
    if count == 0:
        return None
    with nogil:
        status = kvbm_find_ungranted(device, &spans[0, 0], count, &index, &how)
    check(status, f"asking what memory is granted to cuda:{device}")
    if how == KVBM_GRANTED:
        return None
    return index, "a stream-ordered pool" if how == KVBM_UNGRANTED_POOL else "memory mapped by the virtual memory API"


def enable_peer(int device, int peer):
    """Let kernels on one GPU reach what another has from cuMemAlloc; False where the machine does not allow it.

    Other memory needs a grant of its own: `find_ungranted`.
    """
    cdef int can = 0, status
    with nogil:
        status = kvbm_enable_peer(device, peer, &can)
    check(status, f"letting cuda:{device} reach the memory of cuda:{peer}")
    return can != 0
