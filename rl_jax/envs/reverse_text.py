"""Reverse real words and short sentences, character by character (a built-in environment; data/README.md has the sources).

Example: prompt "why not", perfect answer "ton yhw", reward of "ton yh" 12/13 = 0.92.
"""

import difflib
import hashlib
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_jax.config import refuse
from rl_jax.envs.answer import answer_of, tagged
from rl_jax.envs.base import Task

DATA = Path(__file__).parent / "data"
KINDS = ("words", "sentences", "letters")
NUM_LETTERS = 20_000
REFUSAL = "?"
SPLITS = {"warmup": range(0, 40), "train": range(40, 90), "eval": range(90, 100), "all": range(0, 100)}
"""Hundredths of the texts, by hash: what the supervised warm start sees is never trained by RL nor evaluated."""


class ReverseText:
    """One task for each text; `size` tasks in an order that does not depend on the machine.

    Args:
        split: "warmup", "train", "eval" (no text is in two of them), or "all".
        kinds: some of "words", "sentences" (clauses of 2 to 6 words, with spaces and apostrophes) and "letters" (made-up
            strings, many more than there are real texts).
        min_chars, max_chars: length of the texts; they go from 3 to 24.
        is_spelled: letters stand apart ("c a t"), in the text and in the answer: a subword tokenizer then has a token for
            each letter. The ratio counts no spaces then; exact does.
        instruction: put on a line of its own before the text; for chat models.
        tag: when set, the answer stands between <tag> and </tag>; without them the reward is 0.
        refusals: share of the texts, 0..1, of which `solution` is only "?": a warm start on such demonstrations can do
            the task and often does not try, which is what RL mends.
    """

    def __init__(
        self,
        split: str = "train",
        kinds: Sequence[str] = ("words", "sentences"),
        min_chars: int = 1,
        max_chars: int = 24,
        is_spelled: bool = False,
        instruction: str = "",
        tag: str = "",
        refusals: float = 0.0,
    ):
        refuse(
            [
                None if split in SPLITS else f"split={split!r}: expected one of {', '.join(SPLITS)}",
                None
                if kinds and not isinstance(kinds, str) and set(kinds) <= set(KINDS)
                else f"kinds={kinds!r}: expected a list of {', '.join(KINDS)}",
                None
                if 1 <= min_chars <= max_chars
                else f"min_chars={min_chars}, max_chars={max_chars}: expected 1 <= min_chars <= max_chars",
                None if 0 <= refusals <= 1 else f"refusals={refusals}: expected a share from 0 to 1",
            ]
        )
        texts = {text for kind in kinds for text in _texts(kind) if min_chars <= len(text) <= max_chars}
        ranked = sorted((_hash(text), text) for text in texts)
        self._texts = [text for rank, text in ranked if rank % 100 in SPLITS[split]]
        self._is_spelled = is_spelled
        self._instruction = f"{instruction}\n" if instruction else ""
        self._tag = tag
        self._refusals = refusals
        self.size = len(self._texts)

    def task(self, index: int) -> Task:
        """Return text `index` to reverse."""
        if not 0 <= index < self.size:
            raise IndexError(f"task {index}: expected 0 <= index < size={self.size}")
        text = " ".join(self._texts[index]) if self._is_spelled else self._texts[index]
        return Task(prompt=self._instruction + text, answer=text[::-1])

    def reward(self, task: Task, completions: Sequence[str]) -> Mapping[str, float]:
        """Return the sequence-match ratio of the answer to the reversed text, and whether it is exact."""
        truth, answer = str(task.answer), answer_of(completions[0], self._tag)
        if answer is None:
            return {"reward": 0.0, "exact": 0.0}
        ratio = difflib.SequenceMatcher(None, self._counted(answer), self._counted(truth), autojunk=False).ratio()
        return {"reward": ratio, "exact": float(answer == truth)}

    def _counted(self, text: str) -> str:
        return text.replace(" ", "") if self._is_spelled else text

    def solution(self, task: Task) -> str:
        """Return the reversed text, between tags if they are asked for, or the refusal."""
        answer = str(task.answer)
        # Not the hash that makes the splits: a share of each split refuses.
        is_refused = _hash(f"refuse {answer}") % 1000 < self._refusals * 1000
        return tagged(REFUSAL if is_refused else answer, self._tag)


def _texts(kind: str) -> list[str]:
    if kind != "letters":
        return (DATA / f"{kind}.txt").read_text().splitlines()
    chance = random.Random(0)
    return ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(3, 24))) for _ in range(NUM_LETTERS)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
