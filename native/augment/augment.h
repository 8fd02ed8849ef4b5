/* Automatic augmentation: applies all changes of one image in few passes over its pixels.
 *
 * The counterpart of image/lazy_image.py, which uses OpenCV; same bits, except for rotations. Changes
 * by a lookup table stay pending and join into one table per channel. Level counts are kept, so that
 * later tables can be computed from them. One pass that moves or blends pixels stays pending too,
 * until another change needs its result. The last pass runs row by row, together with the lookup.
 *
 * Include after jpeg/region.h. Does not depend on Python.
 */
#include <stdlib.h>

#include "levels.h"
#include "rows.h"

typedef struct {
  int code;
  double magnitude; /* finite, in the unit of the change */
} Change;

/* A lazy image: pixels, a pending pass over them, and a pending table of levels. */
typedef struct {
  Pass pass;
  uint8_t *sheets[2]; /* output of passes; `pass.pixels` is the caller's image or one of these */
  uint8_t *row;
  uint8_t fill[3];
  Table tone[3]; /* the pending table, applied after the pass */
  int toned;     /* whether the table changes any level */
  uint32_t counts[3][256]; /* pixels with each level, after the pass and before the table */
  int counted;
} LazyImage;

/* Allocate memory for the pointer `*at`, unless it has some. */
static int allocate_once(void *at, size_t size) {
  void *room;
  memcpy(&room, at, sizeof room);
  if (room) return FINE;
  room = malloc(size);
  memcpy(at, &room, sizeof room);
  return room ? FINE : NO_MEMORY;
}

static void tone_row(const LazyImage *d, const uint8_t *row, uint8_t *out) {
  const uint8_t *red = d->tone[0], *green = d->tone[1], *blue = d->tone[2];
  for (int x = 0; x < d->pass.width; x++, row += 3, out += 3) {
    uint8_t r = red[row[0]], g = green[row[1]], b = blue[row[2]];
    out[0] = r, out[1] = g, out[2] = b;
  }
}

/* Row `y` without the table: a pointer to it, or computed in `room`. */
static const uint8_t *row_of(const LazyImage *d, int y, uint8_t *room) {
  if (d->pass.code == IDENTITY) return d->pass.pixels + (size_t)y * d->pass.stride;
  make_row(&d->pass, y, room);
  return room;
}

/* Apply the pending pass and, if `with_tone`, the pending table. */
static int settle(LazyImage *d, int with_tone) {
  int toned = with_tone && d->toned;
  if (d->pass.code == IDENTITY && !toned) return FINE;
  int other = d->pass.pixels == d->sheets[0];
  if (allocate_once(&d->sheets[other], d->pass.size)) return NO_MEMORY;
  for (int y = 0; y < d->pass.height; y++) {
    uint8_t *to = d->sheets[other] + (size_t)y * d->pass.stride;
    const uint8_t *row = row_of(d, y, to);
    if (toned) tone_row(d, row, to);
  }
  d->pass.pixels = d->sheets[other];
  d->pass.code = IDENTITY;
  if (!toned) return FINE;
  for (int c = 0; c < 3; c++) keep_levels(d->tone[c]);
  d->toned = d->counted = 0;
  return FINE;
}

/* ----------------------------------------------------------------------------- changes by table */

static void change_levels(LazyImage *d, const Table after[3]) {
  d->toned = 0;
  for (int c = 0; c < 3; c++)
    for (int level = 0; level < 256; level++) {
      d->tone[c][level] = after[c][d->tone[c][level]];
      d->toned |= d->tone[c][level] != level;
    }
}

static void change_all_channels(LazyImage *d, const Table after) {
  Table each[3];
  for (int c = 0; c < 3; c++) memcpy(each[c], after, sizeof each[c]);
  change_levels(d, (const Table *)each);
}

static int count(LazyImage *d) {
  if (d->counted) return FINE;
  if (settle(d, 0)) return NO_MEMORY;
  count_levels(d->pass.pixels, d->pass.size, d->counts);
  d->counted = 1;
  return FINE;
}

static int contrast(LazyImage *d, double factor) {
  uint64_t sums[3] = {0};
  if (factor == 1.0) return FINE;
  if (!d->counted && !d->toned) {
    if (settle(d, 0)) return NO_MEMORY;
    add_levels(d->pass.pixels, d->pass.size, sums);
  } else {
    /* Counting takes no longer than applying a table, and later changes may use the counts. */
    if (count(d)) return NO_MEMORY;
    for (int c = 0; c < 3; c++)
      for (int level = 0; level < 256; level++)
        sums[c] += (uint64_t)d->counts[c][level] * d->tone[c][level];
  }
  Table table;
  steepen(table, factor, sums, (double)d->pass.height * d->pass.width);
  change_all_channels(d, table);
  return FINE;
}

/* The darkest and the brightest level of each channel, after the pending table. */
static int find_ends(LazyImage *d, uint8_t low[3], uint8_t high[3]) {
  if (!d->counted && is_rising(d->tone[0]) && is_rising(d->tone[1]) && is_rising(d->tone[2])) {
    if (settle(d, 0)) return NO_MEMORY;
    find_range(d->pass.pixels, d->pass.size, low, high);
    for (int c = 0; c < 3; c++) low[c] = d->tone[c][low[c]], high[c] = d->tone[c][high[c]];
    return FINE;
  }
  if (count(d)) return NO_MEMORY;
  memset(low, 255, 3);
  memset(high, 0, 3);
  for (int c = 0; c < 3; c++)
    for (int level = 0; level < 256; level++)
      if (d->counts[c][level]) widen_range(low + c, high + c, d->tone[c][level]);
  return FINE;
}

static int stretch_each(LazyImage *d) {
  uint8_t low[3], high[3];
  Table tables[3];
  if (find_ends(d, low, high)) return NO_MEMORY;
  for (int c = 0; c < 3; c++) stretch(tables[c], low[c], high[c]);
  change_levels(d, (const Table *)tables);
  return FINE;
}

static int equalize_each(LazyImage *d) {
  Table tables[3];
  if (count(d)) return NO_MEMORY;
  for (int c = 0; c < 3; c++) {
    uint64_t seen[256] = {0};
    for (int level = 0; level < 256; level++) seen[d->tone[c][level]] += d->counts[c][level];
    equalize(tables[c], seen);
  }
  change_levels(d, (const Table *)tables);
  return FINE;
}

/* ------------------------------------------------------------- changes by a pass over the pixels */

static void set_pass(LazyImage *d, int code) {
  d->pass.code = code;
  d->counted = 0;
}

/* Sums would overflow beyond this; by then all colours are saturated. */
#define MOST_SATURATION 1024.0

/* See colour._saturating. */
static int saturate_by(LazyImage *d, double factor) {
  static const double grey[3] = {0.2989, 0.587, 0.114};
  if (factor == 1.0) return FINE;
  if (settle(d, 1)) return NO_MEMORY;
  factor = fmin(fmax(factor, -MOST_SATURATION), MOST_SATURATION);
  for (int c = 0; c < 3; c++)
    for (int from = 0; from < 3; from++) {
      float weight = (float)(grey[from] * (1.0 - factor));
      if (c == from) weight += (float)factor;
      d->pass.colours[c][from] = (int32_t)rintf(weight * 1024);
    }
  float down = (float)(-0.4999 - 0.5 * (1.0 - factor));
  d->pass.lift = (int32_t)rintf(down * 1024) + 512;
  set_pass(d, COLOR);
  return FINE;
}

/* From here on the smallest difference already gives black or white. */
#define MOST_BLUR (1 << 22)

/* See colour.sharpness. */
static int sharpen_by(LazyImage *d, double factor) {
  if (factor == 1.0 || d->pass.height <= 2 || d->pass.width <= 2) return FINE;
  if (settle(d, 1)) return NO_MEMORY;
  if (allocate_once(&d->pass.sums, d->pass.stride * sizeof *d->pass.sums)) return NO_MEMORY;
  d->pass.blur = nearest((1.0 - factor) * 9.0 / 13.0 * 1024, MOST_BLUR);
  set_pass(d, SHARPNESS);
  return FINE;
}

/* Pixels may move before the pending table applies, if the border has a level that the table maps to
   the fill. If there is no such level, apply the table first. */
static int choose_border(LazyImage *d, uint8_t border[3]) {
  for (int c = 0; c < 3; c++) {
    uint8_t wanted = d->fill[c];
    const uint8_t *found = memchr(d->tone[c], wanted, sizeof d->tone[c]);
    if (!found) {
      memcpy(border, d->fill, 3);
      return settle(d, 1);
    }
    border[c] = (uint8_t)(found - d->tone[c]);
  }
  return FINE;
}

static int set_move(LazyImage *d, int code) {
  uint8_t border[3];
  if (choose_border(d, border) || settle(d, 0)) return NO_MEMORY;
  memcpy(d->pass.border, border, 3);
  set_pass(d, code);
  return FINE;
}

static int shift_by(LazyImage *d, int code, double pixels) {
  if (fabs(pixels) < 1) return FINE;
  if (set_move(d, code)) return NO_MEMORY;
  /* Truncated, and limited to the size of the image: a larger shift shows only the border. */
  int most = code == TRANSLATE_X ? d->pass.width : d->pass.height;
  int by = (int)fmin(fmax(pixels, -most), most);
  d->pass.across = code == TRANSLATE_X ? by : 0;
  d->pass.down = code == TRANSLATE_X ? 0 : by;
  return FINE;
}

/* Bytes that fit into a second-level cache, and the size of a cache line. */
#define NEARBY ((size_t)1 << 19)
#define LINE 64

/* Prepare a move that reads each pixel from a computed place. The processor cannot prefetch such
   places: if the image is not in the cache, every cache line is waited for, which doubles the time.
   So read the image in order first, which the processor does prefetch. */
static int prepare_places(LazyImage *d) {
  const volatile uint8_t *pixels = d->pass.pixels;
  for (size_t at = 0; at < d->pass.size && d->pass.size <= NEARBY; at += LINE) (void)pixels[at];
  return allocate_once(&d->pass.places, 2 * (size_t)d->pass.width * sizeof *d->pass.places);
}

static int shear_by(LazyImage *d, int code, double slope) {
  if (slope == 0) return FINE;
  if (set_move(d, code)) return NO_MEMORY;
  d->pass.slope = slope;
  if (code == SHEAR_X) return FINE;
  if (prepare_places(d)) return NO_MEMORY;
  for (int x = 0; x < d->pass.width; x++)
    d->pass.places[x] = nearest(slope * (x + 0.5), d->pass.height);
  return FINE;
}

/* torchvision's rotation matrix, with its roundings: see find_sources. */
static int rotate_by(LazyImage *d, double degrees) {
  degrees = fmod(degrees, 360);
  if (degrees < 0) degrees += 360;
  if (degrees == 0) return FINE;
  if (set_move(d, ROTATE) || prepare_places(d)) return NO_MEMORY;
  double angle = degrees * (3.14159265358979323846 / 180);
  float cosine = (float)cos(angle), sine = (float)sin(angle);
  float width = (float)d->pass.width * 0.5f, height = (float)d->pass.height * 0.5f;
  d->pass.right[0] = cosine / width;
  d->pass.right[1] = sine / height;
  d->pass.below[0] = -sine / width;
  d->pass.below[1] = cosine / height;
  return FINE;
}

/* ---------------------------------------------------------------------------------- all changes */

static int change(LazyImage *d, Change by) {
  double magnitude = by.magnitude;
  Table table;
  switch (by.code) {
    case SHEAR_X:
    case SHEAR_Y: return shear_by(d, by.code, magnitude);
    case TRANSLATE_X:
    case TRANSLATE_Y: return shift_by(d, by.code, magnitude);
    case ROTATE: return rotate_by(d, magnitude);
    case COLOR: return saturate_by(d, 1.0 + magnitude);
    case SHARPNESS: return sharpen_by(d, 1.0 + magnitude);
    case CONTRAST: return contrast(d, 1.0 + magnitude);
    case AUTOCONTRAST: return stretch_each(d);
    case EQUALIZE: return equalize_each(d);
    case BRIGHTNESS: brighten(table, 1.0 + magnitude); break;
    case POSTERIZE: posterize(table, magnitude); break;
    case SOLARIZE: solarize(table, magnitude); break;
    case INVERT: solarize(table, 0); break;
    default: return FINE;
  }
  change_all_channels(d, table);
  return FINE;
}

static void write_bytes(const LazyImage *d, Target to) {
  for (int y = 0; y < to.height; y++) {
    uint8_t *out = to.bytes + (size_t)y * d->pass.stride;
    const uint8_t *row = row_of(d, y, out);
    if (d->toned)
      tone_row(d, row, out);
    else if (row != out)
      memcpy(out, row, d->pass.stride);
  }
}

static int write_floats(LazyImage *d, Target to) {
  float joined[768];
  if (allocate_once(&d->row, d->pass.stride)) return NO_MEMORY;
  for (int i = 0; i < 768; i++) joined[i] = to.table[i / 256 * 256 + d->tone[i / 256][i % 256]];
  to.table = joined;
  for (int y = 0; y < to.height; y++) write_row(to, y, row_of(d, y, d->row));
  return FINE;
}

/* Apply all changes in order to an image of the size of the target. If the target is bytes and the
   changes do nothing, it is not written, and `changed` is 0. */
static int augment(const uint8_t *image, const Change *changes, size_t number,
                   const uint8_t fill[3], Target to, int *changed) {
  LazyImage d = {.pass = {.height = to.height, .width = to.width, .pixels = image}};
  d.pass.stride = (size_t)to.width * 3;
  d.pass.size = d.pass.stride * (size_t)to.height;
  memcpy(d.fill, fill, 3);
  for (int c = 0; c < 3; c++) keep_levels(d.tone[c]);
  int kind = FINE;
  for (size_t i = 0; i < number && !kind; i++) kind = change(&d, changes[i]);
  *changed = d.pass.pixels != image || d.pass.code != IDENTITY || d.toned;
  if (!kind && to.floats)
    kind = write_floats(&d, to);
  else if (!kind && *changed)
    write_bytes(&d, to);
  free(d.sheets[0]);
  free(d.sheets[1]);
  free(d.row);
  free(d.pass.places);
  free(d.pass.sums);
  return kind;
}
