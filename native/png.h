/* Decodes common PNGs: 8 bits a channel, not interlaced, no animation. Everything else, and every file
 * with the least sign of damage, is left to Python (UNSUPPORTED), which finds out what it is.
 *
 * All of the file is checked (checksums of chunks and pixels), but rows below a box are not filtered.
 *
 * Does not depend on Python, so that it can be fuzzed separately.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PNG_HEADER 33 /* signature and IHDR */
/* A PNG of one colour is a thousandth of its pixels. Larger pictures are left to Python. */
#define PNG_MOST_PIXELS ((uint64_t)1 << 26)

/* The fuzzer breaks files without knowing their checksums. */
#ifdef PENSTOCK_FUZZ
#define SUMS_DIFFER(one, other) ((void)(one), (void)(other), 0)
#else
#define SUMS_DIFFER(one, other) ((one) != (other))
#endif

static const uint8_t png_signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};

static int is_png(const uint8_t *data, size_t length) {
  return length >= 8 && !memcmp(data, png_signature, 8);
}

static uint32_t big_endian(const uint8_t *at) {
  return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Height and width of a PNG that this file decodes. Returns 0, or 1 if Python must do it. */
static int png_size(const uint8_t *data, size_t length, int *height, int *width) {
  if (length < PNG_HEADER || !is_png(data, length)) return 1;
  if (big_endian(data + 8) != 13 || memcmp(data + 12, "IHDR", 4)) return 1;
  uint32_t columns = big_endian(data + 16), rows = big_endian(data + 20);
  int depth = data[24], colour = data[25];
  if (depth != 8 || (colour != 0 && colour != 2 && colour != 3 && colour != 4 && colour != 6)) return 1;
  if (data[26] || data[27] || data[28]) return 1; /* compression, filter, interlace */
  if (!columns || !rows || columns > 65535 || rows > 65535) return 1;
  if ((uint64_t)columns * rows > PNG_MOST_PIXELS) return 1;
  *height = (int)rows;
  *width = (int)columns;
  return 0;
}

/* CRC-32 of chunks, four bytes at a time. The tables are computed when the module is loaded. */
static uint32_t png_crc_table[4][256];

__attribute__((constructor)) static void fill_png_crc_table(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
    png_crc_table[0][i] = c;
  }
  for (int i = 0; i < 256; i++)
    for (int k = 1; k < 4; k++)
      png_crc_table[k][i] =
          png_crc_table[0][png_crc_table[k - 1][i] & 255] ^ png_crc_table[k - 1][i] >> 8;
}

static uint32_t png_crc(const uint8_t *at, size_t length) {
  uint32_t c = 0xFFFFFFFFu;
  for (; length >= 4; at += 4, length -= 4) {
    c ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    c = png_crc_table[3][c & 255] ^ png_crc_table[2][c >> 8 & 255] ^
        png_crc_table[1][c >> 16 & 255] ^ png_crc_table[0][c >> 24];
  }
  for (; length; at++, length--) c = png_crc_table[0][(c ^ *at) & 255] ^ c >> 8;
  return ~c;
}

static uint32_t adler(const uint8_t *at, size_t length) {
  uint32_t a = 1, b = 0;
  while (length) {
    size_t run = length < 5552 ? length : 5552;
    length -= run;
    for (; run >= 8; run -= 8, at += 8) {
      uint32_t sum = at[0] + at[1] + at[2] + at[3] + at[4] + at[5] + at[6] + at[7];
      b += 8 * a + 8u * at[0] + 7u * at[1] + 6u * at[2] + 5u * at[3] + 4u * at[4] + 3u * at[5] +
           2u * at[6] + at[7];
      a += sum;
    }
    for (; run; run--) b += a += *at++;
    a %= 65521;
    b %= 65521;
  }
  return b << 16 | a;
}

/* A Huffman code. Codes of up to `FAST` bits are looked up; longer ones are read bit by bit.
   An entry: bits 0-3 length of the code, 4-7 extra bits, 8-9 kind, from 16 on a literal or a base. */
enum { FAST = 10, LITERAL = 0, MATCH = 1, END = 2, SLOW = 3 };

typedef struct {
  uint32_t fast[1 << FAST];
  uint16_t count[16], symbol[288];
} Huffman;

static const uint16_t length_base[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                         31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
static const uint8_t length_extra[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                         2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
static const uint16_t distance_base[30] = {1,    2,    3,    4,    5,    7,    9,     13,    17,   25,
                                           33,   49,   65,   97,   129,  193,  257,   385,   513,  769,
                                           1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
static const uint8_t distance_extra[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                           6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

enum { OF_LITERALS, OF_DISTANCES, OF_LENGTHS };

/* The entry of a symbol; 0 if no such symbol may occur. */
static uint32_t entry_of(int code, int symbol, int length) {
  if (code == OF_DISTANCES) {
    if (symbol > 29) return 0;
    return (uint32_t)distance_base[symbol] << 16 | MATCH << 8 | (uint32_t)distance_extra[symbol] << 4 |
           (uint32_t)length;
  }
  if (code == OF_LENGTHS || symbol < 256)
    return (uint32_t)symbol << 16 | LITERAL << 8 | (uint32_t)length;
  if (symbol == 256) return END << 8 | (uint32_t)length;
  if (symbol > 285) return 0;
  return (uint32_t)length_base[symbol - 257] << 16 | MATCH << 8 |
         (uint32_t)length_extra[symbol - 257] << 4 | (uint32_t)length;
}

/* Make the tables from the lengths of codes. Returns 0, or 1 if they are no complete code. */
static int make_huffman(Huffman *h, int code, const uint8_t *lengths, int symbols) {
  uint16_t at[16], next[16];
  memset(h->count, 0, sizeof h->count);
  for (int i = 0; i < symbols; i++) h->count[lengths[i]]++;
  int used = symbols - h->count[0], left = 1;
  h->count[0] = 0;
  for (int k = 1; k < 16; k++) {
    left = 2 * left - h->count[k];
    if (left < 0) return 1;
  }
  /* One distance, or none, may have an incomplete code. */
  if (left && !(code == OF_DISTANCES && used <= 1 && (!used || h->count[1] == 1))) return 1;
  at[1] = next[1] = 0;
  for (int k = 1; k < 15; k++) {
    at[k + 1] = (uint16_t)(at[k] + h->count[k]);
    next[k + 1] = (uint16_t)((next[k] + h->count[k]) << 1);
  }
  for (int i = 0; i < 1 << FAST; i++) h->fast[i] = left ? 0 : SLOW << 8;
  for (int i = 0; i < symbols; i++) {
    int length = lengths[i];
    if (!length) continue;
    h->symbol[at[length]++] = (uint16_t)i;
    uint32_t bits = next[length]++, turned = 0;
    if (length > FAST) continue;
    for (int k = 0; k < length; k++) turned |= (bits >> k & 1) << (length - 1 - k);
    uint32_t entry = entry_of(code, i, length);
    for (uint32_t place = turned; place < 1 << FAST; place += 1u << length) h->fast[place] = entry;
  }
  return 0;
}

typedef struct {
  const uint8_t *at, *end;
  uint64_t bits;
  int left, over; /* bits that are there; bytes of zeros that were added at the end */
} Stream;

static inline void fill_stream(Stream *b) {
  if (b->end - b->at >= 8) {
    uint64_t more;
    memcpy(&more, b->at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    more = __builtin_bswap64(more);
#endif
    b->bits |= more << b->left;
    b->at += (63 - b->left) >> 3;
    b->left |= 56;
    return;
  }
  while (b->left <= 56) {
    if (b->at < b->end)
      b->bits |= (uint64_t)*b->at++ << b->left;
    else
      b->over++;
    b->left += 8;
  }
}

static inline uint32_t take_bits(Stream *b, int count) {
  uint32_t value = (uint32_t)(b->bits & (((uint64_t)1 << count) - 1));
  b->bits >>= count;
  b->left -= count;
  return value;
}

/* The next entry of a code; 0 if there is none. There must be 15 bits. */
static inline uint32_t next_code(Stream *b, const Huffman *h, int code) {
  uint32_t entry = h->fast[b->bits & ((1 << FAST) - 1)];
  if ((entry >> 8 & 3) != SLOW) {
    b->bits >>= entry & 15;
    b->left -= (int)(entry & 15);
    return entry;
  }
  int bits = 0, first = 0, index = 0;
  for (int length = 1; length < 16; length++) {
    bits |= (int)take_bits(b, 1);
    int count = h->count[length];
    if (bits - count < first) return entry_of(code, h->symbol[index + bits - first], length);
    index += count;
    first = (first + count) << 1;
    bits <<= 1;
  }
  return 0;
}

static int read_codes(Stream *b, Huffman *literals, Huffman *distances) {
  static const uint8_t places[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  uint8_t lengths[320] = {0};
  fill_stream(b);
  int literal = (int)take_bits(b, 5) + 257, distance = (int)take_bits(b, 5) + 1, count = (int)take_bits(b, 4) + 4;
  if (literal > 286 || distance > 30) return 1;
  for (int i = 0; i < count; i++) {
    if (b->left < 3) fill_stream(b);
    lengths[places[i]] = (uint8_t)take_bits(b, 3);
  }
  if (make_huffman(literals, OF_LENGTHS, lengths, 19)) return 1;
  memset(lengths, 0, sizeof lengths);
  for (int i = 0; i < literal + distance;) {
    fill_stream(b);
    uint32_t entry = next_code(b, literals, OF_LENGTHS);
    if (!entry) return 1;
    int symbol = (int)(entry >> 16), again = 1;
    uint8_t value = (uint8_t)symbol;
    if (symbol == 16) {
      if (!i) return 1;
      value = lengths[i - 1];
      again = 3 + (int)take_bits(b, 2);
    } else if (symbol > 16) {
      value = 0;
      again = symbol == 17 ? 3 + (int)take_bits(b, 3) : 11 + (int)take_bits(b, 7);
    }
    if (i + again > literal + distance) return 1;
    while (again--) lengths[i++] = value;
  }
  if (b->over > 8 || !lengths[256]) return 1;
  return make_huffman(literals, OF_LITERALS, lengths, literal) ||
         make_huffman(distances, OF_DISTANCES, lengths + literal, distance);
}

static int fixed_codes(Huffman *literals, Huffman *distances) {
  uint8_t lengths[288];
  memset(lengths, 8, 144);
  memset(lengths + 144, 9, 112);
  memset(lengths + 256, 7, 24);
  memset(lengths + 280, 8, 8);
  if (make_huffman(literals, OF_LITERALS, lengths, 288)) return 1;
  memset(lengths, 5, 32);
  return make_huffman(distances, OF_DISTANCES, lengths, 32);
}

/* Unpack a block into `out`. Returns the number of bytes there are then, or 0 if it is unusual. */
static size_t inflate_block(Stream *b, const Huffman *literals, const Huffman *distances, uint8_t *out,
                            size_t at, size_t room) {
  for (;;) {
    fill_stream(b);
    if (b->over > 8) return 0;
    uint32_t entry = next_code(b, literals, OF_LITERALS);
    int kind = (int)(entry >> 8 & 3);
    if (!entry) return 0;
    if (kind == LITERAL) {
      if (at >= room) return 0;
      out[at++] = (uint8_t)(entry >> 16);
      /* At least 41 bits are left: two more literals need no fill_stream. */
      for (int more = 0; more < 2; more++) {
        entry = literals->fast[b->bits & ((1 << FAST) - 1)];
        if ((entry >> 8 & 3) != LITERAL || !entry || at >= room) break;
        out[at++] = (uint8_t)(entry >> 16);
        b->bits >>= entry & 15;
        b->left -= (int)(entry & 15);
      }
      continue;
    }
    if (kind == END) return at;
    size_t length = (entry >> 16) + take_bits(b, (int)(entry >> 4 & 15));
    fill_stream(b);
    entry = next_code(b, distances, OF_DISTANCES);
    if (!entry) return 0;
    size_t distance = (entry >> 16) + take_bits(b, (int)(entry >> 4 & 15));
    if (distance > at || length > room - at) return 0;
    uint8_t *to = out + at;
    const uint8_t *from = to - distance;
    at += length;
    if (distance == 1)
      memset(to, *from, length);
    else if (distance >= length)
      memcpy(to, from, length);
    else
      while (length--) *to++ = *from++;
  }
}

/* Unpack a zlib stream of exactly `room` bytes. Returns 0, or 1 if it is unusual. */
static int inflate_exactly(const uint8_t *data, size_t length, uint8_t *out, size_t room) {
  if (length < 6 || (data[0] & 15) != 8 || data[0] >> 4 > 7 || (data[1] & 32) ||
      (data[0] << 8 | data[1]) % 31)
    return 1;
  Stream b = {data + 2, data + length, 0, 0, 0};
  Huffman *tables = malloc(2 * sizeof *tables);
  if (!tables) return 1;
  size_t at = 0;
  int last = 0, wrong = 0;
  while (!last && !wrong) {
    fill_stream(&b);
    last = (int)take_bits(&b, 1);
    int kind = (int)take_bits(&b, 2);
    if (kind == 0) {
      take_bits(&b, b.left & 7);
      fill_stream(&b);
      uint32_t size = take_bits(&b, 16), turned = take_bits(&b, 16);
      wrong = b.over || (size ^ turned) != 0xFFFF;
      if (wrong) break;
      /* Bytes that were taken ahead go back. */
      b.at -= b.left >> 3;
      b.bits = 0;
      b.left = 0;
      wrong = size > (size_t)(b.end - b.at) || size > room - at;
      if (wrong) break;
      memcpy(out + at, b.at, size);
      b.at += size;
      at += size;
      continue;
    }
    wrong = kind == 3 || (kind == 1 ? fixed_codes(tables, tables + 1)
                                    : read_codes(&b, tables, tables + 1));
    if (wrong) break;
    size_t then = inflate_block(&b, tables, tables + 1, out, at, room);
    wrong = then < at || (!then && room);
    at = then;
  }
  free(tables);
  if (wrong || at != room) return 1;
  /* After whole bytes the sum of all bytes follows, and nothing else. Zeros beyond the end are the
     last bits that were added. */
  int there = (b.left >> 3) - b.over;
  if (there < 0) return 1;
  const uint8_t *rest = b.at - there;
  return b.end - rest != 4 || SUMS_DIFFER(big_endian(rest), adler(out, room));
}

static inline int paeth(int left, int up, int corner) {
  int a = abs(up - corner), b = abs(left - corner), c = abs(left + up - 2 * corner);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

/* Undo the filter of a row. `up` is the row above, or zeros. */
static int unfilter(int filter, const uint8_t *from, const uint8_t *up, uint8_t *to, size_t length,
                    size_t step) {
  size_t i = 0;
  switch (filter) {
    case 0: memcpy(to, from, length); return 0;
    case 1:
      for (; i < step; i++) to[i] = from[i];
      for (; i < length; i++) to[i] = (uint8_t)(from[i] + to[i - step]);
      return 0;
    case 2:
      for (; i < length; i++) to[i] = (uint8_t)(from[i] + up[i]);
      return 0;
    case 3:
      for (; i < step; i++) to[i] = (uint8_t)(from[i] + (up[i] >> 1));
      for (; i < length; i++) to[i] = (uint8_t)(from[i] + ((to[i - step] + up[i]) >> 1));
      return 0;
    case 4:
      for (; i < step; i++) to[i] = (uint8_t)(from[i] + up[i]);
      if (step == 3) { /* three channels beside each other, in registers */
        int l0 = to[0], l1 = to[1], l2 = to[2], c0 = up[0], c1 = up[1], c2 = up[2];
        for (; i + 2 < length; i += 3) {
          int u0 = up[i], u1 = up[i + 1], u2 = up[i + 2];
          to[i] = (uint8_t)(l0 = (from[i] + paeth(l0, u0, c0)) & 255);
          to[i + 1] = (uint8_t)(l1 = (from[i + 1] + paeth(l1, u1, c1)) & 255);
          to[i + 2] = (uint8_t)(l2 = (from[i + 2] + paeth(l2, u2, c2)) & 255);
          c0 = u0, c1 = u1, c2 = u2;
        }
      }
      for (; i < length; i++)
        to[i] = (uint8_t)(from[i] + paeth(to[i - step], up[i], up[i - step]));
      return 0;
    default: return 1;
  }
}

/* The chunks of a PNG: its pixels (`packed`, which the caller frees) and its palette. Returns 0, or 1 if
   Python must look at the file. */
static int png_chunks(const uint8_t *data, size_t length, uint8_t **packed, size_t *packed_length,
                      const uint8_t **palette, int *colours) {
  size_t at = 8, filled = 0;
  int number = 0, ended = 0, between = 0;
  uint8_t *to = malloc(length);
  *packed = to;
  if (!to) return 1;
  while (!ended) {
    if (length - at < 12) return 1;
    size_t size = big_endian(data + at);
    const uint8_t *name = data + at + 4, *content = name + 4;
    if (size > length - at - 12) return 1;
    if (SUMS_DIFFER(png_crc(name, size + 4), big_endian(content + size))) return 1;
    if (!memcmp(name, "IDAT", 4)) {
      if (between) return 1;
      memcpy(to + filled, content, size);
      filled += size;
    } else {
      if (filled) between = 1;
      if (!memcmp(name, "IHDR", 4)) {
        if (number) return 1;
      } else if (!memcmp(name, "PLTE", 4)) {
        if (*palette || filled || !size || size % 3 || size > 768) return 1;
        *palette = content;
        *colours = (int)(size / 3);
      } else if (!memcmp(name, "IEND", 4)) {
        if (size) return 1;
        ended = 1;
      } else if (memcmp(name, "pHYs", 4) || size != 9) {
        /* Texts, profiles, transparency and animations have rules of their own. */
        if (memcmp(name, "gAMA", 4) || size != 4)
          if (memcmp(name, "sRGB", 4) || size != 1)
            if (memcmp(name, "tEXt", 4)) return 1;
      }
    }
    number++;
    at += size + 12;
  }
  *packed_length = filled;
  return !filled;
}

/* Decode the first `wanted` rows of a PNG to RGB, into memory that the caller frees. Returns NULL if
   Python must do it. */
static uint8_t *png_pixels(const uint8_t *data, size_t length, int wanted) {
  int height, width, colours = 0;
  if (png_size(data, length, &height, &width)) return NULL;
  int colour = data[25];
  size_t step = colour == 2 ? 3 : colour == 4 ? 2 : colour == 6 ? 4 : 1;
  size_t row = (size_t)width * step, size = (size_t)height * (row + 1);
  uint8_t *packed = NULL, *filtered = NULL, *pixels = NULL, *lines = NULL;
  const uint8_t *palette = NULL;
  size_t packed_length = 0;
  int wrong = png_chunks(data, length, &packed, &packed_length, &palette, &colours);
  wrong = wrong || (colour == 3 && !palette) || size / 1032 > packed_length;
  if (!wrong) {
    filtered = malloc(size);
    pixels = malloc((size_t)wanted * width * 3);
    lines = calloc(3, row);
    wrong = !filtered || !pixels || !lines;
  }
  wrong = wrong || inflate_exactly(packed, packed_length, filtered, size);
  const uint8_t *up = lines; /* zeros */
  for (int y = 0; !wrong && y < height; y++) {
    const uint8_t *from = filtered + (size_t)y * (row + 1);
    if (y >= wanted) {
      wrong = *from > 4;
      continue;
    }
    uint8_t *rgb = pixels + (size_t)y * width * 3;
    uint8_t *line = colour == 2 ? rgb : lines + (size_t)(1 + (y & 1)) * row;
    wrong = unfilter(*from, from + 1, up, line, row, step);
    up = line;
    if (colour == 2) continue;
    for (int x = 0; !wrong && x < width; x++, rgb += 3) {
      const uint8_t *pixel = line + (size_t)x * step;
      if (colour == 6) {
        memcpy(rgb, pixel, 3);
      } else if (colour == 3) {
        if (*pixel >= colours) wrong = 1;
        else memcpy(rgb, palette + 3 * *pixel, 3);
      } else {
        memset(rgb, *pixel, 3);
      }
    }
  }
  free(packed);
  free(filtered);
  free(lines);
  if (!wrong) return pixels;
  free(pixels);
  return NULL;
}
