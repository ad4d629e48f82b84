"""gate against its reference and a plain loop: ties, groups, biases, NaN, narrow rows, bad arguments."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import DEVICE
from kernels.gate.op import gate
from kernels.router import Router

GROUPED = Router(num_active=3, scoring="sigmoid", num_groups=4, num_kept_groups=2, scale=2.5)
CASES = {  # name -> (T, E, has a bias, router); sizes that are no multiples of a program's tokens
    "softmax": (5, 128, False, Router(num_active=8)),
    "softmax before": (7, 60, False, Router(num_active=5, renormalize=False, scale=1.5)),
    "softmax with a bias": (3, 17, True, Router(num_active=2)),
    "softmax before with a bias": (3, 17, True, Router(num_active=4, renormalize=False)),
    "softmax grouped": (6, 64, False, Router(num_active=6, num_groups=8, num_kept_groups=3)),
    "sigmoid": (5, 31, False, Router(num_active=3, scoring="sigmoid", renormalize=False)),
    "sigmoid with a bias": (6, 160, True, Router(num_active=8, scoring="sigmoid", scale=2.5)),
    "sigmoid grouped": (7, 256, True, Router(num_active=8, scoring="sigmoid", num_groups=8, num_kept_groups=4)),
    "all experts": (2, 13, False, Router(num_active=13)),
    "all experts of the kept groups": (3, 16, True, Router(num_active=8, num_groups=4, num_kept_groups=2)),
    "one expert": (3, 1, False, Router(num_active=1)),
    "one token": (1, 512, False, Router(num_active=10)),
    "sixteen": (2, 33, False, Router(num_active=16)),
}


def inputs(name: str, rng: torch.Generator, dtype: torch.dtype, device: torch.device):
    T, E, has_bias, router = CASES[name]
    logits_TE = (torch.randn(T, E, generator=rng) * 2).to(dtype)
    bias_E = torch.randn(E, generator=rng).to(device) * 0.1 if has_bias else None
    return logits_TE.to(device), router, bias_E


def check_same(ours, expected) -> None:
    assert torch.equal(ours[1], expected[1])
    # exp and division differ by some units in the last place of float32; a weight is a quotient of at most 3 of them
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_gate_equals_its_reference(name, dtype, rng, device, canaries):
    arguments = inputs(name, rng, dtype, device)
    check_same(gate(*arguments, impl="triton"), gate(*arguments, impl="ref"))


def plain_gate(logits: list[float], router: Router, bias: list[float] | None) -> tuple[list[float], list[int]]:
    """The definition for one token in Python's float64."""
    if router.scoring == "softmax":
        top = max(logits)
        total = sum(math.exp(x - top) for x in logits)
        scores = [math.exp(x - top) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = logits if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // router.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(router.num_groups)]
    group_scores = [g[0] if bias is None else sum(g[:2]) for g in groups]
    kept = sorted(range(router.num_groups), key=lambda g: (-group_scores[g], g))[: router.num_kept_groups]
    candidates = [e for e in range(len(logits)) if e // size in kept]
    ids = sorted(candidates, key=lambda e: (-choice[e], e))[: router.num_active]
    total = sum(scores[e] for e in ids) if router.renormalize else 1.0
    return [scores[e] / total * router.scale for e in ids], ids


@pytest.mark.parametrize("impl", ["ref", "triton"])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][1] <= 64])
def test_gate_equals_the_definition(name, impl, rng, device):
    logits_TE, router, bias_E = inputs(name, rng, torch.float32, device)
    weights_TA, ids_TA = gate(logits_TE, router, bias_E, impl=impl)
    for t, row in enumerate(logits_TE.tolist()):
        weights, ids = plain_gate(row, router, None if bias_E is None else bias_E.tolist())
        assert ids_TA[t].tolist() == ids
        assert weights_TA[t].tolist() == pytest.approx(weights, rel=1e-5)


def test_ties_go_to_the_lower_index_among_experts_and_groups(device):
    logits_TE = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0]])
    router = Router(num_active=5)
    for impl in ("ref", "triton"):
        _, ids_TA = gate(logits_TE.to(device), router, impl=impl)
        assert ids_TA.tolist() == [[1, 3, 5, 0, 2], [0, 1, 2, 3, 4]]
    grouped = Router(num_active=3, num_groups=4, num_kept_groups=2)
    for impl in ("ref", "triton"):  # groups {0,1} {2,3} {4,5} score 1, {6,7} 0
        _, ids_TA = gate(logits_TE.to(device), grouped, impl=impl)
        assert ids_TA.tolist() == [[1, 3, 0], [0, 1, 2]]


def test_extreme_logits_give_valid_distinct_ids(device):
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 6, [inf, -inf, 0.0, 1.0, -1.0, 2.0], [-inf] * 5 + [3.0], [0.0, nan, 1.0, -nan, 2.0, 3.0]]
    logits_TE = torch.tensor(rows, device=device)
    for router in (Router(num_active=4), Router(num_active=4, scoring="sigmoid")):
        for impl in ("ref", "triton"):
            weights_TA, ids_TA = gate(logits_TE, router, impl=impl)
            assert all(len(set(ids)) == 4 and min(ids) >= 0 and max(ids) < 6 for ids in ids_TA.tolist())
            assert ids_TA[1:].tolist() == [[0, 5, 3, 2], [5, 0, 1, 2], [1, 3, 5, 4]]
            assert weights_TA[0].isnan().all() and weights_TA[3].isnan().all() and not weights_TA[2].isnan().any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_every_special_logit_is_ranked_as_the_reference_ranks_it(scoring, has_bias, num_groups, rng, device):
    """NaN, infinities, signed zeros, all -inf, subnormals: same ids, and NaN weights in the same places."""
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1.0])
    logits_TE = special[torch.randint(0, 8, (60, 16), generator=rng)]
    logits_TE[:6] = special[:6, None]
    logits_TE[6, :12] = -math.inf
    logits_TE[7:30] = torch.where(logits_TE[7:30].isnan(), 2.0, logits_TE[7:30])
    logits_TE[30:40] = torch.randn(10, 16, generator=rng)
    logits_TE[30:40, 5] = math.nan  # one in a group of numbers
    bias_E = (torch.randint(-2, 3, (16,), generator=rng) * 8.0).to(device) if has_bias else None
    router = Router(num_active=3, scoring=scoring, num_groups=num_groups, num_kept_groups=(num_groups + 1) // 2)
    ours = gate(logits_TE.to(device), router, bias_E, impl="triton")
    expected = gate(logits_TE.to(device), router, bias_E, impl="ref")
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-6, atol=1e-30, equal_nan=True)
    if scoring == "sigmoid" or not has_bias:  # else all scores are NaN
        assert (ours[1][30:40] == 5).any(1).all() and ours[0][30:40].isnan().all()


def test_rows_of_a_wider_tensor_are_read_by_their_stride(rng, device):
    wide = torch.full((5, 40), float("nan"), device=device)
    wide[:, 3:36] = torch.randn(5, 33, generator=rng).to(device)
    router = Router(num_active=4)
    check_same(gate(wide[:, 3:36], router, impl="triton"), gate(wide[:, 3:36].clone(), router, impl="ref"))


def test_no_tokens(device):
    weights_TA, ids_TA = gate(torch.zeros(0, 8, device=device), Router(num_active=2), impl="triton")
    assert weights_TA.shape == ids_TA.shape == (0, 2)


@pytest.mark.skipif(DEVICE != "cpu", reason="every size would be compiled")
@given(st.data())
def test_gate_equals_its_reference_at_any_size(data):
    num_groups = data.draw(st.sampled_from([1, 2, 4]))
    E = data.draw(st.sampled_from([4, 8, 32])) if num_groups > 1 else data.draw(st.integers(1, 40))
    num_kept = data.draw(st.integers(1, num_groups))
    has_bias = data.draw(st.booleans()) and num_groups < E
    router = Router(
        num_active=data.draw(st.integers(1, min(16, E // num_groups * num_kept))),
        scoring=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        num_groups=num_groups,
        num_kept_groups=num_kept,
        renormalize=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1.0, 2.5])),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    # few distinct values, so that ties are common; scores of equal logits are equal in both
    logits_TE = torch.randint(-3, 4, (data.draw(st.integers(1, 9)), E), generator=generator) / 2
    bias_E = torch.randint(-2, 3, (E,), generator=generator) * 8.0 if has_bias else None
    check_same(gate(logits_TE, router, bias_E, impl="triton"), gate(logits_TE, router, bias_E, impl="ref"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_active": 17}, "router.num_active=17: must be from 1 to 16"),
        ({"num_active": 9, "num_groups": 4, "num_kept_groups": 2}, "router.num_active=9: must be from 1 to 8"),
        ({"num_active": 0}, "router.num_active=0"),
        ({"num_groups": 3}, "number of experts=16: must be a multiple of 3"),
        ({"num_kept_groups": 2}, "router.num_kept_groups=2: must be from 1 to 1"),
        ({"scoring": "tanh"}, "router.scoring='tanh': must be 'softmax' or 'sigmoid'"),
        ({"num_groups": 16, "num_kept_groups": 16}, "a group scores its two best experts, but has one"),
    ],
)
def test_bad_routers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gate(torch.zeros(3, 16), Router(**{"num_active": 2, **changes}), torch.zeros(16), impl="triton")


def test_bad_tensors_are_refused(device):
    router = Router(num_active=2)
    with pytest.raises(ValueError, match=r"logits_TE: dtype torch.float64"):
        gate(torch.zeros(3, 16, dtype=torch.float64), router, impl="triton")
    with pytest.raises(ValueError, match=r"logits_TE: shape \(16,\); must be \(any, any\)"):
        gate(torch.zeros(16), router, impl="triton")
    with pytest.raises(ValueError, match="logits_TE: strides"):
        gate(torch.zeros(16, 3).t(), router, impl="triton")
    with pytest.raises(ValueError, match=r"bias_E: shape \(15,\); must be \(16\)"):
        gate(torch.zeros(3, 16), router, torch.zeros(15), impl="triton")
    with pytest.raises(ValueError, match=r"bias_E: dtype .*bfloat16"):
        gate(torch.zeros(3, 16), router, torch.zeros(16).bfloat16(), impl="triton")
    big = Router(num_active=17)
    with pytest.raises(NotImplementedError, match="at most 512 experts, got 513"):
        gate(torch.zeros(1, 513, device=device), router, impl="triton")
    with pytest.raises(NotImplementedError, match="at most 16 active experts, got 17"):
        gate(torch.zeros(1, 32, device=device), big, impl="triton")
    with pytest.raises(NotImplementedError, match="a power of two of experts when they are grouped, got 12"):
        gate(torch.zeros(1, 12, device=device), Router(num_active=2, num_groups=2), impl="triton")
    assert gate(torch.zeros(1, 513), big, impl="ref")[1].tolist() == [list(range(17))]
