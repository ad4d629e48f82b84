"""The parameter table: every weight of an architecture declared once.

Shapes, initialisation, shardings, counts, and the map to Hugging Face tensors all derive from the table. A weight is
stacked over the layers (L) and, in the experts, over the experts (E); each slice is one Hugging Face tensor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from rl_jax.axes import RULES, spec
from rl_jax.mesh import place
from rl_jax.models.architecture import Architecture

Params: TypeAlias = dict[str, Any]
"""Nested dictionary of arrays with the keys of the table."""


@dataclass(frozen=True, kw_only=True)
class Param:
    """One weight.

    Example: Param(axes="L D K Q H", hf="model.layers.{L}.self_attn.q_proj.weight", hf_axes="KQH D") says that the
    query projection of layer 3 is stored by Hugging Face as [K*Q*H, D], and here as wq_LDKQH[3] of [D, K, Q, H].
    """

    axes: str
    """Letters of the dimensions, separated by spaces."""
    sizes: tuple[int, ...]
    """Size of each dimension."""
    hf: str
    """Hugging Face name; {L} and {E} stand for the index of the layer and the expert."""
    hf_axes: str
    """Dimensions of one Hugging Face tensor, each a product of letters."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: str = "D"
    """Letters whose product is the fan-in: the initial standard deviation is its inverse square root."""
    is_island: bool = False
    """Stays float32 in the forward pass, whatever the compute dtype."""
    is_fp8: bool = False
    """May be exported as FP8 blocks."""

    @property
    def dims(self) -> dict[str, int]:
        """Size of each letter."""
        return dict(zip(self.axes.split(), self.sizes, strict=True))

    @property
    def stacked(self) -> tuple[str, ...]:
        """Letters that Hugging Face stores as separate tensors."""
        return tuple(letter for letter in self.axes.split() if f"{{{letter}}}" in self.hf)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of one Hugging Face tensor."""
        return tuple(math.prod(self.dims[letter] for letter in group) for group in self.hf_axes.split())


Table = dict[str, "Param | dict[str, Param]"]


def parameter_table(arch: Architecture) -> Table:
    """Return the table of an architecture: embedding, "layers" (stacked), final norm, and a head unless tied."""
    layer = "model.layers.{L}."
    layers: dict[str, Param] = {
        "attention_norm_LD": _norm(arch, "L D", layer + "input_layernorm.weight"),
        "mlp_norm_LD": _norm(arch, "L D", layer + "post_attention_layernorm.weight"),
        **_attention(arch, layer + "self_attn."),
        **(_experts(arch, layer + "mlp.") if arch.num_experts else _mlp(arch, layer + "mlp.", "", arch.mlp_width)),
    }
    table: Table = {
        "embed_VD": _param(arch, "V D", "model.embed_tokens.weight", "V D"),
        "layers": layers,
        "final_norm_D": _norm(arch, "D", "model.norm.weight"),
    }
    if not arch.tie_embeddings:
        table["unembed_VD"] = _param(arch, "V D", "lm_head.weight", "V D")
    return table


def flat_table(arch: Architecture) -> dict[str, Param]:
    """Return the table with "/"-joined keys, for example "layers/wq_LDKQH"."""
    return flat(parameter_table(arch))


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dictionary as one with "/"-joined keys."""
    return cast(dict[str, Any], traverse_util.flatten_dict(tree, sep="/"))


def nested(flat_tree: Mapping[str, Any]) -> Params:
    """Return the nested dictionary of "/"-joined keys; the inverse of flat."""
    return traverse_util.unflatten_dict(flat_tree, sep="/")


def num_params(arch: Architecture) -> int:
    """Return the number of parameters."""
    return sum(math.prod(param.sizes) for param in flat_table(arch).values())


def num_active_params(arch: Architecture) -> int:
    """Return the number of parameters that one token goes through; the embedding counts only as the head."""
    total = 0
    for name, param in flat_table(arch).items():
        size = math.prod(param.sizes)
        routed = "E" in param.axes and not name.split("/")[-1].startswith("router_")
        total += size * arch.num_active_experts // arch.num_experts if routed else size
    return total if arch.tie_embeddings else total - arch.vocab_size * arch.width


def abstract_params(arch: Architecture, mesh: Mesh) -> Params:
    """Return the parameters as float32 ShapeDtypeStructs with their shardings on `mesh`."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.sizes, jnp.float32, sharding=NamedSharding(mesh, spec(p.axes))),
        parameter_table(arch),
        is_leaf=lambda node: isinstance(node, Param),
    )


def init_params(arch: Architecture, mesh: Mesh, key: jax.Array) -> Params:
    """Draw float32 parameters, sharded on `mesh`; the same key gives the same values on every mesh."""
    table = flat_table(arch)
    abstract = flat(abstract_params(arch, mesh))

    def draw() -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(table))
        return {name: _initial(param, k) for k, (name, param) in zip(keys, table.items(), strict=True)}

    # Drawn whole and then sharded: the bits of a random array must not depend on the mesh.
    values = jax.jit(draw)()
    sharded = {name: place(value, abstract[name].sharding) for name, value in values.items()}
    return nested(sharded)


def mesh_faults(arch: Architecture, sizes: Mapping[str, int]) -> list[str]:
    """Return a line for every mesh axis, or product of axes, that does not divide a dimension it shards."""
    faults = {}
    for name, param in flat_table(arch).items():
        for letter, size in param.dims.items():
            axes = [axis for axis in RULES.get(letter, ()) if sizes[axis] > 1]
            ways = math.prod(sizes[axis] for axis in axes)
            if size % ways:
                what = f"mesh.{'*'.join(axes)}={ways} must divide model.{_key(letter, name)}={size}"
                faults[what] = f"{what}; try {near_divisors(size, ways)}"
    return sorted(faults.values())


def near_divisors(size: int, ways: int) -> str:
    """Return the divisors of `size` just below and above `ways` as text, for a message: "4 or 8"."""
    legal = [n for n in range(1, size + 1) if size % n == 0]
    near = [max((n for n in legal if n <= ways), default=None), min((n for n in legal if n > ways), default=None)]
    return " or ".join(str(n) for n in near if n)


def _key(letter: str, name: str) -> str:
    """Return the key of an architecture that says the size of a dimension of the weight `name`."""
    if letter == "F":
        return "shared_expert_width" if "shared_" in name else "expert_width" if "E" in name else "mlp_width"
    return {"V": "vocab_size", "D": "width", "K": "num_kv_heads", "E": "num_experts"}[letter]


def _param(arch: Architecture, axes: str, hf: str, hf_axes: str, **options: object) -> Param:
    sizes = tuple(arch.size(letter) for letter in axes.split())
    return Param(axes=axes, sizes=sizes, hf=hf, hf_axes=hf_axes, **options)  # type: ignore[arg-type]


def _norm(arch: Architecture, axes: str, hf: str) -> Param:
    return _param(arch, axes, hf, axes.split()[-1], init="ones", is_island=True)


def _attention(arch: Architecture, hf: str) -> dict[str, Param]:
    table = {
        "wq_LDKQH": _param(arch, "L D K Q H", hf + "q_proj.weight", "KQH D", is_fp8=True),
        "wk_LDKH": _param(arch, "L D K H", hf + "k_proj.weight", "KH D", is_fp8=True),
        "wv_LDKH": _param(arch, "L D K H", hf + "v_proj.weight", "KH D", is_fp8=True),
        "wo_LKQHD": _param(arch, "L K Q H D", hf + "o_proj.weight", "D KQH", fan_in="KQH", is_fp8=True),
    }
    if arch.qk_norm:
        table["q_norm_LH"] = _norm(arch, "L H", hf + "q_norm.weight")
        table["k_norm_LH"] = _norm(arch, "L H", hf + "k_norm.weight")
    if arch.attention_bias:
        table["bq_LKQH"] = _param(arch, "L K Q H", hf + "q_proj.bias", "KQH", init="zeros")
        table["bk_LKH"] = _param(arch, "L K H", hf + "k_proj.bias", "KH", init="zeros")
        table["bv_LKH"] = _param(arch, "L K H", hf + "v_proj.bias", "KH", init="zeros")
        table["bo_LD"] = _param(arch, "L D", hf + "o_proj.bias", "D", init="zeros")
    return table


def _mlp(arch: Architecture, hf: str, prefix: str, width: int) -> dict[str, Param]:
    sizes = {"L": arch.num_layers, "D": arch.width, "F": width}

    def param(axes: str, name: str, hf_axes: str, fan_in: str) -> Param:
        shape = tuple(sizes[letter] for letter in axes.split())
        return Param(axes=axes, sizes=shape, hf=hf + name, hf_axes=hf_axes, fan_in=fan_in, is_fp8=True)

    return {
        f"{prefix}gate_LDF": param("L D F", "gate_proj.weight", "F D", "D"),
        f"{prefix}up_LDF": param("L D F", "up_proj.weight", "F D", "D"),
        f"{prefix}down_LFD": param("L F D", "down_proj.weight", "D F", "F"),
    }


def _experts(arch: Architecture, hf: str) -> dict[str, Param]:
    one = hf + "experts.{E}."
    table = {
        "router_LDE": _param(arch, "L D E", hf + "gate.weight", "E D", is_island=True),
        "gate_LEDF": _param(arch, "L E D F", one + "gate_proj.weight", "F D", is_fp8=True),
        "up_LEDF": _param(arch, "L E D F", one + "up_proj.weight", "F D", is_fp8=True),
        "down_LEFD": _param(arch, "L E F D", one + "down_proj.weight", "D F", fan_in="F", is_fp8=True),
    }
    if arch.router_bias:
        table["router_bias_LE"] = _param(
            arch, "L E", hf + "gate.e_score_correction_bias", "E", init="zeros", is_island=True
        )
    if arch.shared_expert_width:
        table |= _mlp(arch, hf + "shared_experts.", "shared_", arch.shared_expert_width)
    return table


def _initial(param: Param, key: jax.Array) -> jax.Array:
    if param.init == "normal":
        fan_in = math.prod(param.dims[letter] for letter in param.fan_in)
        # Drawn flat: the same bits, and XLA compiles a random array of one dimension ten times faster.
        return jax.random.normal(key, (math.prod(param.sizes),), jnp.float32).reshape(param.sizes) * fan_in**-0.5
    return jnp.full(param.sizes, 1.0 if param.init == "ones" else 0.0, jnp.float32)
