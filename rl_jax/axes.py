"""One alphabet: a letter means the same dimension in a name's suffix, an einsum, a shape check and a sharding rule.

Letters are logical. Which mesh axes shard a letter is the table RULES and nothing else.
"""

from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""data replicates parameters; fsdp shards them; expert shards experts; context shards the tokens of a row, and the
experts together with expert; tensor shards heads, MLP width and vocabulary."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Rows of a batch are sharded over all of these: outside the experts, the expert axis is one more batch axis."""

EXPERT_AXES = ("expert", "context")
"""Experts are sharded over both. With expert=1 one axis of devices serves sequences in attention and experts in MoE."""

ROWS = PartitionSpec(BATCH_AXES, None)
"""Sharding of a [B, T] array with whole rows: what enters and leaves a training step."""

TOKENS = PartitionSpec(BATCH_AXES, "context")
"""Sharding of a [B, T, ...] array inside the model: each device has a piece of its rows."""

LETTERS = {
    "B": "rows",
    "T": "query time",
    "S": "key time",
    "D": "model width",
    "F": "MLP width",
    "N": "query heads (K*Q)",
    "K": "key/value heads",
    "Q": "query heads per key/value head",
    "H": "head width",
    "E": "experts",
    "A": "active experts per token",
    "R": "routed rows (tokens*A)",
    "M": "rows of one expert block",
    "Z": "expert blocks",
    "V": "vocabulary",
    "L": "layers",
    "P": "cache pages",
    "G": "samples per prompt",
    "U": "segments of a row",
    "C": "shards of the context or of the experts",
}

RULES: dict[str, tuple[str, ...]] = {
    "B": BATCH_AXES,
    "T": ("context",),
    "D": ("fsdp",),
    "E": EXPERT_AXES,
    "F": ("tensor",),
    "K": ("tensor",),
    "V": ("tensor",),
}
"""Letter -> mesh axes of a parameter's or batch's dimension; letters not named here are not sharded."""


def spec(axes: str, without: tuple[str, ...] = ()) -> PartitionSpec:
    """Return the sharding of an array with these letters: spec("E D F") == P(("expert", "context"), "fsdp", "tensor").

    Args:
        axes: letters separated by spaces.
        without: mesh axes to leave out, for an array that was gathered over them.
    Raises:
        ValueError: if one mesh axis would shard two dimensions.
    """
    parts = [tuple(axis for axis in RULES.get(letter, ()) if axis not in without) for letter in axes.split()]
    used = [axis for part in parts for axis in part]
    if len(set(used)) != len(used):
        raise ValueError(f"axes {axes!r} would use one mesh axis twice: {parts}; name the dimensions differently")
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))
