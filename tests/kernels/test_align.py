"""align against its reference, a plain loop and its invariants; one launch and two; maps, skews, bad ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import DEVICE
from kernels import aligned
from kernels.align import cases, op
from kernels.align.op import align
from kernels.harness import difference, flatten, routed_ids


def plain_align(ids: list[int], num_experts: int, block: int) -> tuple[list[int], list[int], list[int]]:
    """The definition: expert after expert, its rows in their order, filled up to whole blocks."""
    routed, experts, position = [], [], [-1] * len(ids)
    for expert in range(num_experts):
        rows = [r for r, e in enumerate(ids) if e == expert]
        for r in rows:
            position[r] = len(routed)
            routed.append(r)
        num_blocks = -(-len(rows) // block)
        routed += [len(ids)] * (num_blocks * block - len(rows))
        experts += [expert] * num_blocks
    return routed, experts, position


def check_same(ours: aligned.Aligned, expected: aligned.Aligned) -> None:
    assert ours.block == expected.block
    for name in ("routed_M", "expert_J", "num_rows_1", "position_R"):
        assert difference(getattr(ours, name), getattr(expected, name)) == 0, name


CASES = {  # name -> (T, A, E, block, routing)
    "one token": (1, 8, 128, 16, "uniform"),
    "decode": (64, 8, 128, 64, "uniform"),
    "one expert takes all": (37, 1, 5, 16, "one"),
    "skewed": (100, 6, 160, 32, "zipf"),
    "every expert": (7, 13, 13, 16, "uniform"),
    "block of one": (11, 3, 7, 1, "uniform"),
    "large block": (5, 2, 3, 128, "uniform"),
    "512 experts": (33, 10, 512, 16, "zipf"),
    "one expert there": (19, 1, 1, 8, "uniform"),
}


@pytest.mark.parametrize("is_one_launch", [True, False], ids=["one launch", "two launches"])
@pytest.mark.parametrize("name", CASES)
def test_align_equals_its_reference(name, is_one_launch, device, canaries, monkeypatch):
    T, A, E, block, routing = CASES[name]
    monkeypatch.setattr(op, "ONE_LAUNCH_ROWS", 10**6 if is_one_launch else 0)
    ids_TA = routed_ids(T, A, E, routing, seed=0).to(device)
    check_same(align(ids_TA, E, block, impl="triton"), align(ids_TA, E, block, impl="ref"))


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_align_equals_the_definition(impl, device):
    T, A, E, block = 23, 3, 11, 8
    ids_TA = routed_ids(T, A, E, "zipf", seed=3)
    routed, experts, position = plain_align(ids_TA.flatten().tolist(), E, block)
    order = align(ids_TA.to(device), E, block, impl=impl)
    assert order.num_rows_1.tolist() == [len(routed)]
    assert order.routed_M.tolist()[: len(routed)] == routed
    assert set(order.routed_M.tolist()[len(routed) :]) <= {T * A}
    assert order.expert_J.tolist()[: len(experts)] == experts
    assert set(order.expert_J.tolist()[len(experts) :]) <= {-1}
    assert order.position_R.tolist() == position


def test_the_example_of_the_docstring(device):
    order = align(torch.tensor([[1, 3], [3, 1], [3, 0]], device=device), 4, 2, impl="triton")
    assert order.routed_M.tolist() == [5, 6, 0, 3, 1, 2, 4, 6, 6, 6]
    assert order.expert_J.tolist() == [0, 1, 3, 3, -1]
    assert order.num_rows_1.tolist() == [8] and order.position_R.tolist() == [2, 4, 5, 3, 6, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_dropped(dtype, device, canaries):
    ids_TA = torch.tensor([[2, -1], [7, 0], [2, 5], [-9, 2], [2**31 - 1, 4]], dtype=dtype, device=device)
    order = align(ids_TA, 5, 4, impl="triton")
    check_same(order, align(ids_TA, 5, 4, impl="ref"))
    assert order.position_R.tolist() == [4, -1, -1, 0, 5, -1, -1, 6, -1, 8]


@pytest.mark.parametrize("is_one_launch", [True, False], ids=["one launch", "two launches"])
def test_an_expert_map_drops_what_is_elsewhere(is_one_launch, device, canaries, monkeypatch):
    monkeypatch.setattr(op, "ONE_LAUNCH_ROWS", 10**6 if is_one_launch else 0)
    T, A, E, num_local = 41, 4, 24, 6
    ids_TA = routed_ids(T, A, E, "zipf", seed=5).to(device)
    expert_map_E = torch.full((E,), -1, dtype=torch.int32)
    expert_map_E[torch.tensor([17, 2, 3, 23, 8])] = torch.arange(5, dtype=torch.int32)  # local expert 5 has no expert
    expert_map_E[4] = 99  # out of range: elsewhere
    maps = {"expert_map_E": expert_map_E.to(device), "num_local_experts": num_local}
    order = align(ids_TA, E, 8, **maps, impl="triton")
    check_same(order, align(ids_TA, E, 8, **maps, impl="ref"))
    local = [int(expert_map_E[e]) for e in ids_TA.flatten().tolist()]
    assert order.position_R.tolist() == plain_align(local, num_local, 8)[2]


def test_nothing_is_local(device):
    ids_TA = torch.tensor([[0, 1], [1, 0]], device=device)
    nowhere = torch.full((2,), -1, dtype=torch.int32, device=device)
    order = align(ids_TA, 2, 16, expert_map_E=nowhere, num_local_experts=1, impl="triton")
    assert order.num_rows_1.tolist() == [0] and set(order.expert_J.tolist()) == {-1}
    assert set(order.position_R.tolist()) == {-1} and set(order.routed_M.tolist()) == {4}


def test_no_tokens(device):
    order = align(torch.zeros(0, 2, dtype=torch.int32, device=device), 4, 16, impl="triton")
    assert order.num_rows_1.tolist() == [0] and order.routed_M.numel() == order.position_R.numel() == 0


def test_the_ticket_is_zero_again_and_runs_repeat_bitwise(device):
    ids_TA = routed_ids(150, 7, 9, "uniform", seed=1).to(device)  # several chunks
    ticket_1 = torch.zeros(1, dtype=torch.int32, device=device)
    first, second = (align(ids_TA, 9, 16, ticket_1=ticket_1, impl="triton") for _ in range(2))
    assert ticket_1.tolist() == [0]
    check_same(first, second)


@pytest.mark.skipif(DEVICE != "cpu", reason="every size would be compiled")
@given(st.data())
def test_the_order_is_a_stable_partition_in_whole_blocks(data):
    E = data.draw(st.integers(1, 20))
    A, block = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 16]))
    T = data.draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    ids_TA = torch.randint(-1, E + 1, (T, A), generator=generator)  # an expert may repeat inside a token
    order = align(ids_TA, E, block, impl="triton")
    check_same(order, align(ids_TA, E, block, impl="ref"))
    num_rows = int(order.num_rows_1)
    assert num_rows <= order.routed_M.numel() and num_rows % block == 0
    routed = order.routed_M[:num_rows].tolist()
    experts = order.expert_J.repeat_interleave(block)[:num_rows].tolist()
    kept = [(e, r) for e, r in zip(experts, routed, strict=True) if r < T * A]
    assert kept == sorted((e, r) for r, e in enumerate(ids_TA.flatten().tolist()) if 0 <= e < E)


@pytest.mark.parametrize(("num_routed", "num_experts", "block"), [(8, 128, 64), (100, 3, 16), (1, 1, 128), (5, 5, 1)])
def test_capacity_is_reached_by_the_worst_case_and_not_passed(num_routed, num_experts, block):
    busy = min(num_routed, num_experts)
    worst = 0
    for spread in range(1, busy + 1):  # `spread` experts have rows, all but one of them a row more than whole blocks
        counts = [1] * (spread - 1) + [num_routed - spread + 1]
        worst = max(worst, sum(-(-n // block) * block for n in counts))
    assert worst <= aligned.capacity(num_routed, num_experts, block) < worst + block


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids_TA": torch.zeros(3, 2)}, "ids_TA: dtype torch.float32; must be torch.int32 or torch.int64"),
        ({"ids_TA": torch.zeros(6, dtype=torch.int32)}, r"ids_TA: shape \(6,\)"),
        ({"ids_TA": torch.zeros(2, 3, dtype=torch.int32).t()}, "ids_TA: strides"),
        ({"num_experts": 0}, "num_experts=0: must be from 1"),
        ({"block": 48}, "block=48: must be a power of two"),
        ({"num_local_experts": 2}, "expert_map_E is missing and num_local_experts=2: give both or neither"),
        ({"expert_map_E": torch.zeros(4, dtype=torch.int32)}, "expert_map_E is given and num_local_experts=None"),
        (
            {"expert_map_E": torch.zeros(5, dtype=torch.int32), "num_local_experts": 2},
            r"expert_map_E: shape \(5,\); must be \(4\)",
        ),
        (
            {"expert_map_E": torch.zeros(4, dtype=torch.int32), "num_local_experts": 5},
            "num_local_experts=5: must be from 1 to 4",
        ),
        ({"ticket_1": torch.zeros(2, dtype=torch.int32)}, r"ticket_1: shape \(2,\)"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    arguments = {"ids_TA": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 4, "block": 16, **changes}
    with pytest.raises(ValueError, match=message):
        align(**arguments, impl="triton")


def test_too_many_experts_are_refused(device):
    with pytest.raises(NotImplementedError, match=f"at most {cases.MAX_EXPERTS} local experts, got 513"):
        align(torch.zeros(1, 1, dtype=torch.int32, device=device), 513, 16, impl="triton")


def test_the_buffers_of_an_order_are_checked():
    order = align(torch.zeros(3, 2, dtype=torch.int32), 4, 16, impl="ref")
    aligned.check_aligned("order", order, 6, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"order.position_R: shape \(6,\); must be \(7\)"):
        aligned.check_aligned("order", order, 7, torch.device("cpu"))
    assert len(flatten(order.routed_M)) == 1
