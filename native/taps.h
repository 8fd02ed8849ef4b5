/* The taps of resizes for devices: the same filter as here, in arrays for a whole tiny-batch. */

#define MOST_SIDE 65535
#define MOST_TAPS ((size_t)1 << 28)

/* One axis of one picture, as Python gives it. */
typedef struct {
  int64_t start, length, full, offset, count, flip;
} GivenAxis;

static int axis_fits(const GivenAxis *g) {
  return g->start >= 0 && g->start <= MOST_SIDE && g->length >= 1 && g->length <= MOST_SIDE &&
         g->full >= 1 && g->full <= MOST_SIDE && g->count >= 1 && g->offset >= 0 &&
         g->offset <= g->full && g->count <= g->full - g->offset;
}

/* Writes row `row` of the arrays. Positions beyond the last one of a picture repeat it. */
static void write_taps(Axis *axis, int flip, size_t row, size_t columns, size_t taps, int32_t *first,
                       int32_t *weights, int64_t *about, double *scratch) {
  weigh(axis, 1, flip, scratch);
  first += row * columns;
  weights += row * columns * taps;
  for (size_t j = 0; j < columns; j++) {
    size_t at = j < (size_t)axis->count ? j : (size_t)axis->count - 1;
    first[j] = axis->first[at] + axis->from;
    for (size_t k = 0; k < taps; k++)
      weights[j * taps + k] = k < (size_t)axis->taps ? axis->weights[at * axis->taps + k] : 0;
  }
  about[3 * row] = axis->taps;
  about[3 * row + 1] = axis->from;
  about[3 * row + 2] = axis->upto;
}

static PyObject *kernel_taps(PyObject *module, PyObject *given) {
  (void)module;
  Py_buffer data;
  if (PyObject_GetBuffer(given, &data, PyBUF_C_CONTIGUOUS)) return NULL;
  const GivenAxis *axes = data.buf;
  size_t count = (size_t)data.len / sizeof *axes, columns = 1, taps = 1;
  PyObject *result = NULL, *first = NULL, *weights = NULL, *about = NULL;
  void *memory = NULL;
  int wrong = (size_t)data.len % sizeof *axes != 0;
  for (size_t i = 0; i < count && !wrong; i++) {
    if ((wrong = !axis_fits(axes + i))) break;
    Axis axis = axis_of((int)axes[i].start, (int)axes[i].length, (int)axes[i].full,
                        (int)axes[i].offset, (int)axes[i].count);
    size_t own = (size_t)taps_of(&axis, axis.upto - axis.from, 1);
    if (own > taps) taps = own;
    if ((size_t)axis.count > columns) columns = (size_t)axis.count;
  }
  if (wrong) {
    PyErr_SetString(PyExc_ValueError,
                    "taps takes rows of six 64-bit integers: start, length, full, offset, count, flip");
    goto release;
  }
  if (count * columns > MOST_TAPS / taps) {
    PyErr_NoMemory();
    goto release;
  }
  first = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * columns * sizeof(int32_t)));
  weights = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * columns * taps * sizeof(int32_t)));
  about = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * 3 * sizeof(int64_t)));
  size_t scratch = taps * sizeof(double), firsts = columns * sizeof(int);
  memory = PyMem_Malloc(scratch + firsts + columns * taps * sizeof(uint16_t));
  if (!first || !weights || !about || !memory) {
    if (!PyErr_Occurred()) PyErr_NoMemory();
    goto release;
  }
  int32_t *to_first = (int32_t *)PyByteArray_AsString(first);
  int32_t *to_weights = (int32_t *)PyByteArray_AsString(weights);
  int64_t *to_about = (int64_t *)PyByteArray_AsString(about);
  Py_BEGIN_ALLOW_THREADS;
  for (size_t i = 0; i < count; i++) {
    Axis axis = axis_of((int)axes[i].start, (int)axes[i].length, (int)axes[i].full,
                        (int)axes[i].offset, (int)axes[i].count);
    axis.taps = taps_of(&axis, axis.upto - axis.from, 1);
    axis.first = (int *)((char *)memory + scratch);
    axis.weights = (uint16_t *)((char *)memory + scratch + firsts);
    write_taps(&axis, axes[i].flip != 0, i, columns, taps, to_first, to_weights, to_about, memory);
  }
  Py_END_ALLOW_THREADS;
  result = Py_BuildValue("nnOOO", (Py_ssize_t)columns, (Py_ssize_t)taps, first, weights, about);

release:
  PyMem_Free(memory);
  Py_XDECREF(first);
  Py_XDECREF(weights);
  Py_XDECREF(about);
  PyBuffer_Release(&data);
  return result;
}
