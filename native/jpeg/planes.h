/* Decodes a box of a baseline JPEG to planes of luma and chroma, and these to rows of RGB; or reads its
 * entropy-coded bits only, to packed coefficients.
 *
 * The result has libjpeg's bits: the same accurate integer transform, triangle filter for chroma
 * upsampling, and conversion to RGB.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "entropy.h"
#include "transform.h"
#include "packed.h"

/* When fuzzing, the parts of one allocation have poisoned gaps between them. */
#ifdef PENSTOCK_FUZZ
#include <sanitizer/asan_interface.h>
#define GAP 1024
#define FORBID(from, size) ASAN_POISON_MEMORY_REGION(from, size)
#else
#define GAP 0
#define FORBID(from, size) (void)(from)
#endif

/* The part of one component (luma or one of two chroma) that the box needs. */
typedef struct {
  uint8_t *at;
  size_t stride, rows;
  int across, down;  /* blocks in a unit of the scan (MCU) */
  int top, left;     /* position in the component of the first sample in `at` */
  int height, width; /* of the whole component, without the padding of its last blocks */
  const Codes *first, *rest;
  int16_t steps[SIDE * SIDE]; /* quantization steps: factors of the coefficients */
} Plane;

/* An entry of the JPEG index: the first bit of a row of units in the unstuffed data (low half first)
   and the DC coefficients before it. With it, the data above need not be read again. */
typedef struct {
  uint16_t bit[2], before[3];
} IndexEntry;

typedef struct {
  Plane planes[3];
  int components;                             /* planes in use: 1 (grey) or 3 */
  Packed *packed;                             /* where coefficients go instead of pixels, or NULL */
  int units;                                  /* units in a row of the scan */
  int from_row, upto_row, from_unit, upto_unit; /* the units that the box needs */
  int restart;                                /* restart interval in units, or 0 */
  const uint8_t *raw, *raw_end;               /* the data that is not unstuffed yet */
  uint8_t *memory, *clean;
  int marker;                                 /* the marker after the last unstuffed data */
  IndexEntry *index;                          /* entries of the rows from the second on, or NULL */
  int known, indexed;                         /* number of entries from before, and now */
  Codes codes[4];
} Scan;

/* Remove the stuffed zeros from the data up to the next marker. */
static Bits unstuff(Scan *scan) {
  const uint8_t *from = scan->raw, *end = scan->raw_end;
  uint8_t *to = scan->clean;
  scan->marker = 0;
  while (from < end) {
    const uint8_t *found = memchr(from, 0xFF, (size_t)(end - from));
    size_t plain = (size_t)((found ? found : end) - from);
    memcpy(to, from, plain);
    to += plain;
    from += plain;
    if (!found) break;
    while (from < end && *from == 0xFF) from++;
    if (from == end) break;
    int after = *from++;
    if (after) {
      scan->marker = after;
      break;
    }
    *to++ = 0xFF;
  }
  scan->raw = from;
  memset(to, 0, BEYOND);
  return (Bits){.next = scan->clean, .end = to};
}

static const uint8_t places[PLACES] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63, [64 ... PLACES - 1] = 64,
};

INLINE void add_index_entry(Scan *scan, const Bits *bits, const uint32_t *before) {
  uint32_t bit = (uint32_t)(8 * (bits->next - scan->clean)) - bits->count;
  IndexEntry *entry = &scan->index[scan->indexed++];
  entry->bit[0] = (uint16_t)bit;
  entry->bit[1] = (uint16_t)(bit >> 16);
  for (int c = 0; c < 3; c++) entry->before[c] = (uint16_t)before[c];
}

/* Go to the beginning of a row by its index entry; 0 if it lies beyond the data. */
INLINE int go_to(const Scan *scan, int row, Bits *bits, uint32_t *before) {
  const IndexEntry *entry = &scan->index[row - 1];
  uint32_t bit = entry->bit[0] | (uint32_t)entry->bit[1] << 16;
  if (bit / 8 > (size_t)(bits->end - scan->clean)) return 0;
  *bits = (Bits){.next = scan->clean + bit / 8, .end = bits->end};
  refill(bits);
  use(bits, bit % 8);
  /* Only 16 bits of a coefficient are ever used. */
  for (int c = 0; c < 3; c++) before[c] = entry->before[c];
  return 1;
}

/* Coefficients in the order of the file. */
static const uint8_t file_order[PLACES] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, [64 ... PLACES - 1] = 64,
};

/* Decode the units that the box needs to pixels or, without `put_two`, to packed coefficients. Returns 0
   if the data is unusual or damaged. */
INLINE int decode_scan_body(Scan *scan, PutTwo *put_two, PackBlock *pack_block) {
  Block blocks[2]; /* the first `waiting` are read, and not converted to pixels yet */
  int waiting = 0;
  int left = scan->restart, expected = 0xD0, fine = 1;
  uint32_t before[3] = {0};
  Bits bits = unstuff(scan);
  int row = scan->from_row < scan->known ? scan->from_row : scan->known, units = scan->units;
  if (row && !go_to(scan, row, &bits, before)) return 0;
  for (; row < scan->upto_row; row++) {
    if (units < scan->units && !go_to(scan, row, &bits, before)) return 0;
    if (scan->index && row > scan->indexed) add_index_entry(scan, &bits, before);
    /* Units right of the box are read only to reach rows that have no index entry yet. */
    int last = row + 1 == scan->upto_row || (row >= scan->from_row && row < scan->known);
    units = last ? scan->upto_unit : scan->units;
    for (int unit = 0; unit < units; unit++) {
      if (scan->restart && left-- == 0) {
        if (scan->marker != expected || unused(&bits)) return 0;
        expected = expected == 0xD7 ? 0xD0 : expected + 1;
        left = scan->restart - 1;
        memset(before, 0, sizeof before);
        bits = unstuff(scan);
      }
      int needed = row >= scan->from_row && unit >= scan->from_unit && unit < scan->upto_unit;
      for (int c = 0; c < scan->components; c++) {
        const Plane *plane = &scan->planes[c];
        uint8_t *to = plane->at;
        if (needed && put_two)
          to += (size_t)(row - scan->from_row) * plane->down * SIDE * plane->stride +
                (size_t)(unit - scan->from_unit) * plane->across * SIDE;
        for (int y = 0; y < plane->down; y++)
          for (int x = 0; x < plane->across; x++) {
            before[c] += (uint32_t)first_difference(&bits, plane->first, &fine);
            if (!fine) return 0;
            if (needed) {
              long last;
              Block *block = &blocks[waiting];
              clear(block->at);
              block->at[0] = (int16_t)before[c];
              if (!rest_of_block(&bits, plane->rest, put_two ? places : file_order, block->at, &last))
                return 0;
              if (!put_two) {
                if (!pack_block(scan->packed, block->at, last) || overrun(&bits)) return 0;
                continue;
              }
              block->steps = plane->steps;
              block->to = to + (size_t)y * SIDE * plane->stride + (size_t)x * SIDE;
              block->stride = plane->stride;
              block->flat = last <= 1;
              if (++waiting == 2) {
                put_two(&blocks[0], &blocks[1]);
                waiting = 0;
              }
            } else if (!skip_rest(&bits, plane->rest)) {
              return 0;
            }
            if (overrun(&bits)) return 0;
          }
      }
    }
  }
  if (waiting) put_two(&blocks[0], &blocks[0]);
  return 1;
}

MODERN static int decode_scan_modern(Scan *scan) {
  return decode_scan_body(scan, put_two_modern, NULL);
}
static int decode_scan_plain(Scan *scan) { return decode_scan_body(scan, put_two_plain, NULL); }
MODERN static int pack_scan_modern(Scan *scan) {
  return decode_scan_body(scan, NULL, pack_block_modern);
}
static int pack_scan_plain(Scan *scan) { return decode_scan_body(scan, NULL, pack_block_plain); }

/* The fuzzer runs both versions. */
#ifdef PENSTOCK_FUZZ
static int only_plain;
#else
#define only_plain 0
#endif

static int decode_scan(Scan *scan) {
  if (HAVE_MODERN && !only_plain)
    return scan->packed ? pack_scan_modern(scan) : decode_scan_modern(scan);
  return scan->packed ? pack_scan_plain(scan) : decode_scan_plain(scan);
}

/* Whether a file is of the common kind decoded here. libjpeg has read its header. */
static int is_common_kind(const struct jpeg_decompress_struct *jpeg) {
  if (jpeg->progressive_mode || jpeg->arith_code || jpeg->data_precision != 8) return 0;
  int grey = jpeg->jpeg_color_space == JCS_GRAYSCALE;
  if (!grey && jpeg->jpeg_color_space != JCS_YCbCr) return 0;
  if (jpeg->num_components != (grey ? 1 : 3) || jpeg->comps_in_scan != jpeg->num_components) return 0;
  if (jpeg->Ss != 0 || jpeg->Se != 63 || jpeg->Ah != 0 || jpeg->Al != 0) return 0;
  const jpeg_component_info *luma = jpeg->comp_info;
  int finer = luma->h_samp_factor * 10 + luma->v_samp_factor;
  if (!grey && finer != 11 && finer != 21 && finer != 22 && finer != 12) return 0;
  for (int c = 0; c < jpeg->num_components; c++) {
    const jpeg_component_info *component = jpeg->cur_comp_info[c];
    if (component != jpeg->comp_info + c) return 0;
    if (c && (component->h_samp_factor != 1 || component->v_samp_factor != 1)) return 0;
    if (!jpeg->quant_tbl_ptrs[component->quant_tbl_no & 3] || component->quant_tbl_no > 3 ||
        component->dc_tbl_no > 1 || component->ac_tbl_no > 1 ||
        !jpeg->dc_huff_tbl_ptrs[component->dc_tbl_no] ||
        !jpeg->ac_huff_tbl_ptrs[component->ac_tbl_no])
      return 0;
  }
  /* In narrower images libjpeg repeats chroma instead of smoothing it. */
  return jpeg->image_width > 4;
}

static int clamp(int value, int least, int most) {
  return value < least ? least : value > most ? most : value;
}

/* Set the units that a box needs and the sizes of the planes; returns the bytes of all planes. */
static size_t plan_scan(Scan *scan, const struct jpeg_decompress_struct *jpeg, int top, int left,
                        int bottom, int right) {
  const jpeg_component_info *luma = jpeg->comp_info;
  /* A scan of one component has units of one block, whatever its sampling factors are. */
  int grey = jpeg->num_components == 1;
  int most_across = grey ? 1 : luma->h_samp_factor, most_down = grey ? 1 : luma->v_samp_factor;
  int unit_width = SIDE * most_across, unit_height = SIDE * most_down;
  int width = (int)jpeg->image_width, height = (int)jpeg->image_height;
  /* Chroma smoothing reads one sample, at most two pixels, to every side. */
  scan->units = (width + unit_width - 1) / unit_width;
  scan->from_unit = clamp(left - 2, 0, width - 1) / unit_width;
  scan->upto_unit = clamp(right + 1, 0, width - 1) / unit_width + 1;
  scan->from_row = clamp(top - 2, 0, height - 1) / unit_height;
  scan->upto_row = clamp(bottom + 1, 0, height - 1) / unit_height + 1;
  scan->restart = (int)jpeg->restart_interval;
  scan->components = jpeg->num_components;
  size_t total = 0;
  for (int c = 0; c < scan->components; c++) {
    Plane *plane = &scan->planes[c];
    plane->across = c ? 1 : most_across;
    plane->down = c ? 1 : most_down;
    plane->top = scan->from_row * plane->down * SIDE;
    plane->left = scan->from_unit * plane->across * SIDE;
    plane->width = (width * plane->across + most_across - 1) / most_across;
    plane->height = (height * plane->down + most_down - 1) / most_down;
    plane->stride = (size_t)(scan->upto_unit - scan->from_unit) * plane->across * SIDE;
    plane->rows = (size_t)(scan->upto_row - scan->from_row) * plane->down * SIDE;
    total += plane->stride * plane->rows + GAP;
  }
  return total;
}

/* Build the Huffman tables and lay out the planes; 0 if a table is invalid. */
static int open_scan(Scan *scan, const struct jpeg_decompress_struct *jpeg) {
  int made[4] = {0};
  uint8_t *memory = scan->memory;
  scan->raw = jpeg->src->next_input_byte;
  scan->raw_end = scan->raw + jpeg->src->bytes_in_buffer;
  for (int c = 0; c < scan->components; c++) {
    Plane *plane = &scan->planes[c];
    const jpeg_component_info *component = jpeg->comp_info + c;
    if (!scan->packed) {
      plane->at = memory;
      memory += plane->stride * plane->rows;
      FORBID(memory, GAP);
      memory += GAP;
    }
    const UINT16 *steps = jpeg->quant_tbl_ptrs[component->quant_tbl_no]->quantval;
    for (int k = 0; k < SIDE * SIDE; k++) plane->steps[k] = (int16_t)steps[k];
    for (int ac = 0; ac < 2; ac++) {
      int number = ac ? component->ac_tbl_no : component->dc_tbl_no;
      const JHUFF_TBL *table = ac ? jpeg->ac_huff_tbl_ptrs[number] : jpeg->dc_huff_tbl_ptrs[number];
      Codes *codes = &scan->codes[2 * ac + number];
      *(ac ? &plane->rest : &plane->first) = codes;
      if (!made[2 * ac + number] && !make_codes(codes, table->bits, table->huffval, ac)) return 0;
      made[2 * ac + number] = 1;
    }
  }
  return 1;
}

/* ------------------------------------------------------------------------------ rows of RGB */

/* Buffers for computing one row. */
typedef struct {
  int16_t *sums;
  uint8_t *blue, *red; /* chroma (Cb, Cr) in full width */
} Row;

INLINE const uint8_t *sample_row(const Plane *plane, int y) {
  return plane->at + (size_t)(clamp(y, 0, plane->height - 1) - plane->top) * plane->stride;
}

/* Copy samples `from` to `upto` of one row, or of two rows mixed three to one, with one more sample
   on either side, repeated at the edge of the image. `sums` begins with the one before `from`. */
INLINE void gather(const Plane *plane, int y, int from, int upto, int mixed, int16_t *sums) {
  const uint8_t *near = sample_row(plane, mixed ? y >> 1 : y) - plane->left;
  const uint8_t *far = mixed ? sample_row(plane, (y >> 1) + (y & 1 ? 1 : -1)) - plane->left : near;
  int low = from > 0 ? from - 1 : 0, high = upto < plane->width ? upto + 1 : plane->width;
  int16_t *to = sums + (low - (from - 1));
  const uint8_t *a = near + low, *b = far + low;
  int count = high - low;
  if (mixed)
    for (int i = 0; i < count; i++) to[i] = (int16_t)(3 * a[i] + b[i]);
  else
    for (int i = 0; i < count; i++) to[i] = a[i];
  if (low == from) sums[0] = sums[1];
  if (high == upto) sums[upto - from + 1] = sums[upto - from];
}

/* Double the samples: each output is three parts its own sample and one part the neighbour. */
INLINE void widen(uint8_t *restrict to, const int16_t *restrict sums, int count, int even, int odd,
                  int shift) {
  for (int i = 0; i < count; i++) {
    int16_t own = (int16_t)(3 * sums[i + 1]);
    to[2 * i] = (uint8_t)((uint16_t)(own + sums[i] + even) >> shift);
    to[2 * i + 1] = (uint8_t)((uint16_t)(own + sums[i + 2] + odd) >> shift);
  }
}

INLINE int16_t part(int16_t value, int16_t factor) {
  /* value * factor / 65536, rounded, in 16 bits throughout. */
  return (int16_t)(((int16_t)((int16_t)(2 * value) * (int32_t)factor >> 16) + 1) >> 1);
}

INLINE uint8_t squeeze(int16_t value) {
  /* In two steps, each of which is one instruction for a whole vector. */
  int16_t least = value > 0 ? value : 0;
  return (uint8_t)(least < 255 ? least : 255);
}

/* Pixels `left` to `left + width` of row `y`: all red, then green, then blue, `stride` apart. */
INLINE void rgb_row_body(const Scan *scan, int y, int left, int width, uint8_t *restrict out,
                         size_t stride, Row room) {
  const Plane *luma = &scan->planes[0];
  const uint8_t *grey = sample_row(luma, y) - luma->left + left;
  const uint8_t *differences[2];
  if (scan->components == 1) {
    for (int c = 0; c < 3; c++) memcpy(out + (size_t)c * stride, grey, (size_t)width);
    return;
  }
  for (int c = 0; c < 2; c++) {
    const Plane *plane = &scan->planes[1 + c];
    uint8_t *wide = c ? room.red : room.blue;
    if (luma->across == 1) {
      if (luma->down == 1) {
        differences[c] = sample_row(plane, y) - plane->left + left;
        continue;
      }
      const uint8_t *near = sample_row(plane, y >> 1) - plane->left + left;
      const uint8_t *far = sample_row(plane, (y >> 1) + (y & 1 ? 1 : -1)) - plane->left + left;
      for (int x = 0; x < width; x++) wide[x] = (uint8_t)((3 * near[x] + far[x] + 1 + (y & 1)) >> 2);
      differences[c] = wide;
      continue;
    }
    int from = left >> 1, upto = (left + width + 1) >> 1, mixed = luma->down == 2;
    gather(plane, y, from, upto, mixed, room.sums);
    if (mixed)
      widen(wide, room.sums, upto - from, 8, 7, 4);
    else
      widen(wide, room.sums, upto - from, 1, 2, 2);
    differences[c] = wide + (left & 1);
  }
  const uint8_t *restrict blue = differences[0], *restrict red = differences[1];
  uint8_t *restrict r = out, *restrict g = out + stride, *restrict b = out + 2 * stride;
  for (int x = 0; x < width; x++) {
    int16_t cr = (int16_t)(red[x] - 128), cb = (int16_t)(blue[x] - 128);
    r[x] = squeeze((int16_t)(grey[x] + cr + part(cr, 26345)));
    b[x] = squeeze((int16_t)(grey[x] + 2 * cb + part(cb, -14942)));
  }
  for (int x = 0; x < width; x++) {
    int32_t cr = red[x] - 128, cb = blue[x] - 128;
    g[x] = squeeze((int16_t)(grey[x] + ((-22554 * cb - 46802 * cr + 32768) >> 16)));
  }
}

MODERN static void rgb_row_modern(const Scan *scan, int y, int left, int width, uint8_t *out,
                                  size_t stride, Row room) {
  rgb_row_body(scan, y, left, width, out, stride, room);
}

static void rgb_row_plain(const Scan *scan, int y, int left, int width, uint8_t *out,
                          size_t stride, Row room) {
  rgb_row_body(scan, y, left, width, out, stride, room);
}

static void rgb_row(const Scan *scan, int y, int left, int width, uint8_t *out, size_t stride,
                    Row room) {
  if (HAVE_MODERN && !only_plain)
    rgb_row_modern(scan, y, left, width, out, stride, room);
  else
    rgb_row_plain(scan, y, left, width, out, stride, room);
}
