/* Huffman decoding of baseline JPEGs. No decoder can skip it, so its speed matters most.
 *
 * Three things make it faster than libjpeg's. Stuffed zeros are removed from the data beforehand, so
 * bits are loaded eight bytes at a time without checking each byte. One lookup of the next LOOK bits
 * gives the length of a code and of its value together, so the next lookup can begin before this
 * value is computed, without a branch. Blocks that are not needed are skipped by length.
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

/* A table entry for the next LOOK bits: the length of the code and its value together (bits 0 to 7),
   the number of coefficients to go forward (8 to 15), the length of the code (16 to 23), and 63 minus
   the length of the value (24 to 31). 0 means a code longer than LOOK. */
#define USED(entry) ((entry) & 0xFFu)
#define FORWARD(entry) ((entry) >> 8 & 0xFFu)
#define CODE(entry) ((entry) >> 16 & 0xFFu)
#define SHORT(entry) ((entry) >> 24)

/* The step of an end of block. It is larger than any valid run, so the two can be told apart. */
#define END 128

typedef struct {
  uint32_t next[1 << LOOK];
  int32_t most[LONGEST + 2]; /* the last code of each length; the extra length matches anything */
  int32_t offset[LONGEST + 2];
  uint32_t entries[256];     /* the entry of each code, in code order */
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

/* The value encoded by the bits after a code. If the first bit is 0, the value is negative, and the
   bits are those of its absolute value, inverted. */
INLINE int16_t value_of(uint64_t bits, uint32_t entry) {
  uint64_t rest = bits << CODE(entry);
  int64_t negative = ~((int64_t)rest >> 63);
  rest ^= (uint64_t)negative;
  int64_t number = (int64_t)(rest >> 1 >> SHORT(entry)); /* shifts by 64 are not defined */
  return (int16_t)((number ^ negative) - negative);
}

/* The entry of a code longer than LOOK; 0 if there is no such code. */
static uint32_t long_code(uint64_t bits, const Codes *codes) {
  int length = LOOK + 1;
  while ((int32_t)(bits >> (64 - length)) > codes->most[length]) length++;
  if (length > LONGEST) return 0;
  return codes->entries[((int32_t)(bits >> (64 - length)) + codes->offset[length]) & 0xFF];
}

INLINE uint32_t next_entry(const Bits *b, const Codes *codes) {
  uint32_t entry = codes->next[b->bits >> (64 - LOOK)];
  return LIKELY(entry) ? entry : long_code(b->bits, codes);
}

/* Build the tables of one Huffman code; 0 if the code is invalid. */
static int make_codes(Codes *codes, const uint8_t *lengths, const uint8_t *symbols, int ac) {
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
      uint32_t entry = (uint32_t)((63 - size) << 24 | length << 16 | forward << 8 | (length + size));
      codes->entries[index] = entry;
      if (length > LOOK) continue;
      int spare = LOOK - length;
      for (int rest = 0; rest < 1 << spare; rest++) codes->next[(code << spare) + rest] = entry;
    }
    code <<= 1;
  }
  codes->most[LONGEST + 1] = INT32_MAX;
  return 1;
}

/* The difference of a block's DC coefficient to the one before. Sets `fine` to 0 on a bad code. */
INLINE int32_t first_difference(Bits *b, const Codes *codes, int *fine) {
  refill(b);
  uint32_t entry = next_entry(b, codes);
  if (!entry) *fine = 0;
  int32_t value = value_of(b->bits, entry);
  use(b, USED(entry));
  return value;
}

/* Size of the table from zigzag order to positions in the block. All entries past the 64th are the
   last position: an end of block writes a 0 there, which is 0 already. */
#define PLACES (64 + END)

/* Read the AC coefficients of a block; 0 on bad data. Coefficients from `last` on are 0. */
INLINE int rest_of_block(Bits *b, const Codes *codes, const uint8_t *places, int16_t *block,
                         long *last) {
  long k = 1, entered;
  do {
    refill(b);
    /* At least 56 bits are loaded: enough for two of the longest codes with values. */
    for (int i = 0; i < 2; i++) {
      uint32_t entry = next_entry(b, codes);
      if (!LIKELY(entry)) return 0;
      int16_t value = value_of(b->bits, entry);
      use(b, USED(entry));
      entered = k;
      k += FORWARD(entry);
      block[places[k - 1]] = value;
      if (k >= 64) break;
    }
  } while (k < 64);
  *last = k == 64 ? 64 : entered;
  return k == 64 || k >= END;
}

/* Skip the AC coefficients of a block; 0 on bad data. */
INLINE int skip_rest(Bits *b, const Codes *codes) {
  long k = 1;
  do {
    refill(b);
    for (int i = 0; i < 2; i++) {
      uint32_t entry = next_entry(b, codes);
      if (!LIKELY(entry)) return 0;
      use(b, USED(entry));
      k += FORWARD(entry);
      if (k >= 64) break;
    }
  } while (k < 64);
  return k == 64 || k >= END;
}
