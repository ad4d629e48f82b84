"""Where the server listens, what it calls the policy, and what it samples with when a request does not say."""

from dataclasses import dataclass

from rl_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The HTTP server of the embedded sampler."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 = every network of the machine. There is no authentication."""
    port: int = 8000
    """Port to listen on; 0 = any free one, printed at the start."""
    model_name: str = "policy"
    """Name of the policy in requests and replies; a request for another one gets 404."""
    max_tokens: int = 0
    """Longest completion when a request does not say; 0 = whatever the context has room for."""
    temperature: float = 1.0
    """Temperature when a request does not say, in [0, 1000]; 0 = greedy."""
    top_p: float = 1.0
    """top_p when a request does not say, in (0, 1]; 1 = off."""
    top_k: int = 0
    """top_k when a request does not say; 0 = off."""
    min_p: float = 0.0
    """min_p when a request does not say, in [0, 1]; 0 = off."""
    return_routed_experts: bool = False
    """Return routed experts when a request does not say; the sampler must keep them."""
    max_body_bytes: int = 16 * 2**20
    """Largest request body."""
    shutdown_s: float = 5.0
    """Time that running requests get to hand out what they have when the server stops."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.host else "host='': expected an address, for example 127.0.0.1",
                None if 0 <= self.port <= 65535 else f"port={self.port}: expected 0 to 65535",
                None if self.model_name else "model_name='': expected a name",
                None if self.max_tokens >= 0 else f"max_tokens={self.max_tokens}: must be at least 0",
                None if 0 <= self.temperature <= 1000 else f"temperature={self.temperature}: must be in [0, 1000]",
                None if 0 < self.top_p <= 1 else f"top_p={self.top_p}: must be in (0, 1]",
                None if self.top_k >= 0 else f"top_k={self.top_k}: must be at least 0",
                None if 0 <= self.min_p <= 1 else f"min_p={self.min_p}: must be in [0, 1]",
                None if self.max_body_bytes >= 1 else f"max_body_bytes={self.max_body_bytes}: must be at least 1",
                None if self.shutdown_s > 0 else f"shutdown_s={self.shutdown_s}: must be above 0",
            ]
        )
