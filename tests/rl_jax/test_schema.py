"""Which meshes an architecture fits: the divisibility that fails and the nearest sizes that would do."""

import pytest

from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import mesh_faults

MOE = Architecture(
    vocab_size=1000,
    width=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_width=6,
    num_experts=128,
    num_active_experts=5,
    expert_width=72,
    shared_expert_width=40,
)
DENSE = Architecture(
    family="llama", vocab_size=90, width=14, num_layers=1, num_heads=6, num_kv_heads=6, head_width=4, mlp_width=22
)


@pytest.mark.parametrize(
    ("arch", "mesh", "faults"),
    [
        (MOE, MeshConfig(data=7, fsdp=6, expert=4, context=8, tensor=4), []),
        (MOE, MeshConfig(expert=2, context=3), ["mesh.expert*context=6 must divide model.num_experts=128; try 4 or 8"]),
        (MOE, MeshConfig(context=3), ["mesh.context=3 must divide model.num_experts=128; try 2 or 4"]),
        (MOE, MeshConfig(expert=256), ["mesh.expert=256 must divide model.num_experts=128; try 128"]),
        (MOE, MeshConfig(fsdp=5), ["mesh.fsdp=5 must divide model.width=96; try 4 or 6"]),
        (
            MOE,
            MeshConfig(tensor=16),
            [
                "mesh.tensor=16 must divide model.expert_width=72; try 12 or 18",
                "mesh.tensor=16 must divide model.num_kv_heads=4; try 4",
                "mesh.tensor=16 must divide model.shared_expert_width=40; try 10 or 20",
                "mesh.tensor=16 must divide model.vocab_size=1000; try 10 or 20",
            ],
        ),
        (DENSE, MeshConfig(expert=5, context=3), []),
        (
            DENSE,
            MeshConfig(tensor=3),
            ["mesh.tensor=3 must divide model.mlp_width=22; try 2 or 11"],
        ),
    ],
)
def test_faults_of_a_mesh(arch: Architecture, mesh: MeshConfig, faults: list[str]) -> None:
    assert mesh_faults(arch, vars(mesh)) == faults
