/* One sample of a pipeline whose audio operations are all in this kernel: decode, resample, crop, pad, mix,
 * amplify, normalize, mel spectrogram, masks, in any order that the types of their results allow.
 *
 * The parameters have the bits of `Operation.draw` in penstock/audio. Does not depend on Python.
 */

enum { DECODE, RESAMPLE_TO, RANDOM_PLACE, FIXED_PLACE, PAD_ONLY, MIX, GAIN, NORMALIZE, MEL, MASK, SOUND_STEPS };
enum { AT_START, IN_MIDDLE, AT_END, ANYWHERE };

#define MOST_STEPS 16

typedef struct {
  int kind;
  StageKey key;
  int mono, rate;              /* of DECODE; rate 0: keep that of the file */
  int from_rate, to_rate;      /* of RESAMPLE_TO */
  int frames, padding, repeats, place;
  double low, high;            /* decibels, of GAIN */
  int own;                     /* NORMALIZE by the mean and deviation of the clip */
  float minus, times;          /* NORMALIZE */
  Mel mel;
  int time_masks, freq_masks, longest, tallest, fill_mean; /* of MASK */
  double share;
  float fill;
} SoundStep;

typedef struct {
  int count;
  SoundStep step[MOST_STEPS];
} SoundProgram;

/* Memory of one worker. */
typedef struct {
  Sound now, next;
  FloatBuffer scratch;
} SoundMemory;

static void free_sound_memory(SoundMemory *m) {
  free(m->now.floats.at);
  free(m->next.floats.at);
  free(m->scratch.at);
}

static void shrink_floats(FloatBuffer *floats, size_t most) {
  if (floats->room <= most / sizeof(float)) return;
  free(floats->at);
  *floats = (FloatBuffer){0};
}

static void swap_sounds(SoundMemory *m) {
  Sound swapped = m->now;
  m->now = m->next;
  m->next = swapped;
}

static int resample_now(int from_rate, int to_rate, SoundMemory *m) {
  if (from_rate == to_rate) return FINE;
  const Resampling *by = find_resampling(from_rate, to_rate);
  if (!by) return LEFT;
  int64_t frames = m->now.shape[1], count = resampled_frames(frames, from_rate, to_rate);
  if (make_waveform(&m->next, m->now.shape[0], count)) return LEFT;
  if (resample_channels(by, m->now.floats.at, m->now.shape[0], frames, count, &m->scratch,
                        m->next.floats.at))
    return LEFT;
  swap_sounds(m);
  return FINE;
}

/* `_clip_start` of audio/length.py; Python's division rounds down. */
static int64_t clip_start(int place, int64_t room) {
  if (place == AT_START) return 0;
  return place == AT_END ? room : (room - (room % 2 != 0 && room < 0)) / 2;
}

static int place_now(const SoundStep *step, SampleKey sample, SoundMemory *m) {
  int64_t room = (int64_t)step->frames - m->now.shape[1], at;
  if (step->kind == PAD_ONLY && room <= 0) return FINE;
  if (step->kind == RANDOM_PLACE) {
    Random random = random_at(step->key, sample);
    double drawn = uniform(&random);
    int64_t padding = step->padding;
    if (room <= 2 * padding)
      at = padding - (int64_t)(drawn * (double)(2 * padding - room + 1));
    else if (step->place == ANYWHERE)
      at = (int64_t)(drawn * (double)(room + 1));
    else
      at = clip_start(step->place, room);
  } else {
    at = clip_start(step->place, room);
  }
  /* A clip that covers the whole result is cut, and never repeated. */
  int covers = at <= 0 && at + m->now.shape[1] >= step->frames;
  if (place_clip(&m->now, at, step->frames, step->repeats && !covers, &m->next)) return LEFT;
  swap_sounds(m);
  return FINE;
}

static void draw_band(Random *random, int size, int widest, int *first, int *last) {
  double width = uniform(random), place = uniform(random);
  int wide = (int)(width * (widest + 1));
  *first = (int)(place * (size - wide + 1));
  *last = *first + wide;
}

static void mask_now(const SoundStep *step, SampleKey sample, Sound *sound) {
  Random random = random_at(step->key, sample);
  int mels = sound->shape[1], steps = sound->shape[2], first, last;
  int longest = (int)(step->share * steps), tallest = step->tallest < mels ? step->tallest : mels;
  if (step->longest < longest) longest = step->longest;
  float fill = step->fill_mean ? mean_of(sound->floats.at, sound_size(sound)) : step->fill;
  for (int i = 0; i < step->time_masks; i++) {
    draw_band(&random, steps, longest, &first, &last);
    mask_columns(sound, first, last, fill);
  }
  for (int i = 0; i < step->freq_masks; i++) {
    draw_band(&random, mels, tallest, &first, &last);
    mask_rows(sound, first, last, fill);
  }
}

static int gain_now(const SoundStep *step, SampleKey sample, Sound *sound) {
  Random random = random_at(step->key, sample);
  double decibels = step->low + (step->high - step->low) * uniform(&random);
  multiply(sound->floats.at, sound_size(sound), (float)pow(10.0, decibels / 20.0));
  return FINE;
}

static int normalize_now(const SoundStep *step, SoundMemory *m) {
  if (step->own) return normalize_alone(&m->now, &m->scratch);
  size_t count = sound_size(&m->now);
  subtract(m->now.floats.at, count, step->minus);
  multiply(m->now.floats.at, count, step->times);
  return FINE;
}

/* Run one step on the sound of `m`. Returns FINE, or LEFT if Python must do it. */
static int run_sound_step(const SoundStep *step, SampleKey sample, SoundMemory *m) {
  if (m->now.axes != (step->kind == MASK ? 3 : 2) && step->kind != NORMALIZE) return LEFT;
  switch (step->kind) {
    case RESAMPLE_TO: return resample_now(step->from_rate, step->to_rate, m);
    case RANDOM_PLACE:
    case FIXED_PLACE:
    case PAD_ONLY: return place_now(step, sample, m);
    case MIX:
      /* NumPy adds up a single frame of many channels in another order. */
      if (m->now.shape[0] > 1 && m->now.shape[1] == 1) return LEFT;
      mix_channels(&m->now);
      return FINE;
    case GAIN: return gain_now(step, sample, &m->now);
    case NORMALIZE: return normalize_now(step, m);
    case MEL:
      if (mel_of(&step->mel, &m->now, &m->scratch, &m->next)) return LEFT;
      swap_sounds(m);
      return FINE;
    case MASK: mask_now(step, sample, &m->now); return FINE;
    default: return LEFT;
  }
}

/* Copy a sound that was kept: (channels, frames) or, with a third number, (channels, mels, steps). */
static int copy_sound(const float *from, const int *shape, Sound *to) {
  *to = (Sound){to->floats, shape[2] ? 3 : 2, {shape[0], shape[1], shape[2]}};
  if (room_for(&to->floats, sound_size(to))) return LEFT;
  memcpy(to->floats.at, from, sound_size(to) * sizeof(float));
  return FINE;
}

/* Prepare one sample; the result is `m->now`. `shape`: of a sound that was kept; shape[0] is 0 for the
   bytes of a file. `spent`: nanoseconds of each step are added. */
static int run_sound(const SoundProgram *program, SampleKey sample, const uint8_t *data, size_t length,
                     const int *shape, SoundMemory *m, uint64_t *spent) {
  int first = 0;
  uint64_t before = now_ns(), now;
  if (shape[0]) {
    if (copy_sound((const float *)data, shape, &m->now)) return LEFT;
  } else {
    const SoundStep *step = program->step;
    uint32_t rate;
    if (!program->count || step->kind != DECODE) return LEFT;
    if (decode_sound(data, length, step->mono, &m->scratch, &m->now, &rate)) return LEFT;
    if (step->rate && resample_now((int)rate, step->rate, m)) return LEFT;
    spent[0] += (now = now_ns()) - before;
    before = now;
    first = 1;
  }
  for (int i = first; i < program->count; i++) {
    if (run_sound_step(program->step + i, sample, m)) return LEFT;
    spent[i] += (now = now_ns()) - before;
    before = now;
  }
  return FINE;
}
