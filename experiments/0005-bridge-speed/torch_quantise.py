"""The usual script, in the fleet environment: load safetensors, quantise by blocks in torch, save; one file at a time."""

import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.worker import serve

BLOCK = 128


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes and float32 scales of 128 x 128 blocks."""
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    codes = (blocks / scale[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(high * BLOCK, wide * BLOCK)[:rows, :columns].contiguous(), scale


def convert(source: str, out: str, max_files: int) -> dict[str, object]:
    """Convert the first files of a directory; return seconds and bytes read."""
    Path(out).mkdir(parents=True)
    started, num_bytes = time.monotonic(), 0
    for path in sorted(Path(source).glob("*.safetensors"))[:max_files]:
        made = {}
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                weight = opened.get_tensor(name)
                num_bytes += weight.nbytes
                is_plain = weight.dim() != 2 or any(part in name for part in ("embed", "lm_head", "mlp.gate."))
                if is_plain:
                    made[name] = weight
                else:
                    made[name], made[name + "_scale_inv"] = quantise(weight)
        save_file(made, Path(out) / path.name)
    return {"seconds": time.monotonic() - started, "bytes": num_bytes}


if __name__ == "__main__":
    torch.set_num_threads(2)
    serve({"convert": convert})
