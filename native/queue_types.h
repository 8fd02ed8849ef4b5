/* The queue, its jobs and programs as Python types. */

typedef struct {
  PyObject_HEAD
  Program program;
} ProgramObject;

typedef struct {
  PyObject_HEAD
  SoundProgram program;
} SoundProgramObject;

/* Buffers that an object holds as long as it exists. */
typedef struct {
  Py_buffer at[9];
  int count;
} Buffers;

typedef struct {
  PyObject_HEAD
  Paths paths;
  Buffers buffers;
} PathsObject;

typedef struct {
  PyObject_HEAD
  JpegIndex index;
} IndexObject;

typedef struct {
  PyObject_HEAD
  Job job;
  PyObject *program, *head, *paths, *index, *tag;
  Py_buffer out;
  Py_buffer *inputs; /* those of the job, which hold its data; obj NULL: none */
} JobObject;

typedef struct {
  PyObject_HEAD
  Queue queue;
} QueueObject;

#define JOB_OBJECT(pointer) ((JobObject *)((char *)(pointer) - offsetof(JobObject, job)))

static void free_object(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyObject *new_object(PyTypeObject *type) {
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  return allocate(type, 0);
}

static int hold(Buffers *buffers, PyObject *given, int flags) {
  if (PyObject_GetBuffer(given, buffers->at + buffers->count, flags)) return -1;
  buffers->count++;
  return 0;
}

static void release_buffers(Buffers *buffers) {
  while (buffers->count) PyBuffer_Release(buffers->at + --buffers->count);
}

/* ------------------------------------------------------------------------------------- programs */

static int read_key(PyObject *given, StageKey *key) {
  char *bytes;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(given, &bytes, &length)) return -1;
  if (length != sizeof key->words) {
    PyErr_Format(PyExc_ValueError, "a key has 16 bytes, not %zd", length);
    return -1;
  }
  memcpy(key->words, bytes, sizeof key->words);
  return 0;
}

static int read_framing(PyObject *given, Program *program) {
  Py_ssize_t count = PyTuple_Check(given) ? PyTuple_Size(given) : -1;
  if (count < 0 || count > MOST_FRAMINGS) {
    PyErr_Format(PyExc_ValueError, "framing must be a tuple of up to %d tuples", MOST_FRAMINGS);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    Framing *one = program->framing + i;
    PyObject *key;
    if (!PyArg_ParseTuple(PyTuple_GetItem(given, i), "iii(dddd)O", &one->kind, &one->height,
                          &one->width, one->scale, one->scale + 1, one->ratio, one->ratio + 1,
                          &key) ||
        read_key(key, &one->key))
      return -1;
    int largest = one->height > one->width ? one->height : one->width;
    if (one->kind < 0 || one->kind >= FRAMINGS || one->height < 1 || one->width < 1 ||
        largest > 65535) {
      PyErr_SetString(PyExc_ValueError, "framing must have a known kind, and sides of 1 to 65535");
      return -1;
    }
    if (one->kind == RANDOM_RESIZED_CROP &&
        !(one->scale[0] > 0 && one->scale[1] <= 1 && one->ratio[0] > 0 && isfinite(one->ratio[1]))) {
      PyErr_SetString(PyExc_ValueError, "scale must be within 0 and 1, and ratio above 0");
      return -1;
    }
  }
  program->framings = (int)count;
  return 0;
}

static int read_policy(PyObject *given, Augment *augment) {
  if (augment->kind != AUTO_AUGMENT) return 0;
  char *bytes;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(given, &bytes, &length)) return -1;
  if (length != sizeof augment->policy) {
    PyErr_Format(PyExc_ValueError, "a policy has %zu bytes, not %zd", sizeof augment->policy, length);
    return -1;
  }
  memcpy(augment->policy, bytes, sizeof augment->policy);
  for (int i = 0; i < 2 * POLICY_PAIRS; i++)
    if (!(augment->policy[i / 2][i % 2].code >= 0 && augment->policy[i / 2][i % 2].code < CHANGES)) {
      PyErr_SetString(PyExc_ValueError, "a policy has an unknown change");
      return -1;
    }
  return 0;
}

static int read_augment(PyObject *given, Augment *augment) {
  if (given == Py_None) return 0;
  PyObject *key, *policy;
  Space *space = &augment->space;
  if (!PyArg_ParseTuple(given, "iiid(ddpddd)O(bbb)O", &augment->kind, &augment->number,
                        &augment->bins, &augment->strength, &space->shear, &space->shift,
                        &space->shift_of_side, &space->turn, &space->tone, &space->bits, &policy,
                        augment->fill, augment->fill + 1, augment->fill + 2, &key) ||
      read_key(key, &augment->key))
    return -1;
  if (augment->kind < RAND_AUGMENT || augment->kind > TRIVIAL_AUGMENT || augment->number < 0 ||
      augment->number > MOST_CHANGES || augment->bins < 2) {
    PyErr_Format(PyExc_ValueError, "an augmentation has a known kind, up to %d changes and 2 bins",
                 MOST_CHANGES);
    return -1;
  }
  return read_policy(policy, augment);
}

static int read_table(PyObject *given, Program *program) {
  if (given == Py_None) return 0;
  Py_buffer table;
  if (PyObject_GetBuffer(given, &table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return -1;
  int fine = is_table(&table);
  if (fine) memcpy(program->table, table.buf, sizeof program->table);
  PyBuffer_Release(&table);
  program->normal = 1;
  return fine ? 0 : -1;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"decodes", "most_pixels", "framing", "flip",
                          "augment", "table",       "indexed", NULL};
  PyObject *framing, *flip, *augment, *table;
  int decodes, indexed;
  long long most_pixels;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "pLOOOOp:Program", names, &decodes, &most_pixels,
                                   &framing, &flip, &augment, &table, &indexed))
    return NULL;
  ProgramObject *self = (ProgramObject *)new_object(type);
  if (!self) return NULL;
  Program *program = &self->program;
  program->decodes = decodes;
  program->most_pixels = most_pixels;
  program->indexed = indexed;
  PyObject *key;
  if (flip != Py_None) {
    program->flips = 1;
    if (!PyArg_ParseTuple(flip, "dO", &program->flip, &key) || read_key(key, &program->flip_key))
      goto failed;
  }
  if (read_framing(framing, program) || read_augment(augment, &program->augment) ||
      read_table(table, program))
    goto failed;
  return (PyObject *)self;

failed:
  Py_DECREF(self);
  return NULL;
}

/* For tests: the frame, the flip and the changes that are drawn for a sample. */
static PyObject *program_draw(PyObject *self, PyObject *args) {
  const Program *program = &((ProgramObject *)self)->program;
  SampleKey sample;
  unsigned long long index, epoch, replica;
  int rows, columns;
  if (!PyArg_ParseTuple(args, "KKKii:draw", &index, &epoch, &replica, &rows, &columns)) return NULL;
  sample = (SampleKey){index, epoch, replica};
  Frame f;
  int flip, number = 0;
  Change changes[MOST_CHANGES];
  if (draw_frame(program, sample, rows, columns, &f, &flip)) Py_RETURN_NONE;
  if (program->augment.kind)
    number = draw_changes(&program->augment, sample, f.part.height, f.part.width, changes);
  PyObject *steps = PyList_New(number);
  for (int i = 0; steps && i < number; i++)
    PyList_SetItem(steps, i, Py_BuildValue("(id)", changes[i].code, changes[i].magnitude));
  if (!steps) return NULL;
  return Py_BuildValue("((iiii)(ii)(iiii)NN)", f.box.top, f.box.left, f.box.height, f.box.width,
                       f.full_height, f.full_width, f.part.top, f.part.left, f.part.height,
                       f.part.width, PyBool_FromLong(flip), steps);
}

static PyMethodDef program_methods[] = {
    {"draw", program_draw, METH_VARARGS,
     "draw(index, epoch, replica, rows, columns) -> (box, full, part, flip, changes), or None"},
    {0},
};

static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new},
    {Py_tp_dealloc, free_object},
    {Py_tp_methods, program_methods},
    {Py_tp_doc, "Image operations that run as one step: what is drawn, and what is done."},
    {0, NULL},
};
static PyType_Spec program_spec = {"penstock._kernel.Program", sizeof(ProgramObject), 0,
                                   Py_TPFLAGS_DEFAULT, program_slots};

#include "sound_types.h"

/* ---------------------------------------------------------------------------------------- paths */

/* Whether numbers rise from 0 to at most `most`. */
static int rising(const int64_t *ends, size_t count, int64_t most) {
  int64_t before = 0;
  for (size_t i = 0; i < count; i++) {
    if (ends[i] < before || ends[i] > most) return 0;
    before = ends[i];
  }
  return 1;
}

static void paths_dealloc(PyObject *self) {
  release_buffers(&((PathsObject *)self)->buffers);
  free_object(self);
}

static PyObject *paths_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"root",      "folder_text", "folder_ends", "ends",  "text",
                          "name_ends", "files",       "offsets",     "sizes", NULL};
  PyObject *given[9] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOO|OOO:Paths", names, given, given + 1,
                                   given + 2, given + 3, given + 4, given + 5, given + 6, given + 7,
                                   given + 8))
    return NULL;
  if (!given[6] != !given[7] || !given[6] != !given[8]) {
    PyErr_SetString(PyExc_TypeError, "Paths: files, offsets and sizes are given together");
    return NULL;
  }
  PathsObject *self = (PathsObject *)new_object(type);
  if (!self) return NULL;
  for (int i = 0; i < (given[6] ? 9 : 6); i++)
    if (hold(&self->buffers, given[i], PyBUF_SIMPLE)) {
      Py_DECREF(self);
      return NULL;
    }
  const Py_buffer *held = self->buffers.at;
  self->paths = (Paths){
      .root = held[0].buf,
      .root_length = (size_t)held[0].len,
      .folder_text = held[1].buf,
      .folder_ends = held[2].buf,
      .ends = held[3].buf,
      .text = held[4].buf,
      .name_ends = held[5].buf,
      .folders = (size_t)held[2].len / sizeof(int64_t),
      .names = (size_t)held[5].len / sizeof(int64_t),
  };
  const Paths *paths = &self->paths;
  if ((size_t)held[3].len != paths->folders * sizeof(int64_t) ||
      !rising(paths->folder_ends, paths->folders, held[1].len) ||
      !rising(paths->ends, paths->folders, (int64_t)paths->names) ||
      !rising(paths->name_ends, paths->names, held[4].len)) {
    PyErr_SetString(PyExc_ValueError, "Paths: the ends do not fit the texts");
    Py_DECREF(self);
    return NULL;
  }
  if (!given[6]) return (PyObject *)self;
  if (held[6].len != held[7].len || held[6].len != held[8].len) {
    PyErr_SetString(PyExc_ValueError, "Paths: files, offsets and sizes differ in length");
    Py_DECREF(self);
    return NULL;
  }
  self->paths.files = held[6].buf;
  self->paths.offsets = held[7].buf;
  self->paths.sizes = held[8].buf;
  self->paths.ranges = (size_t)held[6].len / sizeof(int64_t);
  return (PyObject *)self;
}

static PyObject *paths_path(PyObject *self, PyObject *given) {
  char path[LONGEST_PATH + 1];
  long long index = PyLong_AsLongLong(given);
  if (index == -1 && PyErr_Occurred()) return NULL;
  if (path_of(&((PathsObject *)self)->paths, index, path)) Py_RETURN_NONE;
  return PyBytes_FromString(path);
}

static PyMethodDef paths_methods[] = {
    {"path", paths_path, METH_O, "path(index) -> bytes, or None if it cannot be a path"},
    {0},
};

static PyType_Slot paths_slots[] = {
    {Py_tp_new, paths_new},
    {Py_tp_dealloc, paths_dealloc},
    {Py_tp_methods, paths_methods},
    {Py_tp_doc, "Files by index: a root, folders below it, names in each. Without folders, paths."},
    {0, NULL},
};
static PyType_Spec paths_spec = {"penstock._kernel.Paths", sizeof(PathsObject), 0,
                                 Py_TPFLAGS_DEFAULT, paths_slots};

/* ---------------------------------------------------------------------------------------- index */

static void index_dealloc(PyObject *self) {
  index_end(&((IndexObject *)self)->index);
  free_object(self);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"budget", NULL};
  unsigned long long budget;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "K:Index", names, &budget)) return NULL;
  IndexObject *self = (IndexObject *)new_object(type);
  if (!self) return NULL;
  if (index_begin(&self->index, (size_t)budget)) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return (PyObject *)self;
}

static int index_key(PyObject *given, uint64_t key[2]) {
  StageKey read;
  if (read_key(given, &read)) return -1;
  memcpy(key, read.words, sizeof read.words);
  return 0;
}

static PyObject *index_entries(PyObject *self, PyObject *given) {
  uint64_t key[2];
  size_t count;
  if (index_key(given, key)) return NULL;
  IndexEntry *copy = malloc(MOST_ENTRIES * sizeof *copy);
  if (!copy) return PyErr_NoMemory();
  int wanted = index_find(&((IndexObject *)self)->index, key, copy, &count);
  PyObject *entries = Py_None;
  if (wanted)
    entries = PyBytes_FromStringAndSize((char *)copy, (Py_ssize_t)(count * sizeof *copy));
  else
    Py_INCREF(entries);
  free(copy);
  return entries;
}

static PyObject *index_add_entries(PyObject *self, PyObject *args) {
  PyObject *given_key;
  const char *entries;
  Py_ssize_t length;
  uint64_t key[2];
  if (!PyArg_ParseTuple(args, "Oy#:add", &given_key, &entries, &length) || index_key(given_key, key))
    return NULL;
  if (length % (Py_ssize_t)sizeof(IndexEntry)) {
    PyErr_Format(PyExc_ValueError, "%zd bytes are not index entries", length);
    return NULL;
  }
  index_add(&((IndexObject *)self)->index, key, (const IndexEntry *)entries,
            (size_t)length / sizeof(IndexEntry));
  Py_RETURN_NONE;
}

static PyObject *index_used(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromSize_t(((IndexObject *)self)->index.used);
}

static PyObject *index_budget(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromSize_t(((IndexObject *)self)->index.budget);
}

static Py_ssize_t index_length(PyObject *self) {
  return (Py_ssize_t)((IndexObject *)self)->index.files;
}

static PyMethodDef index_methods[] = {
    {"entries", index_entries, METH_O,
     "entries(key) -> bytes, empty if there are none yet; None if the budget is used up"},
    {"add", index_add_entries, METH_VARARGS, "add(key, entries) -> None; longer entries stay"},
    {0},
};
static PyGetSetDef index_attributes[] = {
    {"used", index_used, NULL, "bytes that the entries take", NULL},
    {"budget", index_budget, NULL, "bytes that they may take", NULL},
    {0},
};

static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, index_methods},
    {Py_tp_getset, index_attributes},
    {Py_mp_length, index_length},
    {Py_tp_doc, "JPEG index entries of many files, by the hash of their content."},
    {0, NULL},
};
static PyType_Spec index_spec = {"penstock._kernel.Index", sizeof(IndexObject), 0,
                                 Py_TPFLAGS_DEFAULT, index_slots};

/* ----------------------------------------------------------------------------------------- made */

typedef struct {
  PyObject_HEAD
  Made made;
  Py_ssize_t shape[3], strides[3];
} MadeObject;

static void made_dealloc(PyObject *self) {
  free(((MadeObject *)self)->made.at);
  free_object(self);
}

static int made_get_buffer(PyObject *self, Py_buffer *view, int flags) {
  MadeObject *object = (MadeObject *)self;
  const Made *made = &object->made;
  int axes = made->shape[2] ? 3 : 2;
  Py_ssize_t size = made->floats ? sizeof(float) : 1, bytes = size;
  for (int i = axes - 1; i >= 0; i--) {
    object->shape[i] = made->shape[i];
    object->strides[i] = bytes;
    bytes *= made->shape[i];
  }
  if (PyBuffer_FillInfo(view, self, made->at, bytes, 0, flags)) return -1;
  view->itemsize = size;
  if (flags & PyBUF_FORMAT) view->format = made->floats ? "f" : "B";
  if ((flags & PyBUF_ND) == PyBUF_ND) {
    view->ndim = axes;
    view->shape = object->shape;
  }
  if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = object->strides;
  return 0;
}

static PyType_Slot made_slots[] = {
    {Py_tp_dealloc, made_dealloc},
    {Py_bf_getbuffer, made_get_buffer},
    {Py_tp_doc, "Pixels or a sound in memory of the kernel; supports the buffer protocol."},
    {0, NULL},
};
static PyType_Spec made_spec = {"penstock._kernel.Made", sizeof(MadeObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, made_slots};

/* ----------------------------------------------------------------------------------------- jobs */

static void job_dealloc(PyObject *self) {
  JobObject *object = (JobObject *)self;
  Job *job = &object->job;
  for (size_t i = 0; i < job->count; i++) {
    if (object->inputs && object->inputs[i].obj) PyBuffer_Release(object->inputs + i);
    if (job->files) free(job->files[i].data);
    if (job->made) free(job->made[i].at);
  }
  free(object->inputs);
  free(job->inputs);
  free(job->files);
  free(job->indices);
  free(job->replicas);
  free(job->versions);
  free(job->made);
  free(job->kept);
  if (object->out.obj) PyBuffer_Release(&object->out);
  Py_XDECREF(object->program);
  Py_XDECREF(object->head);
  Py_XDECREF(object->paths);
  Py_XDECREF(object->index);
  Py_XDECREF(object->tag);
  free_object(self);
}

/* Copy an array with an int64 for each sample; None gives NULL. */
static int copy_numbers(PyObject *given, int64_t **numbers, size_t count) {
  if (given == Py_None) return 0;
  Py_buffer view;
  if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE)) return -1;
  int fits = (size_t)view.len == count * sizeof **numbers;
  if (!fits)
    PyErr_SetString(PyExc_ValueError, "a number is needed for each sample");
  else if (!(*numbers = malloc(view.len ? (size_t)view.len : 1)))
    PyErr_NoMemory();
  else
    memcpy(*numbers, view.buf, (size_t)view.len);
  PyBuffer_Release(&view);
  return *numbers ? 0 : -1;
}

static int has(AnyProgram any) { return any.image || any.sound; }

static int reads_files(AnyProgram any) {
  return any.sound ? any.sound->count && any.sound->step[0].kind == DECODE : any.image->decodes;
}

static int take_inputs(JobObject *object, PyObject *given) {
  Job *job = &object->job;
  if (given == Py_None) return 0;
  if (!PyList_Check(given) || (size_t)PyList_Size(given) != job->count) {
    PyErr_SetString(PyExc_ValueError, "inputs must be a list with an item for each sample");
    return -1;
  }
  object->inputs = calloc(job->count ? job->count : 1, sizeof *object->inputs);
  job->inputs = calloc(job->count ? job->count : 1, sizeof *job->inputs);
  if (!object->inputs || !job->inputs) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < job->count; i++) {
    PyObject *one = PyList_GetItem(given, (Py_ssize_t)i);
    Py_buffer *view = object->inputs + i;
    if (one == Py_None) continue;
    /* With a head, bytes are files and arrays are results of the head that were kept. */
    int decodes = has(job->head) ? PyBytes_Check(one) || PyMemoryView_Check(one)
                                 : reads_files(job->program);
    if (PyObject_GetBuffer(one, view, decodes ? PyBUF_SIMPLE : PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
      return -1;
    job->inputs[i] = (Input){view->buf, (size_t)view->len, {0}};
    if (decodes) continue;
    if (job->program.sound ? !is_sound(view) : !is_rgb(view)) return -1;
    for (int axis = 0; axis < view->ndim; axis++) job->inputs[i].shape[axis] = (int)view->shape[axis];
  }
  return 0;
}

static int take_pixels_out(Job *job, const Py_buffer *out) {
  int normal = job->program.image->normal;
  const char *format = out->format ? out->format : "B";
  if (out->ndim != 4 || strcmp(format, normal ? "f" : "B") || (size_t)out->shape[0] != job->count ||
      out->shape[normal ? 1 : 3] != 3 || out->shape[normal ? 2 : 1] > 65535 ||
      out->shape[normal ? 3 : 2] > 65535 || out->shape[1] < 1 || out->shape[2] < 1 ||
      out->shape[3] < 1) {
    PyErr_SetString(PyExc_ValueError,
                    "out must have a row for each sample: uint8 (height, width, 3), or float32 "
                    "(3, height, width) with a table");
    return -1;
  }
  job->shape[0] = (int)out->shape[normal ? 2 : 1];
  job->shape[1] = (int)out->shape[normal ? 3 : 2];
  job->row_bytes = (size_t)job->shape[0] * job->shape[1] * 3 * (normal ? sizeof(float) : 1);
  return 0;
}

static int take_sounds_out(Job *job, const Py_buffer *out) {
  int fits = out->ndim >= 3 && out->ndim <= 4 && out->format && !strcmp(out->format, "f") &&
             (size_t)out->shape[0] == job->count;
  job->row_bytes = sizeof(float);
  for (int i = 1; fits && i < out->ndim; i++) {
    fits = out->shape[i] > 0 && out->shape[i] <= INT_MAX;
    job->shape[i - 1] = (int)out->shape[i];
    job->row_bytes *= (size_t)out->shape[i];
  }
  if (!fits)
    PyErr_SetString(PyExc_ValueError, "out must be float32 and have a row for each sample: (channels, "
                                      "frames), or (channels, mels, steps)");
  return fits ? 0 : -1;
}

static int take_out(JobObject *object, PyObject *given) {
  Job *job = &object->job;
  Py_buffer *out = &object->out;
  if (PyObject_GetBuffer(given, out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT)) return -1;
  job->out = out->buf;
  return job->program.sound ? take_sounds_out(job, out) : take_pixels_out(job, out);
}

static int check_class(PyObject *given, PyObject *type, const char *name) {
  int fits = PyObject_IsInstance(given, type);
  if (!fits) PyErr_Format(PyExc_TypeError, "%s expected", name);
  return fits == 1 ? 0 : -1;
}

/* The program of an object, or none of None. */
static int read_program(State *state, PyObject *given, AnyProgram *any) {
  if (given == Py_None) return 0;
  int image = PyObject_IsInstance(given, state->program);
  int sound = image ? 0 : PyObject_IsInstance(given, state->sound_program);
  if (image < 0 || sound < 0) return -1;
  if (image) any->image = &((ProgramObject *)given)->program;
  if (sound) any->sound = &((SoundProgramObject *)given)->program;
  if (image || sound) return 0;
  PyErr_SetString(PyExc_TypeError, "a Program, a SoundProgram, or None for the head expected");
  return -1;
}

/* A head goes from files to bytes or a sound, and the program from there. */
static int fits_head(const Job *job) {
  if (job->head.sound)
    return job->program.sound && reads_files(job->head) && !reads_files(job->program) &&
           job->head.sound->count + job->program.sound->count <= 2 * MOST_STEPS;
  return job->program.image && job->head.image->decodes && !job->head.image->normal &&
         !job->program.image->decodes;
}

static PyObject *job_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"program", "head",     "paths",    "index",  "tag",  "number", "indices",
                          "epoch",   "versions", "replicas", "inputs", "keeps", "kept", "out", NULL};
  PyObject *program, *head, *paths, *index, *tag, *indices, *versions, *replicas, *inputs, *kept, *out;
  unsigned long long epoch;
  long long number;
  int keeps;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOLOKOOOpOO:Job", names, &program, &head,
                                   &paths, &index, &tag, &number, &indices, &epoch, &versions,
                                   &replicas, &inputs, &keeps, &kept, &out))
    return NULL;
  State *state = PyType_GetModuleState(type);
  AnyProgram any = {0}, any_head = {0};
  if (read_program(state, program, &any) || read_program(state, head, &any_head)) return NULL;
  if (!has(any)) {
    PyErr_SetString(PyExc_TypeError, "a Program or a SoundProgram expected");
    return NULL;
  }
  if ((paths != Py_None && check_class(paths, state->paths, "Paths, or None,")) ||
      (index != Py_None && check_class(index, state->index, "an Index, or None,")))
    return NULL;
  JobObject *self = (JobObject *)new_object(type);
  if (!self) return NULL;
  Job *job = &self->job;
  Py_INCREF(self->program = program);
  Py_INCREF(self->head = head);
  Py_INCREF(self->paths = paths);
  Py_INCREF(self->index = index);
  Py_INCREF(self->tag = tag);
  job->id = number;
  job->program = any;
  job->head = any_head;
  job->paths = paths == Py_None ? NULL : &((PathsObject *)paths)->paths;
  job->index = index == Py_None ? NULL : &((IndexObject *)index)->index;
  job->epoch = epoch;
  job->keeps = keeps;
  if (has(job->head) && !fits_head(job)) {
    PyErr_SetString(PyExc_ValueError,
                    "a head goes from files to bytes or a sound, and the program from there");
    goto failed;
  }
  Py_buffer view;
  if (PyObject_GetBuffer(indices, &view, PyBUF_SIMPLE)) goto failed;
  size_t count = (size_t)view.len / sizeof(int64_t);
  PyBuffer_Release(&view);
  if (copy_numbers(indices, &job->indices, count) || copy_numbers(versions, &job->versions, count) ||
      copy_numbers(replicas, &job->replicas, count) || copy_numbers(kept, &job->kept, count))
    goto failed;
  if ((keeps && !(job->files = calloc(count ? count : 1, sizeof *job->files))) ||
      (job->kept && !(job->made = calloc(count ? count : 1, sizeof *job->made)))) {
    PyErr_NoMemory();
    goto failed;
  }
  job->count = count;
  if (take_inputs(self, inputs) || take_out(self, out)) goto failed;
  return (PyObject *)self;

failed:
  Py_DECREF(self);
  return NULL;
}

static PyObject *job_tag(PyObject *self, void *unused) {
  (void)unused;
  PyObject *tag = ((JobObject *)self)->tag;
  Py_INCREF(tag);
  return tag;
}

static PyObject *job_spent(PyObject *self, void *unused) {
  (void)unused;
  const Job *job = &((JobObject *)self)->job;
  return Py_BuildValue("(dddddKn)", 1e-9 * (double)job->reading, 1e-9 * (double)job->working,
                       1e-9 * (double)job->heading, 1e-9 * (double)job->head_augmenting,
                       1e-9 * (double)job->augmenting, (unsigned long long)job->bytes,
                       (Py_ssize_t)job->read);
}

/* The content of each file that was read, or None. */
static PyObject *job_files(PyObject *self, PyObject *unused) {
  (void)unused;
  const Job *job = &((JobObject *)self)->job;
  PyObject *files = PyList_New((Py_ssize_t)job->count);
  for (size_t i = 0; files && i < job->count; i++) {
    PyObject *one = Py_None;
    if (job->files && job->files[i].data)
      one = PyBytes_FromStringAndSize(job->files[i].data, (Py_ssize_t)job->files[i].length);
    else
      Py_INCREF(one);
    if (!one) Py_CLEAR(files);
    else PyList_SetItem(files, (Py_ssize_t)i, one);
  }
  return files;
}

/* What the head made of each sample whose number in `kept` is not 0, or None. The job gives it away: a
   second call returns none. */
static PyObject *job_made(PyObject *self, PyObject *unused) {
  (void)unused;
  Job *job = &((JobObject *)self)->job;
  State *state = PyType_GetModuleState(Py_TYPE(self));
  PyObject *list = PyList_New((Py_ssize_t)job->count);
  for (size_t i = 0; list && i < job->count; i++) {
    PyObject *one = Py_None;
    if (job->made && job->made[i].at) {
      one = new_object((PyTypeObject *)state->made);
      if (!one) {
        Py_CLEAR(list);
        break;
      }
      ((MadeObject *)one)->made = job->made[i];
      job->made[i].at = NULL;
    } else {
      Py_INCREF(one);
    }
    PyList_SetItem(list, (Py_ssize_t)i, one);
  }
  return list;
}

/* Seconds of each step of the head and of the program of sounds. */
static PyObject *job_steps(PyObject *self, void *unused) {
  (void)unused;
  const Job *job = &((JobObject *)self)->job;
  int count = (job->head.sound ? job->head.sound->count : 0) +
              (job->program.sound ? job->program.sound->count : 0);
  PyObject *steps = PyList_New(count);
  for (int i = 0; steps && i < count; i++) {
    PyObject *seconds = PyFloat_FromDouble(1e-9 * (double)job->steps[i]);
    if (seconds)
      PyList_SetItem(steps, i, seconds);
    else
      Py_CLEAR(steps);
  }
  return steps;
}

static PyMethodDef job_methods[] = {
    {"made", job_made, METH_NOARGS, "made() -> what the head made of each sample, or None"},
    {"files", job_files, METH_NOARGS, "files() -> the content of each file that was read, or None"},
    {0},
};
static PyGetSetDef job_attributes[] = {
    {"tag", job_tag, NULL, "the object that was given", NULL},
    {"spent", job_spent, NULL, "seconds of reading, of work, within it of the head, of its augmenting, of augmenting below; "
     "bytes and files read", NULL},
    {"steps", job_steps, NULL, "seconds of each step, of sounds", NULL},
    {0},
};
static PyType_Slot job_slots[] = {
    {Py_tp_new, job_new},
    {Py_tp_dealloc, job_dealloc},
    {Py_tp_methods, job_methods},
    {Py_tp_getset, job_attributes},
    {Py_tp_doc, "Samples to prepare: which, by which program, and where their rows are."},
    {0, NULL},
};
static PyType_Spec job_spec = {"penstock._kernel.Job", sizeof(JobObject), 0, Py_TPFLAGS_DEFAULT,
                               job_slots};

/* ---------------------------------------------------------------------------------------- queue */

/* The queue holds a reference to each job until it hands it out as done. */
static void drop_jobs(Job *job) {
  while (job) {
    Job *next = job->next;
    Py_DECREF(JOB_OBJECT(job));
    job = next;
  }
}

static void queue_dealloc(PyObject *self) {
  Queue *q = &((QueueObject *)self)->queue;
  drop_jobs(q->first);
  drop_jobs(q->finished);
  for (size_t i = 0; i < q->worker_count; i++) {
    free_memory(&q->workers[i]->memory);
    free(q->workers[i]);
  }
  free(q->workers);
  pthread_mutex_destroy(&q->lock);
  pthread_cond_destroy(&q->wake);
  free_object(self);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"workers", NULL};
  Py_ssize_t workers;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "n:Queue", names, &workers)) return NULL;
  if (workers < 1 || workers > 65535) {
    PyErr_SetString(PyExc_ValueError, "a queue has 1 to 65535 workers");
    return NULL;
  }
  QueueObject *self = (QueueObject *)new_object(type);
  if (!self) return NULL;
  Queue *q = &self->queue;
  queue_begin(q);
  q->workers = calloc((size_t)workers, sizeof *q->workers);
  for (; q->workers && q->worker_count < (size_t)workers; q->worker_count++) {
    Worker *worker = q->workers[q->worker_count] = calloc(1, sizeof *worker);
    if (!worker) break;
    worker->job = -1;
  }
  if (q->worker_count < (size_t)workers) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return (PyObject *)self;
}

static PyObject *queue_work_method(PyObject *self, PyObject *args) {
  Queue *q = &((QueueObject *)self)->queue;
  Py_ssize_t number;
  double patience;
  if (!PyArg_ParseTuple(args, "nd:work", &number, &patience)) return NULL;
  if (number < 0 || (size_t)number >= q->worker_count || !(patience >= 0 && patience < 1e6)) {
    PyErr_SetString(PyExc_ValueError, "work: no such worker, or no such time");
    return NULL;
  }
  Event event;
  Py_BEGIN_ALLOW_THREADS;
  event = queue_work(q, q->workers[number], (uint64_t)(patience * 1e9));
  Py_END_ALLOW_THREADS;
  if (!event.job) return Py_BuildValue("(iOi)", event.reason, Py_None, 0);
  /* A job that is done leaves the queue, and its reference with it. */
  return Py_BuildValue(event.reason == WORK_DONE ? "(iNn)" : "(iOn)", event.reason,
                       (PyObject *)JOB_OBJECT(event.job), (Py_ssize_t)event.row);
}

static Job *job_of(PyObject *self, PyObject *given) {
  State *state = PyType_GetModuleState(Py_TYPE(self));
  return check_class(given, state->job, "a Job") ? NULL : &((JobObject *)given)->job;
}

static PyObject *queue_submit_method(PyObject *self, PyObject *given) {
  Job *job = job_of(self, given);
  if (!job) return NULL;
  if (job->left || job->cancelled || job->taken) {
    PyErr_SetString(PyExc_ValueError, "the job was submitted before");
    return NULL;
  }
  Py_INCREF(given);
  queue_submit(&((QueueObject *)self)->queue, job);
  Py_RETURN_NONE;
}

static PyObject *queue_cancel_method(PyObject *self, PyObject *given) {
  Job *job = job_of(self, given);
  if (!job) return NULL;
  queue_cancel(&((QueueObject *)self)->queue, job);
  Py_RETURN_NONE;
}

static PyObject *queue_settle_method(PyObject *self, PyObject *given) {
  Job *job = job_of(self, given);
  if (!job) return NULL;
  queue_settle(&((QueueObject *)self)->queue, job);
  Py_RETURN_NONE;
}

static PyObject *queue_ask_method(PyObject *self, PyObject *args) {
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "|d:ask", &seconds)) return NULL;
  queue_ask(&((QueueObject *)self)->queue, seconds > 0 ? now_ns() + (uint64_t)(seconds * 1e9) : 0);
  Py_RETURN_NONE;
}

static PyObject *queue_close_method(PyObject *self, PyObject *unused) {
  (void)unused;
  queue_close(&((QueueObject *)self)->queue);
  Py_RETURN_NONE;
}

static PyObject *queue_running(PyObject *self, PyObject *unused) {
  (void)unused;
  Queue *q = &((QueueObject *)self)->queue;
  PyObject *running = PyList_New(0);
  if (!running) return NULL;
  for (size_t i = 0; i < q->worker_count; i++) {
    pthread_mutex_lock(&q->lock);
    Worker seen = *q->workers[i];
    pthread_mutex_unlock(&q->lock);
    if (seen.job < 0) continue;
    PyObject *one = Py_BuildValue("(nLnd)", (Py_ssize_t)i, (long long)seen.job, (Py_ssize_t)seen.row,
                                  1e-9 * (double)(now_ns() - seen.since));
    int failed = !one || PyList_Append(running, one);
    Py_XDECREF(one);
    if (failed) {
      Py_DECREF(running);
      return NULL;
    }
  }
  return running;
}

static PyMethodDef queue_methods[] = {
    {"work", queue_work_method, METH_VARARGS,
     "work(worker, patience) -> (reason, job, row): works without the GIL until Python is needed"},
    {"submit", queue_submit_method, METH_O, "submit(job) -> None"},
    {"cancel", queue_cancel_method, METH_O, "cancel(job) -> None: begin no more samples of it"},
    {"settle", queue_settle_method, METH_O, "settle(job) -> None: Python has done a sample of it"},
    {"ask", queue_ask_method, METH_VARARGS, "ask([seconds]) -> None: let a worker take more jobs"},
    {"close", queue_close_method, METH_NOARGS, "close() -> None: let all workers end"},
    {"running", queue_running, METH_NOARGS, "running() -> list of (worker, job, row, seconds)"},
    {0},
};
static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_doc, "Samples for worker threads that stay outside of Python as long as there is work."},
    {0, NULL},
};
static PyType_Spec queue_spec = {"penstock._kernel.Queue", sizeof(QueueObject), 0,
                                 Py_TPFLAGS_DEFAULT, queue_slots};

/* For benchmarks: how often a thread can sleep in a time, without the GIL. */
static PyObject *kernel_count_naps(PyObject *module, PyObject *args) {
  (void)module;
  double nap, seconds;
  if (!PyArg_ParseTuple(args, "dd:count_naps", &nap, &seconds)) return NULL;
  long count = 0;
  Py_BEGIN_ALLOW_THREADS;
  uint64_t end = now_ns() + (uint64_t)(seconds * 1e9);
  for (; now_ns() < end; count++) sleep_for((uint64_t)(nap * 1e9));
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(count);
}

#define NOT_AT_ONCE 5000 /* nanoseconds; taking a free GIL takes less than one microsecond */

/* How often the GIL was held by another thread when this one wanted it, of `count` looks. */
static PyObject *kernel_gil_waits(PyObject *module, PyObject *args) {
  (void)module;
  int count, held = 0;
  double nap;
  if (!PyArg_ParseTuple(args, "id:gil_waits", &count, &nap)) return NULL;
  for (int i = 0; i < count; i++) {
    PyThreadState *thread = PyEval_SaveThread();
    sleep_for((uint64_t)(nap * 1e9));
    uint64_t wanted = now_ns();
    PyEval_RestoreThread(thread);
    held += now_ns() - wanted > NOT_AT_ONCE;
    if (PyErr_CheckSignals()) return NULL;
  }
  return PyLong_FromLong(held);
}

/* For benchmarks. */
static PyObject *kernel_nap(PyObject *module, PyObject *given) {
  (void)module;
  double seconds = PyFloat_AsDouble(given);
  if (PyErr_Occurred()) return NULL;
  nap_ns = seconds > 0 ? (uint64_t)(seconds * 1e9) : 0;
  Py_RETURN_NONE;
}
