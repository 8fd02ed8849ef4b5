/* Decodes the part of a JPEG that a crop needs, resizes it and flips it, in one pass over few rows.
 *
 * Entropy decoding is the floor: a baseline JPEG must be read from its start. All else is left out
 * where it can be: columns beside the crop and rows above it are not transformed, rows below it are
 * not read, and a large shrink is begun inside libjpeg. Decoded rows meet the vertical filter while
 * they are in the first-level cache.
 *
 * libjpeg reads every header. Baseline files of the everyday kind are then decoded without it (see
 * planes.h), which is faster; all others, and whatever is odd, through it.
 *
 * Nothing here knows of Python, so that it can be fuzzed alone.
 */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

#include "../filter.h"
#include "planes.h"

/* Earlier ones have faults where rows are skipped and columns left out. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed"
#endif

/* The fuzzer decodes in both ways, and compares. */
#ifdef PENSTOCK_FUZZ
static int only_libjpeg;
static long decoded_alone;
#define ALONE() decoded_alone++
#else
#define only_libjpeg 0
#define ALONE() (void)0
#endif

enum { FINE, DAMAGED, UNSUPPORTED, OUTSIDE, NO_MEMORY };

/* An image beyond these is refused: 2**28 pixels would be 0.8 GB decoded. A progressive image keeps
   all its coefficients (6 bytes a pixel) until the last scan, and each scan is a pass over them. */
#define MOST_PIXELS ((uint64_t)1 << 28)
#define MOST_COEFFICIENT_BYTES (1L << 28)
#define MOST_SCANS 500
/* What a call may allocate for itself, apart from libjpeg. Photographs need some 100 KB. */
#define MOST_SCRATCH ((size_t)1 << 26)

/* libjpeg may shrink as long as so much is left to the filter: with 1, photographs differ from what
   PIL makes of them by 1.2 grey levels on average, with 2 by 0.7. */
#define LEAVE 2
/* Smooth upsampling of colour looks one sample, two pixels, to either side. */
#define MARGIN 2
/* libjpeg writes rows that are aligned past the cache, where the filter would wait for them. */
#define ASKEW 4
#define ALIGN 64

typedef struct {
  int top, left, height, width;
} Box;

/* Where pixels go: bytes (height, width, 3), or floats (3, height, width) by a table (3, 256). The
   box is resized to the full size, of which this is the part that begins at `top` and `left`. */
typedef struct {
  int height, width, flip;
  int full_height, full_width, top, left;
  uint8_t *bytes;
  float *floats;
  const float *table;
} Target;

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
  Scan *scan; /* what was decoded without libjpeg, if it was */
} Decoder;

/* What is known of a file from earlier looks at it. Marks of another file give other pixels, but
   nothing worse. */
typedef struct {
  Mark *at;
  size_t count;
} Marks;

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

static void drop_scan(Decoder *d) {
  if (d->scan) {
    free(d->scan->memory);
    free(d->scan->marks);
  }
  free(d->scan);
  d->scan = NULL;
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

static int check_places(Decoder *d, int height, int width, Box box, Target to) {
  if (box.top < 0 || box.left < 0 || box.height < 1 || box.width < 1 ||
      box.height > height - box.top || box.width > width - box.left)
    return refuse(d, OUTSIDE, "the box does not lie within the image");
  if (to.top < 0 || to.left < 0 || to.full_height > 65535 || to.full_width > 65535 ||
      to.height > to.full_height - to.top || to.width > to.full_width - to.left)
    return refuse(d, OUTSIDE, "the part does not lie within the resized box");
  return FINE;
}

/* Read the header, and refuse what the rest cannot do. */
static int begin(Decoder *d, const uint8_t *data, size_t length, Box box, Target to) {
  j_decompress_ptr jpeg = &d->jpeg;
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
  return check_places(d, (int)jpeg->image_height, (int)jpeg->image_width, box, to);
}

/* By how much libjpeg itself is to shrink. */
static int choose_shrink(j_decompress_ptr jpeg, Box box, Target to) {
  /* libjpeg makes up for coarser colour only where it is so by the same factor down and across. */
  int leave = jpeg->max_h_samp_factor == jpeg->max_v_samp_factor ? LEAVE : 2 * LEAVE;
  int shrink = jpeg->max_h_samp_factor > 2 || jpeg->max_v_samp_factor > 2 ? 1 : 8;
  while (shrink > 1 && (box.height < (int64_t)leave * shrink * to.full_height ||
                        box.width < (int64_t)leave * shrink * to.full_width))
    shrink /= 2;
  return shrink;
}

/* What one call works in: a ring of decoded rows, a block of output rows that still
   have the width of the box, the same turned, and the block in its final width, turned and not. */
typedef struct {
  Axis down, across;
  uint8_t *ring, *rows, *rows_turned, *out, *out_turned;
  size_t ring_stride, rows_stride, out_stride;
  size_t row_bytes, out_bytes; /* of these strides, how much means something */
  size_t skipped;              /* bytes in a row of the ring before the box begins */
  size_t plane;                /* bytes from red to green to blue in a row; 0 if pixel by pixel */
  int columns;
  Row room;
  const uint8_t **taps;
} Bench;

static int lay_out(Decoder *d, Bench *b, int rows, int columns, Target to, int shrink) {
  b->down.taps = taps_of(&b->down, rows, shrink);
  b->across.taps = taps_of(&b->across, columns, shrink);
  size_t most_taps = b->down.taps > b->across.taps ? b->down.taps : b->across.taps;
  b->plane = d->scan ? round_up((size_t)columns, 16) : 0;
  b->row_bytes = 3 * (d->scan ? b->plane : (size_t)columns);
  b->out_bytes = (size_t)to.width * 3;
  b->ring_stride =
      round_up(d->scan ? b->row_bytes : (size_t)d->jpeg.output_width * 3 + ASKEW, ALIGN);
  b->rows_stride = round_up(b->row_bytes, ALIGN);
  b->out_stride = round_up(b->out_bytes, ALIGN);

  double *doubles;
  struct {
    void *at; /* the pointer that is to point to it */
    size_t size;
  } parts[] = {
      {&b->ring, b->ring_stride * b->down.taps},
      {&b->rows, b->rows_stride * LANES},
      {&b->rows_turned, b->rows_stride * LANES},
      {&b->out, b->out_stride * LANES},
      {&b->out_turned, b->out_stride * LANES},
      {&b->down.first, sizeof(int) * to.height},
      {&b->across.first, sizeof(int) * to.width},
      {&b->down.weights, sizeof(uint16_t) * to.height * b->down.taps},
      {&b->across.weights, sizeof(uint16_t) * to.width * b->across.taps},
      {&b->taps, sizeof(uint8_t *) * most_taps},
      {&doubles, sizeof(double) * most_taps},
      {&b->room.sums, d->scan ? sizeof(int16_t) * (columns / 2 + 4) : 0},
      {&b->room.blue, d->scan ? (size_t)columns + 4 : 0},
      {&b->room.red, d->scan ? (size_t)columns + 4 : 0},
  };
  int count = sizeof parts / sizeof parts[0];
  size_t total = ALIGN;
  for (int i = 0; i < count; i++) total += round_up(parts[i].size, ALIGN) + GAP;
  if (total > MOST_SCRATCH) return refuse(d, UNSUPPORTED, "the shrink needs too much memory");
  d->scratch = malloc(total);
  if (!d->scratch) return refuse(d, NO_MEMORY, "out of memory");
  uint8_t *next = (uint8_t *)round_up((size_t)d->scratch, ALIGN);
  for (int i = 0; i < count; i++) {
    memcpy(parts[i].at, &next, sizeof next);
    uint8_t *end = next + parts[i].size;
    next += round_up(parts[i].size, ALIGN) + GAP;
    FORBID(end, (size_t)(next - end));
  }
  /* The last block may not be full, and is turned as a whole. */
  memset(b->rows, 0, b->rows_stride * LANES);
  memset(b->ring, 0, b->ring_stride * b->down.taps);
  weigh(&b->down, shrink, 0, doubles);
  weigh(&b->across, shrink, to.flip, doubles);
  return FINE;
}

typedef float Floats __attribute__((vector_size(16)));

INLINE void look_up(float *out, const float *table, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  Floats four = {table[a & 255], table[b & 255], table[c & 255], table[d & 255]};
  memcpy(out, &four, sizeof four);
}

/* Row `y` of the target as floats, channel by channel. Four pixels are read and four floats of each
   channel written at a time: a third faster than level by level. */
static void give_row(Target to, int y, const uint8_t *row) {
  size_t plane = (size_t)to.height * to.width;
  float *r = to.floats + (size_t)y * to.width, *g = r + plane, *b = g + plane;
  const float *red = to.table, *green = red + 256, *blue = green + 256;
  int x = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; x + 4 <= to.width; x += 4, row += 12) {
    uint64_t eight;
    uint32_t four;
    memcpy(&eight, row, 8);
    memcpy(&four, row + 8, 4);
    look_up(r + x, red, eight, eight >> 24, eight >> 48, four >> 8);
    look_up(g + x, green, eight >> 8, eight >> 32, eight >> 56, four >> 16);
    look_up(b + x, blue, eight >> 16, eight >> 40, four, four >> 24);
  }
#endif
  for (; x < to.width; x++, row += 3) {
    r[x] = red[row[0]];
    g[x] = green[row[1]];
    b[x] = blue[row[2]];
  }
}

/* Give out `count` rows of a block, the first of which is row `y`. */
static void give_out(Bench *b, Target to, int y, int count) {
  if (b->plane) {
    for (int c = 0; c < 3; c++)
      turn(b->rows_turned + c * LANES, BLOCK * 16, BLOCK, b->rows + c * b->plane, 16,
           b->rows_stride, (size_t)b->columns);
  } else {
    turn(b->rows_turned, LANES * 16, LANES, b->rows, 16, b->rows_stride, b->row_bytes);
  }
  blend_columns(b->out_turned, b->rows_turned, &b->across, b->taps);
  turn(b->out, 16, b->out_stride, b->out_turned, LANES * 16, LANES, b->out_bytes);
  for (int i = 0; i < count; i++) {
    const uint8_t *row = b->out + i * b->out_stride;
    if (to.bytes)
      memcpy(to.bytes + (size_t)(y + i) * b->out_bytes, row, b->out_bytes);
    else
      give_row(to, y + i, row);
  }
}

/* One row of the target, of the rows in `taps`; every full block of them is given out. */
static void blend_row(Bench *b, Target to, int y) {
  int taps = b->down.taps, filled = y % LANES + 1;
  blend_rows(b->rows + (filled - 1) * b->rows_stride, b->taps,
             b->down.weights + (size_t)y * taps, taps, (int)b->row_bytes);
  if (filled == LANES || y + 1 == to.height) give_out(b, to, y + 1 - filled, filled);
}

static int stream(Decoder *d, Bench *b, Target to) {
  int taps = b->down.taps, read = 0;
  for (int y = 0; y < to.height; y++) {
    for (; read < b->down.first[y] + taps; read++) {
      JSAMPROW row = b->ring + (read % taps) * b->ring_stride;
      if (d->scan) {
        rgb_row(d->scan, b->down.from + read, b->across.from, b->columns, row, b->plane,
                b->room);
        continue;
      }
      row += ASKEW;
      if (jpeg_read_scanlines(&d->jpeg, &row, 1) != 1)
        return refuse(d, DAMAGED, "Premature end of JPEG file");
    }
    for (int k = 0; k < taps; k++)
      b->taps[k] = b->ring + ((b->down.first[y] + k) % taps) * b->ring_stride + b->skipped;
    blend_row(b, to, y);
  }
  return FINE;
}

/* Room for the marks of every row that is read, and those there are already. */
static void bring_marks(Scan *scan, const Marks *marks) {
  size_t rows = (size_t)scan->upto_row;
  scan->marks = malloc((marks->count > rows ? marks->count : rows) * sizeof(Mark));
  if (!scan->marks) return;
  if (marks->count) memcpy(scan->marks, marks->at, marks->count * sizeof(Mark));
  scan->known = scan->marked = (int)marks->count;
}

/* Decode the box without libjpeg, where the file is of the everyday kind and nothing is odd. */
static void decode_alone(Decoder *d, Box box, const Marks *marks) {
  const struct jpeg_decompress_struct *jpeg = &d->jpeg;
  if (!everyday(jpeg)) return;
  Scan *scan = d->scan = malloc(sizeof *scan);
  if (!scan) return;
  scan->memory = NULL;
  scan->marks = NULL;
  scan->known = scan->marked = 0;
  size_t planes = plan_scan(scan, jpeg, box.top, box.left, box.top + box.height,
                            box.left + box.width);
  size_t clean = jpeg->src->bytes_in_buffer + BEYOND;
  if (planes + clean <= MOST_SCRATCH && (scan->memory = malloc(planes + clean))) {
    scan->clean = scan->memory + planes;
    if (marks && !scan->restart) bring_marks(scan, marks);
    if (open_scan(scan, jpeg) && decode_scan(scan)) return;
  }
  drop_scan(d);
}

static int decode(Decoder *d, const uint8_t *data, size_t length, Box box, Target to,
                  const Marks *marks) {
  j_decompress_ptr jpeg = &d->jpeg;
  jpeg->err = jpeg_std_error(&d->trouble.manager);
  d->trouble.manager.error_exit = on_error;
  d->trouble.manager.emit_message = on_message;
  d->trouble.manager.output_message = on_output;
  /* Everything that a call allocates hangs on the decoder, which outlives the jump. */
  if (setjmp(d->trouble.back)) return d->trouble.kind;

  int kind = begin(d, data, length, box, to);
  if (kind) return kind;
  int shrink = choose_shrink(jpeg, box, to);
  Bench bench = {
      .down = axis_of(box.top, box.height, to.full_height, to.top, to.height),
      .across = axis_of(box.left, box.width, to.full_width, to.left, to.width),
  };
  /* From here on, only what is touched. */
  box = (Box){bench.down.from, bench.across.from, bench.down.upto - bench.down.from,
              bench.across.upto - bench.across.from};
  if (shrink == 1 && WORTHWHILE && !only_libjpeg) decode_alone(d, box, marks);
  if (d->scan) {
    ALONE();
    bench.columns = box.width;
    kind = lay_out(d, &bench, box.height, box.width, to, shrink);
    return kind ? kind : stream(d, &bench, to);
  }
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
  JDIMENSION from = left > MARGIN ? left - MARGIN : 0;
  JDIMENSION upto = (JDIMENSION)right + MARGIN;
  if (upto > jpeg->output_width) upto = jpeg->output_width;
  JDIMENSION width = upto - from;
  jpeg_crop_scanline(jpeg, &from, &width);

  bench.skipped = ASKEW + (size_t)(left - (int)from) * 3;
  kind = lay_out(d, &bench, bottom - top, right - left, to, shrink);
  if (kind) return kind;
  if (top) jpeg_skip_scanlines(jpeg, top);
  return stream(d, &bench, to);
}

/* Decode a box of a JPEG into a target. `why` has room for JMSG_LENGTH_MAX characters. `marks` may
   be NULL; if there are more of them afterwards, they are the caller's to free. */
static int region(const uint8_t *data, size_t length, Box box, Target to, Marks *marks, char *why) {
  Decoder d;
  memset(&d, 0, sizeof d);
  d.trouble.why = why;
  int kind = decode(&d, data, length, box, to, marks);
  jpeg_destroy_decompress(&d.jpeg);
  Scan *scan = d.scan;
  if (!kind && scan && scan->marked > scan->known) {
    *marks = (Marks){scan->marks, (size_t)scan->marked};
    scan->marks = NULL;
  }
  drop_scan(&d);
  free(d.scratch);
  return kind;
}

/* The same of an image that is decoded already: `height` rows of `width` RGB pixels. */
static int resample(const uint8_t *pixels, int height, int width, Box box, Target to, char *why) {
  Decoder d;
  memset(&d, 0, sizeof d);
  d.trouble.why = why;
  int kind = check_places(&d, height, width, box, to);
  if (kind) return kind;
  Bench b = {
      .down = axis_of(box.top, box.height, to.full_height, to.top, to.height),
      .across = axis_of(box.left, box.width, to.full_width, to.left, to.width),
  };
  kind = lay_out(&d, &b, b.down.upto - b.down.from, b.across.upto - b.across.from, to, 1);
  const uint8_t *from = pixels + ((size_t)b.down.from * width + b.across.from) * 3;
  for (int y = 0; !kind && y < to.height; y++) {
    for (int k = 0; k < b.down.taps; k++)
      b.taps[k] = from + (size_t)(b.down.first[y] + k) * width * 3;
    blend_row(&b, to, y);
  }
  free(d.scratch);
  return kind;
}

/* Height, width and components, from the frame header alone. */
static int frame_size(const uint8_t *data, size_t length, int *height, int *width,
                      int *components) {
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
