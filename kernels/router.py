"""The configuration of a router, which gate and gate_align share."""

from dataclasses import dataclass
from typing import Literal

from kernels.ranges import check_finite, check_multiple, check_range


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted. Example, DeepSeek-V3: Router(num_active=8, scoring="sigmoid", num_groups=8,
    num_kept_groups=4, scale=2.5), with a bias of 256 experts."""

    num_active: int
    """A, experts of each token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """softmax over all experts, or sigmoid of each."""
    num_groups: int = 1
    """Equal groups of neighbouring experts; 1 = not grouped."""
    num_kept_groups: int = 1
    """Groups of a token whose experts take part."""
    renormalize: bool = True
    """Weights of a token sum to 1 before scaling. With softmax the same as a softmax over the chosen."""
    scale: float = 1.0
    """Factor on the weights."""

    def check(self, num_experts: int, has_bias: bool) -> None:
        """Raise ValueError unless this router can choose among so many experts."""
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"router.scoring={self.scoring!r}: must be 'softmax' or 'sigmoid'")
        check_finite("router.scale", self.scale)
        check_range("router.num_groups", self.num_groups, 1, max(num_experts, 1))
        check_multiple("number of experts", num_experts, self.num_groups)
        check_range("router.num_kept_groups", self.num_kept_groups, 1, self.num_groups)
        if has_bias and self.num_groups == num_experts > 1:
            raise ValueError(
                f"router.num_groups={self.num_groups}: with a bias a group scores its two best experts, but has one"
            )
        num_kept = num_experts // self.num_groups * self.num_kept_groups
        check_range("router.num_active", self.num_active, 1, num_kept)

    def constants(self, num_experts: int, has_bias: bool) -> dict[str, int | bool]:
        """Return the constexpr arguments of a kernel that chooses."""
        return {
            "NUM_EXPERTS": num_experts,
            "BLOCK_E": 1 << (num_experts - 1).bit_length(),
            "NUM_ACTIVE": self.num_active,
            "BLOCK_A": 1 << (self.num_active - 1).bit_length(),
            "NUM_GROUPS": self.num_groups,
            "NUM_KEPT": self.num_kept_groups,
            "SIGMOID": self.scoring == "sigmoid",
            "HAS_BIAS": has_bias,
            "RENORMALIZE": self.renormalize,
        }
