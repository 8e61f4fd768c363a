"""Shared-memory segments of buckets: files in the shared-memory folder, mapped by the publisher, read by receivers.

A segment is a plain file, so no resource tracker is involved. Its writer holds a file lock for life: a segment whose
lock is free was left by a process that died, and whoever sees it removes it. Readers copy with `preadv`, so that a
segment that shrinks is a short read and never a bus error.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import tempfile
import uuid
from pathlib import Path

from miles_weightsync.errors import TransportError

_NAME = re.compile(r"miles-ws-[0-9a-f]{32}")
_DEV_SHM = Path("/dev/shm")
_READ_NBYTES = 1 << 30


def default_directory() -> Path:
    """/dev/shm where there is one, else the folder of temporary files."""
    return _DEV_SHM if _DEV_SHM.is_dir() else Path(tempfile.gettempdir())


class Segment:
    """A segment of `nbytes` bytes, written through `view`. Removed by `close`, and by others once this process is dead.

    Raises TransportError when the folder has no room.
    """

    def __init__(self, nbytes: int, directory: Path | None = None) -> None:
        self._path = (directory or default_directory()) / f"miles-ws-{uuid.uuid4().hex}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # before the first byte: an empty segment is never swept
            _reserve(self._fd, nbytes, self._path.parent)
            self._map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            self._remove()
            raise
        self.name = self._path.name
        self.nbytes = nbytes
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap and remove."""
        self.view.release()
        self._map.close()
        self._remove()

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _reserve(fd: int, nbytes: int, directory: Path) -> None:
    """Take the memory now: writing to a file without room behind it would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        raise TransportError(
            f"{directory} has no room for a segment of {nbytes} bytes: lower bucket_bytes, set shm_dir, or use tcp"
        ) from None


def read_segment(name: str, nbytes: int, directory: Path | None = None) -> bytearray:
    """A private copy of the first bytes of a segment. Raises TransportError when it cannot be read whole."""
    if not _NAME.fullmatch(name):
        raise TransportError(f"{name!r:.80} is no segment name")
    path = (directory or default_directory()) / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransportError(f"segment {name} cannot be opened: {error.strerror}") from None
    try:
        return _read(fd, name, nbytes)
    finally:
        os.close(fd)


def _read(fd: int, name: str, nbytes: int) -> bytearray:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size < nbytes:
        raise TransportError(f"segment {name} is not a file of this user with {nbytes} bytes")
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        count = os.preadv(fd, [view[done : done + _READ_NBYTES]], done)
        if count == 0:
            raise TransportError(f"segment {name} ends after {done} of {nbytes} bytes")
        done += count
    return data


def sweep_abandoned(directory: Path | None = None) -> list[str]:
    """Remove segments of this user whose writer is dead; returns their names."""
    folder = directory or default_directory()
    return [path.name for path in sorted(folder.glob("miles-ws-*")) if _NAME.fullmatch(path.name) and _sweep(path)]


def _sweep(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone already, or not ours to read
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_size == 0:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:  # the writer lives
        return False
    finally:
        os.close(fd)
