"""The asynchronous loop as the trainer's thread sees it (step 2 of docs/walk.md).

    trainer's thread (blocks)                 orchestrator's thread (one event loop, never blocks on the trainer)
      restore(state)?  ----------------------> queue, curriculum, ledger as they were
      publish(weights, v) -------------------> samplers swap, acknowledge; v is routable; groups are admitted, played ...
      batch = next_batch(v) <----------------- ... landed, until a batch can be cut within the staleness bound
      train; record_trained(v + 1, ...) -----> ledger
      state() <------------------------------- for the checkpoint of step v + 1, v + 1 published or not
      publish(weights, v + 1); next_batch(v + 1) ...
      close() -------------------------------> what is left: RUN_ENDED

The policy is in dispatch.py (what is admitted and played) and ship.py (what is cut and published).
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rl_jax.advantages import Advantages
from rl_jax.loop_thread import LoopThread
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.curriculum import Curriculum
from rl_jax.orchestrator.ship import Shipper, StepBatch
from rl_jax.orchestrator.snapshot import Snapshot
from rl_jax.rollout.episode import Player
from rl_jax.types import Rollout

T = TypeVar("T")


class Orchestrator:
    """See the module. All methods block and may be called from any thread; none waits for work that died."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        player: Player,
        weights: Mapping[str, float],
        advantages: Advantages,
        ledger_path: Path,
        seed: int,
        last_step: int | None = None,
    ):
        """Prepare a run; `start` begins it.

        Args:
            player: its pool is started and its sampler ready; both stay the caller's to close, after this.
            weights: share of the prompts by environment.
            advantages: used in the orchestrator's thread only.
            ledger_path: rl_jax.orchestrator.ledger.FILE in the run folder.
            last_step: nothing is sampled for later steps; None = endless.
        """
        self._config = config
        self._player = player
        self._weights = dict(weights)
        self._advantages = advantages
        self._ledger_path = ledger_path
        self._seed = seed
        self._last_step = last_step
        self._thread: LoopThread | None = None
        self._shipper: Shipper | None = None

    def start(self) -> None:
        """Open the ledger and start the thread; nothing is sampled before the first `publish`."""
        assert self._thread is None, "start() was called twice"
        self._thread = LoopThread("orchestrator")
        try:
            self._shipper = self._thread.run(self._make)
        except BaseException:
            self._thread.close()
            raise

    def publish(self, weights: object, version: int) -> None:
        """Give the samplers new weights; return when all sample from them. Until then, `version` is not routed to."""
        shipper = self._started()
        self.run(lambda: shipper.publish(weights, version))

    def next_batch(self, version: int) -> StepBatch:
        """Return what policy `version` trains on, for step `version + 1`; wait for it as long as it may still come."""
        shipper = self._started()
        return self.run(lambda: shipper.next_batch(version))

    def record_trained(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Note that `step` was trained on the rollouts of next_batch(step - 1)."""
        shipper = self._started()
        self._call(lambda: shipper.record_trained(step, rollouts))

    def state(self) -> bytes:
        """Return the state for a checkpoint: curriculum, queue, work in flight, baselines, position of the ledger."""
        return self._call(self._started().snapshot).to_bytes()

    def restore(self, state: bytes) -> None:
        """Go on from what `state` returned; after `start`, before the first `publish`.

        Raises:
            ValueError: damaged bytes. LedgerError: the run folder is not the one that the state is of.
        """
        shipper, snapshot = self._started(), Snapshot.from_bytes(state)
        self._call(lambda: shipper.restore(snapshot))

    def run(self, make: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run a coroutine in the orchestrator's thread, beside the loop: an evaluation with the same sampler and pool."""
        assert self._thread is not None, "start() first"
        return self._thread.run(make)

    def close(self) -> None:
        """Stop sampling, close the account, end the thread; idempotent."""
        if self._thread is None:
            return
        shipper, self._shipper = self._shipper, None
        try:
            if shipper:
                self._thread.run(shipper.close)
        finally:
            self._thread.close()

    def _started(self) -> Shipper:
        assert self._shipper is not None, "the orchestrator is not started, or closed"
        return self._shipper

    def _call(self, function: Callable[[], T]) -> T:
        assert self._thread is not None, "start() first"
        return self._thread.call(function)

    async def _make(self) -> Shipper:
        sizes = {env: await self._player.pool.info(env) for env in self._weights}
        curriculum = Curriculum(self._weights, sizes, self._seed, self._config.max_fruitless_tasks)
        shipper = Shipper(
            self._config,
            player=self._player,
            curriculum=curriculum,
            advantages=self._advantages,
            ledger_path=self._ledger_path,
            last_step=self._last_step,
        )
        shipper.start()
        return shipper
