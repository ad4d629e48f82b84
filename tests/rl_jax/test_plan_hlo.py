"""Counting of compiled programs: FLOPs, HBM bytes, collectives by axis, against sums written out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from rl_jax.plan.groups import group_of
from rl_jax.plan.hlo import Instruction, parse
from rl_jax.plan.hlo_cost import Cost, cost_of
from rl_jax.plan.matmul_flops import convolution_flops

L, B, D, F = 5, 6, 16, 24
MESH = {"data": 2, "expert": 4}


def mesh() -> Mesh:
    devices = np.asarray(jax.devices()).reshape(tuple(MESH.values()))
    return Mesh(devices, tuple(MESH), axis_types=(AxisType.Auto,) * 2)


def cost(function: object, *shapes: tuple[int, ...], **expected: float) -> Cost:
    """Compile for eight CPU devices, every input sharded over expert in its first dimension, and count."""
    spec = PartitionSpec("expert")
    sharded = jax.shard_map(function, mesh=mesh(), in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(sharded).lower(*arguments).compile().as_text()
    return cost_of(parse(text), MESH, expected)


def sent(found: Cost) -> dict[tuple[str, tuple[str, ...], int], float]:
    return {(kind, group.axes, group.size): value for (kind, group), value in found.collectives.items()}


def test_matmuls_in_a_loop_count_as_often_as_it_runs() -> None:
    def layers(x_BD: jax.Array, w_LDD: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_BD, w_LDD)[0]

    found = cost(layers, (4 * B, D), (4 * L, D, D))
    assert found.matmul_flops == L * 2 * B * D * D
    assert not found.warnings
    # Each pass reads the weights of one layer, not of all, and at least reads and writes x.
    assert L * 4 * (D * D + 2 * B * D) <= found.hbm_bytes <= L * 4 * (2 * D * D + 8 * B * D) + 8 * L * D * D


@pytest.mark.parametrize(
    ("collective", "kind", "per_device"),
    [
        (partial(lax.all_gather, tiled=True), "all-gather", 3 * B * D * 4),
        (lax.psum, "all-reduce", 2 * 3 / 4 * B * D * 4),
        (partial(lax.ppermute, perm=[(i, (i + 1) % 4) for i in range(4)]), "collective-permute", B * D * 4),
        (partial(lax.all_to_all, split_axis=1, concat_axis=1, tiled=True), "all-to-all", 3 / 4 * B * D * 4),
    ],
)
def test_collectives_by_axis(collective: object, kind: str, per_device: float) -> None:
    def layers(x_BD: jax.Array) -> jax.Array:
        def layer(x_BD: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x_BD + collective(x_BD, "expert")[:B] * 0.5, None

        return lax.scan(layer, x_BD, length=L)[0]

    found = cost(layers, (4 * B, D))
    assert sent(found) == {(kind, ("expert",), 4): L * per_device}


def test_a_loop_that_depends_on_data_counts_as_expected_and_warns_without() -> None:
    def rounds(x_BD: jax.Array) -> jax.Array:
        with jax.named_scope("some_round"):
            most = jnp.int32(jnp.max(x_BD))
            return lax.fori_loop(0, most, lambda i, x: jnp.tanh(x @ jnp.ones((D, D))), x_BD)

    assert cost(rounds, (4 * B, D), some_round=7.0).matmul_flops == 7 * 2 * B * D * D
    unknown = cost(rounds, (4 * B, D))
    assert unknown.matmul_flops == 2 * B * D * D
    assert "some_round" in next(iter(unknown.warnings))


def test_a_branch_counts_with_its_share() -> None:
    def maybe(x_BD: jax.Array) -> jax.Array:
        with jax.named_scope("some_pair"):
            return lax.cond(jnp.max(x_BD) > 0, lambda x: jnp.tanh(x @ jnp.ones((D, D))), lambda x: x, x_BD)

    assert cost(maybe, (4 * B, D), some_pair=0.25).matmul_flops == 0.25 * 2 * B * D * D


def instruction(text: str) -> Instruction:
    module = parse(f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{text}\n}}\n")
    return next(iter(module.computations["main"].values()))


@pytest.mark.parametrize(
    ("groups", "axes", "members"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("expert",), (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[8]", ("expert",), (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), (0, 4)),
        ("replica_groups=[1,8]<=[8]", ("data", "expert"), tuple(range(8))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("expert",), (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','b'}", ("data", "expert"), (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(3,2,1,0,7,6,5,4) {'b'}", ("expert",), (3, 2)),
        ("source_target_pairs={{0,4},{4,0},{1,5},{5,1}}", ("data",), (0, 4)),
    ],
)
def test_replica_groups(groups: str, axes: tuple[str, ...], members: tuple[int, ...]) -> None:
    found = group_of(
        instruction(f"  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add"), MESH
    )
    assert (found.axes, found.size, found.members) == (axes, len(members), members)


def test_unknown_replica_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown replica groups"):
        group_of(instruction("  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=new{1}"), MESH)


def convolve(window: str, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> float:
    """FLOPs of a convolution with labels bf0_oi0->bf0."""

    def shape(dims: tuple[int, ...]) -> str:
        return f"f32[{','.join(map(str, dims))}]"

    module = parse(
        f"ENTRY %main (x: f32[1], w: f32[1]) -> f32[1] {{\n  %x = {shape(left)} parameter(0)\n"
        f"  %w = {shape(right)} parameter(1)\n  ROOT %c = {shape(out)} convolution(%x, %w), window={{{window}}}, "
        "dim_labels=bf0_oi0->bf0\n}\n"
    )
    table = module.computations["main"]
    return convolution_flops(table["c"], table)


@pytest.mark.parametrize(
    ("size", "stride", "pad", "dilate"), [(1, 1, 0, 1), (3, 1, 1, 1), (3, 2, 2, 1), (4, 1, 3, 2), (7, 3, 6, 2)]
)
def test_convolution_counts_taps_that_meet_the_input(size: int, stride: int, pad: int, dilate: int) -> None:
    batch, features_in, features_out, num_in = 2, 5, 3, 11
    spread = (num_in - 1) * dilate + 1
    num_out = (spread + 2 * pad - size) // stride + 1
    taps = sum(
        0 <= o * stride - pad + k < spread and (o * stride - pad + k) % dilate == 0
        for o in range(num_out)
        for k in range(size)
    )
    found = convolve(
        f"size={size} stride={stride} pad={pad}_{pad} lhs_dilate={dilate}",
        (batch, features_in, num_in),
        (features_out, features_in, size),
        (batch, features_out, num_out),
    )
    assert found == pytest.approx(2 * batch * features_in * features_out * taps, rel=1e-12)


TPU_TEXT = """HloModule jit_f, is_scheduled=true

%body (arg: (s32[], bf16[8,128], bf16[6,128,128])) -> (s32[], bf16[8,128], bf16[6,128,128]) {
  %arg = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[6,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg), index=1
  %w = bf16[6,128,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=2
  %y = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w, %i), kind=kOutput, calls=%matmul, /*a comment*/
    metadata={op_name="jit(f)/while/body/dot_general"}
  %s = bf16[2,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[6,128,128]{2,1,0}) tuple(%i, %y, %w)
}

%matmul (p0: bf16[8,128], p1: bf16[6,128,128], p2: s32[]) -> bf16[8,128] {
  %p0 = bf16[8,128]{1,0} parameter(0)
  %p1 = bf16[6,128,128]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,128,128]{2,1,0} dynamic-slice(%p1, %p2, %zero, %zero), dynamic_slice_sizes={1,128,128}
  %flat = bf16[128,128]{1,0} bitcast(%slice)
  ROOT %dot = bf16[8,128]{1,0} convolution(%p0, %flat), dim_labels=bf_io->bf
}

%all-reduce-scatter.1 (p: bf16[8,128]) -> bf16[2,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %sum = bf16[8,128]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %mine = bf16[2,128]{1,0} slice(%sum), slice={[0:2], [0:128]}
}

%condition (arg: (s32[], bf16[8,128], bf16[6,128,128])) -> pred[] {
  %arg = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[6,128,128]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %six = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%i, %six), direction=LT
}

ENTRY %main (a: (s32[], bf16[8,128], bf16[6,128,128])) -> (s32[], bf16[8,128], bf16[6,128,128]) {
  %a = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[6,128,128]{2,1,0}) parameter(0)
  %k = f32[3] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":
    {"cost_estimate":{"flops":"1000","transcendentals":"0","bytes_accessed":"50"}}}
  ROOT %loop = (s32[], bf16[8,128], bf16[6,128,128]) while(%a), condition=%condition, body=%body
}
"""


def test_text_of_the_tpu_compiler() -> None:
    found = cost_of(parse(TPU_TEXT), MESH, {})
    assert found.matmul_flops == 6 * 2 * 8 * 128 * 128
    assert found.kernel_flops == 1000
    assert sent(found) == {("reduce-scatter", ("expert",), 4): 6 * 3 / 4 * 8 * 128 * 2}
    # Of the weights one layer a pass; x and y stay on the chip; of the reduce-scatter the result is written.
    assert found.hbm_bytes == 50 + 6 * (128 * 128 * 2 + 4 + 2 * 128 * 2)
    assert not found.warnings
