"""The sampler side of a plan as text for people, and as plain numbers for files."""

import dataclasses
import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from rl_jax.plan.balance import Balance, alone_s
from rl_jax.plan.kv_budget import GIB, Layout
from rl_jax.plan.sampler_config import ServingConfig
from rl_jax.plan.sampler_plan import SamplerPlan


def text(plan: SamplerPlan, width: int = 120) -> str:
    """Return the report of a plan, as wide as `width` characters."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    for part in _parts(plan):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return out.getvalue()


def numbers(plan: SamplerPlan) -> dict[str, object]:
    """Return what a plan found, without its inputs, as JSON takes it."""
    budget, model = plan.budget, plan.model
    return {
        "verdict": plan.verdict,
        "reasons": list(plan.reasons),
        "model": {
            "name": model.name,
            "params": model.num_params,
            "active_params": model.num_active_params,
            "export_bytes": model.nbytes,
        },
        "memory": {
            **dataclasses.asdict(budget),
            "free_bytes": budget.free_bytes,
            "tokens": budget.tokens,
            "concurrency_mean": budget.concurrency(plan.mean_context),
            "concurrency_max": budget.concurrency(plan.config.serving.max_len),
        },
        "mean_context": plan.mean_context,
        "train_s": plan.train_s,
        "decode": None if plan.decode is None else dataclasses.asdict(plan.decode),
        "chosen": _balance_numbers(plan.chosen),
        "trainer_for_fleet": _balance_numbers(plan.trainer_for_fleet),
        "by_staleness": {bound: _balance_numbers(one) for bound, one in plan.by_staleness},
        "splits": [_balance_numbers(one) for one in plan.splits],
    }


def _balance_numbers(one: Balance | None) -> dict[str, object] | None:
    if one is None:
        return None
    loop = dataclasses.asdict(one.loop)
    more = {"staleness_mean": one.loop.staleness_mean, "staleness_max": one.loop.staleness_max}
    return {**dataclasses.asdict(one), "loop": loop | more, "sync_bytes": one.sync.total_bytes}


def _parts(plan: SamplerPlan) -> Iterator[RenderableType]:
    model, serving = plan.model, plan.config.serving
    yield (
        f"{model.name}: {model.num_params / 1e9:,.1f}B parameters, {model.num_active_params / 1e9:,.1f}B active, "
        f"{model.nbytes / 1e9:,.1f} GB as {model.fmt}; a replica: {_layout_name(serving)} {serving.gpu}"
    )
    if plan.verdict == "illegal":
        yield "ILLEGAL: vLLM cannot serve it so"
    elif plan.verdict == "does not fit":
        yield "DOES NOT FIT"
    yield from (f"  - {reason}" for reason in plan.reasons)
    yield _memory_table(plan)
    yield _layout_table(plan)
    if plan.chosen is not None:
        yield from _loop_parts(plan, plan.chosen)


def _memory_table(plan: SamplerPlan) -> Table:
    budget, max_len = plan.budget, plan.config.serving.max_len
    table = _table("memory of one GPU", "what", "GiB", "note")
    utilization = plan.config.serving.memory_utilization
    table.add_row("usable", _gib(budget.usable_bytes), f"{utilization:g} of {_gib(budget.memory_bytes)}")
    table.add_row("weights", _gib(budget.weight_bytes), "")
    given = "as configured" if plan.config.serving.activation_reserve_gib else "estimated from max_batched_tokens"
    table.add_row("activations", _gib(budget.activation_bytes), given)
    table.add_row("other", _gib(budget.other_bytes), "context, graphs, buffers: assumed")
    table.add_row(
        "KV cache", _gib(budget.free_bytes), f"{budget.token_bytes:,} bytes a token on a GPU", end_section=True
    )
    table.add_row("tokens of a replica", f"{budget.tokens:,}", f"{budget.ranks} ranks, blocks of {budget.block_size}")
    mean = plan.mean_context
    table.add_row("sequences at once", f"{budget.concurrency(mean):,}", f"of the mean length of {mean:,.0f} tokens")
    table.add_row("", f"{budget.concurrency(max_len):,}", f"of the full length of {max_len:,} tokens")
    return table


def _layout_table(plan: SamplerPlan) -> Table:
    table = _table(
        "best layout of each number of GPUs", "GPUs", "layout", "KV tokens", "a GPU", "full-length", "verdict"
    )
    for layout in plan.layouts:
        budget, num_gpus = layout.budget, layout.serving.num_gpus
        table.add_row(
            str(num_gpus),
            _layout_name(layout.serving),
            f"{budget.tokens:,}",
            f"{budget.tokens / num_gpus:,.0f}",
            f"{budget.concurrency(layout.serving.max_len):,}",
            _layout_verdict(layout),
        )
    return table


def _layout_verdict(layout: Layout) -> str:
    if layout.faults:
        return f"illegal: {layout.faults[0]}"
    missing = layout.budget.missing_bytes(layout.serving.max_len)
    return f"lacks {missing / GIB:,.1f} GiB a GPU" if missing else "fits"


def _loop_parts(plan: SamplerPlan, chosen: Balance) -> Iterator[RenderableType]:
    loop, config = chosen.loop, plan.config
    if plan.decode is not None:
        step = plan.decode
        yield (
            f"a decode step of a full replica: {1e3 * step.total_s:.1f} ms = {1e3 * step.overhead_s:.1f} overhead + "
            f"{1e3 * step.linear_s:.1f} weights + {1e3 * step.attention_s:.1f} KV + {1e3 * step.links_s:.1f} links"
        )
    yield (
        f"a training step on {config.trainer.nodes} node(s): {plan.train_s:,.1f} s, from {plan.train_source}; elsewhere in "
        "inverse proportion to the nodes"
    )
    yield f"an update: {_gb(chosen.sync.total_bytes)} to {chosen.sync.num_copies} server(s)"
    rows = [("chosen", chosen)]
    if plan.trainer_for_fleet is not None:
        rows.append(("trainer for this fleet", plan.trainer_for_fleet))
    if plan.best_split is not None:
        rows.append((f"best split of {config.search.total_nodes}", plan.best_split))
    yield _balance_table("nodes that balance", rows)
    yield _why(plan, chosen)
    if plan.by_staleness:
        rows = [(f"max_staleness={bound}", one) for bound, one in plan.by_staleness]
        yield _balance_table("the chosen nodes under other bounds on staleness", rows)
    if len(plan.splits) > 1:
        splits = [("best" if one is plan.best_split else "", one) for one in plan.splits]
        yield _balance_table(f"splits of {config.search.total_nodes} nodes", splits)
    elif config.search.total_nodes and not plan.splits:
        yield f"search.total_nodes={config.search.total_nodes}: too few for one cell and one trainer node"
    shares = ", ".join(f"{age}: {num / sum(loop.staleness.values()):.0%}" for age, num in loop.staleness.items())
    drops = ", ".join(f"{num:,} {reason}" for reason, num in loop.drops.items()) or "none"
    yield f"staleness of the trained rollouts, chosen: {shares}; dropped: {drops}"
    yield (
        f"in flight: {loop.inflight:,.0f} rollouts for {loop.flight_s:,.0f} s each, {loop.running:,.0f} of them decoding; a batch "
        f"holds {loop.trained_tokens:,.0f} tokens; paused {loop.paused_frac:.1%} of the time"
    )


def _why(plan: SamplerPlan, chosen: Balance) -> str:
    """Say how the fleet was chosen, and what bounds the step."""
    search, alone = plan.config.search, alone_s(chosen)
    if search.cells:
        how = "the fleet is as configured"
    elif chosen.loop.step_s <= (1 + search.tolerance) * alone:
        how = "the smallest fleet that keeps the trainer busy"
    else:
        how = (
            "no fleet keeps the trainer busy: the longest rollouts of a batch take longer on any, so this is the smallest "
            "that comes near the shortest step; a higher max_staleness, shorter rollouts or a smaller trainer would help"
        )
    return f"chosen: {how}; its trainer alone would take {alone:,.1f} s a step"


def _balance_table(title: str, rows: list[tuple[str, Balance]]) -> Table:
    columns = ("trainer\nnodes", "fleet\nnodes", "cells", "step\ns", "trainer\nidle", "fleet\nidle", "slots\nused")
    table = _table(title, "", *columns, "staleness\nmean, max", "sampled\ntokens/s", "update s\n+ pause s")
    for name, one in rows:
        loop = one.loop
        table.add_row(
            name,
            str(one.trainer_nodes),
            f"{one.fleet_nodes:g}",
            str(one.cells),
            f"{loop.step_s:,.1f}",
            f"{loop.trainer_idle_frac:.0%}",
            f"{loop.sampler_idle_frac:.0%}",
            f"{loop.occupancy:.0%}",
            f"{loop.staleness_mean:.2f}, {loop.staleness_max}",
            f"{loop.sampled_tokens_per_s:,.0f}",
            f"{one.sync.transfer_s:.1f} + {one.sync.pause_s:.1f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in table.columns[1:-1]:
        column.justify = "right"
    return table


def _layout_name(serving: ServingConfig) -> str:
    tensor, data = serving.tensor, serving.data
    parallel = " + EP" if serving.expert_parallel else ""
    return f"TP{tensor}" + (f" x DP{data}" if data > 1 else "") + parallel


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
