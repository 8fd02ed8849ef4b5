/* The JPEG index: entries of many files by the hash of their content. Files that came first stay.
   Threads share an index. */

#include <pthread.h>

/* Bytes that a file takes in addition to its entries, and files that are too small to be worth it.
   The same numbers are in image/jpeg_index.py. */
#define INDEX_OVERHEAD 180
#define FEWEST_INDEXED 8192
#define MOST_ENTRIES 65535

typedef struct {
  uint64_t key[2];
  IndexEntry *entries; /* NULL: the place is free */
  size_t count;
} IndexedFile;

typedef struct {
  pthread_mutex_t lock;
  size_t budget, used, files, places; /* `places` is a power of two */
  IndexedFile *at;
} JpegIndex;

static int index_begin(JpegIndex *index, size_t budget) {
  *index = (JpegIndex){.budget = budget, .places = 1024};
  pthread_mutex_init(&index->lock, NULL);
  index->at = calloc(index->places, sizeof *index->at);
  return index->at ? FINE : NO_MEMORY;
}

static void index_end(JpegIndex *index) {
  for (size_t i = 0; index->at && i < index->places; i++) free(index->at[i].entries);
  free(index->at);
  pthread_mutex_destroy(&index->lock);
}

/* The place of a file, or the free place where it belongs. The key is a hash already. */
static IndexedFile *index_place(IndexedFile *at, size_t places, const uint64_t key[2]) {
  size_t i = key[0] & (places - 1);
  while (at[i].entries && (at[i].key[0] != key[0] || at[i].key[1] != key[1]))
    i = (i + 1) & (places - 1);
  return at + i;
}

/* Whether entries of this file are to be collected: it is known, or there is room. Copies the known
   ones, at most MOST_ENTRIES. */
static int index_find(JpegIndex *index, const uint64_t key[2], IndexEntry *copy, size_t *count) {
  pthread_mutex_lock(&index->lock);
  const IndexedFile *file = index_place(index->at, index->places, key);
  int known = file->entries != NULL, room = index->used < index->budget;
  *count = known ? file->count : 0;
  if (known) memcpy(copy, file->entries, file->count * sizeof *copy);
  pthread_mutex_unlock(&index->lock);
  return known || room;
}

static void index_grow(JpegIndex *index) {
  size_t places = 2 * index->places;
  IndexedFile *at = calloc(places, sizeof *at);
  if (!at) return; /* searching takes longer then */
  for (size_t i = 0; i < index->places; i++)
    if (index->at[i].entries) *index_place(at, places, index->at[i].key) = index->at[i];
  free(index->at);
  index->at = at;
  index->places = places;
}

/* Store the entries of a file, unless as many are stored already. */
static void index_add(JpegIndex *index, const uint64_t key[2], const IndexEntry *entries,
                      size_t count) {
  if (count > MOST_ENTRIES) return;
  pthread_mutex_lock(&index->lock);
  if (2 * index->files >= index->places) index_grow(index);
  IndexedFile *file = index_place(index->at, index->places, key);
  if ((!file->entries && index->files + 1 < index->places) ||
      (file->entries && count > file->count)) {
    IndexEntry *kept = malloc(count ? count * sizeof *kept : 1);
    if (kept) {
      memcpy(kept, entries, count * sizeof *kept);
      index->used += (count - (file->entries ? file->count : 0)) * sizeof *kept;
      if (!file->entries) {
        index->used += INDEX_OVERHEAD;
        index->files++;
        file->key[0] = key[0];
        file->key[1] = key[1];
      }
      free(file->entries);
      file->entries = kept;
      file->count = count;
    }
  }
  pthread_mutex_unlock(&index->lock);
}
