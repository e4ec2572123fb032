// permute.cuh: what a generated file includes: every template, and the line that makes a kernel of one.
//
// A copy is a loop nest over bytes (kvbm.h).  Read the headers in this order; each includes only those before it:
//
//   words.cuh     a word, loaded and stored
//   address.cuh   from a job's number to its addresses
//   cells.cuh     digests of what is read: keys and sums
//   prepare.cuh   a batch, cut into jobs, tiles and CTAs (on the host)
//   team.cuh      the threads that work on one piece
//   square.cuh    squares of elements, turned in registers
//   rows.cuh      Rows: runs stay whole
//   tile.cuh      Tile: single elements move
//   digest.cuh    Digest: nothing is copied
//   planes.cuh    Record, Page: the planes of a block in one launch
//   kernel.cuh    a kernel of one part or more
//
// Structure is a template parameter, sizes and strides are arguments: one multiply-high a mode and word, and any model's
// shape runs at full speed.  Kernel<P> and Kernel<P, Q> make kernels of one part and of two (K and V in one launch).
// With TEAMS a kernel keeps to few multiprocessors: its CTAs hold so many teams, each of which does what a CTA does
// otherwise, turn after turn.
// Everything is correct for any sizes; alignment only decides which instantiation the planner may ask for.
#pragma once

#include "kernel.cuh"
