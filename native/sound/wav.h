/* Decodes plain WAV files, and by functions of libsndfile FLAC files, to floats. What is unusual, damaged
 * or cut short is left to Python (`LEFT`): audio/codec.py decodes it, or says what is wrong with it.
 */
#define SLOWEST_RATE 1000
#define FASTEST_RATE 768000
#define MOST_CHANNELS 64

typedef struct {
  int tag, channels, block, bits;
  uint32_t rate;
} WavFormat;

/* Numbers as they are in the file, (frames, channels). */
typedef struct {
  WavFormat format;
  const uint8_t *data;
  size_t frames;
} WavSound;

static uint32_t little_16(const uint8_t *at) { return (uint32_t)at[0] | (uint32_t)at[1] << 8; }
static uint32_t little_32(const uint8_t *at) { return little_16(at) | little_16(at + 2) << 16; }

/* Sizes from this one up are placeholders: the sound extends to the end of the file. */
#define PLACEHOLDER 0x7FFF0000u
#define EXTENSIBLE 0xFFFE

static int read_format(const uint8_t *chunk, size_t size, WavFormat *format) {
  static const uint8_t guid_tail[14] = {0, 0, 0, 0, 0x10, 0, 0x80, 0, 0, 0xAA, 0, 0x38, 0x9B, 0x71};
  if (size < 16) return LEFT;
  *format = (WavFormat){.tag = (int)little_16(chunk),
                        .channels = (int)little_16(chunk + 2),
                        .rate = little_32(chunk + 4),
                        .block = (int)little_16(chunk + 12),
                        .bits = (int)little_16(chunk + 14)};
  if (format->tag == EXTENSIBLE && size >= 40 && !memcmp(chunk + 26, guid_tail, sizeof guid_tail))
    format->tag = (int)little_16(chunk + 24);
  return FINE;
}

/* The format and the numbers of a WAV file, which must be complete. */
static int find_wav(const uint8_t *data, size_t length, WavSound *sound) {
  if (length < 12 || memcmp(data, "RIFF", 4) || memcmp(data + 8, "WAVE", 4)) return LEFT;
  uint32_t whole = little_32(data + 4);
  int known = 0;
  size_t at = 12;
  while (length - at >= 8) {
    const uint8_t *name = data + at;
    size_t size = little_32(data + at + 4);
    at += 8;
    size_t left = length - at;
    if (!memcmp(name, "data", 4)) {
      if (!known) return LEFT;
      if (size >= PLACEHOLDER || (!size && (!whole || whole == 0xFFFFFFFFu))) size = left;
      const WavFormat *format = &sound->format;
      if (size > left || !format->channels || format->channels > MOST_CHANNELS ||
          format->block != format->bits / 8 * format->channels || !format->block)
        return LEFT;
      sound->data = data + at;
      sound->frames = size / (size_t)format->block;
      return sound->frames ? FINE : LEFT;
    }
    if (size > left) return LEFT;
    if (!memcmp(name, "fmt ", 4)) {
      if (read_format(data + at, size, &sound->format)) return LEFT;
      known = 1;
    }
    if (size + size % 2 > left) return LEFT;
    at += size + size % 2;
  }
  return LEFT;
}

/* Read number `i` of a file, as it is there. Integers of more than 16 bits, and doubles, are doubles, as
   in NumPy's products and sums of them with floats. */
#define READ_8(i) ((float)(data[i] - 128))
#define READ_16(i) ((float)(int16_t)little_16(data + 2 * (i)))
#define READ_24(i) \
  ((double)(int32_t)((uint32_t)data[3 * (i)] << 8 | little_16(data + 3 * (i) + 1) << 16))
#define READ_32(i) ((double)(int32_t)little_32(data + 4 * (i)))

INLINE float float_at(const uint8_t *at) {
  float value;
  memcpy(&value, at, sizeof value);
  return value;
}

INLINE double double_at(const uint8_t *at) {
  double value;
  memcpy(&value, at, sizeof value);
  return value;
}
#define READ_FLOAT(i) float_at(data + 4 * (i))
#define READ_DOUBLE(i) double_at(data + 8 * (i))

/* `_channels_first` of audio/codec.py: scale to -1 to 1, one channel after the other, or their mean. */
#define CONVERT(READ)                                                                    \
  if (mono && channels > 1) {                                                            \
    for (size_t i = 0; i < frames; i++) {                                                \
      float total = (float)READ(i * channels);                                           \
      for (size_t c = 1; c < channels; c++) total = (float)(total + READ(i * channels + c)); \
      out[i] = total * (float)(scale / (double)channels);                                \
    }                                                                                    \
  } else {                                                                               \
    for (size_t c = 0; c < channels; c++)                                                \
      for (size_t i = 0; i < frames; i++)                                                \
        out[c * frames + i] = (float)(READ(i * channels + c) * (float)scale);            \
  }

static int all_finite(const float *at, size_t count) {
  int fine = 1;
  for (size_t i = 0; i < count; i++) fine &= isfinite(at[i]) != 0;
  return fine ? FINE : LEFT;
}

static int convert_wav(const WavSound *sound, int mono, float *out) {
  const uint8_t *data = sound->data;
  size_t channels = (size_t)sound->format.channels, frames = sound->frames;
  double scale = 1.0;
  switch (sound->format.tag * 100 + sound->format.bits) {
    case 108:
      scale = 0x1p-7;
      CONVERT(READ_8);
      return FINE;
    case 116:
      scale = 0x1p-15;
      CONVERT(READ_16);
      return FINE;
    case 124:
      scale = 0x1p-31;
      CONVERT(READ_24);
      return FINE;
    case 132:
      scale = 0x1p-31;
      CONVERT(READ_32);
      return FINE;
    case 332: CONVERT(READ_FLOAT); break;
    case 364: CONVERT(READ_DOUBLE); break;
    default: return LEFT;
  }
  return all_finite(out, (mono ? 1 : channels) * frames);
}

/* ----------------------------------------------------------------------------------- libsndfile */

typedef struct {
  int64_t frames;
  int rate, channels, format, sections, seekable;
} SndInfo;

typedef struct {
  int64_t (*length)(void *);
  int64_t (*seek)(int64_t, int, void *);
  int64_t (*read)(void *, int64_t, void *);
  int64_t (*write)(const void *, int64_t, void *);
  int64_t (*tell)(void *);
} SndCallbacks;

/* Functions of the libsndfile that Python uses; NULL: it has none. Set once, before any job. */
static struct {
  void *(*open)(SndCallbacks *, int, SndInfo *, void *);
  int64_t (*read)(void *, float *, int64_t);
  int (*close)(void *);
} libsndfile;

#define SND_READ 0x10
#define FRAMES_AT_ONCE ((int64_t)1 << 20)
#define FRAMES_FOR_A_BYTE 100

typedef struct {
  const uint8_t *data;
  int64_t length, at;
} SndFile;

static int64_t snd_length(void *file) { return ((SndFile *)file)->length; }
static int64_t snd_tell(void *file) { return ((SndFile *)file)->at; }

static int64_t snd_seek(int64_t offset, int whence, void *given) {
  SndFile *file = given;
  int64_t base = whence == 1 ? file->at : whence == 2 ? file->length : 0, place;
  /* Damaged files make libsndfile seek to before the beginning; nothing happens then. */
  if (!__builtin_add_overflow(base, offset, &place) && place >= 0) file->at = place;
  return file->at;
}

static int64_t snd_read(void *out, int64_t count, void *given) {
  SndFile *file = given;
  int64_t left = file->at < file->length ? file->length - file->at : 0;
  if (count > left) count = left;
  if (count <= 0) return 0;
  memcpy(out, file->data + file->at, (size_t)count);
  file->at += count;
  return count;
}

static int64_t snd_write(const void *from, int64_t count, void *file) {
  (void)from, (void)count, (void)file;
  return 0;
}

static int is_flac(const uint8_t *data, size_t length) {
  return length >= 4 && !memcmp(data, "fLaC", 4);
}

/* Read all frames of an open file, (frames, channels), and write them channel by channel. */
static int read_snd(void *open, const SndInfo *info, size_t bytes, int mono, FloatBuffer *spare, Sound *out) {
  int64_t most = FRAMES_FOR_A_BYTE * (int64_t)bytes;
  if (most < FRAMES_AT_ONCE) most = FRAMES_AT_ONCE;
  if (info->channels < 1 || info->channels > MOST_CHANNELS || info->rate < SLOWEST_RATE ||
      info->rate > FASTEST_RATE || info->frames < 1 || info->frames > most)
    return LEFT;
  size_t channels = (size_t)info->channels, frames = (size_t)info->frames;
  if (room_for(spare, channels * frames) || make_waveform(out, mono ? 1 : info->channels, info->frames))
    return LEFT;
  if (libsndfile.read(open, spare->at, info->frames) != info->frames) return LEFT;
  const uint8_t *data = (const uint8_t *)spare->at;
  WavSound sound = {{3, info->channels, 4 * info->channels, 32, (uint32_t)info->rate}, data, frames};
  return convert_wav(&sound, mono, out->floats.at);
}

static int decode_flac(const uint8_t *data, size_t length, int mono, FloatBuffer *spare, Sound *out,
                       uint32_t *rate) {
  if (!libsndfile.open) return LEFT;
  SndCallbacks callbacks = {snd_length, snd_seek, snd_read, snd_write, snd_tell};
  SndFile file = {data, (int64_t)length, 0};
  SndInfo info = {0};
  void *open = libsndfile.open(&callbacks, SND_READ, &info, &file);
  if (!open) return LEFT;
  int kind = read_snd(open, &info, length, mono, spare, out);
  libsndfile.close(open);
  *rate = (uint32_t)info.rate;
  return kind;
}

/* Decode a file; `rate`: the one in its header. */
static int decode_sound(const uint8_t *data, size_t length, int mono, FloatBuffer *spare, Sound *out,
                        uint32_t *rate) {
  if (is_flac(data, length)) return decode_flac(data, length, mono, spare, out, rate);
  WavSound sound;
  if (find_wav(data, length, &sound)) return LEFT;
  *rate = sound.format.rate;
  if (*rate < SLOWEST_RATE || *rate > FASTEST_RATE) return LEFT;
  if (make_waveform(out, mono ? 1 : sound.format.channels, (int64_t)sound.frames)) return LEFT;
  return convert_wav(&sound, mono, out->floats.at);
}
