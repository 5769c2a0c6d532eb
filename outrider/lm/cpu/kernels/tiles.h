// The tile registers of AMX (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3): eight of up to 16 rows
// of 64 bytes. A product adds A · B to sums, where A holds rows of 32 bfloat16, B pairs of rows, each pair's elements side by side.
#pragma once

#include "cpu_kernels.h"

#include <immintrin.h>

struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} __attribute__((packed));

#ifdef EMULATED_TILES
#include EMULATED_TILES
#else
// The compiler's own intrinsics for these are told of 8 bytes of the 64 (GCC bug 114098).
INLINE void load_config(const struct tile_config *config) { __asm__ volatile("ldtilecfg %0" ::"m"(*config)); }

INLINE void store_config(struct tile_config *config) { __asm__ volatile("sttilecfg %0" : "=m"(*config)); }
#endif

// GCC does not tell itself that loading a tile reads memory: what was written before has to be there.
INLINE void settle(void) { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 are sums, of the first 16 rows and of the others; 4 and 5 rows of A, first and others; 6 and 7 are B.
INLINE void configure(int rows) {
  struct tile_config config = {.palette = 1};
  uint8_t first = (uint8_t)(rows < 16 ? rows : 16), second = (uint8_t)(rows > 16 ? rows - 16 : 1);
  const uint8_t counts[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = counts[i];
  }
  load_config(&config);
}

int outrider_fits_tiles(const struct layer *layer);

// As outrider_attend, for what fits; tiles are configured for 32 rows.
void outrider_attend_by_tiles(const struct layer *layer, const struct batch *batch, const struct rows *query, void *out, float scale,
                              struct item item);
