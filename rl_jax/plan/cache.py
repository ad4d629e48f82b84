"""What a token costs in a KV cache: bytes that it takes, bytes and FLOPs that one decode step spends on it.

Two kinds: heads of keys and values (GQA), and one latent for all heads (MLA), with or without a sparse-attention
indexer (DSA). All numbers are of one device and all layers together. Knows no hardware.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

CacheDtype = Literal["bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """What one decode step of one sequence costs a device, as a straight line in the tokens of its context."""

    bytes_per_token: float
    bytes_per_sequence: float
    flops_per_token: float
    flops_per_sequence: float


@dataclass(frozen=True, kw_only=True)
class HeadCache:
    """Keys and values of each key/value head.

    Example: Qwen3-235B-A22B, 94 layers, 4 heads of 128: 2 * 94 * 4 * 128 * 2 bytes = 192,512 bytes a token in bf16.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int

    def token_bytes(self, tensor: int, dtype: CacheDtype) -> int:
        """Return the bytes of one token on a device; heads are repeated where devices outnumber them."""
        heads = max(1, self.num_kv_heads // tensor)
        return 2 * self.num_layers * heads * self.head_width * (2 if dtype == "bf16" else 1)

    def decode_cost(self, tensor: int, dtype: CacheDtype) -> AttentionCost:
        """Return the cost of one token of one sequence: all keys and values are read, and multiplied twice."""
        return AttentionCost(
            bytes_per_token=self.token_bytes(tensor, dtype),
            bytes_per_sequence=0.0,
            flops_per_token=4 * self.num_layers * self.num_heads / tensor * self.head_width,
            flops_per_sequence=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """One latent and one rotary key for all heads; every device of a tensor-parallel group keeps all of it.

    Example: GLM-5, 78 layers, FP8: a row is 512 + 16 + 128 bytes (codes, 4 scales, 64 rotary numbers in bf16), and the
    indexer's 128 + 4: 78 * 788 = 61,464 bytes a token. A step reads the indexer's rows of the whole context, and of
    the latents the index_top best.
    """

    num_layers: int
    num_heads: int
    latent_width: int
    rope_width: int
    num_index_layers: int = 0
    """0 = attends to everything."""
    index_heads: int = 0
    index_width: int = 128
    index_top: int = 2048

    def token_bytes(self, tensor: int, dtype: CacheDtype) -> int:
        """Return the bytes of one token on a device, whatever `tensor`."""
        return self.num_layers * self._row_bytes(dtype) + self.num_index_layers * self._index_bytes

    def decode_cost(self, tensor: int, dtype: CacheDtype) -> AttentionCost:
        """Return the cost of one token of one sequence, in the absorbed form: scores and values from the latent."""
        row_bytes = self.num_layers * self._row_bytes(dtype)
        row_flops = self.num_layers * 2 * self.num_heads / tensor * (2 * self.latent_width + self.rope_width)
        if not self.num_index_layers:
            return AttentionCost(
                bytes_per_token=row_bytes, bytes_per_sequence=0.0, flops_per_token=row_flops, flops_per_sequence=0.0
            )
        return AttentionCost(
            bytes_per_token=self.num_index_layers * self._index_bytes,
            bytes_per_sequence=self.index_top * row_bytes,
            # The indexer is not split: every device scores the whole context.
            flops_per_token=self.num_index_layers * 2 * self.index_heads * self.index_width,
            flops_per_sequence=self.index_top * row_flops,
        )

    def _row_bytes(self, dtype: CacheDtype) -> int:
        if dtype == "bf16":
            return 2 * (self.latent_width + self.rope_width)
        return self.latent_width + 4 * -(-self.latent_width // 128) + 2 * self.rope_width

    @property
    def _index_bytes(self) -> int:
        """FP8 codes and a float32 scale for each 128 of them."""
        return self.index_width + 4 * -(-self.index_width // 128)


Cache: TypeAlias = HeadCache | LatentCache
