"""gate_align equals gate followed by align, bit for bit, at every tile; maps, several programs, bad arguments."""

import pytest
import torch
from test_align import check_same

from kernels.align.op import align
from kernels.gate.op import gate
from kernels.gate_align.cases import MAX_TOKENS, tile_for
from kernels.gate_align.op import gate_align
from kernels.router import Router

PLAIN = Router(num_active=5)
GROUPED = Router(num_active=8, scoring="sigmoid", num_groups=4, num_kept_groups=2, scale=2.5)
CASES = {  # name -> (T, E, router, has a bias, block)
    "one token": (1, 128, PLAIN, False, 16),
    "one program": (4, 24, PLAIN, False, 16),
    "tokens of eight": (37, 64, GROUPED, True, 64),
    "tokens of sixteen": (131, 19, PLAIN, True, 16),
    "every expert": (7, 13, Router(num_active=13), False, 1),
    "one expert": (9, 1, Router(num_active=1), False, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_one_launch_equals_two(name, rng, device, canaries):
    T, E, router, has_bias, block = CASES[name]
    logits_TE = torch.randn(T, E, generator=rng).to(device)
    bias_E = (torch.randn(E, generator=rng) * 0.1).to(device) if has_bias else None
    weights_TA, ids_TA, order = gate_align(logits_TE, router, block, bias_E=bias_E, impl="triton")
    expected = gate(logits_TE, router, bias_E, impl="triton")
    assert torch.equal(weights_TA, expected[0]) and torch.equal(ids_TA, expected[1])
    check_same(order, align(ids_TA, E, block, impl="ref"))
    reference = gate_align(logits_TE, router, block, bias_E=bias_E, impl="ref")
    assert torch.equal(ids_TA, reference[1])
    check_same(order, reference[2])


def test_an_expert_map_drops_what_is_elsewhere(rng, device, canaries):
    T, E, num_local = 43, 24, 6
    logits_TE = torch.randn(T, E, generator=rng).to(device)
    expert_map_E = torch.full((E,), -1, dtype=torch.int32)
    expert_map_E[torch.tensor([17, 2, 3, 23, 8])] = torch.tensor([4, 0, 3, 1, 5], dtype=torch.int32)  # 2 has no expert
    maps = {"expert_map_E": expert_map_E.to(device), "num_local_experts": num_local}
    ours = gate_align(logits_TE, PLAIN, 8, **maps, impl="triton")
    expected = gate_align(logits_TE, PLAIN, 8, **maps, impl="ref")
    assert torch.equal(ours[1], expected[1])
    check_same(ours[2], expected[2])


def test_no_expert_gets_all_tokens_but_one(device):
    logits_TE = torch.zeros(33, 7, device=device)
    logits_TE[:, 3] = 9.0
    _, ids_TA, order = gate_align(logits_TE, Router(num_active=1), 16, impl="triton")
    assert set(ids_TA.flatten().tolist()) == {3}
    assert order.num_rows_1.tolist() == [48] and order.position_R.tolist() == list(range(33))


def test_the_ticket_is_zero_again_and_runs_repeat_bitwise(rng, device):
    logits_TE = torch.randn(50, 16, generator=rng).to(device)
    ticket_1 = torch.zeros(1, dtype=torch.int32, device=device)
    first, second = (gate_align(logits_TE, PLAIN, 16, ticket_1=ticket_1, impl="triton") for _ in range(2))
    assert ticket_1.tolist() == [0] and torch.equal(first[0], second[0])
    check_same(first[2], second[2])


def test_no_tokens(device):
    weights_TA, _, order = gate_align(torch.zeros(0, 8, device=device), PLAIN, 16, impl="triton")
    assert weights_TA.shape == (0, 5) and order.num_rows_1.tolist() == [0]


def test_every_warp_has_a_token_and_few_histograms_are_left_to_the_last_program():
    for row_bytes, most in ((512, 64), (2048, 128)):
        for T in range(1, MAX_TOKENS + 1):
            tokens, warps, _ = tile_for(T, row_bytes)
            assert -(-T // tokens) <= most and tokens % warps == 0


def test_bad_arguments_are_refused(device):
    logits_TE = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="block=3: must be a power of two"):
        gate_align(logits_TE, PLAIN, 3, impl="triton")
    with pytest.raises(ValueError, match="give both or neither"):
        gate_align(logits_TE, PLAIN, 16, num_local_experts=2, impl="triton")
    with pytest.raises(NotImplementedError, match="at most 1024 tokens and 512 local experts, got 1025 and 8"):
        gate_align(torch.zeros(1025, 8, device=device), PLAIN, 16, impl="triton")
    with pytest.raises(NotImplementedError, match=r"gate_align: .* at most 512 experts, got 600"):
        gate_align(torch.zeros(1, 600, device=device), PLAIN, 16, impl="triton")
