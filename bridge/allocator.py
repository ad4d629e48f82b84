"""Lets the C library keep what is freed: every slice of a conversion needs as much memory as the one before."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Return whether it was asked: only glibc can be.

    Its default gives slices of some megabytes back to the kernel at once; taking them again costs a page fault for
    every 4 kB, on a virtual machine several times the work that is done on them. What is kept is never more than was in
    use, which the budget of a conversion bounds.
    """
    if not sys.platform.startswith("linux"):
        return False
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is None:  # musl
        return False
    return bool(tune(_TRIM_THRESHOLD, _KEPT_BYTES) and tune(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
