"""Sizes of the embedded sampler: slots, pages, and the few fixed shapes that its programs are compiled for."""

from dataclasses import dataclass
from typing import Literal

from rl_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the embedded sampler. Every shape on the device is one of a few buckets, so compilations are bounded."""

    type: Literal["embedded"] = "embedded"
    num_slots: int = 64
    """Requests decoded at a time."""
    max_len: int = 1024
    """Longest sequence in tokens, prompt and completion together; a longer prompt is refused."""
    page_size: int = 16
    """Tokens of one page of the KV cache."""
    num_pages: int = 0
    """Pages of the KV cache; 0 = room for num_slots sequences of max_len, one to score with, and one scratch page."""
    decode_steps: int = 4
    """Decode steps in one call of the device. A request that ends waits, and a weight swap waits, for at most this many."""
    prefill_lengths: tuple[int, ...] = (32, 128, 512)
    """Lengths to which pieces of prompts are padded, rising; longer prompts are cut into pieces of the last one."""
    prefill_tokens: int = 512
    """Tokens of one prefill call that holds several pieces; at least the last of prefill_lengths."""
    slot_buckets: tuple[int, ...] = ()
    """Batch sizes that decoding is compiled for, rising to num_slots; () = powers of four."""
    routed_experts: bool = False
    """Keep the experts of every token in the cache, so that requests may ask for them (router replay)."""

    def __post_init__(self) -> None:
        sizes = ("num_slots", "max_len", "page_size", "decode_steps")
        faults = [f"{k}={getattr(self, k)}: must be at least 1" for k in sizes if getattr(self, k) < 1]
        refuse(faults)
        lengths, slots = self.prefill_lengths, self.slot_buckets
        refuse(
            [
                None
                if _is_rising(lengths) and lengths
                else f"prefill_lengths={lengths}: expected rising sizes from 1 on",
                f"prefill_tokens={self.prefill_tokens}: must be at least {lengths[-1]}, the last of prefill_lengths"
                if lengths and self.prefill_tokens < lengths[-1]
                else None,
                None
                if not slots or (_is_rising(slots) and slots[-1] == self.num_slots)
                else f"slot_buckets={slots}: expected rising sizes that end with num_slots={self.num_slots}",
                None
                if self.num_pages == 0 or self.num_pages >= self.min_pages
                else f"num_pages={self.num_pages}: must be at least {self.min_pages}, two sequences of "
                f"max_len={self.max_len} in pages of {self.page_size} and a scratch page (0 = enough for every slot)",
            ]
        )

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_len // self.page_size)

    @property
    def min_pages(self) -> int:
        """Fewest pages that can serve: one longest request, one longest sequence to score, the scratch page."""
        return 2 * self.max_pages + 1

    @property
    def total_pages(self) -> int:
        """Pages of the cache."""
        return self.num_pages or (self.num_slots + 1) * self.max_pages + 1

    def slots_for(self, num_running: int) -> int:
        """Return the smallest compiled batch size that holds `num_running` requests."""
        return pick(self.slot_buckets or rising(1, self.num_slots, 4), num_running)

    @property
    def page_buckets(self) -> tuple[int, ...]:
        """Numbers of attended pages that programs are compiled for: powers of two from 64 tokens on."""
        return rising(-(-64 // self.page_size), self.max_pages, 2)

    def pages_for(self, num_tokens: int) -> int:
        """Return the smallest compiled number of pages that holds `num_tokens`."""
        return pick(self.page_buckets, -(-num_tokens // self.page_size))


def rising(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return first, first * factor ... up to and always ending with last: rising(1, 20, 4) == (1, 4, 16, 20)."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def pick(buckets: tuple[int, ...], size: int) -> int:
    """Return the smallest of the rising `buckets` that holds `size`."""
    return next(bucket for bucket in buckets if bucket >= size)


def _is_rising(sizes: tuple[int, ...]) -> bool:
    return all(a < b for a, b in zip((0, *sizes), sizes, strict=False))
