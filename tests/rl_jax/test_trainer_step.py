"""The trainer: gradients that no packing changes, faults that change nothing, scoring, replay, and one compilation."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.axes import TOKENS
from rl_jax.losses import LossConfig, loss_sum
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params, init_params, num_active_params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.optim import OptimConfig, make_optimizer
from rl_jax.packing import PackingConfig, pack, pack_routes
from rl_jax.trainer.balance import LAYERS_OF_TOKENS, balance_sum
from rl_jax.trainer.loop import NonFinite, StepResult, Trainer, TrainerConfig
from rl_jax.trainer.report import step_flops
from rl_jax.trainer.state import weight_roles
from rl_jax.trainer.step import Counts, Programs, put_batch
from rl_jax.types import Batch, FinishReason, Rollout

ARCH = Architecture(
    vocab_size=23,
    width=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    num_experts=5,
    num_active_experts=2,
    expert_width=3,
)
LENGTHS = [13, 9, 7, 6, 11, 4, 5, 8]
ADVANTAGES = [1.0, -0.5, 0.3, -1.2, 0.7, 0.1, -0.9, 0.4]
MESH = make_mesh(MeshConfig())


def rollout(index: int, length: int) -> Rollout:
    rng = np.random.default_rng(index)
    sampled_T = np.arange(length) >= 2
    return Rollout(
        rollout_id=100 + index,
        group_id=index // 4,
        member=index % 4,
        env="none",
        task_id=0,
        tokens_T=rng.integers(0, 23, length).astype(np.int32),
        sampled_T=sampled_T,
        logprobs_T=np.where(sampled_T, rng.normal(-3.1, 0.2, length), 0).astype(np.float32),
        versions_T=np.where(sampled_T, 0, -1).astype(np.int32),
        temperature=0.8,
        finish=FinishReason.STOP,
        reward=0.0,
        routed_experts_TLA=np.stack([rng.permuted(np.arange(5))[:2] for _ in range(2 * length - 2)])
        .reshape(length - 1, 2, 2)
        .astype(np.uint16),
    )


ROLLOUTS = [rollout(index, length) for index, length in enumerate(LENGTHS)]


def batches(rows: int = 3, seq_len: int = 17) -> list[Batch]:
    return pack(ROLLOUTS, ADVANTAGES, PackingConfig(rows=rows, seq_len=seq_len))


def make_trainer(
    config: TrainerConfig,
    loss: LossConfig,
    reference: Params | None = None,
    lr: float = 1e-2,
    arch: Architecture = ARCH,
) -> Trainer:
    return Trainer(
        config=config,
        arch=arch,
        forward=ForwardConfig(grouped_matmul="dense", head_chunk_tokens=11),
        loss=loss,
        optim=OptimConfig(lr=lr, weight_decay=0.0),
        mesh=MESH,
        start=init_params(arch, MESH, jax.random.key(0)),
        reference=reference,
    )


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer(TrainerConfig(), LossConfig())


def test_gradient_does_not_depend_on_micro_batches_or_packing() -> None:
    params = init_params(ARCH, MESH, jax.random.key(0))
    programs = Programs(
        ARCH,
        ForwardConfig(grouped_matmul="dense", head_chunk_tokens=11),
        make_optimizer(OptimConfig(), weight_roles(ARCH)),
        {"rl": partial(loss_sum, LossConfig(type="gspo", entropy_coef=0.1))},
        balance_coef=0.5,
    )

    def gradient(split: Sequence[Batch]) -> Params:
        num_trained = jnp.float32(sum(batch.num_trained_tokens for batch in split))
        counts = Counts(num_trained=num_trained, num_tokens=jnp.float32(sum(LENGTHS)))
        with jax.set_mesh(MESH):
            total = programs.zeros(params)
            for batch in split:
                total, _ = programs.accumulate["rl"](total, params, put_batch(batch, MESH), counts)
        return jax.device_get(total.params)

    config = PackingConfig(rows=4, seq_len=19)
    whole = pack(ROLLOUTS, ADVANTAGES, config)
    assert len(whole) == 1
    thirds = [b for i in (0, 3, 6) for b in pack(ROLLOUTS[i : i + 3], ADVANTAGES[i : i + 3], config)]
    halves = [b for i in (0, 1) for b in pack(ROLLOUTS[i::2], ADVANTAGES[i::2], config)]
    expected = gradient(whole)
    for split in (thirds, halves):
        for found, leaf in zip(jax.tree.leaves(gradient(split)), jax.tree.leaves(expected), strict=True):
            # Sums of 63 tokens in another order: 4 standard deviations of a walk of float32 roundings, some 16 a token.
            tolerance = 4 * np.sqrt(sum(LENGTHS) * 16) * 2**-24
            np.testing.assert_allclose(found, leaf, rtol=0, atol=tolerance * np.abs(leaf).max())


def test_logprobs_of_a_step_are_those_of_scoring(trainer: Trainer) -> None:
    scored = trainer.score([r.tokens_T for r in ROLLOUTS])
    neutral = [dataclasses.replace(batch, temperatures_BT=np.ones_like(batch.temperatures_BT)) for batch in batches()]
    result = trainer.train_sft(neutral)
    told = np.concatenate([logp_BT[b.mask_BT] for logp_BT, b in zip(result.logp_BT, neutral, strict=True)])
    owner = np.concatenate([b.rollouts_BT[b.mask_BT] for b in neutral])
    for i, r in enumerate(ROLLOUTS):
        assert scored[i][0] == 0 and len(scored[i]) == LENGTHS[i]
        np.testing.assert_allclose(told[owner == i], scored[i][r.sampled_T], rtol=0, atol=2e-6)
    assert result.metrics["loss/cross_entropy"] == pytest.approx(-np.mean(told), rel=1e-6)


def test_supervised_steps_learn_and_metrics_count(trainer: Trainer) -> None:
    results = [trainer.train_sft(batches()) for _ in range(8)]
    losses = [result.metrics["loss/cross_entropy"] for result in results]
    assert losses[-1] < losses[0] - 0.5
    assert [result.step for result in results] == list(range(results[0].step, results[0].step + 8))
    assert results[0].load_LE is not None
    np.testing.assert_array_equal(results[0].load_LE.sum(axis=1), [sum(LENGTHS) * 2] * 2)
    vio_L = results[0].load_LE.max(axis=1) / (sum(LENGTHS) * 2 / 5) - 1
    assert results[0].metrics["max_vio"] == pytest.approx(vio_L.mean())
    assert "perf/mfu" not in results[0].metrics  # the peak of a CPU is not known


def test_metrics_of_a_policy_step(trainer: Trainer) -> None:
    result = trainer.train(batches())
    kl = [mismatch(batch, logp_BT) for batch, logp_BT in zip(batches(), result.logp_BT, strict=True)]
    expected = np.concatenate(kl)
    assert result.metrics["mismatch_kl/all/mean"] == pytest.approx(expected.mean(), rel=1e-6)
    assert result.metrics["mismatch_kl/all/p99"] == pytest.approx(np.percentile(expected, 99), rel=1e-6)
    assert result.metrics["loss/mean"] == pytest.approx(
        result.metrics["loss/policy"] + result.metrics["loss/kl"], rel=1e-5
    )
    assert result.metrics["optim/lr"] == pytest.approx(1e-2)


def mismatch(batch: Batch, logp_BT: np.ndarray) -> np.ndarray:
    log_rho = logp_BT[batch.mask_BT].astype(np.float64) - batch.logprobs_BT[batch.mask_BT]
    return np.exp(log_rho) - log_rho - 1


def test_steps_compile_nothing_after_the_first(trainer: Trainer) -> None:
    trainer.train(batches()[:1])
    trainer.weights()
    before = trainer.num_compilations
    for split in (batches(), batches()[:1], batches()[1:]):
        trainer.train(split)
        trainer.weights()
    assert trainer.num_compilations == before


def test_weights_survive_later_steps(trainer: Trainer) -> None:
    weights = trainer.weights()
    expected = jax.device_get(trainer.state.params)
    expected = jax.tree.map(np.array, expected)
    trainer.train(batches())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(weights), expected)


@pytest.mark.parametrize("poison", ["logprob", "advantage"])
def test_non_finite_step_names_its_causes_and_changes_nothing(trainer: Trainer, poison: str) -> None:
    good = batches()
    victim = int(good[1].rollouts_BT[good[1].mask_BT][0])
    is_victim_BT = good[1].mask_BT & (good[1].rollouts_BT == victim)
    field = {"logprob": "logprobs_BT", "advantage": "advantages_BT"}[poison]
    bad = dataclasses.replace(good[1], **{field: np.where(is_victim_BT, np.float32(np.inf), getattr(good[1], field))})
    before = jax.tree.map(np.array, jax.device_get(trainer.state))
    version = trainer.version
    with pytest.raises(NonFinite) as caught:
        trainer.train([good[0], bad], rollout_ids=[r.rollout_id for r in ROLLOUTS])
    message = str(caught.value)
    assert f"step {version + 1}:" in message and "micro-batches [1]" in message and str(100 + victim) in message
    assert "layers/wq_LDKQH" in message
    assert trainer.version == version
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)
    assert trainer.train(good).step == version + 1


def test_continuing_from_a_state_is_bitwise_the_same(trainer: Trainer) -> None:
    kept = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), trainer.state)
    first = trainer.train(batches())
    expected = jax.tree.map(np.array, jax.device_get(trainer.state))
    trainer.restore(kept)
    second = trainer.train(batches())
    assert first.step == second.step
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), expected)


def test_replayed_routes_and_reference_are_used() -> None:
    arch = dataclasses.replace(ARCH, router_bias=True)
    reference = init_params(arch, MESH, jax.random.key(0))  # the trainer's own first weights
    config = TrainerConfig(router_replay=True, balance_coef=0.1, z_coef=0.01, router_bias_rate=0.25)
    trainer = make_trainer(config, LossConfig(ref_kl_coef=0.3), reference, arch=arch)
    routes_BTLA = pack_routes(batches(), ROLLOUTS)
    result = trainer.train(batches(), routes_BTLA=routes_BTLA)
    expected_LE = np.zeros((2, 5), int)
    for r in ROLLOUTS:
        assert r.routed_experts_TLA is not None
        for layer in range(2):
            expected_LE[layer] += np.bincount(r.routed_experts_TLA[:, layer].ravel(), minlength=5)
    assert result.load_LE is not None
    # The last token of each rollout has no recorded route: the router is free there.
    free_LE = result.load_LE - expected_LE
    assert (free_LE >= 0).all() and free_LE.sum() == len(ROLLOUTS) * 2 * 2
    assert result.metrics["ref_kl"] > 0  # equal weights, but the reference routes for itself
    assert result.metrics["loss/balance"] > 0.5
    assert result.metrics["loss/z"] > np.log(5) ** 2 / 2  # logits of about 0: log(sum(exp)) is about log(5)
    bias_LE = trainer.state.params["layers"]["router_bias_LE"]
    load_LE = result.load_LE
    np.testing.assert_array_equal(bias_LE, 0.25 * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE))
    with pytest.raises(ValueError, match="router_replay"):
        trainer.train(batches())


def test_trainer_refuses_what_it_cannot_do(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="reference"):
        make_trainer(TrainerConfig(), LossConfig(ref_kl_coef=0.1))
    empty = [dataclasses.replace(batch, mask_BT=np.zeros_like(batch.mask_BT)) for batch in batches()]
    with pytest.raises(ValueError, match="nothing to train"):
        trainer.train(empty)
    with pytest.raises(ValueError, match="sequence 1 to be scored has 0 tokens"):
        trainer.score([np.array([1]), np.array([], np.int32)])


def test_rows_must_fit_the_mesh() -> None:
    mesh = make_mesh(MeshConfig(data=2))
    arch = Architecture(
        family="qwen3", vocab_size=5, width=4, num_layers=1, num_heads=1, num_kv_heads=1, head_width=2, mlp_width=3
    )
    trainer = Trainer(
        config=TrainerConfig(),
        arch=arch,
        forward=ForwardConfig(),
        loss=LossConfig(),
        optim=OptimConfig(),
        mesh=mesh,
        start=init_params(arch, mesh, jax.random.key(0)),
    )
    with pytest.raises(ValueError, match="has 3 rows: must be a multiple of 2"):
        trainer.train(batches(rows=3))


def test_balance_is_that_of_each_sequence() -> None:
    rng = np.random.default_rng(4)
    num_layers, num_experts, segments_BT = (
        2,
        5,
        np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0] * 7], np.int32),
    )
    experts_LBTA = rng.permuted(np.broadcast_to(np.arange(num_experts), (num_layers, 3, 7, num_experts)), axis=-1)[
        ..., :3
    ]
    probs_LBTE = rng.dirichlet(np.ones(num_experts), (num_layers, 3, 7))
    expected = 0.0
    for layer in range(num_layers):
        for b, segment in [(0, 1), (0, 2), (1, 1)]:
            is_here_T = segments_BT[b] == segment
            chosen_E = np.bincount(experts_LBTA[layer, b, is_here_T].ravel(), minlength=num_experts)
            frac_E = chosen_E * num_experts / (3 * is_here_T.sum())
            expected += is_here_T.sum() * (frac_E @ probs_LBTE[layer, b, is_here_T].mean(axis=0)) / num_layers
    mesh = make_mesh(MeshConfig(context=7))
    with jax.set_mesh(mesh):
        found = balance_sum(
            to_mesh(experts_LBTA.astype(np.int32), mesh, LAYERS_OF_TOKENS),
            to_mesh(probs_LBTE.astype(np.float32), mesh, LAYERS_OF_TOKENS),
            to_mesh(segments_BT, mesh, TOKENS),
        )
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_step_flops() -> None:
    (batch,) = pack([ROLLOUTS[5], ROLLOUTS[6]], [1.0, 1.0], PackingConfig(rows=1, seq_len=10))
    num_pairs = (1 + 2 + 3 + 4) + (1 + 2 + 3 + 4 + 5)
    assert step_flops(ARCH, [batch]) == 6 * num_active_params(ARCH) * 9 + 12 * 2 * 2 * 4 * num_pairs


def test_result_is_a_record_of_numpy(trainer: Trainer) -> None:
    result = trainer.train(batches())
    assert isinstance(result, StepResult)
    assert all(isinstance(value, float) for value in result.metrics.values())
    assert all(isinstance(x_BT, np.ndarray) for x_BT in (*result.logp_BT, *result.entropy_BT))
