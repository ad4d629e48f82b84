"""Attention over a context axis: each backend and kernel against float64 NumPy, one sequence and head at a time.

Values and gradients of packed rows in zigzag order that cross the borders of blocks, chunks and shards.
Tolerance: sums of at most 24 keys in float32, terms of order 1: 1e-5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, reshard

from rl_jax.axes import BATCH_AXES, ROWS, TOKENS
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.context import AttentionConfig, packed_attention
from rl_jax.models.zigzag import gather, spread

B, T, K, Q, H = 2, 24, 4, 3, 5
LENGTHS = ((11, 7, 4), (24,))
RNG = np.random.default_rng(0)
Q_BTKQH, K_BTKH, V_BTKH, DOUT_BTKQH = (RNG.normal(size=(B, T, K, *rest)) for rest in ((Q, H), (H,), (H,), (Q, H)))
SEGMENTS_BT, POSITIONS_BT = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
for b, lengths in enumerate(LENGTHS):
    for u, length in enumerate(lengths):
        here = slice(sum(lengths[:u]), sum(lengths[:u]) + length)
        SEGMENTS_BT[b, here], POSITIONS_BT[b, here] = u + 1, np.arange(length)


def by_sequence(window: int) -> list[np.ndarray]:
    """Output, and gradients of sum(output * dout) for queries, keys and values; 0 in padding."""
    out, dq, dk, dv = np.zeros_like(Q_BTKQH), np.zeros_like(Q_BTKQH), np.zeros_like(K_BTKH), np.zeros_like(V_BTKH)
    for b, lengths in enumerate(LENGTHS):
        for u, length in enumerate(lengths):
            here = slice(sum(lengths[:u]), sum(lengths[:u]) + length)
            distance = np.arange(length)[:, None] - np.arange(length)
            for k, q in np.ndindex(K, Q):
                queries, keys, values = Q_BTKQH[b, here, k, q], K_BTKH[b, here, k], V_BTKH[b, here, k]
                weights = np.exp(queries @ keys.T / np.sqrt(H)) * (distance >= 0) * (distance < (window or T))
                probs = weights / weights.sum(1, keepdims=True)
                out[b, here, k, q] = probs @ values
                dout = DOUT_BTKQH[b, here, k, q]
                dprobs = dout @ values.T
                dscores = probs * (dprobs - (probs * dprobs).sum(1, keepdims=True)) / np.sqrt(H)
                dq[b, here, k, q] = dscores @ keys
                dk[b, here, k] += dscores.T @ queries
                dv[b, here, k] += probs.T @ dout
    return [out, dq, dk, dv]


def on_mesh(mesh_config: MeshConfig, config: AttentionConfig) -> list[np.ndarray]:
    mesh = make_mesh(mesh_config)
    rows, heads = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, "context", "tensor")
    is_real_BT = SEGMENTS_BT > 0

    @jax.jit
    def run(segments_BT: jax.Array, positions_BT: jax.Array, dout: jax.Array, *qkv: jax.Array) -> list[jax.Array]:
        attend = packed_attention(spread(segments_BT), spread(positions_BT), config)

        def attended(*qkv: jax.Array) -> jax.Array:
            q, k, v = (reshard(spread(x), heads) for x in qkv)
            return attend(jnp.int32(0), q, k, v, ())[0]

        out, transpose = jax.vjp(attended, *qkv)
        return [gather(out), *transpose(reshard(spread(dout), heads))]

    with jax.set_mesh(mesh):
        places = (to_mesh(x, mesh, ROWS) for x in (SEGMENTS_BT, POSITIONS_BT))
        dout = DOUT_BTKQH * is_real_BT[:, :, None, None, None]
        floats = (to_mesh(x.astype(np.float32), mesh, rows) for x in (dout, Q_BTKQH, K_BTKH, V_BTKH))
        out, *grads = jax.device_get(run(*places, *floats))
    return [out * is_real_BT[:, :, None, None, None], *grads]


@pytest.mark.parametrize(
    ("mesh_config", "config"),
    [
        (MeshConfig(), {"kernel": "blockwise", "block_tokens": 7, "window": 6}),
        (MeshConfig(context=4), {"window": 5}),
        (MeshConfig(context=3), {"kernel": "blockwise", "block_tokens": 5}),
        (MeshConfig(context=4, data=2), {"context": "ring"}),
        (MeshConfig(context=3, tensor=2), {"context": "ring", "kernel": "blockwise", "block_tokens": 3, "window": 9}),
        (MeshConfig(context=4, data=2), {"context": "ulysses"}),
        (MeshConfig(context=2, tensor=2), {"context": "ulysses", "kernel": "blockwise", "block_tokens": 10}),
    ],
    ids=str,
)
def test_attention_is_that_of_each_sequence(mesh_config: MeshConfig, config: dict) -> None:
    found = on_mesh(mesh_config, AttentionConfig(**config))
    for actual, expected in zip(found, by_sequence(config.get("window", 0)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_zigzag_gives_each_shard_an_early_and_a_late_chunk() -> None:
    mesh = make_mesh(MeshConfig(context=3))
    with jax.set_mesh(mesh):
        spread_BT = spread(to_mesh(np.arange(12, dtype=np.int32)[None], mesh, ROWS))
        assert jax.typeof(spread_BT).sharding.spec == TOKENS
        np.testing.assert_array_equal(spread_BT[0], [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
        np.testing.assert_array_equal(gather(spread_BT)[0], np.arange(12))
