"""The kernels' plugin inside a real vLLM on a CPU: the places are taken, the numbers are vLLM's own, nothing is silent."""

import ast
import random
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.plugins
from tiny_checkpoints import QWEN3_MOE
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe import moe_align_block_size as align_file
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker import utils as worker_utils

from kernels.vllm_plugin import places, plugin, routing

ROOT = Path(__file__).parents[2]
ENTRY = "kernels.vllm_plugin.plugin:register"
PROMPTS = [[random.Random(seed).randrange(323) for _ in range(length)] for seed, length in enumerate((41, 7, 130))]


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch):
    """Begin and end with vLLM as it is; the references are asked for."""
    monkeypatch.setenv(plugin.SWITCH, "on")
    KVConnectorFactory._registry.pop(plugin.CONNECTOR, None)
    places.restore_all()
    places.calls.clear()
    yield
    places.restore_all()
    KVConnectorFactory._registry.pop(plugin.CONNECTOR, None)


@pytest.fixture
def warnings_of(monkeypatch) -> list[str]:
    """The fallbacks that were logged."""
    lines: list[str] = []
    monkeypatch.setattr(places, "logger", SimpleNamespace(warning=lambda text, *parts: lines.append(text % parts)))
    return lines


def answers(folder: Path) -> list[tuple[list[int], list[float]]]:
    """Return greedy tokens and their log-probabilities from a fresh engine."""
    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], greedy, use_tqdm=False)
    found = []
    for output in (request.outputs[0] for request in outputs):
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        found.append((list(output.token_ids), logprobs))
    llm.llm_engine.engine_core.shutdown()
    return found


def test_vllm_loads_it_by_its_entry_point_and_answers_the_same(tmp_path, monkeypatch):
    folder = QWEN3_MOE.save(tmp_path / "moe")
    stock = answers(folder)
    info = tmp_path / "kernels_for_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-for-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkernels_for_test = {ENTRY}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "kernels_for_test")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    ours = answers(folder)
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(ours, stock, strict=True):
        assert tokens == right_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(right_logprobs), rtol=0, atol=1e-5)
    # Two MoE layers in each of 12 steps, and perhaps profiling before them.
    assert places.calls["gate"] >= 2 * 12
    assert set(places.calls) == {"gate"}
    assert plugin.CONNECTOR in KVConnectorFactory._registry


def test_the_package_declares_it():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert ENTRY in declared.values()


def test_off_leaves_vllm_alone(monkeypatch):
    stock = CPURouter._compute_routing
    monkeypatch.setenv(plugin.SWITCH, "off")
    plugin.register()
    assert CPURouter._compute_routing is stock
    assert plugin.CONNECTOR not in KVConnectorFactory._registry
    monkeypatch.setenv(plugin.SWITCH, "maybe")
    with pytest.raises(ValueError, match="KERNELS_VLLM_PLUGIN='maybe': must be 'auto', 'on' or 'off'"):
        plugin.register()


@pytest.mark.parametrize("switch", ["auto", "on"])
@pytest.mark.parametrize(
    ("version", "triton", "reason"),
    [
        ("0.33.1", True, "they are known for vLLM 0.32, this is 0.33.1"),
        ("0.3.2", True, "they are known for vLLM 0.32, this is 0.3.2"),
        ("0.32.5+cu130", False, "triton is not installed"),
    ],
)
def test_another_vllm_or_no_triton_leaves_vllm_alone_with_a_warning(monkeypatch, switch, version, triton, reason):
    lines: list[str] = []
    monkeypatch.setattr(plugin, "logger", SimpleNamespace(warning=lambda text, *parts: lines.append(text % parts)))
    monkeypatch.setattr(plugin.vllm, "__version__", version)
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setenv(plugin.SWITCH, switch)
    stock = CPURouter._compute_routing
    plugin.register()
    assert lines == [f"kernels: vLLM's own operations stay in place: {reason}"]
    assert CPURouter._compute_routing is stock
    assert plugin.CONNECTOR not in KVConnectorFactory._registry
    monkeypatch.setenv(plugin.SWITCH, "off")
    monkeypatch.setattr(plugin, "logger", SimpleNamespace(info=lambda *_: None))
    plugin.register()


def imports_of(path: Path) -> list[str]:
    """Return the modules that a file imports at its top."""
    nodes = ast.parse(path.read_text()).body
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]


def test_the_entry_point_itself_needs_vllm_and_no_triton():
    """Else a vLLM without Triton would log a traceback, "off" or not."""
    names = imports_of(ROOT / "kernels/vllm_plugin/plugin.py")
    assert {name.split(".")[0] for name in names} == {"importlib", "os", "typing", "vllm", "kernels"}
    assert [name for name in names if name.startswith("kernels")] == ["kernels.versions"]
    assert imports_of(ROOT / "kernels/versions.py") == imports_of(ROOT / "kernels/__init__.py") == []


def test_twice_is_once_and_back_is_back():
    stock = fused_moe.moe_align_block_size
    plugin.register()
    plugin.register()
    assert fused_moe.moe_align_block_size is align_file.moe_align_block_size is not stock
    assert gpu_model_runner.copy_kv_cache_blocks_inplace is worker_utils.copy_kv_cache_blocks_inplace
    places.restore_all()
    assert fused_moe.moe_align_block_size is align_file.moe_align_block_size is stock


@pytest.mark.parametrize(
    ("cuda", "cpu", "switch", "impl"),
    [
        (True, False, "auto", "triton"),
        (True, False, "on", "triton"),
        (True, False, "off", None),
        (False, True, "auto", None),
        (False, True, "on", "ref"),
        (False, False, "on", None),
    ],
)
def test_platform_and_switch_choose(monkeypatch, cuda, cpu, switch, impl):
    platform = SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: cpu, device_name="tpu")
    monkeypatch.setattr(plugin, "current_platform", platform)
    monkeypatch.setenv(plugin.SWITCH, switch)
    assert plugin.implementation(switch) == impl
    if impl is None:
        plugin.register()
        assert not places.is_replaced(CPURouter, "_compute_routing")


def ask(router, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, A] and ids sorted by id: vLLM's order among the chosen is free."""
    weights_TA, ids_TA = router._compute_routing(torch.zeros(len(logits_TE), 3), logits_TE, None)
    assert (weights_TA.dtype, ids_TA.dtype) == (torch.float32, torch.int32)
    order = ids_TA.argsort(dim=1)
    return weights_TA.gather(1, order), ids_TA.gather(1, order)


BIAS_E = torch.linspace(-0.3, 0.4, 16).roll(5)
GROUPED = {"num_expert_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("router", "options"),
    [
        (CPURouter, {}),
        (CPURouter, {"renormalize": False}),
        (CPURouter, {"use_grouped_topk": True, **GROUPED, "routed_scaling_factor": 2.5}),
        (
            CPURouter,
            {"use_grouped_topk": True, **GROUPED, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS_E},
        ),
        (GroupedTopKRouter, {**GROUPED, "renormalize": False}),
        (
            GroupedTopKRouter,
            {**GROUPED, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS_E, "routed_scaling_factor": 1.7},
        ),
    ],
)
def test_routers_give_the_same_experts_and_weights(router, options):
    made = router(top_k=3, global_num_experts=16, **options)
    logits_TE = torch.randn(29, 16, generator=torch.Generator().manual_seed(1))
    right = ask(made, logits_TE)
    routing.install("ref")
    ours = ask(made, logits_TE)
    assert places.calls == {"gate": 1}
    assert torch.equal(ours[1], right[1])
    torch.testing.assert_close(ours[0], right[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("router", "options"),
    [
        (FusedTopKRouter, {}),
        (FusedTopKRouter, {"scoring_func": "sigmoid"}),
        (
            FusedTopKBiasRouter,
            {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS_E, "routed_scaling_factor": 2.5},
        ),
        (
            FusedTopKBiasRouter,
            {"scoring_func": "softmax", "e_score_correction_bias": BIAS_E, "routed_scaling_factor": 2.5},
        ),
    ],
)
def test_routers_whose_own_operators_need_a_gpu(router, options):
    """Their numbers are written out here."""
    logits_TE = torch.randn(17, 16, generator=torch.Generator().manual_seed(2))
    routing.install("ref")
    weights_TA, ids_TA = ask(router(top_k=3, global_num_experts=16, renormalize=True, **options), logits_TE)
    is_sigmoid = options.get("scoring_func") == "sigmoid"
    score_TE = logits_TE.double().sigmoid() if is_sigmoid else logits_TE.double().softmax(1)
    for t, score_E in enumerate(score_TE):
        chosen = sorted(range(16), key=lambda e: -float((score_E + options.get("e_score_correction_bias", 0.0))[e])
                        if "e_score_correction_bias" in options else -float(score_E[e]))[:3]  # fmt: skip
        assert ids_TA[t].tolist() == sorted(chosen)
        right = score_E[ids_TA[t].long()]
        right = right / right.sum() * options.get("routed_scaling_factor", 1.0)
        torch.testing.assert_close(weights_TA[t].double(), right, rtol=1e-5, atol=1e-6)


def test_rows_that_pad_a_graph_choose_nothing(monkeypatch):
    """They get id -1, which alignment drops, and weight 0."""
    is_padding = torch.tensor([False, False, True, True, True])
    monkeypatch.setattr(routing, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(routing, "get_forward_context", lambda: SimpleNamespace(is_padding=is_padding))
    routing.install("ref")
    made = FusedTopKRouter(top_k=2, global_num_experts=4)
    weights_TA, ids_TA = made._compute_routing(torch.zeros(4, 3), torch.randn(4, 4), None)
    assert torch.equal((ids_TA < 0).any(dim=1), is_padding[:4])
    assert not weights_TA[2:].any()
    _, experts_J, num_rows_1 = align_file.moe_align_block_size(ids_TA, 4, 4)
    used = experts_J[: int(num_rows_1) // 4]
    assert set(used.tolist()) == set(ids_TA[:2].flatten().tolist())


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (CPURouter(2, 8, custom_routing_function=lambda **_: (torch.ones(5, 2), torch.zeros(5, 2))), "custom_routing"),
        (CPURouter(2, 12, use_grouped_topk=True, num_expert_group=3, topk_group=2), "3 groups of 12 experts"),
    ],
)
def test_what_the_gate_lacks_stays_vllms_own_with_one_line(router, reason, warnings_of):
    logits_TE = torch.randn(5, router.global_num_experts)
    right = router._compute_routing(torch.zeros(5, 3), logits_TE, None)
    routing.install("ref")
    for _ in range(3):
        found = router._compute_routing(torch.zeros(5, 3), logits_TE, None)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert len(warnings_of) == 1
    assert reason in warnings_of[0]
    assert sum(places.calls.values()) == 3
    assert places.calls["gate"] == 0


def test_alignment_keeps_vllms_contract(warnings_of):
    """The example of vLLM's documentation, with experts elsewhere, and with those ignored."""
    routing.install("ref")
    ids_TA = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], dtype=torch.int32)
    rows, experts, total = align_file.moe_align_block_size(ids_TA, 4, 5)
    assert rows[: int(total)].tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert experts[:4].tolist() == [1, 2, 3, 4]
    map_E = torch.tensor([-1, 0, -1, 1, -1], dtype=torch.int32)
    rows, experts, total = fused_moe.moe_align_block_size(ids_TA, 4, 5, map_E)
    assert (int(total), experts[:4].tolist()) == (16, [0, -1, 1, -1])
    assert rows[:16].tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert bool((experts[4:] == -1).all())
    rows, experts, total = align_file.moe_align_block_size(ids_TA, 4, 5, map_E, ignore_invalid_experts=True)
    assert (int(total), experts[:2].tolist()) == (8, [0, 1])
    assert rows[:8].tolist() == [3, 6, 9, 12, 1, 7, 11, 12]
    assert places.calls == {"align": 3}
    with pytest.raises(Exception, match=r"moe_align|not implemented|no attribute"):  # vLLM's own needs a GPU
        align_file.moe_align_block_size(ids_TA, 3, 5)
    assert "block 3" in warnings_of[0]
    for odd in (ids_TA.long().to(torch.uint32), ids_TA.t()):
        with pytest.raises(Exception, match=r"moe_align|not implemented|no attribute"):
            align_file.moe_align_block_size(odd, 4, 5)
    assert "uint32" in warnings_of[1] and "not contiguous" in warnings_of[2]


def caches(num_layers: int, num_blocks: int, split: int) -> list[torch.Tensor]:
    """Return random caches [pages, heads, places, width] in vLLM's NHD layout, `split` pages to a block."""
    generator = torch.Generator().manual_seed(3)
    size = (num_layers, num_blocks * split, 3, 2, 8)
    return [layer.transpose(1, 2) for layer in torch.randn(size, generator=generator)]


@pytest.mark.parametrize("split", [1, 4])
def test_copies_of_blocks_equal_vllms(split, warnings_of):
    right, ours = caches(3, 7, split), caches(3, 7, split)
    copies = [(5, 0), (5, 2), (1, 6)]
    worker_utils.copy_kv_cache_blocks_inplace([*right, right[0]], 7, copies)
    plugin.register()
    gpu_model_runner.copy_kv_cache_blocks_inplace([*ours, ours[0]], 7, copies)  # two layers may share a cache
    assert all(torch.equal(a, b) for a, b in zip(right, ours, strict=True))
    assert not torch.equal(ours[0], caches(3, 7, split)[0])
    assert places.calls == {"page_copy": 1}
    places.restore_all()
    chain = [(0, 1), (1, 3)]
    worker_utils.copy_kv_cache_blocks_inplace(right, 7, chain)
    plugin.register()
    for _ in range(2):
        worker_utils.copy_kv_cache_blocks_inplace(ours, 7, [])
    worker_utils.copy_kv_cache_blocks_inplace(ours, 7, chain)
    assert all(torch.equal(a, b) for a, b in zip(right, ours, strict=True))
    assert warnings_of == ["kernels: page_copy stays vLLM's own here: a block is both read and written"]
    for cached in (right, ours):
        worker_utils.copy_kv_cache_blocks_inplace(cached, 7, [(2, 4), (2, 4)])
    assert torch.equal(ours[0][4 * split : 5 * split], ours[0][2 * split : 3 * split])
    assert all(torch.equal(a, b) for a, b in zip(right, ours, strict=True))
    assert warnings_of[1:] == ["kernels: page_copy stays vLLM's own here: a block is written twice"]


def test_kernels_do_not_need_vllm_unless_they_are_its_plugin():
    """The package can be lifted out: only the plugin and the connector import vLLM."""
    room = ROOT / "kernels"
    users = {str(path.relative_to(room)) for path in room.rglob("*.py") if "import vllm" in path.read_text()
             or "from vllm" in path.read_text()}  # fmt: skip
    assert users == {
        "kv_tier/connector.py",
        "kv_tier/settings.py",
        *(f"vllm_plugin/{n}.py" for n in ("plugin", "places", "routing", "blocks")),
    }
    assert not any("rl_jax" in path.read_text() for path in room.rglob("*.py"))
