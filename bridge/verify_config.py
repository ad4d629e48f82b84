"""Checks of the config.json of an exported directory: every field against the manifest, and what the format demands.

The manifest says what the conversion wrote. Without one, or where it agrees with a wrong config, the class of the model
and quantization_config still follow from the architecture. Knows no tensor beyond its name.
"""

import json
import re
from collections.abc import Iterator, Mapping

from bridge.export import export_config, ignore_list
from bridge.verify_files import EXPORT_AGAIN, Finding, Folder

_RESTORE = "put the field back as it was, or convert again"
_LONGEST = 200  # characters of a value that are shown
_MISSING = object()
_NAME_LISTS = {f"quantization_config.{key}" for key in ("ignore", "modules_to_not_convert", "ignored_layers")}
"""Compared by check_ignore_list: by what they match, not letter by letter."""


def check_config(folder: Folder) -> Iterator[Finding]:
    """Compare every field of config.json with what the format demands and with what the conversion wrote."""
    found = {finding.where: finding for finding in _demanded(folder)}
    if folder.manifest:
        stated = folder.manifest.config
        for path, expected, got in _differences("", stated, folder.config):
            where = f"config.json: {path}"
            if where not in found and path not in _NAME_LISTS:
                found[where] = Finding("config", where, f"{_shown(expected)}, as converted", _shown(got), _RESTORE)
    yield from found.values()


def _demanded(folder: Folder) -> Iterator[Finding]:
    """Compare what follows from architecture and format: the class that vLLM makes, dtype, quantization_config."""
    wanted = export_config(folder.arch, folder.format)
    for key in ("architectures", "dtype", "quantization_config"):
        expected, got = wanted.get(key, _MISSING), folder.config.get(key, _MISSING)
        if key == "dtype" and got is _MISSING:
            got = folder.config.get("torch_dtype", _MISSING)  # its name before transformers 5
        for path, one, other in _differences(key, expected, got):
            if path not in _NAME_LISTS:
                yield Finding("config", f"config.json: {path}", _shown(one), _shown(other), EXPORT_AGAIN)


def _differences(path: str, expected: object, got: object) -> Iterator[tuple[str, object, object]]:
    """Yield dotted key, expected and found value of all that differs; a missing one is _MISSING."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in {**expected, **got}:
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(below, expected.get(key, _MISSING), got.get(key, _MISSING))
    elif type(expected) is not type(got) or expected != got:
        yield path, expected, got


def _shown(value: object) -> str:
    return "no such field" if value is _MISSING else json.dumps(value)[:_LONGEST]


def check_ignore_list(folder: Folder) -> Iterator[Finding]:
    """Compare the list of modules that vLLM must not quantise with which tensors have a scale."""
    quantised = folder.config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return
    key = "ignore" if folder.format == "fp8-channel" else "modules_to_not_convert"
    if folder.format == "fp8-block" and quantised.get("ignored_layers"):
        key = "ignored_layers"  # vLLM reads it first
    listed = quantised.get(key) or []
    where = f"config.json: quantization_config.{key}"
    if not isinstance(listed, list):
        yield Finding("ignore list", where, "a list of module names", repr(listed), EXPORT_AGAIN)
        return
    with_scale = {name.rpartition(".weight_scale")[0] for name in folder.tensors if ".weight_scale" in name}
    modules = {name.removesuffix(".weight") for name in folder.table if name.endswith(".weight")} | {"lm_head"}
    needed = set(ignore_list(folder.arch, folder.format))
    for entry in listed:
        if not _matched(str(entry), modules):
            got = f"{entry!r}, which names no module"
            yield Finding("ignore list", where, "full module names", got, EXPORT_AGAIN)
    covered = {module for entry in listed for module in _matched(str(entry), modules)}
    for module in sorted(needed - covered):
        got = "absent: vLLM would load it as FP8"
        yield Finding("ignore list", where, f"{module} (it has no scale)", got, EXPORT_AGAIN)
    for module in sorted(covered & with_scale):
        got = "listed: vLLM would load its codes as numbers"
        yield Finding("ignore list", where, f"{module} absent (it has a scale)", got, EXPORT_AGAIN)


def _matched(entry: str, modules: set[str]) -> set[str]:
    if not entry.startswith("re:"):
        return {entry} & modules
    try:
        return {module for module in modules if re.match(entry.removeprefix("re:"), module)}
    except re.error:
        return set()  # which is a finding
