/* A sound in the memory of a worker, and what changes it without a filter: channels, length, loudness,
 * masks. Every number has the bits that NumPy gives in penstock/audio.
 */
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* FloatBuffer that are used for one sample after the other. */
typedef struct {
  float *at;
  size_t room;
} FloatBuffer;

/* A waveform (channels, frames), or a spectrogram (channels, mels, steps). */
typedef struct {
  FloatBuffer floats;
  int axes, shape[3];
} Sound;

/* Make room for this many floats, at least one. Does not keep what was there. */
static int room_for(FloatBuffer *floats, size_t wanted) {
  if (floats->room >= wanted && floats->at) return FINE;
  free(floats->at);
  floats->at = wanted > SIZE_MAX / sizeof(float) ? NULL : malloc((wanted ? wanted : 1) * sizeof(float));
  floats->room = floats->at ? wanted : 0;
  return floats->at ? FINE : NO_MEMORY;
}

static size_t sound_size(const Sound *sound) {
  size_t size = 1;
  for (int i = 0; i < sound->axes; i++) size *= (size_t)sound->shape[i];
  return size;
}

static int make_waveform(Sound *sound, int channels, int64_t frames) {
  if (frames < 1 || frames > INT_MAX) return LEFT;
  if (room_for(&sound->floats, (size_t)channels * (size_t)frames)) return LEFT;
  sound->axes = 2;
  sound->shape[0] = channels;
  sound->shape[1] = (int)frames;
  return FINE;
}

/* The sum of floats as `numpy.add.reduce` computes it: halves are added up by themselves, and within a
   block of 128 every eighth number. */
static float pairwise_sum(const float *at, size_t count) {
  if (count < 8) {
    float sum = -0.0f;
    for (size_t i = 0; i < count; i++) sum += at[i];
    return sum;
  }
  if (count <= 128) {
    float part[8];
    size_t i = 8;
    memcpy(part, at, sizeof part);
    for (; i < count - count % 8; i += 8)
      for (int k = 0; k < 8; k++) part[k] += at[i + k];
    float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; i < count; i++) sum += at[i];
    return sum;
  }
  size_t half = count / 2;
  half -= half % 8;
  return pairwise_sum(at, half) + pairwise_sum(at + half, count - half);
}

static float mean_of(const float *at, size_t count) {
  return (float)((double)(0.0f + pairwise_sum(at, count)) / (double)count);
}

/* The mean of all channels, in place of the first. */
WIDE static void mix_channels(Sound *sound) {
  float *at = sound->floats.at;
  size_t frames = (size_t)sound->shape[1];
  float channels = (float)sound->shape[0];
  for (int channel = 1; channel < sound->shape[0]; channel++)
    for (size_t i = 0; i < frames; i++) at[i] += at[(size_t)channel * frames + i];
  if (sound->shape[0] > 1)
    for (size_t i = 0; i < frames; i++) at[i] /= channels;
  sound->shape[0] = 1;
}

WIDE static void multiply(float *at, size_t count, float by) {
  for (size_t i = 0; i < count; i++) at[i] *= by;
}

WIDE static void subtract(float *at, size_t count, float by) {
  for (size_t i = 0; i < count; i++) at[i] -= by;
}

#define LEAST_VARIANCE 1e-7

/* `NormalizeAudio` by the mean and deviation of the sound; `spare`: room for the squares. */
static int normalize_alone(Sound *sound, FloatBuffer *spare) {
  size_t count = sound_size(sound);
  float *at = sound->floats.at;
  if (room_for(spare, count)) return LEFT;
  subtract(at, count, mean_of(at, count));
  for (size_t i = 0; i < count; i++) spare->at[i] = at[i] * at[i];
  multiply(at, count, (float)(1.0 / sqrt((double)mean_of(spare->at, count) + LEAST_VARIANCE)));
  return FINE;
}

/* `_place_clip` of audio/length.py: `frames` frames with the clip at frame `at`; the rest is silence, or
   the clip again. */
static int place_clip(const Sound *clip, int64_t at, int frames, int repeats, Sound *out) {
  int channels = clip->shape[0];
  int64_t length = clip->shape[1];
  if (make_waveform(out, channels, frames)) return LEFT;
  for (int channel = 0; channel < channels; channel++) {
    const float *from = clip->floats.at + (size_t)channel * (size_t)length;
    float *to = out->floats.at + (size_t)channel * (size_t)frames;
    if (repeats) {
      int64_t place = ((-at) % length + length) % length;
      for (int64_t i = 0; i < frames;) {
        int64_t part = length - place < frames - i ? length - place : frames - i;
        memcpy(to + i, from + place, (size_t)part * sizeof *to);
        i += part;
        place = 0;
      }
      continue;
    }
    int64_t first = at > 0 ? at : 0, last = at + length < frames ? at + length : frames;
    if (first > frames) first = frames;
    if (last < first) last = first;
    memset(to, 0, (size_t)first * sizeof *to);
    if (last > first) memcpy(to + first, from + (first - at), (size_t)(last - first) * sizeof *to);
    memset(to + last, 0, (size_t)(frames - last) * sizeof *to);
  }
  return FINE;
}

/* Fill a band of rows, or of columns, of every channel of a spectrogram. */
static void mask_rows(Sound *sound, int first, int last, float fill) {
  size_t rows = (size_t)sound->shape[1], columns = (size_t)sound->shape[2];
  for (int channel = 0; channel < sound->shape[0]; channel++)
    for (size_t i = (size_t)first * columns; i < (size_t)last * columns; i++)
      sound->floats.at[(size_t)channel * rows * columns + i] = fill;
}

static void mask_columns(Sound *sound, int first, int last, float fill) {
  size_t rows = (size_t)sound->shape[0] * (size_t)sound->shape[1], columns = (size_t)sound->shape[2];
  for (size_t row = 0; row < rows; row++)
    for (int column = first; column < last; column++)
      sound->floats.at[row * columns + (size_t)column] = fill;
}
