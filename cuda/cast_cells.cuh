// cast_cells.cuh: CellSums digests the codes and scales that a cast reads or stores, from the registers of a warp.
//
// A thread has items of eight codes, of two neighbouring groups in a turn, and the scale of one of them: threads with even lanes that
// of the first group, threads with odd lanes that of the second.  A cell has 16 bytes of codes, or up to 16 bytes of scales, of
// several threads.  These exchange them in such a way that each gets whole cells of its own, if necessary those of several turns.
#pragma once

#include "cells.cuh"
#include "prepare.cuh"

namespace kvbm {

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t from_lane(uint32_t value, uint32_t apart) { return __shfl_xor_sync(~0u, value, apart); }

// The cells of codes of BITS bits.  Consecutive items of a group are consecutive parts of a cell, and a group has whole cells; or it
// has half a cell of two items, and the next group has the other half.
template <int BITS>
class CodeCells {
 public:
  __device__ __forceinline__ CodeCells(const kvbm_part& p, uint32_t lane)
      : lane_(lane), joins_(BITS == 4 && p.tile[1].n == 2) {}

  // `has_item` and `key` belong to the group with the parity of the lane.
  template <class CODES>
  __device__ __forceinline__ uint64_t add(const CODES (&codes)[2], bool has_item, uint32_t key, uint64_t first, uint32_t turn,
                                          bool is_last) {
    const bool odd = lane_ & 1;
    Word16 cell;
    if constexpr (BITS == 8) {
      KVBM_UNROLL
      for (int w = 0; w < 2; ++w) {
        const uint32_t mine = codes[1].x[w], other = codes[0].x[w], got = from_lane(odd ? other : mine, 1);
        cell.x[w] = odd ? got : other;
        cell.x[w + 2] = odd ? mine : got;
      }
    } else if (joins_) {
      // Threads with even lanes take the cells of even turns, the others those of odd turns.
      const uint32_t here[2] = {codes[0].x[0], codes[1].x[0]};
      const bool is_first = turn % 2 == 0;
      if (is_first) {
        earlier_[0] = here[0];
        earlier_[1] = here[1];
        earlier_key_ = key;
        had_item_ = has_item;
        if (!is_last) return 0;
      }
      KVBM_UNROLL
      for (int w = 0; w < 2; ++w) {
        const uint32_t mine = odd ? here[w] : earlier_[w], got = from_lane(odd ? earlier_[w] : here[w], 1);
        cell.x[2 * w] = odd ? got : mine;
        cell.x[2 * w + 1] = odd ? mine : got;
      }
      key = odd ? key : earlier_key_;
      has_item = odd ? has_item && !is_first : had_item_;
    } else {
      const uint32_t got = from_lane(odd ? codes[0].x[0] : codes[1].x[0], 1);
      const uint32_t half[2] = {odd ? got : codes[0].x[0], odd ? codes[1].x[0] : got};
      const bool second = lane_ & 2;
      KVBM_UNROLL
      for (int w = 0; w < 2; ++w) {
        const uint32_t other = from_lane(half[w], 2);
        cell.x[w] = second ? other : half[w];
        cell.x[w + 2] = second ? half[w] : other;
      }
      has_item = has_item && !second;
    }
    return has_item ? digest_of(first, key / 16, cell) : 0;
  }

 private:
  uint32_t lane_;
  bool joins_, had_item_;
  uint32_t earlier_[2], earlier_key_;
};

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

// What a thread has found of a digest.  SUMS: there is one.
template <bool SUMS, int BITS, int SCALE_BITS>
class CellSums {
 public:
  // The thread is number `lane` of the `width` threads of a group, in row `row` of the CTA.  `item_key`: the step of its items' keys.
  __device__ __forceinline__ CellSums(const kvbm_part& p, const kvbm_part& s, uint32_t lane, uint32_t width, uint32_t row,
                                      uint32_t item_key)
      : codes_(p, lane), scales_(s, lane, width, row), item_key_(item_key) {}

  // Adds a turn.  All arguments but the items belong to the group with the parity of the lane.  Keys are steps from the scaled keys
  // `first` of the elements and of the scales, in bytes of cells: each has 16.
  template <class CODES>
  __device__ __forceinline__ void add(const CODES (&items)[2], bool has_item, uint32_t key, uint32_t scale, bool has_scale,
                                      uint32_t scale_key, const uint64_t* first, bool is_last) {
    total_ += codes_.add(items, has_item, key + item_key_, first[0], turn_, is_last);
    total_ += scales_.add(scale, has_scale, scale_key, first[1], turn_, is_last);
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
  CodeCells<BITS> codes_;
  ScaleCells<SCALE_BITS> scales_;
  uint32_t item_key_, turn_ = 0;
  uint64_t total_ = 0;
};
template <int BITS, int SCALE_BITS>
class CellSums<false, BITS, SCALE_BITS> {
 public:
  __device__ __forceinline__ CellSums(const kvbm_part&, const kvbm_part&, uint32_t, uint32_t, uint32_t, uint32_t) {}
};
#endif

}  // namespace kvbm
