/* Whole files, with the interpreter's lock given up once. */

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a file that does not know its size is read into at first. */
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
    /* There was room for more, and no more came: that is all of a regular file. */
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

static PyObject *kernel_read_file(PyObject *module, PyObject *given) {
  (void)module;
  PyObject *name = NULL;
  if (!PyUnicode_FSConverter(given, &name)) return NULL;
  const char *path = PyBytes_AsString(name);
  File file;
  Py_BEGIN_ALLOW_THREADS
  file = read_whole(path);
  Py_END_ALLOW_THREADS
  PyObject *made = NULL;
  if (file.error == ENOMEM) {
    PyErr_NoMemory();
  } else if (file.error) {
    errno = file.error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, given);
  } else {
    made = PyBytes_FromStringAndSize(file.data, (Py_ssize_t)file.length);
  }
  free(file.data);
  Py_DECREF(name);
  return made;
}
