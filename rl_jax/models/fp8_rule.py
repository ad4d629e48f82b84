"""Which weights are served in FP8, and in what blocks: one rule for exports, live updates and memory plans.

Knows shapes only; how a block is quantised is bridge/fp8.py.
"""

from typing import Literal

from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import flat_table

BLOCK = 128
"""Rows and columns of a block of the block format."""

Format = Literal["float32", "bf16", "fp8-block", "fp8-channel"]
FORMATS: tuple[Format, ...] = ("float32", "bf16", "fp8-block", "fp8-channel")

_FUSED = {"wq_LDKQH": "q, k, v", "wk_LDKH": "q, k, v", "wv_LDKH": "q, k, v"}
"""Parameters that vLLM loads into one matrix whatever the width of the model."""
_GATE_UP = {"gate_LDF", "up_LDF", "shared_gate_LDF", "shared_up_LDF"}
_EXPERTS = {"gate_LEDF", "up_LEDF", "down_LEFD"}


def fp8_block(arch: Architecture, fmt: Format, key: str) -> tuple[int, int] | None:
    """Return the block (rows, columns of the Hugging Face matrix) that shares a scale; None = not quantised."""
    param = flat_table(arch)[key]
    if fmt not in ("fp8-block", "fp8-channel") or not param.is_fp8 or _unfit(arch, fmt, key):
        return None
    return (BLOCK, BLOCK) if fmt == "fp8-block" else (1, param.hf_shape[1])


def why_plain(arch: Architecture, fmt: Format, key: str) -> str:
    """Return why a parameter is not quantised, for a report; "" if it is."""
    param = flat_table(arch)[key]
    if fp8_block(arch, fmt, key) is not None:
        return ""
    if fmt not in ("fp8-block", "fp8-channel"):
        return f"format {fmt} quantises nothing"
    if not param.is_fp8:
        return "never quantised"
    return _unfit(arch, fmt, key)


def _unfit(arch: Architecture, fmt: Format, key: str) -> str:
    """Return why vLLM cannot load a parameter as blocks, "" if it can.

    vLLM concatenates some matrices, and their scales: a boundary inside a block would give its rows two scales.
    """
    name = key.removeprefix("layers/")
    if fmt != "fp8-block":
        return ""
    table = {k.removeprefix("layers/"): p for k, p in flat_table(arch).items()}
    rows = {n: table[n].hf_shape[0] for n in ("wq_LDKQH", "wk_LDKH")}
    if name in _FUSED and any(n % BLOCK for n in rows.values()):
        return f"vLLM stacks q, k, v: {list(rows.values())} rows of q and k are no multiples of {BLOCK}"
    width = table[name].hf_shape[0]
    if name in _GATE_UP and width % BLOCK:
        return f"vLLM stacks gate and up: {width} rows are no multiple of {BLOCK}"
    if name in _EXPERTS and arch.expert_width % BLOCK:
        return f"vLLM stacks gate and up of an expert: width {arch.expert_width} is no multiple of {BLOCK}"
    return ""
