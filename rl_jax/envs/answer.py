"""The answer inside a completion (step 6 of docs/walk.md); knows no task."""

import re


def answer_of(completion: str, tag: str) -> str | None:
    """Return the stripped text between the last <tag> and </tag>; all of it without a `tag`; None if the tags are missing."""
    if not tag:
        return completion.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, flags=re.DOTALL)
    return found[-1].strip() if found else None


def tagged(answer: str, tag: str) -> str:
    """Return `answer` as a perfect policy writes it: `answer_of` gives it back."""
    return f"<{tag}>{answer}</{tag}>" if tag else answer
