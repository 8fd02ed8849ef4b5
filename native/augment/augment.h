/* The changes of automatic augmentation: all that one image gets, in few passes over its pixels.
 *
 * What image/draft.py does with OpenCV, and its bits but for turns. Changes by table wait and become
 * one table for each channel, and what the next of them asks of the image follows from what was
 * counted before. One pass that moves or blends pixels waits too, until another asks for its result;
 * the last goes row by row into the look-up of levels.
 *
 * Comes after jpeg/region.h, and knows as little of Python.
 */
#include <stdlib.h>

#include "levels.h"
#include "rows.h"

typedef struct {
  int code;
  double magnitude; /* finite, in the unit of the change */
} Change;

/* An image in the making: what a pass makes of some pixels, and then a table of their levels. */
typedef struct {
  Pass pass;
  uint8_t *sheets[2]; /* what passes are done on: the pixels are the caller's, or one of them */
  uint8_t *row;
  uint8_t fill[3];
  Table tone[3]; /* what becomes of each level after the pass */
  int toned;     /* whether that changes any */
  uint32_t counts[3][256]; /* how many pixels have each level after the pass, before the table */
  int counted;
} Draft;

/* Memory for `*at`, if it has none yet. */
static int get_room(void *at, size_t size) {
  void *room;
  memcpy(&room, at, sizeof room);
  if (room) return FINE;
  room = malloc(size);
  memcpy(at, &room, sizeof room);
  return room ? FINE : NO_MEMORY;
}

static void tone_row(const Draft *d, const uint8_t *row, uint8_t *out) {
  const uint8_t *red = d->tone[0], *green = d->tone[1], *blue = d->tone[2];
  for (int x = 0; x < d->pass.width; x++, row += 3, out += 3) {
    uint8_t r = red[row[0]], g = green[row[1]], b = blue[row[2]];
    out[0] = r, out[1] = g, out[2] = b;
  }
}

/* Row `y` but for the table: where it lies already, or made in `room`. */
static const uint8_t *row_of(const Draft *d, int y, uint8_t *room) {
  if (d->pass.code == IDENTITY) return d->pass.pixels + (size_t)y * d->pass.stride;
  make_row(&d->pass, y, room);
  return room;
}

/* Do the pass that waits and, where that is wanted, the table. */
static int settle(Draft *d, int with_tone) {
  int toned = with_tone && d->toned;
  if (d->pass.code == IDENTITY && !toned) return FINE;
  int other = d->pass.pixels == d->sheets[0];
  if (get_room(&d->sheets[other], d->pass.size)) return NO_MEMORY;
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

/* ------------------------------------------------------------------------------ changes by table */

static void change_levels(Draft *d, const Table after[3]) {
  d->toned = 0;
  for (int c = 0; c < 3; c++)
    for (int level = 0; level < 256; level++) {
      d->tone[c][level] = after[c][d->tone[c][level]];
      d->toned |= d->tone[c][level] != level;
    }
}

static void change_alike(Draft *d, const Table after) {
  Table each[3];
  for (int c = 0; c < 3; c++) memcpy(each[c], after, sizeof each[c]);
  change_levels(d, (const Table *)each);
}

static int count(Draft *d) {
  if (d->counted) return FINE;
  if (settle(d, 0)) return NO_MEMORY;
  count_levels(d->pass.pixels, d->pass.size, d->counts);
  d->counted = 1;
  return FINE;
}

static int contrast(Draft *d, double factor) {
  uint64_t sums[3] = {0};
  if (factor == 1.0) return FINE;
  if (!d->counted && !d->toned) {
    if (settle(d, 0)) return NO_MEMORY;
    add_levels(d->pass.pixels, d->pass.size, sums);
  } else {
    /* Counting takes no longer than applying a table, and may serve the next change too. */
    if (count(d)) return NO_MEMORY;
    for (int c = 0; c < 3; c++)
      for (int level = 0; level < 256; level++)
        sums[c] += (uint64_t)d->counts[c][level] * d->tone[c][level];
  }
  Table table;
  steepen(table, factor, sums, (double)d->pass.height * d->pass.width);
  change_alike(d, table);
  return FINE;
}

/* The darkest and the brightest level of each channel, after the table. */
static int find_ends(Draft *d, uint8_t low[3], uint8_t high[3]) {
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

static int stretch_each(Draft *d) {
  uint8_t low[3], high[3];
  Table tables[3];
  if (find_ends(d, low, high)) return NO_MEMORY;
  for (int c = 0; c < 3; c++) stretch(tables[c], low[c], high[c]);
  change_levels(d, (const Table *)tables);
  return FINE;
}

static int equalize_each(Draft *d) {
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

/* --------------------------------------------------------------------- changes that are a pass */

static void wait_for(Draft *d, int code) {
  d->pass.code = code;
  d->counted = 0;
}

/* Beyond this the sums would not fit; colours are long at their ends. */
#define MOST_SATURATION 1024.0

/* See colour._saturating. */
static int saturate_by(Draft *d, double factor) {
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
  wait_for(d, COLOR);
  return FINE;
}

/* With more of it, the least difference makes black or white just as well. */
#define MOST_BLUR (1 << 22)

/* See colour.sharpness. */
static int sharpen_by(Draft *d, double factor) {
  if (factor == 1.0 || d->pass.height <= 2 || d->pass.width <= 2) return FINE;
  if (settle(d, 1)) return NO_MEMORY;
  if (get_room(&d->pass.sums, d->pass.stride * sizeof *d->pass.sums)) return NO_MEMORY;
  d->pass.blur = nearest((1.0 - factor) * 9.0 / 13.0 * 1024, MOST_BLUR);
  wait_for(d, SHARPNESS);
  return FINE;
}

/* Moving may go before the table that waits, with a border that the table makes the fill of. Where
   there is no such level the table is applied first. */
static int choose_border(Draft *d, uint8_t border[3]) {
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

static int wait_to_move(Draft *d, int code) {
  uint8_t border[3];
  if (choose_border(d, border) || settle(d, 0)) return NO_MEMORY;
  memcpy(d->pass.border, border, 3);
  wait_for(d, code);
  return FINE;
}

static int shift_by(Draft *d, int code, double pixels) {
  if (fabs(pixels) < 1) return FINE;
  if (wait_to_move(d, code)) return NO_MEMORY;
  /* Cut, not rounded; what is out of the frame is out, however far. */
  int most = code == TRANSLATE_X ? d->pass.width : d->pass.height;
  int by = (int)fmin(fmax(pixels, -most), most);
  d->pass.across = code == TRANSLATE_X ? by : 0;
  d->pass.down = code == TRANSLATE_X ? 0 : by;
  return FINE;
}

/* What a second-level cache has room for, and a line of it. */
#define NEARBY ((size_t)1 << 19)
#define LINE 64

/* For moves that take each pixel from a place of its own. No processor foresees such places, and an
   image that is not in the cache would come line by line, each waited for: that doubles the time.
   Read in order it comes by itself. */
static int prepare_places(Draft *d) {
  const volatile uint8_t *pixels = d->pass.pixels;
  for (size_t at = 0; at < d->pass.size && d->pass.size <= NEARBY; at += LINE) (void)pixels[at];
  return get_room(&d->pass.places, 2 * (size_t)d->pass.width * sizeof *d->pass.places);
}

static int shear_by(Draft *d, int code, double slope) {
  if (slope == 0) return FINE;
  if (wait_to_move(d, code)) return NO_MEMORY;
  d->pass.slope = slope;
  if (code == SHEAR_X) return FINE;
  if (prepare_places(d)) return NO_MEMORY;
  for (int x = 0; x < d->pass.width; x++)
    d->pass.places[x] = nearest(slope * (x + 0.5), d->pass.height);
  return FINE;
}

/* torchvision's matrix, rounded where it rounds: see find_sources. */
static int turn_by(Draft *d, double degrees) {
  degrees = fmod(degrees, 360);
  if (degrees < 0) degrees += 360;
  if (degrees == 0) return FINE;
  if (wait_to_move(d, ROTATE) || prepare_places(d)) return NO_MEMORY;
  double angle = degrees * (3.14159265358979323846 / 180);
  float cosine = (float)cos(angle), sine = (float)sin(angle);
  float width = (float)d->pass.width * 0.5f, height = (float)d->pass.height * 0.5f;
  d->pass.right[0] = cosine / width;
  d->pass.right[1] = sine / height;
  d->pass.below[0] = -sine / width;
  d->pass.below[1] = cosine / height;
  return FINE;
}

/* ---------------------------------------------------------------------------------- all of them */

static int change(Draft *d, Change by) {
  double magnitude = by.magnitude;
  Table table;
  switch (by.code) {
    case SHEAR_X:
    case SHEAR_Y: return shear_by(d, by.code, magnitude);
    case TRANSLATE_X:
    case TRANSLATE_Y: return shift_by(d, by.code, magnitude);
    case ROTATE: return turn_by(d, magnitude);
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
  change_alike(d, table);
  return FINE;
}

static void give_bytes(const Draft *d, Target to) {
  for (int y = 0; y < to.height; y++) {
    uint8_t *out = to.bytes + (size_t)y * d->pass.stride;
    const uint8_t *row = row_of(d, y, out);
    if (d->toned)
      tone_row(d, row, out);
    else if (row != out)
      memcpy(out, row, d->pass.stride);
  }
}

static int give_floats(Draft *d, Target to) {
  float joined[768];
  if (get_room(&d->row, d->pass.stride)) return NO_MEMORY;
  for (int i = 0; i < 768; i++) joined[i] = to.table[i / 256 * 256 + d->tone[i / 256][i % 256]];
  to.table = joined;
  for (int y = 0; y < to.height; y++) give_row(to, y, row_of(d, y, d->row));
  return FINE;
}

/* An image of the target's size with all changes, one after the other. Where they come to nothing
   the target's bytes stay as they are, and `changed` is 0. */
static int augment(const uint8_t *image, const Change *changes, size_t number,
                   const uint8_t fill[3], Target to, int *changed) {
  Draft d = {.pass = {.height = to.height, .width = to.width, .pixels = image}};
  d.pass.stride = (size_t)to.width * 3;
  d.pass.size = d.pass.stride * (size_t)to.height;
  memcpy(d.fill, fill, 3);
  for (int c = 0; c < 3; c++) keep_levels(d.tone[c]);
  int kind = FINE;
  for (size_t i = 0; i < number && !kind; i++) kind = change(&d, changes[i]);
  *changed = d.pass.pixels != image || d.pass.code != IDENTITY || d.toned;
  if (!kind && to.floats)
    kind = give_floats(&d, to);
  else if (!kind && *changed)
    give_bytes(&d, to);
  free(d.sheets[0]);
  free(d.sheets[1]);
  free(d.row);
  free(d.pass.places);
  free(d.pass.sums);
  return kind;
}
