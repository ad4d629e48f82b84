"""The compiled programs of the sampler, and the paged cache that they update in place.

decode: some steps for every running request. prefill: KV of pieces of prompts. score: their log-probabilities.
copy_pages: private copies of shared partial pages. Knows no request. Its records are arrays of the device inside a program;
outside they hold NumPy, which jit takes and device_get gives, so that a call is one transfer in and one out.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from rl_jax.axes import BATCH_AXES, ROWS, TOKENS
from rl_jax.engine.config import EngineConfig
from rl_jax.engine.paged import Cache, paged_attention
from rl_jax.engine.sampling import Filters, sample
from rl_jax.engine.weights import place_weights
from rl_jax.models.architecture import Architecture
from rl_jax.models.head import all_logits, head_weight, token_logprobs
from rl_jax.models.schema import Params
from rl_jax.models.transformer import Decoded, ForwardConfig, decoder


@struct.dataclass
class Slots:
    """The running requests of one decode call, one row each; a row with limit 0 is empty."""

    tokens_B: jax.Array
    """int32, next input token."""
    positions_B: jax.Array
    """int32, its position in the sequence."""
    index_B: jax.Array
    """int32, position in the completion of the token to sample."""
    limit_B: jax.Array
    """int32, completion length at which the request ends."""
    seeds_B2: jax.Array
    """uint32"""
    temperature_B: jax.Array
    """float32"""
    stop_BX: jax.Array
    """int32 tokens that end the request, padded with -1."""
    tables_BP: jax.Array
    """int32, page of each part of the sequence."""
    filters: Filters | None
    """None when no request restricts what may be sampled: the fast path."""


@struct.dataclass
class Decode:
    """What a decode call wrote; of the T steps of row b, the first count_B[b] are real."""

    tokens_TB: jax.Array
    logprobs_TB: jax.Array
    count_B: jax.Array
    is_stopped_B: jax.Array
    """The last real token is a stop token."""
    experts_TLBA: jax.Array | None
    """uint16, experts of the input token of each step; None unless config.routed_experts."""


@struct.dataclass
class Pieces:
    """Consecutive tokens of some sequences, one piece a row."""

    tokens_BT: jax.Array
    """int32"""
    starts_B: jax.Array
    """int32, position of the first token."""
    counts_B: jax.Array
    """int32, real tokens."""
    tables_BP: jax.Array
    """int32"""
    targets_BT: jax.Array | None
    """int32, tokens to score; None = only compute KV."""


@struct.dataclass
class _State:
    """What one decode step hands to the next."""

    step: jax.Array
    cache: Cache
    tokens_B: jax.Array
    positions_B: jax.Array
    index_B: jax.Array
    is_running_B: jax.Array
    out: Decode


class Programs:
    """The device side of the sampler. Methods are not thread-safe."""

    def __init__(self, arch: Architecture, forward: ForwardConfig, config: EngineConfig, mesh: Mesh):
        wide = [axis for axis in (*BATCH_AXES, "context") if mesh.shape[axis] > 1]
        if wide:
            raise ValueError(
                f"the embedded sampler splits heads over tensor only, but its mesh has {dict(mesh.shape)}; "
                f"give it a mesh with {' = '.join(wide)} = 1, and run one sampler per replica"
            )
        self.arch, self.forward, self.config, self.mesh = arch, forward, config, mesh
        self.num_compilations = 0
        """Programs compiled since the start: constant once every bucket was met."""
        sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
        shape = (arch.num_layers, config.total_pages, config.page_size, arch.num_kv_heads, arch.head_width)
        self._cache = Cache(
            k_LPMKH=jnp.zeros(shape, forward.dtype, device=sharding),
            v_LPMKH=jnp.zeros(shape, forward.dtype, device=sharding),
        )
        self._decode = self._compiled(self._decode_steps)
        self._prefill = self._compiled(self._run_pieces)
        self._copy = self._compiled(self._copy_pages)

    def place(self, weights: Params) -> Params:
        """Return the sampler's own copy of `weights`: see place_weights."""
        return place_weights(self.arch, weights, self.forward.dtype, self.mesh)

    def decode(self, params: Params, slots: Slots) -> Decode:
        """Run up to config.decode_steps steps; stops early when every request has ended."""
        with jax.set_mesh(self.mesh):
            self._cache, out = self._decode(self._cache, params, slots)
            return jax.device_get(out)

    def prefill(self, params: Params, pieces: Pieces) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Write the KV of the pieces. Pieces of one call may build on each other.

        Returns:
            uint16 experts [L, B, T, A] if config.routed_experts, and float32 log-probabilities [B, T] of the targets.
        """
        with jax.set_mesh(self.mesh):
            self._cache, out = self._prefill(self._cache, params, pieces)
            return jax.device_get(out)

    def copy_pages(self, source_C: np.ndarray, target_C: np.ndarray) -> None:
        """Copy whole pages; (0, 0) pairs fill up."""
        with jax.set_mesh(self.mesh):
            self._cache = self._copy(self._cache, source_C, target_C)

    def _compiled(self, program: Callable) -> Callable:
        def traced(*args: object) -> object:
            self.num_compilations += 1  # runs when jit meets shapes for the first time
            return program(*args)

        return jax.jit(traced, donate_argnums=0)

    def _run(
        self, cache: Cache, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array, **where: jax.Array
    ) -> Decoded:
        """Run the decoder over the paged cache; `where` says which tables and which tokens are real."""
        batch = partial(reshard, out_shardings=TOKENS)
        tables_BP = reshard(where["tables_BP"], ROWS)
        attend = paged_attention(tables_BP, batch(positions_BT), batch(where["is_real_BT"]))
        return decoder(self.arch, self.forward, params, batch(tokens_BT), batch(positions_BT), attend, cache)

    def _decode_steps(self, cache: Cache, params: Params, slots: Slots) -> tuple[Cache, Decode]:
        shape = (self.config.decode_steps, slots.tokens_B.shape[0])
        experts_TLBA = None
        if self.config.routed_experts:
            shape_TLBA = (shape[0], self.arch.num_layers, shape[1], self.arch.num_active_experts)
            experts_TLBA = jnp.zeros(shape_TLBA, jnp.uint16)
        state = _State(
            step=jnp.zeros((), jnp.int32),
            cache=cache,
            tokens_B=slots.tokens_B,
            positions_B=slots.positions_B,
            index_B=slots.index_B,
            is_running_B=slots.index_B < slots.limit_B,
            out=Decode(
                tokens_TB=jnp.zeros(shape, jnp.int32),
                logprobs_TB=jnp.zeros(shape, jnp.float32),
                count_B=jnp.zeros(shape[1], jnp.int32),
                is_stopped_B=jnp.zeros(shape[1], bool),
                experts_TLBA=experts_TLBA,
            ),
        )
        head_VD = head_weight(self.arch, params, self.forward.dtype)
        state = lax.while_loop(
            lambda s: (s.step < self.config.decode_steps) & jnp.any(s.is_running_B),
            partial(self._decode_step, params, head_VD, slots),
            state,
        )
        return state.cache, state.out

    def _decode_step(self, params: Params, head_VD: jax.Array, slots: Slots, s: _State) -> _State:
        decoded = self._run(
            s.cache,
            params,
            s.tokens_B[:, None],
            s.positions_B[:, None],
            tables_BP=slots.tables_BP,
            is_real_BT=s.is_running_B[:, None],
        )
        logits_BV = reshard(all_logits(decoded.hidden_BTD, head_VD)[:, 0], PartitionSpec())
        tokens_B, logprobs_B = sample(logits_BV, slots.seeds_B2, s.index_B, slots.temperature_B, slots.filters)
        moved_B = s.is_running_B.astype(jnp.int32)
        is_stop_B = s.is_running_B & jnp.any(tokens_B[:, None] == slots.stop_BX, axis=1)
        experts_TLBA = s.out.experts_TLBA
        if experts_TLBA is not None:
            experts_TLBA = experts_TLBA.at[s.step].set(_experts(decoded)[:, :, 0])
        assert isinstance(decoded.cache, Cache)
        return _State(
            step=s.step + 1,
            cache=decoded.cache,
            tokens_B=jnp.where(s.is_running_B, tokens_B, s.tokens_B),
            positions_B=s.positions_B + moved_B,
            index_B=s.index_B + moved_B,
            is_running_B=s.is_running_B & ~is_stop_B & (s.index_B + 1 < slots.limit_B),
            out=Decode(
                tokens_TB=s.out.tokens_TB.at[s.step].set(tokens_B),
                logprobs_TB=s.out.logprobs_TB.at[s.step].set(logprobs_B),
                count_B=s.out.count_B + moved_B,
                is_stopped_B=s.out.is_stopped_B | is_stop_B,
                experts_TLBA=experts_TLBA,
            ),
        )

    def _run_pieces(
        self, cache: Cache, params: Params, pieces: Pieces
    ) -> tuple[Cache, tuple[jax.Array | None, jax.Array | None]]:
        steps_T = jnp.arange(pieces.tokens_BT.shape[1], dtype=jnp.int32)[None, :]
        is_real_BT = steps_T < pieces.counts_B[:, None]
        positions_BT = jnp.where(is_real_BT, pieces.starts_B[:, None] + steps_T, 0)
        decoded = self._run(
            cache, params, pieces.tokens_BT, positions_BT, tables_BP=pieces.tables_BP, is_real_BT=is_real_BT
        )
        assert isinstance(decoded.cache, Cache)
        experts_LBTA = _experts(decoded) if self.config.routed_experts else None
        if pieces.targets_BT is None:
            return decoded.cache, (experts_LBTA, None)
        batch = partial(reshard, out_shardings=TOKENS)
        head_VD = head_weight(self.arch, params, self.forward.dtype)
        ones_BT = batch(jnp.ones(pieces.targets_BT.shape, jnp.float32))
        targets_BT, chunk = batch(pieces.targets_BT), self.forward.head_chunk_tokens
        logprobs_BT, _ = token_logprobs(decoded.hidden_BTD, head_VD, targets_BT, ones_BT, chunk)
        return decoded.cache, (experts_LBTA, logprobs_BT)

    def _copy_pages(self, cache: Cache, source_C: jax.Array, target_C: jax.Array) -> Cache:
        return jax.tree.map(lambda pages: pages.at[:, target_C].set(pages[:, source_C]), cache)


def _experts(decoded: Decoded) -> jax.Array:
    assert decoded.experts_LBTA is not None, "routed_experts of a dense model"
    return reshard(decoded.experts_LBTA.astype(jnp.uint16), PartitionSpec())
