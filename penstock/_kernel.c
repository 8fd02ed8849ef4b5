/* Decodes the part of a JPEG that a crop needs, resizes it and flips it, in one pass over few rows.
 *
 * Entropy decoding is the floor: a baseline JPEG must be read from its start. All else is left out
 * where it can be: columns beside the crop and rows above it are not transformed, rows below it are
 * not read, and a large shrink is begun inside libjpeg. The rows that come out of libjpeg meet the
 * vertical filter while they are in the first-level cache, and the horizontal filter runs over
 * sixteen output rows at once, turned on their side so that both filters are the same loop.
 *
 * The core, up to the line that says Python, knows nothing of Python, so that it can be fuzzed alone.
 */
#ifndef PENSTOCK_FUZZ
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "libjpeg-turbo 2.0 or later is needed"
#endif

/* One build serves every x86-64: the loader picks the AVX2 loops where the processor has them.
   Sanitizers cannot run before the loader does. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(PENSTOCK_FUZZ)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* What is one block in use has forbidden ground between its parts when it is fuzzed. */
#ifdef PENSTOCK_FUZZ
#include <sanitizer/asan_interface.h>
#define GAP 1024
#define FORBID(from, size) ASAN_POISON_MEMORY_REGION(from, size)
#else
#define GAP 0
#define FORBID(from, size)
#endif

#define INLINE static inline __attribute__((always_inline))

enum { FINE, DAMAGED, UNSUPPORTED, OUTSIDE, NO_MEMORY };

/* An image beyond these is refused: 2**28 pixels would be 0.8 GB decoded. A progressive image keeps
   all its coefficients (6 bytes a pixel) until the last scan, and each scan is a pass over them. */
#define MOST_PIXELS ((uint64_t)1 << 28)
#define MOST_COEFFICIENT_BYTES (1L << 28)
#define MOST_SCANS 500
/* What a call may allocate for itself, apart from libjpeg. Photographs need some 100 KB. */
#define MOST_SCRATCH ((size_t)1 << 26)

typedef struct {
  int top, left, height, width;
} Box;

/* Where pixels go: bytes (height, width, 3), or floats (3, height, width) by a table (3, 256). */
typedef struct {
  int height, width;
  uint8_t *bytes;
  float *floats;
  const float *table;
} Target;

/* ------------------------------------------------------------------------------- the filters */

/* Weights are fixed point with 15 bits and pixels enter with 8, so that the high half of their
   product is one instruction on 16 bits everywhere; sums have 7 bits below the point. Each product
   is cut off and not rounded, which loses half a bit on average: HALF gives that back. */
#define ONE (1 << 15)
#define HALF(taps) (uint16_t)(64 + (taps) / 2)
/* libjpeg may shrink as long as so much is left to the filter: with 1, photographs differ from PIL's
   by 1.2 grey levels on average, with 2 by 0.7. */
#define LEAVE 2
#define LANES 16
#define BLOCK (3 * LANES)

typedef struct {
  int count; /* of output pixels */
  int taps;  /* the same for all: the loops are compiled for each small number of taps */
  int *first;
  uint16_t *weights;
} Axis;

static size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

/* How many of libjpeg's pixels, each `shrink` wide, one output pixel can touch. */
static int taps_of(int inputs, double scale, int shrink) {
  double support = scale > 1 ? scale : 1;
  double most = shrink > 1 ? ceil(2 * support / shrink) + 1 : ceil(2 * support);
  return most < inputs ? (int)most : inputs;
}

/* PIL's and torchvision's antialiased bilinear: a triangle as wide as the shrink asks, or bilinear
   interpolation where the image grows. The box begins at `start` and has `length` pixels. Where
   libjpeg has shrunk already, each of its pixels weighs what all those it stands for would. */
static void weigh(Axis *axis, int start, int length, int shrink, int flip, double *scratch) {
  double scale = (double)length / axis->count, support = scale > 1 ? scale : 1;
  int taps = axis->taps, origin = start / shrink;
  int inputs = (start + length + shrink - 1) / shrink - origin;
  for (int i = 0; i < axis->count; i++) {
    double centre = (i + 0.5) * scale, sum = 0;
    /* The pixels whose middles lie within the triangle; on its rim they weigh nothing. */
    int low = (int)floor(centre - support - 0.5) + 1, high = (int)ceil(centre + support - 0.5);
    if (low < 0) low = 0;
    if (high > length) high = length;
    int first = (start + low) / shrink - origin;
    if (first > inputs - taps) first = inputs - taps;
    memset(scratch, 0, sizeof(double) * taps);
    for (int x = low; x < high; x++) {
      double weight = support - fabs(x + 0.5 - centre);
      scratch[(start + x) / shrink - origin - first] += weight;
      sum += weight;
    }
    int at = flip ? axis->count - 1 - i : i;
    uint16_t *weights = axis->weights + (size_t)at * taps;
    int left = ONE, heaviest = 0;
    for (int k = 0; k < taps; k++) {
      weights[k] = (uint16_t)(scratch[k] / sum * ONE + 0.5);
      left -= weights[k];
      if (weights[k] > weights[heaviest]) heaviest = k;
    }
    weights[heaviest] = (uint16_t)(weights[heaviest] + left);
    axis->first[at] = first;
  }
}

INLINE uint16_t product(uint8_t pixel, uint16_t weight) {
  return (uint16_t)((uint32_t)(uint16_t)(pixel << 8) * weight >> 16);
}

/* out[j] = sum over taps of weights[k] * row_k[j], the rows being `step` bytes apart. */
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

WIDE static void blend_columns(uint8_t *out, const uint8_t *turned, const Axis *across,
                               const uint8_t **columns) {
  int taps = across->taps;
  for (int i = 0; i < across->count; i++) {
    const uint8_t *from = turned + (size_t)across->first[i] * BLOCK;
    for (int k = 0; k < taps; k++) columns[k] = from + (size_t)k * BLOCK;
    blend(out + (size_t)i * BLOCK, columns, across->weights + (size_t)i * taps, taps, BLOCK);
  }
}

/* ------------------------------------------------------------------------------- turning */

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

/* 16 rows of 16 bytes, turned: four rounds of interleaving each row with the one 8 further on. */
INLINE void turn_tile(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
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

static void turn_in(uint8_t *turned, const uint8_t *rows, size_t stride, size_t count) {
  for (size_t j = 0; j < count; j += 16) turn_tile(turned + j * LANES, LANES, rows + j, stride);
}

/* ------------------------------------------------------------------------------- the decoder */

typedef struct {
  struct jpeg_error_mgr manager;
  jmp_buf back;
  int kind;
  char *why;
} Trouble;

typedef struct {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_progress_mgr progress;
  Trouble trouble;
  uint8_t *scratch;
} Decoder;

static void give_up(j_common_ptr jpeg, int kind) {
  Trouble *trouble = (Trouble *)jpeg->err;
  trouble->kind = kind;
  (*jpeg->err->format_message)(jpeg, trouble->why);
  longjmp(trouble->back, 1);
}

/* What is damaged is damaged for every decoder. All else (a marker, a table, a kind of JPEG that
   this libjpeg refuses) is left to the caller's other road, whose word is final. */
static void on_error(j_common_ptr jpeg) {
  if (jpeg->err->msg_code == JERR_NO_BACKING_STORE) {
    /* What libjpeg says when it may not have the memory it wants. */
    jpeg->err->msg_code = JERR_OUT_OF_MEMORY;
    jpeg->err->msg_parm.i[0] = 0;
    give_up(jpeg, UNSUPPORTED);
  }
  give_up(jpeg, jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : UNSUPPORTED);
}

static void on_message(j_common_ptr jpeg, int level) {
  if (level >= 0) return;
  switch (jpeg->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:
      return;
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
      give_up(jpeg, DAMAGED);
      break;
    default:
      give_up(jpeg, UNSUPPORTED);
  }
}

static void on_output(j_common_ptr jpeg) { (void)jpeg; }

static void on_progress(j_common_ptr jpeg) {
  if (jpeg->is_decompressor && ((j_decompress_ptr)jpeg)->input_scan_number > MOST_SCANS) {
    Trouble *trouble = (Trouble *)jpeg->err;
    trouble->kind = UNSUPPORTED;
    snprintf(trouble->why, JMSG_LENGTH_MAX, "it has more than %d scans", MOST_SCANS);
    longjmp(trouble->back, 1);
  }
}

static int refuse(Decoder *d, int kind, const char *why) {
  snprintf(d->trouble.why, JMSG_LENGTH_MAX, "%s", why);
  return kind;
}

/* Rows below the crop are never read, so a file cut short there would go unnoticed: its end must
   be marked. Within entropy-coded data these two bytes cannot stand side by side. */
static int has_end(const uint8_t *from, size_t length) {
  for (size_t i = length; i >= 2; i--)
    if (from[i - 2] == 0xFF && from[i - 1] == 0xD9) return 1;
  return 0;
}

static int decode(Decoder *d, const uint8_t *data, size_t length, Box box, Target to, int flip) {
  j_decompress_ptr jpeg = &d->jpeg;
  jpeg->err = jpeg_std_error(&d->trouble.manager);
  d->trouble.manager.error_exit = on_error;
  d->trouble.manager.emit_message = on_message;
  d->trouble.manager.output_message = on_output;
  if (setjmp(d->trouble.back)) return d->trouble.kind;

  jpeg_create_decompress(jpeg);
  d->progress.progress_monitor = on_progress;
  jpeg->progress = &d->progress;
  jpeg->mem->max_memory_to_use = MOST_COEFFICIENT_BYTES;
  jpeg_mem_src(jpeg, (uint8_t *)data, length);
  jpeg_read_header(jpeg, TRUE);

  if (!has_end(data + (length - jpeg->src->bytes_in_buffer), jpeg->src->bytes_in_buffer))
    return refuse(d, DAMAGED, "Premature end of JPEG file");
  if ((uint64_t)jpeg->image_width * jpeg->image_height > MOST_PIXELS)
    return refuse(d, UNSUPPORTED, "it has more than 2**28 pixels");
  if (jpeg->arith_code) return refuse(d, UNSUPPORTED, "it is coded arithmetically");
  if (jpeg->data_precision != 8) return refuse(d, UNSUPPORTED, "its samples are not of 8 bits");
  if (jpeg->jpeg_color_space != JCS_GRAYSCALE && jpeg->jpeg_color_space != JCS_YCbCr &&
      jpeg->jpeg_color_space != JCS_RGB)
    return refuse(d, UNSUPPORTED, "its colours are neither grey, YCbCr nor RGB");
  if (box.top < 0 || box.left < 0 || box.height < 1 || box.width < 1 ||
      box.height > (int)jpeg->image_height - box.top ||
      box.width > (int)jpeg->image_width - box.left)
    return refuse(d, OUTSIDE, "the box does not lie within the image");

  /* libjpeg makes up for coarser colour only where it is so by the same factor down and across. */
  int leave = jpeg->max_h_samp_factor == jpeg->max_v_samp_factor ? LEAVE : 2 * LEAVE;
  int shrink = jpeg->max_h_samp_factor > 2 || jpeg->max_v_samp_factor > 2 ? 1 : 8;
  while (shrink > 1 && (box.height < (int64_t)leave * shrink * to.height ||
                        box.width < (int64_t)leave * shrink * to.width))
    shrink /= 2;
  jpeg->scale_num = 8 / shrink;
  jpeg->scale_denom = 8;
  jpeg->out_color_space = JCS_RGB;
  jpeg->dct_method = JDCT_ISLOW;
  jpeg->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(jpeg);

  /* The box among the pixels that libjpeg gives: those it touches. */
  int top = box.top / shrink, left = box.left / shrink;
  int bottom = (box.top + box.height + shrink - 1) / shrink;
  int right = (box.left + box.width + shrink - 1) / shrink;
  if (bottom > (int)jpeg->output_height) bottom = (int)jpeg->output_height;
  if (right > (int)jpeg->output_width) right = (int)jpeg->output_width;
  int rows = bottom - top, columns = right - left;

  /* Smooth upsampling of colour looks one sample to either side. */
  int margin = 2;
  JDIMENSION from = left > margin ? left - margin : 0;
  JDIMENSION width = right + margin < (int)jpeg->output_width ? right + margin - from
                                                              : jpeg->output_width - from;
  jpeg_crop_scanline(jpeg, &from, &width);

  double down_scale = (double)box.height / to.height, across_scale = (double)box.width / to.width;
  Axis down = {.count = to.height, .taps = taps_of(rows, down_scale, shrink)};
  Axis across = {.count = to.width, .taps = taps_of(columns, across_scale, shrink)};
  int most_taps = down.taps > across.taps ? down.taps : across.taps;

  /* libjpeg writes rows that are aligned past the cache, where the filter would wait for them. */
  size_t askew = 4;
  size_t ring_stride = round_up((size_t)jpeg->output_width * 3 + askew, 64);
  size_t row_bytes = (size_t)columns * 3, out_bytes = (size_t)to.width * 3;
  size_t block_stride = round_up(row_bytes, 64);
  size_t out_stride = round_up(out_bytes, 64);
  size_t sizes[] = {
      ring_stride * down.taps,
      block_stride * LANES,
      block_stride * LANES,
      out_stride * LANES,
      out_stride * LANES,
      round_up(sizeof(int) * down.count, 64),
      round_up(sizeof(int) * across.count, 64),
      round_up(sizeof(uint16_t) * (size_t)down.count * down.taps, 64),
      round_up(sizeof(uint16_t) * (size_t)across.count * across.taps, 64),
      round_up(sizeof(double) * most_taps, 64),
      round_up(sizeof(void *) * most_taps, 64),
  };
  enum { RING, ROWS, TURNED, OUT, OUT_TURNED, FIRST_D, FIRST_A, WEIGHTS_D, WEIGHTS_A, DOUBLES,
         POINTERS, PARTS };
  size_t total = 64;
  for (int i = 0; i < PARTS; i++) total += sizes[i] + GAP;
  if (total > MOST_SCRATCH) return refuse(d, UNSUPPORTED, "so large a shrink needs too much memory");
  d->scratch = malloc(total);
  if (!d->scratch) return refuse(d, NO_MEMORY, "out of memory");
  uint8_t *part[PARTS], *next = (uint8_t *)round_up((size_t)d->scratch, 64);
  for (int i = 0; i < PARTS; i++) {
    part[i] = next;
    next += sizes[i] + GAP;
    FORBID(part[i] + sizes[i], GAP);
  }
  memset(part[ROWS], 0, sizes[ROWS]);

  down.first = (int *)part[FIRST_D];
  down.weights = (uint16_t *)part[WEIGHTS_D];
  across.first = (int *)part[FIRST_A];
  across.weights = (uint16_t *)part[WEIGHTS_A];
  double *doubles = (double *)part[DOUBLES];
  const uint8_t **pointers = (const uint8_t **)part[POINTERS];
  weigh(&down, box.top, box.height, shrink, 0, doubles);
  weigh(&across, box.left, box.width, shrink, flip, doubles);

  if (top) jpeg_skip_scanlines(jpeg, top);
  int have = 0; /* rows of the box read so far */
  int filled = 0;
  for (int y = 0; y < to.height; y++) {
    while (have < down.first[y] + down.taps) {
      JSAMPROW row = part[RING] + askew + (have % down.taps) * ring_stride;
      if (jpeg_read_scanlines(jpeg, &row, 1) != 1)
        return refuse(d, DAMAGED, "Premature end of JPEG file");
      have++;
    }
    for (int k = 0; k < down.taps; k++)
      pointers[k] = part[RING] + askew + ((down.first[y] + k) % down.taps) * ring_stride +
                    (size_t)(left - (int)from) * 3;
    blend_rows(part[ROWS] + filled * block_stride, pointers,
               down.weights + (size_t)y * down.taps, down.taps, (int)row_bytes);
    filled++;
    if (filled < LANES && y + 1 < to.height) continue;

    turn_in(part[TURNED], part[ROWS], block_stride, row_bytes);
    blend_columns(part[OUT_TURNED], part[TURNED], &across, pointers);
    for (size_t j = 0; j < out_bytes; j += 16)
      turn_tile(part[OUT] + j, out_stride, part[OUT_TURNED] + j * LANES, LANES);
    for (int i = 0; i < filled; i++) {
      size_t at = (size_t)(y + 1 - filled + i);
      const uint8_t *out = part[OUT] + i * out_stride;
      if (to.bytes) {
        memcpy(to.bytes + at * out_bytes, out, out_bytes);
      } else {
        for (int c = 0; c < 3; c++) {
          const float *table = to.table + 256 * c;
          float *plane = to.floats + ((size_t)c * to.height + at) * to.width;
          for (int x = 0; x < to.width; x++) plane[x] = table[out[3 * x + c]];
        }
      }
    }
    filled = 0;
  }
  return FINE;
}

/* Decode a box of a JPEG into a target. `why` has room for JMSG_LENGTH_MAX characters. */
static int region(const uint8_t *data, size_t length, Box box, Target to, int flip, char *why) {
  Decoder d;
  memset(&d, 0, sizeof d);
  d.trouble.why = why;
  int kind = decode(&d, data, length, box, to, flip);
  jpeg_destroy_decompress(&d.jpeg);
  free(d.scratch);
  return kind;
}

/* Height, width and components, from the frame header alone. */
static int frame_size(const uint8_t *data, size_t length, int *height, int *width, int *components) {
  if (length < 4 || data[0] != 0xFF || data[1] != 0xD8) return UNSUPPORTED;
  size_t at = 2;
  for (;;) {
    while (at < length && data[at] != 0xFF) at++;
    while (at < length && data[at] == 0xFF) at++;
    if (at >= length) return DAMAGED;
    int marker = data[at++];
    if (marker == 0 || marker == 1 || (marker >= 0xD0 && marker <= 0xD7)) continue;
    if (marker == 0xD9 || marker == 0xDA) return DAMAGED;
    if (length - at < 2) return DAMAGED;
    size_t segment = (size_t)data[at] << 8 | data[at + 1];
    if (segment < 2 || segment > length - at) return DAMAGED;
    if (marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC) {
      if (segment < 8) return DAMAGED;
      *height = data[at + 3] << 8 | data[at + 4];
      *width = data[at + 5] << 8 | data[at + 6];
      *components = data[at + 7];
      if (!*height || !*width || !*components) return UNSUPPORTED;
      return FINE;
    }
    at += segment;
  }
}

/* ------------------------------------------------------------------------------- Python */
#ifndef PENSTOCK_FUZZ

typedef struct {
  PyObject *damaged, *unsupported;
} State;

static PyObject *fail(PyObject *module, int kind, const char *why) {
  State *state = PyModule_GetState(module);
  switch (kind) {
    case DAMAGED: PyErr_SetString(state->damaged, why); break;
    case OUTSIDE: PyErr_SetString(PyExc_ValueError, why); break;
    case NO_MEMORY: PyErr_NoMemory(); break;
    default: PyErr_SetString(state->unsupported, why);
  }
  return NULL;
}

static PyObject *kernel_size(PyObject *module, PyObject *given) {
  Py_buffer data;
  if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
  int height = 0, width = 0, components = 0;
  int kind = frame_size(data.buf, (size_t)data.len, &height, &width, &components);
  PyBuffer_Release(&data);
  if (kind == DAMAGED) return fail(module, kind, "Premature end of JPEG file");
  if (kind) return fail(module, kind, "it does not begin as a JPEG does, or states no size");
  return Py_BuildValue("(iii)", height, width, components);
}

static int target_of(Py_buffer *out, int normal, Target *to) {
  const char *format = out->format ? out->format : "B";
  if (out->ndim != 3 || strcmp(format, normal ? "f" : "B")) {
    PyErr_Format(PyExc_ValueError, "out must be %s",
                 normal ? "float32 of shape (3, height, width)"
                        : "uint8 of shape (height, width, 3)");
    return -1;
  }
  Py_ssize_t channels = out->shape[normal ? 0 : 2];
  Py_ssize_t height = out->shape[normal ? 1 : 0], width = out->shape[normal ? 2 : 1];
  if (channels != 3 || height < 1 || width < 1 || height > 65535 || width > 65535) {
    PyErr_Format(PyExc_ValueError, "out must have 3 channels (axis %d), and sides of 1 to 65535",
                 normal ? 0 : 2);
    return -1;
  }
  to->height = (int)height;
  to->width = (int)width;
  if (normal)
    to->floats = out->buf;
  else
    to->bytes = out->buf;
  return 0;
}

static PyObject *kernel_region(PyObject *module, PyObject *arguments) {
  PyObject *given, *given_out, *given_table;
  Box box;
  int flip;
  if (!PyArg_ParseTuple(arguments, "OiiiiOpO:region", &given, &box.top, &box.left, &box.height,
                        &box.width, &given_out, &flip, &given_table))
    return NULL;
  Py_buffer data, out, table;
  Target to = {0};
  int normal = given_table != Py_None;
  if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
  PyObject *result = NULL;
  if (PyObject_GetBuffer(given_out, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    goto release_data;
  if (normal) {
    if (PyObject_GetBuffer(given_table, &table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) goto release_out;
    if (table.len != 3 * 256 * (Py_ssize_t)sizeof(float) || strcmp(table.format, "f")) {
      PyErr_SetString(PyExc_ValueError, "table must be float32 of shape (3, 256)");
      goto release_table;
    }
    to.table = table.buf;
  }
  if (target_of(&out, normal, &to)) goto release_table;

  char why[JMSG_LENGTH_MAX] = "";
  int kind;
  Py_BEGIN_ALLOW_THREADS;
  kind = region(data.buf, (size_t)data.len, box, to, flip, why);
  Py_END_ALLOW_THREADS;
  if (kind)
    fail(module, kind, why);
  else
    Py_INCREF(result = Py_None);

release_table:
  if (normal) PyBuffer_Release(&table);
release_out:
  PyBuffer_Release(&out);
release_data:
  PyBuffer_Release(&data);
  return result;
}

static int add_error(PyObject *module, const char *full, const char *name, PyObject **kept) {
  *kept = PyErr_NewException(full, PyExc_ValueError, NULL);
  if (!*kept) return -1;
  return PyModule_AddObjectRef(module, name, *kept);
}

static int kernel_exec(PyObject *module) {
  State *state = PyModule_GetState(module);
  if (add_error(module, "penstock._kernel.Damaged", "Damaged", &state->damaged)) return -1;
  return add_error(module, "penstock._kernel.Unsupported", "Unsupported", &state->unsupported);
}

static int kernel_traverse(PyObject *module, visitproc visit, void *arg) {
  State *state = PyModule_GetState(module);
  Py_VISIT(state->damaged);
  Py_VISIT(state->unsupported);
  return 0;
}

static int kernel_clear(PyObject *module) {
  State *state = PyModule_GetState(module);
  Py_CLEAR(state->damaged);
  Py_CLEAR(state->unsupported);
  return 0;
}

static PyMethodDef methods[] = {
    {"size", kernel_size, METH_O, "size(data) -> (height, width, components)"},
    {"region", kernel_region, METH_VARARGS,
     "region(data, top, left, height, width, out, flip, table) -> None"},
    {0},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, kernel_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "penstock._kernel",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = kernel_traverse,
    .m_clear = kernel_clear,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
#endif
