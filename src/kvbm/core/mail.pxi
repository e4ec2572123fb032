# mail.pxi: notes between two processes of a host, and waits that hold no lock of Python's.

cdef enum:
    MOST_WATCHED = 64
    MOST_EXPECTED = 16

MAIL_BYTES, MAIL_NOTE, MAIL_SLOTS = kvbm_mail_bytes(), KVBM_MAIL_NOTE, KVBM_MAIL_SLOTS


@cython.final
cdef class Mail:
    """One side's end of a connection between two processes of a host.  Only one thread may take notes.

    Parameters
    ----------
    own, far : int
        Addresses of this side's box, which it writes, and of the peer's, which it reads: `MAIL_BYTES` bytes of shared
        memory, zero when they are made.
    keep : object
        Keeps both mapped.
    """

    cdef kvbm_mail mail
    cdef object keep
    cdef uint32_t lock                   # of what is read in the peer's box, and of what follows
    cdef void *expected[MOST_EXPECTED]   # what begins with one of the peer's next notes
    cdef uint32_t num_expected
    cdef dict kept                       # the same objects
    cdef uint32_t users                  # threads that wait for notes

    def __init__(self, uint64_t own, uint64_t far, keep):
        if not own or not far or own % 64 or far % 64:
            raise TypeError(f"boxes at {own:#x} and {far:#x}: expected addresses that are multiples of 64")
        self.mail.own, self.mail.far = <void *> own, <const void *> far
        self.mail.posted = self.mail.taken = 0
        self.keep, self.kept = keep, {}
        kvbm_mail_open(&self.mail)

    @property
    def is_read(self):
        """Whether the peer reads what is posted."""
        return self.mail.own != NULL and kvbm_mail_is_read(&self.mail) != 0

    @property
    def is_taken(self):
        """Whether the peer has taken a note."""
        return self.mail.own != NULL and kvbm_mail_is_taken(&self.mail) != 0

    @property
    def has_note(self):
        """Whether there is a note to take."""
        return self.mail.own != NULL and kvbm_mail_has_note(&self.mail) != 0

    def post(self, bytes note not None):
        """Post a note.  False if the peer has not taken the earlier ones, so that no slot is free."""
        cdef const unsigned char *data = note
        if len(note) > KVBM_MAIL_NOTE:
            raise BindError(f"note: expected at most {KVBM_MAIL_NOTE} bytes, got {len(note)}")
        if self.mail.own == NULL:
            return False
        return kvbm_mail_post(&self.mail, data, <uint32_t> len(note)) != 0

    def take(self):
        """The next note of the peer; None if there is none.

        Raises
        ------
        BindError
            The peer's box holds something that no end writes.
        """
        cdef unsigned char note[KVBM_MAIL_NOTE]
        cdef int64_t nbytes
        if self.mail.own == NULL:
            return None
        if self.num_expected and kvbm_mail_has_note(&self.mail):
            with nogil:
                self._begin_next()
        lock_in_python(&self.lock)
        nbytes = KVBM_MAIL_NONE if self.mail.own == NULL else kvbm_mail_take(&self.mail, note)  # closed meanwhile
        kvbm_unlock(&self.lock)
        if nbytes == KVBM_MAIL_NONE:
            return None
        if nbytes < 0:
            raise BindError("its box of notes holds something that no end of kvbm writes")
        return note[:nbytes]

    def expect(self, Foreseen one not None):
        """Begin copies with one of the peer's next notes: now, if it is there.  Any thread may call it.

        The note still comes.  Nothing is expected if as many others are, or the box is closed.
        """
        cdef bint is_expected
        if one._state() != WAITING or one.mail is not None:
            return
        one.mail, self.kept[id(one)] = self, one
        lock_in_python(&self.lock)  # meanwhile `one` may end, on another thread: then its mail is None
        is_expected = one.mail is self and self.num_expected < MOST_EXPECTED and self.mail.own != NULL
        if is_expected:
            self.expected[self.num_expected] = <void *> one
            self.num_expected += 1
        kvbm_unlock(&self.lock)
        if is_expected:
            with nogil:
                self._begin_next()
        if one.mail is self and not (is_expected and one._state() != OVER):  # or a finaliser has ended it meanwhile
            self._forget(one)
            one.mail = None

    cdef int _forget(self, Foreseen one) except -1:
        cdef uint32_t i
        lock_in_python(&self.lock)
        for i in range(self.num_expected):
            if self.expected[i] == <void *> one:
                self.num_expected -= 1
                memmove(&self.expected[i], &self.expected[i + 1], (self.num_expected - i) * sizeof(void *))
                break
        kvbm_unlock(&self.lock)
        self.kept.pop(id(one), None)
        return 0

    cdef void _begin_next(self) noexcept nogil:
        """Begin what is expected with the next note.  With one note one of them begins."""
        cdef unsigned char note[KVBM_MAIL_NOTE]
        cdef int64_t nbytes
        cdef uint32_t i
        kvbm_lock(&self.lock)
        if self.num_expected and self.mail.own != NULL:
            nbytes = kvbm_mail_peek(&self.mail, note)
            for i in range(self.num_expected):
                if (<Foreseen> self.expected[i])._begin(note, nbytes):
                    break
        kvbm_unlock(&self.lock)

    cdef bint _use(self) except -1:
        """Keep the peer's box mapped until `_leave`.  False if the boxes are not used any more."""
        cdef bint is_open
        lock_in_python(&self.lock)
        is_open = self.mail.own != NULL
        self.users += is_open
        kvbm_unlock(&self.lock)
        return is_open

    cdef int _leave(self, uint32_t users) except -1:
        cdef bint is_last
        lock_in_python(&self.lock)
        self.users -= users
        is_last = self.mail.own == NULL and self.users == 0
        if is_last:
            self.mail.far = NULL
        kvbm_unlock(&self.lock)
        if is_last:
            self.keep = None
        return 0

    def close(self):
        """No longer use the boxes: they may be unmapped when no thread waits for notes."""
        lock_in_python(&self.lock)
        self.mail.own = NULL
        kvbm_unlock(&self.lock)
        self._leave(0)


@cython.final
cdef class Latch:
    """A flag that one thread sets, and for which others wait without a lock of Python's."""

    cdef uint32_t flag

    def set(self):
        kvbm_flag_set(&self.flag, 1)

    def clear(self):
        kvbm_flag_set(&self.flag, 0)

    def wait(self, uint32_t microseconds, mails=(), dones=()):
        """Wait until the flag is set, a note has come or a copy is done.  False after some microseconds.

        It keeps a processor busy.  What a `Mail` expects begins here.

        Parameters
        ----------
        microseconds : int
        mails : sequence of Mail, optional
        dones : sequence of Done, optional
            At most 64 of either count.
        """
        cdef kvbm_mail *watched[MOST_WATCHED]
        cdef void *boxes[MOST_WATCHED]
        cdef kvbm_event events[MOST_WATCHED]
        cdef uint32_t num_mails = 0, num_events = 0, i
        cdef Mail mail
        cdef Done done
        cdef bint is_news
        kept, used = [], []
        for done in dones:
            if done.event == 0:
                return True
            if num_events < MOST_WATCHED:
                events[num_events].device, events[num_events].event = done.device, done.event
                num_events += 1
                kept.append(done)
        try:
            for mail in mails:
                if num_mails < MOST_WATCHED and mail._use():
                    used.append(mail)
                    watched[num_mails], boxes[num_mails] = &mail.mail, <void *> mail
                    num_mails += 1
            with nogil:
                is_news = kvbm_mail_wait(watched, num_mails, &self.flag, events, num_events, microseconds)
                for i in range(num_mails):
                    (<Mail> boxes[i])._begin_next()
        finally:
            for mail in used:
                mail._leave(1)
        return is_news
