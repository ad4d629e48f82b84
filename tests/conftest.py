"""What every test runs under: eight emulated CPU devices, strict promotion, no window, the same examples each time."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["MPLBACKEND"] = "agg"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first call compiles, so time says nothing; failures must repeat on another machine.
hypothesis.settings.register_profile("rl_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rl_jax")
