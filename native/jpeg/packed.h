/* Packed coefficients: what the entropy-coded bits of a box say, for a device that does the rest.
 *
 * Each block has a record of four bytes and its data. All coefficients of all blocks can be unpacked in
 * parallel: the data of a block begins where the lengths in the records before it end.
 *
 *   record  bits 0 to 15: the first coefficient (DC); 16 to 23: which groups of eight coefficients, in
 *           the order of the file, are not all 0; 24 to 31: bytes of data
 *   data    for each of these groups a byte of its coefficients that are not 0, the lowest bit first; then
 *           their values, one byte each, or two (low first) if any of them does not fit into one
 *
 * The DC coefficient is not in its group. Blocks are in the order of the file: unit by unit.
 *
 * The buffer of several pictures has the table of all pictures, then their quantization steps, records
 * and data. image/coefficients.py knows the table, and image/on_device/ unpacks.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Zeros behind the data, so that a device may read the byte after the last one. */
#define PACKED_PADDING 8

/* The most bytes that a block has: 8 groups, and 63 values of two bytes. */
#define MOST_BLOCK_DATA (8 + 2 * 63)

/* One picture in the table. Its planes, first luma, have 64 bytes for each of its blocks. */
typedef struct {
  int64_t pixel;                    /* first byte of its pixels in the result */
  int64_t height, width, top, left; /* the box, in pixels */
  int64_t block, blocks;            /* its first block in the buffer, and their number */
  int64_t across, down;             /* units */
  int64_t finer_across, finer_down; /* blocks of luma in a unit */
  int64_t components;
  int64_t unit_top, unit_left;      /* position of the first unit in the picture, in units */
  int64_t full_height, full_width;  /* of the whole picture */
} PackedPicture;

typedef struct {
  PackedPicture picture;
  int16_t steps[3][64]; /* quantization steps in the order of rows */
  uint32_t *records;
  size_t written; /* records */
  uint8_t *data;
  size_t length, room;
} Packed;

/* Append a block, whose coefficients from `last` on are 0; 0 if there is no memory. */
typedef int PackBlock(Packed *packed, const int16_t *block, long last);

static int grow_packed(Packed *packed) {
  size_t room = packed->room + packed->room / 2 + 16 * MOST_BLOCK_DATA;
  uint8_t *data = realloc(packed->data, room);
  if (!data) return 0;
  packed->data = data;
  packed->room = room;
  return 1;
}

/* Append the values of coefficients that are not 0, as `mask` has them, behind `groups` bytes. */
INLINE void finish_block(Packed *packed, const int16_t *block, uint64_t mask, uint32_t groups,
                         uint32_t group_bytes) {
  uint8_t *at = packed->data + packed->length + group_bytes;
  uint32_t wide = 0, count = 0;
  for (uint64_t rest = mask; rest; rest &= rest - 1) {
    int16_t value = block[__builtin_ctzll(rest)];
    wide |= (uint32_t)(value + 128);
    at[count++] = (uint8_t)value;
  }
  if (wide > 255) {
    count = 0;
    for (uint64_t rest = mask; rest; rest &= rest - 1) {
      uint16_t value = (uint16_t)block[__builtin_ctzll(rest)];
      at[count++] = (uint8_t)value;
      at[count++] = (uint8_t)(value >> 8);
    }
  }
  uint32_t length = group_bytes + count;
  packed->records[packed->written++] = (uint16_t)block[0] | groups << 16 | length << 24;
  packed->length += length;
}

static inline int pack_block_plain(Packed *packed, const int16_t *block, long last) {
  if (packed->room - packed->length < MOST_BLOCK_DATA && !grow_packed(packed)) return 0;
  uint64_t mask = 0;
  for (long k = 1; k < last; k++) mask |= (uint64_t)(block[k] != 0) << k;
  uint32_t groups = 0, count = 0;
  for (int group = 0; group < 8; group++) {
    uint8_t bits = (uint8_t)(mask >> 8 * group);
    if (!bits) continue;
    groups |= 1u << group;
    packed->data[packed->length + count++] = bits;
  }
  finish_block(packed, block, mask, groups, count);
  return 1;
}

#ifdef HAVE_AVX2
MODERN static inline int pack_block_modern(Packed *packed, const int16_t *block, long last) {
  (void)last;
  if (packed->room - packed->length < MOST_BLOCK_DATA && !grow_packed(packed)) return 0;
  const __m256i none = _mm256_setzero_si256();
  uint64_t zeros = 1; /* bit k: coefficient k is 0, or is the first */
  for (int i = 0; i < 2; i++) {
    const __m256i *from = (const __m256i *)(block + 32 * i);
    __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_load_si256(from), none),
                                      _mm256_cmpeq_epi16(_mm256_load_si256(from + 1), none));
    both = _mm256_permute4x64_epi64(both, 0xD8);
    zeros |= (uint64_t)(uint32_t)_mm256_movemask_epi8(both) << 32 * i;
  }
  uint64_t mask = ~zeros;
  __m128i bytes = _mm_cvtsi64_si128((long long)mask);
  uint32_t groups = ~(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128())) & 255;
  /* The bytes of groups, without those that are 0. */
  uint64_t kept = _pext_u64(mask, _pdep_u64(groups, 0x0101010101010101u) * 255);
  memcpy(packed->data + packed->length, &kept, sizeof kept);
  finish_block(packed, block, mask, groups, (uint32_t)__builtin_popcount(groups));
  return 1;
}
#else
#define pack_block_modern pack_block_plain
#endif

/* Bytes of a buffer with these pictures, and their numbers in it. */
static size_t place_pictures(Packed *const *pictures, size_t count) {
  size_t size = PACKED_PADDING;
  int64_t block = 0, pixel = 0;
  for (size_t i = 0; i < count; i++) {
    PackedPicture *picture = &pictures[i]->picture;
    picture->block = block;
    picture->pixel = pixel;
    block += picture->blocks;
    pixel += picture->height * picture->width * 3;
    size += sizeof *picture + sizeof pictures[i]->steps + (size_t)picture->blocks * 4 + pictures[i]->length;
  }
  return size;
}

/* Write that buffer. */
static void write_pictures(Packed *const *pictures, size_t count, uint8_t *to) {
  for (int part = 0; part < 4; part++)
    for (size_t i = 0; i < count; i++) {
      const Packed *one = pictures[i];
      const void *parts[] = {&one->picture, one->steps, one->records, one->data};
      size_t sizes[] = {sizeof one->picture, sizeof one->steps, (size_t)one->picture.blocks * 4, one->length};
      memcpy(to, parts[part], sizes[part]);
      to += sizes[part];
    }
  memset(to, 0, PACKED_PADDING);
}
