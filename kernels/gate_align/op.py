"""gate and align in one launch, for the numbers of tokens at which launches cost more than the work."""

import torch
import triton

from kernels import aligned
from kernels.align.cases import MAX_EXPERTS
from kernels.align.op import check_order_arguments
from kernels.aligned import Aligned
from kernels.checks import Impl, check_impl, refuse
from kernels.gate.op import check, check_supported
from kernels.gate_align import kernel
from kernels.gate_align.cases import CONSTANTS, MAX_TOKENS, tile_for
from kernels.gate_align.ref import gate_align_ref
from kernels.indices import check_distinct, is_read
from kernels.router import Router


def gate_align(
    logits_TE: torch.Tensor,
    router: Router,
    block: int,
    *,
    bias_E: torch.Tensor | None = None,
    expert_map_E: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    ticket_1: torch.Tensor | None = None,
    impl: Impl,
) -> tuple[torch.Tensor, torch.Tensor, Aligned]:
    """Return weights_TA, ids_TA (kernels.gate) and their expert order (kernels.align), bit for bit as those two do.

    Args: as of gate and align. In addition no two experts of `expert_map_E` share a local expert: refused where the map
        is on the host, undefined order where it is not.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: impl="triton" with more than 1,024 tokens, or what gate or align do not do.
    """
    check(logits_TE, router, bias_E)
    T, E = logits_TE.shape
    num_local = check_order_arguments(E, block, expert_map_E, num_local_experts, ticket_1, logits_TE.device)
    if expert_map_E is not None and is_read(expert_map_E, None):
        check_distinct("expert_map_E", expert_map_E, "two experts cannot be one local expert")
    aligned.check_capacity(T * router.num_active, num_local, block)
    check_impl("gate_align", impl, logits_TE, bias_E, expert_map_E, ticket_1)
    if impl == "ref":
        maps = {"expert_map_E": expert_map_E, "num_local_experts": num_local_experts}
        return gate_align_ref(logits_TE, router, block, bias_E=bias_E, **maps)
    check_supported("gate_align", E, router)
    if T > MAX_TOKENS or num_local > MAX_EXPERTS:
        refuse("gate_align", f"at most {MAX_TOKENS} tokens and {MAX_EXPERTS} local experts, got {T} and {num_local}")
    device = logits_TE.device
    order = aligned.empty(T * router.num_active, num_local, block, device)
    weights_TA = torch.empty(T, router.num_active, dtype=torch.float32, device=device)
    ids_TA = torch.empty(T, router.num_active, dtype=torch.int32, device=device)
    if T == 0:
        order.num_rows_1.zero_()
        return weights_TA, ids_TA, order
    ticket_1 = torch.zeros(1, dtype=torch.int32, device=device) if ticket_1 is None else ticket_1
    launch(logits_TE, router, bias_E, (weights_TA, ids_TA, order), expert_map_E, num_local, ticket_1)
    return weights_TA, ids_TA, order


def launch(
    logits_TE: torch.Tensor,
    router: Router,
    bias_E: torch.Tensor | None,
    result: tuple[torch.Tensor, torch.Tensor, Aligned],
    expert_map_E: torch.Tensor | None,
    num_local: int,
    ticket_1: torch.Tensor,
) -> None:
    """Launch the kernel, which fills `result`."""
    weights_TA, ids_TA, order = result
    T, E = logits_TE.shape
    constants = router.constants(E, bias_E is not None)
    block_t, num_warps, rows = tile_for(T, int(constants["BLOCK_E"]) * logits_TE.element_size())
    num_chunks = triton.cdiv(T, block_t)
    block_l = triton.next_power_of_2(num_local)
    sizes = (num_chunks * block_l, T * router.num_active, block_l)
    kernel.gate_align[(num_chunks,)](
        logits_TE,
        weights_TA if bias_E is None else bias_E,  # not read without a bias
        ids_TA if expert_map_E is None else expert_map_E,  # not read without a map
        weights_TA,
        ids_TA,
        *aligned.scratch(sizes, logits_TE.device),
        order.routed_M,
        order.position_R,
        order.expert_J,
        order.num_rows_1,
        ticket_1,
        float(router.scale),
        T,
        logits_TE.stride(0),
        order.routed_M.numel(),
        order.expert_J.numel(),
        num_chunks,
        **constants,
        **CONSTANTS,
        NUM_LOCAL=num_local,
        BLOCK_L=block_l,
        HAS_MAP=expert_map_E is not None,
        BLOCK_M=order.block,
        BLOCK_T=block_t,
        ROWS=rows,
        num_warps=num_warps,
    )
