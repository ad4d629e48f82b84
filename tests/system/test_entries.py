"""One policy through every entry: sft, train from its directory, evaluate, serve."""

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tiny_runs import MODEL, ROOT, TINY, finish, folder_in, options, run, started, state_of, steps_of

SFT = ROOT / "tests" / "system" / "tiny_sft.toml"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished sft run of three steps."""
    parent = tmp_path_factory.mktemp("sft")
    assert run("sft", *options([TINY, MODEL, SFT], [f"run.dir={parent}"])).returncode == 0
    return folder_in(parent)


@pytest.fixture(scope="module")
def trained(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished RL run that started from there."""
    parent = tmp_path_factory.mktemp("rl")
    settings = [f"run.dir={parent}", f"model.path={tuned / 'hf'}", "run.steps=1"]
    assert run("train", *options([TINY], settings)).returncode == 0
    return folder_in(parent)


def test_sft_that_is_resumed_goes_on_as_if_never_stopped(tuned: Path, tmp_path: Path) -> None:
    """Resuming what is finished changes nothing; more steps continue; the result is that of one long run."""
    before = state_of(tuned)
    assert run("sft", "--resume", tuned).returncode == 0
    after = state_of(tuned)
    assert all((after[name] == array).all() for name, array in before.items())
    assert steps_of(tuned.parent) == [1, 2, 3]
    assert run("sft", "--resume", tuned, "--set", "sft.steps=5").returncode == 0
    assert steps_of(tuned.parent) == [1, 2, 3, 4, 5]
    whole = options([TINY, MODEL, SFT], [f"run.dir={tmp_path}", "sft.steps=5"])
    assert run("sft", *whole).returncode == 0
    expected = state_of(folder_in(tmp_path))
    assert all((array == expected[name]).all() for name, array in state_of(tuned).items())
    weights = (folder_in(tmp_path) / "hf" / "model.safetensors").read_bytes()
    assert (tuned / "hf" / "model.safetensors").read_bytes() == weights


def evaluated(*args: str | Path) -> dict[str, float]:
    ended = run("evaluate", *args, "--json")
    assert ended.returncode == 0
    return json.loads(ended.stdout)


def test_evaluate_finds_what_the_run_found(trained: Path) -> None:
    """The same tasks, seeds and weights: the entry gives the numbers of the run's last evaluation."""
    found = evaluated("--policy", trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert found == {name: value for name, value in lines[-1].items() if name.startswith("eval/")}
    (checkpoint,) = (trained / "checkpoints").glob("step_000001")
    assert evaluated("--policy", checkpoint) == found


def test_evaluate_of_a_hugging_face_directory_needs_no_run(tuned: Path) -> None:
    settings = ["sampler.max_len=32", "episode.max_tokens=8", "evaluate.num_tasks=5", "evaluate.samples_per_task=2"]
    found = evaluated("--policy", tuned / "hf", "--env", "reverse_text", *options([], settings))
    assert found["eval/reverse_text/num_failed"] == 0
    assert 0 <= found["eval/reverse_text/avg@2"] <= found["eval/reverse_text/pass@2"] + 1
    assert set(found) >= {f"eval/reverse_text/{name}" for name in ("avg@2", "pass@2", "pass^2", "exact")}


def asked(url: str, body: dict[str, object]) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def address_of(process: subprocess.Popen[str]) -> str:
    """Wait for the line that says where the server is."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            return line.split(" at ")[1].split()[0]
    raise AssertionError(finish(process))


def test_serve_answers_over_http(trained: Path) -> None:
    with started("serve", "--policy", trained, "--set", "serve.port=0") as process:
        url = address_of(process)
        question = {"messages": [{"role": "user", "content": "task 1"}], "max_tokens": 5, "temperature": 0}
        first, again = (asked(f"{url}/v1/chat/completions", question) for _ in range(2))
        exact = {"token_ids": [97, 98, 99], "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
        (choice,) = asked(f"{url}/inference/v1/generate", exact)["choices"]
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 4}]  # the step of the checkpoint
    assert first["choices"] == again["choices"]
    # The bytes of "task 1" between <|user|> and <|assistant|>; the second time, all but the last are in the cache.
    assert [reply["usage"]["prompt_tokens"] for reply in (first, again)] == [8, 8]
    assert first["usage"]["completion_tokens"] == 5
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
