"""rl_jax/models against a decoder written in float64 NumPy from the papers, one loop at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.axes import TOKENS
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture, Rope
from rl_jax.models.context import packed_attention
from rl_jax.models.head import head_weight, token_logprobs
from rl_jax.models.rope import inverse_frequencies
from rl_jax.models.schema import flat, init_params
from rl_jax.models.transformer import ForwardConfig, decoder

MOE = Architecture(
    vocab_size=13,
    width=10,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_width=4,
    num_experts=5,
    num_active_experts=2,
    expert_width=7,
    shared_expert_width=3,
)
LLAMA = Architecture(
    family="llama",
    vocab_size=13,
    width=10,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_width=6,
    mlp_width=9,
    qk_norm=False,
    attention_bias=True,
    tie_embeddings=False,
    rope=Rope(type="linear", factor=2.0, theta=500.0),
)
UNNORMALISED = Architecture(**{**vars(MOE), "normalise_routing": False, "shared_expert_width": 0})


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotated(x, positions, rope):
    half = x.shape[-1] // 2
    inverse, scale = inverse_frequencies(rope, 2 * half)
    turned = np.empty_like(x)
    for i in range(half):
        cos, sin = np.cos(positions * inverse[i]) * scale, np.sin(positions * inverse[i]) * scale
        turned[:, i] = x[:, i] * cos - x[:, half + i] * sin
        turned[:, half + i] = x[:, half + i] * cos + x[:, i] * sin
    return turned


def _silu(x):
    return x / (1 + np.exp(-x))


def _softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _swiglu(x, w, prefix, layer):
    hidden = _silu(x @ w[f"layers/{prefix}gate_LDF"][layer]) * (x @ w[f"layers/{prefix}up_LDF"][layer])
    return hidden @ w[f"layers/{prefix}down_LFD"][layer]


def _experts(arch, x, w, layer):
    out = np.zeros_like(x)
    for t, probs in enumerate(_softmax(x @ w["layers/router_LDE"][layer])):
        chosen = np.argsort(-probs, kind="stable")[: arch.num_active_experts]
        total = probs[chosen].sum() if arch.normalise_routing else 1.0
        for e in chosen:
            gate, up, down = (w[f"layers/{name}"][layer, e] for name in ("gate_LEDF", "up_LEDF", "down_LEFD"))
            out[t] += probs[e] / total * ((_silu(x[t] @ gate) * (x[t] @ up)) @ down)
    return out + (_swiglu(x, w, "shared_", layer) if arch.shared_expert_width else 0)


def _attention(arch, x, w, layer):
    positions = np.arange(len(x))
    out = np.zeros_like(x)
    bias = arch.attention_bias
    for k in range(arch.num_kv_heads):
        keys = x @ w["layers/wk_LDKH"][layer, :, k] + (w["layers/bk_LKH"][layer, k] if bias else 0)
        values = x @ w["layers/wv_LDKH"][layer, :, k] + (w["layers/bv_LKH"][layer, k] if bias else 0)
        keys = _norm(keys, w["layers/k_norm_LH"][layer], arch.norm_eps) if arch.qk_norm else keys
        keys = _rotated(keys, positions, arch.rope)
        for q in range(arch.queries_per_kv):
            queries = x @ w["layers/wq_LDKQH"][layer, :, k, q] + (w["layers/bq_LKQH"][layer, k, q] if bias else 0)
            queries = _norm(queries, w["layers/q_norm_LH"][layer], arch.norm_eps) if arch.qk_norm else queries
            scores = _rotated(queries, positions, arch.rope) @ keys.T / np.sqrt(arch.head_width)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            out += _softmax(scores) @ values @ w["layers/wo_LKQHD"][layer, k, q]
    return out + (w["layers/bo_LD"][layer] if bias else 0)


def _reference_logits(arch, w, tokens):
    x = w["embed_VD"][tokens]
    for layer in range(arch.num_layers):
        x = x + _attention(arch, _norm(x, w["layers/attention_norm_LD"][layer], arch.norm_eps), w, layer)
        normed = _norm(x, w["layers/mlp_norm_LD"][layer], arch.norm_eps)
        x = x + (_experts(arch, normed, w, layer) if arch.num_experts else _swiglu(normed, w, "", layer))
    return _norm(x, w["final_norm_D"], arch.norm_eps) @ w["embed_VD" if arch.tie_embeddings else "unembed_VD"].T


@pytest.mark.parametrize("arch", [MOE, UNNORMALISED, LLAMA])
def test_packed_sequences_equal_the_reference_one_by_one(arch):
    mesh = make_mesh(MeshConfig())
    rng = np.random.default_rng(0)
    draws = flat(init_params(arch, mesh, jax.random.key(0)))
    w = {name: np.asarray(value, np.float64) + 0.1 * rng.normal(size=value.shape) for name, value in draws.items()}
    params = init_params(arch, mesh, jax.random.key(0))
    params = jax.tree.unflatten(jax.tree.structure(params), [jnp.asarray(w[n], jnp.float32) for n in draws])
    lengths, seq_len = ((5, 3), (7,)), 11
    tokens_BT, targets_BT, positions_BT, segments_BT = (np.zeros((2, seq_len), np.int32) for _ in range(4))
    expected_logp, expected_entropy = np.zeros((2, seq_len)), np.zeros((2, seq_len))
    temperature = 0.7
    for row, sizes in enumerate(lengths):
        start = 0
        for segment, size in enumerate(sizes, start=1):
            tokens = rng.integers(0, arch.vocab_size, size)
            here = slice(start, start + size)
            tokens_BT[row, here], positions_BT[row, here], segments_BT[row, here] = tokens, np.arange(size), segment
            targets_BT[row, start : start + size - 1] = tokens[1:]
            logp = np.log(_softmax(_reference_logits(arch, w, tokens) / temperature))
            expected_logp[row, here] = logp[np.arange(size), targets_BT[row, here]]
            expected_entropy[row, here] = -(np.exp(logp) * logp).sum(-1)
            start += size
    temperatures_BT = np.full((2, seq_len), temperature, np.float32)
    put = [to_mesh(a, mesh, TOKENS) for a in (tokens_BT, targets_BT, positions_BT, segments_BT, temperatures_BT)]
    forward = ForwardConfig(head_chunk_tokens=5)

    @jax.jit
    def run(params, tokens_BT, targets_BT, positions_BT, segments_BT, temperatures_BT):
        attend = packed_attention(segments_BT, positions_BT)
        hidden_BTD = decoder(arch, forward, params, tokens_BT, positions_BT, attend).hidden_BTD
        head_VD = head_weight(arch, params, forward.dtype)
        return token_logprobs(hidden_BTD, head_VD, targets_BT, temperatures_BT, forward.head_chunk_tokens)

    with jax.set_mesh(mesh):
        logp_BT, entropy_BT = run(params, *put)
    real = segments_BT > 0
    # float32 against float64 through 2-3 layers: about 30 roundings of 6e-8 on values of order 1, seen 2e-6.
    np.testing.assert_allclose(np.asarray(logp_BT)[real], expected_logp[real], atol=2e-5)
    np.testing.assert_allclose(np.asarray(entropy_BT)[real], expected_entropy[real], atol=2e-5)


def test_linear_scaling_is_a_slower_position():
    plain, _ = inverse_frequencies(Rope(theta=1e4), 8)
    scaled, factor = inverse_frequencies(Rope(theta=1e4, type="linear", factor=4.0), 8)
    np.testing.assert_allclose(scaled, plain / 4)
    assert factor == 1.0


def test_llama3_scaling_keeps_fast_and_stretches_slow_frequencies():
    rope = Rope(
        theta=5e5, type="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    plain, scaled = inverse_frequencies(Rope(theta=5e5), 128)[0], inverse_frequencies(rope, 128)[0]
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * np.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            np.testing.assert_allclose(after, before / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            np.testing.assert_allclose(after, (1 - smooth) * before / 8 + smooth * before)


def test_yarn_interpolates_slow_and_keeps_fast_dimensions():
    rope = Rope(theta=1e4, type="yarn", factor=16.0, original_max_position=4096)
    plain, (scaled, attention) = inverse_frequencies(Rope(theta=1e4), 128)[0], inverse_frequencies(rope, 128)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 16)
    assert np.all(np.diff(scaled) < 0)
    np.testing.assert_allclose(attention, 0.1 * np.log(16) + 1)


def test_dynamic_scaling_uses_the_base_of_the_longest_sequence():
    rope = Rope(theta=1e4, type="dynamic", factor=3.0, original_max_position=100)
    longest, trained, width = 300, 100, 16
    base = 1e4 * (3.0 * longest / trained - 2.0) ** (width / (width - 2))
    np.testing.assert_allclose(inverse_frequencies(rope, width)[0], base ** -(np.arange(0, width, 2) / width))
