/* LZW, the compression of GIF and of some TIFF files: how many bytes a stream unpacks to.
 *
 * Only lengths are followed, not contents: a code is one byte longer than the code that it extends.
 */
#include <stddef.h>
#include <stdint.h>

#define LZW_LONGEST 12
#define LZW_DAMAGED (-1)

/* The number of bytes; stops at `enough`. `bits` (2 to 8) is the size of the uncompressed values.
   TIFF stores the high bits of a code first, and makes codes longer one code earlier than GIF.
   LZW_DAMAGED for a code that is not defined. */
static int64_t lzw_length(const uint8_t *data, size_t size, int bits, int64_t enough, int tiff) {
  uint32_t lengths[1 << LZW_LONGEST];
  const uint32_t clear = 1u << bits;
  uint32_t held = 0, count = 0, known = clear + 2, before = 0;
  int width = bits + 1;
  int64_t total = 0;
  const uint8_t *at = data, *end = data + size;
  for (uint32_t i = 0; i < known; i++) lengths[i] = 1;
  while (total < enough) {
    uint32_t code, mask;
    for (; count < (uint32_t)width; count += 8) {
      if (at == end) return total;
      held = tiff ? held << 8 | *at++ : held | (uint32_t)*at++ << count;
    }
    mask = (1u << width) - 1;
    count -= (uint32_t)width;
    if (tiff) {
      code = held >> count & mask;
    } else {
      code = held & mask;
      held >>= width;
    }
    if (code == clear) {
      known = clear + 2;
      width = bits + 1;
      before = 0;
      continue;
    }
    if (code == clear + 1) return total;
    if (code > known || (code == known && !before) || (!before && code > clear)) return LZW_DAMAGED;
    uint32_t length = code == known ? before + 1 : lengths[code];
    total += length;
    if (before && known < 1u << LZW_LONGEST) {
      lengths[known++] = before + 1;
      if (known + (uint32_t)tiff >= 1u << width && width < LZW_LONGEST) width++;
    }
    before = length;
  }
  return total;
}
