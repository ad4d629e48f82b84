"""The KV tier inside vLLM: pages that leave the device's cache wait in pinned RAM and on disk.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PageTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kernels.kv_tier.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"ram_bytes": 68719476736, "disk_path": "/scratch/kv", "disk_bytes": 1099511627776}}'

The scheduler's half knows keys and decides (schedule.py); the worker's half holds pages (store.py) and moves them
(mover.py). They speak through vLLM's connector metadata, so they may be in different processes.

Every request must carry cache_salt, the version of the weights, and is left out of the tier where it does not
("salt": "optional" lifts that, for RAM alone: pages on disk outlive the weights). A reset of the connector's cache, which
belongs to every change of weights, empties all tiers and stops requests that were under way from storing.

Loads and stores are part of the step: a load is complete before the forward pass, a store before the next step. A page
that the scheduler counted on and that is gone or does not check is reported to vLLM, which computes it again (with
"kv_load_failure_policy": "recompute"; its default fails the request).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kernels.kv_tier.disk import DiskTier
from kernels.kv_tier.mover import PageMover
from kernels.kv_tier.schedule import Plan, Schedule
from kernels.kv_tier.settings import TierConfig, block_size_of, fingerprint
from kernels.kv_tier.store import Changes, PageStore
from kernels.pages.pool import make_pool

logger = init_logger("vllm.kernels.kv_tier")


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to worker: the work of one step."""

    plan: Plan


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Workers to scheduler: what each gained and lost, and the epoch that it is in."""

    of_rank: dict[int, tuple[int, Changes]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        assert isinstance(other, Report)
        return Report(self.of_rank | other.of_rank)


class SchedulerHalf:
    """Lives in the scheduler: keys, requests, plans."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, tier: TierConfig):
        algorithm = config.cache_config.prefix_caching_hash_algo
        if tier.disk_path is not None and not algorithm.startswith("sha256"):
            raise ValueError(
                f"PageTierConnector: prefix_caching_hash_algo={algorithm} differs between processes; use sha256"
            )
        block_size = block_size_of(config, kv_cache_config)
        self.schedule = Schedule(block_size, config.parallel_config.tensor_parallel_size)
        self.needs_salt = tier.needs_salt
        self.requests: dict[str, Any] = {}
        self.num_unsalted = 0

    def add(self, request: Any) -> None:
        """Take a request in, unless it lacks the salt that it needs."""
        if request.cache_salt is None and self.needs_salt:
            if self.num_unsalted == 0:
                logger.warning("request %s has no cache_salt: it is not tiered (salt=required)", request.request_id)
            self.num_unsalted += 1
            return
        self.requests[request.request_id] = request
        self.track(request)

    def track(self, request: Any) -> None:
        self.schedule.track(request.request_id, request.cache_salt or "", request.block_hashes)

    def plan(self, output: SchedulerOutput) -> Plan:
        """Return the plan of this step from what vLLM scheduled."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        scheduled = {}
        for request_id, num_computed in computed.items():
            blocks = state.get_block_ids(request_id) if state is not None else None
            if request_id in self.requests and blocks is not None:
                self.track(self.requests[request_id])
                scheduled[request_id] = (blocks[0], num_computed + output.num_scheduled_tokens[request_id])
        return self.schedule.plan(scheduled)

    def finish(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.schedule.finish(request_id)


class WorkerHalf:
    """Lives in a worker: pages."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, tier: TierConfig):
        block_size_of(config, kv_cache_config)
        self.tier, self.config, self.kv_cache_config = tier, config, kv_cache_config
        self.rank = get_tensor_model_parallel_rank()
        self.epoch = self.reported_epoch = 0
        self.failed_blocks: set[int] = set()
        self.mover: PageMover | None = None
        self.store: PageStore | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the store for these caches: pages of all layers, in the order of the layers' names."""
        layers = sorted(kv_caches)
        wrong = {
            name: len(kv_caches[name]) for name in layers if len(kv_caches[name]) != self.kv_cache_config.num_blocks
        }
        if wrong:
            raise NotImplementedError(
                f"PageTierConnector: caches of {wrong} pages for {self.kv_cache_config.num_blocks} blocks"
            )
        pool = make_pool([kv_caches[name] for name in layers])
        self.mover = mover = PageMover(pool)
        disk = None
        if self.tier.disk_path is not None:
            folder = self.tier.disk_path / fingerprint(self.config, self.rank, kv_caches)
            disk = DiskTier(folder, mover.row_bytes, self.tier.disk_bytes)
        on_gpu = pool.device.type == "cuda"
        self.store = store = PageStore(mover.row_bytes, self.tier.ram_bytes, disk, pin_memory=on_gpu)
        sizes = (store.num_slots, mover.row_bytes, disk.max_pages if disk is not None else 0)
        logger.info("PageTierConnector: %d pages of %d bytes in RAM, %d on disk", *sizes)

    def load(self, plan: Plan) -> None:
        """Bring the planned pages into the cache; blocks whose page is gone are reported as failed."""
        assert self.store is not None and self.mover is not None
        if plan.epoch != self.epoch:
            self.store.clear()
            self.store.take_changes()
            self.epoch = plan.epoch
        for move in plan.loads:
            pairs = list(zip(move.keys, move.blocks, strict=True))
            there = [(key, block) for key, block in pairs if key in self.store]
            self.failed_blocks.update(block for key, block in pairs if key not in self.store)
            self.mover.write([block for _, block in there], self.rows(there))

    def rows(self, pairs: list[tuple[bytes, int]]):
        """Yield the pages of the pairs; one that does not check on disk fails its block and is written as zeros."""
        assert self.store is not None
        for key, block in pairs:
            page = self.store.get(key)
            if page is None:
                self.failed_blocks.add(block)
                page = torch.zeros(self.store.page_bytes, dtype=torch.uint8)
            yield page

    def save(self, plan: Plan) -> None:
        """Take the planned pages out of the cache."""
        assert self.store is not None and self.mover is not None
        for move in plan.stores:
            for part, rows_NW in self.mover.read(move.blocks):
                self.store.put(move.keys[part], rows_NW)

    def report(self) -> Report | None:
        """Return what changed, or None."""
        if self.store is None:
            return None
        changes = self.store.take_changes()
        if not changes.added and not changes.removed and self.reported_epoch == self.epoch:
            return None
        self.reported_epoch = self.epoch
        return Report({self.rank: (self.epoch, changes)})


class PageTierConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector interface over the two halves; each instance has one of them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        tier = TierConfig.parse(dict(self._kv_transfer_config.kv_connector_extra_config))
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(vllm_config, kv_cache_config, tier)
        else:
            self.worker = WorkerHalf(vllm_config, kv_cache_config, tier)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepPlan)
        self.worker.load(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages of all layers are taken together, in wait_for_save."""

    def wait_for_save(self) -> None:
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepPlan)
        self.worker.save(metadata.plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        failed, self.worker.failed_blocks = self.worker.failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.worker is not None
        return self.worker.report()

    def shutdown(self) -> None:
        if self.worker is not None and self.worker.store is not None:
            self.worker.store.close()

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        if request.request_id not in self.scheduler.requests:
            return 0, False
        self.scheduler.track(request)
        return self.scheduler.schedule.match(request.request_id, request.num_tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.schedule.accept(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.scheduler is not None
        return StepPlan(self.scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        report = connector_output.kv_connector_worker_meta
        for rank, (epoch, changes) in report.of_rank.items() if isinstance(report, Report) else ():
            self.scheduler.schedule.update(rank, epoch, changes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        assert self.scheduler is not None
        self.scheduler.schedule.reset()
        return True
