"""Which pages a step loads and which it stores: the scheduler's side of the tier, without vLLM.

Only full blocks are kept. A request whose tokens begin with known blocks loads the longest run of them, but never its
last token, which must be computed for its logits. A block is stored in the step that fills it. Requests that were under
way when the cache was reset (new weights) store nothing any more: their pages mix two versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernels.kv_tier.store import Changes, page_key


@dataclass(frozen=True)
class Move:
    """Pages of one request: keys[i] belongs to block blocks[i] of the device's cache."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass
class Plan:
    """What a worker does in one step: load before the forward pass, store after it.

    A plan of a later epoch than the last one says: clear everything first, the weights changed.
    """

    epoch: int
    loads: list[Move] = field(default_factory=list)
    stores: list[Move] = field(default_factory=list)


@dataclass
class Tracked:
    """A request under way."""

    salt: str
    epoch: int
    keys: list[bytes] = field(default_factory=list)
    num_stored: int = 0
    """Leading blocks that are stored, or need not be."""


class Schedule:
    """Keys that every worker has, and requests under way."""

    def __init__(self, block_size: int, num_workers: int):
        self.block_size = block_size
        self._keys_of: list[set[bytes]] = [set() for _ in range(num_workers)]
        self._pending: set[bytes] = set()  # stores under way: not to be asked for twice
        self._tracked: dict[str, Tracked] = {}
        # request -> first block, number of blocks: what match() found, and what the scheduler took of it
        self._offers: dict[str, tuple[int, int]] = {}
        self._loads: dict[str, tuple[int, int]] = {}
        self._epoch = 0

    def is_known(self, key: bytes) -> bool:
        """Return whether every worker has the page."""
        return all(key in keys for keys in self._keys_of)

    def track(self, request_id: str, salt: str, block_hashes: Sequence[bytes]) -> Tracked:
        """Return the request's state, with the keys of all blocks whose hash is known by now."""
        tracked = self._tracked.setdefault(request_id, Tracked(salt, self._epoch))
        for block_hash in block_hashes[len(tracked.keys) :]:
            tracked.keys.append(page_key(block_hash, salt))
        return tracked

    def match(self, request_id: str, num_tokens: int, num_computed: int) -> int:
        """Return how many tokens beyond num_computed the tier can supply: whole blocks, never the last token."""
        keys = self._tracked[request_id].keys
        first, limit = num_computed // self.block_size, max(0, num_tokens - 1) // self.block_size
        count = 0
        while first + count < min(limit, len(keys)) and self.is_known(keys[first + count]):
            count += 1
        self._offers[request_id] = (first, count)
        return count * self.block_size

    def accept(self, request_id: str, num_external: int) -> None:
        """Note how many of the tokens that match() found the scheduler takes: they are loaded in this step."""
        first, _ = self._offers.pop(request_id, (0, 0))
        if num_external:
            self._loads[request_id] = (first, num_external // self.block_size)

    def plan(self, scheduled: dict[str, tuple[Sequence[int], int]]) -> Plan:
        """Return the work of this step.

        Args:
            scheduled: request -> (its blocks so far, tokens whose keys and values exist after this step).
        """
        plan = Plan(self._epoch)
        for request_id, (first, count) in self._loads.items():
            tracked, (blocks, _) = self._tracked[request_id], scheduled[request_id]
            span = slice(first, first + count)
            plan.loads.append(Move(tuple(tracked.keys[span]), tuple(blocks[span])))
            tracked.num_stored = max(tracked.num_stored, first + count)
        self._loads.clear()
        for request_id, (blocks, num_tokens) in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.epoch != self._epoch:
                continue
            full = min(num_tokens // self.block_size, len(tracked.keys))
            wanted = [at for at in range(tracked.num_stored, full) if self._is_wanted(tracked.keys[at])]
            tracked.num_stored = max(tracked.num_stored, full)
            if wanted:
                keys = tuple(tracked.keys[at] for at in wanted)
                self._pending.update(keys)
                plan.stores.append(Move(keys, tuple(blocks[at] for at in wanted)))
        return plan

    def update(self, worker: int, epoch: int, changes: Changes) -> None:
        """Take a worker's report of the keys that it gained and lost; one from before a reset says nothing any more."""
        if epoch != self._epoch:
            return
        self._keys_of[worker] |= changes.added
        self._keys_of[worker] -= changes.removed
        self._pending -= changes.added
        self._pending -= changes.removed

    def finish(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._tracked.pop(request_id, None)
        self._offers.pop(request_id, None)
        self._loads.pop(request_id, None)

    def reset(self) -> None:
        """Forget all pages, now and with the next plan in every worker; requests under way store nothing any more."""
        self._epoch += 1
        self._pending.clear()
        for keys in self._keys_of:
            keys.clear()

    def _is_wanted(self, key: bytes) -> bool:
        return key not in self._pending and not self.is_known(key)
