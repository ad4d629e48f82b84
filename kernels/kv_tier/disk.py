"""Pages on disk: bounded, least recently used first out, and whole or absent after any crash.

A page is one file, named by its key: a header and the bytes. It is written beside its place and renamed, so after the
death of the process a name that exists was written in full; the checksum in the header finds what a loss of power or
the disk did to it. There is no fsync: a page that does not check costs its computation, a flush would cost every step.
A file that does not check is removed and counted, and reads as absent; a page that cannot be written is counted and
forgotten; files that are no pages are left alone. Nothing that the disk does stops the owner. One process owns a folder (a lock is held while it lives), else the bound would mean nothing. Order of use
survives a restart as the files' modification times.
"""

import fcntl
import hashlib
import logging
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

MAGIC = b"kvpage01"
HEADER = struct.Struct("<8sQ32s16s")
"""magic, number of bytes, the key's first 32 bytes, checksum of key and bytes."""
SUFFIX, PARTIAL = ".page", ".partial"
NAME = re.compile(r"([0-9a-f]{2})+")


def checksum(key: bytes, page: memoryview) -> bytes:
    """Return 16 bytes that depend on every byte of key and page."""
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(page)
    return digest.digest()


class DiskTier:
    """Pages of one size in one folder.

    Example: DiskTier(Path("/scratch/kv"), page_bytes=2_359_296, capacity_bytes=2**40) keeps at most 466,000 pages of
    36 layers.
    """

    def __init__(self, folder: Path, page_bytes: int, capacity_bytes: int):
        """Own the folder; keep what it holds whole, remove what a crash left half done.

        Raises:
            ValueError: capacity below one page, or a folder that another process owns.
        """
        if capacity_bytes < page_bytes + HEADER.size:
            raise ValueError(f"capacity_bytes={capacity_bytes}: must hold one page of {page_bytes + HEADER.size} bytes")
        self.folder, self.page_bytes = folder, page_bytes
        self.max_pages = capacity_bytes // (page_bytes + HEADER.size)
        self.num_corrupt = self.num_failed_writes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ValueError(
                f"folder {folder} is owned by another process; give each worker a folder of its own"
            ) from error
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # oldest use first
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    def _scan(self) -> None:
        """Take over the files that are here, oldest first, and trim to the bound."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix not in (SUFFIX, PARTIAL):
                continue
            if not NAME.fullmatch(path.stem) or not path.is_file() or path.is_symlink():
                logger.warning("%s is not a KV page; left alone", path)
            elif path.suffix == PARTIAL:
                self._remove(path)
            else:
                found.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(found):
            if path.stat().st_size != self.page_bytes + HEADER.size:
                self._discard(path, f"has {path.stat().st_size} bytes, expected {self.page_bytes + HEADER.size}")
            else:
                self._keys[bytes.fromhex(path.stem)] = None
        while len(self._keys) > self.max_pages:
            self._evict_oldest()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        """Walk over all keys, oldest use first."""
        return iter(tuple(self._keys))

    def put(self, key: bytes, page: memoryview) -> list[bytes]:
        """Write a page; return the keys that had to go for it. A key that is here already is only marked as used.

        A disk that refuses the write is counted in num_failed_writes and logged; the key is then absent.
        """
        if page.nbytes != self.page_bytes:
            raise ValueError(f"page of {page.nbytes} bytes; must be {self.page_bytes}")
        if self._lock < 0:
            raise ValueError(f"folder {self.folder} was given up by close(); make another DiskTier")
        if key in self._keys and self._touch(key):
            return []
        gone = []
        while len(self._keys) >= self.max_pages:
            gone.append(self._evict_oldest())
        path = self._path(key)
        partial = path.with_suffix(PARTIAL)
        try:
            with partial.open("wb") as file:
                file.write(HEADER.pack(MAGIC, self.page_bytes, key[:32].ljust(32, b"\0"), checksum(key, page)))
                file.write(page)
            partial.rename(path)
        except OSError as error:
            logger.warning("KV page %s cannot be written (%s); it is dropped", path, error)
            self.num_failed_writes += 1
            self._remove(partial)
            return gone
        self._keys[key] = None
        return gone

    def get(self, key: bytes) -> bytes | None:
        """Return the page, or None where it is absent or does not check (then it is gone)."""
        if key not in self._keys:
            return None
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError as error:
            self._lose(key, f"cannot be read: {error}")
            return None
        expected = HEADER.size + self.page_bytes
        if len(content) != expected:
            self._lose(key, f"has {len(content)} bytes, expected {expected}")
            return None
        magic, length, name, found = HEADER.unpack_from(content)
        page = memoryview(content)[HEADER.size :]
        if (magic, length, name) != (MAGIC, self.page_bytes, key[:32].ljust(32, b"\0")) or found != checksum(key, page):
            self._lose(key, "does not match its checksum")
            return None
        self._touch(key)
        return content[HEADER.size :]

    def clear(self) -> None:
        """Remove every page."""
        while self._keys:
            self._evict_oldest()

    def close(self) -> None:
        """Give the folder up; its pages stay for the next owner."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _touch(self, key: bytes) -> bool:
        """Mark a key as used last, here and for the next owner; False, and the key forgotten, where its file is gone."""
        try:
            os.utime(self._path(key))
        except FileNotFoundError:
            self._lose(key, "is gone")
            return False
        except OSError as error:  # the page may still be read; only its age is not kept for the next owner
            logger.warning("KV page %s: its time cannot be set (%s)", self._path(key), error)
        self._keys.move_to_end(key)
        return True

    def _evict_oldest(self) -> bytes:
        key, _ = self._keys.popitem(last=False)
        self._remove(self._path(key))
        return key

    def _lose(self, key: bytes, why: str) -> None:
        del self._keys[key]
        self._discard(self._path(key), why)

    def _discard(self, path: Path, why: str) -> None:
        """Remove a file that is no page, say so and count it."""
        logger.warning("KV page %s %s; removed, it will be computed again", path, why)
        self.num_corrupt += 1
        self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a file; one that stays, on a disk that refuses, is logged and no longer counted towards the bound."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed (%s)", path, error)
