"""One alphabet: a letter means the same dimension in a name's suffix, an einsum, a shape check and a sharding rule.

Letters are logical. Which mesh axis shards a letter is the table RULES and nothing else.
"""

from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "tensor")
"""data replicates parameters; fsdp shards them; expert shards experts; tensor shards heads, MLP width and vocabulary."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Rows of a batch are sharded over all of these: outside the experts, the expert axis is one more batch axis."""

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
}

RULES = {"B": BATCH_AXES, "D": "fsdp", "E": "expert", "F": "tensor", "K": "tensor", "V": "tensor"}
"""Letter -> mesh axis of a parameter's or batch's dimension; letters not named here are not sharded."""


def spec(axes: str, without: tuple[str, ...] = ()) -> PartitionSpec:
    """Return the sharding of an array with these letters: spec("E D F") == P("expert", "fsdp", "tensor").

    Args:
        axes: letters separated by spaces.
        without: mesh axes to leave out, for an array that was gathered over them.
    Raises:
        ValueError: if one mesh axis would shard two dimensions.
    """
    parts = [None if RULES.get(letter) in without else RULES.get(letter) for letter in axes.split()]
    used = [axis for part in parts if part for axis in (part if isinstance(part, tuple) else (part,))]
    if len(set(used)) != len(used):
        raise ValueError(f"axes {axes!r} would use one mesh axis twice: {parts}; name the dimensions differently")
    return PartitionSpec(*parts)
