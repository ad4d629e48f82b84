"""Entry point of the plugin: puts this package's operations in place of vLLM's own, in each of vLLM's processes.

    KERNELS_VLLM_PLUGIN=off vllm serve ...      leaves vLLM as it is

| what | in place of | file |
|---|---|---|
| gate | routing of softmax, sigmoid, biased and grouped routers | routing.py |
| align | moe_align_block_size | routing.py |
| page_copy | copy_kv_cache_blocks_inplace (copy-on-write of cache blocks) | blocks.py |
| kv_tier | a connector by the name PageTierConnector | kv_tier/connector.py |

On an NVIDIA GPU the operations are the Triton kernels. On a CPU they are the torch references, and only with the switch
"on": they are slower than vLLM's own and there so that the places are tested with a real vLLM. On any other platform
nothing is replaced. What an operation does not cover stays vLLM's own, with one logged line for each reason. The places
are private to vLLM and known for one version of it: beside another, or without Triton, all stays vLLM's own, with a
warning. Importing this file needs vLLM and no Triton, so that "off" is off whatever else is installed.
"""

import importlib.metadata
import importlib.util
import os
from typing import Literal

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kernels import versions

logger = init_logger("vllm.kernels.plugin")

SWITCH = "KERNELS_VLLM_PLUGIN"
"""auto (default): kernels on a GPU; on: also the references on a CPU; off: nothing."""
CONNECTOR = "PageTierConnector"


def register() -> None:
    """Put everything in place in this process; a second call does nothing.

    Raises:
        ValueError: the switch has another value.
    """
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "on", "off"):
        raise ValueError(f"{SWITCH}={switch!r}: must be 'auto', 'on' or 'off'")
    if switch != "off" and (reason := obstacle()):
        logger.warning("kernels: vLLM's own operations stay in place: %s", reason)
        return
    if switch != "off" and CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kernels.kv_tier.connector", CONNECTOR)
    impl = implementation(switch)
    if impl is None:
        where = f"{SWITCH}={switch}, platform {current_platform.device_name}"
        logger.info("kernels: vLLM's own operations stay in place (%s)", where)
        return
    from kernels.vllm_plugin import blocks, routing  # optional extra: Triton

    if impl == "triton" and (version := importlib.metadata.version("triton")) != versions.TRITON:
        logger.warning("kernels: triton %s; registers and spills are known for %s only", version, versions.TRITON)
    routing.install(impl)
    blocks.install(impl)
    logger.info("kernels: gate, align and page_copy are in place (impl=%s)", impl)


def obstacle() -> str | None:
    """Return why nothing can be put in place here, or None."""
    if vllm.__version__.split(".")[:2] != versions.VLLM.split("."):
        return f"they are known for vLLM {versions.VLLM}, this is {vllm.__version__}"
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def implementation(switch: str) -> Literal["ref", "triton"] | None:
    """Return which implementation runs on this platform, or None for vLLM's own."""
    if switch == "off":
        return None
    if current_platform.is_cuda():
        return "triton"
    return "ref" if current_platform.is_cpu() and switch == "on" else None
