# arithmetic.pxi: The arithmetic of the calling thread while Python computes with values.

cdef extern from *:
    """
    #if defined(__SSE__)
    #include <xmmintrin.h>
    static inline uint64_t kvbm_arithmetic() { return _mm_getcsr(); }
    static inline void kvbm_set_arithmetic(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
    static const uint64_t kvbm_default_arithmetic = 0x1f80;
    #elif defined(__aarch64__)
    static inline uint64_t kvbm_arithmetic() {
      uint64_t mode;
      __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
      return mode;
    }
    static inline void kvbm_set_arithmetic(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
    static const uint64_t kvbm_default_arithmetic = 0;
    #else
    static inline uint64_t kvbm_arithmetic() { return 0; }
    static inline void kvbm_set_arithmetic(uint64_t) {}
    static const uint64_t kvbm_default_arithmetic = 0;
    #endif
    """
    uint64_t kvbm_arithmetic() noexcept nogil
    void kvbm_set_arithmetic(uint64_t mode) noexcept nogil
    const uint64_t kvbm_default_arithmetic


@cython.final
cdef class DefaultArithmetic:
    """A context in which the calling thread rounds to nearest and has subnormals, as kernels on the CPU do.

    A program may have changed both (``torch.set_flush_denormal``), and NumPy computes as its thread does.  The end of
    the context restores what was there before.  Each ``with`` has a context of its own, and ends in the thread in which
    it began: do not yield inside.

    Examples
    --------
    >>> import numpy as np
    >>> with DefaultArithmetic():
    ...     print(np.float32(2.0**-126) / np.float32(2) > 0)
    True
    """

    cdef uint64_t _before

    def __enter__(self):
        self._before = kvbm_arithmetic()
        kvbm_set_arithmetic(kvbm_default_arithmetic)

    def __exit__(self, *_):
        kvbm_set_arithmetic(self._before)
