"""The splash kernel, interpreted, against attention with a mask (which test_context.py holds to float64 NumPy).

Values and gradients of packed rows. Tolerance: float32 sums of at most 512 terms of order 1: 1e-5 of the largest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, reshard

from rl_jax.axes import BATCH_AXES, ROWS
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.context import AttentionConfig, packed_attention
from rl_jax.models.splash import block_size, splash_fault, visible_blocks
from rl_jax.models.transformer import ForwardConfig
from rl_jax.models.zigzag import gather, places, spread

B, T, K, Q, H = 2, 512, 2, 3, 64
LENGTHS = ((70, 300, 100), (512,))
RNG = np.random.default_rng(0)
FLOATS = [RNG.normal(size=(B, T, K, *rest)).astype(np.float32) for rest in ((Q, H), (Q, H), (H,), (H,))]
SEGMENTS_BT, POSITIONS_BT = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
for b, lengths in enumerate(LENGTHS):
    for u, length in enumerate(lengths):
        here = slice(sum(lengths[:u]), sum(lengths[:u]) + length)
        SEGMENTS_BT[b, here], POSITIONS_BT[b, here] = u + 1, np.arange(length)


def on_mesh(mesh_config: MeshConfig, config: AttentionConfig) -> list[np.ndarray]:
    """Output, and gradients of sum(output * dout) for queries, keys and values; 0 in padding."""
    mesh = make_mesh(mesh_config)
    rows, heads = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, "context", "tensor")
    is_real = (SEGMENTS_BT > 0)[:, :, None, None, None]

    @jax.jit
    def run(segments_BT: jax.Array, positions_BT: jax.Array, dout: jax.Array, *qkv: jax.Array) -> list[jax.Array]:
        attend = packed_attention(spread(segments_BT), spread(positions_BT), config)

        def attended(*qkv: jax.Array) -> jax.Array:
            return attend(jnp.int32(0), *(reshard(spread(x), heads) for x in qkv), ())[0]

        out, transpose = jax.vjp(attended, *qkv)
        return [gather(out), *transpose(reshard(spread(dout), heads))]

    with jax.set_mesh(mesh):
        where = (to_mesh(x, mesh, ROWS) for x in (SEGMENTS_BT, POSITIONS_BT))
        dout, *qkv = (to_mesh(x, mesh, rows) for x in (FLOATS[0] * is_real, *FLOATS[1:]))
        out, *grads = jax.device_get(run(*where, dout, *qkv))
    return [out * is_real, *grads]


@functools.cache
def reference(window: int) -> list[np.ndarray]:
    return on_mesh(MeshConfig(), AttentionConfig(window=window))


@pytest.mark.parametrize(
    ("mesh_config", "context", "window"),
    [
        (MeshConfig(context=2, tensor=2), "all_gather", 150),
        (MeshConfig(context=2, data=2), "ulysses", 0),
    ],
    ids=str,
)
def test_splash_is_attention_with_a_mask(mesh_config: MeshConfig, context: str, window: int) -> None:
    config = AttentionConfig(kernel="splash", context=context, block_tokens=128, window=window)  # type: ignore[arg-type]
    for actual, expected in zip(on_mesh(mesh_config, config), reference(window), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("window", [0, 150])
def test_a_block_is_skipped_only_if_nothing_in_it_is_visible(window: int) -> None:
    for b, shard in np.ndindex(B, 2):
        places_T = np.asarray(places(T, 2)[shard])
        found_IJ = visible_blocks(
            jnp.asarray(places_T), jnp.asarray(SEGMENTS_BT[b, places_T]), jnp.asarray(SEGMENTS_BT[b]), window, (64, 128)
        )
        distance_TS = places_T[:, None] - np.arange(T)
        seen_TS = (distance_TS >= 0) & (distance_TS < (window or T))
        seen_TS &= SEGMENTS_BT[b, places_T][:, None] == SEGMENTS_BT[b]
        needed_IJ = seen_TS.reshape(4, 64, 4, 128).any(axis=(1, 3))
        assert (np.asarray(found_IJ) >= needed_IJ).all()
        # Ranges of segments are exact here but where padding, segment 0, follows the last document.
        assert np.asarray(found_IJ).sum() <= needed_IJ.sum() + 1 + (b == 0)


@pytest.mark.parametrize(("num_tokens", "wanted", "expected"), [(4096, 1024, 1024), (384, 256, 128), (640, 700, 640)])
def test_block_size_divides_the_tokens(num_tokens: int, wanted: int, expected: int) -> None:
    assert block_size(num_tokens, wanted) == expected


def test_what_the_kernel_cannot_take_is_refused() -> None:
    assert splash_fault(1024, 128) is None
    assert "1000 tokens" in (splash_fault(1000, 128) or "")
    assert "head_width=80" in (splash_fault(1024, 80) or "")
    with pytest.raises(ConfigError, match="whole rows"):
        ForwardConfig(attention="splash", context_attention="ring")
