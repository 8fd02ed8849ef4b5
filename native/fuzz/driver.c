/* Runs the kernel on broken JPEGs, PNGs and WAV files, and on images with absurd changes:
 * driver FOLDER COUNT SEED [FIRST].
 *
 * Input n depends only on the files in FOLDER, on SEED and on n. To repeat a finding, give its number
 * as FIRST and 1 as COUNT. Data and output are in allocations of exactly their size, so that
 * AddressSanitizer detects the first byte beyond them.
 */
#define PENSTOCK_FUZZ
#include "../jpeg/region.h"
#include "../jpeg/index.h"
#include "../augment/augment.h"
#include "../key.h"
#include "../lzw.h"
#include "../program.h"
#include "../read.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#define MOST_SEEDS 1024
#define SECONDS_FOR_ONE 60

typedef struct {
  uint8_t *bytes;
  size_t length;
} Bytes;

static Bytes seeds[MOST_SEEDS];
static char *seed_paths[MOST_SEEDS];
static int seed_count;
static Bytes current;
static long current_number;
static uint64_t state;

static uint64_t draw(void) {
  state += 0x9E3779B97F4A7C15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static size_t below(size_t limit) { return limit ? draw() % limit : 0; }

static int is_wav(const Bytes *b) { return b->length >= 12 && !memcmp(b->bytes, "RIFF", 4); }

static void keep_finding(void) {
  if (!current.length) {
    fprintf(stderr, "found with input %ld\n", current_number);
    return;
  }
  char name[64];
  snprintf(name, sizeof name, "finding-%ld.%s", current_number, is_wav(&current) ? "wav" : "jpg");
  FILE *file = fopen(name, "wb");
  if (file) {
    fwrite(current.bytes, 1, current.length, file);
    fclose(file);
  }
  fprintf(stderr, "input %ld is saved as %s\n", current_number, name);
}

void __sanitizer_set_death_callback(void (*)(void));
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "abort_on_error=0:allocator_may_return_null=1"; }

static void on_alarm(int signal_number) {
  (void)signal_number;
  fprintf(stderr, "one input took more than %d seconds\n", SECONDS_FOR_ONE);
  keep_finding();
  _exit(3);
}

static void demand(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "check failed: %s\n", what);
  keep_finding();
  _exit(2);
}

static void read_seeds(const char *folder) {
  DIR *directory = opendir(folder);
  struct dirent *entry;
  char *names[MOST_SEEDS];
  while (directory && (entry = readdir(directory)) && seed_count < MOST_SEEDS)
    if (entry->d_name[0] != '.') names[seed_count++] = strdup(entry->d_name);
  if (directory) closedir(directory);
  /* Sort: the order of directory entries differs between machines. */
  for (int i = 1; i < seed_count; i++)
    for (int j = i; j && strcmp(names[j - 1], names[j]) > 0; j--) {
      char *swapped = names[j];
      names[j] = names[j - 1];
      names[j - 1] = swapped;
    }
  for (int i = 0; i < seed_count; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    free(names[i]);
    seed_paths[i] = strdup(path);
    FILE *file = fopen(path, "rb");
    if (!file) exit(1);
    seeds[i].bytes = malloc(1 << 20);
    seeds[i].length = fread(seeds[i].bytes, 1, 1 << 20, file);
    fclose(file);
  }
}

/* ------------------------------------------------------------------------------- mutations */

static size_t header_length(const Bytes *b) {
  for (size_t i = 0; i + 1 < b->length; i++)
    if (b->bytes[i] == 0xFF && b->bytes[i + 1] == 0xDA && i + 14 < b->length) return i + 14;
  return b->length;
}

/* Half of all mutations hit the header. */
static size_t place(const Bytes *b) {
  return draw() & 1 ? below(header_length(b)) : below(b->length);
}

static size_t find_marker(const Bytes *b, int low, int high) {
  size_t found[64], count = 0;
  for (size_t i = 0; i + 1 < b->length && count < 64; i++)
    if (b->bytes[i] == 0xFF && b->bytes[i + 1] >= low && b->bytes[i + 1] <= high)
      found[count++] = i;
  return count ? found[below(count)] : b->length;
}

static void remove_part(Bytes *b, size_t at, size_t count) {
  if (at >= b->length) return;
  if (count > b->length - at) count = b->length - at;
  memmove(b->bytes + at, b->bytes + at + count, b->length - at - count);
  b->length -= count;
}

static void insert_part(Bytes *b, size_t at, const uint8_t *from, size_t count) {
  uint8_t *grown = malloc(b->length + count + 1);
  memcpy(grown, b->bytes, at);
  memcpy(grown + at, from, count);
  memcpy(grown + at + count, b->bytes + at, b->length - at);
  free(b->bytes);
  b->bytes = grown;
  b->length += count;
}

static void mutate(Bytes *b) {
  static const uint8_t telling[] = {0,    1,    2,  3,  4,   7,   8,   16, 17,
                                    0x22, 0x41, 63, 64, 127, 128, 254, 255};
  static const uint8_t end[] = {0xFF, 0xD9};
  if (b->length < 4) return;
  size_t at = place(b), marker;
  const Bytes *other = &seeds[below(seed_count)];
  switch (below(14)) {
    case 0:
      b->bytes[at] ^= (uint8_t)(1 << below(8));
      break;
    case 1:
      b->bytes[at] = (uint8_t)draw();
      break;
    case 2:
      b->bytes[at] = telling[below(17)];
      break;
    case 3: /* cut short, with or without an end */
      b->length = at + 2 < b->length ? at + 2 : b->length;
      if (draw() & 1) insert_part(b, b->length, end, 2);
      break;
    case 4:
      remove_part(b, at, 1 + below(64));
      break;
    case 5: /* repeat a part */
      marker = below(b->length - at) + 1;
      if (marker > 512) marker = 512;
      {
        uint8_t part[512];
        memcpy(part, b->bytes + at, marker);
        insert_part(b, at, part, marker);
      }
      break;
    case 6: { /* a part of another file */
      size_t from = below(other->length), count = 1 + below(other->length - from);
      insert_part(b, at, other->bytes + from, count);
      break;
    }
    case 7: { /* the head of one file, the tail of another */
      size_t from = below(other->length);
      b->length = at;
      insert_part(b, at, other->bytes + from, other->length - from);
      break;
    }
    case 8: /* another marker in its place */
      marker = find_marker(b, 0xC0, 0xFE);
      if (marker < b->length) b->bytes[marker + 1] = (uint8_t)(0xC0 + below(0x3F));
      break;
    case 9: /* another length, or content of a segment */
      marker = find_marker(b, 0xC0, 0xFE);
      if (marker + 24 < b->length) b->bytes[marker + 2 + below(22)] = telling[below(17)];
      break;
    case 10: /* the frame: size, sampling factors, tables */
      marker = find_marker(b, 0xC0, 0xC2);
      if (marker + 20 < b->length)
        b->bytes[marker + 4 + below(15)] = draw() & 1 ? (uint8_t)draw() : telling[below(17)];
      break;
    case 11: /* the scan: components, tables, progression */
      marker = find_marker(b, 0xDA, 0xDA);
      if (marker + 14 < b->length)
        b->bytes[marker + 2 + below(12)] = draw() & 1 ? (uint8_t)draw() : telling[below(17)];
      break;
    case 12: { /* restart markers that are not declared, or declared ones that never come */
      uint8_t restart[] = {0xFF, 0xDD, 0, 4, 0, (uint8_t)below(8)};
      uint8_t stray[] = {0xFF, (uint8_t)(0xD0 + below(8))};
      marker = find_marker(b, 0xDA, 0xDA);
      if (draw() & 1)
        insert_part(b, marker < b->length ? marker : at, restart, sizeof restart);
      else
        insert_part(b, at, stray, sizeof stray);
      break;
    }
    case 13: /* noise */
      for (size_t i = at; i < b->length && i < at + 32; i++) b->bytes[i] = (uint8_t)draw();
  }
}

/* ------------------------------------------------------------------------------- one input */

static int counts[5];

static int some_side(int full) { return full < 1 ? 1 : 1 + (int)below(full); }

static int decode_one(Bytes data, Box box, Target to, int normal, void *out, IndexEntries *entries) {
  static float table[768];
  static const char quiet[JMSG_LENGTH_MAX];
  char why[JMSG_LENGTH_MAX];
  memcpy(why, quiet, sizeof why);
  if (normal)
    to.floats = out, to.table = table;
  else
    to.bytes = out;
  uint64_t key[2];
  key_of(data.bytes, data.length, key);
  int kind = region(data.bytes, data.length, box, to, entries, why);
  demand(kind >= 0 && kind < 5, "the outcome is not one of the known kinds");
  demand(!kind || why[0], "an error without a message");
  return kind;
}

/* A box within an image of this size. */
static Box some_box(int height, int width) {
  Box box = {0, 0, some_side(height), some_side(width)};
  box.top = (int)below(height - box.height + 1);
  box.left = (int)below(width - box.width + 1);
  return box;
}

static long indexed;

/* Pixels must be the same with index entries of an earlier call. Wrong entries must do no harm. */
static void decode_indexed(Bytes data, Box box, Target to, int normal, const uint8_t *out,
                          size_t size, int height, int width) {
  IndexEntries entries = {0};
  uint8_t *again = malloc(size);
  if (below(4)) {
    decode_one(data, some_box(height, width), to, normal, again, &entries);
    IndexEntry *before = entries.at;
    memset(again, 200, size);
    demand(decode_one(data, box, to, normal, again, &entries) == FINE,
           "another outcome with index entries");
    demand(!memcmp(out, again, size), "other pixels with index entries");
    indexed += before != NULL;
    if (entries.at != before) free(before);
    free(entries.at);
  } else {
    IndexEntries wrong = {malloc(200 * sizeof(IndexEntry)), below(200)};
    for (size_t i = 0; i < wrong.count; i++) {
      uint64_t bits = draw(), reach = below(2) ? 0xFFFFFFFF : data.length * 8 + 64;
      bits = (uint32_t)(draw() % reach) | bits << 32;
      wrong.at[i] = (IndexEntry){{(uint16_t)bits, (uint16_t)(bits >> 16)},
                           {(uint16_t)(bits >> 32), (uint16_t)(bits >> 40), (uint16_t)(bits >> 48)}};
    }
    entries = wrong;
    decode_one(data, box, to, normal, again, &entries);
    if (entries.at != wrong.at) free(entries.at);
    free(wrong.at);
  }
  free(again);
}

static long augmented, resampled;

/* Magnitudes from useful to absurd, always finite. */
static double some_magnitude(void) {
  static const double telling[] = {0, 1, -1, 0.5, 45, 90, 180, 255, 256, 1e-320, 1e9, 1e300, -1e300};
  double unit = (double)(draw() >> 11) / (double)(1LL << 53) * 2 - 1;
  switch (below(4)) {
    case 0: return telling[below(13)];
    case 1: return unit * 400;
    case 2: return unit * pow(10, (double)below(20));
  }
  return unit;
}

/* Apply some changes to a small image: within its memory, and the same with and without AVX2. */
static void augment_one(void) {
  int most = below(8) ? 40 : 300;
  Target to = {.height = some_side(most), .width = some_side(most)};
  size_t size = (size_t)to.height * to.width * 3;
  uint8_t *image = malloc(size), fill[3] = {(uint8_t)draw(), (uint8_t)draw(), 0};
  int levels = 1 + (int)below(256), darkest = (int)below(257 - levels);
  for (size_t i = 0; i < size; i++) image[i] = (uint8_t)(darkest + below(levels));
  float table[768];
  for (int i = 0; i < 768; i++) table[i] = (float)i;
  Change changes[6];
  size_t count = below(6);
  for (size_t i = 0; i < count; i++) changes[i] = (Change){(int)below(CHANGES), some_magnitude()};

  int normal = !below(2), changed[2];
  size_t bytes = size * (normal ? sizeof(float) : 1);
  uint8_t *out[2] = {malloc(bytes), malloc(bytes)};
  for (int plain = 0; plain < 2; plain++) {
    only_plain = plain;
    memset(out[plain], 7, bytes);
    if (normal)
      to.floats = (float *)out[plain], to.table = table;
    else
      to.bytes = out[plain];
    demand(augment(image, changes, count, fill, to, changed + plain) == FINE, "an error in augment");
  }
  demand(changed[0] == changed[1] && !memcmp(out[0], out[1], bytes), "other bits without AVX2");
  free(out[0]);
  free(out[1]);
  free(image);
  augmented++;
}

static long packed_files;

/* Unpack a block in the order of rows; returns the byte behind its data. */
static const uint8_t *unpack_block(uint32_t record, const uint8_t *from, int16_t *block) {
  const uint8_t *end = from + (record >> 24);
  uint8_t masks[8] = {0};
  int count = 0, seen = 0;
  memset(block, 0, 64 * sizeof *block);
  for (int group = 0; group < 8; group++)
    if (record >> (16 + group) & 1) masks[group] = *from++;
  for (int group = 0; group < 8; group++) count += __builtin_popcount(masks[group]);
  int wide = end - from == 2 * count;
  demand(wide || end - from == count, "the data of a block has another length");
  demand(!(masks[0] & 1), "the first coefficient is packed twice");
  for (int k = 0; k < 64; k++)
    if (masks[k / 8] >> (k % 8) & 1) {
      int16_t value = wide ? (int16_t)(from[2 * seen] | from[2 * seen + 1] << 8) : (int8_t)from[seen];
      demand(value != 0, "a packed coefficient is 0");
      block[places[k]] = value;
      seen++;
    }
  block[0] = (int16_t)record;
  return end;
}

/* Pixels from packed coefficients, by the simple functions. `out` has the size of the box. */
static void decode_packed(const Packed *packed, uint8_t *out) {
  const PackedPicture *picture = &packed->picture;
  Scan scan = {.components = (int)picture->components};
  uint8_t *samples = malloc((size_t)picture->blocks * 64), *next = samples;
  for (int c = 0; c < scan.components; c++) {
    Plane *plane = &scan.planes[c];
    int across = c ? 1 : (int)picture->finer_across, down = c ? 1 : (int)picture->finer_down;
    plane->across = across;
    plane->down = down;
    plane->stride = (size_t)picture->across * across * 8;
    plane->top = (int)picture->unit_top * down * 8;
    plane->left = (int)picture->unit_left * across * 8;
    plane->height = (int)((picture->full_height * down + picture->finer_down - 1) / picture->finer_down);
    plane->width =
        (int)((picture->full_width * across + picture->finer_across - 1) / picture->finer_across);
    plane->at = next;
    next += plane->stride * (size_t)(picture->down * down * 8);
  }
  const uint8_t *data = packed->data;
  const uint32_t *record = packed->records;
  for (int64_t unit = 0; unit < picture->across * picture->down; unit++)
    for (int c = 0; c < scan.components; c++) {
      const Plane *plane = &scan.planes[c];
      for (int i = 0; i < plane->down * plane->across; i++) {
        Block block = {.steps = packed->steps[c], .stride = plane->stride};
        size_t row = (size_t)(unit / picture->across) * plane->down + i / plane->across;
        size_t column = (size_t)(unit % picture->across) * plane->across + i % plane->across;
        block.to = plane->at + row * 8 * plane->stride + column * 8;
        data = unpack_block(*record++, data, block.at);
        put_plain(&block);
      }
    }
  demand(data == packed->data + packed->length, "packed data has another length");
  size_t width = (size_t)picture->width;
  uint8_t *row = malloc(3 * width);
  Row room = {malloc((width / 2 + 4) * 2), malloc(width + 4), malloc(width + 4)};
  for (int y = 0; y < picture->height; y++) {
    rgb_row_plain(&scan, (int)picture->top + y, (int)picture->left, (int)width, row, width, room);
    for (size_t i = 0; i < 3 * width; i++) *out++ = row[i % 3 * width + i / 3];
  }
  free(room.sums);
  free(room.blue);
  free(room.red);
  free(row);
  free(samples);
}

/* Packed coefficients must give the pixels of `region`, and fail where it leaves a file to libjpeg. */
static void pack_one(Bytes data, Box box, Target to) {
  char why[2][JMSG_LENGTH_MAX] = {"", ""};
  Packed packed[2];
  IndexEntries entries = {0};
  int kinds[2];
  memset(packed, 0, sizeof packed);
  for (int plain = 0; plain < 2; plain++) {
    only_plain = plain;
    kinds[plain] = pack_region(data.bytes, data.length, box, to, plain ? &entries : NULL,
                               packed + plain, why[plain]);
  }
  free(entries.at);
  demand(kinds[0] == kinds[1] && !strcmp(why[0], why[1]), "another outcome without AVX2");
  Packed *one = packed, *other = packed + 1;
  const PackedPicture *picture = &one->picture;
  if (!kinds[0]) {
    demand(one->written == (size_t)picture->blocks, "another number of blocks");
    demand(one->length == other->length && !memcmp(one->data, other->data, one->length) &&
               !memcmp(one->records, other->records, one->written * 4),
           "other coefficients without AVX2");
    Box needed = {(int)picture->top, (int)picture->left, (int)picture->height, (int)picture->width};
    size_t size = (size_t)needed.height * (size_t)needed.width * 3;
    uint8_t *out = malloc(size), *again = malloc(size);
    Target same = {.height = needed.height, .width = needed.width};
    same.full_height = needed.height, same.full_width = needed.width;
    only_plain = 0;
    long own = decoded_without_libjpeg;
    demand(decode_one(data, needed, same, 0, out, NULL) == FINE && decoded_without_libjpeg > own,
           "a file whose coefficients are packed is not decoded");
    decode_packed(one, again);
    demand(!memcmp(out, again, size), "other pixels from packed coefficients");
    free(out);
    free(again);
    uint8_t *buffer = malloc(place_pictures(&one, 1));
    write_pictures(&one, 1, buffer);
    free(buffer);
    packed_files++;
  } else {
    demand(why[0][0], "an error without a message");
  }
  free_packed(one);
  free_packed(other);
}

/* Resize a box of a small image: within its memory, and an error if the box is outside. */
static void resample_one(void) {
  int rows = some_side(below(8) ? 60 : 500), columns = some_side(below(8) ? 60 : 500);
  size_t size = (size_t)rows * columns * 3;
  uint8_t *image = malloc(size);
  for (size_t i = 0; i < size; i++) image[i] = (uint8_t)draw();
  Box box = some_box(rows, columns);
  if (!below(16)) box = (Box){(int)draw(), (int)draw(), (int)draw(), (int)draw()};
  if (!below(16)) box.top = rows - (int)below(3), box.height = (int)below(4);
  Target to = {.height = some_side(90), .width = some_side(90), .flip = (int)(draw() & 1)};
  to.full_height = to.height + (below(4) ? 0 : (int)below(100));
  to.full_width = to.width + (below(4) ? 0 : (int)below(100));
  to.top = (int)below(to.full_height - to.height + 1 + !below(16));
  to.left = (int)below(to.full_width - to.width + 1);
  static float table[768];
  int normal = !below(3);
  void *out = malloc((size_t)to.height * to.width * 3 * (normal ? sizeof(float) : 1));
  if (normal)
    to.floats = out, to.table = table;
  else
    to.bytes = out;
  char why[JMSG_LENGTH_MAX] = "";
  int kind = resample(image, rows, columns, box, to, why);
  demand(kind == FINE || ((kind == OUTSIDE || kind == UNSUPPORTED) && why[0]),
         "an unexpected outcome of resample");
  free(out);
  free(image);
  resampled++;
}

static long measured;

/* Random codes: within the memory of the data, and no more bytes than asked for by one code. */
static void measure_one(void) {
  size_t size = below(300);
  uint8_t *data = malloc(size ? size : 1);
  for (size_t i = 0; i < size; i++) data[i] = (uint8_t)(draw() & (below(2) ? 0xFF : 0x0F));
  int64_t enough = (int64_t)below(5000);
  int64_t length = lzw_length(data, size, 2 + (int)below(7), enough, (int)below(2));
  demand(length >= LZW_DAMAGED && length <= enough + (1 << LZW_LONGEST), "an absurd LZW length");
  free(data);
  measured++;
}

static JpegIndex shared_index;
static long programs, written;

static Framing some_framing(void) {
  Framing framing = {.kind = (int)below(FRAMINGS),
                     .height = some_side(below(8) ? 60 : 700),
                     .width = some_side(below(8) ? 60 : 700),
                     .key = {{draw(), draw()}}};
  framing.scale[0] = 1e-3 + (double)below(1000) / 1000;
  framing.scale[1] = framing.scale[0] + (double)below(1000) / 1000;
  framing.ratio[0] = 0.01 + (double)below(1000) / 300;
  framing.ratio[1] = framing.ratio[0] * (1 + (double)below(1000) / 10);
  return framing;
}

/* A whole program on a broken file: within its memory, and the same result twice. The file is in the
   index, or not, as other files of this run left it. */
static void run_program_on(Bytes file) {
  Program program = {.decodes = 1, .most_pixels = (int64_t)below(1 << 20), .indexed = (int)below(2)};
  program.framings = (int)below(4);
  for (int i = 0; i < program.framings; i++) program.framing[i] = some_framing();
  program.flips = (int)below(2);
  program.flip = 0.5;
  program.normal = !below(3);
  Augment *by = &program.augment;
  by->kind = (int)below(4);
  by->number = (int)below(5);
  by->bins = 2 + (int)below(40);
  by->strength = (double)below(100) / 99;
  by->space = (Space){0.99, below(2) ? 32 : 0.45, 135, 0.99, 6, (int)below(2)};
  for (int i = 0; i < 2 * POLICY_PAIRS; i++)
    by->policy[i / 2][i % 2] = (PolicyChange){below(CHANGES), 0.5, below(STRENGTHS)};
  Memory memory = {0};
  SampleKey sample = {below(1000), below(9), below(3)};
  Input input = {file.bytes, file.length, {0}};
  Frame f;
  int flip;
  uint64_t framed;
  if (!frame_of(&program, sample, input, &f, &flip) && f.part.height <= 800 && f.part.width <= 800) {
    size_t size = (size_t)f.part.height * f.part.width * 3 * (program.normal ? sizeof(float) : 1);
    uint8_t *out = malloc(size), *again = malloc(size);
    memset(out, 1, size);
    memset(again, 2, size);
    Place place = {f.part.height, f.part.width, out};
    int kind = run_program(&program, sample, input, place, &shared_index, &memory, &framed);
    demand(kind == FINE || kind == LEFT, "an unexpected outcome of a program");
    shrink_memory(&memory); /* as workers do after each sample */
    place.at = again;
    demand(run_program(&program, sample, input, place, &shared_index, &memory, &framed) == kind,
           "another outcome of the same program");
    if (kind == FINE) demand(!memcmp(out, again, size), "other pixels of the same program");
    written += kind == FINE;
    Made made = {0};
    program.normal = 0;
    int head = run_head(&program, sample, input, &shared_index, &memory, &made, &framed);
    demand(head == kind, "the head of a program has another outcome");
    free(made.at);
    free(out);
    free(again);
  }
  free_memory(&memory);
  programs++;
}

static long sounds, sounds_written;

/* Change a WAV file: a byte, a size or another number of its header, a part, its end. */
static void mutate_wav(Bytes *b) {
  static const uint32_t telling[] = {0, 1, 2, 3, 7, 8, 16, 40, 64, 65, 0x7FFF0000, 0x80000000, 0xFFFFFFFF};
  if (b->length < 48) return;
  size_t at = draw() & 1 ? below(48) : below(b->length);
  uint32_t number = below(3) ? telling[below(13)] : (uint32_t)draw();
  switch (below(7)) {
    case 0: b->bytes[at] ^= (uint8_t)(1 << below(8)); break;
    case 1: b->bytes[at] = (uint8_t)number; break;
    case 2: memcpy(b->bytes + 2 * below(22), &number, 2); break;
    case 3: memcpy(b->bytes + 4 * below(11), &number, 4); break;
    case 4: b->length = at; break;
    case 5: remove_part(b, at, 1 + below(64)); break;
    case 6: insert_part(b, at, b->bytes, 1 + below(48)); break;
  }
}

static SoundStep some_step(int first) {
  SoundStep step = {.kind = first ? DECODE : 1 + (int)below(SOUND_STEPS - 1), .key = {{draw(), draw()}}};
  step.mono = (int)below(2);
  step.rate = below(2) ? 0 : 16000;
  step.from_rate = 16000;
  step.to_rate = below(2) ? 8000 : 16000;
  step.frames = 1 + (int)below(below(4) ? 600 : 9000);
  step.padding = below(3) ? 0 : (int)below(700);
  step.repeats = (int)below(2);
  step.place = (int)below(step.kind == RANDOM_PLACE ? 4 : 3);
  step.low = -6;
  step.high = below(8) ? 6 : 900;
  step.own = (int)below(2);
  step.times = 2.0f;
  step.time_masks = (int)below(3);
  step.freq_masks = (int)below(3);
  step.longest = (int)below(200);
  step.tallest = (int)below(30);
  step.share = (double)below(5) / 4;
  step.fill_mean = (int)below(2);
  if (step.kind != MEL) return step;
  static const int lengths[] = {2, 3, 4, 5, 6, 12, 15, 60, 100, 256, 400};
  Mel *mel = &step.mel;
  mel->n_fft = mel->transform.length = lengths[below(11)];
  mel->transform.factors = factors_of(mel->n_fft, mel->transform.factor);
  demand(mel->transform.factors && !make_twiddles(&mel->transform), "no transform of this length");
  mel->hop = 1 + (int)below(200);
  mel->mels = 1 + (int)below(20);
  mel->center = (int)below(2);
  mel->magnitude = (int)below(2);
  mel->log = (int)below(3);
  mel->floor = 1e-10f;
  mel->has_top = (int)below(2);
  mel->window = calloc((size_t)mel->n_fft, sizeof(float));
  for (int i = 0; i < mel->n_fft; i++) mel->window[i] = (float)i;
  mel->first = calloc((size_t)mel->mels, sizeof(int));
  mel->filter = calloc((size_t)mel->mels + 1, sizeof(int));
  for (int m = 0; m < mel->mels; m++) {
    mel->first[m] = (int)below((size_t)mel->n_fft / 2 + 1);
    mel->filter[m + 1] = mel->filter[m] + (int)below((size_t)(mel->n_fft / 2 + 2 - mel->first[m]));
  }
  mel->weights = calloc((size_t)mel->filter[mel->mels] + 1, sizeof(float));
  return step;
}

/* A program of sounds on a broken file: within its memory, and the same result twice. */
static void run_sound_on(Bytes file) {
  SoundProgram program = {.count = 1 + (int)below(6)};
  for (int i = 0; i < program.count; i++) program.step[i] = some_step(!i);
  SampleKey sample = {below(1000), below(9), below(3)};
  Input input = {file.bytes, file.length, {0}};
  Memory memory = {0};
  uint64_t spent[2 * MOST_STEPS] = {0};
  Made made = {0}, again = {0};
  int kind = run_sound_head(&program, sample, input, &memory, &made, spent);
  demand(kind == FINE || kind == LEFT, "an unexpected outcome of a program of sounds");
  shrink_memory(&memory);
  demand(run_sound_head(&program, sample, input, &memory, &again, spent) == kind,
         "another outcome of the same program of sounds");
  if (kind == FINE) {
    size_t size = (size_t)made.shape[0] * (size_t)made.shape[1] * (size_t)(made.shape[2] ? made.shape[2] : 1);
    demand(!memcmp(made.shape, again.shape, sizeof made.shape) &&
               !memcmp(made.at, again.at, size * sizeof(float)),
           "other sounds of the same program");
    float *row = malloc(size * sizeof(float));
    demand(!run_sound_program(&program, sample, input, made.shape, row, &memory, spent) &&
               !memcmp(row, made.at, size * sizeof(float)),
           "other sounds in a row");
    made.shape[1]++;
    demand(run_sound_program(&program, sample, input, made.shape, row, &memory, spent) == LEFT,
           "a sound in a row of another shape");
    free(row);
    sounds_written++;
  }
  free(made.at);
  free(again.at);
  free_memory(&memory);
  for (int i = 0; i < program.count; i++) free_mel(&program.step[i].mel);
  sounds++;
}

static File part_read;
static long parts;

/* A part of a file, sometimes one that is not within it: exactly its bytes, or an error. The memory
   is used again for the next one, as workers do. */
static void read_part(void) {
  size_t number = below((size_t)seed_count);
  const Bytes *whole = &seeds[number];
  int64_t length = (int64_t)whole->length;
  int64_t offset = (int64_t)below(whole->length + 3) - 1, size = (int64_t)below(whole->length + 3) - 1;
  if (!below(8)) offset = (int64_t)draw();
  if (!below(8)) size = (int64_t)draw();
  int within = offset >= 0 && size >= 0 && (!size || (offset <= length && size <= length - offset));
  read_range(seed_paths[number], offset, size, &part_read);
  demand(within == !part_read.error, within ? "a part that is not read" : "a part beside the file is read");
  demand(part_read.length <= part_read.room, "more bytes than there is memory");
  if (within)
    demand(part_read.length == (size_t)size && !memcmp(part_read.data, whole->bytes + offset, part_read.length),
           "other bytes of a part");
  parts++;
}

/* Filters that files of the seeds' rates need. */
static void add_filters(void) {
  static const int pairs[][4] = {{8000, 16000, 1, 2}, {44100, 16000, 441, 160}, {16000, 8000, 2, 1}};
  for (int i = 0; i < 3; i++) {
    const int *pair = pairs[i];
    Resampling by = {pair[0], pair[1], pair[2], pair[3], 16, 7, NULL};
    by.weights = malloc((size_t)by.phases * 16 * sizeof(float));
    for (int k = 0; k < by.phases * 16; k++) by.weights[k] = (float)(k % 7) / 7;
    demand(add_resampling(by), "a filter that is not added");
  }
}

static void run(long number, uint64_t seed) {
  state = seed * 0x2545F4914F6CDD1Du + (uint64_t)number;
  current_number = number;
  if (!below(16)) {
    read_part();
    return;
  }
  if (!below(4)) {
    if (!below(8))
      measure_one();
    else if (below(3))
      augment_one();
    else
      resample_one();
    return;
  }
  const Bytes *from = &seeds[below(seed_count)];
  Bytes b = {malloc(from->length + 1), from->length};
  memcpy(b.bytes, from->bytes, from->length);
  /* One file in sixteen stays intact, to test odd boxes on valid files. */
  int whole = !below(16), sound = is_wav(&b);
  if (!whole)
    for (size_t n = 1 + below(4); n; n--) sound ? mutate_wav(&b) : mutate(&b);

  Bytes exact = {malloc(b.length), b.length};
  memcpy(exact.bytes, b.bytes, b.length);
  free(b.bytes);
  current = exact;

  if (sound || !below(64)) {
    run_sound_on(exact);
    current.length = 0;
    free(exact.bytes);
    return;
  }
  if (!below(4)) run_program_on(exact);
  int full_height = 40, full_width = 40, components = 0;
  frame_size(exact.bytes, exact.length, &full_height, &full_width, &components);
  Box box = some_box(full_height, full_width);
  if (!below(4)) box = (Box){0, 0, full_height, full_width};
  if (!below(32)) box = (Box){(int)draw(), (int)draw(), (int)draw(), (int)draw()};
  if (!below(32)) box.top = full_height - (int)below(3), box.height = (int)below(4);
  int height = some_side(below(8) ? 40 : 400), width = some_side(below(8) ? 40 : 400);
  int normal = !below(4);
  Target to = {.height = height, .width = width, .flip = (int)(draw() & 1)};
  to.full_height = height, to.full_width = width;
  if (!below(4)) {
    /* A part of a larger picture, sometimes one that is not within it. */
    to.full_height += (int)below(100), to.full_width += (int)below(100);
    to.top = (int)below(to.full_height - height + 1 + !below(16));
    to.left = (int)below(to.full_width - width + 1);
  }
  size_t size = (size_t)height * width * 3 * (normal ? sizeof(float) : 1);

  uint8_t *out = malloc(size);
  memset(out, 1, size);
  only_plain = !below(2);
  long own = decoded_without_libjpeg;
  int kind = decode_one(exact, box, to, normal, out, NULL);
  counts[kind]++;
  uint8_t *again = malloc(size);
  memset(again, kind == FINE ? 200 : 1, size);
  if (decoded_without_libjpeg > own && !below(4)) {
    /* libjpeg reads the last row to its end, and may find damage beside the box. Its vector code may
       clip absurd values differently. */
    only_libjpeg = 1;
    int other = decode_one(exact, box, to, normal, again, NULL);
    only_libjpeg = 0;
    demand(other == FINE || (other == DAMAGED && !whole),
           "libjpeg does not decode a file that we decode");
    if (whole) demand(!memcmp(out, again, size), "other pixels than libjpeg");
  } else if (!below(8)) {
    /* Uninitialized memory shows as a different second result. */
    demand(decode_one(exact, box, to, normal, again, NULL) == kind,
           "another outcome for the same input");
    if (kind == FINE) demand(!memcmp(out, again, size), "other pixels for the same input");
  }
  free(again);
  int packs = kind == FINE && decoded_without_libjpeg > own;
  if (packs || !below(4)) {
    long before = packed_files;
    pack_one(exact, box, to);
    demand((packed_files > before) == packs, "files are packed that libjpeg decodes, or the reverse");
  }
  if (packs && !below(2))
    decode_indexed(exact, box, to, normal, out, size, full_height, full_width);
  free(out);
  current.length = 0;
  free(exact.bytes);
}

int main(int argc, char **argv) {
  if (argc < 4) return 1;
  read_seeds(argv[1]);
  if (!seed_count) return 1;
  long count = atol(argv[2]), first = argc > 4 ? atol(argv[4]) : 0;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_set_death_callback(keep_finding);
#endif
  signal(SIGALRM, on_alarm);
  if (index_begin(&shared_index, 1 << 20)) return 1;
  add_filters();
  for (long n = first; n < first + count; n++) {
    alarm(SECONDS_FOR_ONE);
    run(n, strtoull(argv[3], NULL, 10));
  }
  for (int i = 0; i < seed_count; i++) free(seeds[i].bytes), free(seed_paths[i]);
  free(part_read.data);
  for (int i = 0; i < resamplings.count; i++) free(resamplings.at[i].weights);
  index_end(&shared_index);
  printf("%ld inputs from %d files: %d fine, %d damaged, %d unsupported, %d outside, ", count,
         seed_count, counts[FINE], counts[DAMAGED], counts[UNSUPPORTED], counts[OUTSIDE]);
  printf("%d out of memory; ", counts[NO_MEMORY]);
  printf("%ld decoded without libjpeg; %ld packed; ", decoded_without_libjpeg, packed_files);
  printf("%ld with index entries; %ld augmented, %ld resized, ", indexed, augmented, resampled);
  printf("%ld streams of LZW, %ld programs of which %ld wrote a row, ", measured, programs, written);
  printf("%ld of sounds of which %ld did, %ld parts of files\n", sounds, sounds_written, parts);
  return 0;
}
