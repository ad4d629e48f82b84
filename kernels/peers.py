"""vLLM's CUDA routing operators as peers of the benchmarks, where its library was loaded into this process.

    torch.ops.load_library("vllm/_moe_C_stable_libtorch.abi3.so")  (--library of kernels.device_bench and of every bench.py)

That is the file which vLLM 0.32 imports on CUDA; it registers into torch.ops._moe_C. The cache operators, torch.ops.
_C_cache_ops, are in _C_stable_libtorch.abi3.so. Whether either loads without the rest of vLLM is not yet tried.

Signatures grow from version to version at the end, so a call gives as many arguments as the loaded one takes, and for the
rest their defaults, or None where that is allowed.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels.router import Router


def operator(name: str) -> Callable[..., Any] | None:
    """Return torch.ops._moe_C.<name> as a function of the arguments that it takes; None if it is not loaded."""
    packet = getattr(torch.ops._moe_C, name, None)
    if packet is None:
        return None
    schema = list(packet.default._schema.arguments)

    def call(*arguments: Any) -> Any:
        rest = [argument.default_value for argument in schema[len(arguments) :]]
        for argument in schema[len(arguments) :]:
            if not argument.has_default_value() and not str(argument.type).startswith("Optional"):
                raise ValueError(f"{name}: the loaded library wants {argument.name!r}, an {argument.type}, too")
        return packet(*arguments[: len(schema)], *rest)

    return call


def gates(router: Router, has_bias: bool) -> dict[str, Callable[..., Any]]:
    """Return vLLM's gate for this kind of router, empty if there is none or it is not loaded."""
    if router.num_groups > 1:
        grouped = operator("grouped_topk") if router.scoring == "sigmoid" and has_bias else None

        def choose_grouped(
            logits_TE: torch.Tensor, _: Router, bias_E: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert grouped is not None
            groups = (router.num_groups, router.num_kept_groups, router.num_active)
            return grouped(logits_TE, *groups, router.renormalize, router.scale, bias_E.to(logits_TE.dtype), 1)

        return {} if grouped is None else {"vllm": choose_grouped}
    choice = operator(f"topk_{router.scoring}")

    def choose(logits_TE: torch.Tensor, _: Router, bias_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert choice is not None
        shape, device = (logits_TE.shape[0], router.num_active), logits_TE.device
        weights_TA = torch.empty(shape, dtype=torch.float32, device=device)
        ids_TA, rows_TA = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        scale = (router.scale,) if router.scoring == "sigmoid" else ()
        choice(weights_TA, ids_TA, rows_TA, logits_TE, router.renormalize, bias_E, *scale)
        return weights_TA, ids_TA

    return {} if choice is None else {"vllm": choose}


def aligns() -> dict[str, Callable[..., Any]]:
    """Return vLLM's moe_align_block_size; not stable inside an expert, no inverse map."""
    align = operator("moe_align_block_size")

    def order(ids_TA: torch.Tensor, num_experts: int, block: int, *_: Any) -> tuple[torch.Tensor, ...]:
        assert align is not None
        capacity = ids_TA.numel() + num_experts * (block - 1)
        if ids_TA.numel() < num_experts:
            capacity = min(capacity, ids_TA.numel() * block)
        sizes = (capacity, -(-capacity // block), 1)
        buffers = tuple(torch.empty(size, dtype=torch.int32, device=ids_TA.device) for size in sizes)
        align(ids_TA, num_experts, block, *buffers, None)
        return buffers

    return {} if align is None else {"vllm": order}


def unpermutes() -> dict[str, Callable[..., Any]]:
    """Return vLLM's moe_unpermute, which walks an order without padding; ours is handed to it as it is."""
    unpermute = operator("moe_unpermute")

    def combine(y_MD: torch.Tensor, order: Any, weights_TA: torch.Tensor) -> torch.Tensor:
        assert unpermute is not None
        out_TD = torch.empty(len(weights_TA), y_MD.shape[1], dtype=y_MD.dtype, device=y_MD.device)
        unpermute(y_MD, weights_TA, order.position_R, None, weights_TA.shape[1], out_TD)
        return out_TD

    return {} if unpermute is None else {"vllm": combine}
