"""What every test runs under: eight emulated CPU devices, strict promotion, checked annotations, no window."""

import hashlib
import os
import platform
from pathlib import Path

import hypothesis
import jax
from jaxtyping import install_import_hook


def program_cache() -> Path:
    """Return where compiled programs, most of a test's time, stay between runs: a folder for each kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    fingerprint = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rl_jax-tests" / fingerprint


collect_ignore = ["fleet", "kernels"]  # those run in the fleet environment: make test-fleet

FOR_CHILDREN_TOO = {
    "jax_platforms": os.environ.get("JAX_PLATFORMS", "cpu"),
    "jax_compilation_cache_dir": str(program_cache()),
    "jax_compilation_cache_max_size": 2**30,  # bytes; with a limit the cache is locked, and test workers share it
    "jax_persistent_cache_min_compile_time_secs": 0.2,
}
for name, value in FOR_CHILDREN_TOO.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)
os.environ["MPLBACKEND"] = "agg"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# In these rooms annotations, shapes too, are checked at every call; an int may stand where a float is asked for.
CHECKED = ["bridge"] + [
    f"rl_jax.{room}"
    for room in ("axes", "mesh", "tokenizer", "models", "losses", "optim", "metrics", "advantages", "packing")
]
install_import_hook(CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# A first call compiles, so its time says nothing; a failure must repeat on another machine.
hypothesis.settings.register_profile("rl_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rl_jax")
