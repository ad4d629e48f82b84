"""Text from outside, made safe to show and to store. Knows no source of it."""


def printable(text: str) -> str:
    """Return `text` with an escape for each character that no terminal, log or database should meet.

    Newlines and tabs stay. Example: "a\\x1b[31m \\ud800" becomes "a\\\\x1b[31m \\\\ud800".
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)
