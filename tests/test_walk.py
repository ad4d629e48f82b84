"""The path of one rollout: what a module says of its place in docs/walk.md is what the table there says."""

import re
from pathlib import Path

from size_report import ROOT, source_files

CLAIM = re.compile(
    r"steps? ((?:\d+(?:, | and )?)+) of docs/walk\.md|walk: steps? ((?:\d+(?:, | and )?)+)|walk\.md, step (\d+)"
)


def rooms_of(name: Path) -> list[str]:
    """Return the rooms around a file as the table writes them, such as rl_jax/engine/."""
    return [f"{parent}/" for parent in name.parents if str(parent) not in (".", "rl_jax")]


def test_every_step_that_a_module_names_is_a_row_that_mentions_it() -> None:
    table = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs" / "walk.md").read_text(), re.M)
    rows = {int(number): files for number, files in table}
    assert sorted(rows) == list(range(1, len(rows) + 1))
    claims = []
    for path in source_files():
        name = path.relative_to(ROOT)
        text = " ".join(path.read_text(encoding="utf-8").split())
        for found in CLAIM.finditer(text):
            claims += [(name, int(number)) for number in re.findall(r"\d+", found[0])]
    wrong = [
        f"{name}: step {step} is {rows.get(step, 'no row')}"
        for name, step in claims
        if not any(mention in rows.get(step, "") for mention in (f"{name.name}`", *rooms_of(name)))
    ]
    assert wrong == []
    assert len(claims) > 20
