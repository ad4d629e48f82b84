"""reverse_text: its splits, its reward against an independent reference, its answers."""

import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.base import Task
from rl_jax.envs.reverse_text import DATA, ReverseText

ROOT = Path(__file__).parents[2]
TRAIN = ReverseText()


def texts_of(environment: ReverseText) -> list[str]:
    return [str(environment.task(i).prompt) for i in range(environment.size)]


def matched(a: str, b: str) -> int:
    """Count matched characters as Ratcliff and Obershelp define it: longest common block, then left and right of it."""
    length, i, j = max(
        (
            (n, -i, -j)
            for i in range(len(a))
            for j in range(len(b))
            for n in range(1, min(len(a) - i, len(b) - j) + 1)
            if a[i : i + n] == b[j : j + n]
        ),
        default=(0, 0, 0),
    )
    if not length:
        return 0
    i, j = -i, -j
    return length + matched(a[:i], b[:j]) + matched(a[i + length :], b[j + length :])


@hypothesis.given(text=st.text("abc ", min_size=1, max_size=9), answer=st.text("abc ", max_size=11))
@hypothesis.example(text="why not", answer="ton yh")
def test_reward_is_the_sequence_match_ratio(text: str, answer: str):
    truth, answer = text[::-1], answer.strip()
    expected = 2 * matched(answer, truth) / (len(answer) + len(truth))
    reward = TRAIN.reward(Task(prompt=text, answer=truth), [answer])
    assert reward["reward"] == pytest.approx(expected, abs=1e-12)
    assert reward["exact"] == float(answer == truth)
    assert (reward["reward"] == 1.0) == (answer == truth)


@pytest.mark.parametrize(
    ("answer", "ratio", "exact"),
    [("t a c", 1.0, 1.0), ("tac", 1.0, 0.0), ("t a", 2 * 2 / 5, 0.0), ("c a t", 2 * 1 / 6, 0.0), ("", 0.0, 0.0)],
)
def test_spelled_letters_stand_apart_and_their_spaces_win_nothing(answer: str, ratio: float, exact: float):
    spelled, plain = (ReverseText(kinds=["words"], is_spelled=is_spelled) for is_spelled in (True, False))
    assert str(spelled.task(11).prompt) == " ".join(str(plain.task(11).prompt))
    assert spelled.solution(spelled.task(11)) == " ".join(plain.solution(plain.task(11)))
    assert spelled.reward(Task(prompt="c a t", answer="t a c"), [answer]) == pytest.approx(
        {"reward": ratio, "exact": exact}
    )


def test_splits_are_disjoint_and_whole():
    parts = [texts_of(ReverseText(split=split)) for split in ("warmup", "train", "eval")]
    whole = texts_of(ReverseText(split="all"))
    assert len(set(whole)) == len(whole) == sum(map(len, parts)) == 3711 + 1431
    assert set().union(*parts) == set(whole)
    for part, share in zip(parts, (0.4, 0.5, 0.1), strict=True):
        assert len(part) / len(whole) == pytest.approx(share, abs=0.02)  # 4 standard deviations of a binomial: 0.027
        assert sum(" " in text for text in part) / len(part) == pytest.approx(1431 / 5142, abs=0.06)


def test_texts_are_what_the_readme_of_the_data_says():
    words, sentences = ((DATA / f"{kind}.txt").read_text().splitlines() for kind in ("words", "sentences"))
    assert all(3 <= len(word) <= 10 and set(word) <= set(string.ascii_lowercase) for word in words)
    assert all(2 <= len(text.split()) <= 6 and len(text) <= 24 for text in sentences)
    assert set("".join(sentences)) <= set(string.ascii_lowercase + "' ")


@pytest.mark.parametrize(
    ("kinds", "low", "high"), [(["words"], 4, 7), (["sentences"], 11, 13), (["sentences", "words"], 5, 5)]
)
def test_kinds_and_lengths(kinds: Sequence[str], low: int, high: int):
    found = texts_of(ReverseText(split="all", kinds=kinds, min_chars=low, max_chars=high))
    source = [text for kind in kinds for text in (DATA / f"{kind}.txt").read_text().splitlines()]
    assert sorted(found) == sorted(text for text in source if low <= len(text) <= high)


def test_order_is_the_same_in_another_process():
    code = (
        "from rl_jax.envs.reverse_text import ReverseText; e = ReverseText(split='eval', kinds=['sentences', 'words'])\n"
        "print(*(e.task(i).prompt for i in range(e.size)), sep='|')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip().split("|") == texts_of(ReverseText(split="eval"))


@pytest.mark.parametrize("tag", ["", "reversed_text"])
def test_solution_is_right_and_another_text_is_not(tag: str):
    environment = ReverseText(split="eval", tag=tag, instruction="Reverse this:")
    for index in range(0, environment.size - 1, 17):
        task = environment.task(index)
        assert environment.reward(task, [environment.solution(task)]) == {"reward": 1.0, "exact": 1.0}
        assert environment.reward(task, [environment.solution(environment.task(index + 1))])["exact"] == 0.0
        assert environment.reward(task, [""]) == {"reward": 0.0, "exact": 0.0}


def test_instruction_and_tags():
    environment = ReverseText(instruction="Reverse this:", tag="r")
    prompt = str(environment.task(3).prompt)
    assert prompt.startswith("Reverse this:\n")
    task = Task(prompt="abc", answer="cba")
    scores = {
        "cba": 0.0,  # no tags
        "<r>cba": 0.0,
        "<r>cba</r>": 1.0,
        "abc? <r>abc</r> no: <r>\n cba </r>.": 1.0,  # the last one, stripped
        "<r>xyz</r>": 0.0,
    }
    assert {text: environment.reward(task, [text])["reward"] for text in scores} == scores


@pytest.mark.parametrize("index", [-1, 2604])
def test_index_out_of_range(index: int):
    assert TRAIN.size == 2604
    with pytest.raises(IndexError, match=f"task {index}: expected 0 <= index < size=2604"):
        TRAIN.task(index)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "^split='test'"),
        ({"kinds": "words"}, "^kinds='words'"),
        ({"kinds": []}, r"^kinds=\[\]"),
        ({"kinds": ["words", "books"]}, "^kinds="),
        ({"min_chars": 9, "max_chars": 8}, "^min_chars=9, max_chars=8"),
    ],
)
def test_settings_refused(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ReverseText(**settings)


def test_refusals_are_a_share_of_the_demonstrations_and_touch_no_answer():
    eager, refusing = ReverseText(split="warmup"), ReverseText(split="warmup", refusals=0.4)
    tasks = [refusing.task(i) for i in range(refusing.size)]
    assert [task.answer for task in tasks] == [eager.task(i).answer for i in range(eager.size)]
    written = [refusing.solution(task) for task in tasks]
    assert all(w in ("?", task.answer) for w, task in zip(written, tasks, strict=True))
    share = sum(w == "?" for w in written) / len(written)
    assert abs(share - 0.4) < 4 * (0.4 * 0.6 / len(written)) ** 0.5
    with pytest.raises(ConfigError, match=r"refusals=1\.5"):
        ReverseText(refusals=1.5)


def test_made_up_strings_are_many_and_none_is_a_real_text():
    letters, real = ReverseText(kinds=["letters"], max_chars=12), ReverseText(split="all")
    texts = {letters.task(i).prompt for i in range(letters.size)}
    assert len(texts) == letters.size > 3000
    assert all(3 <= len(text) <= 12 and text.isalpha() for text in texts)
    shared = texts & {real.task(i).prompt for i in range(real.size)}
    assert len(shared) <= 0.01 * len(texts)
