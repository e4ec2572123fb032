// permute.cuh: what a generated file includes: every template, and the line that makes a kernel of one.
//
// A copy is a loop nest over bytes (kvbm.h).  Read the headers in this order; each includes only those before it:
//
//   words.cuh     loads and stores of words
//   address.cuh   from the number of a job to its addresses
//   cells.cuh     digests of what is read: keys and sums
//   prepare.cuh   cuts a batch into jobs, tiles and CTAs (on the host)
//   team.cuh      the threads that work on one piece
//   square.cuh    transposes a square of elements
//   rows.cuh      Rows: copies whole runs
//   few.cuh       FewRows: the same on few multiprocessors
//   tile.cuh      Tile: transposes
//   digest.cuh    Digest: digests, and copies nothing
//   planes.cuh    Record, Page: all planes of a block in one launch
//   formats.cuh   number formats of elements and scales
//   cast_digest.cuh  CellSums: digests what a cast reads or stores
//   cast_host.cuh   runs of contiguous elements on the host, for each instruction set
//   cast.cuh      Cast: changes the format of values
//   kernel.cuh    kernels of one part or more
//
// The structure of a loop nest is a template parameter; sizes and strides are arguments.  So one kernel serves all models, and
// a division by an extent is one multiply-high. Kernels named few_ run on a limited number of multiprocessors: several warps,
// or teams of threads (team.cuh), share a CTA, and loop. Every template is correct for all sizes.  The planner chooses the word by the
// alignment of addresses and strides.
#pragma once

#include "kernel.cuh"
