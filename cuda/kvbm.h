/* kvbm.h: the C interface between the compiled extension, the generated kernels and the runtime.
 *
 * It has no CUDA types, so _core.pyx and the host kernels need no CUDA header.  The GPU kernels (as their only parameter), the
 * host kernels and the extension use the same structs.
 *
 * Vocabulary.  A *batch* copies pairs of blocks (src id, dst id).  A copy has one or more *parts*: K and V, if these have
 * different orders, or the planes of a record.  A part is a loop nest over bytes, and each of its loops is a *mode*.  *Outer*
 * modes select a chunk (and may step through the tables of allocations), *inner* modes go through it, fastest first.  Strides
 * are in bytes, strides of tables in entries.
 *
 *   address = table[id * id_table + table_offset + sum(c_k * mode_k.table)]
 *           + id * id_stride + offset + sum(c_k * mode_k.stride)          (once for src, once for dst)
 *
 * Ids may count *units*: equal parts of a block.  Then an id has digits: the block, and inside it one or more digits, each with
 * a stride of its own (kvbm_units).
 *
 * A kernel may also *digest* what it reads (docs/reference/digest.md).  At most 16 bytes of a row are a *cell*.  The *key* of a
 * cell is its position in the order of the model, one more sum of steps:
 *
 *   key = first + position * lanes + sum(c_k * mode_k.key)
 */
#ifndef KVBM_H
#define KVBM_H

#ifdef __CUDACC_RTC__ /* compiled at run time: NVRTC has no system headers */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t; /* as in glibc on 64-bit Linux, so that NVRTC and nvcc compile the same code */
typedef unsigned long uint64_t;
#define UINT64_C(value) value##UL
#else
#include <stdint.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The limits.  kvbm._core has them by these names; a test compares the planner's. */
enum {
  KVBM_MAX_OUTER = 4,       /* outer modes of a part */
  KVBM_MAX_INNER = 8,       /* inner modes of a part */
  KVBM_MAX_PARTS = 4,       /* parts of a launch */
  KVBM_UNIT_DIGITS = 2,     /* digits of an id inside a block, if ids count units */
  KVBM_MAX_SCALES = 512,    /* scales of the caller in a launch that casts */
  KVBM_INLINE_BYTES = 4016, /* bytes of parts, ids and tables in a kernel's parameters (which have 4,096 bytes) */
};

/* ---- the loop nest -------------------------------------------------------------------------------------------- */

/* A divisor n of 31-bit indices: division is a multiply-high, an addition and a shift (Granlund & Montgomery, 1994). */
typedef struct kvbm_div {
  uint32_t n, magic, shift;
} kvbm_div;

/* i / n == (mulhi(i, magic) + i) >> shift, for 0 <= i < 2^31 and 1 <= n < 2^31. */
static inline kvbm_div kvbm_make_div(uint32_t n) {
  kvbm_div d = {n, 0, 0};
  while ((UINT64_C(1) << d.shift) < n) ++d.shift;
  d.magic = (uint32_t)((((UINT64_C(1) << d.shift) - n) << 32) / n + 1);
  return d;
}

typedef struct kvbm_inner {
  kvbm_div extent;
  uint32_t key; /* step of the key, if cells are digested; casts: in bytes, 16 for each cell; or of the number of the caller's
                       scale, if there are several */
  int64_t src, dst; /* strides, bytes */
} kvbm_inner;

typedef struct kvbm_outer {
  kvbm_div extent;
  uint32_t key;                 /* the same */
  int64_t src, dst;             /* strides, bytes */
  int32_t src_table, dst_table; /* strides, table entries */
} kvbm_outer;

typedef struct kvbm_part {
  /* Set by the kernel's `prepare` for each batch.  These fields are first, so that all that a kernel reads is adjacent: each
   * 64 bytes of parameters that it reads cost a small batch 60 ns. */
  kvbm_div faster;              /* chunks, or pairs if pairs_first */
  uint32_t pairs_first;         /* 1: all pairs of a chunk before the next chunk */
  kvbm_div tiles;               /* tiles of a chunk */
  uint32_t words;               /* rows: words of a chunk.  tiles: indices of the modes other than A and B */
  uint32_t tile_words;          /* how many of them belong to one tile */
  kvbm_div tile[4];             /* rows: threads of a row, rows of a CTA (few_: words of a segment, turns).
                                   tiles: squares of a tile along A and B, tiles along A and B */
  uint32_t transposes_on_store; /* tiles: squares are transposed after shared memory, not before */
  uint32_t jobs;                /* pairs * chunks * tiles */
  uint32_t ctas;                /* CTAs of this part */
  /* Set by the caller: */
  /* Records and pages: bytes of a load and store.  Casts: 1: codes are less aligned than their word (cast.cuh).  The other kernels
   * have it as a template argument. */
  uint32_t word;
  union {
    struct {
      uint32_t item;           /* pages: bytes that a thread moves at a time, contiguous on the side that is not staged */
      uint32_t segment_offset; /* pages: where this part starts in shared memory */
      uint32_t segment_bytes;  /* pages: bytes of the contiguous segment that starts with this part; 0: it is in another's */
      uint32_t word_stride;    /* pages: bytes from word to word of an item in shared memory */
    };
    struct {
      uint32_t element_step; /* casts: bytes between the elements of an item that are not contiguous */
      float given_scale;     /* casts: the scale of all groups, or what stored scales are multiplied by */
      uint32_t formats;      /* casts of any formats: numbers of three formats (formats.cuh), 4 bits each */
    };
    uint32_t cell[4]; /* digests: stride, in bytes, of each binary digit of the number of a word in its cell, fastest first */
  };
  union {
    uint32_t
        cell_words; /* digests: words of a cell, a power of two; scales of a cell.  tiles: 1: cells are along A, 0: along B */
    uint32_t given_scales; /* casts: how many scales of the caller (float) end the payload, if KVBM_SCALES is set; 0: only
                              given_scale */
  };
  int32_t src_table_offset, dst_table_offset; /* first table entry of this part (of V, of a slice) */
  int64_t src_offset, dst_offset;             /* first byte of this part */
  int64_t src_id_stride, dst_id_stride;       /* bytes from block id to block id */
  kvbm_outer outer[KVBM_MAX_OUTER];
  kvbm_inner inner[KVBM_MAX_INNER];
} kvbm_part;

/* The digits of ids that count units.  It is in the payload, behind the last part, if a side's ids count units (KVBM_SRC_UNITS,
 * KVBM_DST_UNITS).  Otherwise ids and tables may use that room. */
typedef struct kvbm_unit_strides {
  int64_t src[KVBM_UNIT_DIGITS], dst[KVBM_UNIT_DIGITS]; /* bytes from value to value of each digit */
} kvbm_unit_strides;

typedef struct kvbm_units {
  kvbm_div src[KVBM_UNIT_DIGITS], dst[KVBM_UNIT_DIGITS]; /* extents of the digits inside a block, fastest first; unused: 1 */
  kvbm_unit_strides part[KVBM_MAX_PARTS];                /* num_parts of them are stored */
} kvbm_units;

/* Parameters of kernels that digest: at the end of the payload, if KVBM_DIGEST is set. */
typedef struct kvbm_digest {
  uint64_t out;            /* address of one uint64_t per pair, to which the kernel adds */
  uint64_t positions;      /* address, or offset into the payload, of the position of each pair's first token */
  uint64_t lanes;          /* keys of a token */
  uint32_t position_bytes; /* 4 or 8, signed; 0: all positions are 0 */
  uint32_t reserved;
  uint64_t first[KVBM_MAX_PARTS]; /* key of the part's first cell at position 0 */
} kvbm_digest;

/* The parameters of a kernel.  The caller describes the copy: strides of ids in tables, num_parts, the parts (with extents of
 * kvbm_make_div), kvbm_units and kvbm_digest.  kvbm_launch and kvbm_run_host set the rest for each batch. */
typedef struct kvbm_args {
  int64_t src_id_table, dst_id_table; /* table entries from block id to block id */
  uint32_t num_parts;
  uint32_t num_pairs;
  uint32_t id_bytes;    /* 4 or 8 (signed); 0: ids are 0 .. num_pairs-1 on both sides.  A pair with an id -1 is skipped */
  uint32_t inline_mask; /* bit 0 src_ids, 1 dst_ids, 2 src_table, 3 dst_table: the field below is an offset into payload;
                           bit 4 src, 5 dst: the ids of this side are 0 .. num_pairs-1, whatever id_bytes says;
                           bit 6 src, 7 dst: the ids of this side count units;
                           bit 8: `digest` is set; bit 9: its positions are in the payload;
                           bit 10: the launch uses a limited number of multiprocessors (kernels without few_ variants);
                           bit 11: scales of the caller end the payload */
  uint32_t src_blocks, dst_blocks; /* a pair with an id that is not below these is skipped, and reported in `fault` */
  uint64_t fault;                  /* address of a uint32_t for 1 + the number of such a pair; 0: it is not reported */
  uint64_t src_ids, dst_ids;       /* addresses that the kernel can read, or offsets into payload */
  uint64_t src_table, dst_table;   /* the same: arrays of 64-bit base addresses */
  union {
    kvbm_part part[KVBM_MAX_PARTS];
    uint64_t payload[KVBM_INLINE_BYTES / 8]; /* ids and tables go behind the num_parts parts and the kvbm_units */
    struct {
      uint64_t before_digest[(KVBM_INLINE_BYTES - sizeof(kvbm_digest)) / 8];
      kvbm_digest digest;
    };
  };
} kvbm_args;

/* Bits of inline_mask.  The caller sets them, but each batch sets KVBM_POSITIONS_INLINE. */
enum {
  KVBM_SRC_UNITS = 1 << 6,
  KVBM_DST_UNITS = 1 << 7,
  KVBM_DIGEST = 1 << 8,
  KVBM_POSITIONS_INLINE = 1 << 9,
  KVBM_SM_LIMITED = 1 << 10,
  KVBM_SCALES = 1 << 11,
};

/* ---- the kernel table (generated: kernels_host.cpp) ------------------------------------------------------------ */

typedef struct kvbm_grid {
  uint32_t ctas, threads_x, threads_y, shared_bytes;
} kvbm_grid;

typedef struct kvbm_kernel {
  const char* name; /* also the symbol of the CUDA kernel (extern "C", one parameter: const kvbm_args) */
  int32_t image;    /* index into kvbm_images, also if no images were built */
  uint32_t parts;   /* number of parts of a launch; 0: any number */
  uint32_t teams;   /* 1: a CTA takes one piece of work.  More: this many teams of threads share a CTA and loop over the work,
                       with any number of CTAs; such a kernel has no host half */
  /* Sets the prepared fields of args->part[*] for args->num_pairs; `sms` = multiprocessors, or 0 for the host.
   * Returns 0, or KVBM_TOO_LARGE.  NULL: the kernel was compiled at run time, see runtime.cpp. */
  int (*prepare)(kvbm_args* args, uint32_t sms, kvbm_grid* grid);
  /* Runs jobs [first, last) of part `part` on the calling thread.  Jobs write disjoint bytes.  `stream_stores`: stores bypass
   * the cache.  NULL: the kernel runs on the GPU only. */
  void (*host)(const kvbm_args* args, uint32_t part, uint32_t first, uint32_t last, int stream_stores);
} kvbm_kernel;

extern const kvbm_kernel kvbm_kernels[];
extern const int32_t kvbm_num_kernels;

/* ---- kernels that were compiled at run time (runtime.cpp) ------------------------------------------------------- */

enum { KVBM_MAX_RUNTIME = 4096 }; /* kernels of this kind in a process.  Their numbers follow those of the built kernels */
enum { KVBM_ROWS = 0, KVBM_TILE = 1 };

/* The structure of one part of a kernel: the template arguments of Rows or Tile. */
typedef struct kvbm_form {
  int32_t kind;          /* KVBM_ROWS, KVBM_TILE */
  int32_t outer, inner;  /* number of modes; of a tile: inner ones without A and B */
  int32_t element, word; /* bytes; rows: element is 0 */
  int32_t sm_limited;    /* 1: teams of threads share a CTA, and the kernel runs on a limited number of multiprocessors */
} kvbm_form;

/* Adds a kernel, or the code of a known kernel for another architecture (`capability`: 90 for sm_90).  Name and cubin are
 * copied.  *index is its number until the process ends. */
int kvbm_add_kernel(const char* name, const kvbm_form* forms, uint32_t parts, const void* cubin, uint64_t bytes, int capability,
                    int* index);
/* The kernel of this number, built or compiled at run time; NULL: there is none. */
const kvbm_kernel* kvbm_kernel_at(int kernel);

/* ---- raw copies (copy.cu) ---------------------------------------------------------------------------------------- */

typedef struct kvbm_pair {
  uint64_t src, dst; /* addresses */
} kvbm_pair;

enum { KVBM_INLINE_PAIRS = 253 }; /* pairs that fit into the parameters (4,096 bytes) */

/* The parameters of kvbm_copy_pairs, which copies the same number of bytes from each source to its destination.  Tile t of a
 * pair has its bytes [t * tile_bytes, (t + 1) * tile_bytes), shifted so that the destination is aligned. */
typedef struct kvbm_pairs {
  uint64_t bytes;      /* of each pair */
  uint64_t pairs;      /* device address of the pairs; 0: they are in payload */
  kvbm_div tiles;      /* tiles of a pair */
  uint32_t jobs;       /* pairs * tiles */
  uint32_t tile_bytes; /* a multiple of 16 */
  uint32_t log_width;  /* log2 of the threads of a tile: if pairs are short, several share a CTA */
  uint64_t reserved;
  kvbm_pair payload[KVBM_INLINE_PAIRS];
} kvbm_pairs;

/* ---- embedded CUDA images (written by the build: kvbm_images.cpp) ----------------------------------------------- */

typedef struct kvbm_image {
  const char* name;          /* the .cu file it was built from */
  const unsigned char* data; /* a fatbin */
} kvbm_image;

extern const kvbm_image kvbm_images[];
extern const int32_t kvbm_num_images; /* 0: built without CUDA */

/* ---- runtime (driver.cpp, memory.cpp, launch.cpp, host.cpp, submission.cpp, pairs.cpp) ---------------------------
 *
 * Status codes: 0 is success, positive values are CUresult, negative ones are defined here. */
enum {
  KVBM_OK = 0,
  KVBM_NO_DRIVER = -1,   /* libcuda.so.1 is missing or too old */
  KVBM_NOT_BUILT = -2,   /* built without CUDA kernels */
  KVBM_TOO_LARGE = -3,   /* an index does not fit 31 bits */
  KVBM_NO_FUNCTION = -4, /* the driver lacks an optional function (cuMemcpyBatchAsync) */
  KVBM_NO_MEMORY = -5,   /* host memory is exhausted */
  KVBM_FORKED = -6,      /* CUDA was used before fork() */
  KVBM_NOT_GRANTED = -7, /* access to another GPU's memory is not granted, and no driver call can copy it */
  KVBM_TOO_MANY = -8,    /* more than KVBM_MAX_RUNTIME kernels compiled at run time */
};

/* Results of kvbm_take_ids and kvbm_check_ids. */
enum { KVBM_ID_OK = 0, KVBM_ID_RANGE, KVBM_ID_DST_TWICE, KVBM_ID_READ_AND_WRITTEN };

/* One side of a batch: which blocks, and their addresses.  Blocks of a pool are given by ids.  Blocks of a staging slot are
 * 0 .. num_pairs-1 in one allocation.  To replace a pool by a slot, replace the whole struct. */
typedef struct kvbm_side {
  const int32_t* ids;    /* checked, in host memory, copied before the call returns; NULL: 0 .. num_pairs-1; -1 skips a pair */
  uint64_t ids_device;   /* address of ids on the GPU, read when the kernel runs, or 0 */
  const uint64_t* table; /* host memory, copied before the call returns; ignored if table_device is set */
  uint64_t table_device; /* address of the same table on the GPU, or 0 */
  uint32_t entries;      /* of the table */
  uint32_t blocks;       /* a pair with an id on the GPU that is not below this is skipped, and reported in `fault` */
} kvbm_side;

typedef struct kvbm_batch {
  uint32_t num_pairs;
  uint32_t kept;     /* pairs that are not skipped, counting only ids in host memory */
  uint32_t id_bytes; /* 4 or 8: of ids on the GPU, the same on both sides */
  kvbm_side src, dst;
  uint64_t fault;            /* as kvbm_args.fault, or 0 */
  const int64_t* positions;  /* of each pair's first token, for digests: host memory, copied before the call returns */
  uint64_t positions_device; /* or on the GPU: `position_bytes` each, read when the kernel runs; neither: all are 0 */
  uint32_t position_bytes;
  uint32_t adds;                  /* 1: add to the digests; 0: set them to zero first */
  uint64_t digests;               /* address of one uint64_t per pair for digests of what is copied, or 0 */
  uint64_t both[2];               /* the same for the source before, and for the destination after the copy */
  uint32_t digests_far, both_far; /* 1: these are in pinned host memory, to which kernels do not add */
  uint32_t max_ctas;              /* kernels with teams: most CTAs of a launch; 0: as many as there are multiprocessors */
} kvbm_batch;

/* The last call that failed on this thread, such as "cuModuleLoadData"; never NULL. */
const char* kvbm_last_call(void);
const char* kvbm_status_name(int status); /* "CUDA_ERROR_INVALID_VALUE", "KVBM_NO_DRIVER" */
const char* kvbm_status_text(int status); /* a sentence */

int kvbm_driver_version(int* version); /* KVBM_NO_DRIVER without a driver */
int kvbm_device_count(int* count);
int kvbm_device_info(int device, char* name, int name_bytes, int* major, int* minor, int* sms, uint64_t* memory);
/* The device of an address: *device >= 0; -1: host memory that the driver does not know; -2: pinned host memory. */
int kvbm_pointer_device(uint64_t address, int* device);
int kvbm_has_memcpy_batch(void);

/* Loads every image on the device and finds this kernel (-1: every kernel), so that later copies load nothing. */
int kvbm_warm(int kernel, int device);
/* Launches a kernel on `stream` of `device`, in its primary context.  `args` describes the copy and is not changed.  Ids and
 * tables are passed in the parameters if they fit, else through a ring of pinned buffers, which events release.  During the
 * capture of a graph such a buffer belongs to the graph, because replays read it. */
int kvbm_launch(int kernel, const kvbm_args* args, const kvbm_batch* batch, int device, uint64_t stream);
/* The same on the host: on at most `threads` threads (0: all cores), and done when it returns. */
int kvbm_run_host(int kernel, const kvbm_args* args, const kvbm_batch* batch, int threads);
/* Rows of cells in host memory.  The cells of a row are contiguous. */
typedef struct kvbm_cells {
  const char* src;
  char* dst;                  /* the cells are also copied to here; NULL: they are not copied */
  uint64_t count, rows;       /* cells of a row; rows */
  int64_t src_row, dst_row;   /* bytes from row to row */
  uint64_t key;               /* of the first cell */
  uint64_t key_step, key_row; /* from cell to cell, and from row to row */
  int streaming;              /* 1: stores bypass the cache */
} kvbm_cells;

/* Digest of cells of 16 bytes. */
uint64_t kvbm_digest_cells(const kvbm_cells* cells);

/* Copies ranges of bytes.  mode: 0 batched with fallback, 1 one call per copy, 2 batched only; *used is the mode that ran (1 or
 * 2).  `by_peer`: some memory is on another GPU and not granted (kvbm_find_ungranted): one cuMemcpyPeerAsync per copy.  `size`:
 * bytes of every copy, if `sizes` is NULL.  `merge`: adjacent copies become one.  No byte may be written twice, or both read
 * and written. */
int kvbm_memcpy_batch(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count, int mode,
                      int merge, int by_peer, int device, uint64_t stream, int* used);

/* Copies `size` bytes from src[i] to dst[i] by a kernel on `device`, in the stream's order; one launch per 2^20 pairs. */
int kvbm_launch_pairs(const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count, int device, uint64_t stream);

/* Ranges of memory: of `sizes` bytes, or of `size` bytes each if `sizes` is NULL.  Empty ranges are ignored. */
typedef struct kvbm_spans {
  const uint64_t *addresses, *sizes;
  uint64_t size, count;
} kvbm_spans;

/* Results of kvbm_check_spans. */
enum { KVBM_SPAN_OK = 0, KVBM_SPAN_NULL_SRC, KVBM_SPAN_NULL_DST, KVBM_SPAN_DST_TWICE, KVBM_SPAN_READ_AND_WRITTEN };

/* No range is at address 0, none is written twice, none is both read and written.  *first and *second are the positions of
 * the two (READ_AND_WRITTEN: in src, in dst).  O(n).  Returns KVBM_SPAN_..., or KVBM_NO_MEMORY. */
int kvbm_check_spans(const kvbm_spans* src, const kvbm_spans* dst, uint64_t* first, uint64_t* second);

/* *device: the GPU of the first address that is on one; -2: all are in pinned host memory.  Bit n of *gpus: some are on GPU n.
 * If an address is in memory that no GPU can access, *device is -1 and *index is its position. */
int kvbm_find_device(const uint64_t* addresses, uint64_t count, int* device, uint64_t* gpus, uint64_t* index);

/* Copies the ids of one side, of `bytes` (4 or 8, signed) each, as 32 bits.  Each is read once, because another thread may be
 * writing them.  Returns KVBM_ID_OK, or KVBM_ID_RANGE with position and value of the first that is neither -1 nor a block. */
int kvbm_take_ids(const void* given, uint32_t bytes, uint32_t count, int64_t blocks, int32_t* out, int64_t* index, int64_t* id);
/* Checks that no block is written twice and, if both sides are one pool, that none is both read and written.  A NULL list is
 * 0 .. num_pairs-1.  *kept: pairs that are not skipped.  *index: position of the error.  O(n).  Returns KVBM_ID_..., or
 * KVBM_NO_MEMORY. */
int kvbm_check_ids(const int32_t* src, const int32_t* dst, uint32_t num_pairs, int64_t dst_blocks, int same_pool,
                   uint32_t* kept, int64_t* index);

/* ---- transfers (transfer.cpp, copy_engine.cpp, staging.cpp, faults.cpp) ------------------------------------------ */

enum { KVBM_NO_COPY = -1, KVBM_DIRECT = 0, KVBM_STAGED = 1, KVBM_ENGINE = 2 };

/* A staging ring: slots of device memory, a stream for the copy engine, and events between this stream and the kernels. */
typedef struct kvbm_ring kvbm_ring;
int kvbm_ring_create(int device, uint64_t slot_bytes, uint32_t slots, kvbm_ring** ring);
void kvbm_ring_destroy(kvbm_ring* ring); /* waits for the copies that use it */
void kvbm_ring_retire(kvbm_ring* ring);  /* does not wait: it is destroyed by a later allocation, after these copies */

/* The launches of every strategy between two pools.  All args are descriptions.  In a loop nest for the copy engine inner[0] is
 * a run of bytes. */
typedef struct kvbm_route {
  int device;  /* where the kernels run; -1: the host */
  int crosses; /* 1: the pools are on two GPUs, and the caller's stream may be of either */
  int by_peer; /* 1: the copy engine uses cuMemcpyPeerAsync, because the far pool has memory that is not granted */
  /* direct */
  uint32_t num_direct;
  const int* direct_kernel;
  const kvbm_args** direct;
  /* staged */
  int gathers; /* 1: a kernel packs blocks into a slot, then they are moved from there; 0: the reverse */
  uint32_t num_permute;
  const int* permute_kernel;
  const kvbm_args** permute;
  uint32_t num_moves;
  const int* move_kernel; /* kernels that move the slots, or -1: `moves` are loop nests of bytes for the copy engine */
  const kvbm_args** moves;
  uint64_t slot_block_bytes;
  kvbm_ring* ring;
  /* engine */
  uint32_t num_runs;
  const kvbm_args** runs;
  /* Kernels that copy and digest what they read, instead of `direct` and of `permute`; none: digests are separate. */
  uint32_t num_sum_direct, num_sum_permute;
  const int *sum_direct_kernel, *sum_permute_kernel;
  const kvbm_args **sum_direct, **sum_permute;
  /* Kernels that digest the slots of a staged copy whose kernels do not. */
  uint32_t num_slot_digests;
  const int* slot_digest_kernel;
  const kvbm_args** slot_digests;
  /* Kernels that only digest, of each side. */
  uint32_t num_digests[2];
  const int* digest_kernel[2];
  const kvbm_args** digest[2];
  int digests_dst; /* separate digests: 1: of the destination, after the copy; 0: of the source, before it */
  /* Tables for the engine's loop nests: those of the pools, or one base address if the allocations are at equal distances. */
  const uint64_t *src_bases, *dst_bases;
  /* Borders between adjacent allocations, or registrations of pinned memory, ascending.  The driver refuses to copy across. */
  const uint64_t* cuts;
  uint32_t num_cuts;
} kvbm_route;

typedef struct kvbm_outcome {
  uint64_t submissions; /* driver calls for copies, and kernel launches */
  int captured;         /* 1: a graph writes the fault word, or digests, at every replay */
} kvbm_outcome;

/* Waits for the producers' events, copies, and records `done` (an event, or 0), in the order of `stream`.  On the host the copy
 * is done when the call returns.  The ids must have been checked. */
int kvbm_transfer(const kvbm_route* route, const kvbm_batch* batch, int strategy, uint64_t stream, const uint64_t* waits,
                  uint32_t num_waits, uint64_t done, kvbm_outcome* outcome);

/* A word of pinned memory in which the kernels of one copy report an id that is out of range.  The words are reused, never
 * freed. */
typedef struct kvbm_fault {
  uint32_t pair;  /* kvbm_args.fault: 1 + the number of the pair */
  uint32_t users; /* the copy, and the graphs that captured it */
} kvbm_fault;
int kvbm_fault_take(int device, kvbm_fault** fault);
/* Returns one, and `event` (of `device`) with it, when the event is done.  0: now. */
void kvbm_fault_give(kvbm_fault* fault, int device, uint64_t event);

/* Each device has a pool of events. */
int kvbm_event_take(int device, uint64_t* event);
void kvbm_event_give(int device, uint64_t event);
int kvbm_event_record(int device, uint64_t event, uint64_t stream);
int kvbm_event_query(int device, uint64_t event, int* is_done);
int kvbm_event_synchronize(int device, uint64_t event);
int kvbm_stream_wait(int device, uint64_t stream, uint64_t event);
int kvbm_stream_device(uint64_t stream, int* device); /* -1: a default stream, which belongs to the current device */
int kvbm_stream_is_captured(int device, uint64_t stream, int* is_captured); /* by a graph */
int kvbm_stream_make(int device, uint64_t* stream); /* ordered with the legacy default stream, as streams are by default */
void kvbm_stream_drop(int device, uint64_t stream);
/* Lets kernels on `device` access memory of cuMemAlloc on `peer`.  *can is 0 if the machine does not allow it. */
int kvbm_enable_peer(int device, int peer, int* can);
/* Finds memory that `device` cannot access: of a stream-ordered pool (KVBM_UNGRANTED_POOL) or mapped by cuMemMap.  Access to
 * such memory is granted separately.  `spans`: `count` pairs [first, behind), sorted.  *index: the first such span, *how: its
 * memory; KVBM_GRANTED: there is none. */
enum { KVBM_GRANTED = 0, KVBM_UNGRANTED_POOL, KVBM_UNGRANTED_MAPPING };
int kvbm_find_ungranted(int device, const uint64_t* spans, uint64_t count, uint64_t* index, int* how);

int kvbm_alloc_device(int device, uint64_t bytes, uint64_t* address);
int kvbm_free_device(int device, uint64_t address); /* waits for running work, as the driver does */
/* Does not wait: a later allocation frees it, when many bytes have been retired. */
void kvbm_retire_device(int device, uint64_t address, uint64_t bytes);
/* Shares memory of kvbm_alloc_device with other processes.  They open it on the GPU whose kernels are to access it, and close
 * it when none of their work uses it.  A process cannot open its own memory. */
enum { KVBM_IPC_BYTES = 64 };
int kvbm_ipc_handle(int device, uint64_t address, void* handle);
int kvbm_ipc_open(int device, const void* handle, uint64_t* address);
int kvbm_ipc_close(int device, uint64_t address);
int kvbm_upload(int device, uint64_t dst, const void* src, uint64_t bytes); /* blocking */
/* Copies `size` bytes from src[i] to dst[i], and waits.  It is not ordered with other streams: nothing else may use the bytes.
 * */
int kvbm_copy_now(int device, const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count);
int kvbm_synchronize(int device, uint64_t stream);

/* ---- pinned host memory (memory.cpp) ------------------------------------------------------------------------------ */

/* KVBM_TOUCH_NEW clears a page, the others keep its contents. */
enum { KVBM_TOUCH_NEW = 0, KVBM_TOUCH_WRITABLE, KVBM_TOUCH_READONLY };
/* A full memory fence: earlier stores are visible to other processes before later loads. */
void kvbm_fence(void);
/* Makes the kernel allocate all pages now, on at most `threads` threads.  Only KVBM_TOUCH_NEW can fail. */
int kvbm_host_touch(uint64_t address, uint64_t bytes, int how, int threads);
/* Page-locks whole pages, for every GPU and context.  `read_only`: GPUs only read them. */
int kvbm_host_register(uint64_t address, uint64_t bytes, int read_only);
int kvbm_host_unregister(uint64_t address); /* an address that was registered */
/* Begin and end of the allocation or registration around an address.  0 and 0: the address is not in pinned host memory
 * (`pinned` = 0: not in GPU memory).  end = begin + 1: the driver does not tell the range. */
int kvbm_memory_range(uint64_t address, int pinned, uint64_t* begin, uint64_t* end);

#ifdef __cplusplus
}
#endif
#endif /* KVBM_H */
