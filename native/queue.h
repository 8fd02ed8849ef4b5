/* A queue of samples for worker threads that stay here, without the GIL, as long as there is work.
 *
 * A job is the samples of one task, often a whole batch. Workers take one sample at a time from the
 * oldest job that has any left, so they share a job to its end. They go back to Python only for what
 * Python must do: a finished job, a sample that this kernel leaves to Python, more jobs to take.
 *
 * Does not depend on Python.
 */
#include <errno.h>
#include <time.h>

#include "program.h"

typedef enum { WORK_CLOSED, WORK_TAKE, WORK_DONE, WORK_SAMPLE } Reason;

/* Paths by index: folder `f` of the root has the names from ends[f - 1] on. Without folders, names are
   paths. With `files`, sample `i` is the range of `sizes[i]` bytes at `offsets[i]` of file `files[i]`. */
typedef struct {
  const char *root, *folder_text, *text;
  size_t root_length;
  const int64_t *folder_ends, *ends, *name_ends;
  size_t folders, names;
  const int64_t *files, *offsets, *sizes;
  size_t ranges;
} Paths;

/* A program for images, or one for sounds; NULL both: none. */
typedef struct {
  const Program *image;
  const SoundProgram *sound;
} AnyProgram;

typedef struct Job {
  struct Job *next;
  int64_t id;
  AnyProgram program, head; /* `head`: from a file to a result that is kept; may be none */
  const Paths *paths;
  JpegIndex *index;
  size_t count, taken, left; /* samples; those that workers took; those that are not finished */
  int64_t *indices, *replicas; /* replicas: NULL if all are 0 */
  int64_t *versions; /* the epoch that keys the head, for each sample */
  uint64_t epoch;
  Input *inputs; /* data NULL: read the file; the whole array NULL: read all files */
  Made *made; /* by the head, of samples whose number in `kept` is not 0 */
  int64_t *kept;
  int keeps;     /* keep the content of the files that were read */
  File *files;
  uint8_t *out;
  size_t row_bytes;
  int shape[3]; /* of a row: (height, width) of pixels, or that of a sound */
  int cancelled;
  /* Nanoseconds; `working` is without reading, and includes the head and augmenting. */
  uint64_t reading, working, heading, head_augmenting, augmenting;
  uint64_t steps[2 * MOST_STEPS]; /* of the head and the program of sounds */
  uint64_t bytes;
  size_t read; /* files */
} Job;

typedef struct {
  Memory memory;
  int64_t job; /* -1: idle */
  size_t row;
  uint64_t since;
} Worker;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;
  Job *first, *last; /* jobs with samples that no worker has taken */
  Job *finished, *last_finished;
  Worker **workers;
  size_t worker_count, idle;
  int asked, closing;
  uint64_t ask_at; /* 0: not at all */
} Queue;

typedef struct {
  Reason reason;
  Job *job;
  size_t row;
} Event;

/* For benchmarks: sleep this long for a sample, in place of reading and decoding it. */
static uint64_t nap_ns;

static struct timespec as_timespec(uint64_t ns) {
  return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

static void sleep_for(uint64_t ns) {
  struct timespec left = as_timespec(ns);
  while (nanosleep(&left, &left) && errno == EINTR) continue;
}

static void queue_begin(Queue *q) {
  memset(q, 0, sizeof *q);
  pthread_mutex_init(&q->lock, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&q->wake, &attributes);
  pthread_condattr_destroy(&attributes);
}

/* Write the path of a file, with a zero at its end; LEFT if it is too long, or holds a zero. */
static int path_of(const Paths *paths, int64_t index, char *path) {
  if (index < 0 || (size_t)index >= paths->names) return LEFT;
  size_t low = 0, high = paths->folders;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (paths->ends[middle] > index)
      high = middle;
    else
      low = middle + 1;
  }
  size_t at = 0;
  int64_t name = index ? paths->name_ends[index - 1] : 0;
  size_t length = (size_t)(paths->name_ends[index] - name);
  if (paths->folders) {
    if (low == paths->folders) return LEFT;
    int64_t start = low ? paths->folder_ends[low - 1] : 0;
    size_t folder = (size_t)(paths->folder_ends[low] - start);
    if (paths->root_length + folder + length + 3 > LONGEST_PATH) return LEFT;
    memcpy(path, paths->root, paths->root_length);
    at = paths->root_length;
    path[at++] = '/';
    memcpy(path + at, paths->folder_text + start, folder);
    at += folder;
    if (folder) path[at++] = '/';
  }
  if (at + length > LONGEST_PATH) return LEFT;
  memcpy(path + at, paths->text + name, length);
  path[at + length] = 0;
  return memchr(path, 0, at + length) ? LEFT : FINE;
}

/* Read a file into the worker's memory; LEFT if it cannot be read. */
static int read_input(const Job *job, size_t row, Memory *memory, Input *input) {
  char path[LONGEST_PATH + 1];
  const Paths *paths = job->paths;
  int64_t index = job->indices[row], at = index;
  if (paths->files) {
    if (at < 0 || (size_t)at >= paths->ranges) return LEFT;
    index = paths->files[at];
  }
  if (path_of(paths, index, path)) return LEFT;
  File file = {(char *)memory->file, 0, memory->file_room, 0};
  if (paths->files)
    read_range(path, paths->offsets[at], paths->sizes[at], &file);
  else
    read_file(path, &file);
  memory->file = (uint8_t *)file.data;
  memory->file_room = file.room;
  *input = (Input){memory->file, file.length, {0}};
  return file.error ? LEFT : FINE;
}

typedef struct {
  uint64_t reading, working, heading, head_augmenting, augmenting;
  uint64_t steps[2 * MOST_STEPS];
  size_t bytes, read;
} Spent;

/* The input of a sample: what a head made and was kept, bytes that were kept, or the file. */
static int find_input(Job *job, size_t row, Memory *memory, Spent *spent, Input *input) {
  if (job->inputs && job->inputs[row].data) {
    *input = job->inputs[row];
    return FINE;
  }
  uint64_t started = now_ns();
  if (!job->paths || read_input(job, row, memory, input)) return LEFT;
  spent->reading = now_ns() - started;
  spent->bytes = input->length;
  spent->read = 1;
  if (!job->keeps) return FINE;
  File *file = job->files + row;
  file->data = malloc(input->length ? input->length : 1);
  if (!file->data) return LEFT;
  memcpy(file->data, input->data, input->length);
  file->length = input->length;
  return FINE;
}

/* For benchmarks: sleep instead of preparing a sample. */
static void sleep_through(Job *job, size_t row) {
  sleep_for(nap_ns);
  if (!job->kept || !job->kept[row]) return;
  int sound = job->head.sound != NULL;
  job->made[row] = (Made){calloc(4, 1), {1, 1, sound ? 0 : 3}, sound};
}

static int run_any_head(Job *job, SampleKey sample, Input input, Memory *memory, Made *made,
                        Spent *spent) {
  if (job->head.sound) return run_sound_head(job->head.sound, sample, input, memory, made, spent->steps);
  uint64_t framed = 0;
  int kind = run_head(job->head.image, sample, input, job->index, memory, made, &framed);
  spent->head_augmenting = framed ? now_ns() - framed : 0;
  return kind;
}

static int run_any_program(Job *job, SampleKey sample, Input input, size_t row, Memory *memory,
                           Spent *spent) {
  uint8_t *at = job->out + row * job->row_bytes;
  if (job->program.sound) {
    uint64_t *steps = spent->steps + (job->head.sound ? job->head.sound->count : 0);
    return run_sound_program(job->program.sound, sample, input, job->shape, at, memory, steps);
  }
  uint64_t framed = 0;
  Place place = {job->shape[0], job->shape[1], at};
  int kind = run_program(job->program.image, sample, input, place, job->index, memory, &framed);
  spent->augmenting = framed ? now_ns() - framed : 0;
  return kind;
}

/* Prepare one sample of a job; FINE or LEFT. */
static int run_sample(Job *job, size_t row, Memory *memory, Spent *spent) {
  uint64_t started = now_ns();
  if (nap_ns) {
    sleep_through(job, row);
    spent->working = now_ns() - started;
    return FINE;
  }
  Input input = {0};
  Made made = {0};
  int kind = find_input(job, row, memory, spent, &input);
  uint64_t index = (uint64_t)job->indices[row];
  if (!kind && (job->head.image || job->head.sound) && !input.shape[0]) {
    SampleKey version = {index, job->versions ? (uint64_t)job->versions[row] : job->epoch, 0};
    uint64_t began = now_ns();
    kind = run_any_head(job, version, input, memory, &made, spent);
    spent->heading = now_ns() - began;
    input = (Input){made.at, 0, {made.shape[0], made.shape[1], made.shape[2]}};
  }
  if (!kind) {
    SampleKey sample = {index, job->epoch, job->replicas ? (uint64_t)job->replicas[row] : 0};
    kind = run_any_program(job, sample, input, row, memory, spent);
  }
  if (!kind && job->kept && job->kept[row])
    job->made[row] = made;
  else
    free(made.at);
  if (kind) {
    /* Python counts the sample, its time and its file. */
    *spent = (Spent){0};
    return LEFT;
  }
  spent->working = now_ns() - started - spent->reading;
  return FINE;
}

/* All functions below are called with the lock held, unless they say otherwise. */

/* The worker that finishes a job takes it to Python. */
static void count_finished(Queue *q, Job *job, size_t samples) {
  job->left -= samples;
  if (job->left) return;
  job->next = NULL;
  if (q->last_finished)
    q->last_finished->next = job;
  else
    q->finished = job;
  q->last_finished = job;
}

static void remove_job(Queue *q, Job *job) {
  Job **place = &q->first, *before = NULL;
  while (*place && *place != job) {
    before = *place;
    place = &(*place)->next;
  }
  if (!*place) return;
  *place = job->next;
  if (q->last == job) q->last = before;
}

static void queue_submit(Queue *q, Job *job) {
  pthread_mutex_lock(&q->lock);
  job->next = NULL;
  job->left = job->count;
  if (!job->count) {
    count_finished(q, job, 0);
    pthread_cond_signal(&q->wake);
  } else {
    if (q->last)
      q->last->next = job;
    else
      q->first = job;
    q->last = job;
    if (q->idle) pthread_cond_broadcast(&q->wake);
  }
  pthread_mutex_unlock(&q->lock);
}

/* Take no more samples of a job: those that no worker has begun count as finished. Takes the lock. */
static void queue_cancel(Queue *q, Job *job) {
  pthread_mutex_lock(&q->lock);
  if (!job->cancelled) {
    job->cancelled = 1;
    size_t skipped = job->count - job->taken;
    if (skipped) {
      remove_job(q, job);
      job->taken = job->count;
      count_finished(q, job, skipped);
      pthread_cond_signal(&q->wake); /* the caller is not a worker */
    }
  }
  pthread_mutex_unlock(&q->lock);
}

/* Python has prepared a sample that was left to it. Takes the lock. */
static void queue_settle(Queue *q, Job *job) {
  pthread_mutex_lock(&q->lock);
  count_finished(q, job, 1);
  pthread_mutex_unlock(&q->lock);
}

/* Make a worker go to Python for more jobs, now or at a time. Takes the lock. */
static void queue_ask(Queue *q, uint64_t at) {
  pthread_mutex_lock(&q->lock);
  if (at) {
    q->ask_at = at;
  } else {
    q->asked = 1;
    q->ask_at = 0;
  }
  pthread_cond_signal(&q->wake);
  pthread_mutex_unlock(&q->lock);
}

static void queue_close(Queue *q) {
  pthread_mutex_lock(&q->lock);
  q->closing = 1;
  pthread_cond_broadcast(&q->wake);
  pthread_mutex_unlock(&q->lock);
}

/* Whether a worker must go to Python now, and why. */
static int next_event(Queue *q, Event *event) {
  if (q->closing) {
    event->reason = WORK_CLOSED;
    return 1;
  }
  if (q->finished) {
    *event = (Event){WORK_DONE, q->finished, 0};
    q->finished = event->job->next;
    if (!q->finished) q->last_finished = NULL;
    return 1;
  }
  if (!q->asked && q->ask_at && now_ns() >= q->ask_at) q->asked = 1;
  if (q->asked) {
    q->asked = 0;
    q->ask_at = 0;
    event->reason = WORK_TAKE;
    return 1;
  }
  return 0;
}

/* Work until Python is needed, or until the worker has been idle for `patience`. Takes the lock; called
   without the GIL. */
static Event queue_work(Queue *q, Worker *worker, uint64_t patience) {
  Event event = {WORK_TAKE, NULL, 0};
  pthread_mutex_lock(&q->lock);
  uint64_t until = now_ns() + patience;
  while (!next_event(q, &event)) {
    Job *job = q->first;
    if (!job) {
      uint64_t limit = q->ask_at && q->ask_at < until ? q->ask_at : until;
      if (now_ns() >= until) break; /* the caller looks whether its loader still exists */
      struct timespec at = as_timespec(limit);
      q->idle++;
      pthread_cond_timedwait(&q->wake, &q->lock, &at);
      q->idle--;
      continue;
    }
    size_t row = job->taken++;
    if (job->taken == job->count) remove_job(q, job);
    worker->job = job->id;
    worker->row = row;
    worker->since = now_ns();
    pthread_mutex_unlock(&q->lock);
    Spent spent = {0};
    int kind = run_sample(job, row, &worker->memory, &spent);
    pthread_mutex_lock(&q->lock);
    job->reading += spent.reading;
    job->working += spent.working;
    job->heading += spent.heading;
    job->head_augmenting += spent.head_augmenting;
    job->augmenting += spent.augmenting;
    for (int i = 0; job->program.sound && i < 2 * MOST_STEPS; i++) job->steps[i] += spent.steps[i];
    job->bytes += spent.bytes;
    job->read += spent.read;
    worker->job = -1;
    shrink_memory(&worker->memory);
    if (kind == LEFT) {
      event = (Event){WORK_SAMPLE, job, row};
      break;
    }
    count_finished(q, job, 1);
    until = now_ns() + patience;
  }
  pthread_mutex_unlock(&q->lock);
  return event;
}
