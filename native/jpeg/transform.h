/* The inverse cosine transform of a block: from coefficients to pixels.
 *
 * It has the bits of libjpeg's accurate transform (Loeffler, Ligtenberg and Moschytz 1989, with 13
 * fractional bits). There is one version for any processor, eight columns at a time, and one for
 * AVX2, in which a rotation of two values is one multiplication of pairs. It transforms two blocks at
 * once, one in each half of a vector, because moving values between halves is expensive.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Functions compiled for AVX2 and BMI2, used if the processor has both. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_AVX2
#define MODERN __attribute__((target("avx2,bmi,bmi2")))
#define HAVE_MODERN (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
/* Older processors have no 32-bit vector multiplication: libjpeg is faster there. */
#define WORTHWHILE HAVE_MODERN
#else
#define MODERN
#define HAVE_MODERN 0
#define WORTHWHILE 1
#endif

#define SIDE 8

/* Unsigned, because absurd values in a file may overflow; signed where the sign matters. Absurd values
   have the same bits in all versions: those of 16 bits that wrap in some sums, and are clipped after the
   first pass, because AVX2 computes with 16 bits. image/on_device/ has the same. */
typedef uint32_t Eight __attribute__((vector_size(32)));
typedef int32_t Signed __attribute__((vector_size(32)));
typedef uint16_t Short __attribute__((vector_size(16)));
typedef int16_t SignedShort __attribute__((vector_size(16)));

#define FIX(x) ((uint32_t)((x) * 8192 + 0.5))
#define DOWN(v, shift) ((Eight)((Signed)(v) >> (shift)))
#define WRAP(v) DOWN((v) << 16, 16)

/* One pass over eight columns at once. Sums are shifted down by `shift`, rounded. */
INLINE void transform(Eight *v, int shift) {
  Eight z = (v[2] + v[6]) * FIX(0.541196100);
  Eight t2 = z - v[6] * FIX(1.847759065), t3 = z + v[2] * FIX(0.765366865);
  Eight half = {};
  half += 1u << (shift - 1);
  Eight t0 = ((v[0] + v[4]) << 13) + half, t1 = ((v[0] - v[4]) << 13) + half;
  Eight a0 = t0 + t3, a3 = t0 - t3, a1 = t1 + t2, a2 = t1 - t2;

  Eight z1 = (v[7] + v[1]) * -FIX(0.899976223), z2 = (v[5] + v[3]) * -FIX(2.562915447);
  Eight z3 = WRAP(v[7] + v[3]), z4 = WRAP(v[5] + v[1]), z5 = (z3 + z4) * FIX(1.175875602);
  z3 = z3 * -FIX(1.961570560) + z5;
  z4 = z4 * -FIX(0.390180644) + z5;
  t0 = v[7] * FIX(0.298631336) + z1 + z3;
  t1 = v[5] * FIX(2.053119869) + z2 + z4;
  t2 = v[3] * FIX(3.072711026) + z2 + z3;
  t3 = v[1] * FIX(1.501321110) + z1 + z4;

  v[0] = DOWN(a0 + t3, shift);
  v[7] = DOWN(a0 - t3, shift);
  v[1] = DOWN(a1 + t2, shift);
  v[6] = DOWN(a1 - t2, shift);
  v[2] = DOWN(a2 + t1, shift);
  v[5] = DOWN(a2 - t1, shift);
  v[3] = DOWN(a3 + t0, shift);
  v[4] = DOWN(a3 - t0, shift);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE8
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (Eight){__VA_ARGS__})
#endif

/* Transpose a block. The first rounds stay within lanes of 128 bits, and only the last crosses them,
   because crossing lanes is expensive. */
INLINE void transpose_block(Eight *v) {
  Eight a[8], b[8];
  for (int i = 0; i < 4; i++) {
    a[2 * i] = SHUFFLE8(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[2 * i + 1] = SHUFFLE8(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + j] = SHUFFLE8(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + j + 2] = SHUFFLE8(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int j = 0; j < 4; j++) {
    v[j] = SHUFFLE8(b[j], b[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[j + 4] = SHUFFLE8(b[j], b[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

INLINE void clear(int16_t *block) {
  /* Explicit stores: compilers turn one memset into a slower loop. */
  Eight nothing = {};
  for (int i = 0; i < 4; i++) memcpy(block + 16 * i, &nothing, sizeof nothing);
}

INLINE uint8_t level(int32_t value) {
  return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* A block of coefficients, and where its pixels are to be written. */
typedef struct {
  int16_t at[SIDE * SIDE + 1] __attribute__((aligned(32))); /* the last is not used: see PLACES */
  const int16_t *steps;                                     /* factors of the coefficients */
  uint8_t *to;
  size_t stride;
  int flat; /* only the first coefficient is not 0 */
} Block;

/* Convert two blocks to pixels; both may be the same. */
typedef void PutTwo(const Block *one, const Block *other);

/* Convert a flat block: both passes reduce to this. */
INLINE void put_flat(const Block *block) {
  int32_t middle = (int16_t)((uint32_t)block->at[0] * (uint32_t)block->steps[0]) * 4;
  uint64_t all = 0x0101010101010101u * level(((middle + 16) >> 5) + 128);
  for (int y = 0; y < SIDE; y++) memcpy(block->to + y * block->stride, &all, SIDE);
}

static void put_plain(const Block *block) {
  if (block->flat) {
    put_flat(block);
    return;
  }
  Eight v[8];
  for (int i = 0; i < SIDE; i++) {
    Short row, step;
    memcpy(&row, block->at + SIDE * i, sizeof row);
    memcpy(&step, block->steps + SIDE * i, sizeof step);
    v[i] = (Eight)__builtin_convertvector((SignedShort)(row * step), Signed);
  }
  transform(v, 11);
  for (int i = 0; i < SIDE; i++) {
    Signed x = (Signed)v[i], over = x > INT16_MAX, under = x < INT16_MIN;
    v[i] = (Eight)((x & ~over & ~under) | (over & INT16_MAX) | (under & INT16_MIN));
  }
  transpose_block(v);
  transform(v, 18);
  /* Each vector is now a column, and each value fits into the low byte: four vectors shifted and
     combined hold four pixels of each row. */
  for (int i = 0; i < SIDE; i++) {
    Signed x = (Signed)(v[i] + 128), over = x > 255;
    v[i] = (Eight)((x & ~over & ~(x < 0)) | (over & 255));
  }
  Eight low = v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24;
  Eight high = v[4] | v[5] << 8 | v[6] << 16 | v[7] << 24;
  uint64_t rows[SIDE];
  v[0] = SHUFFLE8(low, high, 0, 8, 1, 9, 2, 10, 3, 11);
  v[1] = SHUFFLE8(low, high, 4, 12, 5, 13, 6, 14, 7, 15);
  memcpy(rows, v, sizeof rows);
  for (int y = 0; y < SIDE; y++) memcpy(block->to + y * block->stride, &rows[y], SIDE);
}

static inline void put_two_plain(const Block *one, const Block *other) {
  put_plain(one);
  if (other != one) put_plain(other);
}

#ifdef HAVE_AVX2
/* a * x + b * y for eight pairs (a, b) of 16 bits. */
#define ROTATE(pairs, x, y) \
  _mm256_madd_epi16(pairs, _mm256_set1_epi32((int)((uint32_t)(y) << 16 | ((x) & 0xFFFF))))

/* Sums and differences of `a` and `b`, shifted down; the low and high four values of each half have a
   vector of their own, and come together in 16 bits. */
MODERN INLINE void finish(__m256i *sum, __m256i *difference, const __m256i *a, const __m256i *b,
                          int shift) {
  *sum = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(a[0], b[0]), shift),
                            _mm256_srai_epi32(_mm256_add_epi32(a[1], b[1]), shift));
  *difference = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_sub_epi32(a[0], b[0]), shift),
                                   _mm256_srai_epi32(_mm256_sub_epi32(a[1], b[1]), shift));
}

MODERN INLINE void pair(__m256i *pairs, __m256i a, __m256i b) {
  pairs[0] = _mm256_unpacklo_epi16(a, b);
  pairs[1] = _mm256_unpackhi_epi16(a, b);
}

/* The same pass as `transform`, with constants grouped by the values they multiply. */
MODERN INLINE void transform_modern(__m256i *v, int shift) {
  const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
  __m256i p04[2], p26[2], p71[2], p53[2], sums[2];
  __m256i a0[2], a1[2], a2[2], a3[2], b0[2], b1[2], b2[2], b3[2];
  pair(p04, v[0], v[4]);
  pair(p26, v[2], v[6]);
  for (int i = 0; i < 2; i++) {
    __m256i t0 = _mm256_add_epi32(ROTATE(p04[i], 8192, 8192), half);
    __m256i t1 = _mm256_add_epi32(ROTATE(p04[i], 8192, -8192), half);
    __m256i t2 = ROTATE(p26[i], FIX(0.541196100), FIX(0.541196100) - FIX(1.847759065));
    __m256i t3 = ROTATE(p26[i], FIX(0.541196100) + FIX(0.765366865), FIX(0.541196100));
    a0[i] = _mm256_add_epi32(t0, t3);
    a3[i] = _mm256_sub_epi32(t0, t3);
    a1[i] = _mm256_add_epi32(t1, t2);
    a2[i] = _mm256_sub_epi32(t1, t2);
  }
  pair(sums, _mm256_add_epi16(v[7], v[3]), _mm256_add_epi16(v[5], v[1]));
  pair(p71, v[7], v[1]);
  pair(p53, v[5], v[3]);
  for (int i = 0; i < 2; i++) {
    __m256i z3 = ROTATE(sums[i], FIX(1.175875602) - FIX(1.961570560), FIX(1.175875602));
    __m256i z4 = ROTATE(sums[i], FIX(1.175875602), FIX(1.175875602) - FIX(0.390180644));
    __m256i t0 = ROTATE(p71[i], FIX(0.298631336) - FIX(0.899976223), -FIX(0.899976223));
    __m256i t3 = ROTATE(p71[i], -FIX(0.899976223), FIX(1.501321110) - FIX(0.899976223));
    __m256i t1 = ROTATE(p53[i], FIX(2.053119869) - FIX(2.562915447), -FIX(2.562915447));
    __m256i t2 = ROTATE(p53[i], -FIX(2.562915447), FIX(3.072711026) - FIX(2.562915447));
    b3[i] = _mm256_add_epi32(t3, z4);
    b2[i] = _mm256_add_epi32(t2, z3);
    b1[i] = _mm256_add_epi32(t1, z4);
    b0[i] = _mm256_add_epi32(t0, z3);
  }
  finish(&v[0], &v[7], a0, b3, shift);
  finish(&v[1], &v[6], a1, b2, shift);
  finish(&v[2], &v[5], a2, b1, shift);
  finish(&v[3], &v[4], a3, b0, shift);
}

/* Transpose both blocks: three rounds of interleaving each row with the one four further on. */
MODERN INLINE void transpose_modern(__m256i *v) {
  for (int round = 0; round < 3; round++) {
    __m256i a[SIDE];
    for (int i = 0; i < 4; i++) {
      a[2 * i] = _mm256_unpacklo_epi16(v[i], v[i + 4]);
      a[2 * i + 1] = _mm256_unpackhi_epi16(v[i], v[i + 4]);
    }
    memcpy(v, a, sizeof a);
  }
}

/* Columns of differences to grey become rows of pixels: each vector has two rows of either block. */
MODERN INLINE void pixels_of(const __m256i *v, __m256i *rows) {
  const __m256i middle = _mm256_set1_epi16(128);
  __m256i p[4];
  for (int i = 0; i < 4; i++)
    p[i] = _mm256_packus_epi16(_mm256_adds_epi16(v[i], middle),
                               _mm256_adds_epi16(v[i + 4], middle));
  /* Interleave columns: 0 with 2, 4 with 6, and so on; then the first four, the last four, and all. */
  __m256i even = _mm256_unpacklo_epi8(p[0], p[2]), odd = _mm256_unpacklo_epi8(p[1], p[3]);
  __m256i even_4 = _mm256_unpackhi_epi8(p[0], p[2]), odd_4 = _mm256_unpackhi_epi8(p[1], p[3]);
  __m256i top = _mm256_unpacklo_epi8(even, odd), bottom = _mm256_unpackhi_epi8(even, odd);
  __m256i top_4 = _mm256_unpacklo_epi8(even_4, odd_4);
  __m256i bottom_4 = _mm256_unpackhi_epi8(even_4, odd_4);
  rows[0] = _mm256_unpacklo_epi32(top, top_4);
  rows[1] = _mm256_unpackhi_epi32(top, top_4);
  rows[2] = _mm256_unpacklo_epi32(bottom, bottom_4);
  rows[3] = _mm256_unpackhi_epi32(bottom, bottom_4);
}

MODERN INLINE __m256i load_two(const int16_t *one, const int16_t *other) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)one)),
                                 _mm_loadu_si128((const __m128i *)other), 1);
}

MODERN INLINE void store_two(const Block *block, int y, __m128i rows) {
  uint8_t *to = block->to + (size_t)y * block->stride;
  _mm_storel_epi64((__m128i *)to, rows);
  _mm_storeh_pd((double *)(to + block->stride), _mm_castsi128_pd(rows));
}

MODERN static inline void put_two_modern(const Block *one, const Block *other) {
  if (one->flat & other->flat) {
    put_flat(one);
    put_flat(other);
    return;
  }
  __m256i v[SIDE], rows[SIDE / 2];
  for (int i = 0; i < SIDE; i++)
    v[i] = _mm256_mullo_epi16(load_two(one->at + SIDE * i, other->at + SIDE * i),
                              load_two(one->steps + SIDE * i, other->steps + SIDE * i));
  transform_modern(v, 11);
  transpose_modern(v);
  transform_modern(v, 18);
  pixels_of(v, rows);
  for (int i = 0; i < SIDE / 2; i++) {
    store_two(one, 2 * i, _mm256_castsi256_si128(rows[i]));
    store_two(other, 2 * i, _mm256_extracti128_si256(rows[i], 1));
  }
}
#else
#define put_two_modern put_two_plain
#endif
