"""The sampler side of a plan: memory, legality, the loop, and the nodes that balance a trainer.

One function, for python -m rl_jax.plan.sampler and for the compiled plan alike, which knows the trainer's step time.
"""

from dataclasses import dataclass
from typing import Literal

from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture
from rl_jax.plan.balance import Balance, Balancer
from rl_jax.plan.kv_budget import GIB, KvBudget, Layout, kv_budget, layouts, serving_faults
from rl_jax.plan.lengths import Lengths
from rl_jax.plan.sampler_config import SamplerPlanConfig
from rl_jax.plan.served import ServedModel, latent_model, served_model
from rl_jax.plan.speed import Speed, StepTime


@dataclass(frozen=True, kw_only=True)
class SamplerPlan:
    """What the sampler side of a run would be like."""

    model: ServedModel
    config: SamplerPlanConfig
    verdict: Literal["fits", "does not fit", "illegal"]
    reasons: tuple[str, ...]
    """Why it does not fit, or is illegal."""
    budget: KvBudget
    layouts: tuple[Layout, ...]
    """The best layout of each number of GPUs."""
    mean_context: float
    """Mean tokens of a finished rollout."""
    train_s: float
    """Of the trainer's nodes."""
    train_source: str
    """Where train_s comes from."""
    decode: StepTime | None = None
    """A step of a replica with all that runs at once, at mean context."""
    chosen: Balance | None = None
    """The configured pair, or the fleet that balances the trainer."""
    trainer_for_fleet: Balance | None = None
    """The smallest trainer that keeps up with the chosen fleet."""
    by_staleness: tuple[tuple[int, Balance], ...] = ()
    """The chosen pair under each bound of search.staleness."""
    splits: tuple[Balance, ...] = ()
    """Splits of search.total_nodes."""

    @property
    def best_split(self) -> Balance | None:
        """The split with the shortest step."""
        return min(self.splits, key=lambda one: one.loop.step_s, default=None)


def plan_sampler(
    arch: Architecture | None, trainer_step_s: float | None, config: SamplerPlanConfig, name: str = ""
) -> SamplerPlan:
    """Plan the sampler side for an architecture, or for config.model.

    Args:
        trainer_step_s: seconds of a training step on config.trainer.nodes nodes; None = as the config says.
        name: of the model, for reports.

    Raises:
        ConfigError: no model, or lengths that no context holds. What does not fit, or vLLM refuses, is a result.
    """
    model = _model(arch, config, name)
    is_step = trainer_step_s is None or trainer_step_s > 0
    refuse([None if is_step else f"trainer_step_s={trainer_step_s}: must be positive"])
    serving = config.serving
    budget = kv_budget(model, serving)
    mean_context = _mean_context(config)
    faults, missing = serving_faults(model, serving), budget.missing_bytes(serving.max_len)
    too_large = [_missing(budget, serving.max_len, missing)] if missing else []
    train_s, source = _train_s(model, config, trainer_step_s, mean_context)
    plan = SamplerPlan(
        model=model,
        config=config,
        verdict="illegal" if faults else "does not fit" if too_large else "fits",
        reasons=(*faults, *too_large),
        budget=budget,
        layouts=tuple(layouts(model, serving)),
        mean_context=mean_context,
        train_s=train_s,
        train_source=source,
    )
    return plan if plan.reasons else _with_loop(plan)


def _with_loop(plan: SamplerPlan) -> SamplerPlan:
    config, search = plan.config, plan.config.search
    balancer = Balancer(plan.model, config, plan.budget, plan.train_s)
    nodes = config.trainer.nodes
    chosen = balancer.at(nodes, search.cells) if search.cells else balancer.fleet_for(nodes)
    running = plan.budget.concurrency(plan.mean_context)
    fields = vars(plan) | {
        "decode": Speed(plan.model, config.serving).step(running, running * plan.mean_context),
        "chosen": chosen,
        "trainer_for_fleet": balancer.trainer_for(chosen.cells),
        "by_staleness": tuple((s, balancer.with_staleness(s, nodes, chosen.cells)) for s in search.staleness),
        "splits": tuple(balancer.splits(search.total_nodes)) if search.total_nodes else (),
    }
    return SamplerPlan(**fields)


def _model(arch: Architecture | None, config: SamplerPlanConfig, name: str) -> ServedModel:
    if config.model:
        return latent_model(config.model, config.serving.format)
    if arch is None:
        raise ConfigError(["model: none; give [model] path or architecture, or [sampler_plan.model]"])
    return served_model(arch, config.serving.format, name)


def _mean_context(config: SamplerPlanConfig) -> float:
    """Return the mean tokens of finished rollouts, cuts at the context included, by drawing 2,048 groups of two."""
    lengths = Lengths(config.lengths, config.serving.max_len, config.search.seed)
    rollouts = [turns for _ in range(2048) for turns in lengths.group(2)]
    return sum(turn.new_tokens + turn.sampled_tokens for turns in rollouts for turn in turns) / len(rollouts)


def _train_s(
    model: ServedModel, config: SamplerPlanConfig, given_s: float | None, mean_context: float
) -> tuple[float, str]:
    trainer = config.trainer
    if given_s:
        return given_s, "the compiled plan"
    if trainer.step_s:
        return trainer.step_s, "trainer.step_s"
    flops = Speed(model, config.serving).training_flops(config.loop.batch_size * mean_context, mean_context)
    return flops / (trainer.nodes * trainer.node_flops_s * trainer.mfu), f"model FLOPs at trainer.mfu={trainer.mfu:g}"


def _missing(budget: KvBudget, length: int, missing: int) -> str:
    what = "of the weights" if budget.free_bytes < 0 else f"of one sequence of {length:,} tokens"
    return (
        f"a GPU lacks {missing / GIB:.1f} GiB: {budget.usable_bytes / GIB:.1f} usable, {budget.weight_bytes / GIB:.1f} "
        f"weights, {(budget.activation_bytes + budget.other_bytes) / GIB:.1f} activations and other, so no room for all "
        f"{what}"
    )
