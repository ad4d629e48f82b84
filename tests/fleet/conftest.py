"""What the tests of the fleet environment run under: vLLM in this process, offline, on a CPU, without compilation."""

import os

for name, value in {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}.items():
    os.environ[name] = value  # vLLM reads them when it is imported

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("fleet", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fleet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if marker := item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=f"{marker.kwargs['reason']}; run with --slow"))
