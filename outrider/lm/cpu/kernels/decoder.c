// A whole forward of Llama, and of what is built like it, in one call.
//
// A forward of few tokens reads every weight once and computes little with it. What it takes is set by how steadily weights come from
// memory, and by what happens between two products: so weights lie in the order in which they are read, and nothing between the
// products leaves C. Sums are float; what is rounded to bfloat16 is what transformers rounds, but for the inside of attention and the
// rotation. This is compiled for bfloat16, and by decoder_float32.c for float, which rounds nothing.

#ifndef BFLOAT16
#define BFLOAT16 1
#endif

#include "product.h"

#if BFLOAT16
#define NAME(name) outrider_bfloat16_##name
#else
#define NAME(name) outrider_float32_##name
#endif

struct decoder_layer {
  struct linear qkv, o, gate_up, down;
  const element *input_norm, *post_norm, *query_norm, *key_norm;  // the norms of queries and keys may be null
  struct layer cache;
};

struct decoder {
  const struct decoder_layer *layers;
  const element *embedding, *norm;
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

const int64_t NAME(line) = LINE;

// out [rows, out] of x [rows, in].
void NAME(product)(const struct linear *linear, const element *x, int64_t rows, element *out) {
  struct team team = {0};
#pragma omp parallel
  {
    kept_state kept = join(&team);
    product(&team, (struct input){x, choose_tile_rows(rows), 0}, rows, linear, out, STORE);
    restore_state(&kept);
  }
}

// Root mean square norm (Zhang and Sennrich, arXiv 1910.07467) of `size` elements, a multiple of 16; parts of TILE_DEPTH go to where
// they are `step` apart.
INLINE void normalize(const element *x, const element *weight, int64_t size, float epsilon, element *out, int64_t step) {
  vec squares = splat(0);
  float sum = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    vec part = load(x, i, BFLOAT16);
    squares += part * part;
  }
  for (int i = 0; i < LANES; i++) sum += squares[i];
  float scale = 1.0f / sqrtf(sum / (float)size + epsilon);
  for (int64_t i = 0; i < size; i += LANES) {
    vec scaled = rounded(load(x, i, BFLOAT16) * scale) * load(weight, i, BFLOAT16);
    store(scaled, out, i / TILE_DEPTH * step + i % TILE_DEPTH, BFLOAT16);
  }
}

// The same of a row of the stream, to where row number `i` of a tiled input is.
INLINE void normalize_tiled(const element *x, const element *weight, const struct decoder *decoder, element *out, int64_t i,
                            int64_t tile_rows) {
  normalize(x, weight, decoder->hidden, decoder->epsilon, tiled_row(out, i, decoder->hidden, tile_rows), tile_rows * TILE_DEPTH);
}

// Rotary embedding (Su et al., arXiv 2104.09864) of one head, element i paired with i + pairs; `turns` are cosines, then sines.
INLINE void rotate(element *head, const float *turns, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += LANES) {
    vec a = load(head, i, BFLOAT16), b = load(head, i + pairs, BFLOAT16);
    vec cosine = load_float(turns + i), sine = load_float(turns + pairs + i);
    store(a * cosine - b * sine, head, i, BFLOAT16);
    store(b * cosine + a * sine, head, i + pairs, BFLOAT16);
  }
}

static void find_turns(const struct decoder *decoder, int64_t position, float *turns) {
  for (int64_t i = 0; i < decoder->pairs; i += LANES)
    for (int part = 0; part < 2; part++) {
      vec some;
      for (int lane = 0; lane < LANES; lane++) {
        float angle = (float)position * decoder->frequencies[i + lane];
        some[lane] = (part ? sinf(angle) : cosf(angle)) * decoder->rotation_scale;
      }
      some = rounded(some);
      memcpy(turns + part * decoder->pairs + i, &some, sizeof some);
    }
}

// The queries, keys and values of one token: norms, rotation, and into the cache.
static void place_token(const struct decoder *decoder, const struct decoder_layer *layer, element *qkv, const float *turns,
                        int64_t slot) {
  const struct layer *cache = &layer->cache;
  int64_t size = cache->head_size;
  for (int64_t head = 0; head < cache->heads + cache->kv_heads; head++) {
    const element *weight = head < cache->heads ? layer->query_norm : layer->key_norm;
    if (weight) normalize(qkv + head * size, weight, size, decoder->epsilon, qkv + head * size, TILE_DEPTH);
    rotate(qkv + head * size, turns, decoder->pairs);
  }
  int64_t width = cache->kv_heads * size, bytes = width * (int64_t)sizeof(element);
  memcpy((char *)cache->keys + slot * bytes, qkv + cache->heads * size, (size_t)bytes);
  memcpy((char *)cache->values + slot * bytes, qkv + cache->heads * size + width, (size_t)bytes);
}

// Where the parts of the scratch memory lie, all [tokens, …]; `scratch` adds them up. `normed` and `gated` are tiled.
struct room {
  element *stream, *normed, *qkv, *attended, *gated;
  float *turns;
};

static int64_t qkv_width(const struct layer *cache) { return (cache->heads + 2 * cache->kv_heads) * cache->head_size; }

static int64_t whole_tiles(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

static struct room divide(const struct decoder *decoder, const struct step *step, int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  count = whole_tiles(count);
  struct room room = {.turns = step->scratch};
  room.stream = (element *)(room.turns + count * 2 * decoder->pairs);
  room.normed = room.stream + count * decoder->hidden;
  room.qkv = room.normed + count * decoder->hidden;
  room.attended = room.qkv + count * qkv_width(cache);
  room.gated = room.attended + count * cache->heads * cache->head_size;
  return room;
}

// Bytes of scratch memory that so many tokens take.
int64_t NAME(scratch)(const struct decoder *decoder, int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  int64_t elements = 2 * decoder->hidden + qkv_width(cache) + cache->heads * cache->head_size + decoder->intermediate;
  return whole_tiles(count) * ((int64_t)sizeof(element) * elements + 4 * 2 * decoder->pairs);
}

INLINE void attend(const struct layer *cache, const struct batch *batch, const struct rows *query, element *out, float scale,
                   struct item item) {
#if BFLOAT16 && defined(__AMX_BF16__)
  if (outrider_fits_tiles(cache)) {
    for (int64_t end = item.kv_head + item.kv_heads; item.kv_head < end; item.kv_head++)
      outrider_attend_by_tiles(cache, batch, query, out, scale, item);
    return;
  }
#endif
  outrider_attend(cache, batch, query, out, scale, 0, item);
}

static void run_attention(const struct decoder *decoder, const struct decoder_layer *layer, const struct batch *batch,
                          const struct room *room, struct team *team) {
  const struct layer *cache = &layer->cache;
  int64_t width = qkv_width(cache);
  struct division by = divide_attention(cache, batch, team->size);
#pragma omp for nowait
  for (int64_t i = 0; i < batch->count; i++)
    place_token(decoder, layer, room->qkv + i * width, room->turns + i * 2 * decoder->pairs, batch->slots[i]);
  meet(team);
  struct rows query = {room->qkv, cache->head_size, width};
  expect_rows(ROWS);
  // What lies side by side in the cache is best read by one thread, where there is enough for all and no long prompt.
  int enough = batch->slice_count >= 4 * team->size && batch->count < 8 * batch->slice_count;
  int64_t at_once = enough ? cache->kv_heads / by.kv_heads * by.parts : 1;
#pragma omp for schedule(dynamic, at_once) nowait
  for (int64_t i = 0; i < by.count; i++)
    attend(cache, batch, &query, room->attended, decoder->attention_scale, find_item(cache, i, by));
  meet(team);
}

static void run_layer(const struct decoder *decoder, const struct decoder_layer *layer, const struct batch *batch,
                      const struct room *room, struct team *team) {
  int64_t count = batch->count, hidden = decoder->hidden, tile_rows = choose_tile_rows(count);
  const struct input normed = {room->normed, tile_rows, 1};
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize_tiled(room->stream + i * hidden, layer->input_norm, decoder, room->normed, i, tile_rows);
  meet(team);
  product(team, normed, count, &layer->qkv, room->qkv, STORE);
  run_attention(decoder, layer, batch, room, team);
  product(team, (struct input){room->attended, tile_rows, 0}, count, &layer->o, room->stream, ADD);
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize_tiled(room->stream + i * hidden, layer->post_norm, decoder, room->normed, i, tile_rows);
  meet(team);
  product(team, normed, count, &layer->gate_up, room->gated, GATED);
  product(team, (struct input){room->gated, tile_rows, 1}, count, &layer->down, room->stream, ADD);
}

// Logits [wanted, vocabulary] of a batch whose slices hold all its tokens; keys and values go into the caches.
void NAME(decode)(const struct decoder *decoder, const struct batch *batch, const struct step *step) {
  int64_t hidden = decoder->hidden, wanted_tile_rows = choose_tile_rows(step->wanted_count);
  struct room room = divide(decoder, step, batch->count);
  struct team team = {0};
#pragma omp parallel
  {
    kept_state kept = join(&team);
#pragma omp for nowait
    for (int64_t i = 0; i < batch->count; i++) {
      memcpy(room.stream + i * hidden, decoder->embedding + step->token_ids[i] * hidden, (size_t)hidden * sizeof(element));
      find_turns(decoder, step->positions[i], room.turns + i * 2 * decoder->pairs);
    }
    meet(&team);
    for (int64_t i = 0; i < decoder->layer_count; i++) run_layer(decoder, decoder->layers + i, batch, &room, &team);
#pragma omp for nowait
    for (int64_t i = 0; i < step->wanted_count; i++)
      normalize_tiled(room.stream + step->wanted[i] * hidden, decoder->norm, decoder, room.normed, i, wanted_tile_rows);
    meet(&team);
    product(&team, (struct input){room.normed, wanted_tile_rows, 1}, step->wanted_count, &decoder->head, step->logits, LOGITS);
    restore_state(&kept);
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
void NAME(continue)(const struct decoder *decoder, const struct batch *batch, const struct step *step, int64_t limit, int64_t turns,
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
    NAME(decode)(decoder, &now, &here);
    for (int64_t i = 0; i < count; i++) tokens[i] = find_largest(step->logits + i * decoder->head.out, limit);
    here.token_ids = tokens;
  }
}
