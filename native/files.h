/* Reads whole files. Releases the GIL once for all of them. */

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Size of the first buffer for files without a known size. */
#define UNKNOWN_SIZE (1 << 16)

typedef struct {
  char *data;
  size_t length, room;
  int error; /* errno, or 0 */
} File;

static void read_into(int fd, size_t expected, File *file) {
  for (;;) {
    if (file->length == file->room) {
      char *more = file->room > SIZE_MAX / 2 ? NULL : realloc(file->data, file->room * 2);
      if (!more) {
        file->error = ENOMEM;
        return;
      }
      file->data = more;
      file->room *= 2;
    }
    ssize_t got = read(fd, file->data + file->length, file->room - file->length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) file->error = errno;
    if (got <= 0) return;
    file->length += (size_t)got;
    /* The read was short of the buffer at the expected size: a regular file is complete. */
    if (file->length == expected && file->length < file->room) return;
  }
}

static File read_whole(const char *path) {
  File file = {NULL, 0, 0, 0};
  int fd;
  do fd = open(path, O_RDONLY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    file.error = errno;
    return file;
  }
  struct stat about;
  if (fstat(fd, &about)) {
    file.error = errno;
  } else {
    size_t expected = about.st_size > 0 ? (size_t)about.st_size : 0;
    file.room = expected ? expected + 1 : UNKNOWN_SIZE;
    file.data = malloc(file.room);
    if (file.data)
      read_into(fd, expected, &file);
    else
      file.error = ENOMEM;
  }
  close(fd);
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
