"""align: the ids of the chosen experts -> an order in which every expert's rows lie together in whole blocks."""

import torch
import triton

from kernels import aligned
from kernels.align import kernel
from kernels.align.cases import CHUNK, MAX_EXPERTS, ONE_LAUNCH_ROWS, TILES
from kernels.align.ref import align_ref
from kernels.aligned import Aligned
from kernels.checks import Impl, check_impl, check_tensor, refuse
from kernels.ranges import check_range


def align(
    ids_TA: torch.Tensor,
    num_experts: int,
    block: int,
    *,
    expert_map_E: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    ticket_1: torch.Tensor | None = None,
    impl: Impl,
) -> Aligned:
    """Group routed rows by expert: stable, the same every time, without a host that waits; safe in a CUDA graph.

    Args:
        ids_TA: int32 or int64, expert of each choice. An id below 0 or from `num_experts` on is dropped: its position
            is -1.
        num_experts: E, all experts of the layer.
        block: rows of a block of the matmul that follows; a power of two.
        expert_map_E: int32, expert -> local expert, -1 = on another device (dropped). None = all are local.
        num_local_experts: needed with a map, and only then.
        ticket_1: int32, zero before and after; one for each stream on which calls may overlap. None = a fresh one,
            which costs a launch more.

    Returns:
        Aligned, with the buffers of the worst case.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: impl="triton" with more than 512 local experts.
    """
    num_local = check(ids_TA, num_experts, block, expert_map_E, num_local_experts, ticket_1)
    check_impl("align", impl, ids_TA, expert_map_E, ticket_1)
    if impl == "ref":
        return align_ref(ids_TA, num_experts, block, expert_map_E=expert_map_E, num_local_experts=num_local_experts)
    if num_local > MAX_EXPERTS:
        refuse("align", f"at most {MAX_EXPERTS} local experts, got {num_local}")
    order = aligned.empty(ids_TA.numel(), num_local, block, ids_TA.device)
    if ids_TA.numel() == 0:
        order.num_rows_1.zero_()
        return order
    launch(ids_TA, order, num_experts, num_local, expert_map_E, ticket_1)
    return order


def launch(
    ids_TA: torch.Tensor,
    order: Aligned,
    num_experts: int,
    num_local: int,
    expert_map_E: torch.Tensor | None,
    ticket_1: torch.Tensor | None,
) -> None:
    """Launch one kernel, or two beyond ONE_LAUNCH_ROWS."""
    R, J = ids_TA.numel(), order.expert_J.numel()
    num_chunks = triton.cdiv(R, CHUNK)
    block_e = triton.next_power_of_2(num_local)
    scratch = Scratch(num_chunks, block_e, R, ids_TA.device, ticket_1)
    constants = {
        "NUM_EXPERTS": num_experts,
        "NUM_LOCAL": num_local,
        "BLOCK_E": block_e,
        "HAS_MAP": expert_map_E is not None,
        "CHUNK": CHUNK,
        "BLOCK_J": TILES["BLOCK_J"],
    }
    table = ids_TA if expert_map_E is None else expert_map_E  # not read without a map
    inputs = (ids_TA, table, scratch.histogram, scratch.rank, scratch.first, scratch.end)
    outputs = (order.routed_M, order.position_R, order.expert_J)
    is_one_launch = R <= ONE_LAUNCH_ROWS
    kernel.count[(num_chunks,)](
        *inputs,
        *outputs,
        order.num_rows_1,
        scratch.ticket,
        R,
        order.routed_M.numel(),
        J,
        num_chunks,
        **constants,
        BLOCK_M=order.block,
        STEP=TILES["STEP"],
        ROWS=TILES["ROWS"],
        PLACE=is_one_launch,
        num_warps=TILES["num_warps"],
    )
    if not is_one_launch:
        kernel.place[(num_chunks,)](*inputs, *outputs, R, J, num_chunks, **constants, num_warps=4)


class Scratch:
    """Memory between the steps: histograms by chunk, rank of each row, first row and last block of each expert."""

    def __init__(
        self, num_chunks: int, block_e: int, num_routed: int, device: torch.device, ticket_1: torch.Tensor | None
    ) -> None:
        sizes = (num_chunks * block_e, num_routed, block_e, block_e)
        self.histogram, self.rank, self.first, self.end = aligned.scratch(sizes, device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device) if ticket_1 is None else ticket_1


def check(
    ids_TA: torch.Tensor,
    num_experts: int,
    block: int,
    expert_map_E: torch.Tensor | None,
    num_local_experts: int | None,
    ticket_1: torch.Tensor | None,
) -> int:
    """Raise ValueError for a bad argument; return the number of local experts."""
    check_tensor("ids_TA", ids_TA, shape=(None, None), dtypes=(torch.int32, torch.int64))
    num_local = check_order_arguments(num_experts, block, expert_map_E, num_local_experts, ticket_1, ids_TA.device)
    aligned.check_capacity(ids_TA.numel(), num_local, block)
    return num_local


def check_order_arguments(
    num_experts: int,
    block: int,
    expert_map_E: torch.Tensor | None,
    num_local_experts: int | None,
    ticket_1: torch.Tensor | None,
    device: torch.device,
) -> int:
    """Raise ValueError for a bad argument that align and gate_align share; return the number of local experts."""
    check_range("num_experts", num_experts, 1, 2**20)
    if block < 1 or block & (block - 1):
        raise ValueError(f"block={block}: must be a power of two")
    if (expert_map_E is None) != (num_local_experts is None):
        raise ValueError(
            f"expert_map_E {'is missing' if expert_map_E is None else 'is given'} and num_local_experts="
            f"{num_local_experts}: give both or neither"
        )
    if ticket_1 is not None:
        check_tensor("ticket_1", ticket_1, shape=(1,), dtypes=(torch.int32,), device=device)
    if expert_map_E is None or num_local_experts is None:
        return num_experts
    check_tensor("expert_map_E", expert_map_E, shape=(num_experts,), dtypes=(torch.int32,), device=device)
    check_range("num_local_experts", num_local_experts, 1, num_experts)
    return num_local_experts
