"""Worker methods that /collective_rpc reaches: `--worker-extension-cls bridge.vllm_plugin.worker.WorkerExtension`.

vLLM's four phases return nothing and run between two decode steps; these return what the trainer must know, and stage
beside serving. Each answers with one dictionary per worker, in `results`.
"""

from typing import Any

from bridge.vllm_plugin.transfer import FolderTransferEngine


class WorkerExtension:
    """Mixed into vLLM's worker class by vLLM itself."""

    weight_transfer_engine: Any

    def rl_jax_stage(self, path: str) -> dict[str, Any]:
        """Begin to stage an update folder; answers at once with the status."""
        return self._rl_jax_engine().begin_stage(path)

    def rl_jax_status(self) -> dict[str, Any]:
        """Return {"state": idle|staging|staged|refused|broken, "fault", "served_version", "served_digest", ...}."""
        return self._rl_jax_engine().status()

    def rl_jax_read_back(self) -> dict[str, Any]:
        """Compare the served weights with the version's checkpoint bytes, tensor by tensor."""
        return self._rl_jax_engine().read_back()

    def _rl_jax_engine(self) -> FolderTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, FolderTransferEngine):
            raise ValueError(
                f"the weight-transfer backend is {type(engine).__name__}; start vLLM with "
                """--weight-transfer-config '{"backend": "rl_jax"}'"""
            )
        return engine
