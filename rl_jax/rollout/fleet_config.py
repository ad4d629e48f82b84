"""What a run says about its fleet of vLLM servers. Knows no server and no request."""

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from rl_jax.config import refuse
from rl_jax.rollout.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """vLLM servers as the sampler: started by the run, or running already and named by `urls` (docs/bridge.md)."""

    type: Literal["vllm"] = "vllm"
    urls: tuple[str, ...] = ()
    """Servers that run already, for example ["http://10.0.0.7:8000"]; empty = the run starts its own, see `server`."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The servers that the run starts."""
    format: Literal["float32", "bf16", "fp8-block", "fp8-channel"] = "bf16"
    """How weights cross to the servers: what is quantised, and how, is in docs/bridge.md."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the servers compute in; auto = float32 for format float32, else bfloat16."""
    max_len: int = 1024
    """Longest sequence in tokens, prompt and completion together (vLLM's max_model_len)."""
    max_running: int = 64
    """Requests that a server decodes at a time (vLLM's max_num_seqs)."""
    delta: bool = True
    """Send only what changed since the version that a server holds; whatever does not hold it gets everything."""
    updates_dir: str = ""
    """Where weights are laid down for the servers; empty = in the run folder. Servers on other machines need a path
    that they see under the same name."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of requests in flight at an update. recompute: their KV is computed again under the new weights, so
    that every log-probability is exactly that of the version on its token. keep: the KV of the old weights stays, as in
    the embedded sampler; no work is done twice, and later tokens come from a mixture of both versions."""
    max_updating: int = 0
    """Servers that are updated at the same time; the others go on serving. 0 = all at once."""
    control_timeout_s: float = 30.0
    """Seconds that a server may take for one control call, and for a look at its health."""
    update_timeout_s: float = 300.0
    """Seconds that a server may take for a whole update; then it is evicted."""
    request_timeout_s: float = 1800.0
    """Seconds that a server may take for one completion; then it is evicted and the completion written elsewhere."""
    lost_after_s: float = 300.0
    """Seconds without any live server after which the sampler counts as lost."""
    max_dispatches: int = 5
    """Times that one completion is tried, on whatever servers, before the sampler counts as lost."""
    poll_s: float = 1.0
    """Seconds between two looks at servers that were lost."""

    def __post_init__(self) -> None:
        positive = ("max_len", "max_running", "max_dispatches")
        seconds = ("control_timeout_s", "update_timeout_s", "request_timeout_s", "lost_after_s", "poll_s")
        refuse(
            [
                *(f"{k}={getattr(self, k)}: must be at least 1" for k in positive if getattr(self, k) < 1),
                *(
                    f"{k}={getattr(self, k)}: must be positive and finite"
                    for k in seconds
                    if not 0 < getattr(self, k) < float("inf")
                ),
                None if self.max_updating >= 0 else f"max_updating={self.max_updating}: must be at least 0",
                *(
                    f"urls={url!r}: expected http://host:port without a path"
                    for url in self.urls
                    if not _is_address(url)
                ),
                None if len(set(self.urls)) == len(self.urls) else f"urls={list(self.urls)}: names a server twice",
                f"dtype='float32': format={self.format!r} is computed in bfloat16; use auto"
                if self.dtype == "float32" and self.format.startswith("fp8") and self.server.device == "gpu"
                else None,
                "dtype='bfloat16': format='float32' keeps 24 bits that bfloat16 drops at once; use format 'bf16'"
                if self.dtype == "bfloat16" and self.format == "float32"
                else None,
            ]
        )

    @property
    def compute_dtype(self) -> str:
        """What vLLM gets as --dtype."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.format == "float32" else "bfloat16"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:  # a port that is no number, or none of those that there are
        return False
    is_bare = url.count("/") == 2 and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and is_bare
