"""How many nodes for training and how many for sampling, found by simulating the loop.

Three searches, each over one number, with the other side fixed: the smallest fleet that keeps a trainer busy, the
smallest trainer that keeps up with a fleet, and the best split of a number of nodes. A step of the trainer takes time in
inverse proportion to its nodes, an update of the weights by the slower of sending and receiving.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rl_jax.plan.kv_budget import KvBudget
from rl_jax.plan.lengths import Lengths
from rl_jax.plan.loop_result import Fleet, LoopResult
from rl_jax.plan.sampler_config import SamplerPlanConfig
from rl_jax.plan.served import ServedModel
from rl_jax.plan.simulate import simulate
from rl_jax.plan.speed import Speed

MOST_TRIED = 12
"""Splits of a number of nodes that are simulated first; those beside the best of them follow."""
MOST_NODES = 4096
"""Largest trainer that is tried."""
FLAT_FRAC = 0.02
"""A fleet of twice the size that shortens the step by less than this is not worth doubling again."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One update of the weights of the whole fleet."""

    replica_bytes: float
    """To each server that holds the model."""
    num_copies: int
    """Such servers, prefill servers too."""
    transfer_s: float
    """In which the trainer waits and replicas go on."""
    pause_s: float
    """In which replicas stand still."""

    @property
    def total_bytes(self) -> float:
        """Bytes that the trainer sends."""
        return self.replica_bytes * self.num_copies


@dataclass(frozen=True, kw_only=True)
class Balance:
    """One pair of trainer and fleet, simulated. Example: trainer_nodes=12, cells=1, fleet_nodes=16.0, step of 300 s."""

    trainer_nodes: int
    cells: int
    fleet_nodes: float
    train_s: float
    sync: Sync
    loop: LoopResult

    @property
    def nodes(self) -> float:
        """All nodes."""
        return self.trainer_nodes + self.fleet_nodes


class Balancer:
    """Simulates pairs of trainer and fleet; the same pair is simulated once."""

    def __init__(self, model: ServedModel, config: SamplerPlanConfig, budget: KvBudget, train_s: float):
        """`train_s`: seconds of a step on config.trainer.nodes nodes."""
        self._model, self._config, self._budget, self._train_s = model, config, budget, train_s
        self._speed = Speed(model, config.serving)
        self._done: dict[tuple[int, int, bool], Balance] = {}

    def at(self, trainer_nodes: int, cells: int, is_trainer_instant: bool = False) -> Balance:
        """Simulate a pair. `is_trainer_instant`: with a trainer that takes no time, for the bound of a fleet."""
        key = (trainer_nodes, cells, is_trainer_instant)
        if key not in self._done:
            self._done[key] = self._simulate(trainer_nodes, cells, is_trainer_instant)
        return self._done[key]

    def fleet_for(self, trainer_nodes: int) -> Balance:
        """Return the smallest fleet whose step is within the tolerance of what the trainer alone would take.

        Where no fleet gets there, since long rollouts take their time on any: of the shortest step that one can reach.
        """
        search = self._config.search
        bound_s = alone_s(self.at(trainer_nodes, 1))
        best_s, cells = self.at(trainer_nodes, 1).loop.step_s, 1
        while best_s > (1 + search.tolerance) * bound_s and cells < search.max_cells:
            cells = min(2 * cells, search.max_cells)
            step_s = self.at(trainer_nodes, cells).loop.step_s
            is_flat = step_s > (1 - FLAT_FRAC) * best_s
            best_s = min(best_s, step_s)
            if is_flat:
                break
        limit_s = (1 + search.tolerance) * max(best_s, bound_s)
        return self.at(trainer_nodes, _smallest(lambda n: self.at(trainer_nodes, n).loop.step_s <= limit_s, cells))

    def with_staleness(self, max_staleness: int, trainer_nodes: int, cells: int) -> Balance:
        """Simulate a pair under another bound on staleness."""
        loop = replace(self._config.loop, max_staleness=max_staleness)
        other = Balancer(self._model, replace(self._config, loop=loop), self._budget, self._train_s)
        return other.at(trainer_nodes, cells)

    def trainer_for(self, cells: int) -> Balance:
        """Return the smallest trainer whose step is within the tolerance of what the fleet alone would take."""
        bound_s = self.at(1, cells, is_trainer_instant=True).loop.step_s
        limit_s = (1 + self._config.search.tolerance) * bound_s
        return self.at(_smallest(lambda nodes: self.at(nodes, cells).loop.step_s <= limit_s, MOST_NODES), cells)

    def splits(self, total_nodes: int) -> list[Balance]:
        """Return the splits of `total_nodes` that were tried, by cells; the best has the shortest step."""
        per_cell = self._config.serving.cell_gpus / self._config.serving.spec.per_node
        most = int((total_nodes - 1) / per_cell)
        stride = -(-most // MOST_TRIED) if most else 1
        tried = {cells: self._split(total_nodes, cells) for cells in range(1, most + 1, stride)}
        if tried:
            best = min(tried.values(), key=lambda one: one.loop.step_s).cells
            for cells in range(max(1, best - stride + 1), min(most, best + stride - 1) + 1):
                tried[cells] = self._split(total_nodes, cells)
        return [tried[cells] for cells in sorted(tried)]

    def _split(self, total_nodes: int, cells: int) -> Balance:
        return self.at(int(total_nodes - self._fleet_nodes(cells)), cells)

    def _fleet_nodes(self, cells: int) -> float:
        serving = self._config.serving
        return cells * serving.cell_gpus / serving.spec.per_node

    def _simulate(self, trainer_nodes: int, cells: int, is_trainer_instant: bool) -> Balance:
        config, budget = self._config, self._budget
        sync = sync_of(self._model, config, budget, trainer_nodes, cells)
        train_s = self._train_s * config.trainer.nodes / trainer_nodes
        serving = config.serving
        fleet = Fleet(
            speed=self._speed,
            num_replicas=cells,
            slots=budget.ranks * budget.max_num_seqs,
            kv_tokens=budget.tokens,
            num_prefill_servers=serving.prefill_servers * cells if serving.prefill_gpus else 0,
            train_s=0.0 if is_trainer_instant else train_s,
            transfer_s=0.0 if is_trainer_instant else sync.transfer_s,
            pause_s=sync.pause_s,
        )
        search = config.search
        lengths = Lengths(config.lengths, serving.max_len, search.seed)
        # Batches come in bursts of max_staleness + 1 where sampling is the bound: whole bursts are measured.
        burst = min(config.loop.max_staleness + 1, search.steps)
        steps, warmup = -(-search.steps // burst) * burst, max(search.warmup_steps, 2 * burst)
        loop = simulate(fleet, config.loop, lengths, warmup=warmup, steps=steps, seed=search.seed)
        return Balance(
            trainer_nodes=trainer_nodes,
            cells=cells,
            fleet_nodes=self._fleet_nodes(cells),
            train_s=train_s,
            sync=sync,
            loop=loop,
        )


def alone_s(pair: Balance) -> float:
    """Return the seconds of a step if the trainer never waited."""
    return pair.train_s + pair.sync.transfer_s + pair.sync.pause_s


def sync_of(model: ServedModel, config: SamplerPlanConfig, budget: KvBudget, trainer_nodes: int, cells: int) -> Sync:
    """Return bytes and seconds of an update: every server gets a copy of its own, from all nodes of the trainer at once."""
    serving, sync = config.serving, config.sync
    copies = cells * (1 + (serving.prefill_servers if serving.prefill_gpus else 0))
    replica_bytes = model.nbytes * sync.changed_frac
    smallest = min(serving.num_gpus, serving.prefill_gpus // serving.prefill_servers or serving.num_gpus)
    sending_s = copies * replica_bytes / (trainer_nodes * config.trainer.network_bytes_s)
    receiving_s = replica_bytes / (smallest * serving.spec.network_bytes_s)
    wire_s = max(sending_s, receiving_s) / sync.network_frac
    swap_s = sync.swap_s + budget.weight_bytes * sync.changed_frac / sync.swap_bytes_s
    return Sync(
        replica_bytes=replica_bytes,
        num_copies=copies,
        transfer_s=wire_s if sync.is_staged else 0.0,
        pause_s=swap_s if sync.is_staged else wire_s + swap_s,
    )


def _smallest(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the smallest number of 1..most that is enough, if larger ones are too; `most` if none is."""
    high = 1
    while high < most and not is_enough(high):
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
