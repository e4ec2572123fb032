// cast_digest.cuh: CellSums digests the codes and scales that a cast reads or stores, from the registers of a warp.
//
// A thread has two neighbouring items of eight codes in each of two neighbouring groups, and the scale of one of them: threads with
// even lanes that of the first group, threads with odd lanes that of the second.  With codes of 4 bits it has the scales of both.
// A cell has 16 bytes of codes, or up to 16 bytes of scales.  Threads that have parts of cells exchange them in such a way that
// each gets whole cells of its own, if necessary those of several turns.
#pragma once

#include "cells.cuh"
#include "prepare.cuh"

namespace kvbm {

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t from_lane(uint32_t value, uint32_t apart) { return __shfl_xor_sync(~0u, value, apart); }

// The digest of codes of BITS bits.  `words`: the items of the first group, then those of the second.  `key`: theirs, as steps from
// the scaled key `first`.
template <int BITS>
__device__ __forceinline__ uint64_t digest_codes(const uint32_t* words, const bool (&has)[2], const uint32_t (&key)[2],
                                                 uint64_t first, uint32_t lane, uint32_t width) {
  if constexpr (BITS == 8) {
    uint64_t sum = 0;
    if (has[0]) sum = digest_of(first, key[0] / 16, {{words[0], words[1], words[2], words[3]}});
    if (has[1]) sum += digest_of(first, key[1] / 16, {{words[4], words[5], words[6], words[7]}});
    return sum;
  }
  if (width == 1) return has[0] ? digest_of(first, key[0] / 16, {{words[0], words[1], words[2], words[3]}}) : 0;
  // Two threads have halves of two cells.
  const bool odd = lane & 1;
  Word16 cell;
  KVBM_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = from_lane(odd ? words[i] : words[i + 2], 1);
    cell.x[i] = odd ? got : words[i];
    cell.x[i + 2] = odd ? words[i + 2] : got;
  }
  return (odd ? has[1] : has[0]) ? digest_of(first, (odd ? key[1] : key[0]) / 16, cell) : 0;
}

// The cells of scales of BITS bits.  A cell has those of `count` consecutive groups, as many as a warp has at most.
template <int BITS>
class ScaleCells {
 public:
  __device__ __forceinline__ ScaleCells(const kvbm_part& s, uint32_t lane, uint32_t width, uint32_t row)
      : count_(s.cell_words), width_(width), number_((2 * row + lane % 2) & (count_ - 1)) {
    // Threads of a group all have its scale.
    if constexpr (BITS == 8) {
      turns_ = count_ < 4 ? count_ : 4;
      my_turn_ = number_ % 4;
      counts_ = lane < 2 && number_ < 4;
    } else {
      turns_ = count_ == 1 ? width / 2 : 1;
      my_turn_ = count_ == 1 ? lane / 2 : 0;
      counts_ = number_ == 0 && (count_ == 1 || lane < 2);
    }
  }

  __device__ __forceinline__ uint64_t add(uint32_t code, bool has_group, uint32_t key, uint64_t first, uint32_t turn,
                                          bool is_last) {
    turn &= turns_ - 1;
    if (turn == 0) {
      has_ = false;
      codes_ = 0;
    }
    if (BITS == 8) {
      codes_ |= code << 8 * turn;
    } else if (turn == my_turn_) {
      codes_ = code;
    }
    if (turn == my_turn_) {
      key_ = key;
      has_ = has_group;
    }
    if (turn + 1 < turns_ && !is_last) return 0;
    Word16 cell = {{codes_, 0, 0, 0}};
    if constexpr (BITS == 8) {
      // Of four turns and four groups, bytes are transposed.
      const uint32_t row = number_ / 2;
      if (count_ > 1) cell.x[0] = __byte_perm(cell.x[0], from_lane(cell.x[0], 1), number_ % 2 ? 0x3715 : 0x6240);
      if (count_ > 2) cell.x[0] = __byte_perm(cell.x[0], from_lane(cell.x[0], width_), row % 2 ? 0x3276 : 0x5410);
      if (count_ > 4) cell.x[1] = from_lane(cell.x[0], 2 * width_);
      if (count_ > 8) {
        cell.x[2] = from_lane(cell.x[0], 4 * width_);
        cell.x[3] = from_lane(cell.x[1], 4 * width_);
      }
    } else if (count_ > 1) {
      cell.x[1] = from_lane(cell.x[0], 1);
      if (count_ > 2) {
        cell.x[2] = from_lane(cell.x[0], width_);
        cell.x[3] = from_lane(cell.x[1], width_);
      }
    }
    return has_ && counts_ ? digest_of(first, key_ / 16, cell) : 0;
  }

 private:
  uint32_t count_, width_, number_;  // scales of a cell, threads of a group, number of the scale in its cell
  uint32_t turns_, my_turn_, codes_, key_;
  bool counts_, has_;
};
template <>
class ScaleCells<0> {
 public:
  __device__ __forceinline__ ScaleCells(const kvbm_part&, uint32_t, uint32_t, uint32_t) {}
  __device__ __forceinline__ uint64_t add(uint32_t, bool, uint32_t, uint64_t, uint32_t, bool) { return 0; }
};

// The cells of scales of 8 bits where each thread of a group has the scales of two.
class PairCells {
 public:
  __device__ __forceinline__ PairCells(const kvbm_part& s, uint32_t lane, uint32_t width, uint32_t row)
      : width_(width),
        rows_(s.cell_words < 2 ? 1 : s.cell_words / 2),
        number_(row & (rows_ - 1)),
        turns_(rows_ < 4 ? rows_ : 4),
        is_single_(s.cell_words == 1),
        counts_(lane == 0 && number_ < 4) {}

  // `key`: of the first group, `second_key`: of the second.
  __device__ __forceinline__ uint64_t add(const uint32_t (&codes)[2], const bool (&has_group)[2], uint32_t key,
                                          uint32_t second_key, uint64_t first, uint32_t turn, bool is_last) {
    if (is_single_) {
      uint64_t sum = 0;
      if (counts_ && has_group[0]) sum = digest_of(first, key / 16, {{codes[0], 0, 0, 0}});
      if (counts_ && has_group[1]) sum += digest_of(first, second_key / 16, {{codes[1], 0, 0, 0}});
      return sum;
    }
    turn &= turns_ - 1;
    const uint32_t two = (codes[0] | codes[1] << 8) << turn % 2 * 16;
    if (turn == 0) {
      has_ = false;
      codes_[0] = codes_[1] = 0;
    }
    codes_[0] |= turn < 2 ? two : 0;
    codes_[1] |= turn < 2 ? 0 : two;
    if (turn == (number_ & 3)) {
      key_ = key;
      has_ = has_group[0];
    }
    if (turn + 1 < turns_ && !is_last) return 0;
    // Of four turns and the pairs of four rows, halves of words are transposed, then words.
    Word16 cell = {{codes_[0], 0, 0, 0}};
    if (rows_ > 1) {
      const uint32_t chosen = number_ % 2 ? 0x3276 : 0x5410;
      cell.x[0] = __byte_perm(codes_[0], from_lane(codes_[0], width_), chosen);
      if (rows_ > 2) {
        const bool second = number_ & 2;
        const uint32_t later = __byte_perm(codes_[1], from_lane(codes_[1], width_), chosen);
        const uint32_t mine = second ? later : cell.x[0], got = from_lane(second ? cell.x[0] : later, 2 * width_);
        cell.x[0] = second ? got : mine;
        cell.x[1] = second ? mine : got;
      }
      if (rows_ > 4) {
        cell.x[2] = from_lane(cell.x[0], 4 * width_);
        cell.x[3] = from_lane(cell.x[1], 4 * width_);
      }
    }
    return has_ && counts_ ? digest_of(first, key_ / 16, cell) : 0;
  }

 private:
  uint32_t width_, rows_, number_, turns_;  // threads of a group, rows of a cell, number of the row in its cell
  bool is_single_, counts_, has_;
  uint32_t codes_[2], key_;
};

template <bool BOTH, int BITS>
struct ScalesOfThread {
  using Type = ScaleCells<BITS>;
};
template <int BITS>
struct ScalesOfThread<true, BITS> {
  using Type = PairCells;
};
template <bool BOTH, int BITS>
using ScalesOf = typename ScalesOfThread<BOTH, BITS>::Type;

// What a thread has found of a digest.  SUMS: there is one.
template <bool SUMS, int BITS, int SCALE_BITS>
class CellSums {
 public:
  // The thread is number `lane` of the `width` threads of a group, in row `row` of the CTA.  `item_key`: the key of its items.
  __device__ __forceinline__ CellSums(const kvbm_part&, const kvbm_part& s, uint32_t lane, uint32_t width, uint32_t row,
                                      uint32_t item_key)
      : scales_(s, lane, width, row), lane_(lane), width_(width), item_key_(item_key) {}

  // Adds a turn.  Keys are steps from the scaled keys `first` of the elements and of the scales, in bytes of cells: each has 16.
  template <class KEYS>
  __device__ __forceinline__ void add(const uint32_t* words, const bool (&has)[2], const bool (&has_group)[2],
                                      const KEYS (&key)[2], const uint32_t (&scale)[2], const uint64_t* first, bool is_last) {
    total_ += digest_codes<BITS>(words, has, {key[0].item + item_key_, key[1].item + item_key_}, first[0], lane_, width_);
    if constexpr (BITS == 4) {
      total_ += scales_.add(scale, has_group, key[0].scale, key[1].scale, first[1], turn_, is_last);
    } else {
      const bool odd = lane_ & 1;
      total_ += scales_.add(odd ? scale[1] : scale[0], odd ? has_group[1] : has_group[0], odd ? key[1].scale : key[0].scale,
                            first[1], turn_, is_last);
    }
    ++turn_;
  }
  // The sum since the last call.
  __device__ __forceinline__ uint64_t take() {
    const uint64_t total = total_;
    total_ = 0;
    turn_ = 0;
    return total;
  }

 private:
  ScalesOf<BITS == 4, SCALE_BITS> scales_;
  uint32_t lane_, width_, item_key_, turn_ = 0;
  uint64_t total_ = 0;
};
template <int BITS, int SCALE_BITS>
class CellSums<false, BITS, SCALE_BITS> {
 public:
  __device__ __forceinline__ CellSums(const kvbm_part&, const kvbm_part&, uint32_t, uint32_t, uint32_t, uint32_t) {}
};
#endif

}  // namespace kvbm
