/* The Python module penstock._kernel. Functions that take longer than a few microseconds release the
   GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>

#include "jpeg/region.h"
#include "jpeg/index.h"
#include "augment/augment.h"
#include "key.h"
#include "lzw.h"
#include "files.h"
#include "queue.h"

typedef struct {
  PyObject *damaged, *unsupported;
  PyObject *program, *sound_program, *paths, *index, *made, *job, *queue; /* types */
} State;

static PyObject *fail(PyObject *module, int kind, const char *why) {
  State *state = PyModule_GetState(module);
  switch (kind) {
    case DAMAGED: PyErr_SetString(state->damaged, why); break;
    case OUTSIDE: PyErr_SetString(PyExc_ValueError, why); break;
    case NO_MEMORY: PyErr_NoMemory(); break;
    default: PyErr_SetString(state->unsupported, why);
  }
  return NULL;
}

static PyObject *kernel_size(PyObject *module, PyObject *given) {
  Py_buffer data;
  if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
  int height = 0, width = 0, components = 0;
  int kind = frame_size(data.buf, (size_t)data.len, &height, &width, &components);
  PyBuffer_Release(&data);
  if (kind == DAMAGED) return fail(module, kind, "Premature end of JPEG file");
  if (kind) return fail(module, kind, "it does not begin like a JPEG, or states no size");
  return Py_BuildValue("(iii)", height, width, components);
}

static int target_of(Py_buffer *out, int normal, Target *to) {
  const char *format = out->format ? out->format : "B";
  if (out->ndim != 3 || strcmp(format, normal ? "f" : "B")) {
    PyErr_Format(PyExc_ValueError, "out must be %s",
                 normal ? "float32 of shape (3, height, width)"
                        : "uint8 of shape (height, width, 3)");
    return -1;
  }
  Py_ssize_t channels = out->shape[normal ? 0 : 2];
  Py_ssize_t height = out->shape[normal ? 1 : 0], width = out->shape[normal ? 2 : 1];
  if (channels != 3 || height < 1 || width < 1 || height > 65535 || width > 65535) {
    PyErr_Format(PyExc_ValueError, "out must have 3 channels (axis %d), and sides of 1 to 65535",
                 normal ? 0 : 2);
    return -1;
  }
  to->height = (int)height;
  to->width = (int)width;
  if (!to->full_height) {
    to->full_height = to->height;
    to->full_width = to->width;
  }
  if (normal)
    to->floats = out->buf;
  else
    to->bytes = out->buf;
  return 0;
}

static int is_table(const Py_buffer *table) {
  if (table->len == 3 * 256 * (Py_ssize_t)sizeof(float) && !strcmp(table->format, "f")) return 1;
  PyErr_SetString(PyExc_ValueError, "table must be float32 of shape (3, 256)");
  return 0;
}

static int is_rgb(const Py_buffer *image) {
  if (image->ndim == 3 && !strcmp(image->format ? image->format : "B", "B") &&
      image->shape[2] == 3 && image->shape[0] <= 65535 && image->shape[1] <= 65535)
    return 1;
  PyErr_SetString(PyExc_ValueError,
                  "image must be uint8 of shape (height, width, 3), with sides of up to 65535");
  return 0;
}

/* A box of a JPEG, or of a decoded image, to be written into an array: the arguments, the buffers
   held while it runs, and the result. */
typedef struct {
  Py_buffer data, out, table;
  int held; /* number of these buffers that are held, in this order */
  int decoded, kind;
  Box box;
  Target to;
  char *known;
  IndexEntries entries;
  char why[JMSG_LENGTH_MAX];
} Request;

static void release_request(Request *r) {
  Py_buffer *buffers[] = {&r->data, &r->out, &r->table};
  while (r->held) PyBuffer_Release(buffers[--r->held]);
}

static int hold_buffer(Request *r, PyObject *given, Py_buffer *buffer, int flags) {
  if (PyObject_GetBuffer(given, buffer, flags)) return -1;
  r->held++;
  return 0;
}

/* Parse the arguments of `resize`, or one tuple of `regions`. The caller must call `release_request`
   afterwards, also after an error. */
static int parse_request(Request *r, PyObject *arguments, int decoded) {
  PyObject *given, *given_out, *given_table, *given_entries = Py_None;
  memset(r, 0, sizeof *r);
  r->decoded = decoded;
  if (!PyArg_ParseTuple(arguments, "OiiiiOpO|iiiiO", &given, &r->box.top, &r->box.left,
                        &r->box.height, &r->box.width, &given_out, &r->to.flip, &given_table,
                        &r->to.full_height, &r->to.full_width, &r->to.top, &r->to.left,
                        &given_entries))
    return -1;
  Py_ssize_t known_bytes = 0;
  if (given_entries != Py_None && PyBytes_AsStringAndSize(given_entries, &r->known, &known_bytes))
    return -1;
  if (known_bytes % sizeof(IndexEntry) || known_bytes / sizeof(IndexEntry) > 65535) {
    PyErr_Format(PyExc_ValueError, "%zd bytes are not index entries", known_bytes);
    return -1;
  }
  r->entries = (IndexEntries){(IndexEntry *)r->known, (size_t)known_bytes / sizeof(IndexEntry)};
  int normal = given_table != Py_None;
  int wanted = decoded ? PyBUF_C_CONTIGUOUS | PyBUF_FORMAT : PyBUF_SIMPLE;
  if (hold_buffer(r, given, &r->data, wanted)) return -1;
  if (decoded && !is_rgb(&r->data)) return -1;
  if (hold_buffer(r, given_out, &r->out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    return -1;
  if (normal) {
    if (hold_buffer(r, given_table, &r->table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return -1;
    if (!is_table(&r->table)) return -1;
    r->to.table = r->table.buf;
  }
  return target_of(&r->out, normal, &r->to);
}

/* Runs without the GIL. */
static void run_request(Request *r) {
  const Py_buffer *data = &r->data;
  if (r->decoded)
    r->kind = resample(data->buf, (int)data->shape[0], (int)data->shape[1], r->box, r->to, r->why);
  else
    r->kind = region(data->buf, (size_t)data->len, r->box, r->to, r->known ? &r->entries : NULL,
                     r->why);
}

/* Longer index entries, or None if there are no new ones; NULL with an exception set on failure. */
static PyObject *outcome(PyObject *module, Request *r) {
  if (r->kind) return fail(module, r->kind, r->why);
  if ((char *)r->entries.at == r->known) Py_RETURN_NONE;
  Py_ssize_t size = (Py_ssize_t)(r->entries.count * sizeof(IndexEntry));
  PyObject *entries = PyBytes_FromStringAndSize((char *)r->entries.at, size);
  free(r->entries.at);
  return entries;
}

static PyObject *kernel_resize(PyObject *module, PyObject *arguments) {
  Request request;
  PyObject *result = NULL;
  if (!parse_request(&request, arguments, 1)) {
    Py_BEGIN_ALLOW_THREADS;
    run_request(&request);
    Py_END_ALLOW_THREADS;
    result = outcome(module, &request);
  }
  release_request(&request);
  return result;
}

/* Takes a tuple of tuples, because tuples cannot change while the GIL is released. */
static PyObject *kernel_regions(PyObject *module, PyObject *given) {
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "regions takes a tuple of tuples");
    return NULL;
  }
  Py_ssize_t count = PyTuple_Size(given), asked = 0;
  Request *requests = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *requests);
  PyObject *results = NULL;
  if (!requests) return PyErr_NoMemory();
  for (; asked < count; asked++) {
    PyObject *one = PyTuple_GetItem(given, asked);
    if (!PyTuple_Check(one)) PyErr_SetString(PyExc_TypeError, "regions takes a tuple of tuples");
    if (PyErr_Occurred() || parse_request(requests + asked, one, 0)) {
      if (PyTuple_Check(one)) release_request(requests + asked);
      goto release_all;
    }
  }
  results = PyList_New(count);
  if (!results) goto release_all;
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < count; i++) run_request(requests + i);
  Py_END_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *one = outcome(module, requests + i);
    PyList_SetItem(results, i, one ? one : take_exception());
  }

release_all:
  while (asked) release_request(requests + --asked);
  PyMem_Free(requests);
  return results;
}

static PyObject *kernel_key(PyObject *module, PyObject *given) {
  (void)module;
  Py_buffer data;
  if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
  uint64_t key[2];
  if (data.len > LONG_DATA) {
    Py_BEGIN_ALLOW_THREADS;
    key_of(data.buf, (size_t)data.len, key);
    Py_END_ALLOW_THREADS;
  } else {
    key_of(data.buf, (size_t)data.len, key);
  }
  PyBuffer_Release(&data);
  return PyBytes_FromStringAndSize((char *)key, sizeof key);
}

/* The second 64 bits that `Keyed.at` draws for each sample: what torch is seeded with is of them. */
static PyObject *kernel_second_draws(PyObject *module, PyObject *arguments) {
  (void)module;
  const char *key;
  Py_ssize_t size;
  PyObject *indices, *replicas;
  unsigned long long epoch;
  if (!PyArg_ParseTuple(arguments, "y#O!KO:second_draws", &key, &size, &PyList_Type, &indices,
                        &epoch, &replicas)) {
    return NULL;
  }
  Py_ssize_t count = PyList_Size(indices);
  int replicated = replicas != Py_None;
  if (size != sizeof(StageKey) ||
      (replicated && (!PyList_Check(replicas) || PyList_Size(replicas) != count))) {
    PyErr_SetString(PyExc_ValueError, "second_draws: a key of 16 bytes, and a replica for each index");
    return NULL;
  }
  StageKey stage;
  memcpy(&stage, key, sizeof stage);
  PyObject *drawn = PyList_New(count);
  for (Py_ssize_t i = 0; drawn && i < count; i++) {
    SampleKey sample = {.epoch = epoch};
    sample.index = PyLong_AsUnsignedLongLong(PyList_GetItem(indices, i));
    if (replicated) sample.replica = PyLong_AsUnsignedLongLong(PyList_GetItem(replicas, i));
    if (PyErr_Occurred()) {
      Py_CLEAR(drawn);
      break;
    }
    Random random = random_at(stage, sample);
    random.counter[0]++;
    draw_block(&random);
    PyObject *number = PyLong_FromUnsignedLongLong(random.drawn[1]);
    if (!number) {
      Py_CLEAR(drawn);
    } else {
      PyList_SetItem(drawn, i, number);
    }
  }
  return drawn;
}

static PyObject *kernel_lzw_length(PyObject *module, PyObject *arguments) {
  PyObject *given;
  int bits, tiff;
  long long enough;
  if (!PyArg_ParseTuple(arguments, "OiLp:lzw_length", &given, &bits, &enough, &tiff)) return NULL;
  if (bits < 2 || bits > 8) {
    PyErr_SetString(PyExc_ValueError, "bits must be 2 to 8");
    return NULL;
  }
  Py_buffer data;
  if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
  int64_t length;
  Py_BEGIN_ALLOW_THREADS;
  length = lzw_length(data.buf, (size_t)data.len, bits, enough, tiff);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&data);
  if (length == LZW_DAMAGED) return fail(module, DAMAGED, "an undefined code");
  return PyLong_FromLongLong(length);
}

static int is_image(const Py_buffer *image, const Target *to) {
  if (!is_rgb(image)) return 0;
  if (image->shape[0] == to->height && image->shape[1] == to->width) return 1;
  PyErr_SetString(PyExc_ValueError, "image must have the height and width of out");
  return 0;
}

static PyObject *kernel_look_up(PyObject *module, PyObject *arguments) {
  (void)module;
  PyObject *given, *given_table, *given_out, *result = NULL;
  if (!PyArg_ParseTuple(arguments, "OOO:look_up", &given, &given_table, &given_out)) return NULL;
  Py_buffer image, table, out;
  if (PyObject_GetBuffer(given, &image, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return NULL;
  if (PyObject_GetBuffer(given_table, &table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
    goto release_image;
  if (PyObject_GetBuffer(given_out, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    goto release_table;
  Target to = {0};
  if (!is_table(&table) || target_of(&out, 1, &to)) goto release_out;
  if (!is_image(&image, &to)) goto release_out;
  to.table = table.buf;
  Py_BEGIN_ALLOW_THREADS;
  for (int y = 0; y < to.height; y++)
    write_row(to, y, (uint8_t *)image.buf + (size_t)y * to.width * 3);
  Py_END_ALLOW_THREADS;
  Py_INCREF(result = Py_None);

release_out:
  PyBuffer_Release(&out);
release_table:
  PyBuffer_Release(&table);
release_image:
  PyBuffer_Release(&image);
  return result;
}

/* Convert `steps` to an array from PyMem_Malloc. Returns its length, or -1 with an exception set. */
static Py_ssize_t changes_of(PyObject *steps, Change **changes) {
  Py_ssize_t count = PySequence_Size(steps);
  if (count < 0) return -1;
  *changes = PyMem_Malloc((size_t)(count ? count : 1) * sizeof **changes);
  if (!*changes) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    Change *one = *changes + i;
    PyObject *step = PySequence_GetItem(steps, i);
    int fine = step && PyTuple_Check(step) &&
               PyArg_ParseTuple(step, "id", &one->code, &one->magnitude);
    if (step && !PyTuple_Check(step)) PyErr_SetString(PyExc_TypeError, "a step must be a tuple");
    Py_XDECREF(step);
    if (!fine) return -1;
    if (one->code < 0 || one->code >= CHANGES || !isfinite(one->magnitude)) {
      PyErr_Format(PyExc_ValueError, "step %zd must be a code below %d and a finite magnitude", i,
                   CHANGES);
      return -1;
    }
  }
  return count;
}

static PyObject *kernel_augment(PyObject *module, PyObject *arguments) {
  PyObject *given, *steps, *given_table, *given_out, *result = NULL;
  uint8_t fill[3];
  if (!PyArg_ParseTuple(arguments, "OO(bbb)OO:augment", &given, &steps, fill, fill + 1, fill + 2,
                        &given_table, &given_out))
    return NULL;
  Py_buffer image, table, out;
  Target to = {0};
  int normal = given_table != Py_None;
  Change *changes = NULL;
  Py_ssize_t count = changes_of(steps, &changes);
  if (count < 0) goto free_changes;
  if (PyObject_GetBuffer(given, &image, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) goto free_changes;
  if (PyObject_GetBuffer(given_out, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    goto release_image;
  if (normal) {
    if (PyObject_GetBuffer(given_table, &table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
      goto release_out;
    if (!is_table(&table)) goto release_table;
    to.table = table.buf;
  }
  if (target_of(&out, normal, &to) || !is_image(&image, &to)) goto release_table;
  if ((char *)out.buf < (char *)image.buf + image.len &&
      (char *)image.buf < (char *)out.buf + out.len) {
    PyErr_SetString(PyExc_ValueError, "out must not overlap image");
    goto release_table;
  }

  int kind, changed;
  Py_BEGIN_ALLOW_THREADS;
  kind = augment(image.buf, changes, (size_t)count, fill, to, &changed);
  Py_END_ALLOW_THREADS;
  result = kind ? fail(module, kind, "") : PyBool_FromLong(normal || changed);

release_table:
  if (normal) PyBuffer_Release(&table);
release_out:
  PyBuffer_Release(&out);
release_image:
  PyBuffer_Release(&image);
free_changes:
  PyMem_Free(changes);
  return result;
}

#include "queue_types.h"
#include "coefficients.h"
#include "taps.h"

static int add_error(PyObject *module, const char *full, const char *name, PyObject **kept) {
  *kept = PyErr_NewException(full, PyExc_ValueError, NULL);
  if (!*kept) return -1;
  return PyModule_AddObjectRef(module, name, *kept);
}

static int add_type(PyObject *module, PyType_Spec *spec, PyObject **kept) {
  *kept = PyType_FromModuleAndSpec(module, spec, NULL);
  return *kept ? PyModule_AddType(module, (PyTypeObject *)*kept) : -1;
}

static int kernel_exec(PyObject *module) {
  State *state = PyModule_GetState(module);
  if (add_type(module, &program_spec, &state->program) ||
      add_type(module, &paths_spec, &state->paths) || add_type(module, &index_spec, &state->index) ||
      add_type(module, &made_spec, &state->made) ||
      add_type(module, &sound_program_spec, &state->sound_program) ||
      add_type(module, &job_spec, &state->job) || add_type(module, &queue_spec, &state->queue))
    return -1;
  if (add_error(module, "penstock._kernel.Damaged", "Damaged", &state->damaged)) return -1;
  return add_error(module, "penstock._kernel.Unsupported", "Unsupported", &state->unsupported);
}

static int kernel_traverse(PyObject *module, visitproc visit, void *arg) {
  State *state = PyModule_GetState(module);
  Py_VISIT(state->damaged);
  Py_VISIT(state->unsupported);
  Py_VISIT(state->program);
  Py_VISIT(state->paths);
  Py_VISIT(state->index);
  Py_VISIT(state->sound_program);
  Py_VISIT(state->made);
  Py_VISIT(state->job);
  Py_VISIT(state->queue);
  return 0;
}

static int kernel_clear(PyObject *module) {
  State *state = PyModule_GetState(module);
  Py_CLEAR(state->damaged);
  Py_CLEAR(state->unsupported);
  Py_CLEAR(state->program);
  Py_CLEAR(state->paths);
  Py_CLEAR(state->index);
  Py_CLEAR(state->sound_program);
  Py_CLEAR(state->made);
  Py_CLEAR(state->job);
  Py_CLEAR(state->queue);
  return 0;
}

static PyMethodDef methods[] = {
    {"read_files", kernel_read_files, METH_O, "read_files(paths) -> list of bytes or OSErrors"},
    {"stat_files", kernel_stat_files, METH_VARARGS,
     "stat_files(folder, text, ends, first, out) -> None; writes the size and time of each file"},
    {"key", kernel_key, METH_O, "key(data) -> 128-bit hash as 16 bytes"},
    {"second_draws", kernel_second_draws, METH_VARARGS,
     "second_draws(key, indices, epoch, replicas or None) -> list of the second 64 bits that "
     "Keyed.at draws for each sample"},
    {"lzw_length", kernel_lzw_length, METH_VARARGS,
     "lzw_length(data, bits, enough, tiff) -> number of bytes that the data unpacks to"},
    {"size", kernel_size, METH_O, "size(data) -> (height, width, components)"},
    {"regions", kernel_regions, METH_O,
     "regions(tuple of (data, top, left, height, width, out, flip, table[, full_height, "
     "full_width, out_top, out_left, entries])) -> list of longer entries, None, or exceptions"},
    {"coefficients", kernel_coefficients, METH_VARARGS,
     "coefficients(tuple of (data, top, left, height, width, full_height, full_width, part_top, "
     "part_left, part_height, part_width), index) -> packed pictures as a bytearray, and a list of "
     "None or exceptions"},
    {"taps", kernel_taps, METH_O,
     "taps(rows of start, length, full, offset, count, flip as int64) -> columns, taps, and "
     "bytearrays: first and weights as int32; taps, start and stop as int64"},
    {"resize", kernel_resize, METH_VARARGS,
     "resize(image, top, left, height, width, out, flip, table[, full_height, full_width, out_top, "
     "out_left]) -> None"},
    {"look_up", kernel_look_up, METH_VARARGS, "look_up(image, table, out) -> None"},
    {"augment", kernel_augment, METH_VARARGS,
     "augment(image, steps, fill, table, out) -> whether out was written"},
    {"resample", kernel_resample, METH_VARARGS,
     "resample(sound, from_rate, to_rate, step, before, weights, out) -> None"},
    {"add_resampling", kernel_add_resampling, METH_VARARGS,
     "add_resampling(from_rate, to_rate, step, before, weights) -> None: jobs can use this filter"},
    {"use_libsndfile", kernel_use_libsndfile, METH_VARARGS,
     "use_libsndfile(sf_open_virtual, sf_readf_float, sf_close) -> None: addresses, for FLAC"},
    {"gil_waits", kernel_gil_waits, METH_VARARGS,
     "gil_waits(count, nap) -> how often another thread held the GIL, of `count` looks"},
    {"count_naps", kernel_count_naps, METH_VARARGS,
     "count_naps(nap, seconds) -> how many naps a thread takes in that time"},
    {"nap", kernel_nap, METH_O,
     "nap(seconds) -> None: queues sleep that long for a sample, instead of preparing it"},
    {0},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, kernel_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "penstock._kernel",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = kernel_traverse,
    .m_clear = kernel_clear,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
