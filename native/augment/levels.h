/* Levels of RGB pixels: statistics, and lookup tables that change them.
 *
 * The tables have the bits of those in image/tone.py, which explains them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* For functions in which the compiler must not fuse a product and a sum into one instruction, which
   would skip a rounding. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#define EXACT
#else
#define EXACT __attribute__((optimize("fp-contract=off")))
#endif

typedef uint8_t Table[256];

/* --------------------------------------------------------------------------------- statistics */

/* Four sets of counters: neighbours are often equal, and increments of one counter are serial. */
static void count_levels(const uint8_t *pixels, size_t size, uint32_t counts[3][256]) {
  uint32_t parts[4][3][256];
  memset(parts, 0, sizeof parts);
  for (; size >= 12; size -= 12, pixels += 12)
    for (int i = 0; i < 12; i++) parts[i / 3][i % 3][pixels[i]]++;
  for (size_t i = 0; i < size; i++) parts[0][i % 3][pixels[i]]++;
  for (int c = 0; c < 3; c++)
    for (int level = 0; level < 256; level++)
      counts[c][level] =
          parts[0][c][level] + parts[1][c][level] + parts[2][c][level] + parts[3][c][level];
}

/* A multiple of all vector widths and of 3, so bytes this far apart belong to the same channel. */
#define RUN 96

/* The sum of each channel's levels. */
WIDE static void add_levels(const uint8_t *pixels, size_t size, uint64_t sums[3]) {
  uint64_t totals[RUN] = {0};
  while (size >= RUN) {
    uint16_t some[RUN] = {0}; /* 257 * 255 is the largest sum that fits */
    for (int n = 0; n < 257 && size >= RUN; n++, size -= RUN, pixels += RUN)
      for (int i = 0; i < RUN; i++) some[i] = (uint16_t)(some[i] + pixels[i]);
    for (int i = 0; i < RUN; i++) totals[i] += some[i];
  }
  for (size_t i = 0; i < size; i++) totals[i] += pixels[i];
  memset(sums, 0, 3 * sizeof *sums);
  for (int i = 0; i < RUN; i++) sums[i % 3] += totals[i];
}

INLINE void widen_range(uint8_t *low, uint8_t *high, uint8_t level) {
  *low = level < *low ? level : *low;
  *high = level > *high ? level : *high;
}

/* The darkest and the brightest level of each channel. */
WIDE static void find_range(const uint8_t *pixels, size_t size, uint8_t low[3], uint8_t high[3]) {
  uint8_t lows[RUN], highs[RUN];
  memset(lows, 255, RUN);
  memset(highs, 0, RUN);
  for (; size >= RUN; size -= RUN, pixels += RUN)
    for (int i = 0; i < RUN; i++) widen_range(lows + i, highs + i, pixels[i]);
  for (size_t i = 0; i < size; i++) widen_range(lows + i, highs + i, pixels[i]);
  for (int i = 0; i < RUN; i++) {
    low[i % 3] = i < 3 || lows[i] < low[i % 3] ? lows[i] : low[i % 3];
    high[i % 3] = i < 3 || highs[i] > high[i % 3] ? highs[i] : high[i % 3];
  }
}

/* -------------------------------------------------------------------------------------- tables */

static void keep_levels(Table table) {
  for (int level = 0; level < 256; level++) table[level] = (uint8_t)level;
}

/* Truncate and clamp to 0 to 255; NaN gives 0. */
INLINE uint8_t cut(float value) { return value > 0 ? value < 255 ? (uint8_t)value : 255 : 0; }

static void brighten(Table table, double factor) {
  for (int level = 0; level < 256; level++) table[level] = cut((float)level * (float)factor);
}

static void posterize(Table table, double bits) {
  int kept = bits >= 8 ? 8 : bits > 0 ? (int)bits : 0;
  for (int level = 0; level < 256; level++) table[level] = (uint8_t)(level & 0xFF << (8 - kept));
}

static void solarize(Table table, double threshold) {
  for (int level = 0; level < 256; level++)
    table[level] = (uint8_t)(level >= threshold ? 255 - level : level);
}

/* With a steeper slope every level is black, white, or the middle. */
#define STEEPEST ((double)(1LL << 40))

EXACT static void steepen(Table table, double factor, const uint64_t sums[3], double pixels) {
  double grey = 0.2989 * (double)sums[0] + 0.587 * (double)sums[1] + 0.114 * (double)sums[2];
  double middle = fmax(0.0, grey / pixels - 0.5);
  factor = fmin(fmax(factor, -STEEPEST), STEEPEST);
  int64_t slope = (int64_t)rint(factor * 1024);
  int64_t start = (int64_t)rint(middle * (1.0 - factor) * 1024);
  for (int level = 0; level < 256; level++) {
    int64_t value = (level * slope + start) >> 10;
    table[level] = (uint8_t)(value < 0 ? 0 : value < 255 ? value : 255);
  }
}

static void stretch(Table table, uint8_t low, uint8_t high) {
  float step = (float)(high - low) * (float)(1.0 / 255);
  keep_levels(table);
  if (low == high) return;
  for (int level = 0; level < 256; level++) table[level] = cut((float)(level - low) / step);
}

static void equalize(Table table, const uint64_t counts[256]) {
  uint64_t pixels = 0, brightest = 0, darker = 0;
  for (int level = 0; level < 256; level++) {
    pixels += counts[level];
    if (counts[level]) brightest = counts[level];
  }
  uint64_t step = (pixels - brightest) / 255;
  keep_levels(table);
  for (int level = 0; level < 256 && step; level++) {
    uint64_t value = (darker + step / 2) / step;
    table[level] = (uint8_t)(value < 255 ? value : 255);
    darker += counts[level];
  }
}

static int is_rising(const Table table) {
  for (int level = 1; level < 256; level++)
    if (table[level] < table[level - 1]) return 0;
  return 1;
}
