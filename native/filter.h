/* Antialiased resizing of rows and columns of RGB pixels, as PIL and torchvision define it.
 *
 * Both directions use one loop, `blend`, which computes weighted sums of rows of bytes. For columns,
 * sixteen rows are transposed first, so that a column is a row of bytes too.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One build serves every x86-64: on processors with AVX2 the loader picks loops for it, which make a
   call 1 % faster and give the same bits. Off when fuzzing: the loader's choice runs before the
   sanitizers are ready. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(PENSTOCK_FUZZ)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

/* Fixed point: weights have 15 bits, pixels are shifted up by 8. So the high half of a product is one
   instruction on 16 bits on every processor, and sums have 7 fractional bits. Each product is
   truncated, which loses half a unit on average; HALF adds that back. */
#define ONE (1 << 15)
#define HALF(taps) (uint16_t)(64 + (taps) / 2)
#define LANES 16
#define BLOCK (3 * LANES)

typedef struct {
  int start, length; /* of the box, in pixels of the image */
  int full;          /* length of the resized box */
  int offset, count; /* the part of it that is computed */
  int from, upto;    /* the pixels of the image that this part needs */
  int taps; /* the same for every output pixel: loops are compiled for each small number of taps */
  int *first;
  uint16_t *weights;
} Axis;

/* The range of pixels of the box whose centres lie within the triangle filter of output pixel `i`.
   Centres on the rim have a weight of 0. The triangle spans twice the shrink factor, and two pixels
   if the image grows. */
static void reach(const Axis *axis, int i, int *low, int *high) {
  double scale = (double)axis->length / axis->full, support = scale > 1 ? scale : 1;
  double centre = (axis->offset + i + 0.5) * scale;
  *low = (int)floor(centre - support - 0.5) + 1;
  *high = (int)ceil(centre + support - 0.5);
  if (*low < 0) *low = 0;
  if (*high > axis->length) *high = axis->length;
}

static Axis axis_of(int start, int length, int full, int offset, int count) {
  Axis axis = {.start = start, .length = length, .full = full, .offset = offset, .count = count};
  int unused;
  reach(&axis, 0, &axis.from, &unused);
  reach(&axis, count - 1, &unused, &axis.upto);
  axis.from += start;
  axis.upto += start;
  return axis;
}

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

/* The most of libjpeg's pixels, each `shrink` wide, that one output pixel can need. */
static int taps_of(const Axis *axis, int inputs, int shrink) {
  double scale = (double)axis->length / axis->full, support = scale > 1 ? scale : 1;
  double most = shrink > 1 ? ceil(2 * support / shrink) + 1 : ceil(2 * support);
  return most < inputs ? (int)most : inputs;
}

/* Weights of PIL's and torchvision's antialiased bilinear. If libjpeg has shrunk the image, each of
   its pixels gets the sum of the weights of the pixels that it stands for. */
static void weigh(Axis *axis, int shrink, int flip, double *scratch) {
  double scale = (double)axis->length / axis->full, support = scale > 1 ? scale : 1;
  int start = axis->start, taps = axis->taps, origin = axis->from / shrink, bits = 0;
  while (1 << bits < shrink) bits++;
  int inputs = (axis->upto + shrink - 1) / shrink - origin;
  for (int i = 0; i < axis->count; i++) {
    double centre = (axis->offset + i + 0.5) * scale, sum = 0;
    int low, high;
    reach(axis, i, &low, &high);
    int first = (start + low) / shrink - origin;
    if (first > inputs - taps) first = inputs - taps;
    memset(scratch, 0, sizeof(double) * taps);
    for (int x = low; x < high; x++) {
      double weight = support - fabs(x + 0.5 - centre);
      scratch[((start + x) >> bits) - origin - first] += weight;
      sum += weight;
    }
    int at = flip ? axis->count - 1 - i : i;
    uint16_t *weights = axis->weights + (size_t)at * taps;
    /* Round the running sum, so that the weights add up to exactly one. */
    double running = 0, unit = ONE / sum;
    int given = 0;
    for (int k = 0; k < taps; k++) {
      running += scratch[k];
      int upto = (int)(running * unit + 0.5);
      weights[k] = (uint16_t)(upto - given);
      given = upto;
    }
    axis->first[at] = first;
  }
}

INLINE uint16_t product(uint8_t pixel, uint16_t weight) {
  return (uint16_t)((uint32_t)(uint16_t)(pixel << 8) * weight >> 16);
}

/* out[j] = the sum of weights[k] * rows[k][j]. With up to 8 taps everything stays in registers. */
#define BLEND(TAPS)                                                                               \
  INLINE void blend_##TAPS(uint8_t *restrict out, const uint8_t *const *rows,                     \
                           const uint16_t *weights, int count) {                                  \
    const uint8_t *r[TAPS];                                                                       \
    uint16_t w[TAPS];                                                                             \
    for (int k = 0; k < TAPS; k++) r[k] = rows[k], w[k] = weights[k];                             \
    for (int j = 0; j < count; j++) {                                                             \
      uint16_t sum = HALF(TAPS);                                                                  \
      for (int k = 0; k < TAPS; k++) sum = (uint16_t)(sum + product(r[k][j], w[k]));              \
      out[j] = (uint8_t)(sum >> 7);                                                               \
    }                                                                                             \
  }
BLEND(1) BLEND(2) BLEND(3) BLEND(4) BLEND(5) BLEND(6) BLEND(7) BLEND(8)

INLINE void blend_many(uint8_t *restrict out, const uint8_t *const *rows, const uint16_t *weights,
                       int taps, int count) {
  uint32_t sums[256];
  for (int from = 0; from < count; from += 256) {
    int part = count - from < 256 ? count - from : 256;
    for (int j = 0; j < part; j++) sums[j] = ONE / 2;
    for (int k = 0; k < taps; k++) {
      const uint8_t *row = rows[k] + from;
      uint32_t weight = weights[k];
      if (!weight) continue;
      for (int j = 0; j < part; j++) sums[j] += row[j] * weight;
    }
    for (int j = 0; j < part; j++) out[from + j] = (uint8_t)(sums[j] >> 15);
  }
}

INLINE void blend(uint8_t *out, const uint8_t *const *rows, const uint16_t *weights, int taps,
                  int count) {
  switch (taps) {
    case 1: blend_1(out, rows, weights, count); break;
    case 2: blend_2(out, rows, weights, count); break;
    case 3: blend_3(out, rows, weights, count); break;
    case 4: blend_4(out, rows, weights, count); break;
    case 5: blend_5(out, rows, weights, count); break;
    case 6: blend_6(out, rows, weights, count); break;
    case 7: blend_7(out, rows, weights, count); break;
    case 8: blend_8(out, rows, weights, count); break;
    default: blend_many(out, rows, weights, taps, count);
  }
}

WIDE static void blend_rows(uint8_t *out, const uint8_t *const *rows, const uint16_t *weights,
                            int taps, int count) {
  blend(out, rows, weights, taps, count);
}

WIDE static void blend_columns(uint8_t *out, const uint8_t *transposed, const Axis *across,
                               const uint8_t **columns) {
  int taps = across->taps;
  for (int i = 0; i < across->count; i++) {
    const uint8_t *from = transposed + (size_t)across->first[i] * BLOCK;
    for (int k = 0; k < taps; k++) columns[k] = from + (size_t)k * BLOCK;
    blend(out + (size_t)i * BLOCK, columns, across->weights + (size_t)i * taps, taps, BLOCK);
  }
}

typedef uint8_t Vector __attribute__((vector_size(16)));

INLINE Vector load(const uint8_t *from) {
  Vector v;
  memcpy(&v, from, 16);
  return v;
}

INLINE void store(uint8_t *to, Vector v) { memcpy(to, &v, 16); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Vector){__VA_ARGS__})
#endif

/* Transpose 16 rows of 16 bytes: four rounds of interleaving each row with the one 8 further on. */
INLINE void transpose_tile(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
  Vector a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = load(from + i * from_stride);
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < 8; i++) {
      b[2 * i] = SHUFFLE(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[2 * i + 1] =
          SHUFFLE(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    memcpy(a, b, sizeof a);
  }
  for (int i = 0; i < 16; i++) store(to + i * to_stride, a[i]);
}

/* Transpose the tiles that hold `count` bytes. `step`: bytes from one tile to the next. */
static void transpose(uint8_t *to, size_t to_step, size_t to_stride, const uint8_t *from,
                      size_t from_step, size_t from_stride, size_t count) {
  for (size_t done = 0; done < count; done += 16, to += to_step, from += from_step)
    transpose_tile(to, to_stride, from, from_stride);
}
