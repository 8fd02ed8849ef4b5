/* The Fourier transform of eight real signals at once, for lengths whose prime factors are 2, 3 and 5.
 *
 * The steps are those of FFTPACK (Swarztrauber, 1982) in the order of pocketfft, which SciPy uses:
 * every product and sum is rounded as there, so the result has the same bits. Each lane of a vector is
 * one signal, so it does not matter how wide the processor's registers are.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SIGNALS 8
/* May lie at any address of a float. */
typedef float Lanes __attribute__((vector_size(SIGNALS * sizeof(float)), aligned(4), may_alias));

#define MOST_FACTORS 32

typedef struct {
  int length, factors, factor[MOST_FACTORS];
  float *twiddles; /* of all factors but the last, one after the other */
} Transform;

/* The factors of a length: 4s, then at most one 2, which goes first, 3s and 5s. Returns their number, or
   0 if there are others. */
static int factors_of(int length, int *factor) {
  int count = 0;
  if (length < 2) return 0;
  for (; length % 4 == 0; length /= 4) factor[count++] = 4;
  if (length % 2 == 0) {
    length /= 2;
    factor[count++] = 2;
    int first = factor[0];
    factor[0] = factor[count - 1];
    factor[count - 1] = first;
  }
  for (int divisor = 3; divisor <= 5; divisor += 2)
    for (; length % divisor == 0; length /= divisor) factor[count++] = divisor;
  return length == 1 ? count : 0;
}

/* Number of floats that `twiddles` has. */
static size_t twiddle_count(int length, const int *factor, int factors) {
  size_t count = 0, before = 1;
  for (int k = 0; k < factors - 1; k++) {
    size_t inner = (size_t)length / (before * (size_t)factor[k]);
    count += (size_t)(factor[k] - 1) * (inner - 1);
    before *= (size_t)factor[k];
  }
  return count;
}

/* Make the twiddles: cosines and sines of the multiples of one n-th of a turn. */
static int make_twiddles(Transform *by) {
  size_t count = twiddle_count(by->length, by->factor, by->factors), before = 1;
  float *at = by->twiddles = calloc(count ? count : 1, sizeof *at);
  if (!at) return NO_MEMORY;
  for (int k = 0; k < by->factors - 1; k++) {
    size_t radix = (size_t)by->factor[k], inner = (size_t)by->length / (before * radix);
    for (size_t j = 1; j < radix; j++, at += inner - 1)
      for (size_t i = 1; i <= (inner - 1) / 2; i++) {
        double angle = 2 * M_PI * (double)(j * before * i) / by->length;
        at[2 * i - 2] = (float)cos(angle);
        at[2 * i - 1] = (float)sin(angle);
      }
    before *= radix;
  }
  return FINE;
}

#define SUM_AND_DIFFERENCE(a, b, c, d) ((a) = (c) + (d), (b) = (c) - (d))
/* (a + ib) = conj(c + id) * (e + if) */
#define TURN(a, b, c, d, e, f) ((a) = (c) * (e) + (d) * (f), (b) = (c) * (f) - (d) * (e))

#define W(x, i) twiddle[(i) + (x) * (inner - 1)]
#define IN(a, b, c) from[(a) + inner * ((b) + outer * (c))]
#define OUT(a, b, c) to[(a) + inner * ((b) + RADIX * (c))]

INLINE void forward_2(int inner, int outer, const Lanes *restrict from, Lanes *restrict to,
                      const float *twiddle) {
  enum { RADIX = 2 };
  for (int k = 0; k < outer; k++)
    SUM_AND_DIFFERENCE(OUT(0, 0, k), OUT(inner - 1, 1, k), IN(0, k, 0), IN(0, k, 1));
  if (inner % 2 == 0)
    for (int k = 0; k < outer; k++) {
      OUT(0, 1, k) = -IN(inner - 1, k, 1);
      OUT(inner - 1, 0, k) = IN(inner - 1, k, 0);
    }
  for (int k = 0; k < outer && inner > 2; k++)
    for (int i = 2; i < inner; i += 2) {
      int j = inner - i;
      Lanes r2, i2;
      TURN(r2, i2, W(0, i - 2), W(0, i - 1), IN(i - 1, k, 1), IN(i, k, 1));
      SUM_AND_DIFFERENCE(OUT(i - 1, 0, k), OUT(j - 1, 1, k), IN(i - 1, k, 0), r2);
      SUM_AND_DIFFERENCE(OUT(i, 0, k), OUT(j, 1, k), i2, IN(i, k, 0));
    }
}

INLINE void forward_3(int inner, int outer, const Lanes *restrict from, Lanes *restrict to,
                      const float *twiddle) {
  enum { RADIX = 3 };
  const float real = -0.5f, imaginary = 0.86602540378443864676f;
  for (int k = 0; k < outer; k++) {
    Lanes sum = IN(0, k, 1) + IN(0, k, 2);
    OUT(0, 0, k) = IN(0, k, 0) + sum;
    OUT(0, 2, k) = imaginary * (IN(0, k, 2) - IN(0, k, 1));
    OUT(inner - 1, 1, k) = IN(0, k, 0) + real * sum;
  }
  for (int k = 0; k < outer && inner > 1; k++)
    for (int i = 2; i < inner; i += 2) {
      int j = inner - i;
      Lanes dr2, di2, dr3, di3;
      TURN(dr2, di2, W(0, i - 2), W(0, i - 1), IN(i - 1, k, 1), IN(i, k, 1));
      TURN(dr3, di3, W(1, i - 2), W(1, i - 1), IN(i - 1, k, 2), IN(i, k, 2));
      Lanes cr2 = dr2 + dr3, ci2 = di2 + di3;
      OUT(i - 1, 0, k) = IN(i - 1, k, 0) + cr2;
      OUT(i, 0, k) = IN(i, k, 0) + ci2;
      Lanes tr2 = IN(i - 1, k, 0) + real * cr2, ti2 = IN(i, k, 0) + real * ci2;
      Lanes tr3 = imaginary * (di2 - di3), ti3 = imaginary * (dr3 - dr2);
      SUM_AND_DIFFERENCE(OUT(i - 1, 2, k), OUT(j - 1, 1, k), tr2, tr3);
      SUM_AND_DIFFERENCE(OUT(i, 2, k), OUT(j, 1, k), ti3, ti2);
    }
}

INLINE void forward_4(int inner, int outer, const Lanes *restrict from, Lanes *restrict to,
                      const float *twiddle) {
  enum { RADIX = 4 };
  const float half_root = 0.707106781186547524400844362104849f;
  for (int k = 0; k < outer; k++) {
    Lanes r1, r2;
    SUM_AND_DIFFERENCE(r1, OUT(0, 2, k), IN(0, k, 3), IN(0, k, 1));
    SUM_AND_DIFFERENCE(r2, OUT(inner - 1, 1, k), IN(0, k, 0), IN(0, k, 2));
    SUM_AND_DIFFERENCE(OUT(0, 0, k), OUT(inner - 1, 3, k), r2, r1);
  }
  if (inner % 2 == 0)
    for (int k = 0; k < outer; k++) {
      Lanes i1 = -half_root * (IN(inner - 1, k, 1) + IN(inner - 1, k, 3));
      Lanes r1 = half_root * (IN(inner - 1, k, 1) - IN(inner - 1, k, 3));
      SUM_AND_DIFFERENCE(OUT(inner - 1, 0, k), OUT(inner - 1, 2, k), IN(inner - 1, k, 0), r1);
      SUM_AND_DIFFERENCE(OUT(0, 3, k), OUT(0, 1, k), i1, IN(inner - 1, k, 2));
    }
  for (int k = 0; k < outer && inner > 2; k++)
    for (int i = 2; i < inner; i += 2) {
      int j = inner - i;
      Lanes cr2, ci2, cr3, ci3, cr4, ci4, tr1, tr2, tr3, tr4, ti1, ti2, ti3, ti4;
      TURN(cr2, ci2, W(0, i - 2), W(0, i - 1), IN(i - 1, k, 1), IN(i, k, 1));
      TURN(cr3, ci3, W(1, i - 2), W(1, i - 1), IN(i - 1, k, 2), IN(i, k, 2));
      TURN(cr4, ci4, W(2, i - 2), W(2, i - 1), IN(i - 1, k, 3), IN(i, k, 3));
      SUM_AND_DIFFERENCE(tr1, tr4, cr4, cr2);
      SUM_AND_DIFFERENCE(ti1, ti4, ci2, ci4);
      SUM_AND_DIFFERENCE(tr2, tr3, IN(i - 1, k, 0), cr3);
      SUM_AND_DIFFERENCE(ti2, ti3, IN(i, k, 0), ci3);
      SUM_AND_DIFFERENCE(OUT(i - 1, 0, k), OUT(j - 1, 3, k), tr2, tr1);
      SUM_AND_DIFFERENCE(OUT(i, 0, k), OUT(j, 3, k), ti1, ti2);
      SUM_AND_DIFFERENCE(OUT(i - 1, 2, k), OUT(j - 1, 1, k), tr3, ti4);
      SUM_AND_DIFFERENCE(OUT(i, 2, k), OUT(j, 1, k), tr4, ti3);
    }
}

INLINE void forward_5(int inner, int outer, const Lanes *restrict from, Lanes *restrict to,
                      const float *twiddle) {
  enum { RADIX = 5 };
  const float r11 = 0.3090169943749474241f, i11 = 0.95105651629515357212f;
  const float r12 = -0.8090169943749474241f, i12 = 0.58778525229247312917f;
  for (int k = 0; k < outer; k++) {
    Lanes cr2, cr3, ci4, ci5;
    SUM_AND_DIFFERENCE(cr2, ci5, IN(0, k, 4), IN(0, k, 1));
    SUM_AND_DIFFERENCE(cr3, ci4, IN(0, k, 3), IN(0, k, 2));
    OUT(0, 0, k) = IN(0, k, 0) + cr2 + cr3;
    OUT(inner - 1, 1, k) = IN(0, k, 0) + r11 * cr2 + r12 * cr3;
    OUT(0, 2, k) = i11 * ci5 + i12 * ci4;
    OUT(inner - 1, 3, k) = IN(0, k, 0) + r12 * cr2 + r11 * cr3;
    OUT(0, 4, k) = i12 * ci5 - i11 * ci4;
  }
  for (int k = 0; k < outer && inner > 1; k++)
    for (int i = 2; i < inner; i += 2) {
      int j = inner - i;
      Lanes dr2, di2, dr3, di3, dr4, di4, dr5, di5;
      TURN(dr2, di2, W(0, i - 2), W(0, i - 1), IN(i - 1, k, 1), IN(i, k, 1));
      TURN(dr3, di3, W(1, i - 2), W(1, i - 1), IN(i - 1, k, 2), IN(i, k, 2));
      TURN(dr4, di4, W(2, i - 2), W(2, i - 1), IN(i - 1, k, 3), IN(i, k, 3));
      TURN(dr5, di5, W(3, i - 2), W(3, i - 1), IN(i - 1, k, 4), IN(i, k, 4));
      Lanes cr2, ci2, cr3, ci3, cr4, ci4, cr5, ci5;
      SUM_AND_DIFFERENCE(cr2, ci5, dr5, dr2);
      SUM_AND_DIFFERENCE(ci2, cr5, di2, di5);
      SUM_AND_DIFFERENCE(cr3, ci4, dr4, dr3);
      SUM_AND_DIFFERENCE(ci3, cr4, di3, di4);
      OUT(i - 1, 0, k) = IN(i - 1, k, 0) + cr2 + cr3;
      OUT(i, 0, k) = IN(i, k, 0) + ci2 + ci3;
      Lanes tr2 = IN(i - 1, k, 0) + r11 * cr2 + r12 * cr3;
      Lanes ti2 = IN(i, k, 0) + r11 * ci2 + r12 * ci3;
      Lanes tr3 = IN(i - 1, k, 0) + r12 * cr2 + r11 * cr3;
      Lanes ti3 = IN(i, k, 0) + r12 * ci2 + r11 * ci3;
      Lanes tr4, tr5, ti4, ti5;
      TURN(tr5, tr4, cr5, cr4, i11, i12);
      TURN(ti5, ti4, ci5, ci4, i11, i12);
      SUM_AND_DIFFERENCE(OUT(i - 1, 2, k), OUT(j - 1, 1, k), tr2, tr5);
      SUM_AND_DIFFERENCE(OUT(i, 2, k), OUT(j, 1, k), ti5, ti2);
      SUM_AND_DIFFERENCE(OUT(i - 1, 4, k), OUT(j - 1, 3, k), tr3, tr4);
      SUM_AND_DIFFERENCE(OUT(i, 4, k), OUT(j, 3, k), ti4, ti3);
    }
}

#undef W
#undef IN
#undef OUT

/* Transform `signals`, in place or to `spare`, both of `length`; returns where the result is: the real
   number of frequency 0, then the real and the imaginary number of each frequency. */
INLINE Lanes *fourier(const Transform *by, Lanes *signals, Lanes *spare) {
  int outer = by->length;
  const float *twiddle = by->twiddles + twiddle_count(by->length, by->factor, by->factors);
  for (int k = by->factors - 1; k >= 0; k--) {
    int radix = by->factor[k], inner = by->length / outer;
    outer /= radix;
    if (k < by->factors - 1) twiddle -= (radix - 1) * (inner - 1);
    switch (radix) {
      case 2: forward_2(inner, outer, signals, spare, twiddle); break;
      case 3: forward_3(inner, outer, signals, spare, twiddle); break;
      case 4: forward_4(inner, outer, signals, spare, twiddle); break;
      default: forward_5(inner, outer, signals, spare, twiddle);
    }
    Lanes *swapped = signals;
    signals = spare;
    spare = swapped;
  }
  return signals;
}
