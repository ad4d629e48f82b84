"""GPUs that serve a model: memory, peaks and links, from the vendor's data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its share of a node's links.

    Example: the H200 has 141 GiB, reads 4.8e12 bytes/s, and multiplies dense FP8 matrices at 1,979e12 FLOP/s.
    """

    name: str
    memory_bytes: int
    memory_bytes_s: float
    fp8_flops_s: float
    """Dense FP8 matrix products."""
    bf16_flops_s: float
    """Dense bf16 matrix products."""
    nvlink_bytes_s: float
    """To the other GPUs of its node, one direction."""
    network_bytes_s: float
    """To other nodes, one direction: its own 400 Gb/s adapter."""
    per_node: int


GPUS = {
    "h200": Gpu(
        name="h200",
        memory_bytes=151_397_597_184,
        memory_bytes_s=4.8e12,
        fp8_flops_s=1979e12,
        bf16_flops_s=989e12,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
        per_node=8,
    ),
    "h100": Gpu(
        name="h100",
        memory_bytes=84_942_979_072,
        memory_bytes_s=3.35232e12,
        fp8_flops_s=1979e12,
        bf16_flops_s=989e12,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
        per_node=8,
    ),
}
