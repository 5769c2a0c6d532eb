// Attention over a paged cache in bfloat16 by AMX. For layers with neither a window nor sinks, this
// code computes the same as paged_attention.c, and takes less time than it if several tokens are
// verified.
//
// Scores are keys · queries rather than queries · keys. So keys are read as they lie in the cache,
// and a vector has one key's scores for 16 queries, so that the softmax needs no sum or maximum
// across lanes. The softmax is updated for each chunk of keys (Dao et al., arXiv 2205.14135).
// Chunks begin at the same positions for every query, so a query's result does not depend on the
// other queries.
//
// A token of a tree sees the tokens of its path at successive positions, whatever their slots. All
// queries' scores are computed slot by slot, then moved to the positions of each query's path. The
// values at these positions differ from path to path, so each token adds up the values of its own
// path. A row of a tree therefore has the same bits as if its path were a chain.

#include "amx_tiles.h"

#define MOST_HEAD_SIZE 256
// The numbers of tiles of queries, of keys in a chunk, and of keys in a block. One tile product
// multiplies the weights of a block's keys with their values.
#define QUERY_TILES (QUERY_ROWS / TILE_ROWS)
#define CHUNK 128
#define BLOCK TILE_DEPTH
// The largest number of a tree's tokens, plus the slots before the tree in the block that has its
// first token.
#define TREE_SLOTS (64 + BLOCK)

// Up to QUERY_ROWS queries of one key/value head, one chunk of keys, and the state of the softmax.
// Tiles are [16 rows][32 elements].
struct work {
  // A tile's row has a pair of dimensions of 16 queries.
  uint16_t queries[QUERY_TILES][MOST_HEAD_SIZE / TILE_DEPTH][TILE_ROWS][TILE_DEPTH];
  float scores[QUERY_TILES][CHUNK][TILE_ROWS];
  // A tile's row has one query's weights for the 32 keys of a block.
  uint16_t weights[QUERY_TILES][CHUNK / BLOCK][TILE_ROWS][TILE_DEPTH];
  // A tile's row has 16 dimensions of the values of a pair of keys.
  uint16_t values[CHUNK / BLOCK][MOST_HEAD_SIZE / TILE_ROWS][TILE_ROWS][TILE_DEPTH];
  float sums[QUERY_TILES * TILE_ROWS][MOST_HEAD_SIZE];
  // The addresses in the cache of every 16 positions of the chunk.
  const uint16_t *keys[CHUNK / TILE_ROWS], *cached_values[CHUNK / TILE_ROWS + 1];
  vec max_score[QUERY_TILES], total[QUERY_TILES];
  ivec last[QUERY_TILES];  // the last position that a query sees, -1 for none
  // From slot `tree_start` on, a query's next position is the next slot with a bit in `paths`.
  // Without a tree, `tree_start` and `tree_block` are INT64_MAX.
  int64_t tree_start;
  uint64_t paths[QUERY_TILES * TILE_ROWS];
  // `slot_values` and `slot_scores` have the values and scores of the slots from `tree_block` on.
  // `places` has, for each position from there on, the index of each query's score in
  // `slot_scores`.
  int64_t tree_block;
  const uint16_t *slot_values[TREE_SLOTS];
  float slot_scores[QUERY_TILES][TREE_SLOTS][TILE_ROWS];
  ivec places[QUERY_TILES][TREE_SLOTS];
  // The first query's row in its slice, the number of queries, and the number of queries per token.
  int64_t first_row;
  int rows, group;
  int head_size, tiles;
  int64_t stride;  // elements from one position's keys (or values) to the next position's
  float scale;
};

// Indices that interleave two vectors: element i of the first, then element i of the second, for
// each i. The second begins `apart` elements after the first.
#define ALTERNATE(apart)                                                            \
  0, 0 + apart, 1, 1 + apart, 2, 2 + apart, 3, 3 + apart, 4, 4 + apart, 5,          \
      5 + apart, 6, 6 + apart, 7, 7 + apart, 8, 8 + apart, 9, 9 + apart, 10,        \
      10 + apart, 11, 11 + apart, 12, 12 + apart, 13, 13 + apart, 14, 14 + apart, 15, \
      15 + apart

// The score of a key that a query does not see. The score is finite, so that a difference of two
// scores is never a NaN.
#define UNSEEN splat(-1e30f)

// Each tile of 16 positions must lie in one page, and a head must fill whole tiles.
int outrider_fits_amx(const struct layer *layer) {
  int heads_fit = layer->head_size % TILE_DEPTH == 0 && layer->head_size <= MOST_HEAD_SIZE;
  return layer->is_bfloat16 && heads_fit && layer->page_size % TILE_ROWS == 0;
}

// Computes the scores of 16 keys. The second tile's scores begin `apart` floats after the first
// tile's scores.
INLINE void score_keys(struct work *work, const uint16_t *keys, float *scores, int64_t apart) {
  compiler_fence();
  _tile_zero(0);
  _tile_zero(1);
  for (int d = 0; d < work->head_size / TILE_DEPTH; d++) {
    _tile_loadd(4, keys + d * TILE_DEPTH, work->stride * 2);
    _tile_loadd(6, work->queries[0][d], 64);
    _tile_dpbf16ps(0, 4, 6);
    if (work->tiles < 2) continue;
    _tile_loadd(7, work->queries[1][d], 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, scores, 64);
  if (work->tiles == 2) _tile_stored(1, scores + apart, 64);
}

// Interleaves the values of two adjacent keys; null stands for zeros.
INLINE void pair_keys(struct work *work, int block, int pair, const uint16_t *even,
                      const uint16_t *odd) {
  static const uint16_t alternate[32] = {ALTERNATE(32)};
  const __m512i first = _mm512_loadu_si512(alternate);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int d = 0; d < work->head_size; d += TILE_DEPTH) {
    __m512i a = even ? _mm512_loadu_si512(even + d) : _mm512_setzero_si512();
    __m512i b = odd ? _mm512_loadu_si512(odd + d) : _mm512_setzero_si512();
    uint16_t(*tiles)[TILE_ROWS][TILE_DEPTH] = &work->values[block][d / TILE_ROWS];
    _mm512_storeu_si512(tiles[0][pair], _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(tiles[1][pair], _mm512_permutex2var_epi16(a, second, b));
  }
}

// Loads the values of a block. Zeros follow the last key: the cache may hold anything there.
INLINE void pair_values(struct work *work, int block, int count) {
  for (int pair = 0; pair < TILE_ROWS; pair++) {
    int key = block * BLOCK + 2 * pair;
    const uint16_t *even = work->cached_values[key / TILE_ROWS] + key % TILE_ROWS * work->stride;
    const uint16_t *odd = even + work->stride;
    pair_keys(work, block, pair, key < count ? even : 0, key + 1 < count ? odd : 0);
  }
}

// Hides the scores of keys after the last position that a query sees; returns each query's maximum
// so far. `count` is a multiple of 4.
INLINE vec mask_scores(struct work *work, int tile, int64_t start, int count) {
  vec most[4] = {work->max_score[tile], UNSEEN, UNSEEN, UNSEEN};
  for (int key = 0; key < count; key++) {
    vec score = load_float(work->scores[tile][key]);
    ivec seen = work->last[tile] >= (int32_t)(start + key);
    score = (vec)(((ivec)score & seen) | ((ivec)UNSEEN & ~seen));
    memcpy(work->scores[tile][key], &score, sizeof score);
    most[key % 4] = largest(most[key % 4], score);
  }
  return largest(largest(most[0], most[1]), largest(most[2], most[3]));
}

// Computes a block's weights exp(scale * (score - most)), and stores them rounded, in one row for
// each query; returns each query's sum of the unrounded weights.
INLINE vec weigh_block(struct work *work, int tile, int block, vec most) {
  static const uint16_t alternate[32] = {ALTERNATE(16)};
  const __m512i order = _mm512_loadu_si512(alternate);
  vec pairs[TILE_ROWS], totals[2] = {splat(0), splat(0)};
  for (int pair = 0; pair < TILE_ROWS; pair++) {
    vec weights[2];
    for (int i = 0; i < 2; i++) {
      vec score = load_float(work->scores[tile][block * BLOCK + 2 * pair + i]);
      weights[i] = (vec)((ivec)exponential((score - most) * work->scale) & (score > UNSEEN));
      totals[i] += weights[i];
    }
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    pairs[pair] = (vec)_mm512_permutexvar_epi16(order, rounded);
  }
  transpose(pairs);
  memcpy(work->weights[tile][block], pairs, sizeof pairs);
  return totals[0] + totals[1];
}

// Updates the softmax of a tile of queries with a chunk, and rescales the earlier sums to the new
// maximum.
INLINE void update_softmax(struct work *work, int tile, int64_t start, int blocks) {
  vec most = mask_scores(work, tile, start, blocks * BLOCK);
  vec factor = exponential((work->max_score[tile] - most) * work->scale);
  work->max_score[tile] = most;
  work->total[tile] *= factor;
  for (int block = 0; block < blocks; block++)
    work->total[tile] += weigh_block(work, tile, block, most);
  for (int i = 0; i < TILE_ROWS && start > 0; i++) {
    float *sums = work->sums[tile * TILE_ROWS + i];
    for (int d = 0; d < work->head_size; d += LANES) {
      vec scaled = load_float(sums + d) * factor[i];
      memcpy(sums + d, &scaled, sizeof scaled);
    }
  }
}

// Adds a chunk's weighted values to the sums, 32 dimensions at a time.
INLINE void add_values(struct work *work, int blocks) {
  const int64_t row = sizeof work->sums[0];
  compiler_fence();
  for (int d = 0; d < work->head_size; d += 2 * TILE_ROWS) {
    float *first = work->sums[0] + d, *second = work->sums[TILE_ROWS] + d;
    _tile_loadd(0, first, row);
    _tile_loadd(1, first + TILE_ROWS, row);
    if (work->tiles == 2) {
      _tile_loadd(2, second, row);
      _tile_loadd(3, second + TILE_ROWS, row);
    }
    for (int block = 0; block < blocks; block++) {
      _tile_loadd(4, work->weights[0][block], 64);
      _tile_loadd(6, work->values[block][d / TILE_ROWS], 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, work->values[block][d / TILE_ROWS + 1], 64);
      _tile_dpbf16ps(1, 4, 7);
      if (work->tiles < 2) continue;
      _tile_loadd(5, work->weights[1][block], 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, first, row);
    _tile_stored(1, first + TILE_ROWS, row);
    if (work->tiles < 2) continue;
    _tile_stored(2, second, row);
    _tile_stored(3, second + TILE_ROWS, row);
  }
}

// Prefetches a head's keys or values of 16 positions. The processor does not do it by itself,
// because a head's part of each row is short.
INLINE void prefetch(const struct work *work, const uint16_t *from) {
  for (int i = 0; i < TILE_ROWS; i++)
    for (int d = 0; d < work->head_size; d += 32)
      _mm_prefetch(from + i * work->stride + d, _MM_HINT_T0);
}

// Returns the offset in the cache, in elements, of a head's key and of its value for a slot of the
// sequence.
INLINE int64_t find_slot(const struct layer *layer, const int64_t *pages, int64_t kv_head,
                         int64_t slot) {
  int64_t page = pages[slot / layer->page_size];
  int64_t row = page * layer->page_size + slot % layer->page_size;
  return (row * layer->kv_heads + kv_head) * layer->head_size;
}

// Computes the scores of all slots of a tree, and finds their values and each query's path.
INLINE void score_tree(struct work *work, const struct layer *layer, const int64_t *pages,
                       int64_t kv_head, int64_t slots) {
  if (work->tree_start == INT64_MAX) return;
  for (int64_t slot = work->tree_block; slot < slots; slot += TILE_ROWS) {
    int64_t at = find_slot(layer, pages, kv_head, slot);
    int first = (int)(slot - work->tree_block);
    for (int i = 0; i < TILE_ROWS; i++)
      work->slot_values[first + i] = (const uint16_t *)layer->values + at + i * work->stride;
    score_keys(work, (const uint16_t *)layer->keys + at, work->slot_scores[0][first],
               TREE_SLOTS * TILE_ROWS);
  }
  int before = (int)(work->tree_start - work->tree_block);
  for (int tile = 0; tile < work->tiles; tile++) {
    for (int place = 0; place < before; place++)
      work->places[tile][place] = lanes + place * TILE_ROWS;
    for (int lane = 0; lane < TILE_ROWS; lane++) {
      int place = before;
      for (uint64_t left = work->paths[tile * TILE_ROWS + lane]; left; left &= left - 1)
        work->places[tile][place++][lane] = (before + __builtin_ctzll(left)) * TILE_ROWS + lane;
      // The query does not see these positions. Give them a valid address.
      while (place < slots - work->tree_block) work->places[tile][place++][lane] = lane;
    }
  }
}

// Looks up the scores of the chunk's positions from `first` to `end` among the scores of the tree's
// slots.
INLINE void find_scores(struct work *work, int64_t start, int first, int end) {
  for (int tile = 0; tile < work->tiles; tile++)
    for (int key = first; key < end; key++) {
      __m512i place = (__m512i)work->places[tile][start + key - work->tree_block];
      __m512 score = _mm512_i32gather_ps(place, work->slot_scores[tile], 4);
      memcpy(work->scores[tile][key], &score, sizeof score);
    }
}

// Adds a block's weighted values to the sums of the queries from `first` to `end`, at most 16.
INLINE void add_own_values(struct work *work, int block, int first, int end) {
  const int64_t row = sizeof work->sums[0], found_row = 2 * TILE_ROWS * sizeof(float);
  // The product has the 16 rows from `top` on. The other queries' weights are 0, but their results
  // are not copied to `sums`: an infinite value times 0 would make them NaN.
  int top = first < TILE_ROWS ? first : TILE_ROWS;
  uint16_t weights[TILE_ROWS][TILE_DEPTH] = {0};
  float found[TILE_ROWS][2 * TILE_ROWS];
  for (int i = first; i < end; i++)
    memcpy(weights[i - top], work->weights[i / TILE_ROWS][block][i % TILE_ROWS], 64);
  compiler_fence();
  _tile_loadd(4, weights, 64);
  for (int d = 0; d < work->head_size; d += 2 * TILE_ROWS) {
    float *sums = work->sums[top] + d;
    _tile_loadd(0, sums, row);
    _tile_loadd(1, sums + TILE_ROWS, row);
    _tile_loadd(6, work->values[block][d / TILE_ROWS], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, work->values[block][d / TILE_ROWS + 1], 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stored(0, found[0], found_row);
    _tile_stored(1, found[0] + TILE_ROWS, found_row);
    for (int i = first; i < end; i++) memcpy(work->sums[i] + d, found[i - top], found_row);
  }
  compiler_fence();
}

// Adds the weighted values of the blocks from `first` to `end` to the sums of one token's queries,
// which are `begin` to `after`. At positions of a tree, the values of the token's path are added.
INLINE void add_path(struct work *work, int64_t start, int first, int end, int begin, int after) {
  int64_t position = start + first * BLOCK, last = work->last[begin / TILE_ROWS][begin % TILE_ROWS];
  uint64_t left = work->paths[begin];
  for (int64_t before = position - work->tree_start; before > 0; before--) left &= left - 1;
  for (int block = first; block < end && position <= last; block++) {
    const uint16_t *values[BLOCK];
    for (int i = 0; i < BLOCK; i++, position++) {
      int64_t slot = position;
      if (position >= work->tree_start && position <= last) {
        slot = work->tree_start + __builtin_ctzll(left);
        left &= left - 1;
      }
      values[i] = 0;
      if (position <= last) values[i] = work->slot_values[slot - work->tree_block];
    }
    for (int pair = 0; pair < TILE_ROWS; pair++)
      pair_keys(work, block, pair, values[2 * pair], values[2 * pair + 1]);
    for (int query = begin; query < after; query += TILE_ROWS)
      add_own_values(work, block, query, query + TILE_ROWS < after ? query + TILE_ROWS : after);
  }
}

// Adds the weighted values of the blocks from `first` to `end`, which reach a tree, token by token.
INLINE void add_paths(struct work *work, int64_t start, int first, int end) {
  for (int begin = 0, after; begin < work->rows; begin = after) {
    after = begin + work->group - (int)((work->first_row + begin) % work->group);
    if (after > work->rows) after = work->rows;
    add_path(work, start, first, end, begin, after);
  }
}

// Returns how many of `all` parts of a chunk, each of `size` positions, end before `position`.
INLINE int parts_before(int64_t start, int64_t position, int size, int all) {
  int64_t parts = position > start ? (position - start) / size : 0;
  return (int)(parts < all ? parts : all);
}

// Attends to `count` keys from position `start` on.
INLINE void attend_chunk(struct work *work, const struct layer *layer, const int64_t *pages,
                         int64_t kv_head, int64_t start, int count) {
  int tiles = (count + TILE_ROWS - 1) / TILE_ROWS, blocks = (count + BLOCK - 1) / BLOCK;
  int cached = parts_before(start, work->tree_block, TILE_ROWS, tiles);
  int shared = parts_before(start, work->tree_block, BLOCK, blocks);
  for (int i = 0; i < cached; i++) {
    int64_t at = find_slot(layer, pages, kv_head, start + i * TILE_ROWS);
    work->keys[i] = (const uint16_t *)layer->keys + at;
    work->cached_values[i] = (const uint16_t *)layer->values + at;
  }
  if (cached > 0) {
    // The last block may end after the last tile; give it a valid address.
    work->cached_values[cached] = work->cached_values[cached - 1];
    prefetch(work, work->keys[0]);
  }
  for (int i = 0; i < cached; i++) {
    if (i + 1 < cached) prefetch(work, work->keys[i + 1]);
    prefetch(work, work->cached_values[i]);
    score_keys(work, work->keys[i], work->scores[0][i * TILE_ROWS], CHUNK * TILE_ROWS);
  }
  find_scores(work, start, cached * TILE_ROWS, count);
  for (int tile = 0; tile < work->tiles; tile++) update_softmax(work, tile, start, blocks);
  for (int block = 0; block < shared; block++) pair_values(work, block, count);
  if (shared) add_values(work, shared);
  if (shared < blocks) add_paths(work, start, shared, blocks);
}

// Loads and transposes one tile of queries, and resets their softmax. Row r is query head
// r % group of token r / group, where `group` query heads share a key/value head.
INLINE void load_queries(struct work *work, int tile, const struct layer *layer,
                         const struct batch *batch, const struct rows *query, int64_t slice,
                         int64_t kv_head, int64_t first_row, int64_t row_count) {
  int64_t group = layer->heads / layer->kv_heads;
  const uint16_t *rows[TILE_ROWS];
  int count = (int)(row_count - first_row < TILE_ROWS ? row_count - first_row : TILE_ROWS);
  work->max_score[tile] = UNSEEN;
  work->total[tile] = splat(0);
  for (int i = 0; i < TILE_ROWS; i++) {
    memset(work->sums[tile * TILE_ROWS + i], 0, work->head_size * sizeof(float));
    int64_t token = (first_row + i) / group, head = kv_head * group + (first_row + i) % group;
    int64_t last = batch->starts[slice] + token;
    uint64_t path = 0;
    if (batch->ancestors && i < count) path = batch->ancestors[batch->first_rows[slice] + token];
    if (path) last = work->tree_start + __builtin_popcountll(path) - 1;
    work->last[tile][i] = i < count ? (int32_t)last : -1;
    work->paths[tile * TILE_ROWS + i] = path;
    rows[i] = (const uint16_t *)query->data + head * query->head_stride +
              (batch->first_rows[slice] + token) * query->token_stride;
  }
  for (int d = 0; d < work->head_size; d += TILE_DEPTH) {
    vec block[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) {
      if (i < count)
        memcpy(&block[i], rows[i] + d, sizeof block[i]);
      else
        block[i] = splat(0);
    }
    transpose(block);
    memcpy(work->queries[tile][d / TILE_DEPTH], block, sizeof block);
  }
}

// Divides the sums of `count` rows by their totals and stores them.
INLINE void store_output(const struct work *work, const struct layer *layer,
                         const struct batch *batch, int64_t slice, int64_t kv_head,
                         int64_t first_row, int count, uint16_t *out) {
  int64_t group = layer->heads / layer->kv_heads;
  for (int i = 0; i < count; i++) {
    int64_t token = (first_row + i) / group, head = kv_head * group + (first_row + i) % group;
    int64_t at = ((batch->first_rows[slice] + token) * layer->heads + head) * work->head_size;
    for (int d = 0; d < work->head_size; d += LANES) {
      vec sum = load_float(work->sums[i] + d);
      store(sum / work->total[i / TILE_ROWS][i % TILE_ROWS], out, at + d, 1);
    }
  }
}

void outrider_attend_amx(const struct layer *layer, const struct batch *batch,
                         const struct rows *query, void *out, float scale,
                         struct attention_item item) {
  // The struct is not initialized as a whole: most of it is room for the largest heads.
  struct work work;
  work.head_size = (int)layer->head_size;
  work.stride = layer->kv_heads * layer->head_size;
  work.scale = scale;
  int64_t slice = item.slice, kv_head = item.kv_head, group = layer->heads / layer->kv_heads;
  int64_t rows = batch->lengths[slice] * group;
  const int64_t *pages = batch->pages + batch->page_offsets[slice];
  work.tree_start = find_tree_start(batch, slice);
  int64_t slots = batch->starts[slice] + batch->lengths[slice];
  work.tree_block = work.tree_start / BLOCK * BLOCK;
  if (work.tree_start >= slots) work.tree_start = work.tree_block = INT64_MAX;
  work.group = (int)group;
  for (int64_t row = item.part * QUERY_ROWS; row < rows; row += item.parts * QUERY_ROWS) {
    int64_t count = rows - row < QUERY_ROWS ? rows - row : QUERY_ROWS;
    work.tiles = count > TILE_ROWS ? 2 : 1;
    work.first_row = row;
    work.rows = (int)count;
    for (int tile = 0; tile < work.tiles; tile++)
      load_queries(&work, tile, layer, batch, query, slice, kv_head, row + tile * TILE_ROWS, rows);
    score_tree(&work, layer, pages, kv_head, slots);
    int64_t end = 0;
    for (int i = 0; i < work.rows; i++)
      if (work.last[i / TILE_ROWS][i % TILE_ROWS] >= end)
        end = work.last[i / TILE_ROWS][i % TILE_ROWS] + 1;
    for (int64_t start = 0; start < end; start += CHUNK) {
      int keys = (int)(end - start < CHUNK ? end - start : CHUNK);
      attend_chunk(&work, layer, pages, kv_head, start, keys);
    }
    store_output(&work, layer, batch, slice, kv_head, row, (int)count, out);
  }
}
