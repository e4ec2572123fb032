# routes.pxi: Transfers: staging rings, the end of a copy (Done), and the launches between two pools (Route).

@cython.final
cdef class Ring:
    """A staging ring: slots of memory on a GPU, with streams and events.

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
    cdef int users  # copies that are being enqueued
    cdef bint closed

    def __cinit__(self):
        self.ring = NULL
        self.users = 0
        self.closed = False

    def __init__(self, int device, uint64_t slot_bytes, int slots):
        cdef int status
        if self.ring != NULL:
            raise TypeError("a Ring is initialised once")
        self.device, self.slot_bytes, self.slots = device, slot_bytes, slots
        with nogil:
            status = kvbm_ring_create(device, slot_bytes, <uint32_t> slots, &self.ring)
        check(status, f"allocating {slots} slots of {slot_bytes} bytes on cuda:{device} for staged copies")

    def close(self):
        """Free the memory.  Waits for the copies that use it; later ones are refused.

        If another thread is enqueueing a copy, a later allocation frees the memory.
        """
        cdef kvbm_ring *ring = self.ring
        self.closed = True
        if self.users == 0:
            self.ring = NULL
            with nogil:
                kvbm_ring_destroy(ring)

    cdef int enter(self) except -1:
        if self.closed:
            raise BindError("the transfer is closed")
        self.users += 1
        return 0

    cdef void leave(self) noexcept:
        self.users -= 1
        if self.closed and self.users == 0:
            kvbm_ring_retire(self.ring)
            self.ring = NULL

    def __dealloc__(self):
        kvbm_ring_retire(self.ring)
        self.ring = NULL


@cython.final
cdef class Done:
    """The end of one copy: wait for it on a stream, or on the host.

    It keeps the pools of its copy alive.  On the CPU the copy is done when this is made.  Only `synchronize` reports
    ids on the GPU that were out of range.  If this object is dropped first, the error is lost.
    """

    cdef uint64_t event
    cdef int device         # of the stream
    cdef object keep
    cdef kvbm_fault *fault  # its kernels report an id that is out of range here, or NULL
    cdef readonly bint captured
    """Whether a graph has captured it, and reads ids on the GPU, or writes digests, at every replay."""
    cdef readonly str strategy
    """The strategy that ran: ``direct``, ``staged`` or ``engine``."""
    cdef public object proof  # called at the end of `synchronize`; raises an error if digests differ

    def __cinit__(self):
        self.event = 0
        self.device = -1
        self.fault = NULL
        self.captured = False

    def __dealloc__(self):
        if self.fault != NULL and not self.captured:
            kvbm_fault_give(self.fault, self.device, self.event)  # returns both when the kernels are done
            return
        kvbm_fault_give(self.fault, self.device, 0)
        if self.event:
            kvbm_event_give(self.device, self.event)

    def __repr__(self):
        return f"<kvbm Done, {self.strategy}>"

    def wait(self, stream):
        """Make a stream of any GPU wait for the copy.  The host does not wait."""
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

        For a captured copy it does not wait: wait for the replay, then call it.

        Raises
        ------
        CudaError
            Work on the GPU has failed.
        BindError
            A kernel found an id on the GPU that is out of range.
        DigestError
            The transfer verifies, and the bytes written differ from those read.
        """
        cdef int status
        if self.event and not self.captured:
            with nogil:
                status = kvbm_event_synchronize(self.device, self.event)
            check(status, "waiting for a copy")
        if self.fault != NULL and self.fault.pair:
            pair, self.fault.pair = self.fault.pair - 1, 0
            raise BindError(
                f"block ids on the device: pair {pair} of an earlier copy named a block that its pool does not have; "
                "it was skipped, and nothing of it was copied"
            )
        if self.proof is not None:
            self.proof()

    @property
    def is_wrong(self):
        """Whether a kernel found an id on the GPU that is out of range, and no error was raised for it yet."""
        return self.fault != NULL and self.fault.pair != 0

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
    """The `Done` of a copy that is done already."""
    cdef Done done = Done.__new__(Done)
    done.strategy = "direct"
    return done


cdef tuple STRATEGIES = ("direct", "staged", "engine")


@cython.final
cdef class Route:
    """The launches of every strategy between two pools, ready to run.

    Parameters
    ----------
    device : int
        CUDA device that kernels run on; -1: the host, which runs only `direct`.
    src, dst : Table
        Base addresses of the two pools.
    src_blocks, dst_blocks : int
        Their numbers of blocks.
    direct : sequence of Copy
        Kernels from pool to pool; empty if no kernel can access both.
    permute : sequence of Copy
        Kernels between the device's pool and a slot.
    moves, runs : sequence of Copy
        Loop nests of bytes: between a slot and the far pool, and from pool to pool.  `moves` may be kernels instead.
    src_bases, dst_bases : contiguous uint64 array
        The tables of `moves` and `runs`.
    cuts : contiguous uint64 array
        Addresses that no copy of the engine may cross.
    gathers : bool
        True: the kernel runs first, then the engine copies.  False: the reverse.
    slot_block_bytes : int
        Bytes of a block in a slot.
    ring : Ring or None
        For staged copies.
    max_sms : int
        Most multiprocessors of kernels with such a limit; 0: no limit.
    same_pool, crosses : bool
        Whether both sides share memory; whether they are on two GPUs.
    limits : sequence of (int, int)
        ``(pairs, strategy)``, ascending: for up to so many pairs use strategy 0 (direct), 1 (staged) or 2 (engine).
    may_choose : bool
        For ids on the GPU, which the copy engine cannot read.  True: such a copy is direct.  False: it is refused.
    keep : object
        Objects that the copies need.
    by_peer : bool
        Whether the far GPU has memory that is not granted to the device (`find_ungranted`).
    sum_direct, sum_permute : sequence of Copy
        Kernels that copy and digest, instead of `direct` and `permute`; empty: digests are separate.
    slot_digests : sequence of Copy
        Kernels that digest the slots of staged copies, if `sum_permute` is empty.
    digests : tuple of two sequences of Copy
        Kernels that only digest, for the source and for the destination.
    digests_dst : bool
        Separate digests.  True: of the destination, after the copy.  False: of the source, before it.
    """

    cdef kvbm_route route
    cdef Table src, dst
    cdef Ring ring
    cdef object keep, owned
    cdef bint same_pool, may_choose
    cdef int64_t src_blocks, dst_blocks
    cdef uint32_t max_ctas
    cdef int num_limits
    cdef int64_t limit[8]
    cdef int strategy_of[8]
    cdef uint64_t copies[3]
    cdef uint64_t blocks[3]
    cdef uint64_t submissions
    cdef void *launches  # memory of the arrays of kernels and parameters in `route`

    def __cinit__(self):
        self.launches = NULL

    def __dealloc__(self):
        free(self.launches)

    def __init__(self, int device, Table src not None, Table dst not None, int64_t src_blocks, int64_t dst_blocks, *,
                 direct, permute=(), moves=(), runs=(), const uint64_t[::1] src_bases=None,
                 const uint64_t[::1] dst_bases=None, const uint64_t[::1] cuts=None, bint gathers=False,
                 uint64_t slot_block_bytes=0, Ring ring=None, int max_sms=0, bint same_pool=False, bint crosses=False,
                 limits=((0, 0),), bint may_choose=False, keep=None, bint by_peer=False, sum_direct=(),
                 sum_permute=(), slot_digests=(), digests=((), ()), bint digests_dst=False):
        cdef Copy copy
        cdef int i
        memset(&self.route, 0, sizeof(kvbm_route))
        memset(self.copies, 0, sizeof(self.copies))
        memset(self.blocks, 0, sizeof(self.blocks))
        self.submissions = 0
        direct, permute, moves, runs, limits = tuple(direct), tuple(permute), tuple(moves), tuple(runs), tuple(limits)
        if len(limits) > 8:
            raise PlanError(f"{len(limits)} limits: expected at most 8")
        if self.launches != NULL:
            raise TypeError("a Route is initialised once")
        lists = [
            direct, permute, tuple(sum_direct), tuple(sum_permute), *map(tuple, digests), tuple(slot_digests), moves,
            runs,
        ]
        every = tuple([copy for each in lists for copy in each])
        cdef size_t most = <size_t> len(every)
        self.launches = malloc((most + 1) * (sizeof(void *) + sizeof(int)))
        if self.launches == NULL:
            raise MemoryError(f"a route of {most} launches")
        cdef const kvbm_args **args = <const kvbm_args **> self.launches
        cdef int *numbers = <int *> (args + most)
        self.src, self.dst, self.ring, self.keep = src, dst, ring, keep
        self.owned = (direct, permute, moves, runs, src_bases, dst_bases, cuts, lists)
        self.route.device, self.route.crosses, self.route.by_peer = device, crosses, by_peer
        self.same_pool, self.src_blocks, self.dst_blocks = same_pool, src_blocks, dst_blocks
        self.max_ctas = <uint32_t> max_sms
        self.route.gathers, self.route.slot_block_bytes = gathers, slot_block_bytes
        for i, copy in enumerate(every):
            numbers[i], args[i] = copy.index, &copy.args
        cdef uint32_t counts[9]
        for i, each in enumerate(lists):
            counts[i] = <uint32_t> len(each)
        self.route.direct_kernel, self.route.direct, self.route.num_direct = numbers, args, counts[0]
        numbers += counts[0]
        args += counts[0]
        self.route.permute_kernel, self.route.permute, self.route.num_permute = numbers, args, counts[1]
        numbers += counts[1]
        args += counts[1]
        self.route.sum_direct_kernel, self.route.sum_direct, self.route.num_sum_direct = numbers, args, counts[2]
        numbers += counts[2]
        args += counts[2]
        self.route.sum_permute_kernel, self.route.sum_permute, self.route.num_sum_permute = numbers, args, counts[3]
        numbers += counts[3]
        args += counts[3]
        for i in range(2):
            self.route.digest_kernel[i], self.route.digest[i], self.route.num_digests[i] = numbers, args, counts[4 + i]
            numbers += counts[4 + i]
            args += counts[4 + i]
        self.route.digests_dst = digests_dst
        self.route.slot_digest_kernel, self.route.slot_digests, self.route.num_slot_digests = numbers, args, counts[6]
        numbers += counts[6]
        args += counts[6]
        self.route.move_kernel, self.route.moves, self.route.num_moves = numbers, args, counts[7]
        self.route.runs, self.route.num_runs = args + counts[7], counts[8]
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
        """Name of the strategy for a batch of `pairs` pairs with ids in host memory."""
        return STRATEGIES[self._choose(pairs)]

    cdef int _choose(self, int64_t pairs) noexcept:
        cdef int i
        for i in range(self.num_limits - 1):
            if pairs <= self.limit[i]:
                return self.strategy_of[i]
        return self.strategy_of[self.num_limits - 1]

    def counters(self):
        """Numbers of copies and of blocks by strategy, and of driver calls."""
        return tuple(self.copies), tuple(self.blocks), self.submissions

    def digest(self, Pairs pairs not None, Positions positions, uint64_t out, bint far=False, stream=None, wait=None,
               keep=None):
        """Digest blocks of the source.  Nothing is copied.

        Parameters
        ----------
        pairs : Pairs
            Its source ids are the blocks.
        positions : Positions or None
            Positions of their first tokens; None: 0.
        out : int
            Address of one uint64 per pair.
        far : bool
            Whether this is in pinned memory, and the kernels run on a GPU.
        stream, wait : optional
            As for `copy`.
        keep : optional
            An object that must stay alive until the digests are done.

        Returns
        -------
        Done
        """
        cdef kvbm_batch batch
        cdef uint64_t handle = 0 if self.route.device < 0 else _handle_of(stream)
        cdef Done done
        _fill_batch(&batch, self.src, self.dst, pairs, self.route.device)
        _fill_digests(&batch, positions, out, far)
        done = self._copy(pairs, &batch, KVBM_NO_COPY, handle, stream, wait)
        done.keep = (self, pairs, positions, keep)
        return done

    def copy_digested(self, Pairs pairs not None, Positions positions, uint64_t out, bint far, both, stream=None,
                      wait=None, keep=None):
        """`copy` with digests.

        Those of what is copied go to `out`, if it is not 0; those of the source before, and of the destination after
        the copy, to the two addresses `both`.  `far`: as for `digest`.  `both` is always in host memory.
        """
        cdef kvbm_batch batch
        cdef uint64_t handle = 0 if self.route.device < 0 else _handle_of(stream)
        cdef Done done
        cdef int strategy
        _fill_batch(&batch, self.src, self.dst, pairs, self.route.device)
        _fill_digests(&batch, positions, out, far)
        batch.both[0], batch.both[1] = both
        batch.both_far = self.route.device >= 0
        batch.max_ctas = self.max_ctas
        strategy = self._choose(pairs.kept)
        if pairs.on_device():
            strategy = self._choose_for_device_ids(strategy, pairs.src.ids_device != 0, pairs.dst.ids_device != 0)
        if self.ring is not None:
            self.ring.enter()
        try:
            done = self._copy(pairs, &batch, strategy, handle, stream, wait)
        finally:
            if self.ring is not None:
                self.ring.leave()
        done.keep = (self, pairs, positions, keep)
        return done

    def pairs_of(self, src_ids, dst_ids):
        """The checked ids of a batch."""
        return Pairs(src_ids, dst_ids, self.src_blocks, self.dst_blocks, self.same_pool, self.route.device)

    @cython.binding(False)  # as a plain method its call takes 0.1 us less
    def copy(self, src_ids, dst_ids, stream=None, wait=None):
        """Copy blocks, in the order of the stream.

        Parameters
        ----------
        src_ids, dst_ids : optional
            See `Pairs`.
        stream : object
            See `stream_handle`; None on the host.
        wait : optional
            An event, a stream, a `Done`, or a list of them.

        Returns
        -------
        Done

        Raises
        ------
        BindError
            Ids are refused, or the memory of an array has changed.  Nothing has been enqueued.
        CudaError
            A call of the driver failed.
        """
        cdef Pairs pairs = Pairs.__new__(Pairs)
        cdef kvbm_batch batch
        cdef int strategy
        cdef uint64_t handle = 0 if self.route.device < 0 else _handle_of(stream)
        pairs.take(src_ids, dst_ids, self.src_blocks, self.dst_blocks, self.same_pool, self.route.device)
        _fill_batch(&batch, self.src, self.dst, pairs, self.route.device)
        batch.max_ctas = self.max_ctas
        strategy = self._choose(pairs.kept)
        if pairs.on_device():
            strategy = self._choose_for_device_ids(strategy, pairs.src.ids_device != 0, pairs.dst.ids_device != 0)
        if self.ring is None:
            return self._copy(pairs, &batch, strategy, handle, stream, wait)
        self.ring.enter()
        try:
            return self._copy(pairs, &batch, strategy, handle, stream, wait)
        finally:
            self.ring.leave()

    cdef Done _copy(self, Pairs pairs, kvbm_batch *batch, int strategy, uint64_t stream, given_stream, wait):
        cdef kvbm_outcome outcome
        cdef uint64_t waits[16]
        cdef uint32_t num_waits = 0
        cdef int status = KVBM_OK, home = self.route.device
        cdef list taken = None, versioned = None
        cdef Done done = Done.__new__(Done)
        cdef Watch src = self.src.watched(), dst = self.dst.watched()
        memset(&outcome, 0, sizeof(kvbm_outcome))
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
        done.device = home
        try:
            if wait is not None:
                taken = []
                for event in wait if isinstance(wait, (list, tuple)) else (wait,):
                    if num_waits == 16:
                        raise BindError("wait: expected at most 16 events and streams")
                    waits[num_waits] = _event_of(event, taken, home)
                    num_waits += waits[num_waits] != 0
            # After the code of ids, streams and events, which may change the memory.
            use_memory(src, dst, strategy != KVBM_NO_COPY)
            if dst is not None:
                versioned = dst.versioned  # the pool may be closed when the copy has ended
            with nogil:
                if home >= 0:
                    status = kvbm_event_take(home, &done.event)
                if status == KVBM_OK and (batch.src.ids_device or batch.dst.ids_device):
                    status = kvbm_fault_take(self.route.device, &done.fault)
                    if status == KVBM_OK:
                        batch.fault = <uint64_t> &done.fault.pair
                if status == KVBM_OK:
                    status = kvbm_transfer(&self.route, batch, strategy, stream, waits, num_waits, done.event, &outcome)
                leave_memory(src, dst)
            done.captured = outcome.captured != 0
        finally:
            if taken:
                for device, event in taken:
                    kvbm_event_give(device, event)
        if strategy == KVBM_NO_COPY:
            where = "the host" if home < 0 else f"cuda:{self.route.device}"
            check(status, f"digesting {pairs.count} blocks on {where}")
            return done
        if status != KVBM_OK:
            used = () if strategy == KVBM_ENGINE else dict.fromkeys(copy.kernel for copy in self.owned[strategy])
            by = " and ".join(used) or "no kernel"
            where = "the host" if home < 0 else f"cuda:{self.route.device}"
            check(status, f"copying {pairs.count} blocks on {where} ({STRATEGIES[strategy]}, {by})")
        self.copies[strategy] += 1
        self.blocks[strategy] += pairs.kept
        self.submissions += outcome.submissions
        done.strategy = STRATEGIES[strategy]
        if dst is not None:
            dst._written(versioned)
        if home >= 0:
            done.keep = (self, pairs) if pairs.on_device() else self
        return done

    cdef int _choose_for_device_ids(self, int strategy, bint src, bint dst) except -1:
        """The strategy for ids on the GPU: the copy engine needs the ids of its side on the host."""
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


@cython.final
cdef class Expected:
    """A copy with digests whose source ids come later: entries of a block table of the peer that lends the source.

    It is all that a launch needs but for these ids: `Foreseen` begins it without a lock of Python's.

    Parameters
    ----------
    route : Route
    dst_ids : array of int64
        Blocks, or units, of the destination.
    positions : array of int64
        Positions of their first tokens.
    entries, rests : contiguous int64 array
        Of each pair: its entry in the table, and which of the ids of that block it is.
    each : int
        Ids of a block of the source.
    blocks : int
        Blocks of the source.
    out, far, keep
        As for `Route.digest`.
    """

    cdef Route route
    cdef Pairs pairs
    cdef Positions positions
    cdef object keep
    cdef const int64_t[::1] entries
    cdef const int64_t[::1] rests
    cdef int64_t each, blocks, most  # the last entry that is read
    cdef int32_t *ids  # of the source
    cdef kvbm_batch batch
    cdef kvbm_outcome outcome
    cdef Done done
    cdef bint is_used

    def __init__(self, Route route not None, dst_ids, positions, const int64_t[::1] entries not None,
                 const int64_t[::1] rests not None, int64_t each, int64_t blocks, uint64_t out, bint far, keep=None):
        cdef Py_ssize_t count = entries.shape[0], i
        cdef int device = route.route.device, status = KVBM_OK
        if self.route is not None:
            raise TypeError("an Expected is initialised once")
        self.entries, self.rests, self.each, self.blocks = entries, rests, each, blocks
        self.pairs = Pairs(None, dst_ids, count, route.dst_blocks, False, device)
        self.ids = self.pairs.more if self.pairs.more != NULL else self.pairs.few
        if (count == 0 or self.pairs.count != count or rests.shape[0] != count or each < 1
                or blocks * each > INDEX_LIMIT or self.pairs.dst.ids == self.ids or route.ring is not None
                or route.route.crosses):
            raise BindError(f"{count} entries, {rests.shape[0]} rests, {self.pairs.count} ids: expected one number")
        for i in range(count):
            if entries[i] < 0 or not 0 <= rests[i] < each:
                raise BindError(f"entry {entries[i]}, part {rests[i]}: expected some from 0 on, and below {each}")
            self.most = max(self.most, entries[i])
        self.positions = Positions(positions, <uint32_t> count, device)
        self.pairs.src.blocks, self.pairs.src.ids = <uint32_t> (blocks * each), self.ids
        _fill_batch(&self.batch, route.src, route.dst, self.pairs, device)
        _fill_digests(&self.batch, self.positions, out, far)
        self.batch.max_ctas = route.max_ctas
        self.done = Done.__new__(Done)
        self.done.device, self.done.strategy = device, "direct"
        self.done.keep = (route, self.pairs, self.positions, keep)
        if device >= 0:
            with nogil:
                status = kvbm_event_take(device, &self.done.event)
            check(status, "an event for a copy")
        self.route = route

    cdef bint _take(self, const unsigned char *table) noexcept nogil:
        """Take the source ids from a table of more than `most` entries.  False if one is no block of the source."""
        cdef int64_t i
        cdef int32_t block = 0
        for i in range(self.pairs.count):
            memcpy(&block, &table[4 * self.entries[i]], 4)
            if not 0 <= block < self.blocks:
                return False
            self.ids[i] = <int32_t> (block * self.each + self.rests[i])
        return True

    cdef int _launch(self, uint64_t stream) noexcept nogil:
        """Enqueue the copy; on the host, make it.  Returns the status of the calls."""
        cdef int status = kvbm_transfer(&self.route.route, &self.batch, KVBM_DIRECT, stream, NULL, 0, self.done.event,
                                        &self.outcome)
        self.done.captured = self.outcome.captured != 0
        return status


cdef int _fill_digests(kvbm_batch *batch, Positions positions, uint64_t out, bint far) except -1:
    if out & 7:
        raise BindError(f"digests: expected an address that is a multiple of 8, got {out:#x}")
    batch.digests, batch.digests_far = out, far
    if positions is not None:
        batch.positions, batch.positions_device = positions.on_host, positions.on_device
        batch.position_bytes = positions.nbytes
    _refuse_shared(batch, batch.positions_device, batch.position_bytes, "tokens")
    _refuse_shared(batch, batch.src.ids_device, batch.id_bytes, "ids")
    return _refuse_shared(batch, batch.dst.ids_device, batch.id_bytes, "ids")


cdef int _refuse_shared(const kvbm_batch *batch, uint64_t begin, uint64_t nbytes, str what) except -1:
    """Digests are set to 0 before the kernel reads ids and positions on the GPU, so they may not share memory."""
    cdef uint64_t count = batch.num_pairs
    if begin and batch.digests and begin < batch.digests + 8 * count and batch.digests < begin + nbytes * count:
        raise BindError(f"digests: expected memory of its own, got that of {what} on the GPU")
    return 0


cdef int _device_of_default(stream, int otherwise) except? -1:
    """The GPU of a default stream.  Its handle is the same on every GPU, but the stream object may have the device."""
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
    """The event of a producer, or one recorded now on its stream, which is added to `taken`.

    A default stream, whose handle is the same on every GPU, is assumed to belong to the GPU of the copy's stream.
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
            status = kvbm_event_take(device, &event)
        if status == KVBM_OK:
            status = kvbm_event_record(device, event, stream)
    if event:
        taken.append((device, event))
    check(status, "recording an event on the producer's stream")
    return event


def find_ungranted(int device, const uint64_t[:, ::1] spans not None):
    """Find memory that kernels on a GPU cannot access, although peer access to its GPU may be enabled.

    `enable_peer` grants access to memory of cuMemAlloc.  Access to memory of a stream-ordered pool, and to memory
    mapped by the virtual memory API, is granted by its owner, for each GPU and each pool or mapping.

    Parameters
    ----------
    device : int
        Device of the kernels.
    spans : contiguous uint64 array, (n, 2)
        Begin and end of each array, sorted; memory of another GPU, or pinned memory.

    Returns
    -------
    tuple of int and str, or None
        The position of the first array with a byte that is not granted, and the kind of its memory; None: there is
        none.
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
    """Let kernels on one GPU access memory of cuMemAlloc on another.  False if the machine does not allow it.

    Access to other kinds of memory is granted separately: see `find_ungranted`.
    """
    cdef int can = 0, status
    with nogil:
        status = kvbm_enable_peer(device, peer, &can)
    check(status, f"letting cuda:{device} reach the memory of cuda:{peer}")
    return can != 0
