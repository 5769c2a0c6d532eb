// Matrix products by a team of threads, and what becomes of their sums.
#pragma once

#include "sums.h"
#include "team.h"

#include <omp.h>

// Rounded to what elements have.
INLINE vec rounded(vec x) {
  element half[LANES];
  store(x, half, 0, BFLOAT16);
  return load(half, 0, BFLOAT16);
}

// LANES of a row's sums from `column` on, with the bias.
INLINE vec round_sums(const float *sums, const struct linear *linear, int64_t column) {
  vec sum = load_float(sums);
  return rounded(linear->bias ? sum + load(linear->bias, column, BFLOAT16) : sum);
}

// What becomes of a product: it is stored, or added to what is there; or its first half gates the other; or it is stored as float.
enum purpose { STORE, ADD, GATED, LOGITS };

// Stores what of LANES numbers is in front of the row's end, which is `left` away.
INLINE void store_some(vec value, char *to, int64_t left, int is_bfloat16) {
  if (left >= LANES) {
    store(value, to, 0, is_bfloat16);
    return;
  }
  char whole[sizeof value];
  store(value, whole, 0, is_bfloat16);
  memcpy(to, whole, (size_t)left * (is_bfloat16 ? 2 : 4));
}

INLINE void finish_block(float sums[ROWS][BLOCK], int rows, const struct linear *linear, int64_t block, char *out,
                         enum purpose purpose) {
  const int64_t width = purpose == LOGITS ? sizeof(float) : sizeof(element);
  for (int64_t at = 0; at < BLOCK; at += LANES) {
    int64_t column = block * BLOCK + at, left = linear->out - column;
    if (left <= 0) return;
    for (int i = 0; i < rows; i++) {
      vec value = round_sums(sums[i] + at, linear, column);
      char *to = out + (i * linear->out + column) * width;
      // What is added to has whole blocks, being the input of other products.
      if (purpose == ADD) value += load(to, 0, BFLOAT16);
      store_some(value, to, left, BFLOAT16 && purpose != LOGITS);
    }
  }
}

// silu(gate) * up (Shazeer, arXiv 2002.05202) of one block of columns, from the sums of both; `out` is tiled.
INLINE void finish_gated(float gates[ROWS][BLOCK], float ups[ROWS][BLOCK], int rows, const struct linear *linear, int64_t block,
                         element *out, int64_t tile_rows) {
  int64_t half = linear->out / 2;
  for (int i = 0; i < rows; i++) {
    element *to = tiled_row(out, i, half, tile_rows) + block * tile_rows * TILE_DEPTH;
    for (int64_t at = 0, column = block * BLOCK; at < BLOCK; at += LANES, column += LANES) {
      vec x = round_sums(gates[i] + at, linear, column), up = round_sums(ups[i] + at, linear, half + column);
      vec e = exponential(-largest(x, -x));
      ivec positive = x >= splat(0);
      vec top = (vec)(((ivec)splat(1) & positive) | ((ivec)e & ~positive));
      store(rounded(x * top / (e + 1.0f)) * up, to, at, BFLOAT16);
    }
  }
}

INLINE void multiply(struct input x, int rows, const struct linear *linear, int64_t block, char *out, enum purpose purpose,
                     struct reading reading) {
  float sums[2][ROWS][BLOCK] __attribute__((aligned(64)));
  sum_block(x, rows, linear, block, sums[0], reading);
  if (purpose != GATED) {
    finish_block(sums[0], rows, linear, block, out, purpose);
    return;
  }
  sum_block(x, rows, linear, block + linear->out / (2 * BLOCK), sums[1], reading);
  finish_gated(sums[0], sums[1], rows, linear, block, (element *)out, x.tile_rows);
}

// Shared by the team that calls it: out [rows, out] of x [rows, in]. Some blocks at a time, so that long prompts' rows are read less
// often, but few enough for all threads to end at about the same time. Where a thread asks memory for what is next, it claims that
// before it begins with the present blocks.
static void product(struct team *team, struct input x, int64_t rows, const struct linear *linear, void *out, enum purpose purpose) {
  const int64_t columns = purpose == GATED ? linear->out / 2 : linear->out, blocks = (columns + BLOCK - 1) / BLOCK;
  const int64_t share = blocks / (8 * team->size), some = share < 1 ? 1 : share > 4 ? 4 : share;
  const int64_t row_bytes = columns * (int64_t)(purpose == LOGITS ? sizeof(float) : sizeof(element));
  int expected = 0, asked = 0;
  for (int64_t begin = some * claim(team), later; begin < blocks; begin = ASKS(rows) ? later : some * claim(team)) {
    later = ASKS(rows) ? some * claim(team) : blocks;
    int64_t end = begin + some < blocks ? begin + some : blocks;
    for (int64_t row = 0; row < rows; row += ROWS) {
      int count = (int)(rows - row < ROWS ? rows - row : ROWS);
      if (count != expected) expect_rows(expected = count);
      for (int64_t block = begin; block < end; block++) {
        int64_t next = block + 1 < end ? block + 1 : later;
        struct reading reading = {row == 0 && !asked, ASKS(rows) && next < blocks ? next - block : 0};
        struct input some_x = {x.data + row * linear->in, x.tile_rows, x.tiled};
        multiply(some_x, count, linear, block, (char *)out + row * row_bytes, purpose, reading);
        asked = ASKS(rows);
      }
    }
  }
  meet(team);
}

// Every thread of a team begins so: how large it is, only they know.
INLINE kept_state join(struct team *team) {
  kept_state kept = keep_state();
#pragma omp single
  team->size = (unsigned)omp_get_num_threads();
  return kept;
}
