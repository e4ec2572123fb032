# abi.pxi: The declarations of `kvbm.h` and `mail.h`, and `check`, which turns a status into an exception.

cdef extern from "kvbm.h" nogil:
    enum:
        KVBM_MAX_OUTER
        KVBM_MAX_INNER
        KVBM_MAX_PARTS
        KVBM_UNIT_DIGITS
        KVBM_MAX_SCALES
        KVBM_INLINE_BYTES
        KVBM_OK
        KVBM_NO_DRIVER
        KVBM_NOT_BUILT
        KVBM_TOO_LARGE
        KVBM_NO_MEMORY
        KVBM_ID_OK
        KVBM_ID_RANGE
        KVBM_ID_DST_TWICE
        KVBM_ID_READ_AND_WRITTEN
        KVBM_SPAN_OK
        KVBM_SPAN_NULL_SRC
        KVBM_SPAN_NULL_DST
        KVBM_SPAN_DST_TWICE
        KVBM_SPAN_READ_AND_WRITTEN
        KVBM_GRANTED
        KVBM_UNGRANTED_POOL

    ctypedef struct kvbm_div:
        uint32_t n

    ctypedef struct kvbm_inner:
        kvbm_div extent
        uint32_t key
        int64_t src, dst

    ctypedef struct kvbm_outer:
        kvbm_div extent
        uint32_t key
        int64_t src, dst
        int32_t src_table, dst_table

    ctypedef struct kvbm_part:
        uint32_t word, item, segment_offset, segment_bytes, word_stride, cell_words, element_step, formats
        uint32_t given_scales
        float given_scale
        uint32_t *cell
        int64_t src_offset, dst_offset
        int64_t src_id_stride, dst_id_stride
        int32_t src_table_offset, dst_table_offset
        kvbm_outer *outer
        kvbm_inner *inner

    ctypedef struct kvbm_unit_strides:
        int64_t *src
        int64_t *dst

    ctypedef struct kvbm_units:
        kvbm_div *src
        kvbm_div *dst
        kvbm_unit_strides *part

    ctypedef struct kvbm_digest:
        uint64_t lanes
        uint64_t *first

    ctypedef struct kvbm_args:
        int64_t src_id_table, dst_id_table
        uint32_t num_parts, inline_mask
        kvbm_part *part
        uint64_t *payload
        kvbm_digest digest

    enum:
        KVBM_SRC_UNITS
        KVBM_DST_UNITS
        KVBM_DIGEST
        KVBM_SM_LIMITED
        KVBM_SCALES

    ctypedef struct kvbm_kernel:
        const char *name
        uint32_t parts

    enum:
        KVBM_ROWS
        KVBM_TILE

    ctypedef struct kvbm_form:
        int32_t kind, outer, inner, element, word, sm_limited

    ctypedef struct kvbm_side:
        const int32_t *ids
        uint64_t ids_device
        const uint64_t *table
        uint64_t table_device
        uint32_t entries, blocks

    ctypedef struct kvbm_batch:
        uint32_t num_pairs, kept, id_bytes
        kvbm_side src, dst
        uint64_t fault
        uint32_t max_ctas
        const int64_t *positions
        uint64_t positions_device
        uint32_t position_bytes
        uint64_t digests
        uint64_t *both
        uint32_t digests_far, both_far

    ctypedef struct kvbm_ring:
        pass

    ctypedef struct kvbm_route:
        int device, crosses, by_peer
        uint32_t num_direct
        const int *direct_kernel
        const kvbm_args **direct
        int gathers
        uint32_t num_permute
        const int *permute_kernel
        const kvbm_args **permute
        uint32_t num_moves
        const int *move_kernel
        const kvbm_args **moves
        uint64_t slot_block_bytes
        kvbm_ring *ring
        uint32_t num_runs
        const kvbm_args **runs
        uint32_t num_sum_direct, num_sum_permute
        const int *sum_direct_kernel
        const int *sum_permute_kernel
        const kvbm_args **sum_direct
        const kvbm_args **sum_permute
        uint32_t num_slot_digests
        const int *slot_digest_kernel
        const kvbm_args **slot_digests
        uint32_t *num_digests
        const int **digest_kernel
        const kvbm_args ***digest
        int digests_dst
        const uint64_t *src_bases
        const uint64_t *dst_bases
        const uint64_t *cuts
        uint32_t num_cuts

    ctypedef struct kvbm_outcome:
        uint64_t submissions
        int captured

    ctypedef struct kvbm_fault:
        uint32_t pair

    enum:
        KVBM_NO_COPY
        KVBM_DIRECT
        KVBM_STAGED
        KVBM_ENGINE

    ctypedef struct kvbm_spans:
        const uint64_t *addresses
        const uint64_t *sizes
        uint64_t size, count

    const kvbm_kernel *kvbm_kernels
    int kvbm_num_kernels
    int kvbm_num_images

    kvbm_div kvbm_make_div(uint32_t n) noexcept
    const char *kvbm_last_call() noexcept
    const char *kvbm_status_name(int status) noexcept
    const char *kvbm_status_text(int status) noexcept
    int kvbm_driver_version(int *version) noexcept
    int kvbm_device_count(int *count) noexcept
    int kvbm_device_info(int device, char *name, int name_bytes, int *major, int *minor, int *sms,
                         uint64_t *memory) noexcept
    int kvbm_pointer_device(uint64_t address, int *device) noexcept
    int kvbm_has_memcpy_batch() noexcept
    int kvbm_add_kernel(const char *name, const kvbm_form *forms, uint32_t parts, const void *cubin, uint64_t nbytes,
                        int capability, int *index) noexcept
    const kvbm_kernel *kvbm_kernel_at(int kernel) noexcept
    int kvbm_warm(int kernel, int device) noexcept
    int kvbm_launch(int kernel, const kvbm_args *args, const kvbm_batch *batch, int device, uint64_t stream) noexcept
    int kvbm_run_host(int kernel, const kvbm_args *args, const kvbm_batch *batch, int threads) noexcept
    int kvbm_memcpy_batch(const uint64_t *dst, const uint64_t *src, const uint64_t *sizes, uint64_t size,
                          uint64_t count, int mode, bint merge, bint by_peer, int device, uint64_t stream,
                          int *used) noexcept
    int kvbm_launch_pairs(const uint64_t *dst, const uint64_t *src, uint64_t size, uint64_t count, int device,
                          uint64_t stream) noexcept
    int kvbm_check_spans(const kvbm_spans *src, const kvbm_spans *dst, uint64_t *first, uint64_t *second) noexcept
    int kvbm_find_device(const uint64_t *addresses, uint64_t count, int *device, uint64_t *gpus,
                         uint64_t *index) noexcept
    int kvbm_take_ids(const void *given, uint32_t nbytes, uint32_t count, int64_t blocks, int32_t *out,
                      int64_t *index, int64_t *id) noexcept
    int kvbm_check_ids(const int32_t *src, const int32_t *dst, uint32_t num_pairs, int64_t dst_blocks, int same_pool,
                       uint32_t *kept, int64_t *index) noexcept
    int kvbm_ring_create(int device, uint64_t slot_bytes, uint32_t slots, kvbm_ring **ring) noexcept
    void kvbm_ring_destroy(kvbm_ring *ring) noexcept
    void kvbm_ring_retire(kvbm_ring *ring) noexcept
    void kvbm_retire_device(int device, uint64_t address, uint64_t nbytes) noexcept
    int kvbm_transfer(const kvbm_route *route, const kvbm_batch *batch, int strategy, uint64_t stream,
                      const uint64_t *waits, uint32_t num_waits, uint64_t done, kvbm_outcome *outcome) noexcept
    int kvbm_fault_take(int device, kvbm_fault **fault) noexcept
    void kvbm_fault_give(kvbm_fault *fault, int device, uint64_t event) noexcept
    int kvbm_event_take(int device, uint64_t *event) noexcept
    void kvbm_event_give(int device, uint64_t event) noexcept
    int kvbm_event_record(int device, uint64_t event, uint64_t stream) noexcept
    int kvbm_event_query(int device, uint64_t event, int *is_done) noexcept
    int kvbm_event_synchronize(int device, uint64_t event) noexcept
    int kvbm_stream_wait(int device, uint64_t stream, uint64_t event) noexcept
    int kvbm_stream_device(uint64_t stream, int *device) noexcept
    int kvbm_stream_is_captured(int device, uint64_t stream, int *is_captured) noexcept
    int kvbm_stream_make(int device, uint64_t *stream) noexcept
    void kvbm_stream_drop(int device, uint64_t stream) noexcept
    int kvbm_enable_peer(int device, int peer, int *can) noexcept
    int kvbm_find_ungranted(int device, const uint64_t *spans, uint64_t count, uint64_t *index, int *how) noexcept
    int kvbm_alloc_device(int device, uint64_t nbytes, uint64_t *address) noexcept
    int kvbm_free_device(int device, uint64_t address) noexcept
    int KVBM_IPC_BYTES
    int kvbm_ipc_handle(int device, uint64_t address, void* handle) noexcept
    int kvbm_ipc_open(int device, const void* handle, uint64_t* address) noexcept
    int kvbm_ipc_close(int device, uint64_t address) noexcept
    void kvbm_fence() noexcept
    int kvbm_upload(int device, uint64_t dst, const void *src, uint64_t nbytes) noexcept
    int kvbm_copy_now(int device, const uint64_t *dst, const uint64_t *src, uint64_t size, uint64_t count) noexcept
    int kvbm_synchronize(int device, uint64_t stream) noexcept
    int kvbm_host_touch(uint64_t address, uint64_t nbytes, int how, int threads) noexcept
    int kvbm_host_register(uint64_t address, uint64_t nbytes, int read_only) noexcept
    int kvbm_host_unregister(uint64_t address) noexcept
    int kvbm_memory_range(uint64_t address, int pinned, uint64_t *begin, uint64_t *end) noexcept


cdef extern from "mail.h" nogil:
    enum:
        KVBM_MAIL_NOTE
        KVBM_MAIL_SLOTS
        KVBM_MAIL_NONE
    ctypedef struct kvbm_mail:
        void *own
        const void *far
        uint64_t posted, taken
    ctypedef struct kvbm_event:
        int device
        uint64_t event
    uint64_t kvbm_mail_bytes() noexcept
    void kvbm_mail_open(kvbm_mail *mail) noexcept
    int kvbm_mail_is_read(const kvbm_mail *mail) noexcept
    int kvbm_mail_is_taken(const kvbm_mail *mail) noexcept
    int kvbm_mail_has_note(const kvbm_mail *mail) noexcept
    int kvbm_mail_post(kvbm_mail *mail, const void *note, uint32_t bytes) noexcept
    int64_t kvbm_mail_take(kvbm_mail *mail, void *note) noexcept
    int64_t kvbm_mail_peek(const kvbm_mail *mail, void *note) noexcept
    void kvbm_flag_set(uint32_t *flag, uint32_t value) noexcept
    int kvbm_mail_wait(kvbm_mail *const *mails, uint32_t num_mails, const uint32_t *flag, const kvbm_event *events,
                       uint32_t num_events, uint32_t microseconds) noexcept
    void kvbm_lock(uint32_t *lock) noexcept
    int kvbm_try_lock(uint32_t *lock) noexcept
    void kvbm_unlock(uint32_t *lock) noexcept
    uint32_t kvbm_own_process() noexcept
    ctypedef struct kvbm_loans:
        void *count
        const void *dropped
        uint32_t lock, is_over
    int kvbm_loan_begin(kvbm_loans *loans) noexcept
    uint64_t kvbm_loan_end(kvbm_loans *loans) noexcept
    void kvbm_loans_end(kvbm_loans *loans) noexcept


cdef int64_t INDEX_LIMIT = 0x7FFFFFFF  # indices of kernels have 31 bits

# Statuses that mean that there is no CUDA, not that CUDA failed: no driver, stub library, no device, mismatched driver.
cdef frozenset UNAVAILABLE = frozenset((KVBM_NO_DRIVER, KVBM_NOT_BUILT, 34, 46, 100, 803, 804))


# ---- statuses -----------------------------------------------------------------------------------------------------

cdef int check(int status, what) except -1:
    """Turn a status into an exception that names the request, the call, the error and what to do next.

    Call it on the thread that got the status, because the name of the failed call is stored per thread.
    """
    if status == KVBM_OK:
        return 0
    text = kvbm_status_text(status).decode("utf-8", "replace")
    if status == KVBM_NO_MEMORY:
        raise MemoryError(f"{what}: {text}")
    if status == KVBM_TOO_LARGE:
        raise BindError(f"{what}: {text}")
    name = kvbm_status_name(status).decode("utf-8", "replace")
    call = kvbm_last_call().decode("utf-8", "replace")
    error = CudaUnavailableError if status in UNAVAILABLE else CudaError
    raise error(f"{what}: {call} failed with {name} ({status}). {text}", code=status, name=name)
