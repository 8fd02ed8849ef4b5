/* Decodes the part of a JPEG that a crop needs, resizes and flips it, in one pass over few rows.
 *
 * Entropy decoding cannot be skipped: a baseline JPEG must be read from its start. Everything else
 * is skipped where possible: columns beside the crop and rows above it are not transformed, rows
 * below it are not read, and libjpeg begins large shrinks. Decoded rows go through the vertical
 * filter while they are in the first-level cache.
 *
 * libjpeg reads every header. Common baseline files are then decoded without libjpeg (see planes.h),
 * which is faster. libjpeg decodes all other files, including unusual and damaged ones.
 *
 * Does not depend on Python, so that it can be fuzzed separately.
 */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

#include "../filter.h"
#include "../png.h"
#include "planes.h"

/* Earlier versions have bugs in skipping rows and cropping columns. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed"
#endif

/* The fuzzer decodes with and without libjpeg, and compares. */
#ifdef PENSTOCK_FUZZ
static int only_libjpeg;
static long decoded_without_libjpeg;
#define COUNT_OWN_DECODE() decoded_without_libjpeg++
#else
#define only_libjpeg 0
#define COUNT_OWN_DECODE() (void)0
#endif

enum { FINE, DAMAGED, UNSUPPORTED, OUTSIDE, NO_MEMORY };

/* Limits on images: 2**28 pixels would be 0.8 GB decoded. A progressive image keeps all coefficients
   (6 bytes per pixel) until the last scan, and each scan is a pass over them. */
#define MOST_PIXELS ((uint64_t)1 << 28)
#define MOST_COEFFICIENT_BYTES (1L << 28)
#define MOST_SCANS 500
/* Limit on what a call allocates itself, apart from libjpeg. Photographs need about 100 KB. */
#define MOST_SCRATCH ((size_t)1 << 26)

/* The least factor by which the filter still shrinks after libjpeg. With 1, photographs differ from
   PIL by 1.2 grey levels on average, with 2 by 0.7. */
#define LEAVE 2
/* Smooth upsampling of chroma reads one sample, two pixels, to either side. */
#define MARGIN 2
/* libjpeg writes aligned rows past the cache, and the filter would wait for them: misalign rows. */
#define ASKEW 4
#define ALIGN 64

typedef struct {
  int top, left, height, width;
} Box;

/* Where pixels are written: bytes (height, width, 3), or floats (3, height, width) by a table
   (3, 256). The box is resized to the full size, of which the part at `top` and `left` is written. */
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
} ErrorState;

typedef struct {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_progress_mgr progress;
  ErrorState error;
  uint8_t *scratch;
  Scan *scan; /* the planes decoded without libjpeg, or NULL */
} Decoder;

/* JPEG index entries of a file from earlier calls. Entries of another file give wrong pixels, but
   nothing worse. */
typedef struct {
  IndexEntry *at;
  size_t count;
} IndexEntries;

static void abort_decoding(j_common_ptr jpeg, int kind) {
  ErrorState *error = (ErrorState *)jpeg->err;
  error->kind = kind;
  (*jpeg->err->format_message)(jpeg, error->why);
  longjmp(error->back, 1);
}

/* Damage is an error in every decoder. Anything else (a marker, a table, a kind of JPEG that this
   libjpeg rejects) is unsupported, and the caller uses another decoder. */
static void on_error(j_common_ptr jpeg) {
  if (jpeg->err->msg_code == JERR_NO_BACKING_STORE) {
    /* libjpeg's error when it reaches max_memory_to_use. */
    jpeg->err->msg_code = JERR_OUT_OF_MEMORY;
    jpeg->err->msg_parm.i[0] = 0;
    abort_decoding(jpeg, UNSUPPORTED);
  }
  abort_decoding(jpeg, jpeg->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : UNSUPPORTED);
}

/* Whether bytes without a meaning before this marker are harmless: they are in the header, and behind
   the last pixel. Elsewhere data is missing or damaged. The end may come where a restart marker of a
   later scan should be. */
static int harmless_bytes(j_decompress_ptr jpeg, int marker) {
  if (jpeg->input_scan_number == 0) return 1;
  return marker == JPEG_EOI && !(jpeg->restart_interval && jpeg_has_multiple_scans(jpeg));
}

static void on_message(j_common_ptr jpeg, int level) {
  if (level >= 0) return;
  switch (jpeg->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:
      if (harmless_bytes((j_decompress_ptr)jpeg, jpeg->err->msg_parm.i[1])) return;
      abort_decoding(jpeg, DAMAGED);
      break;
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
      abort_decoding(jpeg, DAMAGED);
      break;
    default:
      abort_decoding(jpeg, UNSUPPORTED);
  }
}

static void on_output(j_common_ptr jpeg) { (void)jpeg; }

static void on_progress(j_common_ptr jpeg) {
  if (jpeg->is_decompressor && ((j_decompress_ptr)jpeg)->input_scan_number > MOST_SCANS) {
    ErrorState *error = (ErrorState *)jpeg->err;
    error->kind = UNSUPPORTED;
    snprintf(error->why, JMSG_LENGTH_MAX, "it has more than %d scans", MOST_SCANS);
    longjmp(error->back, 1);
  }
}

static void drop_scan(Decoder *d) {
  if (d->scan) {
    free(d->scan->memory);
    free(d->scan->index);
  }
  free(d->scan);
  d->scan = NULL;
}

static int refuse(Decoder *d, int kind, const char *why) {
  snprintf(d->error.why, JMSG_LENGTH_MAX, "%s", why);
  return kind;
}

/* Units (MCUs) of the only scan of a file. */
static uint64_t units_of(const struct jpeg_decompress_struct *jpeg) {
  /* A scan of one component has units of one block, whatever its sampling factors are. */
  uint64_t across = jpeg->comps_in_scan > 1 ? 8 * (uint64_t)jpeg->max_h_samp_factor : 8;
  uint64_t down = jpeg->comps_in_scan > 1 ? 8 * (uint64_t)jpeg->max_v_samp_factor : 8;
  return (jpeg->image_width + across - 1) / across * ((jpeg->image_height + down - 1) / down);
}

/* What is wrong with the markers of the only scan of a file and behind it; NULL if nothing is. Rows
   below the crop are not decoded, so a file that is cut short there, or has another file in its
   middle, would go unnoticed otherwise. A marker cannot occur in intact entropy-coded data. */
static const char *marker_damage(const struct jpeg_decompress_struct *jpeg) {
  const uint8_t *at = jpeg->src->next_input_byte, *end = at + jpeg->src->bytes_in_buffer;
  uint64_t restarts = 0;
  int behind = 0; /* comments or application data were seen: no scan may follow */
  for (;;) {
    if (behind ? end - at < 1 || *at != 0xFF : !(at = memchr(at, 0xFF, (size_t)(end - at))))
      return behind ? "Corrupt JPEG data: a marker within a scan" : "Premature end of JPEG file";
    while (at < end && *at == 0xFF) at++;
    if (at == end) return "Premature end of JPEG file";
    int marker = *at++;
    if (marker == 0 && !behind) continue;
    if (marker == JPEG_EOI) break;
    if (marker >= JPEG_RST0 && marker < JPEG_RST0 + 8 && !behind) {
      /* Behind the last unit it does no harm. */
      if (!jpeg->restart_interval && end - at >= 2 && at[0] == 0xFF && at[1] == JPEG_EOI) break;
      if (!jpeg->restart_interval || marker != JPEG_RST0 + (int)(restarts % 8))
        return "Corrupt JPEG data: a restart marker out of order";
      restarts++;
      continue;
    }
    if (marker != JPEG_COM && (marker < JPEG_APP0 || marker > JPEG_APP0 + 15))
      return "Corrupt JPEG data: a marker within a scan";
    if (end - at < 2 || end - at < (at[0] << 8 | at[1])) return "Premature end of JPEG file";
    at += at[0] << 8 | at[1];
    behind = 1;
  }
  if (!jpeg->restart_interval) return NULL;
  uint64_t expected = (units_of(jpeg) - 1) / jpeg->restart_interval;
  /* Some encoders write a restart marker behind the last unit too. */
  if (restarts < expected || restarts > expected + 1)
    return "Corrupt JPEG data: restart markers are missing";
  return NULL;
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

/* Read the header, and reject unsupported files. */
static int begin(Decoder *d, const uint8_t *data, size_t length, Box box, Target to) {
  j_decompress_ptr jpeg = &d->jpeg;
  jpeg_create_decompress(jpeg);
  d->progress.progress_monitor = on_progress;
  jpeg->progress = &d->progress;
  jpeg->mem->max_memory_to_use = MOST_COEFFICIENT_BYTES;
  jpeg_mem_src(jpeg, (uint8_t *)data, length);
  jpeg_read_header(jpeg, TRUE);

  /* libjpeg reads several scans to the end before it returns the first row. */
  const char *damage = jpeg_has_multiple_scans(jpeg) ? NULL : marker_damage(jpeg);
  if (damage) return refuse(d, DAMAGED, damage);
  if ((uint64_t)jpeg->image_width * jpeg->image_height > MOST_PIXELS)
    return refuse(d, UNSUPPORTED, "it has more than 2**28 pixels");
  if (jpeg->arith_code) return refuse(d, UNSUPPORTED, "it uses arithmetic coding");
  if (jpeg->data_precision != 8) return refuse(d, UNSUPPORTED, "its samples do not have 8 bits");
  if (jpeg->jpeg_color_space != JCS_GRAYSCALE && jpeg->jpeg_color_space != JCS_YCbCr &&
      jpeg->jpeg_color_space != JCS_RGB)
    return refuse(d, UNSUPPORTED, "its colour space is not grey, YCbCr or RGB");
  return check_places(d, (int)jpeg->image_height, (int)jpeg->image_width, box, to);
}

/* The factor by which libjpeg shrinks. */
static int choose_shrink(j_decompress_ptr jpeg, Box box, Target to) {
  /* libjpeg corrects for coarser chroma only if it is coarser by the same factor both ways. */
  int leave = jpeg->max_h_samp_factor == jpeg->max_v_samp_factor ? LEAVE : 2 * LEAVE;
  int shrink = jpeg->max_h_samp_factor > 2 || jpeg->max_v_samp_factor > 2 ? 1 : 8;
  while (shrink > 1 && (box.height < (int64_t)leave * shrink * to.full_height ||
                        box.width < (int64_t)leave * shrink * to.full_width))
    shrink /= 2;
  return shrink;
}

/* The buffers of one call: a ring of decoded rows; a block of output rows that still have the width
   of the box, and the same transposed; the block in its final width, transposed and not. */
typedef struct {
  Axis down, across;
  uint8_t *ring, *rows, *rows_transposed, *out, *out_transposed;
  size_t ring_stride, rows_stride, out_stride;
  size_t row_bytes, out_bytes; /* used bytes of these strides */
  size_t skipped;              /* bytes of a row of the ring before the box */
  size_t plane;                /* bytes from red to green to blue in a row; 0 if interleaved */
  int columns;
  Row room;
  const uint8_t **taps;
} Workspace;

static int lay_out(Decoder *d, Workspace *b, int rows, int columns, Target to, int shrink) {
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
    void *at; /* address of the pointer to set */
    size_t size;
  } parts[] = {
      {&b->ring, b->ring_stride * b->down.taps},
      {&b->rows, b->rows_stride * LANES},
      {&b->rows_transposed, b->rows_stride * LANES},
      {&b->out, b->out_stride * LANES},
      {&b->out_transposed, b->out_stride * LANES},
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
  /* The last block may not be full, but is transposed as a whole. */
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

/* Write row `y` of the target as floats, by channel. Reading four pixels and writing four floats per
   channel at a time is a third faster than one level at a time. */
static void write_row(Target to, int y, const uint8_t *row) {
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

/* Resize the columns of a block and write its first `count` rows to the target, from row `y` on. */
static void write_block(Workspace *b, Target to, int y, int count) {
  if (b->plane) {
    for (int c = 0; c < 3; c++)
      transpose(b->rows_transposed + c * LANES, BLOCK * 16, BLOCK, b->rows + c * b->plane, 16,
           b->rows_stride, (size_t)b->columns);
  } else {
    transpose(b->rows_transposed, LANES * 16, LANES, b->rows, 16, b->rows_stride, b->row_bytes);
  }
  blend_columns(b->out_transposed, b->rows_transposed, &b->across, b->taps);
  transpose(b->out, 16, b->out_stride, b->out_transposed, LANES * 16, LANES, b->out_bytes);
  for (int i = 0; i < count; i++) {
    const uint8_t *row = b->out + i * b->out_stride;
    if (to.bytes)
      memcpy(to.bytes + (size_t)(y + i) * b->out_bytes, row, b->out_bytes);
    else
      write_row(to, y + i, row);
  }
}

/* Blend one row of the target from the rows in `taps`. Writes the block when it is full. */
static void blend_row(Workspace *b, Target to, int y) {
  int taps = b->down.taps, filled = y % LANES + 1;
  blend_rows(b->rows + (filled - 1) * b->rows_stride, b->taps,
             b->down.weights + (size_t)y * taps, taps, (int)b->row_bytes);
  if (filled == LANES || y + 1 == to.height) write_block(b, to, y + 1 - filled, filled);
}

static int stream(Decoder *d, Workspace *b, Target to) {
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

/* Allocate index entries for every row that is read, and copy the existing ones. */
static void load_index(Scan *scan, const IndexEntries *entries) {
  size_t rows = (size_t)scan->upto_row;
  scan->index = malloc((entries->count > rows ? entries->count : rows) * sizeof(IndexEntry));
  if (!scan->index) return;
  if (entries->count) memcpy(scan->index, entries->at, entries->count * sizeof(IndexEntry));
  scan->known = scan->indexed = (int)entries->count;
}

/* Describe the picture and allocate its records; 0 if there is no memory. */
static int begin_packed(Scan *scan, const struct jpeg_decompress_struct *jpeg, Box box) {
  Packed *packed = scan->packed;
  const Plane *luma = &scan->planes[0];
  PackedPicture *picture = &packed->picture;
  *picture = (PackedPicture){
      .across = scan->upto_unit - scan->from_unit,
      .down = scan->upto_row - scan->from_row,
      .finer_across = luma->across,
      .finer_down = luma->down,
      .components = scan->components,
      .unit_left = scan->from_unit,
      .unit_top = scan->from_row,
      .top = box.top,
      .left = box.left,
      .height = box.height,
      .width = box.width,
      .full_height = jpeg->image_height,
      .full_width = jpeg->image_width,
  };
  int chroma = scan->components - 1;
  picture->blocks = picture->across * picture->down * (luma->across * luma->down + chroma);
  packed->records = malloc((size_t)picture->blocks * sizeof *packed->records);
  packed->room = (size_t)picture->blocks * 16 + MOST_BLOCK_DATA;
  packed->data = malloc(packed->room);
  return packed->records && packed->data;
}

static void free_packed(Packed *packed) {
  free(packed->records);
  free(packed->data);
}

/* Decode the box without libjpeg, if the file is of the common kind and not damaged; to planes, or to
   coefficients if `packed` is given. */
static void decode_without_libjpeg(Decoder *d, Box box, const IndexEntries *entries,
                                   Packed *packed) {
  const struct jpeg_decompress_struct *jpeg = &d->jpeg;
  if (!is_common_kind(jpeg)) return;
  Scan *scan = d->scan = malloc(sizeof *scan);
  if (!scan) return;
  scan->memory = NULL;
  scan->index = NULL;
  scan->known = scan->indexed = 0;
  scan->packed = packed;
  size_t planes = plan_scan(scan, jpeg, box.top, box.left, box.top + box.height,
                            box.left + box.width);
  size_t clean = jpeg->src->bytes_in_buffer + BEYOND, before = packed ? 0 : planes;
  if (planes + clean <= MOST_SCRATCH && (scan->memory = malloc(before + clean)) &&
      (!packed || begin_packed(scan, jpeg, box))) {
    scan->clean = scan->memory + before;
    if (entries && !scan->restart) load_index(scan, entries);
    if (open_scan(scan, jpeg) && decode_scan(scan)) return;
  }
  drop_scan(d);
}

static void begin_errors(Decoder *d) {
  d->jpeg.err = jpeg_std_error(&d->error.manager);
  d->error.manager.error_exit = on_error;
  d->error.manager.emit_message = on_message;
  d->error.manager.output_message = on_output;
}

static int decode(Decoder *d, const uint8_t *data, size_t length, Box box, Target to,
                  const IndexEntries *entries) {
  j_decompress_ptr jpeg = &d->jpeg;
  begin_errors(d);
  /* The decoder owns everything that a call allocates, and outlives the jump. */
  if (setjmp(d->error.back)) return d->error.kind;

  int kind = begin(d, data, length, box, to);
  if (kind) return kind;
  int shrink = choose_shrink(jpeg, box, to);
  Workspace work = {
      .down = axis_of(box.top, box.height, to.full_height, to.top, to.height),
      .across = axis_of(box.left, box.width, to.full_width, to.left, to.width),
  };
  /* From here on the box is only the pixels that the target needs. */
  box = (Box){work.down.from, work.across.from, work.down.upto - work.down.from,
              work.across.upto - work.across.from};
  if (shrink == 1 && WORTHWHILE && !only_libjpeg) decode_without_libjpeg(d, box, entries, NULL);
  if (d->scan) {
    COUNT_OWN_DECODE();
    work.columns = box.width;
    kind = lay_out(d, &work, box.height, box.width, to, shrink);
    return kind ? kind : stream(d, &work, to);
  }
  jpeg->scale_num = 8 / shrink;
  jpeg->scale_denom = 8;
  jpeg->out_color_space = JCS_RGB;
  jpeg->dct_method = JDCT_ISLOW;
  jpeg->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(jpeg);

  /* The box in the pixels of libjpeg's output. */
  int top = box.top / shrink, left = box.left / shrink;
  int bottom = (box.top + box.height + shrink - 1) / shrink;
  int right = (box.left + box.width + shrink - 1) / shrink;
  JDIMENSION from = left > MARGIN ? left - MARGIN : 0;
  JDIMENSION upto = (JDIMENSION)right + MARGIN;
  if (upto > jpeg->output_width) upto = jpeg->output_width;
  JDIMENSION width = upto - from;
  jpeg_crop_scanline(jpeg, &from, &width);

  work.skipped = ASKEW + (size_t)(left - (int)from) * 3;
  kind = lay_out(d, &work, bottom - top, right - left, to, shrink);
  if (kind) return kind;
  if (top) jpeg_skip_scanlines(jpeg, top);
  return stream(d, &work, to);
}

static int pack(Decoder *d, const uint8_t *data, size_t length, Box box, Target to,
                const IndexEntries *entries, Packed *packed) {
  begin_errors(d);
  if (setjmp(d->error.back)) return d->error.kind;
  int kind = begin(d, data, length, box, to);
  if (kind) return kind;
  if (choose_shrink(&d->jpeg, box, to) > 1)
    return refuse(d, UNSUPPORTED, "libjpeg begins a shrink by so much");
  Axis down = axis_of(box.top, box.height, to.full_height, to.top, to.height);
  Axis across = axis_of(box.left, box.width, to.full_width, to.left, to.width);
  box = (Box){down.from, across.from, down.upto - down.from, across.upto - across.from};
  if (WORTHWHILE) decode_without_libjpeg(d, box, entries, packed);
  if (!d->scan)
    return refuse(d, UNSUPPORTED, "it is not an intact baseline JPEG of grey or YCbCr");
  for (int c = 0; c < d->scan->components; c++)
    memcpy(packed->steps[c], d->scan->planes[c].steps, sizeof packed->steps[c]);
  return FINE;
}

static int finish_region(Decoder *d, int kind, IndexEntries *entries) {
  jpeg_destroy_decompress(&d->jpeg);
  Scan *scan = d->scan;
  if (!kind && scan && scan->indexed > scan->known) {
    *entries = (IndexEntries){scan->index, (size_t)scan->indexed};
    scan->index = NULL;
  }
  drop_scan(d);
  free(d->scratch);
  return kind;
}

/* Read the coefficients that `region` needs for the same arguments, if it decodes without libjpeg; only
   the sizes of the target matter. The caller frees `packed`, also after an error. Damage is UNSUPPORTED
   too, except of markers: `region` finds out what it is. */
static int pack_region(const uint8_t *data, size_t length, Box box, Target to, IndexEntries *entries,
                       Packed *packed, char *why) {
  Decoder d;
  memset(&d, 0, sizeof d);
  d.error.why = why;
  if (is_png(data, length)) return refuse(&d, UNSUPPORTED, "a PNG has no coefficients");
  return finish_region(&d, pack(&d, data, length, box, to, entries, packed), entries);
}

/* Resize a box of a decoded image into a target: `height` rows of `width` RGB pixels. */
static int resample(const uint8_t *pixels, int height, int width, Box box, Target to, char *why) {
  Decoder d;
  memset(&d, 0, sizeof d);
  d.error.why = why;
  int kind = check_places(&d, height, width, box, to);
  if (kind) return kind;
  Workspace b = {
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

/* Like `region`, for a PNG. It has no rows that need not be unpacked, so there are no entries. */
static int png_region(const uint8_t *data, size_t length, Box box, Target to, char *why) {
  int height, width;
  Decoder d;
  memset(&d, 0, sizeof d);
  d.error.why = why;
  if (png_size(data, length, &height, &width))
    return refuse(&d, UNSUPPORTED, "it is not a common PNG");
  int kind = check_places(&d, height, width, box, to);
  if (kind) return kind;
  uint8_t *pixels = png_pixels(data, length, box.top + box.height);
  if (!pixels) return refuse(&d, UNSUPPORTED, "it is not a common PNG, or damaged");
  kind = resample(pixels, box.top + box.height, width, box, to, why);
  free(pixels);
  return kind;
}

/* Decode a box of a JPEG or PNG into a target. `why` has room for JMSG_LENGTH_MAX characters. `entries` may
   be NULL. If there are new entries, `entries` becomes a longer array, which the caller frees. */
static int region(const uint8_t *data, size_t length, Box box, Target to, IndexEntries *entries,
                  char *why) {
  if (is_png(data, length)) return png_region(data, length, box, to, why);
  Decoder d;
  memset(&d, 0, sizeof d);
  d.error.why = why;
  return finish_region(&d, decode(&d, data, length, box, to, entries), entries);
}

/* Height, width and components, from the header of a PNG or the segments before the first scan. Files with other markers
   among them are left to decoders that find out whether they are damaged. */
static int frame_size(const uint8_t *data, size_t length, int *height, int *width,
                      int *components) {
  if (is_png(data, length)) {
    *components = 0; /* the device, which decodes JPEGs, leaves it to the CPU */
    return png_size(data, length, height, width) ? UNSUPPORTED : FINE;
  }
  if (length < 4 || data[0] != 0xFF || data[1] != 0xD8) return UNSUPPORTED;
  size_t at = 2;
  int frames = 0;
  for (;;) {
    while (at < length && data[at] != 0xFF) at++;
    while (at < length && data[at] == 0xFF) at++;
    if (at >= length) return DAMAGED;
    int marker = data[at++];
    if (marker == 0) continue;
    if (marker == JPEG_EOI) return DAMAGED;
    int frame = marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
    int known = marker == 0xC4 || marker == 0xCC || marker == 0xDA || marker == 0xDB ||
                marker == 0xDD || marker == JPEG_COM || (marker >= JPEG_APP0 && marker <= JPEG_APP0 + 15);
    if (!frame && !known) return UNSUPPORTED;
    if (length - at < 2) return DAMAGED;
    size_t segment = (size_t)data[at] << 8 | data[at + 1];
    if (segment < 2 || segment > length - at) return DAMAGED;
    if (marker == 0xDA) return frames != 1 ? DAMAGED : data[2] != 0xFF ? UNSUPPORTED : FINE;
    if (frame) {
      if (segment < 8 || frames++) return DAMAGED;
      *height = data[at + 3] << 8 | data[at + 4];
      *width = data[at + 5] << 8 | data[at + 6];
      *components = data[at + 7];
      if (!*height || !*width || !*components) return UNSUPPORTED;
    }
    at += segment;
  }
}
