"""Which gates ship: routers of public models, and the warps for each number of tokens."""

from dataclasses import dataclass

from kernels.aot import Variant
from kernels.gate import kernel
from kernels.router import Router

MAX_EXPERTS = 512
MAX_ACTIVE = 16
WARP_ROW_BYTES = 512
"""Logits that one warp loads in one 16-byte access a thread. A program of several warps keeps each row in one warp only up
to here; beyond, Triton spreads rows over warps and every round would go through shared memory, so one warp is a program.
"""


@dataclass(frozen=True)
class Model:
    """The router of a public model."""

    name: str
    num_experts: int
    has_bias: bool
    router: Router

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constexpr arguments of the kernel."""
        return self.router.constants(self.num_experts, self.has_bias)


GROUPED = Router(num_active=8, scoring="sigmoid", num_groups=8, num_kept_groups=4, scale=2.5)
MODELS = (
    Model("mixtral", 8, False, Router(num_active=2)),
    Model("olmoe", 64, False, Router(num_active=8, renormalize=False)),
    Model("qwen3", 128, False, Router(num_active=8)),
    Model("qwen3-next", 512, False, Router(num_active=10)),
    Model("glm-4.5", 160, True, Router(num_active=8, scoring="sigmoid", scale=2.5)),
    Model("glm-5", 256, True, Router(num_active=8, scoring="sigmoid", scale=2.5)),
    Model("deepseek-v3", 256, True, GROUPED),
)


def num_warps_for(num_tokens: int, block_e: int, item_bytes: int) -> int:
    """Return the warps of one program, which are its tokens. Not yet tuned on a card."""
    return 4 if num_tokens > 1 and block_e * item_bytes <= WARP_ROW_BYTES else 1


def variant(model: Model, dtype: str, num_warps: int) -> Variant:
    """Return one compiled gate; where a warp spans the experts it must reduce by redux."""
    return Variant(
        op="gate",
        name=f"{model.name} E{model.num_experts} k{model.router.num_active} {dtype} w{num_warps}",
        fn=kernel.gate,
        signature={
            "logits_pointer": f"*{dtype}",
            "bias_pointer": "*fp32",
            "weights_pointer": "*fp32",
            "ids_pointer": "*i32",
            "scale": "fp32",
            "T": "i32",
            "stride_T": "i32",
        },
        constexprs={**model.constants, "BLOCK_T": num_warps},
        multiples_of_16=("stride_T",) if model.num_experts % 16 == 0 else (),
        num_warps=num_warps,
        needs=("REDUX",) if model.num_experts >= 128 else (),
    )


def variants() -> list[Variant]:
    """Return every gate for one token and for many."""
    table = []
    for model in MODELS:
        for dtype, item_bytes in (("fp32", 4), ("bf16", 2)):
            warps = {num_warps_for(num, int(model.constants["BLOCK_E"]), item_bytes) for num in (1, 2)}
            table += [variant(model, dtype, num_warps) for num_warps in sorted(warps)]
    return table


VARIANTS = tuple(variants())
