"""Sampled tokens -> the text that a caller may see, piece by piece, cut at stop strings. Knows no route."""

from collections.abc import Iterable

from rl_jax.sampler import SamplingParams
from rl_jax.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Decodes one completion. Nothing of a stop string, or of a stop token, is ever given out.

    Text that may turn out to be the beginning of a stop string is held back until it cannot. However the tokens are cut
    into pieces, the text is the same: it ends before the stop string that is complete first.

    Example, stop "END": push("a EN") -> "a ", push("T") -> "ENT", push(" END b") -> " ", then nothing more.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, skip_special: bool = True):
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        self._stop, self._stop_token_ids = params.stop, frozenset(params.stop_token_ids)
        self._own_ends = frozenset(tokenizer.stop_token_ids)
        self._held = ""
        self._is_over = False
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended the text; None also for the model's own end of a turn."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain now that these tokens have come."""
        return "".join([self._push_token(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what was held back: no further token will come."""
        if isinstance(self.stop_reason, str):
            return ""
        text = self._cut(self._decoder.finish())
        held, self._held = self._held, ""
        return text + held

    def _push_token(self, token_id: int) -> str:
        if self._is_over:
            return ""
        if token_id in self._stop_token_ids:
            self._is_over = True
            self.stop_reason = None if token_id in self._own_ends else token_id
            return ""
        return self._cut(self._decoder.push(token_id))

    def _cut(self, piece: str) -> str:
        """Return what of the held text and `piece` may be given out; hold the rest."""
        text, self._held = self._held + piece, ""
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if ends:
            end, _, stop = min(ends)
            self._is_over, self.stop_reason = True, stop
            return text[: end - len(stop)]
        longest = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`: _overlap("a EN", "END") == 2."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
