// mail.cpp: notes through shared memory, loans, and a wait for notes and for the ends of copies.
#include "mail.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#include <atomic>
#include <chrono>

#include "kvbm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// A box: what one side tells the other.  Only its owner writes it, so no side can change what the other has counted.
struct Box {
  alignas(64) std::atomic<uint64_t> posted;  // notes of the owner
  alignas(64) std::atomic<uint64_t> taken;   // notes of the peer that the owner has read
  alignas(64) std::atomic<uint32_t> reads;   // the owner has mapped the peer's box
  struct alignas(64) Slot {
    uint32_t bytes;
    unsigned char note[KVBM_MAIL_NOTE];
  } slots[KVBM_MAIL_SLOTS];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share it");

Box& own(const kvbm_mail* mail) { return *static_cast<Box*>(mail->own); }
const Box& far(const kvbm_mail* mail) { return *static_cast<const Box*>(mail->far); }

constexpr int kSpins = 64;  // before a thread that waits for a lock lets others run

// What a lock holds: it differs in a child, where the threads that held locks are not.
std::atomic<uint32_t> own_process{1};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { own_process.fetch_add(1); });

std::atomic<uint32_t>& word(uint32_t* at) { return *reinterpret_cast<std::atomic<uint32_t>*>(at); }
std::atomic<uint64_t>& counter(const kvbm_loans* loans) { return *static_cast<std::atomic<uint64_t>*>(loans->count); }

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

extern "C" {

uint64_t kvbm_mail_bytes() { return sizeof(Box); }

void kvbm_mail_open(kvbm_mail* mail) { own(mail).reads.store(1, std::memory_order_release); }

int kvbm_mail_is_read(const kvbm_mail* mail) { return far(mail).reads.load(std::memory_order_acquire) == 1; }

int kvbm_mail_is_taken(const kvbm_mail* mail) { return far(mail).taken.load(std::memory_order_acquire) != 0; }

int kvbm_mail_has_note(const kvbm_mail* mail) { return far(mail).posted.load(std::memory_order_acquire) != mail->taken; }

int kvbm_mail_post(kvbm_mail* mail, const void* note, uint32_t bytes) {
  // A peer that counts wrongly loses its own notes: nothing outside of the slots is written.
  if (mail->posted - far(mail).taken.load(std::memory_order_acquire) >= KVBM_MAIL_SLOTS) return 0;
  Box::Slot& slot = own(mail).slots[mail->posted % KVBM_MAIL_SLOTS];
  slot.bytes = bytes;
  memcpy(slot.note, note, bytes);
  own(mail).posted.store(++mail->posted, std::memory_order_release);
  return 1;
}

int64_t kvbm_mail_peek(const kvbm_mail* mail, void* note) {
  const uint64_t posted = far(mail).posted.load(std::memory_order_acquire);
  if (posted == mail->taken) return KVBM_MAIL_NONE;
  const Box::Slot& slot = far(mail).slots[mail->taken % KVBM_MAIL_SLOTS];
  const uint32_t bytes = reinterpret_cast<const volatile uint32_t&>(slot.bytes);  // once: the peer may change it
  if (posted - mail->taken > KVBM_MAIL_SLOTS || bytes > KVBM_MAIL_NOTE) return KVBM_MAIL_BROKEN;
  memcpy(note, slot.note, bytes);
  return bytes;
}

int64_t kvbm_mail_take(kvbm_mail* mail, void* note) {
  const int64_t bytes = kvbm_mail_peek(mail, note);
  if (bytes >= 0) own(mail).taken.store(++mail->taken, std::memory_order_release);
  return bytes;
}

void kvbm_flag_set(uint32_t* flag, uint32_t value) { word(flag).store(value, std::memory_order_release); }

uint32_t kvbm_own_process(void) { return own_process.load(std::memory_order_relaxed); }

int kvbm_try_lock(uint32_t* lock) {
  const uint32_t own = own_process.load(std::memory_order_relaxed);
  uint32_t holder = 0;
  if (word(lock).compare_exchange_strong(holder, own, std::memory_order_acquire)) return 1;
  return holder && holder != own && word(lock).compare_exchange_strong(holder, own, std::memory_order_acquire);
}

void kvbm_lock(uint32_t* lock) {
  for (int turn = 0; !kvbm_try_lock(lock); ++turn) {
    if (turn < kSpins) {
      relax();
    } else {
      sched_yield();
    }
  }
}

void kvbm_unlock(uint32_t* lock) { word(lock).store(0, std::memory_order_release); }

int kvbm_loan_begin(kvbm_loans* loans) {
  kvbm_lock(&loans->lock);
  int begins = !loans->is_over;
  if (begins) {
    counter(loans).fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the lender sets its mark, and then reads the count
    if (static_cast<const std::atomic<uint64_t>*>(loans->dropped)->load(std::memory_order_seq_cst)) {
      counter(loans).fetch_sub(1, std::memory_order_seq_cst);
      begins = 0;
    }
  }
  kvbm_unlock(&loans->lock);
  return begins;
}

uint64_t kvbm_loan_end(kvbm_loans* loans) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return counter(loans).fetch_sub(1, std::memory_order_seq_cst) - 1;
}

void kvbm_loans_end(kvbm_loans* loans) {
  kvbm_lock(&loans->lock);
  loans->is_over = 1;
  kvbm_unlock(&loans->lock);
}

int kvbm_mail_wait(kvbm_mail* const* mails, uint32_t num_mails, const uint32_t* flag, const kvbm_event* events,
                   uint32_t num_events, uint32_t microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int turn = 0; turn < 16; ++turn) {
      if (flag && reinterpret_cast<const std::atomic<uint32_t>*>(flag)->load(std::memory_order_acquire)) return 1;
      for (uint32_t i = 0; i < num_mails; ++i)
        if (kvbm_mail_has_note(mails[i])) return 1;
      relax();
    }
    for (uint32_t i = 0; i < num_events; ++i) {
      int is_done = 0;
      // An error is for whoever asks about the copy next.
      if (kvbm_event_query(events[i].device, events[i].event, &is_done) != KVBM_OK || is_done) return 1;
    }
  } while (std::chrono::steady_clock::now() < end);
  return 0;
}

}  // extern "C"
