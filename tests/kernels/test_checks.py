"""Every check refuses with the name, the value and the constraint, and lets good arguments pass."""

import pytest
import torch

from kernels import checks, ranges

GOOD = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": [1.0]}, "x: got list"),
        ({"shape": (3,)}, r"x: shape \(3, 5\); must be \(3\)"),
        ({"shape": (None, 7)}, r"x: shape \(3, 5\); must be \(any, 7\)"),
        ({"dtypes": (torch.int32, torch.int64)}, "x: dtype torch.float32; must be torch.int32 or torch.int64"),
        ({"device": torch.device("meta")}, "x: on cpu; must be on meta"),
        ({"tensor": torch.zeros(5, 3).t()}, r"x: strides \(1, 3\) of shape \(3, 5\); must be contiguous"),
        ({"tensor": torch.zeros(5, 3).t(), "layout": "rows"}, "x: strides .* the last must be 1"),
        ({"tensor": torch.zeros(5).expand(3, 5), "layout": "rows"}, r"x: strides \(0, 1\).* must not overlap"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(change, message):
    arguments = {"tensor": GOOD, "shape": (3, 5), "dtypes": (torch.float32,), **change}
    with pytest.raises(ValueError, match=message):
        checks.check_tensor("x", **arguments)


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [(GOOD, "contiguous"), (torch.zeros(3, 9)[:, :5], "rows"), (torch.zeros(5, 3).t(), "any"), (GOOD[:1], "rows")],
)
def test_a_good_tensor_passes(tensor, layout):
    checks.check_tensor("x", tensor, shape=(None, 5), dtypes=(torch.float32,), device=GOOD.device, layout=layout)


def test_numbers_and_implementations():
    ranges.check_range("k", 3, 1, 3)
    ranges.check_multiple("D", 256, 128)
    with pytest.raises(ValueError, match="k=4: must be from 1 to 3"):
        ranges.check_range("k", 4, 1, 3)
    with pytest.raises(ValueError, match="D=200: must be a multiple of 128"):
        ranges.check_multiple("D", 200, 128)
    with pytest.raises(ValueError, match="gate: impl='cuda': must be 'ref' or 'triton'"):
        checks.check_impl("gate", "cuda", GOOD)
    with pytest.raises(NotImplementedError, match="gate: impl='triton' needs at most 512 experts, got 513"):
        checks.refuse("gate", "at most 512 experts, got 513")


def test_triton_on_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(checks.triton.knobs.runtime, "interpret", False)
    checks.check_impl("gate", "ref", GOOD)
    with pytest.raises(ValueError, match="gate: impl='triton' got a tensor on cpu"):
        checks.check_impl("gate", "triton", GOOD)
