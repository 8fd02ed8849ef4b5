/* The Python function `coefficients`: packed coefficients of boxes of several JPEGs in one buffer. */

typedef struct {
  Py_buffer data;
  Box box;
  Target to;
  Packed packed;
  int kind;
  char why[JMSG_LENGTH_MAX];
} PackRequest;

static int parse_pack_request(PackRequest *r, PyObject *given) {
  PyObject *data;
  Target *to = &r->to;
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "coefficients takes a tuple of tuples");
    return -1;
  }
  if (!PyArg_ParseTuple(given, "Oiiiiiiiiii", &data, &r->box.top, &r->box.left, &r->box.height,
                        &r->box.width, &to->full_height, &to->full_width, &to->top, &to->left,
                        &to->height, &to->width))
    return -1;
  if (to->height < 1 || to->width < 1) {
    PyErr_SetString(PyExc_ValueError, "a part has at least one row and one column");
    return -1;
  }
  return PyObject_GetBuffer(data, &r->data, PyBUF_SIMPLE);
}

/* Runs without the GIL. */
static void run_pack_request(PackRequest *r, JpegIndex *index, IndexEntry **copies) {
  FileEntries file;
  const uint8_t *data = r->data.buf;
  size_t length = (size_t)r->data.len;
  find_entries(&file, index, data, length, copies);
  r->kind = pack_region(data, length, r->box, r->to, file.used ? &file.entries : NULL, &r->packed,
                        r->why);
  keep_entries(&file, index);
}

static PyObject *kernel_coefficients(PyObject *module, PyObject *arguments) {
  PyObject *given, *given_index, *errors = NULL, *buffer = NULL, *result = NULL;
  if (!PyArg_ParseTuple(arguments, "OO:coefficients", &given, &given_index)) return NULL;
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "coefficients takes a tuple of tuples");
    return NULL;
  }
  State *state = PyModule_GetState(module);
  JpegIndex *index = NULL;
  if (given_index != Py_None) {
    if (check_class(given_index, state->index, "an Index, or None,")) return NULL;
    index = &((IndexObject *)given_index)->index;
  }
  Py_ssize_t count = PyTuple_Size(given), asked = 0;
  size_t some = (size_t)(count ? count : 1), packed = 0, size;
  PackRequest *requests = PyMem_Calloc(some, sizeof *requests);
  Packed **pictures = PyMem_Malloc(some * sizeof *pictures);
  if (!requests || !pictures) {
    PyErr_NoMemory();
    goto release_all;
  }
  for (; asked < count; asked++)
    if (parse_pack_request(requests + asked, PyTuple_GetItem(given, asked))) goto release_all;
  Py_BEGIN_ALLOW_THREADS;
  IndexEntry *copies = NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    run_pack_request(requests + i, index, &copies);
    if (!requests[i].kind) pictures[packed++] = &requests[i].packed;
  }
  free(copies);
  size = place_pictures(pictures, packed);
  Py_END_ALLOW_THREADS;
  buffer = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)size);
  errors = PyList_New(count);
  if (!buffer || !errors) goto release_all;
  uint8_t *to = (uint8_t *)PyByteArray_AsString(buffer);
  Py_BEGIN_ALLOW_THREADS;
  write_pictures(pictures, packed, to);
  Py_END_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *error = Py_None;
    if (requests[i].kind) {
      fail(module, requests[i].kind, requests[i].why);
      error = take_exception();
    } else {
      Py_INCREF(error);
    }
    PyList_SetItem(errors, i, error);
  }
  result = PyTuple_Pack(2, buffer, errors);

release_all:
  Py_XDECREF(buffer);
  Py_XDECREF(errors);
  for (Py_ssize_t i = 0; i < asked; i++) {
    PyBuffer_Release(&requests[i].data);
    free_packed(&requests[i].packed);
  }
  PyMem_Free(pictures);
  PyMem_Free(requests);
  return result;
}
