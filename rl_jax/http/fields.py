"""Reads JSON bodies key by key, with type and range; every fault of a body is reported in one answer. Knows no route."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeGuard, TypeVar, cast

from aiohttp import web

from rl_jax.http.errors import Refused

T = TypeVar("T")

MAX_CHARS = 1024
MAX_TEXTS = 64


async def read_body(request: web.Request) -> dict[str, object]:
    """Return the JSON object in the body of `request`.

    Raises:
        Refused: it is no JSON, or no object.
    """
    raw = await request.read()
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits and half a character are ValueErrors too
        raise Refused(f"the body is no JSON: {error}; got {len(raw)} bytes that begin with {raw[:40]!r}") from error
    if not isinstance(body, dict):
        raise Refused(f"the body is a JSON {type(body).__name__}; expected an object")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The keys of one JSON object. Read each with its type, then `check`; null counts as absent.

    Example: fields = Fields({"n": 0, "bogus": 1}); fields.integer("n", 1, 1, 8) -> 1; fields.check() raises
    Refused("n=0: expected an integer from 1 to 8; bogus: unknown key; allowed: n").
    """

    def __init__(self, raw: Mapping[str, object], where: str = "", faults: list[str] | None = None):
        self._raw, self._where = raw, where
        self._known: list[str] = []
        self._faults: list[str] = [] if faults is None else faults

    def has(self, key: str) -> bool:
        """Return whether the key was given."""
        return self._raw.get(key) is not None

    def fault(self, message: str) -> None:
        """Add a fault; `message` starts with its key."""
        self._faults.append(self._where + message)

    def take(self, key: str, default: T, expected: str, is_good: Callable[[object], bool]) -> T:
        """Return the value of `key`, or `default` if it is absent or bad."""
        self._known.append(key)
        value = self._raw.get(key)
        if value is None:
            return default
        if not is_good(value):
            self.fault(f"{key}={value!r:.80}: expected {expected}")
            return default
        return cast(T, value)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        """Return an integer from low to high; true is none, and neither is 1.0."""
        return self.take(key, default, f"an integer from {low} to {high}", lambda v: is_integer(v, low, high))

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """Return a number from low to high."""
        expected = f"a number from {low:g} to {high:g}"
        return float(self.take(key, default, expected, lambda v: is_number(v) and low <= v <= high))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        return self.take(key, default, "true or false", lambda v: isinstance(v, bool))

    def text(self, key: str, default: str = "", min_length: int = 1, max_length: int = MAX_CHARS) -> str:
        """Return a string of a length in characters."""
        expected = f"a string of {min_length} to {max_length} characters"
        return self.take(key, default, expected, lambda v: is_text(v) and min_length <= len(v) <= max_length)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return short strings that are not empty; one alone may be given without a list."""
        expected = f"a string of 1 to {MAX_CHARS} characters, or a list of at most {MAX_TEXTS} of them"
        given = self.take(key, [], expected, _is_texts)
        return (given,) if isinstance(given, str) else tuple(given)

    def integers(self, key: str, high: int) -> Sequence[int]:
        """Return a list of integers from 0 to high; the fault names the first item that is none."""
        items: list[object] = self.take(key, [], "a list of integers", lambda v: isinstance(v, list))
        for at, item in enumerate(items):
            if not is_integer(item, 0, high):
                self.fault(f"{key}[{at}]={item!r:.80}: expected an integer from 0 to {high}")
                return []
        return cast(list[int], items)

    def require(self, *keys: str) -> None:
        """Add a fault for each of these keys that is absent."""
        for key in keys:
            if not self.has(key):
                self.fault(f"{key}: missing")

    def table(self, key: str) -> "Fields":
        """Return the keys of an object in this one, empty if it is absent; its faults count as faults of this one."""
        raw: dict[str, object] = self.take(key, {}, "an object", lambda v: isinstance(v, dict))
        return Fields(raw, f"{self._where}{key}.", self._faults)

    def neutral(self, key: str, *values: object, reason: str = "this server cannot do it") -> None:
        """Allow a key that other servers know, but only with a value that asks for nothing."""
        shown = " or ".join([*map(json.dumps, values), "null"])
        self.take(key, None, f"{shown}: {reason}", lambda v: _is_one_of(v, values))

    def ignore(self, *keys: str) -> None:
        """Allow keys that change no token."""
        self._known.extend(keys)

    def close(self) -> None:
        """Add a fault for every key that was not asked for."""
        allowed = ", ".join(sorted(set(self._known)))
        for key in self._raw:
            if key not in self._known:
                self.fault(f"{key}: unknown key; allowed: {allowed}")

    def check(self) -> None:
        """Close, and raise Refused with every fault found."""
        self.close()
        if self._faults:
            raise Refused("; ".join(self._faults))


def is_integer(value: object, low: int, high: int) -> bool:
    """Return whether `value` is an integer in a range; booleans are none."""
    return type(value) is int and low <= value <= high


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number that a float can hold; JSON's may have thousands of digits."""
    return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


def is_text(value: object) -> TypeGuard[str]:
    """Return whether `value` is a string that UTF-8 can write: JSON may spell half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_texts(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return len(items) <= MAX_TEXTS and all(is_text(item) and 1 <= len(item) <= MAX_CHARS for item in items)


def _is_one_of(value: object, allowed: Sequence[object]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
