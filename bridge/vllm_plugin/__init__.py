"""What vLLM needs of this project, loaded by its own plugin door; the one room of bridge/ that imports torch and vllm.

Runs in the fleet environment only, never imports rl_jax or JAX. The entry point is `bridge.vllm_plugin.plugin:register`
(group vllm.general_plugins, in pyproject.toml), the worker extension `bridge.vllm_plugin.worker.WorkerExtension`.
"""
