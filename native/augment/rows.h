/* Passes that move or blend pixels, row by row: shears, shifts, rotations, saturation, sharpness.
 *
 * A pass computes one row per call, so that the caller can process the row while it is in the
 * first-level cache. Levels use integer arithmetic, and positions are rounded at every step, so that
 * every processor gives the same bits.
 *
 * Include after jpeg/region.h and levels.h.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The changes of an image, in the order of CHANGES in image/augment.py. */
enum {
  IDENTITY,
  SHEAR_X,
  SHEAR_Y,
  TRANSLATE_X,
  TRANSLATE_Y,
  ROTATE,
  BRIGHTNESS,
  COLOR,
  CONTRAST,
  SHARPNESS,
  POSTERIZE,
  SOLARIZE,
  AUTOCONTRAST,
  EQUALIZE,
  INVERT,
  CHANGES
};

/* One pass over the pixels. Fields of a change are set only if `code` is that change. */
typedef struct {
  int code; /* IDENTITY, a change that moves pixels, or one that blends them */
  int height, width;
  size_t stride, size; /* bytes of a row and of the image */
  const uint8_t *pixels;
  uint8_t border[3];           /* levels of pixels from outside the image */
  double slope;                /* of a shear along rows */
  int down, across;            /* of a shift */
  float right[2], below[2];    /* of a rotation: source step (across, down) per step right, down */
  int32_t *places;             /* two numbers per column, for shears along columns and rotations */
  int32_t colours[3][3], lift; /* of saturation: colour matrix and offset, in 1024ths */
  int32_t blur;                /* of sharpness: weight of the blur, in 1024ths */
  uint16_t *sums;              /* of sharpness: one number per byte of a row */
} Pass;

/* Round `value` to the nearest integer, half to even, and clamp it to -most..most. */
static int nearest(double value, int most) {
  return (int)rint(value > most ? most : value < -most ? -most : value);
}

/* -------------------------------------------------------------------------------------- moves */

static void fill_pixels(uint8_t *out, int count, const uint8_t border[3]) {
  for (; count > 0; count--, out += 3) memcpy(out, border, 3);
}

/* Move the row left by `by` pixels; `by` is between minus its width and its width. */
static void slide_row(const Pass *p, const uint8_t *row, int by, uint8_t *out) {
  int left = by < 0 ? -by : 0, right = by > 0 ? by : 0, kept = p->width - left - right;
  fill_pixels(out, left, p->border);
  memcpy(out + 3 * (size_t)left, row + 3 * (size_t)(left + by), 3 * (size_t)kept);
  fill_pixels(out + 3 * (size_t)(left + kept), right, p->border);
}

static void shift_row(const Pass *p, int y, uint8_t *out) {
  int from = y - p->down;
  if (from < 0 || from >= p->height)
    fill_pixels(out, p->width, p->border);
  else
    slide_row(p, p->pixels + (size_t)from * p->stride, -p->across, out);
}

/* Source positions of the pixels of a row: pixel x comes from row `top + down[x]`, column
   `across[x]`. If `across` is NULL, the column is x. */
typedef struct {
  const int32_t *across, *down;
  int top;
} Sources;

/* Pixels are copied as four bytes, one move, with one byte too many. The next pixel overwrites the
   extra byte. The last pixel of an image has no extra byte to read, and the last of a row no room to
   write one. */
#define SPARE 1

#ifdef HAVE_AVX2
/* Move eight pixels at a time, from `x` on. Returns the first pixel that is not done. */
MODERN static int move_eights(const Pass *p, int x, int upto, Sources from, uint8_t *out) {
  if (p->size > INT32_MAX) return x;
  const __m256i stride = _mm256_set1_epi32((int)p->stride), top = _mm256_set1_epi32(from.top);
  const __m256i most = _mm256_set1_epi32((int)p->size - 3 - SPARE), three = _mm256_set1_epi32(3);
  const __m256i ahead = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i closed = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
  /* Writes 16 bytes for 12, so two more pixels must fit. */
  if (upto > p->width - 2) upto = p->width - 2;
  for (; x + 8 <= upto; x += 8, out += 24) {
    __m256i across = from.across ? _mm256_loadu_si256((const __m256i *)(from.across + x))
                                 : _mm256_add_epi32(_mm256_set1_epi32(x), ahead);
    __m256i down = _mm256_add_epi32(_mm256_loadu_si256((const __m256i *)(from.down + x)), top);
    __m256i at =
        _mm256_add_epi32(_mm256_mullo_epi32(down, stride), _mm256_mullo_epi32(across, three));
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(at, most))) break;
    __m256i moved = _mm256_i32gather_epi32((const int *)p->pixels, at, 1);
    moved = _mm256_shuffle_epi8(moved, closed);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(moved));
    _mm_storeu_si128((__m128i *)(out + 12), _mm256_extracti128_si256(moved, 1));
  }
  return x;
}
#else
#define move_eights(p, x, upto, from, out) (x)
#endif

/* Write a row: pixels `low` to `high` from their sources, the border elsewhere. */
static void move_pixels(const Pass *p, int low, int high, Sources from, uint8_t *out) {
  const uint8_t *pixels = p->pixels;
  size_t stride = p->stride, size = p->size;
  int x = low, last = p->width - 1;
  fill_pixels(out, low, p->border);
  if (HAVE_MODERN && !only_plain) x = move_eights(p, x, high, from, out + 3 * (size_t)low);
  for (; x < high; x++) {
    int across = from.across ? from.across[x] : x;
    size_t at = (size_t)(from.top + from.down[x]) * stride + 3 * (size_t)across;
    if (LIKELY(at + 3 + SPARE <= size && x < last))
      memcpy(out + 3 * (size_t)x, pixels + at, 3 + SPARE);
    else
      memcpy(out + 3 * (size_t)x, pixels + at, 3);
  }
  fill_pixels(out + 3 * (size_t)high, p->width - high, p->border);
}

/* Shear along columns: column x moves by `places[x]`. */
static void shear_row(const Pass *p, int y, uint8_t *out) {
  const int32_t *by = p->places;
  int low = 0, high = p->width;
  /* `by` is monotonic, so the pixels from inside the image form one span. */
  while (low < high && (y + by[low] < 0 || y + by[low] >= p->height)) low++;
  while (low < high && (y + by[high - 1] < 0 || y + by[high - 1] >= p->height)) high--;
  move_pixels(p, low, high, (Sources){NULL, by, y}, out);
}

/* The same as `nearest` for numbers below 2**22, vectorizable on every processor: floats from 2**23
   up have no fractional bits, so the addition rounds. */
INLINE int32_t nearest_single(float value) {
  int32_t bits;
  float beyond = value + 12582912.0f;
  memcpy(&bits, &beyond, sizeof bits);
  return bits - 0x4B400000;
}

/* Source positions of row `y`. Repeats torchvision's computation with each of its roundings: first
   coordinates from -1 to 1 (affine_grid), then pixels (grid_sample). So positions halfway between
   pixels round the same way. Each step is monotonic: along a row, both coordinates only rise or only
   fall. */
EXACT WIDE static void find_sources(const Pass *p, int y, int32_t *restrict across,
                                    int32_t *restrict down) {
  float middle = (float)(p->width - 1) * 0.5f, height = (float)p->height * 0.5f;
  float below = (float)y - (float)(p->height - 1) * 0.5f, width = (float)p->width * 0.5f;
  float across_step = p->right[0], across_start = below * p->below[0];
  float down_step = p->right[1], down_start = below * p->below[1];
  for (int x = 0, count = p->width; x < count; x++) {
    float right = (float)x - middle;
    across[x] = nearest_single((right * across_step + across_start + 1.0f) * width - 0.5f);
    down[x] = nearest_single((right * down_step + down_start + 1.0f) * height - 0.5f);
  }
}

INLINE int is_within(const Pass *p, int32_t across, int32_t down) {
  return across >= 0 && across < p->width && down >= 0 && down < p->height;
}

static void rotate_row(const Pass *p, int y, uint8_t *out) {
  int32_t *across = p->places, *down = p->places + p->width;
  find_sources(p, y, across, down);
  int low = 0, high = p->width;
  while (low < high && !is_within(p, across[low], down[low])) low++;
  while (low < high && !is_within(p, across[high - 1], down[high - 1])) high--;
  move_pixels(p, low, high, (Sources){across, down, 0}, out);
}

/* ------------------------------------------------------------------------------------- blends */

#ifdef HAVE_AVX2
/* Saturate eight pixels at a time. Returns the number of pixels done. */
MODERN static int saturate_eights(const Pass *p, const uint8_t *row, uint8_t *out) {
  const __m256i zero = _mm256_setzero_si256(), lift = _mm256_set1_epi32(p->lift);
  /* Spread pixels to red, green, blue, 0; and pack four pixels, stored by colour, back to RGB. */
  const __m256i apart = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
  const __m256i closed = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, -1, -1, -1, -1));
  __m256i weights[3], sums[3];
  for (int c = 0; c < 3; c++) {
    int16_t four[4] = {0};
    for (int from = 0; from < 3; from++) {
      four[from] = (int16_t)p->colours[c][from];
      if (four[from] != p->colours[c][from]) return 0;
    }
    int64_t as_one;
    memcpy(&as_one, four, sizeof as_one);
    weights[c] = _mm256_set1_epi64x(as_one);
  }
  int x = 0;
  /* Reads and writes 16 bytes for 12, so two more pixels must fit. */
  for (; x + 8 <= p->width - 2; x += 8, row += 24, out += 24) {
    __m256i eight = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)row)),
        _mm_loadu_si128((const __m128i *)(row + 12)), 1);
    eight = _mm256_shuffle_epi8(eight, apart);
    __m256i low = _mm256_unpacklo_epi8(eight, zero), high = _mm256_unpackhi_epi8(eight, zero);
    for (int c = 0; c < 3; c++) {
      __m256i sum = _mm256_hadd_epi32(_mm256_madd_epi16(low, weights[c]),
                                      _mm256_madd_epi16(high, weights[c]));
      sums[c] = _mm256_srai_epi32(_mm256_add_epi32(sum, lift), 10);
    }
    __m256i made = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                       _mm256_packs_epi32(sums[2], sums[2]));
    made = _mm256_shuffle_epi8(made, closed);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(made));
    _mm_storeu_si128((__m128i *)(out + 12), _mm256_extracti128_si256(made, 1));
  }
  return x;
}
#else
#define saturate_eights(p, row, out) 0
#endif

static void saturate_row(const Pass *p, const uint8_t *restrict row, uint8_t *restrict out) {
  int x = HAVE_MODERN && !only_plain ? saturate_eights(p, row, out) : 0;
  row += 3 * (size_t)x;
  out += 3 * (size_t)x;
  for (; x < p->width; x++, row += 3, out += 3)
    for (int c = 0; c < 3; c++) {
      const int32_t *weights = p->colours[c];
      int32_t sum = weights[0] * row[0] + weights[1] * row[1] + weights[2] * row[2];
      out[c] = (uint8_t)clamp((sum + p->lift) >> 10, 0, 255);
    }
}

/* `sum` / 9, rounded. */
INLINE uint16_t ninth(uint16_t sum) {
  return (uint16_t)((uint32_t)(uint16_t)(sum + 4) * 7282 >> 16);
}

/* Blend a row with its blur, the mean of nine pixels. The first and last pixel stay as they are. */
WIDE static void sharpen(const uint8_t *restrict row, size_t stride, int32_t blur,
                         uint16_t *restrict sums, uint8_t *restrict out) {
  const uint8_t *restrict above = row - stride, *restrict below = row + stride;
  int bytes = (int)stride;
  for (int i = 0; i < bytes; i++) sums[i] = (uint16_t)(above[i] + row[i] + below[i]);
  memcpy(out, row, 3);
  if (blur == (int16_t)blur) {
    int16_t parts = (int16_t)blur;
    for (int i = 3; i < bytes - 3; i++) {
      /* 64ths, and the upper half of the product: 16 bits suffice, so more fit into a vector. */
      int16_t apart =
          (int16_t)((ninth((uint16_t)(sums[i - 3] + sums[i] + sums[i + 3])) - row[i]) * 64);
      out[i] = squeeze((int16_t)(row[i] + (int16_t)((int32_t)apart * parts >> 16)));
    }
  } else {
    for (int i = 3; i < bytes - 3; i++) {
      int32_t apart = ninth((uint16_t)(sums[i - 3] + sums[i] + sums[i + 3])) - row[i];
      out[i] = (uint8_t)clamp(row[i] + (apart * blur >> 10), 0, 255);
    }
  }
  memcpy(out + bytes - 3, row + bytes - 3, 3);
}

/* -------------------------------------------------------------------------------------- any pass */

static void make_row(const Pass *p, int y, uint8_t *out) {
  const uint8_t *row = p->pixels + (size_t)y * p->stride;
  switch (p->code) {
    case SHEAR_X: slide_row(p, row, nearest(p->slope * (y + 0.5), p->width), out); return;
    case SHEAR_Y: shear_row(p, y, out); return;
    case TRANSLATE_X:
    case TRANSLATE_Y: shift_row(p, y, out); return;
    case ROTATE: rotate_row(p, y, out); return;
    case COLOR: saturate_row(p, row, out); return;
    case SHARPNESS:
      if (y == 0 || y == p->height - 1) break;
      sharpen(row, p->stride, p->blur, p->sums, out);
      return;
  }
  memcpy(out, row, p->stride);
}
