/* A libcuda.so.1 for machines without a GPU.  It shares kvbm.h with the code it stands under, and nothing else.
 *
 * What it simulates
 *   Memory    Device memory is host memory.  All addresses lie on GPU 0, in cuMemAlloc's memory, but for registrations and for
 *             what a test names: `fake_pinned`, `fake_ordinary`, and with fake_memory() pools and mappings of a GPU, granted to
 *             some GPUs or none; kernels and copies that touch what they are not granted are counted in `illegal`.
 *   Kernels   A launch runs the loop nest of its parameters by plain recursion; one that digests leaves the sums where the real one
 *             does, of which no single one tells anything: they add up.  `fake_wrong` = n: n kernels from then on turn a bit of what
 *             they write, and digest what they read.  With FAKE_KERNELS (a list of libraries, made by emulation.py) a launch runs the
 *             kernel's own code instead, its threads in turns (emulated_gpu.h); a kernel that is in none of them aborts.
 *   Streams   Work of one stream runs in its order, of several in any order that events allow (`fake_seed`), when it is pumped
 *             (`deferred`, fake_pump) or at once.  Streams that tests make up are numbers: 5 is GPU 0's, 0x105 GPU 1's; 0, 1
 *             (both the legacy stream) and 2 are the current GPU's.  A batched copy on the legacy stream is refused.
 *   Events    A record is of the GPU that the event was made on; another's stream may wait for it.
 *   Capture   One at a time (fake_begin_capture, fake_end_capture), also on stream 2.  A wait draws a stream in, which must come
 *             back; work on it is kept, not done.  Calls that a capture in the global mode does not survive, and waiting on the
 *             host for a stream that is captured, are counted in `broken_captures`.
 *   Faults    The environment: FAKE_INIT, FAKE_LOAD, FAKE_LAUNCH, FAKE_REGISTER (a CUresult), FAKE_REGISTER_FROM,
 *             FAKE_MOST_BYTES, FAKE_NO_RANGES, FAKE_PEERS (1), FAKE_VERSION (13000), FAKE_DEVICES (1).  `fake_fail_at` = n: the n-th call from
 *             then on that can fail does, before it does anything; `fake_failed` is its name.  `fake_room` = n: allocations on the
 *             GPU and pinned ones may take n bytes more, and are then refused.  `fake_full` = 1: launches wait until it is 0 again.
 *   Counters  What is alive: `live` events, streams, allocations and pinned allocations, modules, mappings of other processes; and what was done, below.
 *
 * What it does not
 *   Time, real threads of a GPU, caches, the legacy stream's waiting for other streams, contexts besides
 *   the primary ones, errors that come late or last (a context that is lost), limits of memory, IPC, graphs that are updated. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbm.h"

typedef unsigned long long Address;
typedef void *Handle;

static int knob(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

/* ---- what the tests read and steer: counters of all threads ---- */
_Atomic long copies_2d, registered;
unsigned register_flags; /* of the last registration */
_Atomic long pushes, pops, slots, launches, single_copies, batches, batch_on_legacy;
_Atomic long batched_copies; /* that the batches held */
_Atomic long lookups;        /* of addresses */
_Atomic long driver_calls;   /* of all functions that a copy calls */
_Atomic long uploads;        /* by cuMemcpyHtoDAsync: ids and tables that no parameters hold */
_Atomic long allocated_bytes; /* on GPUs, ever */
Address fake_largest[2];      /* of these allocations the first of the largest ones, until it is freed: [from, to) */
static pthread_mutex_t largest_lock = PTHREAD_MUTEX_INITIALIZER; /* any thread allocates and frees */
_Atomic long few_ctas;       /* of the largest launch of a kernel that keeps to a few multiprocessors */
Address fake_pinned[2], fake_ordinary[2];
enum { EVENTS, STREAMS, ALLOCATIONS, PINNED, MODULES, MAPPINGS };
_Atomic long live[6];
_Atomic long peer_copies; /* by cuMemcpyPeerAsync */
_Atomic long illegal;     /* accesses of memory without a grant */
_Atomic long digests;     /* kernels that digest */
_Atomic long fake_wrong;
_Atomic long fake_room = -1; /* without a limit */
_Atomic long fake_full;      /* 1: launches wait until it is 0, as with a full queue; 2: one waits */
_Atomic long fake_fail_at;
const char *fake_failed;
static int fails(const char *call) {
  if (fake_fail_at == 0 || --fake_fail_at) return 0;
  return fake_failed = call, 1;
}
/* The first statement of a call that can fail: CUDA_ERROR_OPERATING_SYSTEM, which nothing handles in a way of its own. */
#define MAY_FAIL  \
  ++driver_calls; \
  if (fails(__func__)) return 304

static int is_full(size_t bytes) {
  if (fake_room < 0) return 0;
  if ((long)bytes > fake_room) return 1;
  return fake_room -= bytes, 0;
}

/* ---- memory that is granted by itself ---- */
enum { POOL = 1, MAPPING = 2 };
static struct Memory {
  Address begin, end;
  int kind, device;
  unsigned granted; /* a bit a GPU */
} memories[64];
static int num_memories;
void fake_memory(Address begin, Address end, int kind, int device, unsigned granted) {
  memories[num_memories++] = (struct Memory){begin, end, kind, device, granted};
}
static struct Memory *memory_at(Address at) {
  for (int i = num_memories - 1; i >= 0; --i) /* the last one named */
    if (memories[i].begin <= at && at < memories[i].end) return &memories[i];
  return NULL;
}
static void access(const void *at, int device) {
  const struct Memory *memory = memory_at((Address)at);
  if (memory && !(memory->granted >> device & 1)) ++illegal;
}
int deferred; /* work waits for fake_pump instead of being done at once */

/* ---- work: in the order of its submission on each stream, and in any order between streams ---- */
typedef struct Record { /* one record of an event */
  _Atomic int done;    /* asked for by any thread */
  struct Graph *graph; /* of a capture: where it belongs */
} Record;
typedef struct Event {
  int device;
  Record *last;
} Event;
typedef struct Clear { /* the parameters of kvbm_clear */
  Address digests;
  uint64_t count;
} Clear;
typedef struct Work {
  enum { COPY, LAUNCH, EVENT, WAIT } kind;
  Handle stream;
  void *to;         /* EVENT, WAIT: the record */
  const void *from; /* COPY: source.  LAUNCH: the kernel's name */
  size_t bytes;     /* LAUNCH: CTAs */
  int device;       /* where it runs; COPY: -1, any reaches both sides */
  unsigned threads, shared; /* LAUNCH: of a CTA, and its bytes of shared memory */
  int early;                /* LAUNCH: may start before the digests are clear */
  union {
    kvbm_args args;
    kvbm_pairs pairs;
    Clear clear;
  };
  long number; /* of its submission */
  struct Work *next;
} Work;
typedef struct Queue {
  Work *first, **last;
} Queue;
static struct Lane { /* what waits on a stream; a lane that is empty is anybody's */
  Handle stream;
  Queue work;
} lanes[64];
static int num_lanes;
static long submitted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
unsigned fake_seed; /* 0: work is done in the order of its submission; else in any that streams and events allow */

static const uint64_t *list(const kvbm_args *a, int bit, uint64_t field) {
  return (const uint64_t *)(a->inline_mask >> bit & 1 ? (const char *)a->payload + field : (const char *)field);
}

static int64_t block(const kvbm_args *a, int bit, uint64_t field, uint32_t i) {
  if (a->id_bytes == 0 || a->inline_mask >> (4 + bit) & 1) return i;
  return a->id_bytes == 4 ? ((const int32_t *)list(a, bit, field))[i] : ((const int64_t *)list(a, bit, field))[i];
}

static int running_on; /* the GPU of the kernel */
static int is_wrong;   /* whether it writes what it did not read */

typedef struct Place {
  int64_t src, dst, src_entry, dst_entry;
  uint64_t key;
} Place;

/* ---- digests: docs/reference/digest.md ---- */
static enum { NO_DIGEST, ALONE, BESIDE } summing; /* what the kernel does */
static uint64_t sum;                              /* of a pair */
static int turned;                                /* ALONE: bytes of the elements of words that cells share; 0: they share none */

static uint64_t folded(uint64_t x) { return x ^ x >> 32; }

static void add_cell(const char *at, const kvbm_part *p, int64_t word, uint32_t words, uint64_t key) {
  static const uint64_t of_word[] = {0xa55c9364d6777aa3u, 0xb78448c894e972e3u, 0x1e2754521961ffbbu, 0x055ccea021bda7a7u};
  uint64_t content = 0xa0761d6478bd642fu;
  uint32_t x[4] = {0};
  if (word * words > 16 || 16 % (word * words)) abort();
  for (uint32_t j = 0; j < words; ++j) {
    int64_t from = 0;
    for (int bit = 0; words >> bit > 1; ++bit) from += j >> bit & 1 ? p->cell[bit] : 0;
    memcpy((char *)x + j * word, at + from, word);
  }
  for (int i = 0; i < 4; ++i) content += x[i] * of_word[i];
  sum += (folded(folded(key * 0xbf58476d1ce4e5b9u) * 0x94d049bb133111ebu) | 1) * folded(content);
}

static uint64_t position(const kvbm_args *a, uint32_t pair) {
  const uint64_t at = a->digest.positions;
  if (a->digest.position_bytes == 0) return 0;
  if (a->inline_mask & KVBM_POSITIONS_INLINE) return ((const int64_t *)((const char *)a->payload + at))[pair];
  return a->digest.position_bytes == 4 ? ((const int32_t *)at)[pair] : ((const int64_t *)at)[pair];
}

/* To what is there: kernels that run one after the other make one digest. */
static void leave_sum(const kvbm_args *a, uint32_t pair) {
  uint64_t *out = (uint64_t *)a->digest.out + pair;
  access(out, running_on);
  *out += sum;
}

/* What is staged in shared memory by a page: an item of it lies there in words of a size that is compiled, `word_stride` bytes from
 * one to the next; here as in memory. */
static enum { NOTHING, SOURCE, DESTINATION } staged;

static void move(char *dst, const char *src, int64_t unit, const kvbm_part *p) {
  access(src, running_on), access(dst, running_on);
  const int fetched = p->word == p->item && (staged == SOURCE ? p->word == 16 : p->word >= 4);
  const int word = p->item < 4 || p->word < 4 ? 1 : 4;
  if (staged == NOTHING || fetched) memcpy(dst, src, unit);
  for (int k = 0; staged != NOTHING && !fetched && k < unit / word; ++k)
    memcpy(dst + k * (staged == SOURCE ? word : p->word_stride), src + k * (staged == SOURCE ? p->word_stride : word), word);
  if (is_wrong) *dst ^= 1, is_wrong = 0;
}

static void walk(const kvbm_args *a, const kvbm_part *p, int mode, int64_t unit, Place at) {
  if (mode == KVBM_MAX_OUTER + KVBM_MAX_INNER) {
    const char *from = (char *)list(a, 2, a->src_table)[at.src_entry] + at.src;
    if (summing == ALONE) access(from, running_on);
    for (int j = 0; summing == ALONE && j < (turned ? 16 / turned : 1); ++j)
      add_cell(from + j * turned, p, p->word, p->cell_words, at.key + j * (turned ? p->inner[0].key / (16 / turned) : 0));
    if (summing == BESIDE) add_cell(from, p, unit, 1, at.key);
    if (summing == ALONE) return;
    move((char *)list(a, 3, a->dst_table)[at.dst_entry] + at.dst, (char *)list(a, 2, a->src_table)[at.src_entry] + at.src, unit, p);
    return;
  }
  const kvbm_outer *o = mode < KVBM_MAX_OUTER ? &p->outer[mode] : NULL;
  const kvbm_inner *i = o ? NULL : &p->inner[mode - KVBM_MAX_OUTER];
  const uint32_t extent = o ? o->extent.n : i->extent.n;
  for (uint32_t c = 0; c < (extent ? extent : 1); ++c) {
    walk(a, p, mode + 1, unit, at);
    at.src += o ? o->src : i->src;
    at.dst += o ? o->dst : i->dst;
    at.src_entry += o ? o->src_table : 0;
    at.dst_entry += o ? o->dst_table : 0;
    at.key += o ? o->key : i->key;
  }
}

/* A tile's cells are the words of one side: along A in the source as they lie, along B of elements that lie apart there. */
static void digest_tile(const kvbm_args *a, const kvbm_part *p, int64_t element, Place at) {
  kvbm_part cells = *p;
  const uint32_t count = 16 / element;
  kvbm_inner *side = &cells.inner[p->cell_words ? 0 : 1];
  cells.word = p->cell_words ? 16 : element;
  cells.cell_words = p->cell_words ? 1 : count;
  for (int bit = 0; !p->cell_words && bit < 4; ++bit) cells.cell[bit] = (uint32_t)side->src << bit;
  side->extent.n /= count;
  side->src *= count;
  summing = ALONE;
  walk(a, &cells, 0, 16, at);
  summing = NO_DIGEST; /* until the elements are moved */
}

/* Kernels of rows on few multiprocessors digest if they are given keys. */
static int does_digest(const char *name, const kvbm_args *a) {
  return !strncmp(name, "sum_", 4) || (!strncmp(name, "few_rows", 8) && a->inline_mask & KVBM_DIGEST);
}

static void run_kernel(const char *name, const kvbm_args *a) {
  summing = !strncmp(name, "digest", 6) ? ALONE : does_digest(name, a) ? BESIDE : NO_DIGEST;
  if (!!summing != !!(a->inline_mask & KVBM_DIGEST)) abort();
  turned = summing == ALONE && strstr(name, "_e") ? atoi(strstr(name, "_e") + 2) : 0;
  if (summing) ++digests;
  is_wrong = summing != ALONE && fake_wrong > 0 && fake_wrong--;
  if (!strncmp(name, "few_", 4) || summing == BESIDE) name += 4;
  staged = !strncmp(name, "page_in", 7) ? SOURCE : !strncmp(name, "page_out", 8) ? DESTINATION : NOTHING;
  for (uint32_t part = 0; part < a->num_parts; ++part) {
    const char *joined = strstr(name, "__"); /* a name a part; planes have one for all */
    const char *segment = part && joined ? joined + 2 : name;
    if (!strncmp(segment, "sum_", 4)) segment += 4;
    const kvbm_part *p = &a->part[part];
    int64_t unit = p->inner[0].src; /* a word; a tile's modes step elements, whose size is in its name */
    if (staged) unit = p->item;
    if (!strncmp(segment, "tile", 4)) unit = atoi(strstr(segment, "_e") + 2);
    for (uint32_t i = 0; i < a->num_pairs; ++i) {
      int64_t src = block(a, 0, a->src_ids, i), dst = block(a, 1, a->dst_ids, i), src_unit = 0, dst_unit = 0;
      sum = 0;
      if (src == -1 || dst == -1) {
        continue;
      }
      const int is_there = src >= 0 && dst >= 0 && src < a->src_blocks && dst < a->dst_blocks;
      const kvbm_units *u = (const kvbm_units *)&a->part[a->num_parts];
      for (int k = 0; k < KVBM_UNIT_DIGITS; ++k) {
        if (a->inline_mask & KVBM_SRC_UNITS) src_unit += src % u->src[k].n * u->part[part].src[k], src /= u->src[k].n;
        if (a->inline_mask & KVBM_DST_UNITS) dst_unit += dst % u->dst[k].n * u->part[part].dst[k], dst /= u->dst[k].n;
      }
      const Place at = {p->src_offset + src_unit + src * p->src_id_stride, p->dst_offset + dst_unit + dst * p->dst_id_stride,
                        p->src_table_offset + src * a->src_id_table, p->dst_table_offset + dst * a->dst_id_table,
                        summing ? a->digest.first[part] + position(a, i) * a->digest.lanes : 0};
      if (is_there && summing == BESIDE && !strncmp(segment, "tile", 4)) digest_tile(a, p, unit, at);
      if (is_there)
        walk(a, p, 0, unit, at);
      else if (a->fault)
        *(uint32_t *)a->fault = i + 1;
      if (!strncmp(segment, "tile", 4) && summing == NO_DIGEST && (a->inline_mask & KVBM_DIGEST)) summing = BESIDE;
      if (is_there && summing) leave_sum(a, i);
    }
  }
}

/* copy.cu's: each CTA of 128 threads takes as many tiles as its tiles have threads for. */
static void run_pairs(const kvbm_pairs *p, size_t ctas) {
  const kvbm_pair *list = p->pairs ? (const kvbm_pair *)p->pairs : p->payload;
  const uint64_t rows = 128 >> p->log_width;
  if (ctas != (p->jobs + rows - 1) / rows || p->tile_bytes % 16 || p->tiles.n * (uint64_t)p->tile_bytes < p->bytes) abort();
  for (uint64_t job = 0; job < ctas * rows && job < p->jobs; ++job) {
    const kvbm_pair at = list[job / p->tiles.n];
    const uint64_t tile = job % p->tiles.n, skew = at.dst % 16;
    const uint64_t from = tile ? tile * p->tile_bytes - skew : 0;
    const uint64_t to = tile + 1 < p->tiles.n ? (tile + 1) * p->tile_bytes - skew : p->bytes;
    access((char *)at.dst, running_on), access((char *)at.src, running_on);
    memcpy((char *)at.dst + from, (const char *)at.src + from, to - from);
  }
}

/* A kernel that starts early finds noise where its digests shall be, until it waits for their clearing: that is as late as can be.
 * One that adds before it waits, or never waits, loses what it added. */
static const kvbm_args *unclear;
static void clear_now(void) {
  if (unclear) memset((void *)unclear->digest.out, 0, 8 * (size_t)unclear->num_pairs);
  unclear = NULL;
}
static void start_early(const Work *work) {
  if (!work->early) return;
  unclear = &work->args;
  memset((void *)unclear->digest.out, 0x5a, 8 * (size_t)unclear->num_pairs);
}

/* The kernel itself, of the libraries that FAKE_KERNELS names (tests/helpers/emulation.py); false: what it means is done instead,
 * also for a kernel that they do not have, if FAKE_KERNELS_ARE_SOME is set. */
_Atomic long emulated;
static int run_device_code(const Work *work) {
  const char *libraries = getenv("FAKE_KERNELS");
  char name[256];
  void (*launch)(const void *, unsigned, unsigned, unsigned) = NULL, (**waits)(void) = NULL;
  if (!libraries || fake_wrong > 0) return 0; /* what a kernel does wrong, this driver does itself */
  if (snprintf(name, sizeof name, "emulated_%s", (const char *)work->from) >= (int)sizeof name) abort();
  char *copy = strdup(libraries), *rest = copy;
  for (char *path; !launch && (path = strsep(&rest, ":"));) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library) fprintf(stderr, "fake driver: %s\n", dlerror()), abort();
    *(void **)&launch = dlsym(library, name);
    *(void **)&waits = dlsym(library, "emulated_wait");
  }
  free(copy);
  if (!launch && getenv("FAKE_KERNELS_ARE_SOME")) return 0;
  if (!launch) fprintf(stderr, "fake driver: %s is in none of %s\n", name, libraries), abort();
  if (waits) *waits = clear_now; /* no library needs it whose kernels add nothing */
  start_early(work);
  launch(&work->args, work->bytes, work->threads, work->shared);
  clear_now();
  digests += !strncmp(work->from, "digest", 6) || does_digest(work->from, &work->args);
  return ++emulated;
}

static void run_work(Work *work) {
  running_on = work->device;
  if (work->kind == COPY && work->device >= 0) access(work->to, work->device), access(work->from, work->device);
  if (work->kind == COPY) memcpy(work->to, work->from, work->bytes);
  const int clears = work->kind == LAUNCH && !strcmp(work->from, "kvbm_clear");
  if (clears) access((void *)work->clear.digests, work->device);
  if (work->kind == LAUNCH && run_device_code(work)) return;
  if (clears)
    memset((void *)work->clear.digests, 0, 8 * work->clear.count);
  else if (work->kind == LAUNCH && !strcmp(work->from, "kvbm_copy_pairs"))
    run_pairs(&work->pairs, work->bytes);
  else if (work->kind == LAUNCH)
    run_kernel(work->from, &work->args);
  if (work->kind == EVENT) ((Record *)work->to)->done = 1;
}

/* The lane of a stream; NULL if nothing waits there. */
static struct Lane *lane_of(Handle stream) {
  for (int i = 0; i < num_lanes; ++i)
    if (lanes[i].work.first && lanes[i].stream == stream) return &lanes[i];
  return NULL;
}

static struct Lane *new_lane(Handle stream) {
  int i = 0;
  while (i < num_lanes && lanes[i].work.first) ++i;
  if (i == 64) abort();
  num_lanes += i == num_lanes;
  lanes[i] = (struct Lane){stream, {NULL, &lanes[i].work.first}};
  return &lanes[i];
}

/* The lane of the next work of all, or of one stream: its first has nothing to wait for. */
static struct Lane *choose(Handle stream) {
  struct Lane *ready[64], *earliest = NULL;
  int choices = 0, waiting = 0;
  for (struct Lane *at = lanes; at < lanes + num_lanes; ++at) {
    const Work *work = at->work.first;
    waiting += work != NULL;
    if (!work || (work->kind == WAIT && !((Record *)work->to)->done)) continue;
    if (stream && at->stream == stream) return at;
    if (!earliest || work->number < earliest->work.first->number) earliest = at;
    ready[choices++] = at;
  }
  if (waiting && !choices) abort(); /* a deadlock */
  return fake_seed && choices ? ready[rand_r(&fake_seed) % choices] : earliest;
}

static int run_one(Handle stream) {
  struct Lane *at = choose(stream);
  if (!at) return 0;
  Work *work = at->work.first;
  if (!(at->work.first = work->next)) at->work.last = &at->work.first;
  run_work(work);
  free(work);
  return 1;
}

int fake_pump(int most) {
  pthread_mutex_lock(&lock);
  int done = 0;
  while (done != most && run_one(NULL)) ++done;
  pthread_mutex_unlock(&lock);
  return done;
}

/* ---- graphs: work that is kept instead of being done ---- */
typedef struct Graph {
  Queue work;
  Handle streams[16]; /* the first is the one whose capture was begun */
  int num_streams, num_objects;
  struct UserObject *objects[64];
} Graph;
typedef struct UserObject {
  void (*destroy)(void *);
  void *object;
} UserObject;
static Graph *capture; /* the one capture that is going on */
_Atomic long broken_captures;  /* calls that a capture in the global mode does not survive */
static __thread int capture_mode;

static int current_device(void);
static int device_of(Handle stream);

/* The default streams are each GPU's. */
static Handle resolved(Handle stream) {
  const uintptr_t number = (uintptr_t)stream, device = current_device() > 0 ? current_device() : 0;
  return number > 2 ? stream : (Handle)((number == 2 ? 2 : 0) + 256 * device);
}

static int is_captured(Handle stream) {
  stream = resolved(stream);
  for (int i = 0; capture && i < capture->num_streams; ++i)
    if (capture->streams[i] == stream) return 1;
  return 0;
}

static void append(Queue *to, Work work) {
  work.next = NULL;
  *to->last = malloc(sizeof work);
  **to->last = work;
  to->last = &(*to->last)->next;
}

static void submit(Work work) {
  pthread_mutex_lock(&lock);
  work.stream = resolved(work.stream);
  work.number = submitted++;
  if (is_captured(work.stream)) {
    append(&capture->work, work);
  } else {
    struct Lane *lane = lane_of(work.stream);
    append(lane ? &lane->work : &new_lane(work.stream)->work, work);
  }
  while (!deferred && run_one(NULL));
  pthread_mutex_unlock(&lock);
}

static int unsafe(void) { /* in a capture; 2 is the relaxed mode */
  const int breaks = capture && capture_mode != 2;
  broken_captures += breaks;
  return breaks ? 900 : 0;
}

void fake_begin_capture(Handle stream) {
  capture = calloc(1, sizeof *capture);
  capture->work.last = &capture->work.first;
  capture->streams[capture->num_streams++] = resolved(stream);
}

/* NULL if work of a stream that was drawn into the capture did not come back to its first one. */
Graph *fake_end_capture(void) {
  Graph *graph = capture;
  capture = NULL;
  const Work **all = NULL;
  const void *wanted[1024]; /* records that lead back; the streams that do, from their last such record backwards */
  int count = 0, records = 0, leads[16] = {1}, left_behind = 0;
  for (const Work *work = graph->work.first; work; work = work->next) {
    all = realloc(all, ++count * sizeof *all);
    all[count - 1] = work;
  }
  while (count-- > 0) {
    const Work *work = all[count];
    int i = 0, k = 0;
    while (graph->streams[i] != work->stream) ++i;
    while (k < records && wanted[k] != work->to) ++k;
    if (work->kind == EVENT) leads[i] |= k < records;
    if (work->kind == WAIT && leads[i] && records < 1024) wanted[records++] = work->to;
    left_behind |= !leads[i] && work->kind != EVENT;
  }
  free(all);
  return left_behind ? NULL : graph;
}

void fake_launch_graph(Graph *graph, Handle stream) {
  static uintptr_t branches = 1 << 20;
  Record *made[4096], *of[4096], *begin = calloc(1, sizeof *begin);
  int records = 0;
  const uintptr_t base = branches += 64;
  submit((Work){.kind = EVENT, .stream = stream, .to = begin});
  for (int i = 0; i < graph->num_streams; ++i) submit((Work){.kind = WAIT, .stream = (Handle)(base + i), .to = begin});
  for (const Work *work = graph->work.first; work; work = work->next) {
    Work copy = *work;
    int i = 0;
    while (graph->streams[i] != work->stream) ++i;
    copy.stream = (Handle)(base + i);
    if (work->kind == EVENT || work->kind == WAIT) {
      for (i = 0; i < records && of[i] != work->to; ++i);
      if (i == 4096) abort();
      if (i == records) of[i] = work->to, made[records++] = calloc(1, sizeof **made);
      copy.to = made[i];
    }
    submit(copy);
  }
  for (int i = 0; i < graph->num_streams; ++i) {
    Record *end = calloc(1, sizeof *end);
    submit((Work){.kind = EVENT, .stream = (Handle)(base + i), .to = end});
    submit((Work){.kind = WAIT, .stream = stream, .to = end});
  }
}

void fake_destroy_graph(Graph *graph) {
  for (int i = 0; i < graph->num_objects; ++i) graph->objects[i]->destroy(graph->objects[i]->object);
  free(graph);
}

/* A graph that the driver destroys on a thread of its own, which the next call that allocates pinned memory waits for; and one
 * that is destroyed when the process ends, after all else of it is gone: then nobody writes to memory that is not his. */
Graph *fake_gone, *fake_last;
static void *destroy_graph(void *graph) { return fake_destroy_graph(graph), NULL; }
__attribute__((destructor)) static void end(void) {
  enum { MANY = 256, BYTES = 4096 };
  char *mine[MANY];
  if (!fake_last) return;
  for (int i = 0; i < MANY; ++i) memset(mine[i] = malloc(BYTES), 7, BYTES);
  fake_destroy_graph(fake_last);
  for (int i = 0; i < MANY * BYTES; ++i)
    if (mine[i / BYTES][i % BYTES] != 7) abort();
}

/* ---- the driver's functions, as far as kvbm calls them ---- */
static __thread Handle context[64];
static __thread int depth;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_ISOLATION = 905 };
static int made_on[4096]; /* the devices of kvbm's own streams */
static _Atomic int streams_made;
static int current_device(void) { return depth ? (int)(uintptr_t)context[depth - 1] - 1 : -1; }
static int device_of(Handle stream) {
  const uintptr_t number = (uintptr_t)stream;
  return number <= 2 ? current_device() : number >= 0x10000 ? made_on[number - 0x10000] : (int)(number >> 8);
}

int cuInit(unsigned flags) { return knob("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { return *version = knob("FAKE_VERSION", 13000), 0; }
int cuGetErrorName(int status, const char **text) { return *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int status, const char **text) { return *text = "the fake driver's own", 0; }
int cuDeviceGetCount(int *count) { return *count = knob("FAKE_DEVICES", 1), 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int bytes, int device) { return snprintf(name, bytes, "Fake GPU"), 0; }
int cuDeviceGetAttribute(int *value, int what, int device) { return *value = what == 16 ? 132 : 9, 0; }
int cuDeviceGetPCIBusId(char *name, int bytes, int device) {
  return device < knob("FAKE_DEVICES", 1) ? (snprintf(name, bytes, "0000:%02X:00.0", 0x3B + device), 0) : 101;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1ull << 37, 0; }
int cuDevicePrimaryCtxRetain(Handle *made, int device) { return *made = (Handle)(uintptr_t)(device + 1), 0; }
int cuCtxGetCurrent(Handle *current) { return ++driver_calls, *current = depth ? context[depth - 1] : NULL, 0; }
int cuCtxPushCurrent_v2(Handle made) { return context[depth++] = made, ++pushes, 0; }
int cuCtxPopCurrent_v2(Handle *was) { return *was = context[--depth], ++pops, 0; }
int cuModuleLoadData(Handle *module, const void *image) {
  MAY_FAIL;
  const int status = depth ? knob("FAKE_LOAD", 0) : NO_CONTEXT;
  live[MODULES] += !status;
  return *module = (Handle)image, status;
}
int cuModuleUnload(Handle module) { return --live[MODULES], 0; }
int cuModuleGetFunction(Handle *function, Handle module, const char *name) {
  MAY_FAIL;
  return *function = (Handle)name, 0;
}
int cuFuncLoad(Handle function) {
  MAY_FAIL;
  return 0;
}
int cuFuncSetAttribute(Handle function, int what, int value) {
  MAY_FAIL;
  return 0;
}
int cuFuncGetAttribute(int *value, int what, Handle function) {
  MAY_FAIL;
  if (what != 5) return INVALID_VALUE;
  return *value = knob("FAKE_PTX_VERSION", 90), 0;
}
static int submit_launch(Handle name, unsigned gx, unsigned x, unsigned shared, Handle stream, void **parameters, int early) {
  static _Thread_local Address cleared; /* by this thread's last launch */
  if (!depth) return NO_CONTEXT;
  if (device_of(stream) != current_device()) return INVALID_HANDLE;
  const int clears = !strcmp(name, "kvbm_clear");
  launches += !clears; /* it comes with every kernel that digests */
  Work work = {.kind = LAUNCH, .stream = stream, .from = name, .bytes = gx, .device = current_device(), .threads = x, .shared = shared,
               .early = early};
  if (clears)
    work.clear = (Clear){*(Address *)parameters[0], *(uint64_t *)parameters[1]};
  else
    memcpy(&work.args, parameters[0], sizeof work.args);
  const int few = !strncmp(name, "few_", 4) || work.args.inline_mask & KVBM_SM_LIMITED;
  if (!clears && few && gx > few_ctas) few_ctas = gx;
  if (early && work.args.digest.out != cleared) abort(); /* it would wait for something else */
  cleared = clears ? work.clear.digests : 0;
  for (long full = 1; fake_full; full = 1) { /* who sets it to 0 must not be overwritten */
    __atomic_compare_exchange_n((long *)&fake_full, &full, 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    sched_yield();
  }
  if (!knob("FAKE_LAUNCH", 0)) submit(work);
  return knob("FAKE_LAUNCH", 0);
}
int cuLaunchKernel(Handle name, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z, unsigned shared,
                   Handle stream, void **parameters, void **extra) {
  MAY_FAIL;
  return submit_launch(name, gx, x, shared, stream, parameters, 0);
}
typedef struct LaunchAttribute { /* of 72 bytes */
  int id, pad, value;
  char rest[60];
} LaunchAttribute;
typedef struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  Handle stream;
  const LaunchAttribute *attributes;
  unsigned num_attributes;
} LaunchConfig;
int cuLaunchKernelEx(const LaunchConfig *config, Handle name, void **parameters, void **extra) {
  MAY_FAIL;
  const unsigned early = config->num_attributes;
  if (early > 1 || (early && (config->attributes->id != 6 || config->attributes->value != 1))) return INVALID_VALUE;
  if (early && knob("FAKE_PTX_VERSION", 90) < 90) abort(); /* such code does not wait */
  return submit_launch(name, config->grid[0], config->block[0], config->shared, config->stream, parameters, (int)early);
}
int cuMemAlloc_v2(Address *made, size_t bytes) {
  MAY_FAIL;
  if (!depth) return NO_CONTEXT;
  if (is_full(bytes)) return OUT_OF_MEMORY;
  allocated_bytes += bytes;
  ++live[ALLOCATIONS];
  *made = (Address)malloc(bytes);
  pthread_mutex_lock(&largest_lock);
  if (bytes > fake_largest[1] - fake_largest[0]) fake_largest[0] = *made, fake_largest[1] = *made + bytes;
  pthread_mutex_unlock(&largest_lock);
  return unsafe();
}
/* As the real one, this waits for all work. */
int cuMemFree_v2(Address address) {
  fake_pump(-1);
  pthread_mutex_lock(&largest_lock);
  if (address == fake_largest[0]) fake_largest[0] = fake_largest[1] = 0;
  pthread_mutex_unlock(&largest_lock);
  return --live[ALLOCATIONS], free((void *)address), 0;
}
int cuMemHostAlloc(void **made, size_t bytes, unsigned flags) {
  MAY_FAIL;
  pthread_t thread;
  if (is_full(bytes)) return OUT_OF_MEMORY;
  if (fake_gone && !pthread_create(&thread, NULL, destroy_graph, fake_gone)) pthread_join(thread, NULL), fake_gone = NULL;
  ++live[PINNED];
  return ++slots, *made = malloc(bytes), unsafe();
}
int cuMemFreeHost(void *memory) { return --live[PINNED], free(memory), 0; }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Handle stream) {
  MAY_FAIL;
  ++uploads;
  return submit((Work){.kind = COPY, .stream = stream, .to = (void *)to, .from = from, .bytes = bytes}), 0;
}
typedef struct Range {
  char *begin, *end;
} Range;
static Range ranges[64]; /* `registered` of them, with ranges_lock held: any thread registers, and asks */
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
/* The registration around an address; false: none. */
static int find_range(Address address, Range *found) {
  int is_found = 0;
  pthread_mutex_lock(&ranges_lock);
  for (long i = 0; i < registered && !is_found; ++i)
    if (address >= (Address)ranges[i].begin && address < (Address)ranges[i].end) *found = ranges[i], is_found = 1;
  pthread_mutex_unlock(&ranges_lock);
  return is_found;
}
/* Beyond its allocation, or from one registration into the next: the driver refuses these. */
static int is_refused(Address at, size_t bytes) {
  int is_cut = 0;
  pthread_mutex_lock(&ranges_lock);
  for (long i = 0; i < registered; ++i) is_cut |= at < (Address)ranges[i].end && (Address)ranges[i].end < at + bytes;
  pthread_mutex_unlock(&ranges_lock);
  return is_cut || bytes > knob("FAKE_MOST_BYTES", 1 << 30);
}
int cuMemcpyPeerAsync(Address to, Handle to_context, Address from, Handle from_context, size_t bytes, Handle stream) {
  MAY_FAIL;
  for (int side = 0; side < 2; ++side) {
    const struct Memory *memory = memory_at(side ? from : to);
    const Handle context = side ? from_context : to_context;
    if (!context || (memory && context != (Handle)(uintptr_t)(memory->device + 1))) return INVALID_VALUE;
  }
  ++peer_copies;
  return submit((Work){.kind = COPY, .stream = stream, .to = (void *)to, .from = (void *)from, .bytes = bytes, .device = -1}), 0;
}
int cuMemcpyAsync(Address to, Address from, size_t bytes, Handle stream) {
  MAY_FAIL;
  if (is_refused(to, bytes) || is_refused(from, bytes)) return INVALID_VALUE;
  ++single_copies;
  return submit((Work){COPY, stream, (void *)to, (void *)from, bytes, current_device()}), 0;
}
static int memcpy_batch(Address *to, Address *from, size_t *bytes, size_t count, int *attributes, size_t *starts, size_t kinds,
                        Handle stream) {
  MAY_FAIL;
  if (kinds != 1 || starts[0] != 0 || attributes[0] != 1) return INVALID_VALUE; /* all in stream order */
  batch_on_legacy += (uintptr_t)stream <= 1;
  broken_captures += is_captured(stream);
  if (is_captured(stream)) return 900;
  if ((uintptr_t)stream <= 1) return INVALID_VALUE;
  for (size_t i = 0; i < count; ++i)
    if (is_refused(to[i], bytes[i]) || is_refused(from[i], bytes[i])) return INVALID_VALUE;
  ++batches;
  batched_copies += count;
  for (size_t i = 0; i < count; ++i)
    submit((Work){COPY, stream, (void *)to[i], (void *)from[i], bytes[i], current_device()});
  return 0;
}
/* CUDA 12.8's, which says which copy failed */
static int memcpy_batch_v1(Address *to, Address *from, size_t *bytes, size_t count, int *attributes, size_t *starts,
                           size_t kinds, size_t *failed, Handle stream) {
  return *failed = 0, memcpy_batch(to, from, bytes, count, attributes, starts, kinds, stream);
}
int cuPointerGetAttributes(unsigned count, int *what, void **values, Address address) {
  /* All on GPU 0 but for what is registered, and two ranges that a test names: [from, to) of pinned and of ordinary host memory. */
  MAY_FAIL;
  const struct Memory *memory = memory_at(address);
  Range range = {(char *)fake_pinned[0], (char *)fake_pinned[1]};
  find_range(address, &range);
  const Address begin = (Address)range.begin, end = (Address)range.end;
  const int pinned = address - begin < end - begin, is_told = pinned && !knob("FAKE_NO_RANGES", 0);
  const int ordinary = address - fake_ordinary[0] < fake_ordinary[1] - fake_ordinary[0];
  ++lookups;
  for (unsigned i = 0; i < count; ++i) {
    if (what[i] == 2) *(unsigned *)values[i] = ordinary ? 0 : pinned ? 1 : 2;
    if (what[i] == 8) *(char *)values[i] = 0;
    if (what[i] == 9) *(int *)values[i] = memory ? memory->device : 0;
    if (what[i] == 10) *(char *)values[i] = !memory && !pinned && !ordinary;
    if (what[i] == 11 && (is_told || memory)) *(Address *)values[i] = memory ? memory->begin : begin;
    if (what[i] == 12 && (is_told || memory)) *(size_t *)values[i] = memory ? memory->end - memory->begin : end - begin;
    if (what[i] == 17) *(Handle *)values[i] = memory && memory->kind == POOL ? memory : NULL;
  }
  return 0;
}
typedef struct Location {
  int type, id;
} Location;
int cuMemPoolGetAccess(int *flags, struct Memory *pool, const Location *where) {
  MAY_FAIL;
  if (where->type != 1) return INVALID_VALUE;
  return *flags = pool->granted >> where->id & 1 ? 3 : 0, 0;
}
int cuMemGetAccess(unsigned long long *flags, const Location *where, Address address) {
  MAY_FAIL;
  const struct Memory *memory = memory_at(address);
  /* The driver answers for registered memory, too: that nobody was granted it, although every GPU reaches it. */
  Range range;
  if (find_range(address, &range)) return *flags = 0, 0;
  if (!memory || memory->kind != MAPPING || where->type != 1) return INVALID_VALUE;
  return *flags = memory->granted >> where->id & 1 ? 3 : 0, 0;
}
int cuStreamCreate(Handle *made, unsigned flags) {
  MAY_FAIL;
  ++live[STREAMS];
  const int mine = streams_made++;
  if (mine >= 4096) abort();
  made_on[mine] = current_device();
  return *made = (Handle)(uintptr_t)(0x10000 + mine), 0;
}
int cuStreamDestroy_v2(Handle stream) { return --live[STREAMS], 0; }
int cuStreamSynchronize(Handle stream) {
  MAY_FAIL;
  stream = resolved(stream);
  if (is_captured(stream)) return ++broken_captures, 900;
  pthread_mutex_lock(&lock);
  while (lane_of(stream)) run_one(stream);
  return pthread_mutex_unlock(&lock), 0;
}
int cuStreamIsCapturing(Handle stream, int *capturing) { return *capturing = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
  ++driver_calls;
  const int before = capture_mode;
  return capture_mode = *mode, *mode = before, 0;
}
int cuEventCreate(Handle *made, unsigned flags) {
  MAY_FAIL;
  ++live[EVENTS];
  Event *event = calloc(1, sizeof *event);
  return event->device = current_device(), *made = event, 0;
}
int cuEventRecord(Handle event, Handle stream) {
  MAY_FAIL;
  if (((Event *)event)->device != device_of(stream)) return INVALID_HANDLE;
  Record *record = calloc(1, sizeof *record); /* never freed: who waits for it keeps no count */
  record->graph = is_captured(stream) ? capture : NULL;
  ((Event *)event)->last = record;
  return submit((Work){.kind = EVENT, .stream = stream, .to = record}), 0;
}
int cuEventQuery(Handle event) {
  MAY_FAIL;
  const Record *record = ((Event *)event)->last;
  const int status = unsafe();
  return status ? status : record && !record->done ? NOT_READY : 0;
}
int cuEventDestroy_v2(Handle event) { return --live[EVENTS], free(event), 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *how) {
  /* Everything else is found under its plain name; these two are what cuda.bindings is asked for. */
  *found = !strcmp(name, "cuInit") ? (void *)cuInit : !strcmp(name, "cuDeviceGetPCIBusId") ? (void *)cuDeviceGetPCIBusId : NULL;
  if (!strcmp(name, "cuMemcpyBatchAsync") && version >= 12080 && version <= knob("FAKE_VERSION", 13000))
    *found = version >= 13000 ? (void *)memcpy_batch : (void *)memcpy_batch_v1;
  return 0;
}
int cuEventSynchronize(Handle event) {
  MAY_FAIL;
  const Record *record = ((Event *)event)->last;
  pthread_mutex_lock(&lock);
  while (record && !record->done && run_one(NULL));
  return pthread_mutex_unlock(&lock), 0;
}
int cuEventElapsedTime(float *ms, Handle from, Handle to) { return *ms = 1, 0; }
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
  MAY_FAIL;
  Record *record = ((Event *)event)->last;
  if (!record) return 0;
  if (record->graph != (is_captured(stream) ? capture : NULL)) {
    if (!record->graph || record->graph != capture) return CAPTURE_ISOLATION;
    capture->streams[capture->num_streams++] = resolved(stream); /* drawn into the capture */
  }
  return submit((Work){.kind = WAIT, .stream = stream, .to = record}), 0;
}
int cuStreamGetCtx(Handle stream, Handle *found) {
  MAY_FAIL;
  return *found = (Handle)(uintptr_t)(device_of(stream) + 1), 0;
}
int cuStreamGetCaptureInfo_v2(Handle stream, int *status, uint64_t *id, Handle *graph, const Handle **edges, size_t *count) {
  MAY_FAIL;
  *status = is_captured(stream);
  if (*status) *graph = capture;
  return 0;
}
int cuUserObjectCreate(Handle *made, void *what, void (*destroy)(void *), unsigned count, unsigned flags) {
  MAY_FAIL;
  UserObject *object = malloc(sizeof *object);
  return *object = (UserObject){destroy, what}, *made = object, 0;
}
int cuGraphRetainUserObject(Graph *graph, Handle object, unsigned count, unsigned flags) {
  MAY_FAIL;
  if (graph->num_objects == 64) abort();
  return graph->objects[graph->num_objects++] = object, 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  MAY_FAIL;
  return *can = knob("FAKE_PEERS", 1), 0;
}
int cuCtxEnablePeerAccess(Handle peer, unsigned flags) {
  MAY_FAIL;
  return 0;
}
/* As the real one, but that a process may open its own, which here is all that there is. */
typedef struct {
  unsigned char bytes[64];
} IpcHandle;
int cuIpcGetMemHandle(IpcHandle *handle, Address address) {
  MAY_FAIL;
  if (!depth) return NO_CONTEXT;
  memset(handle, 0, sizeof *handle);
  return memcpy(handle->bytes, &address, sizeof address), 0;
}
int cuIpcOpenMemHandle_v2(Address *opened, IpcHandle handle, unsigned flags) {
  MAY_FAIL;
  if (!depth) return NO_CONTEXT;
  if (flags != 1) return INVALID_VALUE;
  memcpy(opened, handle.bytes, sizeof *opened);
  return ++live[MAPPINGS], 0;
}
int cuIpcCloseMemHandle(Address opened) {
  MAY_FAIL;
  if (!depth) return NO_CONTEXT;
  fake_pump(-1);
  return --live[MAPPINGS], 0;
}
typedef struct {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  Address src_device;
  Handle src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_type;
  void *dst_host;
  Address dst_device;
  Handle dst_array;
  size_t dst_pitch, width, height;
} Copy2D;
int cuMemcpy2DAsync_v2(const Copy2D *c, Handle stream) {
  MAY_FAIL;
  if (is_refused((Address)c->dst_device, (c->height - 1) * c->dst_pitch + c->width)) return INVALID_VALUE;
  if (is_refused((Address)c->src_device, (c->height - 1) * c->src_pitch + c->width)) return INVALID_VALUE;
  ++copies_2d;
  for (size_t row = 0; row < c->height; ++row)
    submit((Work){.kind = COPY,
                  .stream = stream,
                  .to = (char *)c->dst_device + row * c->dst_pitch,
                  .from = (char *)c->src_device + row * c->src_pitch,
                  .bytes = c->width,
                  .device = current_device()});
  return 0;
}
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
  MAY_FAIL;
  /* FAKE_REGISTER is what fails; FAKE_REGISTER_FROM: only once so many are registered */
  const int status = registered >= knob("FAKE_REGISTER_FROM", 0) ? knob("FAKE_REGISTER", 0) : 0;
  if (status) return status;
  if (!depth) return NO_CONTEXT;
  if (((uintptr_t)memory | bytes) % 4096 || registered == 64) return INVALID_VALUE; /* stricter than the real one */
  int is_known = 0;
  pthread_mutex_lock(&ranges_lock);
  for (long i = 0; i < registered; ++i) is_known |= (char *)memory < ranges[i].end && ranges[i].begin < (char *)memory + bytes;
  if (!is_known) ranges[registered] = (Range){memory, (char *)memory + bytes}, ++registered, register_flags = flags;
  pthread_mutex_unlock(&ranges_lock);
  return is_known ? 712 : 0; /* registered already */
}
int cuMemHostUnregister(void *memory) {
  long i = 0;
  if (!depth) return NO_CONTEXT;
  pthread_mutex_lock(&ranges_lock);
  while (i < registered && ranges[i].begin != memory) ++i;
  const int is_known = i < registered;
  if (is_known) --registered, ranges[i] = ranges[registered];
  pthread_mutex_unlock(&ranges_lock);
  return is_known ? 0 : 713; /* not registered */
}
