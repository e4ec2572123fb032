# foreseen.pxi: copies out of a peer's memory that begin with an expected note, on the first thread that sees it.

@cython.final
cdef class Loans:
    """This side's loans of a peer's memory: the peer does not reuse it while there is one.  Any thread may use it.

    Parameters
    ----------
    count : int
        Address of their number, a uint64 in a page that the peer reads.
    dropped : int
        Address of a uint64 in the peer's page.  It is not 0 when the peer lends nothing more.
    keep : object
        Keeps both mapped.
    """

    cdef kvbm_loans loans
    cdef object keep

    def __init__(self, uint64_t count, uint64_t dropped, keep):
        if not count or not dropped or count % 8 or dropped % 8:
            raise TypeError(f"counts at {count:#x} and {dropped:#x}: expected addresses that are multiples of 8")
        self.loans.count, self.loans.dropped = <void *> count, <const void *> dropped
        self.loans.lock = self.loans.is_over = 0
        self.keep = keep

    def begin(self):
        """Begin a loan.  False if the peer lends nothing more, or this side has closed them."""
        return kvbm_loan_begin(&self.loans) != 0

    def end(self):
        """End a loan.  Returns how many are left."""
        return kvbm_loan_end(&self.loans)

    def close(self):
        """No other loan begins."""
        kvbm_loans_end(&self.loans)


cdef enum ForeseenState:
    WAITING = 0  # for the note
    BEGUN        # the copies are enqueued, with a loan
    OVER


@cython.final
cdef class Foreseen:
    """Copies out of a peer's memory that begin with an expected note.

    They begin on the first thread that sees the note: the one that calls `Mail.expect`, or one that waits, without a
    lock of Python's.  Before that, the arrays of the destination are checked, and a loan begins.

    Parameters
    ----------
    copies : list of Expected
    note, mask : bytes
        The expected note up to its table, and which of its bits must be as expected.
    places : tuple of (int, int)
        Where the note has its number, of 8 bytes: the same in both places.
    entries : int
        Entries of the table, which ends the note: little-endian 32-bit integers.
    loans : Loans
    watch : Watch
        The arrays of the destination.
    stream : object
        See `stream_handle`; None on the host.
    """

    cdef list copies
    cdef void **each  # the same
    cdef uint32_t count
    cdef const unsigned char *note
    cdef const unsigned char *mask
    cdef int64_t first, second, table, nbytes  # places in the note, and its bytes
    cdef Loans loans
    cdef Watch watch
    cdef tuple keep
    cdef uint64_t stream
    cdef Mail mail      # that sees the note
    cdef uint32_t lock  # of what follows
    cdef int state, status
    cdef uint64_t number  # of the note that they have begun with

    def __cinit__(self):
        self.each = NULL

    def __dealloc__(self):
        free(self.each)

    def __init__(self, list copies not None, bytes note not None, bytes mask not None, tuple places not None,
                 int64_t entries, Loans loans not None, Watch watch not None, stream=None):
        cdef Expected copy
        self.first, self.second = places
        self.table, self.nbytes = len(note), len(note) + 4 * entries
        if self.each != NULL or len(mask) != self.table or not 0 <= min(places) <= max(places) <= self.table - 8:
            raise TypeError("expected a note with two numbers and a mask of it, once")
        if entries < 0 or self.nbytes > KVBM_MAIL_NOTE:
            raise BindError(f"{entries} entries: expected a table that fits into a note")
        self.each = <void **> calloc(len(copies) + 1, sizeof(void *))
        if self.each == NULL:
            raise MemoryError(f"{len(copies)} copies")
        for copy in copies:
            if copy.most >= entries or copy.is_used:
                raise BindError(f"{entries} entries: expected copies that need no more, each of one note")
            copy.is_used = True
            self.each[self.count] = <void *> copy
            self.count += 1
        self.copies, self.note, self.mask, self.loans, self.watch = copies, note, mask, loans, watch
        self.stream, self.keep = 0 if stream is None else _handle_of(stream), (stream, note, mask)

    def begin(self, bytes note not None):
        """Begin with a note that has come.  False if it is another, or the copies cannot begin.

        True also if they have begun with it before.  Raises `CudaError` if they could not be enqueued: some may be.
        """
        cdef const unsigned char *data = note
        cdef int64_t nbytes = len(note)
        cdef bint is_begun
        with nogil:
            is_begun = self._begin(data, nbytes)
        if is_begun:
            check(self.status, "copying out of a peer's memory")
        return is_begun

    @property
    def has_begun(self):
        """Whether copies have begun that `end` has not returned."""
        return self._state() == BEGUN

    def end(self):
        """Let nothing begin any more.

        Returns
        -------
        list of Done or None
            The ends of copies that have begun, once: the caller then ends the loan.  None: nothing has begun.
        """
        cdef bint is_begun
        cdef Mail mail
        lock_in_python(&self.lock)
        is_begun = self.state == BEGUN
        self.state = OVER
        kvbm_unlock(&self.lock)
        mail, self.mail = self.mail, None
        if mail is not None:
            mail._forget(self)
        return [(<Expected> copy).done for copy in self.copies] if is_begun else None

    @property
    def has_failed(self):
        """Whether copies that have begun could not all be enqueued."""
        return self.status != KVBM_OK

    cdef int _state(self) noexcept:
        cdef int found
        lock_in_python(&self.lock)
        found = self.state
        kvbm_unlock(&self.lock)
        return found

    cdef bint _begin(self, const unsigned char *note, int64_t nbytes) noexcept nogil:
        """Whether the copies have begun with this note, now or before."""
        cdef uint64_t number = 0
        cdef bint is_begun
        if not self._is_it(note, nbytes):
            return False
        memcpy(&number, note + self.first, 8)
        kvbm_lock(&self.lock)
        if self.state == WAITING and self._may_begin(note + self.table):
            self.number, self.state = number, BEGUN
        is_begun = self.state == BEGUN and self.number == number
        kvbm_unlock(&self.lock)
        return is_begun

    cdef bint _is_it(self, const unsigned char *note, int64_t nbytes) noexcept nogil:
        cdef int64_t i
        if nbytes != self.nbytes or memcmp(note + self.first, note + self.second, 8) != 0:
            return False
        for i in range(self.table):
            if (note[i] ^ self.note[i]) & self.mask[i]:
                return False
        return True

    cdef bint _may_begin(self, const unsigned char *table) noexcept nogil:
        """Begin the copies.  False if the table names blocks that the peer does not have, or nothing may be written."""
        cdef uint32_t i
        cdef bint begins
        for i in range(self.count):
            if not (<Expected> self.each[i])._take(table):
                return False
        kvbm_lock(&self.watch.lock)  # until they are enqueued: then who closes the pool waits for them, as for any copy
        begins = (not self.watch.closed and self.watch._changed(0) < 0 and not self.watch._locked()
                  and kvbm_loan_begin(&self.loans.loans))
        if begins:
            for i in range(self.count):
                if self.status == KVBM_OK:
                    self.status = (<Expected> self.each[i])._launch(self.stream)
        kvbm_unlock(&self.watch.lock)
        return begins
