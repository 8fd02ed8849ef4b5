/* NumPy's Philox generator, so that parameters drawn here have the bits of `Keyed.at(key)`. */

#include <stdint.h>

/* A stage and a seed, hashed by `Keyed`. */
typedef struct {
  uint64_t words[2];
} StageKey;

/* A sample and one of its versions: `Key` in keyed.py. */
typedef struct {
  uint64_t index, epoch, replica;
} SampleKey;

typedef struct {
  uint64_t counter[4], key[2], drawn[4];
  int used;
} Random;

static Random random_at(StageKey stage, SampleKey sample) {
  /* The word that advances comes first, as in keyed.py. */
  return (Random){.counter = {0, sample.index, sample.epoch, sample.replica},
                  .key = {stage.words[0], stage.words[1]},
                  .used = 4};
}

/* Ten rounds of Philox4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). */
static void draw_block(Random *r) {
  uint64_t a = r->counter[0], b = r->counter[1], c = r->counter[2], d = r->counter[3];
  uint64_t k0 = r->key[0], k1 = r->key[1];
  for (int round = 0; round < 10; round++) {
    unsigned __int128 first = (unsigned __int128)a * 0xD2E7470EE14C6C93u;
    unsigned __int128 second = (unsigned __int128)c * 0xCA5A826395121157u;
    uint64_t next_a = (uint64_t)(second >> 64) ^ b ^ k0;
    uint64_t next_c = (uint64_t)(first >> 64) ^ d ^ k1;
    a = next_a;
    b = (uint64_t)second;
    c = next_c;
    d = (uint64_t)first;
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  r->drawn[0] = a;
  r->drawn[1] = b;
  r->drawn[2] = c;
  r->drawn[3] = d;
}

/* The next number of [0, 1): `Generator.random()`. */
static double uniform(Random *r) {
  if (r->used == 4) {
    r->counter[0]++; /* never overflows: no sample draws 2**64 blocks */
    draw_block(r);
    r->used = 0;
  }
  return (double)(r->drawn[r->used++] >> 11) * (1.0 / 9007199254740992.0);
}
