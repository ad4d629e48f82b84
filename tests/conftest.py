"""What every test runs under: eight emulated CPU devices, strict promotion, checked annotations, no window."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["MPLBACKEND"] = "agg"

import hypothesis
import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# In these rooms annotations, shapes too, are checked at every call; an int may stand where a float is asked for.
CHECKED = ["rl_jax.models", "rl_jax.losses", "rl_jax.optim", "rl_jax.metrics", "rl_jax.advantages", "rl_jax.packing"]
install_import_hook(CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# A first call compiles, so its time says nothing; a failure must repeat on another machine.
hypothesis.settings.register_profile("rl_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rl_jax")
