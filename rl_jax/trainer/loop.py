"""The trainer: batches in, new weights and metrics out (step 11 of docs/walk.md).

One call of `train` is one optimizer step and one read-back to the host. Knows neither environments nor samplers.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from rl_jax.axes import BATCH_AXES, EXPERT_AXES
from rl_jax.config import refuse
from rl_jax.losses import LossConfig, loss_sum
from rl_jax.mesh import to_host, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.grouped_matmul import ragged_fault
from rl_jax.models.schema import Params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.optim import OptimConfig, learning_rate, make_optimizer
from rl_jax.trainer.report import faults, num_tokens, speed, step_metrics, suspects, total_load
from rl_jax.trainer.state import TrainState, abstract_state, init_state, weight_roles
from rl_jax.trainer.step import Counts, MicroBatch, Programs, cross_entropy_sum, put_batch
from rl_jax.types import Batch

SCORE_ROWS = 8
"""Least rows of one call of the scoring program."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What a training step does beyond loss and optimizer."""

    router_replay: bool = False
    """Route each token to the experts that the sampler chose for it, as recorded in the rollouts."""
    balance_coef: float = 0.0
    """Factor of the sequence-wise load-balance loss of the router (arXiv 2412.19437, which uses 1e-4); >= 0, 0 = off."""

    z_coef: float = 0.0
    """Factor of the z loss of the router (arXiv 2202.08906, which uses 1e-3); >= 0, 0 = off."""
    router_bias_rate: float = 0.0
    """How far a step moves the correction bias of each expert of a model with router_bias towards an even load (arXiv
    2408.15664, which uses 1e-3); >= 0, 0 = frozen."""

    def __post_init__(self) -> None:
        refuse(
            f"{name}={getattr(self, name)}: expected a number >= 0"
            for name in ("balance_coef", "z_coef", "router_bias_rate")
            if not 0 <= getattr(self, name) < math.inf
        )


class NonFinite(ArithmeticError):
    """A loss or gradient that is no number. The state is as it was before the step."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step tells."""

    step: int
    """Steps taken, this one included: the policy version of the new weights."""
    metrics: dict[str, float]
    """Names as in docs; means over the trained tokens of the step."""
    logp_BT: list[Float[np.ndarray, "B T"]]
    """Trainer's log-probability of each batch's targets."""
    entropy_BT: list[Float[np.ndarray, "B T"]]
    """Entropy in nats at each position of each batch."""
    load_LE: Int[np.ndarray, "L E"] | None = field(default=None)
    """Tokens that each expert got in the step, padding not counted; None in a dense model."""


class Trainer:
    """Holds the state on the mesh and takes steps; one thread at a time."""

    def __init__(
        self,
        *,
        config: TrainerConfig,
        arch: Architecture,
        forward: ForwardConfig,
        loss: LossConfig,
        optim: OptimConfig,
        mesh: Mesh,
        start: Params | TrainState,
        reference: Params | None = None,
    ):
        """Start from weights or from a restored state, which the trainer takes over (its first step donates them).

        Args:
            reference: weights of the reference model, any float dtype, not donated; needed by loss.ref_kl_coef.
        Raises:
            ValueError: loss.ref_kl_coef without a reference, or expert features in a dense model.
        """
        _check(config, arch, loss, reference)
        optimizer = make_optimizer(optim, weight_roles(arch))
        losses = {"rl": partial(loss_sum, loss), "sft": cross_entropy_sum}
        self.config = config
        self.mesh = mesh
        self.arch = arch
        self._forward = forward
        self.state = start if isinstance(start, TrainState) else init_state(optimizer, start, mesh)
        self.abstract_state = abstract_state(arch, optimizer, mesh)
        """The state's shapes, dtypes and shardings: what a checkpoint restores into."""
        self._reference = reference if loss.ref_kl_coef else None
        self._learning_rate = learning_rate(optim)
        self._programs = Programs(
            arch, forward, optimizer, losses, config.balance_coef, config.z_coef, config.router_bias_rate
        )
        self._version = int(jax.device_get(self.state.step))

    @property
    def version(self) -> int:
        """Steps taken: the policy version of the weights."""
        return self._version

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far; a rise after the first steps is a fault: some shape changes."""
        return self._programs.num_compilations

    def restore(self, state: TrainState) -> None:
        """Continue from `state`, for example one restored into `abstract_state`."""
        self.state = state
        self._version = int(jax.device_get(state.step))

    def train(
        self,
        batches: Sequence[Batch],
        *,
        routes_BTLA: Sequence[Int[np.ndarray, "B T L A"]] | None = None,
        rollout_ids: Sequence[int] | None = None,
    ) -> StepResult:
        """Take one optimizer step of the policy loss on all batches together.

        Args:
            routes_BTLA: packing.pack_routes of the batches; needed with router_replay, ignored without.
            rollout_ids: ids of the rollouts that Batch.rollouts_BT points to, for the message of NonFinite.
        Raises:
            NonFinite: the loss or a gradient is no number; nothing changes.
            ValueError: nothing to train, rows that the mesh does not divide, or routes missing.
        """
        if self.config.router_replay and routes_BTLA is None:
            raise ValueError("trainer.router_replay needs the experts of the sampler; sample with routed experts")
        return self._step("rl", batches, routes_BTLA if self.config.router_replay else None, rollout_ids)

    def train_sft(self, batches: Sequence[Batch]) -> StepResult:
        """Take one optimizer step of cross entropy on all batches together. Raises as `train`."""
        return self._step("sft", batches, None, None)

    def weights(self) -> Params:
        """Return a copy of the weights in the compute dtype; later steps leave it alone."""
        with jax.set_mesh(self.mesh):
            return self._programs.copy(self.state.params)

    def score(
        self, sequences: Sequence[Int[np.ndarray, " T"]], temperature: float = 1.0
    ) -> list[Float[np.ndarray, " T"]]:
        """Return float32 log-probabilities of each sequence's tokens; 0 for its first token.

        Raises:
            ValueError: an empty sequence, or one longer than the model's positions.
        """
        for i, tokens_T in enumerate(sequences):
            if not 0 < len(tokens_T) <= self.arch.max_positions:
                limit = f"expected 1 to max_positions={self.arch.max_positions}"
                raise ValueError(f"sequence {i} to be scored has {len(tokens_T)} tokens: {limit}")
        num_rows = -(-SCORE_ROWS // self._num_shards) * self._num_shards
        scored: list[Float[np.ndarray, " T"]] = []
        for first in range(0, len(sequences), num_rows):
            chunk = sequences[first : first + num_rows]
            with jax.set_mesh(self.mesh):
                micro = put_batch(_score_batch(chunk, num_rows, temperature, self.mesh), self.mesh)
                logp_BT = to_host(self._programs.score(self.state.params, micro))
            scored += [np.append(np.float32(0), logp_BT[b, : len(t) - 1]) for b, t in enumerate(chunk)]
        return scored

    @property
    def _num_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    def _step(
        self,
        loss: str,
        batches: Sequence[Batch],
        routes_BTLA: Sequence[Int[np.ndarray, "B T L A"]] | None,
        rollout_ids: Sequence[int] | None,
    ) -> StepResult:
        started = time.perf_counter()
        self._check_batches(batches)
        lr = float(jax.device_get(self._learning_rate(self._version)))
        with jax.set_mesh(self.mesh):
            gradient, counts, told = self._programs.zeros(self.state.params), self._counts(batches), []
            for i, batch in enumerate(batches):
                micro = self._put(loss, batch, None if routes_BTLA is None else routes_BTLA[i])
                gradient, one = self._programs.accumulate[loss](gradient, self.state.params, micro, counts)
                told.append(one)
            self.state, applied = self._programs.apply(self.state, gradient)
            told, applied = to_host((told, applied))
        found = faults(told, applied)
        if found:
            who = suspects(batches, told, rollout_ids)
            raise NonFinite(f"step {self._version + 1}: {'; '.join(found)}; {who}. The weights are those of before.")
        self._version += 1
        metrics = step_metrics(loss, batches, told) | {
            "optim/lr": lr,
            "optim/grad_norm": float(applied.grad_norm),
            "optim/param_norm": float(applied.param_norm),
            "perf/num_compilations": float(self.num_compilations),
        }
        metrics |= speed(self.arch, self.mesh, batches, time.perf_counter() - started)
        return StepResult(
            step=self._version,
            metrics=metrics,
            logp_BT=[one.logp_BT for one in told],
            entropy_BT=[one.entropy_BT for one in told],
            load_LE=total_load(told),
        )

    def _put(self, loss: str, batch: Batch, routes_BTLA: np.ndarray | None) -> MicroBatch:
        """Copy a batch to the mesh, with reference log-probabilities and forced experts if they are in use."""
        forced_LBTA = None
        if routes_BTLA is not None:
            spec = PartitionSpec(None, BATCH_AXES, None, None)
            forced_LBTA = to_mesh(np.moveaxis(routes_BTLA, 2, 0), self.mesh, spec, np.int32)
        micro = put_batch(batch, self.mesh, forced_LBTA=forced_LBTA)
        if loss == "rl" and self._reference is not None:
            # The reference model routes for itself: its experts are not the sampler's.
            free = dataclasses.replace(micro, forced_LBTA=None)
            micro = dataclasses.replace(micro, ref_logp_BT=self._programs.score(self._reference, free))
        return micro

    def _counts(self, batches: Sequence[Batch]) -> Counts:
        put = partial(to_mesh, mesh=self.mesh, spec=PartitionSpec())
        return Counts(
            num_trained=put(np.asarray(sum(batch.num_trained_tokens for batch in batches), np.float32)),
            num_tokens=put(np.asarray(num_tokens(batches), np.float32)),
        )

    def _check_batches(self, batches: Sequence[Batch]) -> None:
        if not sum(batch.num_trained_tokens for batch in batches):
            raise ValueError(
                f"step {self._version + 1}: {len(batches)} batches with no trained token; nothing to train"
            )
        chunks = 2 * self.mesh.shape["context"]
        for batch in batches:
            _check_ragged(self.arch, self._forward, self.mesh, batch.tokens_BT.size)
            rows, seq_len = batch.tokens_BT.shape
            if chunks > 2 and seq_len % chunks:
                raise ValueError(
                    f"a micro-batch has rows of {seq_len} tokens: must be a multiple of {chunks}, two chunks for each "
                    f"shard of mesh {dict(self.mesh.shape)}; change packing.seq_len"
                )
            if rows % self._num_shards:
                raise ValueError(
                    f"a micro-batch has {rows} rows: must be a multiple of {self._num_shards}, the devices that share "
                    f"the batch (data * fsdp * expert of mesh {dict(self.mesh.shape)}); change packing.rows"
                )


def _check_ragged(arch: Architecture, forward: ForwardConfig, mesh: Mesh, num_tokens: int) -> None:
    """Refuse lax.ragged_dot where XLA expands it; `num_tokens` of a micro-batch are shared by data and fsdp only."""
    shards = math.prod(mesh.shape[axis] for axis in EXPERT_AXES)
    rows = num_tokens * arch.num_active_experts // (mesh.shape["data"] * mesh.shape["fsdp"])
    platform = mesh.devices.flat[0].platform
    fault = ragged_fault(platform, rows, arch.num_experts // shards, arch.width, forward.dtype.itemsize)
    if forward.grouped_matmul == "ragged" and fault:
        raise ValueError(fault)


def _check(config: TrainerConfig, arch: Architecture, loss: LossConfig, reference: Params | None) -> None:
    if loss.ref_kl_coef and reference is None:
        raise ValueError(f"loss.ref_kl_coef={loss.ref_kl_coef} needs the weights of a reference model")
    for name in ("router_replay", "balance_coef", "z_coef", "router_bias_rate"):
        value = getattr(config, name)
        if value and not arch.num_experts:
            raise ValueError(
                f"trainer.{name}={value} needs a mixture of experts, but model.num_experts=0; leave it off"
            )


def _score_batch(sequences: Sequence[np.ndarray], num_rows: int, temperature: float, mesh: Mesh) -> Batch:
    """Lay one sequence in each row, all padded to one power of two, so that few lengths are ever compiled.

    The context axis needs two chunks of a row on each device: a size of it that is no power of two adds to that.
    """
    chunks = 2 * mesh.shape["context"]
    length = max(16, 2 ** math.ceil(math.log2(max(len(tokens_T) for tokens_T in sequences))))
    length = -(-length // chunks) * chunks
    shape = (num_rows, length)
    tokens_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for b, tokens_T in enumerate(sequences):
        tokens_BT[b, : len(tokens_T)] = tokens_T
        segments_BT[b, : len(tokens_T)] = 1
    return Batch(
        tokens_BT=tokens_BT,
        targets_BT=np.roll(tokens_BT, -1, axis=1),
        positions_BT=np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        segments_BT=segments_BT,
        mask_BT=np.zeros(shape, np.bool_),
        logprobs_BT=np.zeros(shape, np.float32),
        advantages_BT=np.zeros(shape, np.float32),
        temperatures_BT=np.full(shape, temperature, np.float32),
        rollouts_BT=np.full(shape, -1, np.int32),
    )
