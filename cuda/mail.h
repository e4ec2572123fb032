/* mail.h: notes and loans between two processes of a host, and waits that hold no lock of Python's. */
#ifndef KVBM_MAIL_H
#define KVBM_MAIL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBM_MAIL_NOTE = 16384, KVBM_MAIL_SLOTS = 32, KVBM_MAIL_NONE = -1, KVBM_MAIL_BROKEN = -2 };
/* A lock of threads of this process, for a few instructions or a launch.  0: it is free.  Nobody who holds one waits for a lock of
 * Python's.  Nobody who holds Python's waits for one that may be held for a launch: it tries (`lock_in_python`).  A child takes
 * those that threads of its parent held. */
void kvbm_lock(uint32_t* lock);
int kvbm_try_lock(uint32_t* lock); /* 0: another thread holds it */
void kvbm_unlock(uint32_t* lock);
uint32_t kvbm_own_process(void); /* a number of this process, which its children do not have */
/* One side's end of a connection.  `own` and `far` are boxes of kvbm_mail_bytes() bytes in shared memory, zero at first: this
 * side writes `own`, the peer writes `far`.  One thread at a time uses it. */
typedef struct kvbm_mail {
  void* own;
  const void* far;
  uint64_t posted, taken; /* notes that this side has posted and taken */
} kvbm_mail;
typedef struct kvbm_event {
  int device;
  uint64_t event;
} kvbm_event;
uint64_t kvbm_mail_bytes(void);
void kvbm_mail_open(kvbm_mail* mail);                                  /* tells the peer that this side reads its box */
int kvbm_mail_is_read(const kvbm_mail* mail);                          /* whether the peer has done so */
int kvbm_mail_is_taken(const kvbm_mail* mail);                         /* whether the peer has taken a note */
int kvbm_mail_has_note(const kvbm_mail* mail);                         /* whether there is a note to take */
int kvbm_mail_post(kvbm_mail* mail, const void* note, uint32_t bytes); /* 0: no slot is free */
int64_t kvbm_mail_take(kvbm_mail* mail, void* note);                   /* bytes of the next note, or KVBM_MAIL_NONE, _BROKEN */
int64_t kvbm_mail_peek(const kvbm_mail* mail, void* note);             /* the same, and it stays the next one */
/* Sets a flag that another thread waits for. */
void kvbm_flag_set(uint32_t* flag, uint32_t value);
/* Returns 1 as soon as there is a note, an event is done, or *flag is not 0 (null: no flag); 0 after some microseconds. */
int kvbm_mail_wait(kvbm_mail* const* mails, uint32_t num_mails, const uint32_t* flag, const kvbm_event* events,
                   uint32_t num_events, uint32_t microseconds);

/* This side's loans of a peer's memory: the peer does not reuse it while there is one.  `count` is a uint64_t in a page of this
 * side, which the peer reads.  `dropped` is one in a page of the peer's: it is not 0 when the peer lends nothing more. */
typedef struct kvbm_loans {
  void* count;
  const void* dropped;
  uint32_t lock, is_over;
} kvbm_loans;
int kvbm_loan_begin(kvbm_loans* loans);    /* 0: there are no more loans */
uint64_t kvbm_loan_end(kvbm_loans* loans); /* how many are left */
void kvbm_loans_end(kvbm_loans* loans);    /* no other begins: who then counts none may unmap the memory */

#ifdef __cplusplus
}
#endif
#endif /* KVBM_MAIL_H */
