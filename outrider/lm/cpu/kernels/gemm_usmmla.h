// The products of int8 rows with a block of columns by ARM's usmmla; see gemm_int8.h.
//
// usmmla adds the products of 2 columns of 8 unsigned weights with 2 rows of 8 signed numbers to 2
// by 2 sums. A single row is paired with itself, which takes no longer than usdot would.
#pragma once

// The number of vectors of weights in a line, two columns each, and how many of them are multiplied
// at once, so that the sums of ACC_ROWS rows fit the registers.
#define LINE_VECTORS (BLOCK / 2)
#define AT_ONCE 8

// Multiplies `n` rows by a block of columns. If `cold`, reading a line of weights prefetches the
// line PREFETCH_DISTANCE bytes after it.
INLINE void gemm_rows(const struct group *x, int64_t groups, const uint8_t *weights,
                      float (*acc)[BLOCK], int n, int cold) {
  const int pairs = (n + 1) / 2;
  const struct group *rows[ACC_ROWS];
  // If the number of rows is odd, the last row is paired with itself.
  for (int i = 0; i < 2 * pairs; i++) rows[i] = x + (i < n ? i : n - 1) * groups;
  vec total[ACC_ROWS / 2][LINE_VECTORS];
  for (int i = 0; i < pairs; i++)
    for (int v = 0; v < LINE_VECTORS; v++) total[i][v] = splat(0);
  for (int64_t k = 0; k < groups; k++, weights += DEPTH_BYTES)
    for (int first = 0; first < LINE_VECTORS; first += AT_ONCE) {
      int32x4_t sums[ACC_ROWS / 2][AT_ONCE];
      for (int i = 0; i < pairs; i++) {
        const int32_t one = rows[2 * i][k].offset, other = rows[2 * i + 1][k].offset;
        for (int v = 0; v < AT_ONCE; v++) sums[i][v] = (int32x4_t){one, other, one, other};
      }
      for (int line = 0; line < LINES; line++) {
        const uint8_t *columns = weights + (line * LINE_VECTORS + first) * 2 * PAIR;
        for (int at = 0; at < AT_ONCE * 2 * PAIR && cold; at += 64)
          __builtin_prefetch(columns + PREFETCH_DISTANCE + at, 0, 2);
        int8x16_t numbers[ACC_ROWS / 2];
        for (int i = 0; i < pairs; i++)
          numbers[i] = vcombine_s8(vld1_s8(rows[2 * i][k].numbers + line * PAIR),
                                   vld1_s8(rows[2 * i + 1][k].numbers + line * PAIR));
        for (int v = 0; v < AT_ONCE; v++) {
          uint8x16_t some = vld1q_u8(columns + v * 2 * PAIR);
          for (int i = 0; i < pairs; i++) sums[i][v] = vusmmlaq_s32(sums[i][v], some, numbers[i]);
        }
      }
      for (int i = 0; i < pairs; i++) {
        const float one = rows[2 * i][k].scale, other = rows[2 * i + 1][k].scale;
        for (int v = 0; v < AT_ONCE; v++)
          total[i][first + v] +=
              __builtin_convertvector((ivec)sums[i][v], vec) * (vec){one, other, one, other};
      }
    }
  for (int i = 0; i < n; i++)
    for (int v = 0; v < LINE_VECTORS; v += 2) {
      // A vector has four sums: two columns for each of two rows.
      float32x4_t a = (float32x4_t)total[i / 2][v], b = (float32x4_t)total[i / 2][v + 1];
      vst1q_f32(acc[i] + 2 * v, i % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b));
    }
}
