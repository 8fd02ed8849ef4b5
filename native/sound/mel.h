/* Mel spectrograms: windows, Fourier transform, power, triangular filters, logarithm.
 *
 * The numbers have the bits of audio/mel.py, which computes the same sums in NumPy and SciPy.
 */

enum { NO_LOG, NATURAL_LOG, DECIBELS };

typedef struct {
  int n_fft, hop, mels, center, magnitude, log;
  Transform transform;
  float *window;       /* n_fft */
  int *first, *filter; /* of each mel: its first frequency, and where its weights begin, one more */
  float *weights;
  float floor, to_decibels, top;
  int has_top;
} Mel;

static void free_mel(Mel *mel) {
  free(mel->transform.twiddles);
  free(mel->window);
  free(mel->first);
  free(mel->filter);
  free(mel->weights);
}

/* Powers of all frequencies, in place of the transformed signals. `at` must not be `powers`. */
INLINE void powers_of(const Mel *mel, const Lanes *at, Lanes *powers) {
  int n = mel->n_fft;
  powers[0] = at[0] * at[0];
  for (int i = 1; 2 * i < n; i++) {
    Lanes real = at[2 * i - 1] * at[2 * i - 1], imaginary = at[2 * i] * at[2 * i];
    powers[i] = real + imaginary;
  }
  if (n % 2 == 0) powers[n / 2] = at[n - 1] * at[n - 1];
  if (!mel->magnitude) return;
  float *each = (float *)powers;
  for (int i = 0; i < (n / 2 + 1) * SIGNALS; i++) each[i] = sqrtf(each[i]);
}

/* Steps `step` to `step + count` of one channel, which is padded already. */
WIDE static void mel_steps(const Mel *mel, const float *padded, int64_t step, int count, int64_t steps,
                           Lanes *signals, Lanes *spare, float *out) {
  float *cut = (float *)signals;
  const float *from[SIGNALS];
  for (int k = 0; k < SIGNALS; k++)
    from[k] = padded + (size_t)(step + (k < count ? k : count - 1)) * (size_t)mel->hop;
  for (int i = 0; i < mel->n_fft; i++)
    for (int k = 0; k < SIGNALS; k++) cut[i * SIGNALS + k] = from[k][i] * mel->window[i];
  Lanes *found = fourier(&mel->transform, signals, spare);
  Lanes *powers = found == signals ? spare : signals;
  powers_of(mel, found, powers);
  for (int m = 0; m < mel->mels; m++) {
    const float *weights = mel->weights + mel->filter[m];
    const Lanes *at = powers + mel->first[m];
    int width = mel->filter[m + 1] - mel->filter[m];
    Lanes sum = {0};
    for (int i = 0; i < width; i++) sum += weights[i] * at[i];
    memcpy(out + (size_t)m * (size_t)steps + (size_t)step, &sum, (size_t)count * sizeof(float));
  }
}

typedef int32_t WordLanes __attribute__((vector_size(SIGNALS * sizeof(int32_t)), aligned(4), may_alias));

/* Where a mask is set, `a`, and `b` elsewhere. */
#define CHOOSE(mask, a, b) ((Lanes)(((mask) & (WordLanes)(a)) | (~(mask) & (WordLanes)(b))))

/* The natural logarithm of positive normal numbers, by the polynomial of FreeBSD's logf, which is
   accurate to one unit in the last place. The same steps are `natural_log` in audio/mel.py. Infinity and
   NaN are their own logarithms. */
INLINE void logs_of(Lanes *at, float floor, float times) {
  const float c1 = 0xaaaaaa.0p-24f, c2 = 0xccce13.0p-25f, c3 = 0x91e9ee.0p-25f, c4 = 0xf89e26.0p-26f;
  const float high = 0x1.62e300p-1f, low = 0x1.2fefa2p-17f;
  const Lanes least = (Lanes){0} + floor;
  Lanes x = *at;
  x = CHOOSE((WordLanes)(x < least), least, x);
  WordLanes bits = (WordLanes)x, shifted = bits + (0x3f800000 - 0x3f3504f3);
  Lanes exponent = __builtin_convertvector((shifted >> 23) - 127, Lanes);
  Lanes f = (Lanes)((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f;
  Lanes s = f / (2.0f + f), z = s * s, w = z * z;
  Lanes rest = z * (c1 + w * c3) + w * (c2 + w * c4), half = 0.5f * f * f;
  Lanes y = s * (half + rest) + exponent * low - half + f + exponent * high;
  *at = CHOOSE((WordLanes)((bits & 0x7fffffff) < 0x7f800000), y, x) * times;
}

WIDE static void take_logs(float *at, size_t count, float floor, float times) {
  size_t i = 0;
  for (; i + SIGNALS <= count; i += SIGNALS) logs_of((Lanes *)(at + i), floor, times);
  float last[SIGNALS] = {1, 1, 1, 1, 1, 1, 1, 1};
  memcpy(last, at + i, (count - i) * sizeof *at);
  logs_of((Lanes *)last, floor, times);
  memcpy(at + i, last, (count - i) * sizeof *at);
}

static void scale_mels(const Mel *mel, float *at, size_t count) {
  if (mel->log == NO_LOG) return;
  take_logs(at, count, mel->floor, mel->log == DECIBELS ? mel->to_decibels : 1.0f);
  if (!mel->has_top) return;
  float most = at[0];
  for (size_t i = 1; i < count; i++)
    if (at[i] > most || isnan(at[i])) most = at[i];
  float least = most - mel->top;
  for (size_t i = 0; i < count; i++)
    if (!(at[i] >= least)) at[i] = least;
}

static int mel_of(const Mel *mel, const Sound *sound, FloatBuffer *scratch, Sound *out) {
  int channels = sound->shape[0], side = mel->center ? mel->n_fft / 2 : 0;
  int64_t frames = sound->shape[1], padded = frames + 2 * side;
  if (padded < mel->n_fft || (side && frames <= side)) return LEFT;
  int64_t steps = 1 + (padded - mel->n_fft) / mel->hop;
  size_t work = 2 * (size_t)mel->n_fft * SIGNALS;
  if (room_for(scratch, work + (size_t)padded) ||
      room_for(&out->floats, (size_t)channels * (size_t)mel->mels * (size_t)steps))
    return LEFT;
  out->axes = 3;
  out->shape[0] = channels;
  out->shape[1] = mel->mels;
  out->shape[2] = (int)steps;
  Lanes *signals = (Lanes *)scratch->at, *spare = signals + mel->n_fft;
  float *whole = scratch->at + work;
  for (int channel = 0; channel < channels; channel++) {
    const float *from = sound->floats.at + (size_t)channel * (size_t)frames;
    memcpy(whole + side, from, (size_t)frames * sizeof(float));
    for (int i = 0; i < side; i++) {
      whole[i] = from[side - i];
      whole[side + frames + i] = from[frames - 2 - i];
    }
    float *to = out->floats.at + (size_t)channel * (size_t)mel->mels * (size_t)steps;
    for (int64_t step = 0; step < steps; step += SIGNALS) {
      int count = steps - step < SIGNALS ? (int)(steps - step) : SIGNALS;
      mel_steps(mel, whole, step, count, steps, signals, spare, to);
    }
  }
  scale_mels(mel, out->floats.at, sound_size(out));
  return FINE;
}
