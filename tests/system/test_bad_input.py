"""Bad input of every kind: a clear message with the place and the value, an exit code, no traceback, nothing left over."""

import json
import resource
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import (
    MODEL,
    ROOT,
    TINY,
    dropped_of,
    finish,
    folder_in,
    options,
    rows_of,
    run,
    started,
    steps_of,
    tiny,
    trained_of,
    wait_until,
)

from rl_jax import evaluate, serve, sft, train
from rl_jax.checkpoint import whole_steps
from rl_jax.cli import RunConfig
from rl_jax.config import load, to_toml
from rl_jax.models.architecture import Architecture, to_hf_config
from rl_jax.tokenizer import Tokenizer

Main = Callable[[list[str]], int]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the environments of tiny.toml are found from there


def refused(main: Main, args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command that must be refused says."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def written(folder: Path, text: str) -> Path:
    file = folder / "bad.toml"
    file.write_text(text)
    return file


# ---- the config


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("optim.warmup_step=1", "optim.warmup_step: unknown key; did you mean warmup_steps? allowed: "),
        ("optim.lr=fast", "optim.lr='fast': expected float"),
        ("run.steps=1.5", "run.steps=1.5: expected int"),
        ("orchestrator.group_size=1", "orchestrator.group_size=1: advantage.type='grpo' compares members"),
        ("orchestrator.batch_size=9", "orchestrator.batch_size=9: must be a multiple of group_size=4; try 8 or 12"),
        ("orchestrator.max_staleness=-1", "orchestrator.max_staleness=-1: must be between 0 (synchronous)"),
        ("packing.seq_len=16", "sampler.max_len=32: a rollout must fit in a row of packing.seq_len=16"),
        ("sampler.max_len=128", "sampler.max_len=128: the model has max_positions=64"),
        ("episode.max_tokens=32", "episode.max_tokens=32: leaves no room for a prompt in sampler.max_len=32"),
        ("model.path=nowhere", "model.path='nowhere': give either model.path or a table model.architecture, not both"),
        ("envs=[]", "envs: no environment to train on"),
        ('envs=[{id = "revers_text"}]', "unknown environment; did you mean reverse_text?"),
        ("mesh.expert=3", "mesh.expert=3 must divide model.num_experts=4; try 2 or 4"),
        ("mesh.tensor=3", "mesh.tensor=3 must divide model.num_kv_heads=1; try 1"),
        ("mesh.context=3", "mesh.context=3 must divide model.num_experts=4; try 2 or 4"),
        ("mesh.context=3", "packing.seq_len=32: mesh.context=3 needs a multiple of 6"),
        ("model.architecture.router_scores=sigmoid", "router_scores='sigmoid': a model of family 'qwen3_moe' cannot"),
        ("mesh.data=3", "packing.rows=8: the mesh splits rows 3 ways (data*fsdp*expert); try 9"),
        ("run.seed=-1", "run.seed=-1: must be between 0 and 4294967295"),
        ("run.seed=4294967296", "run.seed=4294967296: must be between 0 and 4294967295"),
        ('run.name="a/b"', "run.name='a/b': must be a plain folder name"),
        ('run.name="a\\nb"', r"run.name='a\nb': must be a plain folder name"),
        ("evaluate.temperature=inf", "evaluate.temperature=inf: expected a finite number"),
        ("model.architecture.norm_eps=-1", "model.architecture.norm_eps=-1.0: must be positive"),
        ("model.architecture.shared_expert_width=-1", "model.architecture.shared_expert_width=-1: must be at least 0"),
        ("model.architecture.vocab_size=100", "model.architecture.vocab_size=100: tokenizer: "),
        ("sft.steps=3", "sft.steps=3: needs documents; give envs or data"),
        ("episode.return_routed_experts=true", "episode.return_routed_experts=true: set sampler.routed_experts=true"),
        ("nonsense", "--set nonsense: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("run.steps.more=3", "--set run.steps.more=3: run.steps is 4, not a table"),
    ],
)
def test_bad_setting(setting: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(train.main, tiny(tmp_path / "runs", setting), capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("sft.steps=2", "sft.data=/nope"), "sft.data='/nope': no such file"),
        (("metrics.wandb=true",), "metrics.wandb=true: the package wandb is not installed"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry"])
def test_what_a_run_would_miss_later_is_refused_first(
    settings: tuple[str, ...], says: str, dry: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(train.main, [*tiny(tmp_path / "runs", *settings), *dry], capsys)
    assert not (tmp_path / "runs").exists()


def test_mesh_of_more_devices_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(train.main, tiny(tmp_path / "runs", "mesh.fsdp=16", "packing.rows=16"), capsys)
    assert "needs 16 devices, but there are 8 (cpu); make an axis smaller" in told
    assert not (tmp_path / "runs").exists()


def test_ulysses_needs_key_value_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(train.main, tiny(tmp_path, "mesh.context=2", "forward.context_attention=ulysses"), capsys)
    assert "mesh.tensor*context=2 must divide model.num_kv_heads=1; try 1, or 'all_gather'" in told


def test_all_faults_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(train.main, tiny(tmp_path, "optim.lr=fast", "run.stps=3", "packing.rows=0"), capsys)
    assert "3 fault(s)" in told
    for key in ("optim.lr", "run.stps", "packing.rows"):
        assert f"- {key}" in told


def test_config_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.toml"
    assert f"{missing}: cannot read the config file" in refused(train.main, ["--config", str(missing)], capsys)
    broken = written(tmp_path, "[run\nsteps = 3")
    assert f"{broken}: not valid TOML" in refused(train.main, ["--config", str(broken)], capsys)
    empty = written(tmp_path, "")
    assert "model: missing; it has no default" in refused(train.main, ["--config", str(empty)], capsys)
    assert "--config: give a TOML file" in refused(train.main, [], capsys)


def test_config_files_merge_left_to_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = written(tmp_path, "[run]\nsteps = 9\n[optim]\nlr = 0.5\n")
    for files, steps, lr in (([TINY, MODEL, top], 9, 0.5), ([top, TINY, MODEL], 4, 1e-3)):
        assert train.main([*options(files, []), "--dry-run"]) == 0
        told = tomllib.loads(capsys.readouterr().out)
        assert (told["run"]["steps"], told["run"]["seed"], told["optim"]["lr"]) == (steps, 5, lr)


# ---- the model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory of a dense model with tokenizer and config, its tensors still missing."""
    arch = Architecture(
        family="llama",
        vocab_size=264,
        width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        mlp_width=16,
        qk_norm=False,
        max_positions=64,
    )
    folder = tmp_path / "model"
    Tokenizer.byte_level().save(folder)
    (folder / "config.json").write_text(json.dumps(to_hf_config(arch)))
    return folder


def of_model(path: Path, tmp_path: Path) -> list[str]:
    return options([TINY], [f"model.path={path}", f"run.dir={tmp_path / 'runs'}"])


def test_directory_that_is_no_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere}: no such directory" in refused(train.main, of_model(nowhere, tmp_path), capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}: is no model directory, it has no config.json" in refused(
        train.main, of_model(empty, tmp_path), capsys
    )
    assert "has no *.safetensors file" in refused(train.main, of_model(model, tmp_path), capsys)
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    assert "model_type='gpt2': supported are" in refused(train.main, of_model(model, tmp_path), capsys)
    assert not (tmp_path / "runs").exists()


def test_tokenizer_that_does_not_fit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"vocab_size": 200}))
    told = refused(train.main, of_model(model, tmp_path), capsys)
    assert "tokenizer" in told and "200" in told and "260" in told
    (model / "tokenizer.json").unlink()
    assert "no such file; expected the tokenizer.json" in refused(train.main, of_model(model, tmp_path), capsys)


# ---- folders


def test_resume_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (train.main, sft.main):
        told = refused(main, ["--resume", str(tmp_path)], capsys)
        assert f"{tmp_path}: is no run folder, it has no config.toml" in told


def test_policy_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (evaluate.main, serve.main):
        assert "no such directory" in refused(main, ["--policy", str(tmp_path / "nowhere")], capsys)
        told = refused(main, [*tiny(tmp_path), "--policy", str(tmp_path)], capsys)
        assert f"{tmp_path}: no checkpoint in there, and no config.json of a Hugging Face directory" in told
        assert "--policy: give a run folder, a checkpoint, or a Hugging Face directory" in refused(main, [], capsys)


def test_run_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    told = refused(train.main, tiny(tmp_path / "file"), capsys)
    assert f"run.dir='{tmp_path / 'file'}': cannot make" in told


@pytest.mark.parametrize(
    ("main", "extra", "would"),
    [
        (train.main, (), "would train"),
        (sft.main, ("sft.steps=3", 'sft.envs=[{id = "reverse_text"}]'), "would train 3 supervised steps"),
        (evaluate.main, (), "would evaluate"),
        (serve.main, (), "would serve"),
    ],
    ids=["train", "sft", "evaluate", "serve"],
)
def test_dry_run_prints_the_config_and_starts_nothing(
    main: Main, extra: tuple[str, ...], would: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = tiny(tmp_path / "runs", *extra)
    policy = ["--policy", str(tmp_path)] if main in (evaluate.main, serve.main) else []
    assert main([*args, *policy, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert would in out
    assert err == ""
    assert [path.name for path in tmp_path.iterdir()] == []
    printed = written(tmp_path, out)  # comments say what would run; the rest is the config
    expected = load(RunConfig, [TINY, MODEL], [f"run.dir={tmp_path / 'runs'}", *extra])
    if main in (train.main, serve.main):
        assert load(RunConfig, [printed]) == expected
    else:  # without the rooms that the command has no use for
        assert load(RunConfig, [printed]).model == expected.model
        assert to_toml(load(RunConfig, [printed])) in out


# ---- environments that fail


def env(name: str) -> str:
    return f'{{id = "tests/system/tiny_envs.py:{name}"}}'


def test_failing_rewards_cost_their_rollouts_and_not_the_run(tmp_path: Path) -> None:
    names = ("checksum", "raises", "not_a_number", "text", "hangs", "too_long", "broken")
    envs = f"envs=[{', '.join(map(env, names))}]"
    ended = run("train", *tiny(tmp_path, envs, "evaluate.envs=[]", "pool.deadline_s=1.5", "canary.num_prompts=14"))
    assert ended.returncode == 0
    folder = folder_in(tmp_path)
    assert run("account", folder).returncode == 0
    assert {row[3] for row in trained_of(folder)} == {"checksum"}
    assert {"reward_error", "reward_invalid", "reward_timeout", "prompt_too_long"} <= dropped_of(folder).keys()
    reasons = "SELECT DISTINCT env, reason FROM rollouts WHERE reason NOT IN ('run_ended', 'rewound')"
    assert set(rows_of(folder, reasons)) == {
        ("raises", "reward_error"),
        ("not_a_number", "reward_invalid"),
        ("text", "reward_invalid"),
        ("hangs", "reward_timeout"),
        ("too_long", "prompt_too_long"),
        ("broken", "reward_error"),
    }
    details = rows_of(folder, "SELECT DISTINCT detail FROM rollouts WHERE env = 'broken' AND reason = 'reward_error'")
    assert any(r"cannot judge \ud800 \x1b[2J" in detail for (detail,) in details)
    assert (
        r"canary.num_prompts=14: broken, task 1: broken: task of task 1: LookupError: no task 1 \ud800" in ended.stderr
    )
    assert "\x1b" not in ended.stdout + ended.stderr
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [("raises", "KeyError: 'no answer for task"), ("too_long", "no room left in a context of 32")],
)
def test_run_without_one_usable_reward_ends_with_the_reason(name: str, says: str, tmp_path: Path) -> None:
    settings = (f"envs=[{env(name)}]", "evaluate.envs=[]", "orchestrator.max_fruitless_tasks=6")
    ended = run("train", *tiny(tmp_path, *settings))
    assert ended.returncode == 1
    assert "the run ended: " in ended.stdout
    assert says in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    folder = folder_in(tmp_path)
    assert "Traceback" in (folder / "run.log").read_text()
    assert run("account", folder).returncode == 0


# ---- the disk


def test_full_disk_during_a_checkpoint_ends_the_run_and_leaves_the_one_before(tmp_path: Path) -> None:
    settings = ("model.architecture.expert_width=4096", "checkpoint.interval_steps=1", "run.steps=100000")
    with started("train", *tiny(tmp_path, *settings)) as process:
        wait_until(lambda: len(steps_of(tmp_path)) > 2, process)
        # No file may grow beyond 1 MB from here on: the weights need 3, all else of this run much less.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10**6, 10**6))
        ended = finish(process)
    assert ended.returncode == 1
    assert "the run ended: the checkpoint of step" in ended.stdout
    assert "Free disk space" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    folder = folder_in(tmp_path)
    last = whole_steps(folder / "checkpoints")[-1]
    assert f"the last whole one is of step {last}" in ended.stdout
    resumed = run("train", "--resume", folder, "--set", f"run.steps={last + 1}")
    assert resumed.returncode == 0
    assert f"resumed after step {last}" in resumed.stdout
    assert run("account", folder).returncode == 0
