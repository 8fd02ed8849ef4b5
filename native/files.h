/* Reads whole files, or their sizes and times. Releases the GIL once for all of them. */

#include <string.h>

#include "read.h"

#define LONGEST_PATH 4096

static File read_whole(const char *path) {
  File file = {NULL, 0, 0, 0};
  read_file(path, &file);
  return file;
}

/* Clear the current exception and return it. */
static PyObject *take_exception(void) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}

/* The content of a file as bytes, or an OSError as a value. */
static PyObject *file_result(File *file, PyObject *name) {
  if (!file->error) return PyBytes_FromStringAndSize(file->data, (Py_ssize_t)file->length);
  if (file->error == ENOMEM) return PyErr_NoMemory();
  errno = file->error;
  PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name);
  return take_exception();
}

/* Takes a tuple of paths; returns a list in the same order. */
static PyObject *kernel_read_files(PyObject *module, PyObject *given) {
  (void)module;
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "read_files takes a tuple of paths");
    return NULL;
  }
  Py_ssize_t count = PyTuple_Size(given), named = 0;
  PyObject *results = NULL;
  struct {
    PyObject *name;
    const char *path;
    File file;
  } *reads = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *reads);
  if (!reads) return PyErr_NoMemory();
  for (; named < count; named++) {
    reads[named].name = NULL;
    if (!PyUnicode_FSConverter(PyTuple_GetItem(given, named), &reads[named].name)) goto free_all;
    reads[named].path = PyBytes_AsString(reads[named].name);
  }
  results = PyList_New(count);
  if (!results) goto free_all;
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < count; i++) reads[i].file = read_whole(reads[i].path);
  Py_END_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *one = results ? file_result(&reads[i].file, PyTuple_GetItem(given, i)) : NULL;
    free(reads[i].file.data);
    if (one)
      PyList_SetItem(results, i, one);
    else
      Py_CLEAR(results); /* no memory */
  }

free_all:
  while (named) Py_DECREF(reads[--named].name);
  PyMem_Free(reads);
  return results;
}

/* Size and modification time of one file; if it has none, -1 and the negative errno. */
static void stat_one(int folder, const char *name, size_t length, int64_t *result) {
  char path[LONGEST_PATH + 1];
  struct stat about;
  int error = 0;
  if (length > LONGEST_PATH) {
    error = ENAMETOOLONG;
  } else if (memchr(name, 0, length)) {
    error = EINVAL;
  } else {
    memcpy(path, name, length);
    path[length] = 0;
    if (fstatat(folder, path, &about, 0)) error = errno;
  }
  result[0] = error ? -1 : (int64_t)about.st_size;
  result[1] = error ? -error
                    : (int64_t)about.st_mtim.tv_sec * 1000000000 + (int64_t)about.st_mtim.tv_nsec;
}

/* Takes a folder (empty if the names are paths), names as their text and the ends of each, the
   first name, and the array to fill: two int64 for each name from the first on. */
static PyObject *kernel_stat_files(PyObject *module, PyObject *args) {
  (void)module;
  const char *folder;
  Py_buffer text, ends, out;
  Py_ssize_t first;
  if (!PyArg_ParseTuple(args, "yy*y*nw*:stat_files", &folder, &text, &ends, &first, &out))
    return NULL;
  const int64_t *end = ends.buf;
  Py_ssize_t names = ends.len / (Py_ssize_t)sizeof *end;
  Py_ssize_t count = out.len / (Py_ssize_t)(2 * sizeof(int64_t));
  int fits = first >= 0 && first <= names && count <= names - first;
  for (Py_ssize_t i = first; fits && i < first + count; i++) {
    int64_t start = i ? end[i - 1] : 0;
    fits = start >= 0 && start <= end[i] && end[i] <= text.len;
  }
  if (fits) {
    Py_BEGIN_ALLOW_THREADS;
    int64_t *result = out.buf;
    int opened = *folder ? open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC) : AT_FDCWD;
    int error = *folder && opened < 0 ? errno : 0;
    for (Py_ssize_t i = first; i < first + count; i++, result += 2) {
      int64_t start = i ? end[i - 1] : 0;
      if (error) {
        result[0] = -1;
        result[1] = -error;
      } else {
        stat_one(opened, (const char *)text.buf + start, (size_t)(end[i] - start), result);
      }
    }
    if (*folder && opened >= 0) close(opened);
    Py_END_ALLOW_THREADS;
  }
  PyBuffer_Release(&text);
  PyBuffer_Release(&ends);
  PyBuffer_Release(&out);
  if (fits) Py_RETURN_NONE;
  PyErr_SetString(PyExc_ValueError, "stat_files: the names do not fit the arrays");
  return NULL;
}
