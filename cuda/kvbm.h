/* kvbm.h: the C ABI between the compiled extension, the generated kernels and the runtime.
 *
 * No CUDA type appears here, so _core.pyx and the host kernels need no CUDA header, and one struct serves the
 * GPU kernels (as their only parameter), the host kernels and the extension.
 *
 * Vocabulary.  A *batch* copies pairs of blocks (src id, dst id).  A copy has one *part*, or several: K and V where these
 * have different orders, or the planes of a record.  A part is a loop nest in bytes: *outer* modes pick a chunk (they may step
 * through the tables of allocations), *inner* modes walk inside it, fastest first.  Strides are bytes, table strides entries.
 *
 *   address = table[id * id_table + table_offset + sum(c_k * mode_k.table)]
 *           + id * id_stride + offset + sum(c_k * mode_k.stride)          (once for src, once for dst)
 *
 * Ids may count *units*, of which several fill a block: then the digits below the block are taken out of the id first, and each
 * adds its own stride (kvbm_units).
 *
 * A kernel may also *digest* what it reads (docs/digest.md): 16 bytes at most of a row are a cell, and each cell has a *key*,
 * its place in the model's own order, which is one more sum of steps:
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
typedef long int64_t; /* as glibc's on 64-bit Linux, so that overloads and bits are nvcc's */
typedef unsigned long uint64_t;
#define UINT64_C(value) value##UL
#else
#include <stdint.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVBM_MAX_OUTER = 4,       /* modes that pick a chunk */
  KVBM_MAX_INNER = 8,       /* modes inside a chunk */
  KVBM_MAX_PARTS = 4,       /* of one launch */
  KVBM_UNIT_DIGITS = 2,     /* of an id below the block, where ids count units */
  KVBM_INLINE_BYTES = 4016, /* parts, and behind them ids and tables, in the kernel's parameters (4,096 bytes in all) */
};

/* ---- the loop nest -------------------------------------------------------------------------------------------- */

/* Division of a 31-bit index by n as a multiply-high, an add and a shift (Granlund & Montgomery, 1994). */
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
  uint32_t key;     /* keys a step, where cells are digested */
  int64_t src, dst; /* bytes a step */
} kvbm_inner;

typedef struct kvbm_outer {
  kvbm_div extent;
  uint32_t key;                 /* keys a step, where cells are digested */
  int64_t src, dst;             /* bytes a step */
  int32_t src_table, dst_table; /* table entries a step */
} kvbm_outer;

typedef struct kvbm_part {
  /* Set by the kernel's `prepare` for one batch, never by the caller.  It stands first so that what a kernel reads lies
   * together: every 64 bytes of its parameters that it touches cost a small batch 60 ns. */
  kvbm_div faster;       /* chunks, or pairs where these go first */
  uint32_t pairs_first;  /* all pairs of a chunk before the next chunk */
  kvbm_div tiles;        /* tiles a chunk */
  uint32_t words;        /* rows: words a chunk.  tiles: indices of the modes besides A and B */
  uint32_t tile_words;   /* how many of them a tile takes */
  kvbm_div tile[4];      /* rows: threads a row, rows a CTA.  tiles: sub-blocks of a tile along A and B, tiles along A and B */
  uint32_t turns_behind; /* tiles: squares are turned on the way out of shared memory, not into it */
  uint32_t jobs;         /* pairs * chunks * tiles */
  uint32_t ctas;         /* CTAs of this part */
  /* The caller's: */
  uint32_t word; /* records and pages: bytes of a load and store; others have theirs built in */
  union {
    struct {
      uint32_t item;        /* pages: bytes that one thread moves at a time, whole on the side not staged */
      uint32_t place, held; /* pages: where this part starts in shared memory, and the bytes of the dense segment that starts
                               with it; 0: it lies in another part's segment */
      uint32_t apart;       /* pages: bytes from word to word of an item in shared memory */
    };
    uint32_t cell[4]; /* digests: bytes that each binary digit of a word's number in its cell steps, fastest first */
  };
  uint32_t cell_words; /* digests: words of a cell, a power of two; tiles: 1: cells lie along A, 0: along B */
  int32_t src_table_offset, dst_table_offset; /* table entries at which this part starts (V's half, a slice) */
  int64_t src_offset, dst_offset;             /* bytes, likewise */
  int64_t src_id_stride, dst_id_stride;       /* bytes a block id */
  kvbm_outer outer[KVBM_MAX_OUTER];
  kvbm_inner inner[KVBM_MAX_INNER];
} kvbm_part;

/* How ids that count units are taken apart.  It lies in the payload, behind the last part, and only where ids do count them: a
 * copy of blocks has that room for its ids. */
typedef struct kvbm_unit_strides {
  int64_t src[KVBM_UNIT_DIGITS], dst[KVBM_UNIT_DIGITS]; /* bytes a step of each digit */
} kvbm_unit_strides;

typedef struct kvbm_units {
  kvbm_div src[KVBM_UNIT_DIGITS], dst[KVBM_UNIT_DIGITS]; /* digits of an id below the block, fastest first; unused: of 1 */
  kvbm_unit_strides part[KVBM_MAX_PARTS];                /* there are num_parts */
} kvbm_units;

/* What a kernel that digests is told besides: at the end of the payload, and only there where KVBM_DIGEST is set. */
typedef struct kvbm_digest {
  uint64_t out;            /* address of uint64_t, one a pair, to which is added */
  uint64_t positions;      /* address, or offset into the payload, of the position of each pair's first token; 0: all at 0 */
  uint64_t lanes;          /* keys a token */
  uint32_t position_bytes; /* 4 or 8, signed; 0: there are none */
  uint32_t reserved;
  uint64_t first[KVBM_MAX_PARTS]; /* key of the part's first cell at position 0 */
} kvbm_digest;

/* A kernel's whole parameter block.  Table steps of ids and the parts are the caller's description of the copy (extents made
 * by kvbm_make_div); ids and tables are set per batch by kvbm_launch and kvbm_run_host. */
typedef struct kvbm_args {
  int64_t src_id_table, dst_id_table; /* table entries a block id */
  uint32_t num_parts;
  uint32_t num_pairs;
  uint32_t id_bytes;    /* 4 or 8 (signed); 0: ids are 0 .. num_pairs-1 on both sides.  -1 skips its pair */
  uint32_t inline_mask; /* bit 0 src_ids, 1 dst_ids, 2 src_table, 3 dst_table: the field below is an offset into payload;
                           bit 4 src, 5 dst: the ids of this side are 0 .. num_pairs-1, whatever id_bytes says;
                           bit 6 src, 7 dst: the ids of this side count units;
                           bit 8: `digest` is there; bit 9: its positions lie in the payload */
  uint32_t src_blocks, dst_blocks; /* other ids that are not below these are not followed: the pair is skipped and noted */
  uint64_t fault;                  /* address of a uint32_t that takes 1 + the number of such a pair; 0: nowhere */
  uint64_t src_ids, dst_ids;       /* addresses readable where the kernel runs, or offsets into payload */
  uint64_t src_table, dst_table;   /* likewise: arrays of 64-bit base addresses */
  union {
    kvbm_part part[KVBM_MAX_PARTS];
    uint64_t payload[KVBM_INLINE_BYTES / 8]; /* free behind the last of num_parts, and behind its kvbm_units */
    struct {
      uint64_t before_digest[(KVBM_INLINE_BYTES - sizeof(kvbm_digest)) / 8];
      kvbm_digest digest;
    };
  };
} kvbm_args;

/* Bits of inline_mask that are the caller's, as the parts are; the last is a batch's. */
enum { KVBM_SRC_UNITS = 1 << 6, KVBM_DST_UNITS = 1 << 7, KVBM_DIGEST = 1 << 8, KVBM_POSITIONS_INLINE = 1 << 9 };

/* ---- the kernel table (generated: kernels_host.cpp) ------------------------------------------------------------ */

typedef struct kvbm_grid {
  uint32_t ctas, threads_x, threads_y, shared_bytes;
} kvbm_grid;

typedef struct kvbm_kernel {
  const char* name; /* also the symbol of the CUDA kernel (extern "C", one parameter: const kvbm_args) */
  int32_t image;    /* index into kvbm_images, whether or not images were built */
  uint32_t parts;   /* how many parts it copies in one launch; 0: any number */
  uint32_t teams;   /* 1: a CTA takes one piece of work.  More: so many teams of threads share a CTA, and loop over all the
                       work with as few CTAs as the launch allows; such a kernel has no host half */
  /* Sets the prepared fields of args->part[*] for args->num_pairs; `sms` = multiprocessors, or 0 for the host.
   * Returns 0, or KVBM_TOO_LARGE.  NULL: the kernel was compiled at run time, see runtime.cpp. */
  int (*prepare)(kvbm_args* args, uint32_t sms, kvbm_grid* grid);
  /* Runs jobs [first, last) of part `part` on the calling thread; jobs write disjoint bytes.  `stream_stores`: write around the cache. */
  void (*host)(const kvbm_args* args, uint32_t part, uint32_t first, uint32_t last, int stream_stores);
} kvbm_kernel;

extern const kvbm_kernel kvbm_kernels[];
extern const int32_t kvbm_num_kernels;

/* ---- kernels that were compiled at run time (runtime.cpp) ------------------------------------------------------- */

enum { KVBM_MAX_RUNTIME = 4096 }; /* of them, in one process: their numbers go on where those of the built ones end */
enum { KVBM_ROWS = 0, KVBM_TILE = 1 };

/* The structure of one part of a kernel: the template arguments of Rows or Tile. */
typedef struct kvbm_form {
  int32_t kind;          /* KVBM_ROWS, KVBM_TILE */
  int32_t outer, inner;  /* modes; a tile's inner ones besides the two that span it */
  int32_t element, word; /* bytes; rows: element is 0 */
  int32_t few;           /* 1: teams of threads share a CTA */
} kvbm_form;

/* Makes a kernel known, or gives a known one the code for another architecture (`capability`: 90 for sm_90); name and cubin are
 * copied.  *index is its number, for as long as the process lives. */
int kvbm_add_kernel(const char* name, const kvbm_form* forms, uint32_t parts, const void* cubin, uint64_t bytes, int capability,
                    int* index);
/* The kernel of this number, built or compiled at run time; NULL: there is none. */
const kvbm_kernel* kvbm_kernel_at(int kernel);

/* ---- raw copies (copy.cu) ---------------------------------------------------------------------------------------- */

typedef struct kvbm_pair {
  uint64_t src, dst; /* addresses */
} kvbm_pair;

enum { KVBM_INLINE_PAIRS = 253 }; /* that travel inside the parameters (4,096 bytes in all) */

/* The whole parameter block of kvbm_copy_pairs: the same number of bytes from each source to its destination.
 * Tile t of a pair is its bytes [t * tile_bytes, (t + 1) * tile_bytes), shifted to where the destination is aligned. */
typedef struct kvbm_pairs {
  uint64_t bytes;      /* of every pair */
  uint64_t pairs;      /* device address of the pairs; 0: they are in payload */
  kvbm_div tiles;      /* tiles a pair */
  uint32_t jobs;       /* pairs * tiles */
  uint32_t tile_bytes; /* a multiple of 16 */
  uint32_t log_width;  /* threads a tile, as a power of two: where pairs are short, several share a CTA */
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

/* ---- runtime (driver.cpp, memory.cpp, launch.cpp, host.cpp, engine.cpp) --------------------------------------------------
 * Status codes: 0 is success, positive values are CUresult, negative ones are ours. */
enum {
  KVBM_OK = 0,
  KVBM_NO_DRIVER = -1,   /* libcuda.so.1 is not there, or too old */
  KVBM_NOT_BUILT = -2,   /* built without CUDA kernels */
  KVBM_TOO_LARGE = -3,   /* an index does not fit 31 bits */
  KVBM_NO_FUNCTION = -4, /* the driver lacks an optional function (cuMemcpyBatchAsync) */
  KVBM_NO_MEMORY = -5,   /* host memory */
  KVBM_FORKED = -6,      /* CUDA was used before fork() */
  KVBM_NOT_GRANTED = -7, /* another GPU's memory that is not granted, and no call that copies it */
  KVBM_TOO_MANY = -8,    /* more than KVBM_MAX_RUNTIME kernels compiled at run time */
};

/* What is wrong with a batch's ids: kvbm_take_ids and kvbm_check_ids. */
enum { KVBM_ID_OK = 0, KVBM_ID_RANGE, KVBM_ID_DST_TWICE, KVBM_ID_READ_AND_WRITTEN };

/* One side of a batch: which blocks, and where they lie.  A pool's blocks are named by ids; those of a slot of a ring are
 * 0 .. num_pairs-1 in one allocation.  Whoever changes the one for the other changes all of it. */
typedef struct kvbm_side {
  const int32_t* ids;    /* host memory, checked; copied before the call returns.  NULL: 0 .. num_pairs-1.  -1 skips a pair */
  uint64_t ids_device;   /* ids that lie on the device and are read when the kernel runs, or 0 */
  const uint64_t* table; /* host memory, copied before the call returns; unused if the next is set */
  uint64_t table_device; /* a table that already lies on the device, or 0 */
  uint32_t entries;      /* of the table */
  uint32_t blocks;       /* ids that are not below this are not followed: the pair is skipped and noted */
} kvbm_side;

typedef struct kvbm_batch {
  uint32_t num_pairs;
  uint32_t kept;     /* pairs that are not skipped, as far as the host knows */
  uint32_t id_bytes; /* of ids on the device: 4 or 8, on both sides */
  kvbm_side src, dst;
  uint64_t fault;            /* where the kernel notes an id that is out of range (kvbm_args.fault), or 0 */
  const int64_t* positions;  /* of each pair's first token, where it is digested: host memory, copied before the call returns */
  uint64_t positions_device; /* the same on the device, `position_bytes` each and read when the kernel runs, or 0; neither: 0 */
  uint32_t position_bytes;
  uint32_t adds;                  /* digests are added to what is there */
  uint64_t digests;               /* address of a uint64_t a pair, or 0: of what is copied */
  uint64_t both[2];               /* likewise: of the source before, and of the destination after the copy */
  uint32_t digests_far, both_far; /* whether these lie in pinned host memory, which kernels do not add to */
  uint32_t max_ctas; /* of a kernel with teams: CTAs of its grid at most (one a multiprocessor); 0: one a multiprocessor */
} kvbm_batch;

/* Which call failed last on this thread, e.g. "cuModuleLoadData"; never NULL. */
const char* kvbm_last_call(void);
const char* kvbm_status_name(int status); /* "CUDA_ERROR_INVALID_VALUE", "KVBM_NO_DRIVER" */
const char* kvbm_status_text(int status); /* a sentence */

int kvbm_driver_version(int* version); /* KVBM_NO_DRIVER without a driver */
int kvbm_device_count(int* count);
int kvbm_device_info(int device, char* name, int name_bytes, int* major, int* minor, int* sms, uint64_t* memory);
/* The device that an address lies on: *device >= 0, or -1 host memory the driver does not know, or -2 pinned host memory. */
int kvbm_pointer_device(uint64_t address, int* device);
int kvbm_has_memcpy_batch(void);

/* Loads every image on the device and finds this kernel (-1: every kernel): so that nothing is loaded later, beside a
 * running model. */
int kvbm_warm(int kernel, int device);
/* One kernel launch on `stream` of `device` (with its primary context pushed).  `args` is the caller's template and is not
 * changed.  Ids and tables travel in the parameters where they fit, else through a pinned ring released by events.  While
 * `stream` captures a graph, what does not fit takes a pair of buffers that is never released (replays read it). */
int kvbm_launch(int kernel, const kvbm_args* args, const kvbm_batch* batch, int device, uint64_t stream);
/* The same on the host, on at most `threads` threads (0: all cores), blocking. */
int kvbm_run_host(int kernel, const kvbm_args* args, const kvbm_batch* batch, int threads);
/* Rows of cells in host memory: those of a row lie one after the other. */
typedef struct kvbm_cells {
  const char* src;
  char* dst;                  /* where they are copied to, too, or NULL */
  uint64_t count, rows;       /* cells a row */
  int64_t src_row, dst_row;   /* bytes from row to row */
  uint64_t key;               /* of the first cell */
  uint64_t key_step, key_row; /* from cell to cell, and from row to row */
  int streaming;              /* the copy goes around the cache */
} kvbm_cells;

/* Digest of cells of 16 bytes. */
uint64_t kvbm_digest_cells(const kvbm_cells* cells);

/* mode: 0 batched with fallback, 1 one call a copy, 2 batched only.  *used tells the mode that ran (1 or 2).  `by_peer`: some
 * memory is another GPU's and not granted (kvbm_find_ungranted): one cuMemcpyPeerAsync a copy.  `size` is used for every copy where `sizes` is NULL.  `merge`: copies where source and destination go on where those of the
 * copy before end are made one with it.  No byte may be written twice, or both read and written. */
int kvbm_memcpy_batch(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count, int mode,
                      int merge, int by_peer, int device, uint64_t stream, int* used);

/* Copies `size` bytes from src[i] to dst[i] by a kernel of `device` in the stream's order: one launch for 2^20 pairs. */
int kvbm_launch_pairs(const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count, int device, uint64_t stream);

/* Ranges of memory: `sizes` bytes each, or `size` each where `sizes` is NULL.  Empty ones touch nothing. */
typedef struct kvbm_spans {
  const uint64_t *addresses, *sizes;
  uint64_t size, count;
} kvbm_spans;

/* Which rule two lists of ranges break: what kvbm_check_spans found. */
enum { KVBM_SPAN_OK = 0, KVBM_SPAN_NULL_SRC, KVBM_SPAN_NULL_DST, KVBM_SPAN_DST_TWICE, KVBM_SPAN_READ_AND_WRITTEN };

/* No range is at address 0, none is written twice, none is both read and written.  *first and *second are the positions of
 * the two (READ_AND_WRITTEN: in src, in dst).  O(n).  Returns KVBM_SPAN_..., or KVBM_NO_MEMORY. */
int kvbm_check_spans(const kvbm_spans* src, const kvbm_spans* dst, uint64_t* first, uint64_t* second);

/* The device of the first address that lies on a GPU, or -2: all of them lie in pinned host memory.  Bit n of *gpus: some lie
 * on GPU n.  Where one lies in memory that no GPU reaches, *device is -1 and *index its position. */
int kvbm_find_device(const uint64_t* addresses, uint64_t count, int* device, uint64_t* gpus, uint64_t* index);

/* Copies one side's ids of `bytes` (4 or 8, signed) each, as 32 bits; each is read once, as another thread may be writing them.
 * KVBM_ID_OK, or KVBM_ID_RANGE with the position and the value of the first that is neither -1 nor a block. */
int kvbm_take_ids(const void* given, uint32_t bytes, uint32_t count, int64_t blocks, int32_t* out, int64_t* index, int64_t* id);
/* No block is written twice and, where both sides are one pool, none is both read and written; NULL: 0 .. num_pairs-1, or not
 * known.  *kept: pairs that are not skipped; *index: the offending position.  O(n).  Returns KVBM_ID_..., or KVBM_NO_MEMORY. */
int kvbm_check_ids(const int32_t* src, const int32_t* dst, uint32_t num_pairs, int64_t dst_blocks, int same_pool,
                   uint32_t* kept, int64_t* index);

/* ---- transfers (engine.cpp) -------------------------------------------------------------------------------------- */

enum { KVBM_NO_COPY = -1, KVBM_DIRECT = 0, KVBM_STAGED = 1, KVBM_ENGINE = 2 };

/* Device memory in slots, a stream of its own for the copy engine, and the events between both. */
typedef struct kvbm_ring kvbm_ring;
int kvbm_ring_create(int device, uint64_t slot_bytes, uint32_t slots, kvbm_ring** ring);
void kvbm_ring_destroy(kvbm_ring* ring); /* waits for the copies that use it */
void kvbm_ring_retire(kvbm_ring* ring);  /* the same later, when these are done and memory is allocated */

/* One way from pool to pool.  All args are templates; a loop nest for the copy engine is one of bytes: inner[0] is a run. */
typedef struct kvbm_route {
  int device;  /* where the kernels run; -1: the host */
  int crosses; /* the pools lie on two GPUs: the caller's stream may be of either */
  int by_peer; /* the engine crosses by cuMemcpyPeerAsync: the far pool has memory that is not granted (kvbm_find_ungranted) */
  /* direct */
  uint32_t num_direct;
  const int* direct_kernel;
  const kvbm_args** direct;
  /* staged: `gathers`: a kernel packs blocks into a slot and the engine takes them from there; else the reverse */
  int gathers;
  uint32_t num_permute;
  const int* permute_kernel;
  const kvbm_args** permute;
  uint32_t num_moves;
  const kvbm_args** moves;
  uint64_t slot_block_bytes;
  kvbm_ring* ring;
  /* engine */
  uint32_t num_runs;
  const kvbm_args** runs;
  /* Digests.  Of what is read, fused into the copies: in place of `direct`, and of `permute`, where there are any. */
  uint32_t num_sum_direct, num_sum_permute;
  const int *sum_direct_kernel, *sum_permute_kernel;
  const kvbm_args **sum_direct, **sum_permute;
  /* And by themselves, of each side. */
  uint32_t num_digests[2];
  const int* digest_kernel[2];
  const kvbm_args** digest[2];
  int digests_dst; /* where they are not fused: of the destination, when the copy is done */
  /* The tables as the engine's loop nests count them: the pools', or one base address where allocations lie at a step. */
  const uint64_t *src_bases, *dst_bases;
  /* Where one allocation, or registration of pinned memory, ends and the next begins, ascending: the engine refuses a copy
   * that crosses one. */
  const uint64_t* cuts;
  uint32_t num_cuts;
} kvbm_route;

typedef struct kvbm_outcome {
  uint64_t submissions; /* calls of the copy engine, and kernels */
  int captured;         /* a graph reads the fault word at every replay: it is the graph's, too */
} kvbm_outcome;

/* Waits for the producers' events, copies, and records `done` (an event, or 0), all in the order of `stream`; on the host the
 * copy is done when the call returns.  The ids are checked. */
int kvbm_transfer(const kvbm_route* route, const kvbm_batch* batch, int strategy, uint64_t stream, const uint64_t* waits,
                  uint32_t num_waits, uint64_t done, kvbm_outcome* outcome);

/* Digests of the blocks that batch->src names into batch->digests, and nothing is copied; otherwise as kvbm_transfer. */
int kvbm_digest_blocks(const kvbm_route* route, const kvbm_batch* batch, uint64_t stream, const uint64_t* waits,
                       uint32_t num_waits, uint64_t done, kvbm_outcome* outcome);

/* Pinned memory in which the kernels of one copy note an id that is out of range.  They come from a pool, and live for ever. */
typedef struct kvbm_fault {
  uint32_t pair;  /* kvbm_args.fault: 1 + the number of the pair */
  uint32_t users; /* the copy, and graphs that it was captured into */
} kvbm_fault;
int kvbm_fault_take(int device, kvbm_fault** fault);
/* Gives one back once the copy's event (of `device`) is done, and the event with it. */
void kvbm_fault_give(kvbm_fault* fault, int device, uint64_t event);

/* Events come from a pool a device and go back there. */
int kvbm_event_take(int device, uint64_t* event);
void kvbm_event_give(int device, uint64_t event);
int kvbm_event_record(int device, uint64_t event, uint64_t stream);
int kvbm_event_query(int device, uint64_t event, int* is_done);
int kvbm_event_synchronize(int device, uint64_t event);
int kvbm_stream_wait(int device, uint64_t stream, uint64_t event);
int kvbm_stream_device(uint64_t stream, int* device); /* -1: the legacy stream, which is of whichever device is current */
/* Lets kernels on `device` reach what `peer` has from cuMemAlloc.  *can is 0 where the machine does not allow it. */
int kvbm_enable_peer(int device, int peer, int* can);
/* Memory that is granted by itself, and not to `device`: of a stream-ordered pool (KVBM_UNGRANTED_POOL), or mapped by cuMemMap.
 * `spans`: `count` of [first, behind), sorted by the first.  *how tells what span *index found, KVBM_GRANTED: none. */
enum { KVBM_GRANTED = 0, KVBM_UNGRANTED_POOL, KVBM_UNGRANTED_MAPPING };
int kvbm_find_ungranted(int device, const uint64_t* spans, uint64_t count, uint64_t* index, int* how);

int kvbm_alloc_device(int device, uint64_t bytes, uint64_t* address);
int kvbm_free_device(int device, uint64_t address); /* waits for running work, as the driver does */
/* The same later, when something is allocated and there is much of it: whoever drops a table must not wait for the GPU. */
void kvbm_retire_device(int device, uint64_t address, uint64_t bytes);
/* Memory of kvbm_alloc_device for other processes: what they open it with, and close once none of their work uses it.  It is
 * opened on the GPU whose kernels are to reach it.  A process cannot open its own. */
enum { KVBM_IPC_BYTES = 64 };
int kvbm_ipc_handle(int device, uint64_t address, void* handle);
int kvbm_ipc_open(int device, const void* handle, uint64_t* address);
int kvbm_ipc_close(int device, uint64_t address);
int kvbm_upload(int device, uint64_t dst, const void* src, uint64_t bytes); /* blocking */
/* Copies `size` bytes from src[i] to dst[i], beside whatever runs on streams, and waits: for bytes that nobody else uses. */
int kvbm_copy_now(int device, const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count);
int kvbm_synchronize(int device, uint64_t stream);

/* ---- host memory that GPUs reach (memory.cpp) ---- */

/* What touching may do to a page: KVBM_TOUCH_NEW clears it, the others keep what it holds. */
enum { KVBM_TOUCH_NEW = 0, KVBM_TOUCH_WRITABLE, KVBM_TOUCH_READONLY };
/* What was written before it is there for other processes before anything behind it is read: a full fence. */
void kvbm_fence(void);
/* Gives every page its memory, on at most `threads` threads.  Only KVBM_TOUCH_NEW can fail. */
int kvbm_host_touch(uint64_t address, uint64_t bytes, int how, int threads);
/* Page-locks whole pages, for every GPU and context; `read_only`: GPUs only read them. */
int kvbm_host_register(uint64_t address, uint64_t bytes, int read_only);
int kvbm_host_unregister(uint64_t address); /* exactly what was registered */
/* Where the memory around an address begins and ends: one allocation or registration.  0 and 0 where it is not pinned host memory
 * (`pinned` = 0: not a GPU's); the address alone (end = begin + 1) where the driver says no more. */
int kvbm_memory_range(uint64_t address, int pinned, uint64_t* begin, uint64_t* end);

#ifdef __cplusplus
}
#endif
#endif /* KVBM_H */
