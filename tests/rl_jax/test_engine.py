"""The engine against the trainer's own forward pass, and against itself under other schedules."""

import functools
from dataclasses import dataclass, replace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from rl_jax.axes import TOKENS, spec
from rl_jax.config import ConfigError
from rl_jax.engine.bench import decode_tokens_per_s
from rl_jax.engine.config import EngineConfig
from rl_jax.engine.engine import Engine, Progress
from rl_jax.engine.programs import Programs
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.context import packed_attention
from rl_jax.models.head import all_logits, head_weight
from rl_jax.models.schema import Param, Params, flat_table
from rl_jax.models.transformer import ForwardConfig, decoder
from rl_jax.sampler import Completion, Request, SamplingParams
from rl_jax.tokenizer import Tokenizer
from rl_jax.types import FinishReason

MOE = Architecture(
    vocab_size=260,
    width=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_width=4,
    num_experts=5,
    num_active_experts=2,
    expert_width=7,
    max_positions=64,
)
LLAMA = replace(
    MOE, family="llama", num_experts=0, mlp_width=10, qk_norm=False, attention_bias=True, tie_embeddings=False
)
CONFIG = EngineConfig(
    num_slots=7,
    slot_buckets=(7,),
    max_len=31,
    page_size=3,
    prefill_lengths=(5,),
    prefill_tokens=10,
    decode_steps=3,
    routed_experts=True,
)
LLAMA_CONFIG = replace(
    CONFIG, page_size=1, num_pages=80, prefill_lengths=(5, 11), prefill_tokens=22, routed_experts=False
)
"""Few pages: requests wait for each other, and cached prefixes are evicted."""
FORWARD = ForwardConfig(grouped_matmul="dense")
ATOL = 6e-6
"""float32: the largest difference measured over these tests is 2.0e-6, at logits up to 10, where half an ulp is 4.8e-7."""


@dataclass(frozen=True)
class Model:
    """Compiled programs and weights; `engine()` is cheap, so every test has its own."""

    programs: Programs
    weights: Params

    def engine(self, seed: int = 0) -> Engine:
        weights = self.weights if not seed else weights_of(self.programs.arch, seed)
        return Engine(self.programs, self.programs.place(weights), tokenizer=Tokenizer.byte_level())


@functools.cache
def weights_of(arch: Architecture, seed: int = 0) -> Params:
    rng, mesh = np.random.default_rng(seed), make_mesh(MeshConfig())
    flat = {name: to_mesh(_draw(rng, param), mesh, spec(param.axes)) for name, param in flat_table(arch).items()}
    return traverse_util.unflatten_dict(flat, sep="/")


def _draw(rng: np.random.Generator, param: Param) -> np.ndarray:
    fan_in = np.prod([param.dims[letter] for letter in param.fan_in]) if param.init == "normal" else 20
    return (rng.normal(size=param.sizes) * fan_in**-0.5 + (param.init == "ones")).astype(np.float32)


@functools.cache
def model(arch: Architecture = MOE, config: EngineConfig = CONFIG, mesh: MeshConfig | None = None) -> Model:
    devices = jax.devices()[1:]  # not the default device: a program that forgets its mesh would fail
    return Model(Programs(arch, FORWARD, config, make_mesh(mesh or MeshConfig(), devices)), weights_of(arch))


@functools.cache
def _full_forward(arch: Architecture):
    @jax.jit
    def run(weights: Params, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        positions_BT = jnp.zeros_like(tokens_BT) + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
        attend = packed_attention(jnp.ones_like(tokens_BT), positions_BT)
        decoded = decoder(arch, FORWARD, weights, tokens_BT, positions_BT, attend)
        head_VD = head_weight(arch, weights, FORWARD.dtype)
        return all_logits(decoded.hidden_BTD, head_VD)[0], decoded.experts_LBTA

    return run


def full_forward(arch: Architecture, weights: Params, tokens_T: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The trainer's forward over a whole sequence: float64 [T, V] logits and experts [T, L, A]."""
    padded_BT = np.zeros((1, 48), np.int32)
    padded_BT[0, : len(tokens_T)] = tokens_T
    with jax.set_mesh(make_mesh(MeshConfig())):
        tokens_BT = to_mesh(padded_BT, make_mesh(MeshConfig()), TOKENS)
        logits_TV, experts_LBTA = jax.device_get(_full_forward(arch)(weights, tokens_BT))
    experts_TLA = None if experts_LBTA is None else experts_LBTA[:, 0, : len(tokens_T)].swapaxes(0, 1)
    return logits_TV[: len(tokens_T)].astype(np.float64), experts_TLA


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


def expected_logprobs(arch: Architecture, weights: Params, request: Request, completion: Completion) -> np.ndarray:
    """Log-probability of each completion token by one full forward pass at the request's temperature."""
    logits_TV, _ = full_forward(arch, weights, np.concatenate([request.tokens_T, completion.tokens_T]))
    rows_TV = logits_TV[len(request.tokens_T) - 1 : -1] / (request.params.temperature or 1.0)
    return np.take_along_axis(log_softmax(rows_TV), completion.tokens_T[:, None].astype(np.int64), 1)[:, 0]


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 256, length).astype(np.int32)


def request(tokens_T: np.ndarray, max_tokens: int = 6, **settings: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
    return Request(request_id="r", tokens_T=tokens_T, params=params)


def run(engine: Engine, *requests: Request) -> list[Completion]:
    for ticket, one in enumerate(requests):
        engine.check(one)
        engine.add(ticket, one)
    done: dict[int, Completion] = {}
    while engine.has_work:
        done |= {p.ticket: p.completion for p in engine.step() if p.completion}
    assert engine.kv_used_frac == 0
    return [done[ticket] for ticket in range(len(requests))]


def assert_same(left: Completion, right: Completion) -> None:
    np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
    np.testing.assert_allclose(left.logprobs_T, right.logprobs_T, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("arch", "config", "mesh"),
    [
        (MOE, CONFIG, MeshConfig()),
        (LLAMA, LLAMA_CONFIG, MeshConfig()),
        (LLAMA, replace(LLAMA_CONFIG, page_size=16, num_pages=0, prefill_lengths=(22,)), MeshConfig(tensor=2)),
    ],
    ids=["moe-page3", "llama-page1", "llama-page16-tensor2"],
)
def test_every_prefix_length_equals_the_full_forward(arch, config, mesh):
    one = model(arch, config, mesh)
    requests = [request(prompt(n), temperature=0.0 if n % 2 else 0.7, seed=n) for n in range(1, config.max_len)]
    for sent, got in zip(requests, run(one.engine(), *requests), strict=True):
        assert len(got.tokens_T) == min(6, config.max_len - len(sent.tokens_T))
        assert got.finish == FinishReason.LENGTH
        np.testing.assert_allclose(
            got.logprobs_T, expected_logprobs(arch, one.weights, sent, got), atol=ATOL, rtol=1e-6
        )
        if sent.params.temperature == 0:
            logits_TV, _ = full_forward(arch, one.weights, np.concatenate([sent.tokens_T, got.tokens_T]))
            rows_TV = logits_TV[len(sent.tokens_T) - 1 : -1]
            chosen_T = np.take_along_axis(rows_TV, got.tokens_T[:, None].astype(np.int64), 1)[:, 0]
            np.testing.assert_allclose(chosen_T, rows_TV.max(1), atol=ATOL)


@pytest.mark.parametrize("length", [1, 2, 12, 31])
def test_score_equals_the_full_forward_and_leaves_running_requests_alone(length):
    one, engine = model(), model().engine()
    sent = request(prompt(9), temperature=1.0, seed=3)
    (alone,) = run(one.engine(), sent)
    engine.add(0, sent)
    assert engine.step() == []
    tokens_T = prompt(length, seed=5)
    logprobs_T = engine.score(tokens_T)
    logits_TV, _ = full_forward(MOE, one.weights, tokens_T)
    expected_T = np.take_along_axis(log_softmax(logits_TV[:-1]), tokens_T[1:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(logprobs_T, [0, *expected_T], atol=ATOL, rtol=1e-6)
    (progress,) = engine.step()
    assert progress.completion is not None
    assert_same(progress.completion, alone)


def test_a_group_computes_its_prompt_once():
    one, engine = model(), model().engine()
    group = [request(prompt(12), seed=s) for s in range(4)]  # 11 tokens of prefix: three full pages, a partial one
    other = request(prompt(8), seed=9)
    completions = run(engine, *group[:2], other, *group[2:])
    assert [c.num_cached_tokens for c in completions] == [0, 11, 0, 11, 11]
    assert engine.num_cached_tokens == 33
    for sent, got in zip([*group[:2], other, *group[2:]], completions, strict=True):
        assert_same(got, run(one.engine(), sent)[0])
    assert len({tuple(c.tokens_T) for c in completions}) == 5


def test_a_later_turn_finds_the_pages_of_the_turn_before():
    one, engine = model(), model().engine()
    first = request(prompt(7), max_tokens=8)
    (got,) = run(engine, first)
    history_T = np.concatenate([first.tokens_T, got.tokens_T])  # 14 of its 15 tokens have KV: four full pages
    second = request(np.concatenate([history_T, prompt(4)]))
    (cached,) = run(engine, second)
    assert cached.num_cached_tokens == 12
    assert_same(cached, run(one.engine(), second)[0])


def test_a_prefix_of_old_weights_is_never_used_for_new_ones():
    one, engine = model(), model().engine()
    sent = request(prompt(12))
    run(engine, sent)
    assert run(engine, sent)[0].num_cached_tokens == 11
    for version in (4, 4):  # also when one version is published twice
        engine.publish(one.programs.place(weights_of(MOE, seed=1)), version)
        (got,) = run(engine, sent)
        assert got.num_cached_tokens == 0
        assert_same(got, run(one.engine(seed=1), sent)[0])
        assert got.versions_T.tolist() == [4] * 6


def test_a_running_request_goes_on_under_new_weights():
    one, engine = model(), model().engine()
    sent = request(prompt(12), max_tokens=9, seed=4)
    (unswapped,) = run(one.engine(), sent)
    engine.add(0, sent)
    engine.step()
    engine.publish(one.programs.place(weights_of(MOE, seed=1)), 2)
    engine.step()
    engine.publish(one.programs.place(weights_of(MOE)), 3)
    (progress,) = engine.step()
    assert progress.completion is not None
    got = progress.completion
    assert got.versions_T.tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    np.testing.assert_array_equal(got.tokens_T[:3], unswapped.tokens_T[:3])
    expected_T = expected_logprobs(MOE, one.weights, sent, got)
    np.testing.assert_allclose(got.logprobs_T[:3], expected_T[:3], atol=ATOL)
    assert np.abs(got.logprobs_T[3:6] - expected_T[3:6]).max() > 0.1  # the new weights made these
    again = engine.abort(0)
    assert again is None
    follow_up = request(np.concatenate([sent.tokens_T, got.tokens_T]))
    assert run(engine, follow_up)[0].num_cached_tokens == 0  # KV of mixed weights is no prefix of anything


def test_a_lower_version_is_refused():
    engine = model().engine()
    engine.publish(model().programs.place(model().weights), 5)
    with pytest.raises(ValueError, match="version 4 is older than 5"):
        engine.publish(model().programs.place(model().weights), 4)


def test_tokens_do_not_depend_on_the_rest_of_the_batch():
    sent = request(prompt(10), max_tokens=12, seed=2**40 + 7, temperature=1.3)
    crowd = [
        request(prompt(n % 13 + 1, seed=n), max_tokens=n % 7 + 1, seed=n, top_k=5 if n % 3 else 0) for n in range(20)
    ]
    # More stop tokens than the first size of their table, and filters: other programs serve the crowd.
    crowd[3] = replace(crowd[3], params=replace(crowd[3].params, stop_token_ids=tuple(range(250, 259))))
    (alone,) = run(model().engine(), sent)
    crowded = run(model().engine(), *crowd[:11], sent, *crowd[11:])[11]
    assert_same(alone, crowded)
    assert not np.array_equal(alone.tokens_T, run(model().engine(), replace_seed(sent, 7))[0].tokens_T)


def replace_seed(sent: Request, seed: int) -> Request:
    return replace(sent, params=replace(sent.params, seed=seed))


def test_experts_equal_those_of_the_full_forward():
    requests = [request(prompt(12), seed=s, max_tokens=5 + s, return_routed_experts=True) for s in range(3)]
    for sent, got in zip(requests, run(model().engine(), *requests), strict=True):
        tokens_T = np.concatenate([sent.tokens_T, got.tokens_T])
        _, experts_TLA = full_forward(MOE, model().weights, tokens_T)
        assert got.routed_experts_TLA is not None
        assert got.routed_experts_TLA.dtype == np.uint16
        np.testing.assert_array_equal(got.routed_experts_TLA, experts_TLA[:-1])
    assert run(model().engine(), request(prompt(3)))[0].routed_experts_TLA is None


@pytest.mark.parametrize("stop_at", [0, 1, 4])
def test_a_stop_token_ends_the_completion_and_is_part_of_it(stop_at):
    sent = request(prompt(5), max_tokens=8, seed=1)
    (full,) = run(model().engine(), sent)
    stop = int(full.tokens_T[stop_at])
    first = full.tokens_T.tolist().index(stop)
    for ids in [(stop,), (257, 258, stop)]:
        (got,) = run(model().engine(), replace(sent, params=replace(sent.params, stop_token_ids=ids)))
        np.testing.assert_array_equal(got.tokens_T, full.tokens_T[: first + 1])
        assert got.finish == FinishReason.STOP
        assert len(got.logprobs_T) == len(got.versions_T) == first + 1


def test_a_stop_string_is_found_across_tokens_and_steps():
    one = model(LLAMA, LLAMA_CONFIG)
    engine = Engine(one.programs, one.programs.place(spelling_weights()), tokenizer=Tokenizer.byte_level())
    sent = request(np.array([ord("a")], np.int32), max_tokens=20, temperature=0.0)
    (free,) = run(engine, sent)
    assert bytes(free.tokens_T.tolist()).decode() == "bcdefghijklmnopqrstu"
    for stop, expected in [(("de",), "bcde"), (("h", "ef"), "bcdef"), (("bcdefgh",), "bcdefgh"), (("xy",), None)]:
        (got,) = run(engine, replace(sent, params=replace(sent.params, stop=stop)))
        assert bytes(got.tokens_T.tolist()).decode() == (expected or "bcdefghijklmnopqrstu")
        assert got.finish == (FinishReason.STOP if expected else FinishReason.LENGTH)


def spelling_weights() -> Params:
    """Weights under which token t is followed by t + 1: layers that add nothing, a head that is one row behind."""
    phase_VF = np.arange(LLAMA.vocab_size)[:, None] * 2 * np.pi / LLAMA.vocab_size * np.array([1, 2, 3, 5, 7, 11])
    embed_VD = np.concatenate([np.cos(phase_VF), np.sin(phase_VF)], axis=1).astype(np.float32)
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), weights_of(LLAMA)["layers"])
    ones_D = np.ones(LLAMA.width, np.float32)
    return {
        "layers": nothing,
        "embed_VD": embed_VD,
        "unembed_VD": np.roll(embed_VD, 1, axis=0),
        "final_norm_D": ones_D,
    }


def test_progress_adds_up_to_the_completion():
    engine, sent = model().engine(), request(prompt(4), max_tokens=8)
    engine.add(3, sent, is_streamed=True)
    parts: list[Progress] = []
    while engine.has_work:
        parts += engine.step()
    assert [len(p.tokens_T) for p in parts] == [3, 3, 2]
    assert [p.completion is None for p in parts] == [True, True, False]
    whole = parts[-1].completion
    assert whole is not None
    np.testing.assert_array_equal(np.concatenate([p.tokens_T for p in parts]), whole.tokens_T)
    np.testing.assert_array_equal(np.concatenate([p.logprobs_T for p in parts]), whole.logprobs_T)


@hypothesis.settings(max_examples=4)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_no_page_leaks_and_nothing_is_written_wrongly_under_pressure(seed):
    """Few pages, shared prompts, aborts and swaps at random moments: whoever is left gets what he would get alone."""
    tight = model(LLAMA, LLAMA_CONFIG)
    rng, engine, alone = np.random.default_rng(seed), tight.engine(), tight.engine()
    prompts = [prompt(int(n)) for n in rng.integers(1, 25, 5)]
    sent = {i: request(prompts[rng.integers(5)], int(rng.integers(1, 12)), seed=i, temperature=1.0) for i in range(16)}
    waiting, done = list(sent), {}
    while waiting or engine.has_work:
        for ticket in waiting[: rng.integers(0, 5)]:
            engine.add(waiting.pop(0), sent[ticket])
        if rng.random() < 0.2:
            engine.abort(int(rng.integers(16)))
        if rng.random() < 0.1:
            engine.publish(tight.programs.place(tight.weights), engine.version + 1)
        done |= {p.ticket: p.completion for p in engine.step()}
        assert engine.kv_used_frac <= 1
    assert engine.kv_used_frac == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    for ticket, got in list(done.items())[-6:]:
        assert_same(got, run(alone, sent[ticket])[0])


def test_nothing_compiles_after_warm_up():
    one = model(LLAMA, LLAMA_CONFIG)
    engine = one.engine()
    compiled = engine.warm_up()
    assert compiled == 1 + 1 + 4  # decode, copy, prefill of 5 and of 11 tokens, one row and many
    run(engine, *[request(prompt(n % 20 + 1), seed=n, max_tokens=n % 9 + 1) for n in range(25)])
    assert decode_tokens_per_s(engine, batch=2, prompt_tokens=7, max_tokens=5) > 0
    assert one.programs.num_compilations == compiled


def test_placed_weights_survive_donation():
    one, mesh = model(), make_mesh(MeshConfig(), jax.devices()[1:])
    weights = jax.device_put(jax.tree.map(np.asarray, one.weights), one.programs.place(one.weights)["embed_VD"].device)
    placed = one.programs.place(weights)
    with jax.set_mesh(mesh):
        jax.block_until_ready(jax.jit(lambda w: jax.tree.map(lambda x: x * 0, w), donate_argnums=0)(weights))
    assert weights["embed_VD"].is_deleted()
    np.testing.assert_array_equal(placed["embed_VD"], one.weights["embed_VD"])


def test_weights_that_do_not_fit_are_named():
    weights = {**model().weights, "embed_VD": np.zeros((3, 12), np.float32), "extra": np.zeros(1)}
    del weights["final_norm_D"]
    expected = r"embed_VD: shape \(3, 12\), expected \(260, 12\); extra: no such weight .*; final_norm_D: missing"
    with pytest.raises(ValueError, match=expected):
        model().programs.place(weights)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (request(prompt(31)), "prompt has 31 tokens, the context max_len=31"),
        (request(prompt(0)), r"shape \(0,\)"),
        (request(np.array([5, 260], np.int32)), r"span 5\.\.260, the model has 0\.\.259"),
        (request(prompt(3), max_tokens=0), "max_tokens=0"),
        (request(prompt(3), temperature=-1.0, top_p=0.0), r"temperature=-1\.0.*top_p=0\.0"),
        (request(prompt(3), temperature=float("nan"), top_k=-1, min_p=2.0, seed=-1), "nan.*top_k=-1.*min_p=2.0.*seed"),
        (request(prompt(3), stop=("x", "")), "stop="),
    ],
)
def test_requests_that_can_never_be_served_are_refused(sent, message):
    with pytest.raises(ValueError, match=message):
        model().engine().check(sent)


def test_what_the_engine_was_not_set_up_for_is_refused():
    one = model(LLAMA, LLAMA_CONFIG)
    engine = Engine(one.programs, one.programs.place(one.weights))
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a sampler with a tokenizer"):
        engine.check(request(prompt(3), stop=("x",)))
    with pytest.raises(ValueError, match="return_routed_experts needs"):
        engine.check(request(prompt(3), return_routed_experts=True))
    with pytest.raises(ValueError, match=r"expert.* = 1"):
        Programs(MOE, FORWARD, CONFIG, make_mesh(MeshConfig(expert=5), jax.devices()))
    with pytest.raises(ValueError, match="max_len=65: the model has positions for 64"):
        Engine(
            Programs(LLAMA, FORWARD, replace(LLAMA_CONFIG, num_pages=0, max_len=65), make_mesh(MeshConfig())),
            one.weights,
        )


def test_non_finite_weights_stop_the_engine():
    weights = {**model().weights, "embed_VD": np.full((260, 12), np.nan, np.float32)}
    engine = Engine(model().programs, model().programs.place(weights), version=8)
    engine.add(0, request(prompt(2)))
    with pytest.raises(FloatingPointError, match=r"weights 8, requests \['r'\]"):
        engine.step()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_slots": 0}, "num_slots=0"),
        ({"num_pages": 22}, "num_pages=22: must be at least 23"),
        ({"prefill_lengths": (8, 4)}, "prefill_lengths"),
        ({"prefill_tokens": 4}, "prefill_tokens=4: must be at least 5"),
        ({"slot_buckets": (1, 4)}, "slot_buckets"),
    ],
)
def test_config_refuses(settings, field):
    with pytest.raises(ConfigError, match=field):
        replace(CONFIG, **settings)
