"""What the planner predicts for the published 744B-A40B run, beside what was reported: python -m experiments 0007."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from experiments.harness import Report, conditions, is_quick, publish
from rl_jax.config import load
from rl_jax.plan.balance import Balance, Balancer
from rl_jax.plan.kv_budget import kv_budget
from rl_jax.plan.sampler import SamplerPlanFile
from rl_jax.plan.sampler_config import SamplerPlanConfig
from rl_jax.plan.sampler_plan import SamplerPlan, plan_sampler
from rl_jax.plan.served import latent_model
from rl_jax.plan.speed import Speed

HERE = Path(__file__).parent
REPORTED_STEP_S, REPORTED_ROLLOUT_S, REPORTED_TRAIN_S = 300.0, 300.0, 222.0
ENGINES = (0.5, 1.0, 1.4)
"""Factors of the assumed shares of bandwidth and peak; the overhead of a layer is divided by them."""
LENGTHS = (0.5, 1.0, 1.5, 2.0)
"""Factors of the assumed tokens of a rollout."""
WAITS_MIN = (0.0, 10.0, 20.0, 30.0, 40.0)
"""Environment minutes of a rollout."""
MFUS = (0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Cell:
    """One simulated variant of the run."""

    length: float
    engine: float
    wait_min: float
    mean_context: float
    pair: Balance
    rollout_s: float
    """Seconds of a step if the trainer took no time."""


def variant(config: SamplerPlanConfig, length: float, engine: float, wait_min: float) -> SamplerPlanConfig:
    """Return the run with longer rollouts, a better engine, slower environments."""
    lengths, serving = config.lengths, config.serving
    return replace(
        config,
        lengths=replace(
            lengths,
            sampled_tokens=lengths.sampled_tokens * length,
            reply_tokens=lengths.reply_tokens * length,
            env_s=60 * wait_min / lengths.turns,
        ),
        serving=replace(
            serving,
            memory_frac=serving.memory_frac * engine,
            compute_frac=serving.compute_frac * engine,
            network_frac=serving.network_frac * engine,
            layer_overhead_us=serving.layer_overhead_us / engine,
        ),
    )


def simulated(config: SamplerPlanConfig, length: float, engine: float, wait_min: float) -> Cell:
    """Simulate one variant on the published nodes."""
    changed = variant(config, length, engine, wait_min)
    assert changed.model is not None
    model = latent_model(changed.model, changed.serving.format)
    tries = Balancer(model, changed, kv_budget(model, changed.serving), changed.trainer.step_s)
    pair = tries.at(changed.trainer.nodes, changed.search.cells)
    alone = tries.at(changed.trainer.nodes, changed.search.cells, is_trainer_instant=True)
    mean_context = pair.loop.trained_tokens / changed.loop.batch_size
    return Cell(length, engine, wait_min, mean_context, pair, alone.loop.step_s)


def table(config: SamplerPlanConfig, plan: SamplerPlan, grid: Sequence[Cell], waits: Sequence[Cell]) -> list[list[str]]:
    """Return the rows: quantity, reported, predicted."""
    base, best, budget = plan.chosen, plan.best_split, plan.budget
    assert base is not None and best is not None
    cap, batch = config.loop.max_inflight, config.loop.batch_size
    rate_s = REPORTED_STEP_S / batch
    flops = Speed(plan.model, config.serving).training_flops(batch * plan.mean_context, plan.mean_context)
    mfus = [flops / (config.trainer.nodes * config.trainer.node_flops_s * mfu) for mfu in MFUS]
    rows = [
        [
            "parameters, all / active",
            "744B / 40B",
            f"{plan.model.num_params / 1e9:.1f}B / {plan.model.num_active_params / 1e9:.1f}B",
        ],
        [
            "rollouts of 131,072 tokens that eight decode nodes hold",
            "-",
            f"{budget.concurrency(config.serving.max_len):,} ({budget.tokens / 1e6:.1f}M tokens of KV cache)",
        ],
        ["mean tokens at which 2,048 rollouts fill that cache", "-", f"{budget.tokens / cap:,.0f}"],
        [
            "time in flight of a rollout, from the reported numbers alone (Little's law)",
            "-",
            f"{cap * rate_s / 60:.0f} min if all {cap:,} are in flight",
        ],
        [
            f"training step, {batch} rollouts of {plan.mean_context:,.0f} tokens (assumed), at MFU {', '.join(f'{m:.0%}' for m in MFUS)}",
            "3.7 min",
            ", ".join(f"{s / 60:.1f}" for s in mfus) + " min",
        ],
        ["MFU (of bf16 peak) that 3.7 min mean at that length", "-", f"{MFUS[0] * mfus[0] / REPORTED_TRAIN_S:.0%}"],
        ["rollout time of a step, environments instant", "5.0 min", f"{waits[0].rollout_s / 60:.1f} min"],
        ["step, environments instant", "< 5 min", f"{base.loop.step_s / 60:.1f} min"],
    ]
    for cell in waits[1:]:
        loop = cell.pair.loop
        rows.append(
            [
                f"step, {cell.wait_min:g} min of environment in a rollout",
                "< 5 min",
                f"{loop.step_s / 60:.1f} min, rollout side {cell.rollout_s / 60:.1f}, trainer idle {loop.trainer_idle_frac:.0%}, "
                f"staleness {loop.staleness_mean:.1f}, max {loop.staleness_max}",
            ]
        )
    rows += [
        [
            "staleness, environments instant",
            "bound 8",
            f"mean {base.loop.staleness_mean:.1f}, max {base.loop.staleness_max}",
        ],
        ["bytes of an update", "-", f"{base.sync.total_bytes / 1e12:.2f} TB to {base.sync.num_copies} servers"],
        ["pause of an update", "-", f"{base.sync.pause_s:.1f} s"],
        [
            "best split of 28 nodes, in cells of 16, environments instant",
            "12 + 16",
            f"{best.trainer_nodes} + {best.fleet_nodes:g}",
        ],
    ]
    for length in sorted({cell.length for cell in grid}):
        cells = [cell for cell in grid if cell.length == length]
        rows.append(
            [
                f"sensitivity: {cells[0].mean_context:,.0f} tokens a rollout; engine at {', '.join(f'{c.engine:g}' for c in cells)} "
                "of the assumed shares: rollout side; step",
                "5.0; < 5 min",
                f"{', '.join(f'{c.rollout_s / 60:.1f}' for c in cells)}; "
                f"{', '.join(f'{c.pair.loop.step_s / 60:.1f}' for c in cells)} min",
            ]
        )
    return rows


def draw(plan: SamplerPlan, grid: Sequence[Cell], waits: Sequence[Cell]) -> Figure:
    """Draw step time over length and over environment time."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for engine in sorted({cell.engine for cell in grid}):
        cells = [cell for cell in grid if cell.engine == engine]
        context = [cell.mean_context / 1e3 for cell in cells]
        (line,) = left.plot(
            context, [c.rollout_s / 60 for c in cells], "o-", label=f"rollout side, engine x {engine:g}"
        )
        left.plot(context, [c.pair.loop.step_s / 60 for c in cells], ":", color=line.get_color())
    left.set(xlabel="mean tokens of a rollout, thousands (assumed)", ylabel="minutes", ylim=(0, None))
    left.set_title("environments instant; dotted: with the trainer", loc="left", fontsize=9)
    minutes = [cell.wait_min for cell in waits]
    right.plot(minutes, [c.rollout_s / 60 for c in waits], "o-", label="rollout side")
    right.plot(minutes, [c.pair.loop.step_s / 60 for c in waits], "s-", label="step")
    right.plot(minutes, [c.pair.loop.staleness_mean for c in waits], "^--", color="0.5", label="staleness, versions")
    right.set(xlabel="environment minutes of a rollout (assumed)", ylim=(0, None))
    right.set_title(f"{plan.mean_context / 1e3:.0f}k tokens a rollout", loc="left", fontsize=9)
    for axes in (left, right):
        axes.axhline(5.0, color="k", linewidth=0.8)
        axes.axhline(3.7, color="k", linewidth=0.8, linestyle="--")
        axes.annotate(
            "reported: rollouts 5.0, trainer 3.7 min",
            (0.02, 5.05),
            (0.02, 5.05),
            xycoords=("axes fraction", "data"),
            fontsize=7,
        )
        axes.legend(frameon=False, fontsize=7)
    return figure


def main() -> None:
    """Plan, simulate the variants, publish."""
    quick = is_quick(__doc__)
    where = conditions()
    config = load(SamplerPlanFile, [HERE / "run.toml"]).sampler_plan
    if quick:
        config = replace(config, search=replace(config.search, warmup_steps=2, steps=2, staleness=(), total_nodes=28))
    plan = plan_sampler(None, None, config)
    lengths, engines, minutes = (LENGTHS[:2], ENGINES[1:2], WAITS_MIN[:2]) if quick else (LENGTHS, ENGINES, WAITS_MIN)
    grid = [simulated(config, length, engine, 0.0) for length in lengths for engine in engines]
    waits = [simulated(config, 1.0, 1.0, wait_min) for wait_min in minutes]
    fine = replace(config, lengths=replace(config.lengths, turns=5 * config.lengths.turns))
    check = None if quick else simulated(fine, 1.0, 1.0, 20.0)
    step = plan.decode
    assert step is not None
    notes = [
        f"a decode step with the cache full: {1e3 * step.total_s:.0f} ms = {1e3 * step.overhead_s:.1f} overhead + "
        f"{1e3 * step.linear_s:.1f} weights + {1e3 * step.attention_s:.1f} KV + {1e3 * step.links_s:.1f} links",
    ]
    if check:
        coarse = next(cell for cell in waits if cell.wait_min == check.wait_min)
        notes.append(
            f"40 turns instead of 8 in a rollout of 20 min of environment: step {check.pair.loop.step_s / 60:.2f} min, "
            f"with 8 turns {coarse.pair.loop.step_s / 60:.2f} min"
        )
    report = Report(
        title="744B-A40B on 28 H200 nodes: reported and predicted",
        columns=("quantity", "reported", "predicted"),
        rows=table(config, plan, grid, waits),
        notes=notes,
        raw={"grid": [asdict(cell) for cell in grid], "environment": [asdict(cell) for cell in waits]},
        figure=draw(plan, grid, waits),
    )
    publish(HERE, report, where, quick)


if __name__ == "__main__":
    main()
