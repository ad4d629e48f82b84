"""Functions of vLLM replaced by ours, also where a module took them by name, and back again.

Every replacement counts its calls, and says once why it hands one back to vLLM's own.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.kernels.places")

calls: Counter[str] = Counter()
"""Operation -> calls that ran ours; "operation: reason" -> calls that ran vLLM's own."""
_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, ours: Callable) -> None:
    """Set owner.name, a function of a module or a method of a class, to ours.

    Modules that imported the function by name hold it too: there it is replaced as well.
    """
    stock = getattr(owner, name)
    holders = [owner]
    if not isinstance(owner, type):
        holders += [module for module in list(sys.modules.values()) if is_holder(module, owner, name, stock)]
    for holder in holders:
        _replaced.append((holder, name, stock))
        setattr(holder, name, ours)


def is_holder(module: Any, owner: Any, name: str, stock: Any) -> bool:
    """Return whether another module of vLLM holds the same function under the same name."""
    is_vllm = getattr(module, "__name__", "").startswith("vllm.")
    return is_vllm and module is not owner and vars(module).get(name) is stock


def is_replaced(owner: Any, name: str) -> bool:
    """Return whether owner.name is ours."""
    return any(holder is owner and attribute == name for holder, attribute, _ in _replaced)


def restore_all() -> None:
    """Put vLLM's own functions back, for tests."""
    while _replaced:
        setattr(*_replaced.pop())


def fall_back(operation: str, reason: str) -> None:
    """Count a call that vLLM's own function answers; the first one for a reason is logged."""
    line = f"{operation}: {reason}"
    if calls[line] == 0:
        logger.warning("kernels: %s stays vLLM's own here: %s", operation, reason)
    calls[line] += 1
