/* Huffman decoding of baseline JPEGs. No decoder can skip it, so its speed matters most.
 *
 * Three things make it faster than libjpeg's. Stuffed zeros are removed from the data beforehand, so
 * bits are loaded eight bytes at a time without checking each byte. One lookup of the next LOOK bits
 * gives two codes, if they are short, and the length of both with their values, so the next lookup can
 * begin before the values are computed, without a branch. Blocks that are not needed are skipped by
 * length.
 *
 * libjpeg has read the headers and tables. If anything is unusual or damaged here, the caller lets
 * libjpeg decode the file from its start and report what is wrong.
 */
#include <stdint.h>
#include <string.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif
#define LIKELY(x) __builtin_expect(!!(x), 1)

#define LOOK 10
/* The longest code. */
#define LONGEST 16

/* A table entry for the next LOOK bits describes one code and its value or, if the code after it lies
   within these bits too, both: then the first value is in the entry. In photographs of good quality,
   three lookups of five give two codes. An entry of one code has the same steps and bits for the first
   and for both. 0 means a code longer than LOOK. */
#define USED(entry) ((uint32_t)(entry) & 0x3Fu)           /* bits of the codes and their values */
#define FORWARD(entry) ((uint32_t)(entry) >> 8 & 0xFFu)   /* coefficients to go forward */
#define FORWARD_1(entry) ((uint32_t)(entry) >> 16 & 0xFFu) /* the same for the first code alone */
#define USED_1(entry) ((uint32_t)(entry) >> 24 & 0xFFu)
#define MASK(entry) ((uint32_t)((entry) >> 32) & 0xFFFFu) /* ones for the bits of the last value */
#define VALUE_1(entry) ((int16_t)((entry) >> 48))         /* the first value, if there are two */

/* The step of an end of block. It is larger than any valid run, so the two can be told apart. */
#define END 128

typedef struct {
  uint64_t next[1 << LOOK];
  int32_t most[LONGEST + 2]; /* the last code of each length; the extra length matches anything */
  int32_t offset[LONGEST + 2];
  uint64_t entries[256];     /* the entry of each code alone, in code order */
} Codes;

/* A bit reader over unstuffed data between two restarts. The next bits are the high ones. */
typedef struct {
  uint64_t bits;
  uint32_t count; /* number of valid bits */
  const uint8_t *next, *end;
} Bits;

/* Bytes of padding: a block reads at most 64 * 31 bits past its end, and loads 8 bytes ahead. */
#define BEYOND 320

INLINE void refill(Bits *b) {
  uint64_t more;
  memcpy(&more, b->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  more = __builtin_bswap64(more);
#endif
  b->bits |= more >> b->count;
  b->next += (63 - b->count) >> 3;
  b->count |= 56;
}

INLINE void use(Bits *b, uint32_t count) {
  b->bits <<= count;
  b->count -= count;
}

/* Whether more bits were read than the data has. */
INLINE int overrun(const Bits *b) { return b->next - (b->count >> 3) > b->end; }

/* Whether whole bytes of the data were not read. */
INLINE int unused(const Bits *b) { return b->next - (b->count >> 3) < b->end; }

/* The number encoded by the bits of a value. If the first bit is 0, the number is negative, and the
   bits are those of its absolute value, inverted. */
INLINE int32_t number_of(uint32_t value, uint32_t mask) {
  return (int32_t)(value - (2 * value > mask ? 0 : mask));
}

/* The last value that an entry describes: its bits are the last that the entry uses. */
INLINE int32_t value_of(uint64_t bits, uint64_t entry) {
  return number_of((uint32_t)(bits >> (-USED(entry) & 63)) & MASK(entry), MASK(entry));
}

/* The entry of a code longer than LOOK; 0 if there is no such code. */
static uint64_t long_code(uint64_t bits, const Codes *codes) {
  int length = LOOK + 1;
  while ((int32_t)(bits >> (64 - length)) > codes->most[length]) length++;
  if (length > LONGEST) return 0;
  return codes->entries[((int32_t)(bits >> (64 - length)) + codes->offset[length]) & 0xFF];
}

INLINE uint64_t next_entry(const Bits *b, const Codes *codes) {
  uint64_t entry = codes->next[b->bits >> (64 - LOOK)];
  return LIKELY(entry) ? entry : long_code(b->bits, codes);
}

/* Make entries of two codes from the entries of one, which are in `single`. `at`: the first entry of
   the first code. */
static void add_second_codes(uint64_t *at, const uint64_t *single) {
  uint64_t first = *at;
  int used = (int)USED(first), spare = LOOK - used;
  if (spare < 1 || FORWARD(first) == END) return;
  for (int rest = 0; rest < 1 << spare; rest++) {
    uint64_t second = single[rest << used];
    /* Its code must lie within the bits looked at; its value need not. */
    if (!second || __builtin_ctz(~MASK(second)) + spare < (int)USED(second)) continue;
    at[rest] = (first & 0xFFFF0000u) | (FORWARD(first) + FORWARD(second)) << 8 |
               (uint32_t)(used + (int)USED(second)) | (uint64_t)MASK(second) << 32;
  }
  /* The entries for every first value differ in nothing else. */
  for (uint32_t value = MASK(first) + 1; value-- > 0;)
    for (int rest = 0; rest < 1 << spare; rest++)
      at[((size_t)value << spare) + (size_t)rest] =
          (at[rest] & 0x0000FFFFFFFFFFFFu) |
          (uint64_t)(uint16_t)number_of(value, MASK(first)) << 48;
}

/* Build the tables of one Huffman code; 0 if the code is invalid. */
static int make_codes(Codes *codes, const uint8_t *lengths, const uint8_t *symbols, int ac) {
  uint64_t single[1 << LOOK];
  int32_t code = 0, index = 0;
  memset(codes->next, 0, sizeof codes->next);
  memset(codes->entries, 0, sizeof codes->entries);
  for (int length = 1; length <= LONGEST; length++) {
    int count = lengths[length];
    if (index + count > 256 || code + count > 1 << length) return 0;
    codes->offset[length] = index - code;
    codes->most[length] = code + count - 1;
    for (int i = 0; i < count; i++, code++, index++) {
      int symbol = symbols[index], size = ac ? symbol & 15 : symbol;
      int forward = !ac ? 1 : symbol ? (symbol >> 4) + 1 : END;
      if (size > (ac ? 10 : 11) || (ac && size == 0 && symbol != 0 && symbol != 0xF0)) return 0;
      uint32_t used = (uint32_t)(length + size), step = (uint32_t)forward;
      uint64_t entry = used << 24 | step << 16 | step << 8 | used | (((uint64_t)1 << size) - 1) << 32;
      codes->entries[index] = entry;
      if (length > LOOK) continue;
      int spare = LOOK - length;
      for (int rest = 0; rest < 1 << spare; rest++) codes->next[(code << spare) + rest] = entry;
    }
    code <<= 1;
  }
  codes->most[LONGEST + 1] = INT32_MAX;
  if (!ac) return 1;
  memcpy(single, codes->next, sizeof single);
  code = 0;
  for (int length = 1; length < LOOK; length++, code <<= 1)
    for (int i = 0; i < lengths[length]; i++, code++)
      add_second_codes(codes->next + ((size_t)code << (LOOK - length)), single);
  return 1;
}

/* The difference of a block's DC coefficient to the one before. Sets `fine` to 0 on a bad code. */
INLINE int32_t first_difference(Bits *b, const Codes *codes, int *fine) {
  refill(b);
  uint64_t entry = next_entry(b, codes);
  if (!entry) *fine = 0;
  int32_t value = value_of(b->bits, entry);
  use(b, USED(entry));
  return value;
}

/* Size of the table from zigzag order to positions in the block: a run of 16 may come before an end of
   block. All entries past the 64th are the place behind the block, which is never read: an end of block
   writes there, and a second code that belongs to the next block. */
#define PLACES (64 + 16 + END)

/* Use the bits of the entry that ends a block, which is at coefficient `k`. If its first code ends it, a
   second belongs to the next block. Returns 0 on bad data. */
INLINE int end_block(Bits *b, uint64_t entry, long k, long *last) {
  long first = k + FORWARD_1(entry);
  int one = first >= 64;
  long reached = one ? first : k + FORWARD(entry);
  use(b, one ? USED_1(entry) : USED(entry));
  *last = reached == 64 ? 64 : one ? k : first;
  return reached == 64 || reached >= END;
}

/* Read the AC coefficients of a block; 0 on bad data. Coefficients from `last` on are 0. */
INLINE int rest_of_block(Bits *b, const Codes *codes, const uint8_t *places, int16_t *block,
                         long *last) {
  long k = 1;
  for (;;) {
    refill(b);
    /* At least 56 bits are loaded: enough for two lookups, of at most 26 bits each. */
    for (int i = 0; i < 2; i++) {
      uint64_t entry = next_entry(b, codes);
      if (!LIKELY(entry)) return 0;
      long reached = k + FORWARD(entry);
      /* In this order: if there is one code only, both have the same place. */
      block[places[k + FORWARD_1(entry) - 1]] = VALUE_1(entry);
      block[places[reached - 1]] = (int16_t)value_of(b->bits, entry);
      if (reached >= 64) return end_block(b, entry, k, last);
      use(b, USED(entry));
      k = reached;
    }
  }
}

/* Skip the AC coefficients of a block; 0 on bad data. */
INLINE int skip_rest(Bits *b, const Codes *codes) {
  long k = 1, last;
  for (;;) {
    refill(b);
    for (int i = 0; i < 2; i++) {
      uint64_t entry = next_entry(b, codes);
      if (!LIKELY(entry)) return 0;
      long reached = k + FORWARD(entry);
      if (reached >= 64) return end_block(b, entry, k, &last);
      use(b, USED(entry));
      k = reached;
    }
  }
}
