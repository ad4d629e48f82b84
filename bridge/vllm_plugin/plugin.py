"""Entry point of the plugin: vLLM calls register() in each of its processes before it builds anything.

Everywhere: the load format "strict" and the weight-transfer backend "rl_jax", both through vLLM's registries. On a CPU
also the test equipment that stands in for GPU kernels (cpu_fp8.py, cpu_fixes.py); on any other platform nothing of
vLLM is replaced.
"""

from functools import cache

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.platforms import current_platform

from bridge.vllm_plugin.strict_loader import StrictLoader

BACKEND = "rl_jax"
"""`--weight-transfer-config '{"backend": "rl_jax"}'`."""


@cache
def register() -> None:
    """Make the plugin's parts known to this process; a second call does nothing."""
    register_model_loader("strict")(StrictLoader)
    WeightTransferEngineFactory.register_engine(BACKEND, "bridge.vllm_plugin.transfer", "FolderTransferEngine")
    if current_platform.is_cpu():
        from bridge.vllm_plugin import cpu_fixes, cpu_fp8  # optional extra: they name vLLM's CPU classes

        cpu_fp8.install()
        cpu_fixes.install()
