"""Chips that a step can be compiled for: peaks, links, memory, the names of their topologies, and their sources.

A device is what JAX calls one. All rates are peaks; nothing here was measured. Links count one direction.
"""

from dataclasses import dataclass
from typing import Literal

from rl_jax.config import ConfigError
from rl_jax.plan.gpus import GPUS, Gpu

ChipName = Literal["v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200"]

GPU_MEMORY_FRAC = 0.95
"""Share of a GPU's memory that JAX can have (XLA_PYTHON_CLIENT_MEM_FRACTION); CUDA and NCCL need the rest."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device.

    Example: v5p multiplies 459e12 bf16 FLOP/s, reads 2.765e12 bytes/s of its 95.73 GiB, and has 90e9 bytes/s on each of
    the six links of a 3D torus.
    """

    name: ChipName
    platform: Literal["tpu", "gpu"]
    flops_s: float
    """Dense bfloat16."""
    memory_bytes_s: float
    memory_bytes: int
    """What a program may use: on TPU the limit that the compiler enforces."""
    link_bytes_s: float
    """TPU: one link of the torus. GPU: NVLink, to all GPUs of the host together."""
    network_bytes_s: float
    """Of one device to other slices (TPU) or hosts (GPU)."""
    torus_dims: int
    """Dimensions of the torus; 0 = all devices of a host meet in a switch."""
    devices_per_chip: int
    topologies: tuple[str, ...]
    """Names that exist, of TPU slices; of GPUs examples of <hosts>x<GPUs of a host>."""
    source: str


def _gib(size: float) -> int:
    return int(size * 2**30)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
_BOOK = "cloud.google.com/tpu/docs (chip pages); link rates from the Scaling Book, jax-ml.github.io/scaling-book"


def _tpu(name: ChipName, flops_s: float, memory_bytes_s: float, memory_gib: float, link_bytes_s: float) -> Chip:
    is_flat = name in ("v5e", "v6e")
    return Chip(
        name=name,
        platform="tpu",
        flops_s=flops_s,
        memory_bytes_s=memory_bytes_s,
        memory_bytes=_gib(memory_gib),
        link_bytes_s=link_bytes_s,
        network_bytes_s=6.25e9,  # 200 Gb/s of a host, shared by its 4 chips
        torus_dims=2 if is_flat else 3,
        devices_per_chip=2 if name in ("tpu7x", "v4") else 1,
        topologies=_FLAT if is_flat else (*_CUBIC, "16x16x24") if name == "v5p" else _CUBIC,
        source=_BOOK,
    )


def _gpu(gpu: Gpu) -> Chip:
    name: ChipName = "h200" if gpu.name == "h200" else "h100"
    return Chip(
        name=name,
        platform="gpu",
        flops_s=gpu.bf16_flops_s,
        memory_bytes_s=gpu.memory_bytes_s,
        memory_bytes=int(gpu.memory_bytes * GPU_MEMORY_FRAC),
        link_bytes_s=gpu.nvlink_bytes_s,
        network_bytes_s=gpu.network_bytes_s,
        torus_dims=0,
        devices_per_chip=1,
        topologies=("1x1", "1x8", "2x8", "4x8", "8x8", "16x8", "32x8"),
        source="NVIDIA data sheet; one 400 Gb/s adapter for each GPU",
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v4", 137.5e12, 0.614e12, 15.25, 45e9),
        _tpu("v5e", 197e12, 0.81e12, 15.75, 45e9),
        _tpu("v5p", 459e12, 2.765e12, 95.73, 90e9),
        _tpu("v6e", 918e12, 1.64e12, 31.24, 90e9),
        _tpu("tpu7x", 1153e12, 3.69e12, 94.74, 45e9),
        *map(_gpu, GPUS.values()),
    )
}


def chip_of(name: str) -> Chip:
    """Return the chip of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CHIPS:
        raise ConfigError([f"plan.chip={name!r}: expected one of {', '.join(CHIPS)}"])
    return CHIPS[name]


def num_devices(chip: Chip, topology: str, num_slices: int = 1) -> int:
    """Return the devices of a topology.

    Raises:
        ConfigError: the topology is no product such as 4x4x4, or has another number of dimensions than the chip's.
    """
    sizes = topology.split("x")
    num_dims = chip.torus_dims or 2
    if len(sizes) != num_dims or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        shape = "x".join(["N"] * num_dims) if chip.torus_dims else "HOSTSxGPUS"
        raise ConfigError(
            [
                f"plan.topology={topology!r}: a topology of {chip.name} is {shape}; known are {', '.join(chip.topologies)}"
            ]
        )
    total = chip.devices_per_chip * num_slices
    for size in sizes:
        total *= int(size)
    return total


_TARGET = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {memory_bytes_s}
 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory_bytes} shared_memory_per_block_optin: 232448
 cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "NVIDIA {name}" """


def gpu_target(chip: Chip) -> str:
    """Return the GpuTargetConfigProto of a GPU as text, as XLA's own files of targets have it.

    A field that is missing ends the process (threads_per_warp) or loses fusions in silence: leave none out.
    """
    gpu = GPUS[chip.name]
    return _TARGET.format(memory_bytes_s=int(gpu.memory_bytes_s), memory_bytes=gpu.memory_bytes, name=gpu.name.upper())
