/* One sample of a pipeline whose operations are all in this kernel: draw its parameters, decode,
 * crop, resize, flip, augment, and write its row.
 *
 * The parameters have the bits of `Operation.draw` in image/geometry.py and image/augment.py, and the
 * frames those of `Frame`. Whatever is unusual is left to Python (`LEFT`): other formats, damaged
 * files, padding, a second resize, a picture above the limit, a result of another size.
 *
 * Does not depend on Python.
 */
#include <math.h>
#include <time.h>

#include "random.h"

enum { LEFT = -1 };

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#include "sound/sound.h"
#include "sound/wav.h"
#include "sound/fft.h"
#include "sound/resample.h"
#include "sound/mel.h"
#include "sound/program.h"

enum { RESIZE, RESIZE_SHORT, CENTER_CROP, RANDOM_CROP, RANDOM_RESIZED_CROP, FRAMINGS };
enum { NO_AUGMENT, RAND_AUGMENT, AUTO_AUGMENT, TRIVIAL_AUGMENT };

#define MOST_FRAMINGS 8
#define MOST_CHANGES 32
#define POLICY_PAIRS 25
#define STRENGTHS 10
#define ATTEMPTS 10
/* RandAugment and TrivialAugment choose from the changes before INVERT. */
#define CHOICES 14

typedef struct {
  int kind, height, width;
  double scale[2], ratio[2]; /* of RANDOM_RESIZED_CROP */
  StageKey key;
} Framing;

/* The magnitudes of changes at full strength: `Space` in image/augment.py. */
typedef struct {
  double shear, shift, turn, tone, bits;
  int shift_of_side;
} Space;

typedef struct {
  double code, probability, strength;
} PolicyChange;

typedef struct {
  int kind, number, bins;
  double strength; /* of RAND_AUGMENT */
  Space space;
  PolicyChange policy[POLICY_PAIRS][2];
  uint8_t fill[3];
  StageKey key;
} Augment;

typedef struct {
  int decodes; /* the input is a JPEG, and not pixels */
  int64_t most_pixels;
  int framings;
  Framing framing[MOST_FRAMINGS];
  int flips;
  double flip;
  StageKey flip_key;
  Augment augment;
  int normal; /* floats by this table */
  float table[768];
  int indexed; /* crops: the JPEG index saves time */
} Program;

/* `Frame` of image/geometry.py: crop the box, resize it to the full size, keep the part. */
typedef struct {
  Box box, part;
  int full_height, full_width;
} Frame;

static int cut_frame(Frame *f, Box box) {
  if (box.top < 0 || box.left < 0 || box.top + box.height > f->part.height ||
      box.left + box.width > f->part.width)
    return LEFT;
  f->part = (Box){f->part.top + box.top, f->part.left + box.left, box.height, box.width};
  return FINE;
}

static int resize_frame(Frame *f, int height, int width) {
  if (f->full_height != f->box.height || f->full_width != f->box.width) return LEFT;
  f->box = (Box){f->box.top + f->part.top, f->box.left + f->part.left, f->part.height,
                 f->part.width};
  f->full_height = height;
  f->full_width = width;
  f->part = (Box){0, 0, height, width};
  return FINE;
}

/* Python's round(): halves go to the even number. */
static int rounded(double value) { return (int)rint(value); }

static Box random_box(const Framing *by, Random *random, int rows, int columns) {
  double area = (double)rows * columns;
  for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
    double part = uniform(random), turn = uniform(random);
    double down = uniform(random), across = uniform(random);
    double target = area * (by->scale[0] + (by->scale[1] - by->scale[0]) * part);
    double ratio = by->ratio[0] * pow(by->ratio[1] / by->ratio[0], turn);
    double width = rint(sqrt(target * ratio)), height = rint(sqrt(target / ratio));
    if (width > 0 && width <= columns && height > 0 && height <= rows)
      return (Box){(int)(down * (rows - (int)height + 1)), (int)(across * (columns - (int)width + 1)),
                   (int)height, (int)width};
  }
  int height = rows, width = columns;
  double narrow = by->ratio[0], wide = by->ratio[1];
  if (columns < narrow * rows) {
    height = rounded(columns / narrow);
    if (height < 1) height = 1;
  } else if (columns > wide * rows) {
    width = rounded(rows * wide);
    if (width < 1) width = 1;
  }
  return (Box){(rows - height) / 2, (columns - width) / 2, height, width};
}

static int frame_by(const Framing *by, SampleKey sample, Frame *f) {
  int rows = f->part.height, columns = f->part.width;
  Random random;
  Box box;
  switch (by->kind) {
    case RESIZE: return resize_frame(f, by->height, by->width);
    case RESIZE_SHORT: {
      double longer = rows <= columns ? (double)by->height * columns / rows
                                      : (double)by->height * rows / columns;
      if (longer > 65535) return LEFT;
      return rows <= columns ? resize_frame(f, by->height, (int)longer)
                             : resize_frame(f, (int)longer, by->height);
    }
    case CENTER_CROP:
      box = (Box){rounded((rows - by->height) / 2.0), rounded((columns - by->width) / 2.0),
                  by->height, by->width};
      return cut_frame(f, box);
    case RANDOM_CROP: {
      if (rows < by->height || columns < by->width) return LEFT;
      random = random_at(by->key, sample);
      double down = uniform(&random), across = uniform(&random);
      box = (Box){(int)(down * (rows - by->height + 1)), (int)(across * (columns - by->width + 1)),
                  by->height, by->width};
      return cut_frame(f, box);
    }
    default:
      random = random_at(by->key, sample);
      return cut_frame(f, random_box(by, &random, rows, columns)) ||
                     resize_frame(f, by->height, by->width)
                 ? LEFT
                 : FINE;
  }
}

/* `Space.step` of image/augment.py. */
static Change change_of(const Space *space, int code, double strength, int negative, int height,
                        int width) {
  double most;
  switch (code) {
    case IDENTITY:
    case AUTOCONTRAST:
    case EQUALIZE:
    case INVERT: return (Change){code, 0.0};
    case POSTERIZE: return (Change){code, 8 - rint(space->bits * strength)};
    case SOLARIZE: return (Change){code, 255.0 * (1.0 - strength)};
    case SHEAR_X:
    case SHEAR_Y: most = space->shear; break;
    case TRANSLATE_X: most = space->shift_of_side ? space->shift * width : space->shift; break;
    case TRANSLATE_Y: most = space->shift_of_side ? space->shift * height : space->shift; break;
    case ROTATE: most = space->turn; break;
    default: most = space->tone;
  }
  return (Change){code, negative ? -most * strength : most * strength};
}

/* Draw the changes of one sample; returns their number. */
static int draw_changes(const Augment *by, SampleKey sample, int height, int width,
                        Change *changes) {
  Random random = random_at(by->key, sample);
  const Space *space = &by->space;
  if (by->kind == RAND_AUGMENT) {
    for (int i = 0; i < by->number; i++) {
      double which = uniform(&random), way = uniform(&random);
      changes[i] = change_of(space, (int)(which * CHOICES), by->strength, way < 0.5, height, width);
    }
    return by->number;
  }
  if (by->kind == TRIVIAL_AUGMENT) {
    double which = uniform(&random), strong = uniform(&random), way = uniform(&random);
    double strength = (double)(int)(strong * by->bins) / (by->bins - 1);
    changes[0] = change_of(space, (int)(which * CHOICES), strength, way < 0.5, height, width);
    return 1;
  }
  int number = 0;
  double drawn[5];
  for (int i = 0; i < 5; i++) drawn[i] = uniform(&random);
  const PolicyChange *pair = by->policy[(int)(drawn[0] * POLICY_PAIRS)];
  for (int i = 0; i < 2; i++)
    if (drawn[1 + i] < pair[i].probability)
      changes[number++] = change_of(space, (int)pair[i].code, pair[i].strength / (STRENGTHS - 1),
                                    drawn[3 + i] < 0.5, height, width);
  return number;
}

/* The frame and the flip of a picture; LEFT if Python must do it. */
static int draw_frame(const Program *program, SampleKey sample, int rows, int columns, Frame *f,
                      int *flip) {
  Box whole = {0, 0, rows, columns};
  *f = (Frame){whole, whole, rows, columns};
  for (int i = 0; i < program->framings; i++)
    if (frame_by(program->framing + i, sample, f)) return LEFT;
  *flip = 0;
  if (program->flips) {
    Random random = random_at(program->flip_key, sample);
    *flip = uniform(&random) < program->flip;
  }
  return FINE;
}

/* Where a sample is written: bytes (height, width, 3) or floats (3, height, width). */
typedef struct {
  int height, width;
  void *at;
} Place;

/* An input: the bytes of a file or, with a shape, what was kept of a sample: pixels (height, width), or a
   sound. */
typedef struct {
  const uint8_t *data;
  size_t length;
  int shape[3];
} Input;

/* Memory of one worker that is used for one sample after the other. */
typedef struct {
  uint8_t *file, *pixels;
  size_t file_room, pixels_room;
  IndexEntry *entries;
  SoundMemory sound;
} Memory;

static void free_memory(Memory *m) {
  free(m->file);
  free(m->pixels);
  free(m->entries);
  free_sound_memory(&m->sound);
}

/* Bytes that a worker keeps for the next sample. A file of more is rare. */
#define MOST_KEPT ((size_t)1 << 24)

static void shrink_memory(Memory *m) {
  if (m->file_room > MOST_KEPT) {
    free(m->file);
    m->file = NULL;
    m->file_room = 0;
  }
  if (m->pixels_room > MOST_KEPT) {
    free(m->pixels);
    m->pixels = NULL;
    m->pixels_room = 0;
  }
  shrink_floats(&m->sound.now.floats, MOST_KEPT);
  shrink_floats(&m->sound.next.floats, MOST_KEPT);
  shrink_floats(&m->sound.scratch, MOST_KEPT);
}

static int grow_to(uint8_t **at, size_t *room, size_t wanted) {
  if (*room >= wanted) return FINE;
  free(*at);
  *at = malloc(wanted);
  *room = *at ? wanted : 0;
  return *at ? FINE : NO_MEMORY;
}

/* Augment the pixels into the place. */
static int finish_sample(const Program *program, SampleKey sample, const uint8_t *pixels,
                         Place place) {
  Change changes[MOST_CHANGES];
  Target to = {.height = place.height, .width = place.width, .table = program->table};
  if (program->normal)
    to.floats = place.at;
  else
    to.bytes = place.at;
  int number = draw_changes(&program->augment, sample, place.height, place.width, changes);
  int changed = 0;
  int kind = augment(pixels, changes, (size_t)number, program->augment.fill, to, &changed);
  if (!kind && !program->normal && !changed)
    memcpy(place.at, pixels, (size_t)place.height * place.width * 3);
  return kind;
}

/* The index entries of one file: those known, and after decoding those to keep. */
typedef struct {
  uint64_t key[2];
  IndexEntries known, entries;
  int used; /* whether entries are looked up and collected */
} FileEntries;

/* Look a file up. `copies` is memory for known entries, allocated on first use. */
static void find_entries(FileEntries *file, JpegIndex *index, const uint8_t *data, size_t length,
                         IndexEntry **copies) {
  *file = (FileEntries){.used = index && length >= FEWEST_INDEXED};
  if (file->used && !*copies) *copies = malloc(MOST_ENTRIES * sizeof **copies);
  if (!file->used || !*copies) {
    file->used = 0;
    return;
  }
  key_of(data, length, file->key);
  file->used = index_find(index, file->key, *copies, &file->known.count);
  file->known.at = *copies;
  file->entries = file->known;
}

static void keep_entries(FileEntries *file, JpegIndex *index) {
  if (!file->used || file->entries.at == file->known.at) return;
  index_add(index, file->key, file->entries.at, file->entries.count);
  free(file->entries.at);
}

/* Decode or resample the frame of one input into the target. */
static int write_frame(const Program *program, Input input, const Frame *f, Target to,
                       JpegIndex *index, Memory *memory, char *why) {
  if (!program->decodes)
    return resample(input.data, input.shape[0], input.shape[1], f->box, to, why);
  FileEntries file;
  find_entries(&file, program->indexed ? index : NULL, input.data, input.length, &memory->entries);
  int kind = region(input.data, input.length, f->box, to, file.used ? &file.entries : NULL, why);
  keep_entries(&file, index);
  return kind;
}

/* The frame of one input, and whether to flip it; LEFT if Python must do it. */
static int frame_of(const Program *program, SampleKey sample, Input input, Frame *f, int *flip) {
  int rows = input.shape[0], columns = input.shape[1], components;
  if (program->decodes && frame_size(input.data, input.length, &rows, &columns, &components))
    return LEFT;
  if (program->decodes && (int64_t)rows * columns > program->most_pixels) return LEFT;
  return draw_frame(program, sample, rows, columns, f, flip);
}

/* Write a framed sample to its place. Returns FINE, or LEFT if Python must do it. `framed`: when its
   pixels were there, if they are augmented after that. */
static int write_sample(const Program *program, SampleKey sample, Input input, const Frame *f,
                        int flip, Place place, JpegIndex *index, Memory *memory,
                        uint64_t *framed) {
  char why[JMSG_LENGTH_MAX];
  Target to = {.height = place.height, .width = place.width, .flip = flip};
  to.full_height = f->full_height;
  to.full_width = f->full_width;
  to.top = f->part.top;
  to.left = f->part.left;
  if (program->augment.kind) {
    if (grow_to(&memory->pixels, &memory->pixels_room, (size_t)place.height * place.width * 3))
      return LEFT;
    to.bytes = memory->pixels;
  } else if (program->normal) {
    to.floats = place.at;
    to.table = program->table;
  } else {
    to.bytes = place.at;
  }
  if (write_frame(program, input, f, to, index, memory, why)) return LEFT;
  if (!program->augment.kind) return FINE;
  *framed = now_ns();
  return finish_sample(program, sample, memory->pixels, place) ? LEFT : FINE;
}

/* Prepare one sample in its row. Returns FINE, or LEFT if Python must do it. */
static int run_program(const Program *program, SampleKey sample, Input input, Place place,
                       JpegIndex *index, Memory *memory, uint64_t *framed) {
  Frame f;
  int flip;
  if (frame_of(program, sample, input, &f, &flip)) return LEFT;
  if (f.part.height != place.height || f.part.width != place.width) return LEFT;
  return write_sample(program, sample, input, &f, flip, place, index, memory, framed);
}

/* What a head made of a sample, of a size that is known when the sample is read: bytes (height, width, 3),
   or floats of a sound, whose shape has 0 in place of a third axis that it does not have. */
typedef struct {
  void *at;
  int shape[3], floats;
} Made;

/* Prepare one sample in memory of its own, which the caller frees. */
static int run_head(const Program *program, SampleKey sample, Input input, JpegIndex *index,
                    Memory *memory, Made *made, uint64_t *framed) {
  Frame f;
  int flip;
  if (frame_of(program, sample, input, &f, &flip)) return LEFT;
  *made = (Made){malloc((size_t)f.part.height * f.part.width * 3), {f.part.height, f.part.width, 3}, 0};
  if (!made->at) return LEFT;
  Place place = {f.part.height, f.part.width, made->at};
  return write_sample(program, sample, input, &f, flip, place, index, memory, framed);
}

/* The same for a sound. */
static int run_sound_head(const SoundProgram *program, SampleKey sample, Input input, Memory *memory,
                          Made *made, uint64_t *spent) {
  SoundMemory *m = &memory->sound;
  if (run_sound(program, sample, input.data, input.length, input.shape, m, spent)) return LEFT;
  size_t size = sound_size(&m->now) * sizeof(float);
  *made = (Made){malloc(size), {m->now.shape[0], m->now.shape[1], m->now.axes == 3 ? m->now.shape[2] : 0}, 1};
  if (!made->at) return LEFT;
  memcpy(made->at, m->now.floats.at, size);
  return FINE;
}

/* Prepare one sound in its row, which has this shape. */
static int run_sound_program(const SoundProgram *program, SampleKey sample, Input input, const int *shape,
                             void *row, Memory *memory, uint64_t *spent) {
  SoundMemory *m = &memory->sound;
  if (run_sound(program, sample, input.data, input.length, input.shape, m, spent)) return LEFT;
  int axes = shape[2] ? 3 : 2;
  if (m->now.axes != axes || memcmp(m->now.shape, shape, (size_t)axes * sizeof *shape)) return LEFT;
  memcpy(row, m->now.floats.at, sound_size(&m->now) * sizeof(float));
  return FINE;
}
