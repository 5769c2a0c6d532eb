// What the C of this directory shares: vectors of floats, bfloat16, and the structures that Python fills (see cpu_attention.py and
// cpu_decoder.py, which say the same of them).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// The tile registers of AMX: rows, and bfloat16 elements of each. As many elements of a row lie together in products' inputs.
#define TILE_ROWS 16
#define TILE_DEPTH 32

#define INLINE static inline __attribute__((always_inline))

// Built once for each kind of processor, so that these are known to the compiler.
#if defined(__AVX512F__)
#define LANES 16
#define NUMBERED {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define NUMBERED {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define NUMBERED {0, 1, 2, 3}
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

static const ivec lanes = NUMBERED;

// Of one layer. Elements are float, or bfloat16 when `is_bfloat16`; the caches are [pages, page_size, kv_heads, head_size].
struct layer {
  void *keys, *values;
  int64_t heads, kv_heads, head_size, page_size, is_bfloat16;
};

// Of one batch: `count` tokens, of which number i goes to place `slots[i]` of the flattened cache; and `slice_count` slices to attend
// for, each of `lengths` tokens from row `rows` on, the first at position `starts`, its page numbers from `page_at` on in `pages`.
struct batch {
  int64_t count, slice_count;
  const int64_t *slots, *rows, *lengths, *starts, *page_at, *pages;
};

// A tensor [heads, tokens, head_size] whose last dimension is contiguous; strides in elements.
struct rows {
  const void *data;
  int64_t head_stride, token_stride;
};

INLINE vec load_float(const float *from) {
  vec out;
  memcpy(&out, from, sizeof out);
  return out;
}

INLINE vec load(const void *from, int64_t at, int is_bfloat16) {
  if (!is_bfloat16) return load_float((const float *)from + at);
  hvec half;
  memcpy(&half, (const uint16_t *)from + at, sizeof half);
  return (vec)(__builtin_convertvector(half, uvec) << 16);
}

INLINE void store(vec value, void *to, int64_t at, int is_bfloat16) {
  if (!is_bfloat16) {
    memcpy((float *)to + at, &value, sizeof value);
    return;
  }
  // To the nearest, ties to even; a NaN stays one.
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#else
  uvec bits = (uvec)value, nan = (uvec)(value != value);
  uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  hvec half = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), hvec);
#endif
  memcpy((uint16_t *)to + at, &half, sizeof half);
}

INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec largest(vec a, vec b) {
#if defined(__AVX512F__)
  // The compiler does not see that the lines below are this.
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  ivec first = a > b;
  return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

// Whether pairs of bfloat16 are multiplied and added by one instruction, and such a sum of LANES pairs and one for all of them.
#if defined(__AVX512BF16__)
#define HAS_DOTS 1
INLINE vec add_dots(vec sum, vec pairs, uint32_t pair) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int32_t)pair));
}
#else
#define HAS_DOTS 0
INLINE vec add_dots(vec sum, vec pairs, uint32_t pair) {
  uvec both = pair - (uvec){0};
  sum += (vec)(both << 16) * (vec)((uvec)pairs << 16);
  return sum + (vec)(both & 0xffff0000) * (vec)((uvec)pairs & 0xffff0000);
}
#endif

// The transpose of a block of LANES rows, by exchanges between rows 1, 2, 4, … apart.
INLINE void transpose(vec block[LANES]) {
#pragma GCC unroll 4
  for (int apart = 1; apart < LANES; apart *= 2) {
    ivec upper = (lanes & apart) != 0;
    ivec low = (lanes & ~upper) | ((lanes - apart + LANES) & upper), high = ((lanes + apart) & ~upper) | ((lanes + LANES) & upper);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & apart) continue;
      vec a = block[i], b = block[i + apart];
      block[i] = __builtin_shuffle(a, b, low);
      block[i + apart] = __builtin_shuffle(a, b, high);
    }
  }
}

// exp of numbers up to 0, to some 2 units in the last place: Cephes' polynomial on [-log(2)/2, log(2)/2].
INLINE vec exponential(vec x) {
  x = largest(x, splat(-87.0f));
  const vec magic = splat(12582912.0f);  // adding it rounds to an integer
  vec n = (x * 1.44269504f + magic) - magic;
  x = x - n * 0.693359375f - n * -2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return y * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

// What one thread attends for at once: of a slice and `kv_heads` key/value heads every `parts`-th block of QUERY_ROWS rows, from
// `part` on.
struct item {
  int64_t slice, kv_head, kv_heads, part, parts;
};
#define QUERY_ROWS 32

// How a batch is divided into items, `count` in all. Key/value heads lie side by side in the cache, and are read the faster together,
// where their rows are few and there is enough for all threads. A long prompt's rows are divided.
struct division {
  int64_t kv_heads, parts, count;
};

INLINE struct division divide_attention(const struct layer *layer, const struct batch *batch, int64_t threads) {
  int64_t longest = 1;
  for (int64_t i = 0; i < batch->slice_count; i++) longest = batch->lengths[i] > longest ? batch->lengths[i] : longest;
  int64_t rows = longest * (layer->heads / layer->kv_heads), blocks = (rows + QUERY_ROWS - 1) / QUERY_ROWS;
  struct division by = {layer->kv_heads, blocks < 2 * threads ? blocks : 2 * threads, 0};
  while (by.kv_heads > 1 && (layer->kv_heads % by.kv_heads || by.kv_heads * rows > QUERY_ROWS ||
                             batch->slice_count * (layer->kv_heads / by.kv_heads) < 4 * threads))
    by.kv_heads--;
  by.count = batch->slice_count * (layer->kv_heads / by.kv_heads) * by.parts;
  return by;
}

INLINE struct item find_item(const struct layer *layer, int64_t number, struct division by) {
  int64_t groups = layer->kv_heads / by.kv_heads, group = number / by.parts;
  return (struct item){group / groups, group % groups * by.kv_heads, by.kv_heads, number % by.parts, by.parts};
}

void outrider_attend(const struct layer *layer, const struct batch *batch, const struct rows *query, void *out, float scale,
                     int64_t window, struct item item);
