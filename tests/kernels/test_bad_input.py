"""Every public function against every kind of bad tensor: refused by name before a launch, or the documented result."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import DEVICE
from kernels import aligned, checks
from kernels.align.op import align
from kernels.gate.op import gate
from kernels.gate_align.op import gate_align
from kernels.grouped_matmul.op import grouped_matmul
from kernels.kv_write.op import kv_write, mla_write
from kernels.paged_attention.op import mla_attention, paged_attention
from kernels.paged_attention.tables import Tables
from kernels.pages.op import page_copy, page_gather, page_scatter
from kernels.pages.pool import make_pool
from kernels.permute.op import permute, unpermute
from kernels.router import Router

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the doors are the same; their tensors lie on the host here")
FP8 = torch.float8_e4m3fn


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def order() -> aligned.Aligned:
    return align(torch.tensor([[0, 1], [2, 0], [1, 2]]), 3, 16, impl="ref")


def good() -> dict[Callable[..., Any], dict[str, Any]]:
    """Return right arguments of every public function; a change of one makes them wrong."""
    cache, codes = torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, 2, 16).to(FP8)
    pool = make_pool(list(torch.zeros(2, 4, 16, dtype=torch.uint8)))
    rows, buffer = torch.ones(3, 2, 16), torch.zeros(2, 2, 16, dtype=torch.uint8)
    tables = Tables(torch.tensor([[0, 3], [2, 1]]), torch.tensor([7, 2]))
    routing = {"expert_map_E": integers(1, -1, 0), "num_local_experts": 2, "ticket_1": integers(0)}
    logits = {"logits_TE": torch.zeros(3, 3), "router": Router(num_active=2), "bias_E": torch.zeros(3)}
    wide, wide_scale = torch.zeros(order().routed_M.numel(), 128).to(FP8), torch.ones(order().routed_M.numel(), 1)
    return {
        gate: dict(logits),
        align: {"ids_TA": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 3, "block": 16, **routing},
        gate_align: {**logits, "block": 16, **routing},
        permute: {"x_TD": torch.zeros(3, 16), "order": order()},
        unpermute: {
            "y_MD": torch.zeros(order().routed_M.numel(), 16),
            "order": order(),
            "weights_TA": torch.ones(3, 2),
        },
        grouped_matmul: {
            "x_RD": wide,
            "w_EFD": torch.zeros(3, 128, 128).to(FP8),
            "order": order(),
            "x_scale_RG": wide_scale,
            "w_scale_EFG": torch.ones(3, 1, 1),
        },
        kv_write: {
            "key_TKH": rows,
            "value_TKH": rows,
            "key_cache_PMKH": codes.clone(),
            "value_cache_PMKH": codes.clone(),
            "slots_T": torch.tensor([0, 7, -1]),
            "scales": (torch.ones(2), torch.ones(2)),
        },
        mla_write: {
            "latent_TC": torch.ones(3, 12),
            "rope_TR": torch.ones(3, 4),
            "cache_PMC": codes[:, :, 0].clone(),
            "slots_T": torch.tensor([0, 7, -1]),
            "scale": torch.ones(1),
        },
        page_copy: {"pool": pool, "from_N": torch.tensor([0, 1]), "to_N": torch.tensor([2, 3])},
        page_gather: {"pool": pool, "pages_N": torch.tensor([0, 3]), "buffer_NLW": buffer},
        page_scatter: {"pool": pool, "pages_N": torch.tensor([0, 3]), "buffer_NLW": buffer},
        paged_attention: {
            "q_BNH": torch.zeros(2, 4, 16).bfloat16(),
            "key_cache_PMKH": codes,
            "value_cache_PMKH": codes,
            "tables": tables,
            "softmax_scale": 0.25,
            "scales": (torch.ones(2), torch.ones(2)),
        },
        mla_attention: {
            "q_BNC": torch.zeros(2, 4, 16),
            "cache_PMC": cache[:, :, 0],
            "tables": tables,
            "softmax_scale": 0.25,
            "latent_width": 12,
        },
    }


FUNCTIONS = list(good())
SPOILED = {  # how a tensor goes wrong; each keeps what the others change
    "a list": lambda x: x.tolist() if x.dtype != FP8 else [0.0],
    "another dtype": lambda x: torch.zeros(x.shape, dtype=torch.complex64),
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x.flatten()[0],
    "another device": lambda x: x.to("meta"),
    "another size": lambda x: torch.cat([x.view(torch.uint8) if x.dtype == FP8 else x] * 2, -1).view(x.dtype),
    "every second element": lambda x: torch.stack([x, x], -1)[..., 0] if x.dtype != FP8 else x.transpose(-1, -2),
}
CALLED = {"key_TKH": "key", "value_TKH": "value", "key_cache_PMKH": "key_cache", "value_cache_PMKH": "value_cache",
          "latent_TC": "latent", "rope_TR": "rope", "tables": "tables"}  # fmt: skip


def tensors_of(arguments: dict[str, Any]) -> list[tuple[str, str | int | None]]:
    """Return (argument, field or place inside it) of every tensor that a caller hands over."""
    found: list[tuple[str, str | int | None]] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found.append((name, None))
        elif isinstance(value, tuple):
            found += [(name, at) for at in range(len(value))]
        elif isinstance(value, aligned.Aligned | Tables):
            fields = vars(value).items()
            found += [(name, field) for field, part in fields if isinstance(part, torch.Tensor)]
    return found


def changed(value: Any, part: str | int | None, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the argument with one tensor changed."""
    if part is None:
        return change(value)
    if isinstance(part, int):
        return tuple(change(x) if at == part else x for at, x in enumerate(value))
    return dataclasses.replace(value, **{part: change(getattr(value, part))})


ARGUMENTS = [(function, name, part) for function in FUNCTIONS for name, part in tensors_of(good()[function])]
FITS = {  # what is no fault, as the documentation says
    ("another size", "ids_TA"),
    ("another size", "slots_T"),  # refused by its numbers, below
    ("another size", "x_TD"),
    ("another size", "y_MD"),
    ("another size", "tables_BP"),
    ("another size", "position_R"),  # of other choices for each token
    ("one dimension less", "scale"),
    ("one dimension less", "scales"),
}


def names_in(arguments: dict[str, Any]) -> set[str]:
    """Return what a message may call the culprit: two tensors that do not fit are both."""
    fields = {str(part) for _, part in tensors_of(arguments) if isinstance(part, str)}
    return {*arguments, *fields, *(CALLED[name] for name in arguments if name in CALLED), "values of"}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(
    ("function", "name", "part"), ARGUMENTS, ids=[f"{f.__name__} {n} {p or ''}".strip() for f, n, p in ARGUMENTS]
)
def test_a_spoiled_tensor_is_refused_by_name(function, name, part, how):
    arguments = good()[function]
    words = names_in(arguments)
    spoiled = changed(arguments[name], part, SPOILED[how])
    inside = spoiled if part is None else spoiled[part] if isinstance(part, int) else getattr(spoiled, part)
    what = part if isinstance(part, str) else name
    if (how, what) in FITS or (how == "every second element" and inside.numel() == 1):
        pytest.skip("allowed")
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        function(**(arguments | {name: spoiled}), impl="triton")
    assert any(word in str(caught.value) for word in words), caught.value
    assert all(torch.equal(x.float(), before[key].float()) for key, x in arguments.items() if key in before)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_right_arguments_are_right(function):
    function(**good()[function], impl="triton")


@pytest.mark.parametrize(("function", "name"), [(f, n) for f, n, part in ARGUMENTS if part is None])
def test_a_gradient_is_refused_and_not_dropped(function, name):
    arguments = good()[function]
    if not arguments[name].is_floating_point() or arguments[name].dtype == FP8:
        pytest.skip("has no gradient")
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"it has no backward: call it under torch\.no_grad"):
        function(**arguments, impl="triton")
    with torch.no_grad():
        function(**arguments, impl="triton")


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (gate, {"router": Router(num_active=2, scale=float("nan"))}, "router.scale=nan: must be finite"),
        (align, {"block": 2**29}, "rows of the order=.*: must be from 0 to 536870912"),
        (gate_align, {"block": 2**29}, "rows of the order=.*: must be from 0 to 536870912"),
        (gate_align, {"expert_map_E": integers(1, 0, 1)}, r"expert_map_E: entries \[0, 2\] are all 1"),
        (permute, {"order": 3}, "order: got int; must be Aligned"),
        (grouped_matmul, {"order": None}, "order: got NoneType; must be Aligned"),
        (grouped_matmul, {"w_EFD": torch.zeros(2, 128, 128).to(FP8)}, "w_EFD: weights of 2 experts; must be the 3 of"),
        (kv_write, {"key_cache_PMKH": torch.zeros(4, 0, 2, 16).to(FP8)}, "places of a page of key_cache=0"),
        (kv_write, {"value_cache_PMKH": torch.zeros(4, 5, 2, 0).to(FP8)}, "width of value_cache=0"),
        (mla_write, {"rope_TR": torch.ones(3, 16)}, "width of rope_TR=16: must be from 1 to 15"),
        (mla_write, {"rope_TR": torch.ones(3, 0)}, "width of rope_TR=0: must be from 1 to 15"),
        (page_copy, {"pool": None}, "pool: got NoneType; must be a PagePool"),
        (paged_attention, {"tables": None}, "tables: got NoneType; must be Tables"),
        (paged_attention, {"softmax_scale": float("inf")}, "softmax_scale=inf: must be finite"),
        (paged_attention, {"num_splits": 64}, "num_splits=64: must be from 1 to 32"),
        (paged_attention, {"num_splits": 0}, "num_splits=0: must be from 1 to 32"),
        (paged_attention, {"value_cache_PMKH": torch.zeros(4, 5, 2, 0).to(FP8)}, "width of value_cache_PMKH=0"),
        (mla_attention, {"cache_PMC": torch.zeros(4, 0, 16)}, "places of a page of cache_PMC=0"),
    ],
)
def test_bad_values_are_refused(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(**(good()[function] | changes), impl="triton")


def test_caches_whose_elements_share_memory_are_not_written():
    arguments = good()[kv_write]
    one_page = arguments["key_cache_PMKH"][:1].expand(4, 5, 2, 16)
    with pytest.raises(ValueError, match=r"key_cache: strides \(0, 32, 16, 1\).*must not share memory"):
        kv_write(**(arguments | {"key_cache_PMKH": one_page}), impl="triton")
    with pytest.raises(ValueError, match="value_cache_PMKH: is the key's"):
        kv_write(**(arguments | {"value_cache_PMKH": arguments["key_cache_PMKH"]}), impl="triton")
    with pytest.raises(ValueError, match=r"cache_PMC: strides .* must not share memory"):
        mla_write(**(good()[mla_write] | {"cache_PMC": one_page[:, :, 0]}), impl="triton")
    with pytest.raises(ValueError, match="pages of 16 bytes lie 0 bytes apart"):
        make_pool([torch.zeros(1, 16, dtype=torch.uint8).expand(4, 16)])
    for bad in ([3.0], [torch.tensor(1.0)]):
        with pytest.raises(ValueError, match=r"caches\[0\]: got"):
            make_pool(bad)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (
            permute,
            {"x_TD": torch.zeros(1, 16), "order": align(torch.zeros(1, 40).long(), 1, 16, impl="ref")},
            "at most 32",
        ),
        (
            kv_write,
            {
                **dict.fromkeys(("key_TKH", "value_TKH"), torch.zeros(1, 1, 4104).to(FP8)),
                "key_cache_PMKH": torch.zeros(1, 1, 1, 4104).to(FP8),
                "value_cache_PMKH": torch.zeros(1, 1, 1, 4104).to(FP8),
                "slots_T": torch.tensor([0]),
                "scales": None,
            },
            "rows of at most 4096 columns, got 4104",
        ),
    ],
)
def test_what_a_program_cannot_hold_is_refused(function, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        function(**(good()[function] | changes), impl="triton")
    function(**(good()[function] | changes), impl="ref")


def test_a_tensor_of_another_gpu_is_refused(monkeypatch):
    """Triton would launch on the current device with a pointer into another."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    here, there = (SimpleNamespace(device=torch.device("cuda", n), requires_grad=False) for n in (0, 1))
    checks.check_impl("gate", "triton", here)
    with pytest.raises(ValueError, match=r"gate: .* on cuda:1, but kernels start on the current device, 0"):
        checks.check_impl("gate", "triton", here, there)
