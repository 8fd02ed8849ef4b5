/* A 128-bit hash that identifies data. It is not cryptographic. 55 KB take 3 us, which is less than
   releasing the GIL and waiting for it. Hash libraries release it, so this is our own. */

/* From this size up the hash takes 50 us or more, and the GIL is released. */
#define LONG_DATA (1 << 20)

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint64_t word_at(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

/* The xor of both halves of the product, so that every bit of both factors matters. */
static uint64_t mixed(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The fractions of the square roots of 2, 3, 5, 7, 11: odd, with about as many ones as zeros. */
#define ROOT_2 0x6a09e667f3bcc909u
#define ROOT_3 0xbb67ae8584caa73bu
#define ROOT_5 0x3c6ef372fe94f82bu
#define ROOT_7 0xa54ff53a5f1d36f1u
#define ROOT_11 0x510e527fade682d1u

/* Two hashes over pairs of words, each with its own constants and order. Four products per loop are
   independent: a processor can start a product before the last one is done. */
static void key_of(const uint8_t *data, size_t length, uint64_t key[2]) {
  uint64_t a = ROOT_2 ^ length, b = ROOT_3 + length, c = ROOT_5, d = ROOT_7;
  uint8_t last[32] = {0};
  for (size_t at = 0; at < length; at += 32) {
    const uint8_t *from = data + at;
    if (length - at < 32) from = memcpy(last, from, length - at);
    uint64_t w = word_at(from), x = word_at(from + 8);
    uint64_t y = word_at(from + 16), z = word_at(from + 24);
    a = mixed(a ^ w, x ^ ROOT_3) + y;
    b = mixed(b ^ x, w ^ ROOT_5) + z;
    c = mixed(c ^ y, z ^ ROOT_7) + w;
    d = mixed(d ^ z, y ^ ROOT_11) + x;
  }
  key[0] = mixed(a ^ ROOT_11, c ^ ROOT_7) ^ mixed(b, d ^ ROOT_2);
  key[1] = mixed(b ^ ROOT_2, c ^ ROOT_11) ^ mixed(a, d ^ ROOT_5);
}
