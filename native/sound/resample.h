/* Resampling by windowed-sinc interpolation: each output is a weighted sum of inputs, added up in the
 * order of the inputs, as the product with a sparse matrix in audio/resample.py does.
 */
#include <pthread.h>

/* The filter for a pair of rates: `phases` outputs for every `step` inputs. The sum of output number
   `phase` of them begins phase * step / phases inputs after the first, less `before`. */
typedef struct {
  int from_rate, to_rate, step, phases, taps, before;
  float *weights; /* (phases, taps) */
} Resampling;

/* Filters of this process that jobs can use. None is ever removed, so readers need no lock. */
#define MOST_RESAMPLINGS 64
static struct {
  pthread_mutex_t adding;
  int count;
  Resampling at[MOST_RESAMPLINGS];
} resamplings = {.adding = PTHREAD_MUTEX_INITIALIZER};

static const Resampling *find_resampling(int from_rate, int to_rate) {
  int count = __atomic_load_n(&resamplings.count, __ATOMIC_ACQUIRE);
  for (int i = 0; i < count; i++)
    if (resamplings.at[i].from_rate == from_rate && resamplings.at[i].to_rate == to_rate)
      return resamplings.at + i;
  return NULL;
}

/* Add a filter, which the table then owns. Returns 0 if it is there already, or the table is full. */
static int add_resampling(Resampling added) {
  pthread_mutex_lock(&resamplings.adding);
  int count = resamplings.count;
  int fits = count < MOST_RESAMPLINGS && !find_resampling(added.from_rate, added.to_rate);
  if (fits) {
    resamplings.at[count] = added;
    __atomic_store_n(&resamplings.count, count + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&resamplings.adding);
  return fits;
}

#define RESAMPLED_AT_ONCE (4 * SIGNALS)

/* The outputs of one phase: `rows` of them. `planes`: inputs by their place within a step, `length`
   each. */
WIDE static void resample_phase(const Resampling *by, const float *planes, size_t length, int phase,
                                int64_t rows, int64_t count, float *out) {
  const float *weights = by->weights + (size_t)phase * (size_t)by->taps;
  int64_t start = (int64_t)phase * by->step / by->phases;
  for (int64_t row = 0; row < rows; row += RESAMPLED_AT_ONCE) {
    Lanes sum[4] = {{0}, {0}, {0}, {0}};
    int64_t plane = start % by->step, place = start / by->step;
    for (int tap = 0; tap < by->taps; tap++) {
      const Lanes *from = (const Lanes *)(planes + (size_t)plane * length + (size_t)(place + row));
      float weight = weights[tap];
      for (int k = 0; k < 4; k++) sum[k] += weight * from[k];
      if (++plane == by->step) plane = 0, place++;
    }
    const float *sums = (const float *)sum;
    int64_t some = rows - row < RESAMPLED_AT_ONCE ? rows - row : RESAMPLED_AT_ONCE;
    for (int64_t i = 0; i < some; i++) {
      int64_t at = (row + i) * by->phases + phase;
      if (at < count) out[at] = sums[i];
    }
  }
}

static int64_t resampled_frames(int64_t frames, int64_t from_rate, int64_t to_rate) {
  return (frames * to_rate + from_rate - 1) / from_rate;
}

/* Resample channels of `frames` inputs to `count` outputs each; `planes`: room for the inputs. */
static int resample_channels(const Resampling *by, const float *in, int channels, int64_t frames,
                             int64_t count, FloatBuffer *planes, float *out) {
  int64_t step = by->step, rows = (count + by->phases - 1) / by->phases;
  /* Rows are computed several at a time, beyond the last; the inputs of those are 0. */
  int64_t last = (int64_t)(by->phases - 1) * step / by->phases + by->taps;
  int64_t reach = rows + RESAMPLED_AT_ONCE + last / step + 1;
  int64_t held = (by->before + frames + step - 1) / step;
  size_t length = (size_t)(reach > held ? reach : held);
  if ((uint64_t)length > (uint64_t)INT64_MAX / sizeof(float) / (uint64_t)step ||
      room_for(planes, length * (size_t)step))
    return LEFT;
  for (int channel = 0; channel < channels; channel++) {
    const float *from = in + (size_t)channel * (size_t)frames;
    memset(planes->at, 0, length * (size_t)step * sizeof(float));
    if (step == 1) {
      memcpy(planes->at + by->before, from, (size_t)frames * sizeof(float));
    } else {
      size_t plane = (size_t)(by->before % step), place = (size_t)(by->before / step);
      for (int64_t i = 0; i < frames; i++) {
        planes->at[plane * length + place] = from[i];
        if (++plane == (size_t)step) plane = 0, place++;
      }
    }
    for (int phase = 0; phase < by->phases; phase++)
      resample_phase(by, planes->at, length, phase, rows, count, out + (size_t)channel * (size_t)count);
  }
  return FINE;
}
