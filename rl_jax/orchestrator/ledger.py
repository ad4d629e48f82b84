"""The account of a run: one row for each rollout, in ledger.sqlite of the run folder; it must always balance.

    dispatched -> in_flight -> ready -> trained(step)
                      |          |
                      +----------+----> dropped(reason)

Each change is also an event with a rising position. A checkpoint stores a position; `rewind` takes every row back to
it: trained becomes ready again, and what was made later is dropped as REWOUND, so nothing vanishes from the account.
One writer, the orchestrator's thread. Readers (python -m rl_jax.account) may look at any time. A killed process loses
only what it had not committed, and never half of a change. Knows no tokens.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_jax.types import DropReason

FILE = "ledger.sqlite"
VERSION = 1
SCHEMA = """
CREATE TABLE rollouts (
    rollout_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL,
    env TEXT NOT NULL, task_id INTEGER NOT NULL, status TEXT NOT NULL, step INTEGER, reason TEXT, detail TEXT,
    reward REAL);
CREATE TABLE events (
    position INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id INTEGER NOT NULL, status TEXT NOT NULL, step INTEGER,
    reason TEXT);
CREATE INDEX events_of_rollout ON events (rollout_id, position);
CREATE INDEX rollouts_by_status ON rollouts (status);
"""
CHECKS = {
    "rows without a dispatch event, or dispatch events without a row": """
        SELECT DISTINCT rollout_id FROM (
            SELECT rollout_id FROM rollouts WHERE rollout_id NOT IN
                (SELECT rollout_id FROM events WHERE status = 'in_flight')
            UNION ALL SELECT rollout_id FROM events WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)
            UNION ALL SELECT rollout_id FROM events WHERE status = 'in_flight' GROUP BY rollout_id HAVING count(*) > 1
        ) ORDER BY 1""",
    "rollout ids that were given out and have no row": """
        SELECT rollout_id + 1 FROM rollouts r WHERE rollout_id < (SELECT max(rollout_id) FROM rollouts)
            AND NOT EXISTS (SELECT 1 FROM rollouts n WHERE n.rollout_id = r.rollout_id + 1)
        UNION SELECT 0 WHERE (SELECT min(rollout_id) FROM rollouts) > 0""",
    "status differs from the last event": """
        SELECT r.rollout_id FROM rollouts r JOIN events e ON e.position =
            (SELECT max(position) FROM events WHERE rollout_id = r.rollout_id)
        WHERE (r.status, r.step, r.reason) IS NOT (e.status, e.step, e.reason)""",
    "no known status, or one without its step or reason": """
        SELECT rollout_id FROM rollouts WHERE CASE status WHEN 'in_flight' THEN 0 WHEN 'ready' THEN 0
            WHEN 'trained' THEN step IS NULL WHEN 'dropped' THEN reason IS NULL ELSE 1 END""",
    "member of a group trained twice": """
        SELECT max(rollout_id) FROM rollouts WHERE status = 'trained'
        GROUP BY env, task_id, group_id, member HAVING count(*) > 1""",
}
MAX_DETAIL_CHARS = 500
REWOUND = DropReason.REWOUND.value


class LedgerError(RuntimeError):
    """The ledger cannot be read or written, or does not balance."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A rollout that sets off. Example: Dispatch(rollout_id=28, group_id=7, member=0, env="a", task_id=41, attempt=0)."""

    rollout_id: int
    group_id: int
    member: int
    attempt: int
    env: str
    task_id: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where all rollouts of a run are.

    Example: Account(dispatched=12, in_flight=0, ready=4, trained=6, dropped={"stale": 2}, steps=(1, 3), ...) balances.
    """

    dispatched: int
    in_flight: int
    ready: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    steps: tuple[int, int] | None
    """First and last trained step."""
    by_env: dict[str, dict[str, int]]
    """Rollouts by environment and status."""
    by_reason: dict[str, str]
    """For each drop reason the detail of the latest one that has any."""

    @property
    def balances(self) -> bool:
        """Whether every dispatched rollout is somewhere, once."""
        return self.dispatched == self.in_flight + self.ready + self.trained + sum(self.dropped.values())


class Ledger:
    """See the module. Changes stay in one transaction until `flush`."""

    def __init__(self, path: Path):
        """Open the ledger in file `path`, or make it."""
        self.path = path
        try:
            self._connection = sqlite3.connect(path, timeout=30)
        except sqlite3.Error as error:
            raise self._fault(error) from error
        try:
            self._check_version()
        except LedgerError:
            self._connection.close()
            raise

    def _check_version(self) -> None:
        version = int(self._rows("PRAGMA user_version")[0][0])
        if version == 0 and not self._rows("SELECT 1 FROM sqlite_master"):
            self._create()
        elif version != VERSION:
            raise LedgerError(f"{self.path}: ledger of version {version}: expected {VERSION}; use another run folder")

    @property
    def next_rollout_id(self) -> int:
        """The smallest id that was never given out."""
        return int(self._rows("SELECT coalesce(max(rollout_id) + 1, 0) FROM rollouts")[0][0])

    def dispatch(self, rollouts: Iterable[Dispatch]) -> None:
        """Open a row for each, in flight."""
        for r in rollouts:
            self._rows(
                "INSERT INTO rollouts (rollout_id, group_id, member, attempt, env, task_id, status) "
                "VALUES (?, ?, ?, ?, ?, ?, 'in_flight')",
                (r.rollout_id, r.group_id, r.member, r.attempt, r.env, r.task_id),
            )
            self._event(r.rollout_id, "in_flight")

    def ready(self, rollout_id: int, reward: float) -> None:
        """Note that it is finished and waits for a batch."""
        self._move(rollout_id, ("in_flight",), "ready", reward=reward)

    def train(self, rollout_id: int, step: int) -> None:
        """Note that `step` was trained on it."""
        self._move(rollout_id, ("ready",), "trained", step=step)

    def drop(self, rollout_id: int, reason: DropReason, detail: str = "", reward: float | None = None) -> None:
        """Note why it will never be trained."""
        self._move(rollout_id, ("in_flight", "ready"), "dropped", reason=reason.value, detail=detail, reward=reward)

    def flush(self) -> None:
        """Commit what was noted."""
        try:
            self._connection.commit()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def position(self) -> int:
        """Commit, and return where the log of events stands: for a checkpoint."""
        self.flush()
        return int(self._rows("SELECT coalesce(max(position), 0) FROM events")[0][0])

    def rewind(self, position: int) -> int:
        """Go back to a checkpoint: bring each row to its state at `position`; return the number of rows dropped for it.

        What was in flight there is dropped too: its group is dispatched again under new rollout ids.

        Raises:
            LedgerError: the log ends before `position`: this is not the ledger of that checkpoint.
        """
        if (end := self.position()) < position:
            raise LedgerError(
                f"{self.path}: its log ends at {end}, the checkpoint was made at {position}: not the ledger of that run; "
                "resume in the run folder that holds both"
            )
        changed = self._rows(
            "SELECT rollout_id, reason, (SELECT max(position) FROM events "
            "WHERE rollout_id = r.rollout_id AND position <= ?) FROM rollouts r WHERE status = 'in_flight' "
            "OR EXISTS (SELECT 1 FROM events WHERE rollout_id = r.rollout_id AND position > ?)",
            (position, position),
        )
        num_dropped = 0
        for rollout_id, reason_now, event in changed:
            then = self._rows("SELECT status, step, reason FROM events WHERE position IS ?", (event,))
            status, step, reason = then[0] if then else ("in_flight", None, None)
            if status != "in_flight":
                self._set(int(rollout_id), status, step, reason)
            elif reason_now != REWOUND:
                self._set(int(rollout_id), "dropped", None, REWOUND)
                num_dropped += 1
        self.flush()
        return num_dropped

    def ready_ids(self) -> set[int]:
        """Return the rollouts that wait for a batch."""
        return {int(row[0]) for row in self._rows("SELECT rollout_id FROM rollouts WHERE status = 'ready'")}

    def account(self) -> Account:
        """Return the totals; `dispatched` is counted in the log of events, the rest in the rows."""
        totals = {str(status): int(n) for status, n in self._rows("SELECT status, count(*) FROM rollouts GROUP BY 1")}
        dropped = self._rows("SELECT reason, count(*) FROM rollouts WHERE status = 'dropped' GROUP BY 1 ORDER BY 1")
        details = self._rows(
            "SELECT reason, detail FROM rollouts WHERE rollout_id IN "
            "(SELECT max(rollout_id) FROM rollouts WHERE status = 'dropped' AND detail <> '' GROUP BY reason)"
        )
        first, last = self._rows("SELECT min(step), max(step) FROM rollouts WHERE status = 'trained'")[0]
        by_env: dict[str, dict[str, int]] = {}
        for env, status, n in self._rows("SELECT env, status, count(*) FROM rollouts GROUP BY 1, 2 ORDER BY 1, 2"):
            by_env.setdefault(str(env), {})[str(status)] = int(n)
        return Account(
            dispatched=int(self._rows("SELECT count(*) FROM events WHERE status = 'in_flight'")[0][0]),
            in_flight=totals.get("in_flight", 0),
            ready=totals.get("ready", 0),
            trained=totals.get("trained", 0),
            dropped={str(reason): int(n) for reason, n in dropped},
            steps=None if first is None else (int(first), int(last)),
            by_env=by_env,
            by_reason={str(reason): str(detail) for reason, detail in details},
        )

    def faults(self) -> list[str]:
        """Return every way in which rows and events contradict each other; none if the account balances."""
        faults = []
        for what, query in CHECKS.items():
            ids = [int(row[0]) for row in self._rows(query)]
            if ids:
                faults.append(f"{what}: {len(ids)}, first rollouts {ids[:5]}")
        account = self.account()
        if not account.balances:
            faults.append(f"dispatched={account.dispatched} is not the sum of the rest: {account}")
        return faults

    def check(self) -> None:
        """Raise LedgerError listing all `faults`."""
        if faults := self.faults():
            raise LedgerError(f"{self.path}: does not balance\n" + "\n".join(faults))

    def close(self) -> None:
        """Commit and close the file."""
        self.flush()
        self._connection.close()

    def _create(self) -> None:
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _move(
        self,
        rollout_id: int,
        origins: Sequence[str],
        status: str,
        *,
        step: int | None = None,
        reason: str | None = None,
        detail: str | None = None,
        reward: float | None = None,
    ) -> None:
        row = self._rows("SELECT status FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        assert row and row[0][0] in origins, f"rollout {rollout_id}: {row} -> {status}, expected it in {origins}"
        self._set(rollout_id, status, step, reason)
        if detail or reward is not None:
            self._rows(
                "UPDATE rollouts SET detail = ?, reward = coalesce(?, reward) WHERE rollout_id = ?",
                ((detail or "")[:MAX_DETAIL_CHARS], reward, rollout_id),
            )

    def _set(self, rollout_id: int, status: str, step: int | None, reason: str | None) -> None:
        self._rows(
            "UPDATE rollouts SET status = ?, step = ?, reason = ?, detail = NULL WHERE rollout_id = ?",
            (status, step, reason, rollout_id),
        )
        self._event(rollout_id, status, step, reason)

    def _event(self, rollout_id: int, status: str, step: int | None = None, reason: str | None = None) -> None:
        self._rows(
            "INSERT INTO events (rollout_id, status, step, reason) VALUES (?, ?, ?, ?)",
            (rollout_id, status, step, reason),
        )

    def _rows(self, query: str, values: Sequence[str | float | None] = ()) -> list[tuple]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _fault(self, error: sqlite3.Error) -> LedgerError:
        return LedgerError(f"{self.path}: {error}; check that the disk is not full and that the file is a ledger")
