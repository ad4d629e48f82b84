"""Whether vLLM can split an FP8 block export over devices: every shard must hold whole blocks."""

from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import BLOCK, Format, fp8_block
from rl_jax.models.schema import flat_table

_SPLIT_ROWS = {"wq_LDKQH", "wk_LDKH", "wv_LDKH", "gate_LDF", "up_LDF", "gate_LEDF", "up_LEDF"}
_SPLIT_COLUMNS = {"wo_LKQHD", "down_LFD", "down_LEFD"}


def tensor_parallel_faults(arch: Architecture, fmt: Format, ways: int) -> list[str]:
    """Return a line for each kind of matrix that `ways` devices cannot share by whole blocks of 128.

    Expert parallelism splits no expert: serve with it where the width of an expert is the obstacle.
    """
    faults = []
    if arch.num_heads % ways:
        faults.append(f"--tensor-parallel {ways}: must divide num_heads={arch.num_heads}")
    for key, param in flat_table(arch).items():
        name = key.removeprefix("layers/")
        if fmt != "fp8-block" or fp8_block(arch, fmt, key) is None or ways == 1:
            continue
        rows, columns = param.hf_shape
        size = rows if name in _SPLIT_ROWS else columns if name in _SPLIT_COLUMNS else 0
        # With fewer key/value heads than devices, vLLM repeats them.
        parts = min(ways, arch.num_kv_heads) if name in ("wk_LDKH", "wv_LDKH") else ways
        if size % (parts * BLOCK):
            legal = [n for n in range(1, ways) if size % (n * BLOCK) == 0 and arch.num_heads % n == 0]
            advice = f"at most {legal[-1]}" if legal else "format fp8-channel"
            where = param.hf.replace("{L}", "*").replace("{E}", "*")
            faults.append(f"--tensor-parallel {ways}: {where} has {size}, a share is no multiple of {BLOCK}; {advice}")
    return faults
