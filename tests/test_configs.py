"""Every TOML file in configs/ says at its top what it is for a person who has not run it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAYS = ("Command", "Devices", "Duration", "Expected")


def header_of(text: str) -> str:
    """Return the comment lines before the first key."""
    return re.match(r"(?:#.*\n)*", text).group()


def header_faults(text: str) -> list[str]:
    """Return the words that the header does not define: a line `# Command: ...` defines Command."""
    return [word for word in SAYS if not re.search(rf"^# {word}: +\S", header_of(text), re.MULTILINE)]


def test_header_faults_name_what_is_missing():
    assert header_faults("# Command: make demo\n# Devices: 2 cores\nsteps = 1\n# Expected: late\n") == [
        "Duration",
        "Expected",
    ]


def test_every_config_says_command_devices_duration_and_expected_result():
    missing = {path.name: header_faults(path.read_text()) for path in sorted((ROOT / "configs").glob("**/*.toml"))}
    assert not {name: words for name, words in missing.items() if words}


def test_every_config_names_itself_in_its_command():
    for path in sorted((ROOT / "configs").glob("**/*.toml")):
        command = re.search(r"^# Command: +(.*)$", header_of(path.read_text()), re.MULTILINE)
        assert command, path
        assert path.relative_to(ROOT).as_posix() in command.group(1)
