"""The gate: which experts a token goes to, and with which weights."""

import torch
import triton

from kernels.checks import Impl, check_impl, check_tensor, refuse
from kernels.gate import kernel
from kernels.gate.cases import MAX_ACTIVE, MAX_EXPERTS, num_warps_for
from kernels.gate.ref import gate_ref
from kernels.router import Router

LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def gate(
    logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None = None, *, impl: Impl
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best experts of each token. All arithmetic is float32.

    Experts are ranked by logit, or with a correction bias by score + bias; the weight is the score without the bias.
    Grouped: only experts of a token's best groups are ranked; a group scores its best expert, or with a bias the sum of
    its two best (DeepSeek-V3, GLM). Ties, between groups too, go to the lower index. A NaN logit ranks first and makes
    weights of its token NaN; ids are valid and distinct whatever the logits.

    Args:
        logits_TE: float32, bfloat16 or float16; rows may be apart.
        bias_E: float32; added for the choice only.

    Returns:
        weights_TA float32 and ids_TA int32, best first.

    Raises:
        ValueError: an argument breaks its constraint, or more experts are asked for than the kept groups hold.
        NotImplementedError: impl="triton" with more than 512 experts, 16 active ones, or groups of odd sizes.
    """
    check(logits_TE, router, bias_E)
    check_impl("gate", impl, logits_TE, bias_E)
    if impl == "ref":
        return gate_ref(logits_TE, router, bias_E)
    T, E = logits_TE.shape
    check_supported("gate", E, router)
    weights_TA = torch.empty(T, router.num_active, dtype=torch.float32, device=logits_TE.device)
    ids_TA = torch.empty(T, router.num_active, dtype=torch.int32, device=logits_TE.device)
    if T:
        constants = router.constants(E, bias_E is not None)
        num_warps = num_warps_for(T, int(constants["BLOCK_E"]), logits_TE.element_size())
        kernel.gate[(triton.cdiv(T, num_warps),)](
            logits_TE,
            weights_TA if bias_E is None else bias_E,  # not read without a bias
            weights_TA,
            ids_TA,
            float(router.scale),
            T,
            logits_TE.stride(0),
            **constants,
            BLOCK_T=num_warps,
            num_warps=num_warps,
        )
    return weights_TA, ids_TA


def check(logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None) -> None:
    """Raise ValueError for an argument that no implementation takes."""
    check_tensor("logits_TE", logits_TE, shape=(None, None), dtypes=LOGIT_TYPES, layout="rows")
    E = logits_TE.shape[1]
    if bias_E is not None:
        check_tensor("bias_E", bias_E, shape=(E,), dtypes=(torch.float32,), device=logits_TE.device)
    router.check(E, bias_E is not None)


def check_supported(op: str, num_experts: int, router: Router) -> None:
    """Raise NotImplementedError for what the reference does and the kernel does not."""
    if num_experts > MAX_EXPERTS:
        refuse(op, f"at most {MAX_EXPERTS} experts, got {num_experts}")
    if router.num_active > MAX_ACTIVE:
        refuse(op, f"at most {MAX_ACTIVE} active experts, got {router.num_active}")
    is_power_of_two = num_experts & (num_experts - 1) == 0
    if router.num_groups > 1 and not is_power_of_two:  # then the groups are powers of two as well
        refuse(op, f"a power of two of experts when they are grouped, got {num_experts}")
