/* Programs for sounds as a Python type, and functions that work on one sound. */

static int is_sound(const Py_buffer *sound) {
  int fits = (sound->ndim == 2 || sound->ndim == 3) && sound->format && !strcmp(sound->format, "f");
  for (int i = 0; fits && i < sound->ndim; i++) fits = sound->shape[i] > 0 && sound->shape[i] <= INT_MAX;
  if (!fits)
    PyErr_SetString(PyExc_ValueError,
                    "a sound must be float32 (channels, frames) or (channels, mels, steps)");
  return fits;
}

/* A copy of the bytes of an object, which must be `size` of them; NULL with an exception set. */
static void *copy_table(PyObject *given, size_t size) {
  Py_buffer view;
  void *copy = NULL;
  if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE)) return NULL;
  if ((size_t)view.len != size)
    PyErr_Format(PyExc_ValueError, "a table of a sound step has %zd bytes, not %zu", view.len, size);
  else if (!(copy = malloc(size ? size : 1)))
    PyErr_NoMemory();
  else
    memcpy(copy, view.buf, size);
  PyBuffer_Release(&view);
  return copy;
}

#define LONGEST_TRANSFORM (1 << 16)

static int read_mel(PyObject *numbers, PyObject *tables, Mel *mel) {
  Transform *transform = &mel->transform;
  PyObject *window, *first, *filter, *weights;
  if (!PyArg_ParseTuple(numbers, "iiippifffp", &mel->n_fft, &mel->hop, &mel->mels, &mel->center,
                        &mel->magnitude, &mel->log, &mel->floor, &mel->to_decibels, &mel->top,
                        &mel->has_top) ||
      !PyArg_ParseTuple(tables, "OOOO", &window, &first, &filter, &weights))
    return -1;
  transform->length = mel->n_fft;
  transform->factors = mel->n_fft > LONGEST_TRANSFORM ? 0 : factors_of(mel->n_fft, transform->factor);
  if (!transform->factors || mel->hop < 1 || mel->mels < 1 || mel->mels > LONGEST_TRANSFORM ||
      mel->log < NO_LOG || mel->log > DECIBELS) {
    PyErr_SetString(PyExc_ValueError,
                    "n_fft must have no prime factors but 2, 3 and 5, and hop and mels be above 0");
    return -1;
  }
  size_t mels = (size_t)mel->mels;
  if (make_twiddles(transform)) {
    PyErr_NoMemory();
    return -1;
  }
  if (!(mel->window = copy_table(window, (size_t)mel->n_fft * sizeof(float))) ||
      !(mel->first = copy_table(first, mels * sizeof(int))) ||
      !(mel->filter = copy_table(filter, (mels + 1) * sizeof(int))))
    return -1;
  for (size_t m = 0; m < mels; m++)
    if (mel->filter[0] || mel->first[m] < 0 || mel->filter[m + 1] < mel->filter[m] ||
        (int64_t)mel->first[m] + mel->filter[m + 1] - mel->filter[m] > mel->n_fft / 2 + 1) {
      PyErr_SetString(PyExc_ValueError, "a mel filter reaches beyond the frequencies");
      return -1;
    }
  mel->weights = copy_table(weights, (size_t)mel->filter[mels] * sizeof(float));
  return mel->weights ? 0 : -1;
}

static int read_numbers(PyObject *numbers, PyObject *tables, SoundStep *step) {
  int fits = 1;
  switch (step->kind) {
    case DECODE:
      if (!PyArg_ParseTuple(numbers, "pi", &step->mono, &step->rate)) return -1;
      break;
    case RESAMPLE_TO:
      if (!PyArg_ParseTuple(numbers, "ii", &step->from_rate, &step->to_rate)) return -1;
      fits = step->from_rate > 0 && step->to_rate > 0;
      break;
    case RANDOM_PLACE:
    case FIXED_PLACE:
    case PAD_ONLY:
      if (!PyArg_ParseTuple(numbers, "iipi", &step->frames, &step->padding, &step->repeats,
                            &step->place))
        return -1;
      fits = step->frames > 0 && step->padding >= 0 && step->place >= AT_START &&
             step->place <= (step->kind == RANDOM_PLACE ? ANYWHERE : AT_END);
      break;
    case MIX:
      if (!PyArg_ParseTuple(numbers, "")) return -1;
      break;
    case GAIN:
      if (!PyArg_ParseTuple(numbers, "dd", &step->low, &step->high)) return -1;
      break;
    case NORMALIZE:
      if (!PyArg_ParseTuple(numbers, "pff", &step->own, &step->minus, &step->times)) return -1;
      break;
    case MEL: return read_mel(numbers, tables, &step->mel);
    case MASK:
      if (!PyArg_ParseTuple(numbers, "iiiidpf", &step->time_masks, &step->longest, &step->freq_masks,
                            &step->tallest, &step->share, &step->fill_mean, &step->fill))
        return -1;
      fits = step->longest >= 0 && step->tallest >= 0 && step->share >= 0 && step->share <= 1;
      break;
    default: fits = 0;
  }
  if (!fits) PyErr_Format(PyExc_ValueError, "a sound step of kind %d has a number out of range", step->kind);
  return fits ? 0 : -1;
}

static void sound_program_dealloc(PyObject *self) {
  SoundProgram *program = &((SoundProgramObject *)self)->program;
  for (int i = 0; i < MOST_STEPS; i++) free_mel(&program->step[i].mel);
  free_object(self);
}

static PyObject *sound_program_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"steps", NULL};
  PyObject *steps;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:SoundProgram", names, &steps)) return NULL;
  Py_ssize_t count = PyTuple_Check(steps) ? PyTuple_Size(steps) : -1;
  if (count < 0 || count > MOST_STEPS) {
    PyErr_Format(PyExc_ValueError, "steps must be a tuple of up to %d tuples", MOST_STEPS);
    return NULL;
  }
  SoundProgramObject *self = (SoundProgramObject *)new_object(type);
  if (!self) return NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    SoundStep *step = self->program.step + i;
    PyObject *key, *numbers, *tables;
    if (!PyArg_ParseTuple(PyTuple_GetItem(steps, i), "iOOO", &step->kind, &key, &numbers, &tables) ||
        read_key(key, &step->key) || read_numbers(numbers, tables, step)) {
      Py_DECREF(self);
      return NULL;
    }
  }
  self->program.count = (int)count;
  return (PyObject *)self;
}

/* Run the program on one sound, without the GIL. `out` must have the shape of the result. */
static PyObject *sound_program_run(PyObject *self, PyObject *args) {
  const SoundProgram *program = &((SoundProgramObject *)self)->program;
  PyObject *given, *given_out, *result = NULL;
  unsigned long long index, epoch, replica;
  if (!PyArg_ParseTuple(args, "OOKKK:run", &given, &given_out, &index, &epoch, &replica)) return NULL;
  int whole = PyBytes_Check(given);
  Py_buffer in, out;
  if (PyObject_GetBuffer(given, &in, whole ? PyBUF_SIMPLE : PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
    return NULL;
  if (PyObject_GetBuffer(given_out, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    goto release_in;
  if ((!whole && !is_sound(&in)) || !is_sound(&out)) goto release_out;
  Input input = {in.buf, (size_t)in.len, {0}};
  int shape[3] = {0}, kind;
  for (int i = 0; i < out.ndim; i++) shape[i] = (int)out.shape[i];
  for (int i = 0; !whole && i < in.ndim; i++) input.shape[i] = (int)in.shape[i];
  Py_BEGIN_ALLOW_THREADS;
  Memory memory = {0};
  uint64_t spent[MOST_STEPS] = {0};
  kind = run_sound_program(program, (SampleKey){index, epoch, replica}, input, shape, out.buf, &memory,
                           spent);
  free_memory(&memory);
  Py_END_ALLOW_THREADS;
  result = PyBool_FromLong(!kind);

release_out:
  PyBuffer_Release(&out);
release_in:
  PyBuffer_Release(&in);
  return result;
}

static PyMethodDef sound_program_methods[] = {
    {"run", sound_program_run, METH_VARARGS,
     "run(sound or bytes, out, index, epoch, replica) -> False if it is left to Python"},
    {0},
};
static PyType_Slot sound_program_slots[] = {
    {Py_tp_new, sound_program_new},
    {Py_tp_dealloc, sound_program_dealloc},
    {Py_tp_methods, sound_program_methods},
    {Py_tp_doc, "Audio operations that run one after the other."},
    {0, NULL},
};
static PyType_Spec sound_program_spec = {"penstock._kernel.SoundProgram", sizeof(SoundProgramObject), 0,
                                         Py_TPFLAGS_DEFAULT, sound_program_slots};

/* ------------------------------------------------------------------------------------ resampling */

/* A filter, whose weights are float32 (phases, taps) in `view`. */
static int read_resampling(const Py_buffer *view, Resampling *by) {
  if (view->ndim != 2 || !view->format || strcmp(view->format, "f") || view->shape[0] < 1 ||
      view->shape[1] < 1 || view->len > INT_MAX || by->step < 1 || by->before < 0 || by->from_rate < 1 ||
      by->to_rate < 1) {
    PyErr_SetString(PyExc_ValueError, "weights must be float32 (phases, taps), and rates be above 0");
    return -1;
  }
  by->phases = (int)view->shape[0];
  by->taps = (int)view->shape[1];
  by->weights = view->buf;
  return 0;
}

static PyObject *kernel_resample(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *given, *given_weights, *given_out, *result = NULL;
  Resampling by = {0};
  if (!PyArg_ParseTuple(args, "OiiiiOO:resample", &given, &by.from_rate, &by.to_rate, &by.step,
                        &by.before, &given_weights, &given_out))
    return NULL;
  Py_buffer in, weights, out;
  if (PyObject_GetBuffer(given, &in, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return NULL;
  if (PyObject_GetBuffer(given_weights, &weights, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) goto release_in;
  if (PyObject_GetBuffer(given_out, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT))
    goto release_weights;
  if (read_resampling(&weights, &by) || !is_sound(&in) || !is_sound(&out)) goto release_out;
  if (in.ndim != 2 || out.ndim != 2 || in.shape[0] != out.shape[0] ||
      out.shape[1] != resampled_frames(in.shape[1], by.from_rate, by.to_rate)) {
    PyErr_SetString(PyExc_ValueError, "out must have the channels of the sound, and its frames at to_rate");
    goto release_out;
  }
  int kind;
  Py_BEGIN_ALLOW_THREADS;
  FloatBuffer planes = {0};
  kind = resample_channels(&by, in.buf, (int)in.shape[0], in.shape[1], out.shape[1], &planes, out.buf);
  free(planes.at);
  Py_END_ALLOW_THREADS;
  if (kind)
    PyErr_NoMemory();
  else
    Py_INCREF(result = Py_None);

release_out:
  PyBuffer_Release(&out);
release_weights:
  PyBuffer_Release(&weights);
release_in:
  PyBuffer_Release(&in);
  return result;
}

static PyObject *kernel_add_resampling(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *given;
  Resampling by = {0};
  if (!PyArg_ParseTuple(args, "iiiiO:add_resampling", &by.from_rate, &by.to_rate, &by.step, &by.before,
                        &given))
    return NULL;
  Py_buffer view;
  if (PyObject_GetBuffer(given, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return NULL;
  int failed = read_resampling(&view, &by);
  if (!failed) {
    by.weights = copy_table(given, (size_t)view.len);
    failed = !by.weights;
    if (!failed && !add_resampling(by)) free(by.weights);
  }
  PyBuffer_Release(&view);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyObject *kernel_use_libsndfile(PyObject *module, PyObject *args) {
  (void)module;
  unsigned long long open, read, close;
  if (!PyArg_ParseTuple(args, "KKK:use_libsndfile", &open, &read, &close)) return NULL;
  libsndfile.read = (int64_t(*)(void *, float *, int64_t))(uintptr_t)read;
  libsndfile.close = (int (*)(void *))(uintptr_t)close;
  libsndfile.open = (void *(*)(SndCallbacks *, int, SndInfo *, void *))(uintptr_t)open;
  Py_RETURN_NONE;
}
