"""Opens files that may be of any kind: a pipe, a device or an endless file stops no process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Configurations, keys, certificates and templates are kilobytes; a tokenizer has up to 40 MB.
MOST_BYTES = 256 * 2**20
# A file of a model is read whole if its name ends in one of these suffixes.
_READ_WHOLE = {".json", ".jinja", ".txt", ".model", ".py", ".yaml"}


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises OSError, whose `strerror` says what is wrong with the file.
    """
    # Opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(os.fstat(descriptor), path, most_bytes)
        # The file may grow meanwhile, and files of /proc have no size.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def check_file(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Check a file that a library opens; raise OSError as `read_file` does."""
    _check(path.stat(), path, most_bytes)


def check_folder(folder: Path) -> None:
    """Check the files of a model's folder before a library opens them.

    Weights may have any size. Raises OSError, whose `filename` is the file.
    """
    for path in folder.iterdir():
        # A link to a missing file counts as a missing file.
        if not path.exists() or path.is_dir():
            continue
        _check(path.stat(), path, MOST_BYTES if path.suffix in _READ_WHOLE else 0)


def _check(status: os.stat_result, path: Path, most_bytes: int) -> None:
    """Raise OSError unless the file is regular and has at most `most_bytes` bytes (0: any size)."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if most_bytes and status.st_size > most_bytes:
        raise _too_large(path, most_bytes)


def _too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
