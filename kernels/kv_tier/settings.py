"""What the tier is told and what it can serve: its settings, the models whose pages it knows, the folder of a worker."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

KEYS = {"ram_bytes", "disk_path", "disk_bytes", "salt"}


@dataclass(frozen=True)
class TierConfig:
    """What kv_connector_extra_config may say."""

    ram_bytes: int
    """Pinned RAM of each worker."""
    disk_path: Path | None = None
    """Folder; each worker makes one of its own in it. None: no disk tier."""
    disk_bytes: int = 0
    """Bound of each worker's folder."""
    needs_salt: bool = True

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> "TierConfig":
        """Read and check the dictionary.

        Raises:
            ValueError: unknown or missing keys, or values that make no sense together.
        """
        if unknown := set(extra) - KEYS:
            raise ValueError(f"kv_connector_extra_config: unknown keys {sorted(unknown)}; known are {sorted(KEYS)}")
        if ("disk_path" in extra) != ("disk_bytes" in extra):
            raise ValueError("kv_connector_extra_config: disk_path and disk_bytes go together; give both or neither")
        for name in ("ram_bytes", *(["disk_bytes"] if "disk_bytes" in extra else [])):
            value = extra.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"kv_connector_extra_config.{name}: must be a number of bytes, got {value!r}")
        if not isinstance(extra.get("disk_path", "."), str) or extra.get("disk_path") == "":
            raise ValueError(f"kv_connector_extra_config.disk_path: must be a folder, got {extra['disk_path']!r}")
        salt = extra.get("salt", "required")
        if salt not in ("required", "optional"):
            raise ValueError(f'kv_connector_extra_config.salt: must be "required" or "optional", got {salt!r}')
        if salt == "optional" and "disk_path" in extra:
            raise ValueError(
                'kv_connector_extra_config.salt: must be "required" with disk_path: pages on disk outlive the weights, '
                "and nothing else tells those of other weights"
            )
        path = Path(extra["disk_path"]) if "disk_path" in extra else None
        return cls(extra["ram_bytes"], path, extra.get("disk_bytes", 0), salt == "required")


def block_size_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens of a block, or refuse a model or a parallel layout whose pages this connector does not know.

    Raises:
        NotImplementedError: more than one kind of cache, sliding windows or states, pipeline or context parallelism.
        ValueError: prefix caching is off, or its hashes differ between processes and a disk tier would never hit.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec) for group in groups]
    if len(groups) != 1 or kinds[0] not in (FullAttentionSpec, MLAAttentionSpec):
        names = [kind.__name__ for kind in kinds]
        raise NotImplementedError(f"PageTierConnector: needs one group of full attention or MLA layers, got {names}")
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise NotImplementedError("PageTierConnector: pipeline and context parallelism are not supported")
    if not config.cache_config.enable_prefix_caching:
        raise ValueError("PageTierConnector: prefix caching is off, so blocks have no hashes; enable it")
    size = groups[0].kv_cache_spec.block_size
    if kv_cache_config.hash_block_size not in (None, size):
        raise NotImplementedError(
            f"PageTierConnector: hashes of {kv_cache_config.hash_block_size} tokens for blocks of {size}"
        )
    return size


def fingerprint(config: VllmConfig, rank: int, kv_caches: dict[str, torch.Tensor]) -> str:
    """Return the name of a worker's folder: pages may only meet caches of the same model, layout and place.

    The model is its path, its revision and all that its configuration says, overrides such as another rope scaling
    included: these change keys without changing a shape.
    """
    model, parallel = config.model_config, config.parallel_config
    parts = [model.model, str(model.revision), str(model.dtype), str(model.quantization)]
    parts += [json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str), config.cache_config.cache_dtype]
    parts += [f"tp{rank}of{parallel.tensor_parallel_size}", f"dp{parallel.data_parallel_rank}"]
    for name in sorted(kv_caches):
        cache = kv_caches[name]
        parts.append(f"{name} {cache.dtype} {tuple(cache.shape[1:])} {cache.stride()[1:]}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
