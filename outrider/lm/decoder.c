// A whole forward of Llama, and of what is built like it, in one call, in bfloat16 on a processor with AMX; and its matrix products.
//
// A forward of few tokens reads every weight once and computes little with it. What it takes is set by how steadily weights come from
// memory, and by what happens between two products: so weights lie in the order in which they are read, and nothing between the
// products leaves C. Sums are float; what is rounded to bfloat16 is what transformers rounds, but for the inside of attention and the
// rotation. A row's sums are taken in the same order whatever other rows there are.

#include "tiles.h"

#include <linux/futex.h>
#include <omp.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

// Columns of a block of weights, and rows of activations that are multiplied by it at once.
#define BLOCK 32
#define ROWS 32
// How far ahead weights are asked for, in bytes. One tile gets the processor's own prefetching going; farther ahead was slower.
#define AHEAD 1024

// A product's weights [out, in] as [blocks of 32 out][blocks of 32 in][2][16 pairs of in][16 out][pair], zeros behind the last out.
struct linear {
  const uint16_t *tiles, *bias;
  int64_t in, out;
};

struct decoder_layer {
  struct linear qkv, o, gate_up, down;
  const uint16_t *input_norm, *post_norm, *query_norm, *key_norm;  // the norms of queries and keys may be null
  struct layer cache;
};

struct decoder {
  const struct decoder_layer *layers;
  const uint16_t *embedding, *norm;
  struct linear head;
  const float *frequencies;  // of the rotation, one for each of `pairs` pairs
  int64_t layer_count, hidden, intermediate, pairs;
  float epsilon, rotation_scale, attention_scale;
};

// Of one batch, beside `struct batch`: the tokens and their positions, the rows whose logits are wanted, and room to work in.
struct step {
  const int64_t *token_ids, *positions, *wanted;
  int64_t wanted_count;
  void *scratch;
  float *logits;
};

// A product's input [rows, in]. Either rows lie one behind the other; or tiles of 16 rows and 32 of `in` do, tiles of the same rows
// side by side, which are read the faster since their lines fall into different sets of the cache.
struct input {
  const uint16_t *data;
  int tiled;
};
#define TILE (TILE_ROWS * TILE_DEPTH)

// Where a row of what is tiled begins; its parts of TILE_DEPTH elements are TILE apart.
INLINE uint16_t *tiled_row(uint16_t *data, int64_t row, int64_t in) {
  return data + row / TILE_ROWS * TILE_ROWS * in + row % TILE_ROWS * TILE_DEPTH;
}

INLINE void sum_tiles(struct input input, int64_t in, const char *weights, float sums[ROWS][BLOCK], int two, int first) {
  const int64_t step = input.tiled ? TILE : TILE_DEPTH, apart = input.tiled ? TILE_DEPTH : in;
  const uint16_t *x = input.data;
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, x += step) {
    const char *at = weights + k * 2 * 1024;
    // The rows behind the first ROWS find the weights in the cache.
    for (int i = 0; i < 2048 && first; i += 64) _mm_prefetch(at + AHEAD + i, _MM_HINT_T1);
    // More than 16 rows do not stay in the first cache from one block of weights to the next.
    for (int i = 0; i < TILE_ROWS && two; i++) {
      _mm_prefetch(x + step + i * apart, _MM_HINT_T0);
      _mm_prefetch(x + TILE_ROWS * in + step + i * apart, _MM_HINT_T0);
    }
    // Loads before products: where another processor's thread shares the core, that is a tenth faster than one by one.
    _tile_loadd(4, x, apart * 2);
    _tile_loadd(6, at, 64);
    _tile_loadd(7, at + 1024, 64);
    if (two) _tile_loadd(5, x + TILE_ROWS * in, apart * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], sizeof sums[0]);
  _tile_stored(1, sums[0] + 16, sizeof sums[0]);
  if (two) {
    _tile_stored(2, sums[16], sizeof sums[0]);
    _tile_stored(3, sums[16] + 16, sizeof sums[0]);
  }
}

INLINE __m512 widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }

// Threads that wait for each other, some 200 times a forward. OpenMP's own barriers spin for 16 ms before they sleep: where a third
// process wants one of two cores, the thread that spins keeps it from running while the other thread waits for its turn, which made
// a forward four times as long. Spinning less everywhere (see outrider/__init__.py) would slow down torch, whose loops are short.
struct team {
  _Atomic unsigned arrived, turn, sleeping;
  unsigned size;
};
#define SPINS 1000

static void meet(struct team *team) {
  unsigned turn = atomic_load(&team->turn);
  if (atomic_fetch_add(&team->arrived, 1) + 1 == team->size) {
    atomic_store(&team->arrived, 0);
    atomic_fetch_add(&team->turn, 1);
    if (atomic_load(&team->sleeping)) syscall(SYS_futex, &team->turn, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    return;
  }
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&team->turn, memory_order_acquire) != turn) return;
    _mm_pause();
  }
  atomic_fetch_add(&team->sleeping, 1);
  while (atomic_load(&team->turn) == turn) syscall(SYS_futex, &team->turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
  atomic_fetch_sub(&team->sleeping, 1);
}

// Sums of one block of columns for up to ROWS rows, `first` for those that are the first to need its weights.
INLINE void sum_block(struct input x, int rows, const struct linear *linear, int64_t block, float sums[ROWS][BLOCK], int first) {
  const int64_t in = linear->in;
  const char *weights = (const char *)linear->tiles + block * in / TILE_DEPTH * 2 * 1024;
  switch (first * 2 + (rows > 16)) {
    case 0: sum_tiles(x, in, weights, sums, 0, 0); break;
    case 1: sum_tiles(x, in, weights, sums, 1, 0); break;
    case 2: sum_tiles(x, in, weights, sums, 0, 1); break;
    default: sum_tiles(x, in, weights, sums, 1, 1);
  }
}

// 16 of a row's sums from `column` on, with the bias, rounded to bfloat16; `mask` says which columns there are.
INLINE __m256i round_sums(const float *sums, const struct linear *linear, int64_t column, __mmask16 mask) {
  __m512 sum = _mm512_load_ps(sums);
  if (linear->bias) sum = _mm512_add_ps(sum, widen(_mm256_maskz_loadu_epi16(mask, linear->bias + column)));
  return (__m256i)_mm512_cvtneps_pbh(sum);
}

// What becomes of a product: it is stored, or added to what is there, as bfloat16; or its first half gates the other; or it is stored
// as float, rounded all the same.
enum purpose { STORE, ADD, GATED, LOGITS };

INLINE void finish_block(float sums[ROWS][BLOCK], int rows, const struct linear *linear, int64_t block, char *out,
                         enum purpose purpose) {
  for (int part = 0; part < 2; part++) {
    int64_t column = block * BLOCK + part * 16, left = linear->out - column;
    __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
    for (int i = 0; i < rows; i++) {
      __m256i rounded = round_sums(sums[i] + part * 16, linear, column, mask);
      if (purpose == LOGITS) {
        _mm512_mask_storeu_ps((float *)out + i * linear->out + column, mask, widen(rounded));
        continue;
      }
      uint16_t *to = (uint16_t *)out + i * linear->out + column;
      __m512 before = widen(_mm256_maskz_loadu_epi16(mask, to));
      if (purpose == ADD) rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(widen(rounded), before));
      _mm256_mask_storeu_epi16(to, mask, rounded);
    }
  }
}

// silu(gate) * up (Shazeer, arXiv 2002.05202) of one block of columns, from the sums of both; `out` is tiled.
INLINE void finish_gated(float gates[ROWS][BLOCK], float ups[ROWS][BLOCK], int rows, const struct linear *linear, int64_t block,
                         uint16_t *out) {
  int64_t half = linear->out / 2;
  for (int i = 0; i < rows; i++)
    for (int64_t at = 0, column = block * BLOCK; at < BLOCK; at += LANES, column += LANES) {
      vec x = (vec)widen(round_sums(gates[i] + at, linear, column, 0xffff));
      vec up = (vec)widen(round_sums(ups[i] + at, linear, half + column, 0xffff));
      vec e = exponential(-largest(x, -x));
      ivec positive = x >= splat(0);
      vec top = (vec)(((ivec)splat(1) & positive) | ((ivec)e & ~positive));
      uint16_t rounded[LANES];
      store(x * top / (e + 1.0f), rounded, 0, 1);
      store(load(rounded, 0, 1) * up, tiled_row(out, i, half), block * TILE + at, 1);
    }
}

INLINE void multiply(struct input x, int rows, const struct linear *linear, int64_t block, char *out, enum purpose purpose,
                     int first) {
  float sums[2][ROWS][BLOCK] __attribute__((aligned(64)));
  sum_block(x, rows, linear, block, sums[0], first);
  if (purpose != GATED) {
    finish_block(sums[0], rows, linear, block, out, purpose);
    return;
  }
  sum_block(x, rows, linear, block + linear->out / (2 * BLOCK), sums[1], first);
  finish_gated(sums[0], sums[1], rows, linear, block, (uint16_t *)out);
}

// Shared by the team that calls it: out [rows, out] of x [rows, in]. Some blocks at a time, so that long prompts' rows are read less
// often, but few enough for all threads to end at about the same time.
static void product(struct team *team, struct input x, int64_t rows, const struct linear *linear, void *out, enum purpose purpose) {
  const int64_t columns = purpose == GATED ? linear->out / 2 : linear->out, blocks = (columns + BLOCK - 1) / BLOCK;
  const int64_t share = blocks / (8 * team->size), some = share < 1 ? 1 : share > 4 ? 4 : share;
  const int64_t row_bytes = columns * (purpose == LOGITS ? 4 : 2);
  int configured = 0;
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t begin = 0; begin < blocks; begin += some) {
    int64_t end = begin + some < blocks ? begin + some : blocks;
    for (int64_t row = 0; row < rows; row += ROWS) {
      int count = (int)(rows - row < ROWS ? rows - row : ROWS);
      if (count != configured) configure(configured = count);
      for (int64_t block = begin; block < end; block++)
        multiply((struct input){x.data + row * linear->in, x.tiled}, count, linear, block, (char *)out + row * row_bytes, purpose,
                 row == 0);
    }
  }
  meet(team);
}

// oneDNN remembers in the processor itself which tiles it uses, and so it must find them as it left them.
// Every thread of a team begins so: how large it is, only they know.
INLINE struct tile_config join(struct team *team) {
  struct tile_config kept;
  store_config(&kept);
#pragma omp single
  team->size = (unsigned)omp_get_num_threads();
  return kept;
}

INLINE void give_tiles_back(const struct tile_config *kept) {
  if (kept->palette)
    load_config(kept);
  else
    _tile_release();
}

// out [rows, out] of x [rows, in].
void outrider_product(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out) {
  struct team team = {0};
#pragma omp parallel
  {
    struct tile_config kept = join(&team);
    product(&team, (struct input){x, 0}, rows, linear, out, STORE);
    give_tiles_back(&kept);
  }
}

// Root mean square norm (Zhang and Sennrich, arXiv 1910.07467) of `size` elements, a multiple of 16; parts of TILE_DEPTH go to where
// they are `step` apart.
INLINE void normalize(const uint16_t *x, const uint16_t *weight, int64_t size, float epsilon, uint16_t *out, int64_t step) {
  vec squares = splat(0);
  float sum = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    vec part = load(x, i, 1);
    squares += part * part;
  }
  for (int i = 0; i < LANES; i++) sum += squares[i];
  float scale = 1.0f / sqrtf(sum / (float)size + epsilon);
  for (int64_t i = 0; i < size; i += LANES) {
    uint16_t rounded[LANES];
    store(load(x, i, 1) * scale, rounded, 0, 1);
    store(load(rounded, 0, 1) * load(weight, i, 1), out, i / TILE_DEPTH * step + i % TILE_DEPTH, 1);
  }
}

// Rotary embedding (Su et al., arXiv 2104.09864) of one head, element i paired with i + pairs; `turns` are cosines, then sines.
INLINE void rotate(uint16_t *head, const float *turns, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += LANES) {
    vec a = load(head, i, 1), b = load(head, i + pairs, 1), cosine = load_float(turns + i), sine = load_float(turns + pairs + i);
    store(a * cosine - b * sine, head, i, 1);
    store(b * cosine + a * sine, head, i + pairs, 1);
  }
}

static void find_turns(const struct decoder *decoder, int64_t position, float *turns) {
  for (int64_t i = 0; i < decoder->pairs; i++) {
    float angle = (float)position * decoder->frequencies[i], pair[2] = {cosf(angle), sinf(angle)};
    for (int part = 0; part < 2; part++) {
      uint16_t rounded;
      __m128bh half = _mm_cvtneps_pbh(_mm_set_ss(pair[part] * decoder->rotation_scale));
      memcpy(&rounded, &half, sizeof rounded);
      uint32_t bits = (uint32_t)rounded << 16;
      memcpy(turns + part * decoder->pairs + i, &bits, sizeof bits);
    }
  }
}

// The queries, keys and values of one token: norms, rotation, and into the cache.
static void place_token(const struct decoder *decoder, const struct decoder_layer *layer, uint16_t *qkv, const float *turns,
                        int64_t slot) {
  const struct layer *cache = &layer->cache;
  int64_t size = cache->head_size;
  for (int64_t head = 0; head < cache->heads + cache->kv_heads; head++) {
    const uint16_t *weight = head < cache->heads ? layer->query_norm : layer->key_norm;
    if (weight) normalize(qkv + head * size, weight, size, decoder->epsilon, qkv + head * size, TILE_DEPTH);
    rotate(qkv + head * size, turns, decoder->pairs);
  }
  int64_t width = cache->kv_heads * size, bytes = width * 2;
  memcpy((char *)cache->keys + slot * bytes, qkv + cache->heads * size, (size_t)bytes);
  memcpy((char *)cache->values + slot * bytes, qkv + cache->heads * size + width, (size_t)bytes);
}

// Where the parts of the scratch memory lie, all [tokens, …]; `outrider_scratch` adds them up. `normed` and `gated` are tiled.
struct room {
  uint16_t *stream, *normed, *qkv, *attended, *gated;
  float *turns;
};

static int64_t qkv_width(const struct layer *cache) { return (cache->heads + 2 * cache->kv_heads) * cache->head_size; }

static int64_t whole_tiles(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

static struct room divide(const struct decoder *decoder, const struct step *step, int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  count = whole_tiles(count);
  struct room room = {.turns = step->scratch};
  room.stream = (uint16_t *)(room.turns + count * 2 * decoder->pairs);
  room.normed = room.stream + count * decoder->hidden;
  room.qkv = room.normed + count * decoder->hidden;
  room.attended = room.qkv + count * qkv_width(cache);
  room.gated = room.attended + count * cache->heads * cache->head_size;
  return room;
}

// Bytes of scratch memory that so many tokens take.
int64_t outrider_scratch(const struct decoder *decoder, int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  int64_t elements = 2 * decoder->hidden + qkv_width(cache) + cache->heads * cache->head_size + decoder->intermediate;
  return whole_tiles(count) * (2 * elements + 4 * 2 * decoder->pairs);
}

static void run_attention(const struct decoder *decoder, const struct decoder_layer *layer, const struct batch *batch,
                          const struct room *room, struct team *team) {
  const struct layer *cache = &layer->cache;
  int64_t width = qkv_width(cache), items = batch->slice_count * cache->kv_heads;
#pragma omp for nowait
  for (int64_t i = 0; i < batch->count; i++)
    place_token(decoder, layer, room->qkv + i * width, room->turns + i * 2 * decoder->pairs, batch->slots[i]);
  meet(team);
  struct rows query = {room->qkv, cache->head_size, width};
  int by_tiles = outrider_fits_tiles(cache);
  configure(ROWS);
  // What lies side by side in the cache is best read by one thread, where there is enough for all and no long prompt.
  int64_t heads_at_once = batch->slice_count >= 4 * team->size && batch->count < 8 * batch->slice_count ? cache->kv_heads : 1;
#pragma omp for schedule(dynamic, heads_at_once) nowait
  for (int64_t item = 0; item < items; item++) {
    int64_t slice = item / cache->kv_heads, head = item % cache->kv_heads;
    if (by_tiles)
      outrider_attend_by_tiles(cache, batch, &query, room->attended, decoder->attention_scale, slice, head);
    else
      outrider_attend(cache, batch, &query, room->attended, decoder->attention_scale, 0, slice, head);
  }
  meet(team);
}

static void run_layer(const struct decoder *decoder, const struct decoder_layer *layer, const struct batch *batch,
                      const struct room *room, struct team *team) {
  int64_t count = batch->count, hidden = decoder->hidden;
  const struct input normed = {room->normed, 1};
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize(room->stream + i * hidden, layer->input_norm, hidden, decoder->epsilon, tiled_row(room->normed, i, hidden), TILE);
  meet(team);
  product(team, normed, count, &layer->qkv, room->qkv, STORE);
  run_attention(decoder, layer, batch, room, team);
  product(team, (struct input){room->attended, 0}, count, &layer->o, room->stream, ADD);
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize(room->stream + i * hidden, layer->post_norm, hidden, decoder->epsilon, tiled_row(room->normed, i, hidden), TILE);
  meet(team);
  product(team, normed, count, &layer->gate_up, room->gated, GATED);
  product(team, (struct input){room->gated, 1}, count, &layer->down, room->stream, ADD);
}

// Logits [wanted, vocabulary] of a batch whose slices hold all its tokens; keys and values go into the caches.
void outrider_decode(const struct decoder *decoder, const struct batch *batch, const struct step *step) {
  int64_t hidden = decoder->hidden;
  struct room room = divide(decoder, step, batch->count);
  struct team team = {0};
#pragma omp parallel
  {
    struct tile_config kept = join(&team);
#pragma omp for nowait
    for (int64_t i = 0; i < batch->count; i++) {
      memcpy(room.stream + i * hidden, decoder->embedding + step->token_ids[i] * hidden, (size_t)hidden * 2);
      find_turns(decoder, step->positions[i], room.turns + i * 2 * decoder->pairs);
    }
    meet(&team);
    for (int64_t i = 0; i < decoder->layer_count; i++) run_layer(decoder, decoder->layers + i, batch, &room, &team);
#pragma omp for nowait
    for (int64_t i = 0; i < step->wanted_count; i++) {
      const uint16_t *row = room.stream + step->wanted[i] * hidden;
      normalize(row, decoder->norm, hidden, decoder->epsilon, tiled_row(room.normed, i, hidden), TILE);
    }
    meet(&team);
    product(&team, (struct input){room.normed, 1}, step->wanted_count, &decoder->head, step->logits, LOGITS);
    give_tiles_back(&kept);
  }
}

// The number of the first of the largest.
static int64_t find_largest(const float *values, int64_t count) {
  int64_t vectors = count / LANES * LANES, at = 0;
  vec most = splat(-INFINITY);
  float top = -INFINITY;
  for (int64_t i = 0; i < vectors; i += LANES) most = largest(load_float(values + i), most);
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  for (int64_t i = vectors; i < count; i++) top = values[i] > top ? values[i] : top;
  while (at < count - 1 && values[at] != top) at++;
  return at;
}

// `turns` forwards of slices of one token each, every one of the tokens, below `limit`, that were likeliest after those before it:
// tokens [turns, slices]. There are pages for them all.
void outrider_continue(const struct decoder *decoder, const struct batch *batch, const struct step *step, int64_t limit, int64_t turns,
                       int64_t *tokens) {
  const int64_t count = batch->slice_count, size = decoder->layers->cache.page_size;
  int64_t slots[count], starts[count];
  struct batch now = *batch;
  struct step here = *step;
  now.slots = slots, now.starts = here.positions = starts;
  for (int64_t turn = 0; turn < turns; turn++, tokens += count) {
    for (int64_t i = 0; i < count; i++) {
      starts[i] = batch->starts[i] + turn;
      slots[i] = batch->pages[batch->page_at[i] + starts[i] / size] * size + starts[i] % size;
    }
    outrider_decode(decoder, &now, &here);
    for (int64_t i = 0; i < count; i++) tokens[i] = find_largest(step->logits + i * decoder->head.out, limit);
    here.token_ids = tokens;
  }
}
