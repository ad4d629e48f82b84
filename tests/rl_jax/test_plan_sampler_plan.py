"""The whole sampler side: searches against trying every number, updates, reports, and what does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax.config import ConfigError, load, to_toml
from rl_jax.models.architecture import Architecture
from rl_jax.plan import sampler
from rl_jax.plan.balance import Balancer, alone_s, sync_of
from rl_jax.plan.kv_budget import kv_budget
from rl_jax.plan.lengths import LengthConfig
from rl_jax.plan.sampler_config import (
    LoopConfig,
    SamplerPlanConfig,
    SearchConfig,
    ServingConfig,
    SyncConfig,
    TrainerConfig,
)
from rl_jax.plan.sampler_plan import SamplerPlan, plan_sampler
from rl_jax.plan.sampler_report import numbers, text
from rl_jax.plan.served import served_model

ARCH = Architecture(
    vocab_size=151936, width=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_width=128, num_experts=128,
    num_active_experts=8, expert_width=768, tie_embeddings=False, max_positions=262144,
)  # fmt: skip
CONFIG = SamplerPlanConfig(
    serving=ServingConfig(tensor=2, max_len=32_768, max_num_seqs=24),
    lengths=LengthConfig(sampled_tokens=1500, sigma=0.4, prompt_tokens=300),
    loop=LoopConfig(batch_size=64, group_size=8, max_staleness=3),
    trainer=TrainerConfig(nodes=2, step_s=20.0),
    search=SearchConfig(warmup_steps=4, steps=6, staleness=(0, 2)),
)
EXPERIMENT = Path(__file__).parents[2] / "experiments/0007-trillion-scale-prediction/run.toml"


@pytest.fixture(scope="module")
def plan() -> SamplerPlan:
    return plan_sampler(ARCH, None, replace(CONFIG, search=replace(CONFIG.search, total_nodes=5)), "tiny fleet")


def balancer(config: SamplerPlanConfig = CONFIG) -> Balancer:
    model = served_model(ARCH, "fp8-block")
    return Balancer(model, config, kv_budget(model, config.serving), config.trainer.step_s)


def test_the_chosen_fleet_is_the_smallest_that_keeps_the_trainer_busy(plan: SamplerPlan):
    chosen = plan.chosen
    assert plan.verdict == "fits" and chosen is not None
    pairs = [balancer().at(2, cells) for cells in range(1, chosen.cells + 1)]
    busy = [pair.loop.step_s <= 1.05 * alone_s(pair) for pair in pairs]
    assert busy == [False] * (chosen.cells - 1) + [True]
    assert chosen.cells > 1
    assert chosen == pairs[-1]


def test_the_trainer_found_is_the_smallest_that_keeps_up(plan: SamplerPlan):
    assert plan.chosen is not None and plan.trainer_for_fleet is not None
    cells, nodes = plan.chosen.cells, plan.trainer_for_fleet.trainer_nodes
    tries = balancer()
    limit_s = 1.05 * tries.at(1, cells, is_trainer_instant=True).loop.step_s
    enough = [tries.at(n, cells).loop.step_s <= limit_s for n in range(1, nodes + 1)]
    assert enough == [False] * (nodes - 1) + [True]


def test_the_best_split_is_the_best_of_all(plan: SamplerPlan):
    best = plan.best_split
    assert best is not None
    # A cell is a quarter of a node: 1..16 cells leave a trainer node of five.
    tries = [balancer().at(int(5 - cells / 4), cells) for cells in range(1, 17)]
    assert best.loop.step_s == min(pair.loop.step_s for pair in tries)
    assert all(one.nodes <= 5 for one in plan.splits)


def test_a_bound_that_no_fleet_reaches_is_said():
    config = replace(CONFIG, trainer=TrainerConfig(nodes=2, step_s=0.5), search=replace(CONFIG.search, steps=4))
    plan = plan_sampler(ARCH, None, config)
    assert plan.chosen is not None
    assert plan.chosen.loop.trainer_idle_frac > 0.3
    assert "no fleet keeps the trainer busy" in text(plan)


def test_compiled_seconds_take_the_place_of_the_config():
    plan = plan_sampler(ARCH, 33.0, replace(CONFIG, search=replace(CONFIG.search, cells=2)))
    assert (plan.train_s, plan.train_source) == (33.0, "the compiled plan")
    assert plan.chosen is not None
    assert (plan.chosen.train_s, plan.chosen.cells) == (33.0, 2)


def test_seconds_from_flops_by_hand():
    lengths = LengthConfig(kind="fixed", sampled_tokens=3000, prompt_tokens=1000)
    config = replace(
        CONFIG, lengths=lengths, trainer=TrainerConfig(nodes=3, mfu=0.25), search=replace(CONFIG.search, cells=1)
    )
    plan = plan_sampler(ARCH, None, config)
    weights = plan.model.num_active_params
    flops = 3 * 64 * 4000 * (2 * weights + 4 * 48 * 32 * 128 * 2000)
    assert plan.mean_context == 4000
    assert plan.train_s == pytest.approx(flops / (3 * 8 * 989e12 * 0.25))


def test_an_update_by_hand():
    serving = replace(CONFIG.serving, prefill_gpus=8, prefill_servers=2)
    sync = SyncConfig(changed_frac=0.5, network_frac=0.25, swap_bytes_s=1e11, swap_s=2.0)
    config = replace(CONFIG, serving=serving, sync=sync)
    model = served_model(ARCH, "fp8-block")
    budget = kv_budget(model, serving)
    update = sync_of(model, config, budget, trainer_nodes=2, cells=5)
    half = model.nbytes / 2
    assert update.num_copies == 15
    assert update.total_bytes == 15 * half
    # Sending 15 copies from two nodes takes longer than receiving one with two GPUs.
    assert update.transfer_s == pytest.approx(15 * half / (2 * 400e9) / 0.25)
    assert update.pause_s == pytest.approx(2.0 + budget.weight_bytes / 2 / 1e11)
    many = sync_of(model, config, budget, trainer_nodes=40, cells=5)
    assert many.transfer_s == pytest.approx(half / (2 * 50e9) / 0.25)
    whole = replace(config, sync=replace(sync, is_staged=False))
    assert sync_of(model, whole, budget, 2, 5).pause_s == pytest.approx(update.transfer_s + update.pause_s)


def test_what_does_not_fit_is_a_result():
    plan = plan_sampler(ARCH, None, replace(CONFIG, serving=replace(CONFIG.serving, memory_utilization=0.1)))
    assert (plan.verdict, plan.chosen) == ("does not fit", None)
    # 15.1 GiB a GPU, and half of 30.5 GB of weights (14.5 GiB) besides 5 GiB of activations and other
    assert "a GPU lacks" in plan.reasons[0]
    said = text(plan)
    assert "DOES NOT FIT" in said and "fits" in said  # other layouts in the table
    assert json.loads(json.dumps(numbers(plan)))["verdict"] == "does not fit"


def test_an_illegal_layout_is_a_result():
    plan = plan_sampler(ARCH, None, replace(CONFIG, serving=replace(CONFIG.serving, tensor=4)))
    assert plan.verdict == "illegal"
    assert "try tensor=2" in plan.reasons[0]
    assert "ILLEGAL" in text(plan)


def test_a_plan_without_a_model_is_refused():
    with pytest.raises(ConfigError, match=r"model: none; give \[model\] path or architecture"):
        plan_sampler(None, None, CONFIG)
    with pytest.raises(ConfigError, match=r"trainer_step_s=-1\.0: must be positive"):
        plan_sampler(ARCH, -1.0, CONFIG)


def test_the_report_says_what_was_found(plan: SamplerPlan):
    said, found = text(plan), numbers(plan)
    assert plan.chosen is not None
    assert "tiny fleet: 30.5B parameters, 3.0B active" in said
    assert "the smallest fleet that keeps the trainer busy" in said
    assert f"{plan.chosen.loop.step_s:,.1f}" in said
    assert json.loads(json.dumps(found))["chosen"]["loop"]["step_s"] == plan.chosen.loop.step_s


def write(folder: Path, config: SamplerPlanConfig = CONFIG) -> Path:
    file = folder / "plan.toml"
    file.write_text(
        to_toml(sampler.SamplerPlanFile(model=sampler.cli.ModelConfig(architecture=ARCH), sampler_plan=config))
        + "\n[plan]\nchip = 'v5p'\n"  # a table of the compiled plan
    )
    return file


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path, replace(CONFIG, search=replace(CONFIG.search, cells=1, staleness=())))
    assert sampler.main(["--config", str(file), "--json", "--trainer-step-s", "50"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["train_s"] == 50
    assert found["chosen"]["loop"]["step_s"] >= 50
    assert sampler.main(["--config", str(file), "--dry-run"]) == 0
    assert "[sampler_plan.serving]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--set", "sampler_plan.serving.tensorr=2"],
            "sampler_plan.serving.tensorr: unknown key; did you mean tensor?",
        ),
        (["--set", "sampler_plan.loop.group_size=7"], "sampler_plan.loop.batch_size=64: must be a multiple"),
        (["--set", "sampler_plan.lengths.prompt_tokens=40000"], "prompt_tokens=40000: leaves no room in a context"),
        (["--trainer-step-s", "0"], "trainer_step_s=0.0: must be positive"),
    ],
)
def test_the_command_refuses_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
):
    assert sampler.main(["--config", str(write(tmp_path)), *options]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_the_command_needs_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert sampler.main([]) == 2
    assert "give a TOML file with a table [sampler_plan]" in capsys.readouterr().err
    file = tmp_path / "x.toml"
    file.write_text("[run]\nname = 'x'\n")
    assert sampler.main(["--config", str(file)]) == 2
    assert "sampler_plan: missing" in capsys.readouterr().err


def test_the_published_run_fits_as_published():
    config = load(sampler.SamplerPlanFile, [EXPERIMENT]).sampler_plan
    search = replace(config.search, total_nodes=0, staleness=(), warmup_steps=2, steps=3)
    small = replace(config.loop, batch_size=32, max_inflight=256)
    plan = plan_sampler(None, None, replace(config, search=search, loop=small))
    assert plan.verdict == "fits"
    assert plan.model.num_params == pytest.approx(744e9, rel=0.002)
    assert plan.chosen is not None
    assert (plan.chosen.trainer_nodes, plan.chosen.fleet_nodes) == (12, 16)
