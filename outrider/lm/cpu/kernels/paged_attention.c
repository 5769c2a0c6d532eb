// Attention of a few tokens a sequence over a paged cache on a CPU: what verification and decoding do between two matrix products.
//
// Keys and values are read where they lie, once for all query heads that share them, and the softmax is kept up while they go by
// (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., arXiv 2205.14135). As many keys as a vector has lanes make a
// block. Its keys are turned, so that each lane sums the score of a key of its own and no sum goes across lanes.
//
// Plain C with GCC's vectors, called through ctypes; see outrider/lm/cpu/attention.py, which says
// the same of the structures. It shares OpenMP's runtime, and so its threads, with torch.

#include "cpu_kernels.h"

#include <omp.h>

#define MOST_HEAD_SIZE 256

INLINE float largest_lane(vec x) {
#pragma GCC unroll 4
  for (int apart = LANES / 2; apart > 0; apart /= 2) x = largest(x, __builtin_shuffle(x, lanes ^ apart));
  return x[0];
}

// Up to QUERY_ROWS queries, those of a key/value head side by side, and how far their softmax has come. `by_dots` keys and queries are
// pairs of bfloat16 of neighbouring dimensions, and values and weights pairs of neighbouring keys; else they are floats, and `scale` is
// in the queries.
struct work {
  int by_dots;
  float scale;
  vec keys[MOST_HEAD_SIZE], values[LANES][MOST_HEAD_SIZE / LANES];
  uint32_t query_pairs[QUERY_ROWS][MOST_HEAD_SIZE / 2], weight_pairs[QUERY_ROWS][LANES / 2];
  vec sums[QUERY_ROWS][MOST_HEAD_SIZE / LANES], weights[QUERY_ROWS], total[QUERY_ROWS];
  float queries[QUERY_ROWS][MOST_HEAD_SIZE], most[QUERY_ROWS];
  int64_t first[QUERY_ROWS], last[QUERY_ROWS];
};

// Scores of `n` rows against the block, each in as many sums whatever `n` is, so that they do not depend on what else is computed.
INLINE void score(struct work *work, int row, int n, int head_size) {
  const int parts = 2;
  vec sums[8 * 2] = {0};
  for (int d = 0; d < head_size / (work->by_dots ? 2 : 1); d += parts)
    for (int part = 0; part < parts; part++)
      for (int i = 0; i < n; i++) {
        vec *sum = &sums[i * parts + part], keys = work->keys[d + part];
        if (HAS_DOTS && work->by_dots) *sum = add_dots(*sum, keys, work->query_pairs[row + i][d + part]);
        else *sum += work->queries[row + i][d + part] * keys;
      }
  for (int i = 0; i < n; i++) {
    for (int part = 1; part < parts; part++) sums[i * parts] += sums[i * parts + part];
    work->weights[row + i] = HAS_DOTS && work->by_dots ? sums[i * parts] * work->scale : sums[i * parts];
  }
}

// From scores to weights exp(score - most), what was summed before scaled to the new maximum.
INLINE void weigh(struct work *work, int row, ivec position, int head_size) {
  ivec seen = (position >= (int32_t)work->first[row]) & (position <= (int32_t)work->last[row]);
  vec scores = (vec)(((ivec)work->weights[row] & seen) | ((ivec)splat(-INFINITY) & ~seen));
  float most = largest_lane(scores);
  if (most > work->most[row]) {
    float scale = expf(work->most[row] - most);
    work->most[row] = most;
    work->total[row] *= scale;
    for (int c = 0; c < head_size / LANES; c++) work->sums[row][c] *= scale;
  }
  // Behind nothing that is seen `most` is still -inf, and the difference would be a NaN.
  vec weights = work->most[row] > -INFINITY ? exponential(scores - work->most[row]) : splat(0);
  work->weights[row] = (vec)((ivec)weights & seen);
  work->total[row] += work->weights[row];
  if (HAS_DOTS && work->by_dots) store(work->weights[row], work->weight_pairs[row], 0, 1);
}

// Adds the block's values, by weight, to the sums of `n` rows.
INLINE void add_values(struct work *work, int row, int n, int count, int head_size) {
  for (int c = 0; c < head_size / LANES; c++) {
    vec sums[8];
    for (int i = 0; i < n; i++) sums[i] = work->sums[row + i][c];
    if (HAS_DOTS && work->by_dots) {
      for (int j = 0; j < (count + 1) / 2; j++)
        for (int i = 0; i < n; i++) sums[i] = add_dots(sums[i], work->values[j][c], work->weight_pairs[row + i][j]);
    } else {
      for (int j = 0; j < count; j++)
        for (int i = 0; i < n; i++) sums[i] += work->weights[row + i][j] * work->values[j][c];
    }
    for (int i = 0; i < n; i++) work->sums[row + i][c] = sums[i];
  }
}

// Up to eight rows at a time, with loops of a length that the compiler knows.
#define BY_ROWS(rows, call)                    \
  for (int row = 0; row < (rows); row += 8) {  \
    switch ((rows) - row) {                    \
      case 1: { const int n = 1; call; } break; \
      case 2: { const int n = 2; call; } break; \
      case 3: { const int n = 3; call; } break; \
      case 4: { const int n = 4; call; } break; \
      case 5: { const int n = 5; call; } break; \
      case 6: { const int n = 6; call; } break; \
      case 7: { const int n = 7; call; } break; \
      default: { const int n = 8; call; }       \
    }                                          \
  }

#if HAS_DOTS
// The block's values, those of two keys side by side; zeros behind the last.
INLINE void pair_values(struct work *work, const uint16_t *values, int64_t stride, int count, int head_size) {
  static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_loadu_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int j = 0; j < count; j += 2, values += 2 * stride)
    for (int d = 0; d < head_size; d += 2 * LANES) {
      __m512i a = _mm512_loadu_si512(values + d);
      __m512i b = j + 1 < count ? _mm512_loadu_si512(values + stride + d) : _mm512_setzero_si512();
      work->values[j / 2][d / LANES] = (vec)_mm512_permutex2var_epi16(a, first, b);
      work->values[j / 2][d / LANES + 1] = (vec)_mm512_permutex2var_epi16(a, second, b);
    }
}
#endif

// Keys and values to ask memory for: rows of so many bytes, `stride` apart. The processor cannot foresee these addresses. Asked for all
// at once they would be waited for; one by one beside the loads of a block, they come while it is computed with.
struct ahead {
  const char *keys, *values;
  int64_t column, bytes, stride;
};

INLINE void ask(struct ahead *ahead, int64_t bytes) {
  __builtin_prefetch(ahead->keys + ahead->column, 0, 2);
  __builtin_prefetch(ahead->values + ahead->column, 0, 2);
  ahead->column += bytes;
  if (ahead->column < ahead->bytes) return;
  ahead->column = 0;
  ahead->keys += ahead->stride;
  ahead->values += ahead->stride;
}

// The block's keys, turned, and its values, as floats. As much is asked for of what is ahead.
INLINE void take_block(struct work *work, const struct layer *layer, int64_t slot, int64_t kv_head, int count, struct ahead *ahead,
                       int is_bfloat16) {
  int head_size = (int)layer->head_size;
  int64_t stride = layer->kv_heads * layer->head_size, at = slot * stride + kv_head * layer->head_size;
  // Two bfloat16 numbers are turned as one, where a head has room for that.
  int paired = is_bfloat16 && head_size % (2 * LANES) == 0, step = paired ? 2 * LANES : LANES;
  for (int d = 0; d < head_size; d += step) {
    vec block[LANES];
    for (int j = 0; j < LANES; j++) {
      ask(ahead, step * (is_bfloat16 ? 2 : 4));
      if (j >= count) block[j] = splat(0);
      else if (paired) memcpy(&block[j], (const uint16_t *)layer->keys + at + j * stride + d, sizeof block[j]);
      else block[j] = load(layer->keys, at + j * stride + d, is_bfloat16);
    }
    transpose(block);
    for (int i = 0; i < LANES; i++) {
      if (work->by_dots) {
        work->keys[d / 2 + i] = block[i];
      } else if (paired) {
        work->keys[d + 2 * i] = (vec)((uvec)block[i] << 16);
        work->keys[d + 2 * i + 1] = (vec)((uvec)block[i] & 0xffff0000);
      } else {
        work->keys[d + i] = block[i];
      }
    }
  }
#if HAS_DOTS
  if (work->by_dots) {
    pair_values(work, (const uint16_t *)layer->values + at, stride, count, head_size);
    return;
  }
#endif
  for (int j = 0; j < count; j++)
    for (int c = 0; c < head_size / LANES; c++) work->values[j][c] = load(layer->values, at + j * stride + c * LANES, is_bfloat16);
}

// The rows of each of `heads` key/value heads from `kv_head` on.
INLINE void attend_rows(const struct layer *layer, const int64_t *pages, struct work *work, int rows, int64_t kv_head, int64_t heads,
                        int64_t first_key, int64_t last_key, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  const int64_t width = is_bfloat16 ? 2 : 4, bytes = heads * head_size * width, stride = layer->kv_heads * head_size * width;
  for (int64_t key = first_key, count; key <= last_key; key += count) {
    int64_t within = key % layer->page_size;
    count = layer->page_size - within;
    if (count > LANES) count = LANES;
    if (count > last_key - key + 1) count = last_key - key + 1;
    // Behind the last block nothing is asked for but what is there.
    int64_t slot = pages[key / layer->page_size] * layer->page_size + within, next = key + count <= last_key ? key + count : key;
    int64_t soon = (pages[next / layer->page_size] * layer->page_size + next % layer->page_size) * stride + kv_head * head_size * width;
    struct ahead ahead = {(const char *)layer->keys + soon, (const char *)layer->values + soon, 0, bytes, stride};
    // Lanes behind the block are positions that no row sees.
    ivec position = lanes + (int32_t)key;
    position |= (lanes >= (int32_t)count) & INT32_MAX;
    for (int head = 0; head < heads; head++) {
      int first = head * rows;
      take_block(work, layer, slot, kv_head + head, (int)count, &ahead, is_bfloat16);
      BY_ROWS(rows, score(work, first + row, n, head_size))
      for (int row = 0; row < rows; row++) weigh(work, first + row, position, head_size);
      BY_ROWS(rows, add_values(work, first + row, n, (int)count, head_size))
    }
  }
}

// Some of the rows of each key/value head of an item: row r is query head r % group of token r / group.
INLINE void attend_some(const struct layer *layer, const struct batch *batch, const struct rows *query, void *out, float scale,
                        int64_t window, struct item item, int64_t first_row, int rows, int is_bfloat16) {
  // Not initialized as a whole: most of it is room for the largest heads.
  struct work work;
  work.by_dots = HAS_DOTS && is_bfloat16 && layer->head_size % (2 * LANES) == 0;
  work.scale = scale;
  int64_t group = layer->heads / layer->kv_heads, size = layer->head_size, start = batch->starts[item.slice];
  int64_t first_key = INT32_MAX, last_key = 0, all = item.kv_heads * rows;
  for (int64_t i = 0; i < all; i++) {
    int64_t row = first_row + i % rows, token = row / group, head = (item.kv_head + i / rows) * group + row % group;
    int64_t at = head * query->head_stride + (batch->rows[item.slice] + token) * query->token_stride;
    for (int64_t d = 0; d < size; d += LANES) {
      vec part = load(query->data, at + d, is_bfloat16) * scale;
      memcpy(&work.queries[i][d], &part, sizeof part);
      if (work.by_dots) memcpy(&work.query_pairs[i][d / 2], (const uint16_t *)query->data + at + d, LANES * sizeof(uint16_t));
      work.sums[i][d / LANES] = splat(0);
    }
    work.total[i] = splat(0);
    work.most[i] = -INFINITY;
    work.last[i] = start + token;
    work.first[i] = window > 0 && start + token >= window ? start + token - window + 1 : 0;
    if (work.first[i] < first_key) first_key = work.first[i];
    if (work.last[i] > last_key) last_key = work.last[i];
  }
  const int64_t *pages = batch->pages + batch->page_at[item.slice];
  attend_rows(layer, pages, &work, rows, item.kv_head, item.kv_heads, first_key, last_key, is_bfloat16);
  for (int64_t i = 0; i < all; i++) {
    int64_t row = first_row + i % rows, token = row / group, head = (item.kv_head + i / rows) * group + row % group;
    int64_t at = ((batch->rows[item.slice] + token) * layer->heads + head) * size;
    float total = 0;
    for (int j = 0; j < LANES; j++) total += work.total[i][j];
    for (int64_t c = 0; c < size / LANES; c++) store(work.sums[i][c] / total, out, at + c * LANES, is_bfloat16);
  }
}

void outrider_attend(const struct layer *layer, const struct batch *batch, const struct rows *query, void *out, float scale,
                     int64_t window, struct item item) {
  int64_t rows = batch->lengths[item.slice] * (layer->heads / layer->kv_heads);
  for (int64_t row = item.part * QUERY_ROWS; row < rows; row += item.parts * QUERY_ROWS) {
    int some = (int)(rows - row < QUERY_ROWS ? rows - row : QUERY_ROWS);
    if (layer->is_bfloat16)
      attend_some(layer, batch, query, out, scale, window, item, row, some, 1);
    else
      attend_some(layer, batch, query, out, scale, window, item, row, some, 0);
  }
}

static void put(const struct layer *layer, const struct batch *batch, const struct rows *from, void *cache) {
  int64_t width = layer->is_bfloat16 ? 2 : 4, bytes = layer->head_size * width;
  for (int64_t i = 0; i < batch->count; i++)
    for (int64_t head = 0; head < layer->kv_heads; head++)
      memcpy((char *)cache + (batch->slots[i] * layer->kv_heads + head) * bytes,
             (const char *)from->data + (head * from->head_stride + i * from->token_stride) * width, (size_t)bytes);
}

// Puts the batch's keys and values into the cache, then attends: `out` is [tokens, heads, head_size], of which only the slices' rows
// are written. A query sees the keys up to its own position, with a `window` above 0 the last so many of them.
void outrider_paged_attention(const struct layer *layer, const struct batch *batch, struct rows query, struct rows key,
                              struct rows value, void *out, float scale, int64_t window) {
  put(layer, batch, &key, layer->keys);
  put(layer, batch, &value, layer->values);
  struct division by = divide_attention(layer, batch, omp_get_max_threads());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < by.count; i++) outrider_attend(layer, batch, &query, out, scale, window, find_item(layer, i, by));
}
