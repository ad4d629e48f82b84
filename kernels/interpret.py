"""Makes Triton's interpreter compute bfloat16 and FP8 as the hardware does. For tests; knows no operation.

The stock interpreter keeps bfloat16 and FP8 blocks as unsigned integers and computes on those integers: products are
wrong without a word, float32 -> bfloat16 truncates, FP8 casts lose the carry of rounding and do not saturate, NaN codes
read as numbers, device_assert never fires, minimum and maximum keep a NaN that the hardware drops. `install` replaces
these paths by ones that widen to float32 first and round by torch, and refuses to go on unless a kernel proves them.
What it cannot make right it makes loud: reductions of bfloat16 or FP8, and rounding towards zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels import versions

KNOWN_VERSIONS = (versions.TRITON,)
"""The replaced functions are private to Triton, so every version is proven by tests/kernels before it is listed."""

TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
FP8 = (tl.float8e4nv, tl.float8e5)
RAW = (tl.bfloat16, *FP8)  # kept as unsigned integers of the same width
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
stock_convert = interpreter._convert_float
stock_binary, stock_cast, stock_dot = Builder.binary_op, Builder.cast_impl, Builder.create_dot
stock_check_tensor = interpreter.ReduceScanOpInterface.check_tensor


def install() -> None:
    """Replace the faulty paths of the interpreter and prove the result; a second call does nothing.

    Raises:
        NotImplementedError: this version of Triton is not known.
        RuntimeError: kernels are not interpreted (TRITON_INTERPRET=1 comes before the first import of triton), or the
            corrected interpreter fails its own test.
    """
    if triton.__version__ not in KNOWN_VERSIONS:
        raise NotImplementedError(
            f"triton {triton.__version__}: the corrected interpreter is proven for {', '.join(KNOWN_VERSIONS)} only; "
            f"install one of these"
        )
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is not 1; set it before the first import of triton")
    if Builder.cast_impl is cast:
        return
    interpreter._convert_float = convert
    for name, function in REPLACEMENTS.items():
        setattr(Builder, name, function)
    interpreter.ReduceScanOpInterface.check_tensor = check_tensor
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, debug=True)  # device_assert fires
    self_test()


def convert(data: np.ndarray, source: Any, target: Any, rounding: Any = None) -> np.ndarray:
    """Return the bits of float block `data` of type `source` as type `target`: nearest even, FP8 saturating."""
    if source not in TORCH or target not in TORCH:
        return stock_convert(data, source, target, rounding)
    if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError(f"{source} -> {target} towards zero: the interpreter rounds to nearest even only")
    size = data.dtype.itemsize
    bits = torch.from_numpy(np.array(data, order="C", ndmin=1).view(f"i{size}")).reshape(data.shape)
    values = bits.view(TORCH[source]) if data.ndim else bits.reshape(1).view(TORCH[source]).reshape(())
    if target in FP8:  # cvt.rn.satfinite: the largest finite value instead of infinity, NaN stays
        limit = torch.finfo(TORCH[target]).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    values = values.to(TORCH[target]).contiguous()
    width = values.element_size()
    return values.reshape(-1).view(SIGNED[width]).numpy().view(f"u{width}").reshape(data.shape)


def widen(handle: Handle) -> np.ndarray:
    """Return the float32 values of a bfloat16 or FP8 block; other blocks as they are."""
    kind = handle.dtype.scalar
    return convert(handle.data, kind, tl.float32).view(np.float32) if kind in RAW else handle.data


def narrow(values: np.ndarray, kind: Any) -> Handle:
    """Return float32 `values` as a block of type `kind`."""
    data = convert(values.astype(np.float32), tl.float32, kind)
    return Handle(data.view(interpreter._get_np_dtype(kind)), kind)


def binary(self: Builder, lhs: Handle, rhs: Handle, op: Callable) -> Handle:
    """Apply a NumPy operation to two blocks: comparisons give one bit, bitwise operations see the raw bits."""
    kind = lhs.dtype.scalar
    if kind not in RAW or op in BITWISE:
        return stock_binary(self, lhs, rhs, op)
    result = op(widen(lhs), widen(rhs))
    return Handle(result, tl.int1) if result.dtype == np.bool_ else narrow(result, kind)


def cast(self: Builder, source: Handle, target: Any) -> Handle:
    """Convert a block to the element type of `target`."""
    old, new = source.dtype.scalar, target.scalar
    if old in TORCH and new in TORCH and old != new:
        return Handle(convert(source.data, old, new).view(interpreter._get_np_dtype(new)), new)
    if old in RAW and new not in TORCH:
        return Handle(widen(source).astype(interpreter._get_np_dtype(new)), new)
    if new in RAW and old not in TORCH:
        return narrow(source.data, new)
    return stock_cast(self, source, target)


def dot(self: Builder, a: Handle, b: Handle, total: Handle, precision: Any, max_imprecise: Any) -> Handle:
    """Return a @ b + total, multiplied and added in the type of `total`."""
    product = np.matmul(widen(a), widen(b), dtype=total.data.dtype)
    return Handle(product + total.data, total.dtype.scalar)


def fused_multiply_add(self: Builder, x: Handle, y: Handle, z: Handle) -> Handle:
    """Return x * y + z, for the narrow types rounded once."""
    result = widen(x) * widen(y) + widen(z)
    kind = z.dtype.scalar
    return narrow(result, kind) if kind in RAW else Handle(result, kind)


def clamp(self: Builder, x: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
    """Return x within [low, high]; a NaN becomes `low` unless it is to be kept, as min(max(x, low), high) does."""
    keeps = propagate_nan == interpreter._ir.PROPAGATE_NAN.ALL
    minimum, maximum = (np.minimum, np.maximum) if keeps else (np.fmin, np.fmax)
    result = minimum(maximum(widen(x), widen(low)), widen(high))
    kind = x.dtype.scalar
    return narrow(result, kind) if kind in RAW else Handle(result, kind)


def check_tensor(self: interpreter.ReduceScanOpInterface, blocks: tuple) -> None:
    """Refuse a reduction or scan of raw codes, which would add integers; tl.sum and tl.max widen bfloat16 themselves."""
    stock_check_tensor(self, blocks)
    for block in blocks:
        if block.dtype in RAW:
            raise NotImplementedError(f"reduction of {block.dtype}: cast to tl.float32 first")


def through_cast(self: Builder, source: Handle, target: Any) -> Handle:
    """Convert by `cast`: the entry of six conversions that name both kinds of number."""
    return cast(self, source, target)


CONVERSIONS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")
REPLACEMENTS: dict[str, Callable] = {
    "binary_op": binary,
    "cast_impl": cast,
    "create_dot": dot,
    "create_fma": fused_multiply_add,
    "create_clampf": clamp,
    "create_minnumf": lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin),
    "create_maxnumf": lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax),
    "get_bf16": lambda self, value: narrow(np.array([value], np.float32), tl.bfloat16),
    **{f"create_{name}": through_cast for name in CONVERSIONS},
}


@triton.jit
def probe(x_pointer, y_pointer, product_pointer, code_pointer, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    x = tl.load(x_pointer + square)
    y = tl.load(y_pointer + square)
    tl.device_assert(x > -100)
    tl.store(product_pointer + square, tl.dot(x, y))
    tl.store(code_pointer + square, (x * y).to(tl.float32).to(tl.float8e4nv))


def self_test() -> None:
    """Run a kernel with a product, a rounded product, an FP8 code and an assertion of known results.

    Raises:
        RuntimeError: a result differs, so the interpreter's inner paths are not the ones that were corrected.
    """
    x = torch.arange(256).reshape(16, 16).sub(128).bfloat16() / 8
    y = x.t().contiguous()
    product, codes = torch.zeros(16, 16), torch.zeros(16, 16).to(torch.float8_e4m3fn)
    probe[(1,)](x, y, product, codes, 16)
    expected = (x.double() @ y.double()).float()  # exact: eighths below 2^24
    rounded = (x.float() * y.float()).bfloat16().float().clamp(-448, 448).to(torch.float8_e4m3fn)
    if not torch.equal(product, expected) or not torch.equal(codes.view(torch.uint8), rounded.view(torch.uint8)):
        raise RuntimeError(f"triton {triton.__version__}: the corrected interpreter fails its own test")
    try:
        probe[(1,)](x - 100, y, product, codes, 16)
    except triton.runtime.errors.InterpreterError:
        return
    raise RuntimeError(f"triton {triton.__version__}: device_assert does not fire in the interpreter")
