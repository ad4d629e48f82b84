"""Who holds which page of the KV cache, and which pages hold a known prefix. Host only; knows no array.

take ---> held (references >= 1) --- last release ---> idle if it holds a known prefix, else free
  ^                ^                                     |         |
  |                +------- hold (prefix found) ---------+         |
  +------------- evicted, least recently used first ---------------+
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np


class PagePool:
    """Pages 1..num_pages-1; page 0 is scratch: whatever is written there is never read."""

    def __init__(self, num_pages: int):
        self.num_usable = num_pages - 1
        self._free = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        self._idle: dict[int, None] = {}  # in order of their last release

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages in use."""
        return self.num_usable - self.num_available

    def take(self, count: int) -> list[int]:
        """Return `count` pages, each with one reference; idle prefixes are forgotten when no page is free."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        while len(self._free) < count:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
            self._free.append(page)
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page."""
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released more often than held"
            if self._references[page]:
                continue
            if page in self._keys_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def remember(self, key: bytes, page: int) -> None:
        """Let `find` give this held page for `key`; the first page of a key stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._keys_of.setdefault(page, []).append(key)

    def find(self, key: bytes) -> int | None:
        """Return the page of a prefix, or None."""
        return self._page_of.get(key)

    def find_all(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the leading keys that are known."""
        found = itertools.takewhile(lambda page: page is not None, map(self.find, keys))
        return [page for page in found if page is not None]

    def forget_all(self) -> None:
        """Forget every prefix; held pages stay held."""
        for page in list(self._keys_of):
            self._forget(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        for key in self._keys_of.pop(page, ()):
            del self._page_of[key]


def prefix_keys(weights: int, tokens_T: np.ndarray, page_size: int) -> list[bytes]:
    """Return a key for each page of a prefix, the last one possibly partial.

    A key is the digest of `weights`, which names the weights that compute it, and of all tokens up to the end of its page: KV of other weights, or after
    another beginning, never has the same key.
    """
    keys, key = [], weights.to_bytes(8, "little")
    tokens_T = np.ascontiguousarray(tokens_T, dtype=np.int32)
    for start in range(0, len(tokens_T), page_size):
        key = hashlib.blake2b(key + tokens_T[start : start + page_size].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys
