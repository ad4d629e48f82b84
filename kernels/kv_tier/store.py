"""Pages in pinned RAM over pages on disk: what the device has no room for, by key, least recently used out first.

A page leaves RAM for the disk, and the disk for nothing. A page read from disk comes back into RAM. The store says
what it has gained and lost, so that a scheduler in another process knows what it may count on. Not thread-safe: one
worker owns it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.kv_tier.disk import DiskTier


def page_key(block_hash: bytes, salt: str) -> bytes:
    """Return the key of a page: 32 bytes of the hash of its tokens and all before them, and of the weights' version.

    The salt enters although vLLM hashes it into the first block: a page of other weights must not be found even where
    somebody's hashes forget it.
    """
    digest = hashlib.blake2b(len(block_hash).to_bytes(4, "big") + block_hash, digest_size=32, person=b"kv_tier")
    digest.update(salt.encode())
    return digest.digest()


@dataclass
class Counts:
    """What happened so far, in pages."""

    put: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    spilled: int = 0
    dropped: int = 0


@dataclass
class Changes:
    """Keys gained and lost since the last report; a key is in at most one of the sets."""

    added: set[bytes] = field(default_factory=set)
    removed: set[bytes] = field(default_factory=set)

    def add(self, key: bytes) -> None:
        self.removed.discard(key)
        self.added.add(key)

    def remove(self, key: bytes) -> None:
        self.added.discard(key)
        self.removed.add(key)


class PageStore:
    """RAM tier and optional disk tier of pages of one size.

    Example: PageStore(page_bytes=2_359_296, ram_bytes=64 * 2**30) has 29,127 slots of pinned memory.
    """

    def __init__(self, page_bytes: int, ram_bytes: int, disk: DiskTier | None = None, pin_memory: bool = False):
        """Allocate the slots.

        Raises:
            ValueError: no room for one page, or a disk tier of another page size.
        """
        self.num_slots = ram_bytes // page_bytes
        if self.num_slots < 1:
            raise ValueError(f"ram_bytes={ram_bytes}: must hold at least one page of {page_bytes} bytes")
        if disk is not None and disk.page_bytes != page_bytes:
            raise ValueError(f"disk: has pages of {disk.page_bytes} bytes; must be {page_bytes}")
        self.page_bytes, self.disk = page_bytes, disk
        self.counts = Counts()
        self._slots_NW = torch.empty(self.num_slots, page_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._free = list(range(self.num_slots))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._changes = Changes(added=set(disk) if disk is not None else set())

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of or (self.disk is not None and key in self.disk)

    def take_changes(self) -> Changes:
        """Return the keys gained and lost since the last call; the first call lists what the disk brought along."""
        changes, self._changes = self._changes, Changes()
        return changes

    def put(self, keys: Sequence[bytes], pages_NW: torch.Tensor) -> None:
        """Store rows of pages_NW, uint8 [N, page_bytes] on the host, under their keys. A key that is here is kept as is."""
        if pages_NW.dtype != torch.uint8 or tuple(pages_NW.shape) != (len(keys), self.page_bytes):
            got = f"{pages_NW.dtype} {tuple(pages_NW.shape)}"
            raise ValueError(f"pages_NW: {got}; must be uint8 ({len(keys)}, {self.page_bytes})")
        for key, page_W in zip(keys, pages_NW, strict=True):
            if key in self._slot_of:
                self._slot_of.move_to_end(key)
                continue
            self._slots_NW[self._take_slot(key)].copy_(page_W)
            self.counts.put += 1
            self._changes.add(key)

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the page, uint8 [page_bytes], or None. It is the slot itself: read it before the next call."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            self.counts.memory_hits += 1
            return self._slots_NW[self._slot_of[key]]
        if self.disk is None or key not in self.disk:
            self.counts.misses += 1
            return None
        content = self.disk.get(key)
        if content is None:
            self.counts.misses += 1
            self._changes.remove(key)
            return None
        self.counts.disk_hits += 1
        slot = self._take_slot(key)
        self._slots_NW[slot].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return self._slots_NW[slot]

    def clear(self) -> None:
        """Forget every page, on disk too: the weights that they belong to are gone."""
        for key in self._slot_of:
            self._changes.remove(key)
        self._free += self._slot_of.values()
        self._slot_of.clear()
        if self.disk is not None:
            for key in self.disk:
                self._changes.remove(key)
            self.disk.clear()

    def close(self) -> None:
        """Write what is only in RAM to disk, newest last, and give the folder up; a second call does nothing."""
        if self.disk is not None:
            for key, slot in self._slot_of.items():
                self._spill(key, slot)
            self.disk.close()
            self.disk = None

    def _take_slot(self, key: bytes) -> int:
        """Return a free slot, now the key's; the page used longest ago makes room."""
        if not self._free:
            oldest, slot = self._slot_of.popitem(last=False)
            self._spill(oldest, slot, newcomer=key)
            if oldest not in self:
                self._lose(oldest)
            self._free.append(slot)
        slot = self._free.pop()
        self._slot_of[key] = slot
        return slot

    def _spill(self, key: bytes, slot: int, newcomer: bytes = b"") -> None:
        """Write a page to disk, where there is one and it is not there yet; newcomer is on its way into RAM."""
        if self.disk is None:
            return
        is_new = key not in self.disk
        gone = self.disk.put(key, self._slots_NW[slot].numpy().data)
        self.counts.spilled += is_new and key in self.disk
        for lost in gone:
            if lost not in self._slot_of and lost != newcomer:
                self._lose(lost)

    def _lose(self, key: bytes) -> None:
        self.counts.dropped += 1
        self._changes.remove(key)
