/* Reads files, or parts of them, into memory that is used again. Knows nothing of Python. */

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

/* Read a file into memory that may be there already: `data` of `room` bytes, or NULL. */
static void read_file(const char *path, File *file) {
  int fd;
  file->length = 0;
  file->error = 0;
  do fd = open(path, O_RDONLY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    file->error = errno;
    return;
  }
  struct stat about;
  if (fstat(fd, &about)) {
    file->error = errno;
  } else {
    size_t expected = about.st_size > 0 ? (size_t)about.st_size : 0;
    size_t wanted = expected ? expected + 1 : UNKNOWN_SIZE;
    if (file->room < wanted) {
      free(file->data);
      file->data = malloc(wanted);
      file->room = file->data ? wanted : 0;
    }
    if (file->data)
      read_into(fd, expected, file);
    else
      file->error = ENOMEM;
  }
  close(fd);
}

/* Read `size` bytes at `offset` of a file, like read_file. A file that ends before them is an error. */
static void read_range(const char *path, int64_t offset, int64_t size, File *file) {
  int fd;
  file->length = 0;
  file->error = offset < 0 || size < 0 ? EINVAL : 0;
  if (file->error) return;
  size_t wanted = (size_t)size;
  if (file->room < wanted || !file->data) {
    free(file->data);
    file->data = malloc(wanted ? wanted : 1);
    file->room = file->data ? (wanted ? wanted : 1) : 0;
    if (!file->data) {
      file->error = ENOMEM;
      return;
    }
  }
  do fd = open(path, O_RDONLY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    file->error = errno;
    return;
  }
  while (file->length < wanted && !file->error) {
    ssize_t got = pread(fd, file->data + file->length, wanted - file->length, offset + (int64_t)file->length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      file->error = errno;
    else if (!got)
      file->error = EIO; /* the file is shorter than its index says */
    else
      file->length += (size_t)got;
  }
  close(fd);
}
