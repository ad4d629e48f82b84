"""orchestrator/ledger.py and account.py: the account balances, whatever happens, and says so only when it does."""

import json
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_jax import account
from rl_jax.orchestrator.ledger import FILE, Dispatch, Ledger, LedgerError
from rl_jax.types import DropReason


def dispatch(ledger, *rollout_ids, group_id=0):
    ledger.dispatch(
        Dispatch(rollout_id=i, group_id=group_id, member=n, attempt=0, env="ab"[group_id % 2], task_id=group_id)
        for n, i in enumerate(rollout_ids)
    )


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / FILE)
    yield made
    made.close()


def statuses(ledger):
    return {row[0]: tuple(row[1:]) for row in ledger._rows("SELECT rollout_id, status, step, reason FROM rollouts")}


def fill(ledger):
    """Rollouts 0..3 trained, trained, dropped, ready; 4, 5 in flight."""
    dispatch(ledger, 0, 1, 2, 3)
    for i in (0, 1, 3):
        ledger.ready(i, 0.5)
    ledger.drop(2, DropReason.REWARD_TIMEOUT, "a: reward of task 0: no answer in 1 s")
    ledger.train(0, step=1)
    ledger.train(1, step=2)
    dispatch(ledger, 4, 5, group_id=1)


def test_account_counts_everything_once(ledger):
    fill(ledger)
    ledger.check()
    found = ledger.account()
    assert (found.dispatched, found.in_flight, found.ready, found.trained) == (6, 2, 1, 2)
    assert found.dropped == {"reward_timeout": 1}
    assert found.steps == (1, 2)
    assert found.by_env == {"a": {"dropped": 1, "ready": 1, "trained": 2}, "b": {"in_flight": 2}}
    assert found.by_reason == {"reward_timeout": "a: reward of task 0: no answer in 1 s"}
    assert found.balances


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.train(4, 3),  # not ready
        lambda ledger: ledger.ready(3, 1.0),  # already
        lambda ledger: ledger.train(0, 3),  # already
        lambda ledger: ledger.drop(2, DropReason.STALE),
        lambda ledger: ledger.drop(99, DropReason.STALE),
    ],
)
def test_moves_that_cannot_be_are_refused(ledger, wrong):
    fill(ledger)
    with pytest.raises(AssertionError):
        wrong(ledger)
    ledger.check()


def test_rewind_reverts_what_came_later(ledger):
    dispatch(ledger, 0, 1, 2, 3)
    ledger.ready(0, 0.1)
    ledger.ready(1, 0.2)
    ledger.train(0, 1)
    position = ledger.position()
    before = statuses(ledger)
    ledger.train(1, 2)
    ledger.ready(2, 0.3)
    ledger.train(2, 2)
    dispatch(ledger, 4, 5, group_id=1)
    ledger.drop(4, DropReason.ZERO_VARIANCE)
    assert ledger.rewind(position) == 4
    rewound = ("dropped", None, "rewound")
    assert statuses(ledger) == {0: before[0], 1: ("ready", None, None)} | dict.fromkeys((2, 3, 4, 5), rewound)
    ledger.check()
    assert ledger.account().dispatched == 6
    assert ledger.next_rollout_id == 6
    ledger.train(1, 2)  # again: the same step of the resumed run
    ledger.check()
    assert ledger.rewind(position) == 0
    assert statuses(ledger)[1] == ("ready", None, None)


def test_rewind_to_a_branch_that_was_left_brings_it_back(ledger):
    start = ledger.position()
    dispatch(ledger, 0, 1)
    ledger.ready(0, 0.1)
    ledger.train(0, 1)
    late = ledger.position()
    ledger.rewind(start)
    dispatch(ledger, 2, 3)
    ledger.ready(2, 0.1)
    ledger.train(2, 1)
    ledger.rewind(late)
    assert {i: status[0] for i, status in statuses(ledger).items()} == {
        0: "trained",
        1: "dropped",
        2: "dropped",
        3: "dropped",
    }
    ledger.check()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=40), back=st.integers(0, 40))
def test_random_history_rewinds_to_exactly_what_was(tmp_path_factory, moves, back):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / FILE)
    ledger._connection.execute("PRAGMA synchronous = OFF")
    history = [(ledger.position(), {})]
    for kind, pick in moves:
        by_status = {}
        for rollout_id, status in statuses(ledger).items():
            by_status.setdefault(status[0], []).append(rollout_id)
        flying, ready = by_status.get("in_flight", []), by_status.get("ready", [])
        if kind == 0:
            dispatch(ledger, ledger.next_rollout_id, group_id=ledger.next_rollout_id)
        elif kind == 1 and flying:
            ledger.ready(flying[pick % len(flying)], 0.5)
        elif kind == 2 and ready:
            ledger.train(ready[pick % len(ready)], step=pick)
        elif kind == 3 and flying + ready:
            ledger.drop((flying + ready)[pick % len(flying + ready)], DropReason.STALE)
        elif kind == 4 and pick < 10:
            ledger.rewind(history[pick % len(history)][0])
        history.append((ledger.position(), statuses(ledger)))
    position, then = history[back % len(history)]
    ledger.rewind(position)
    rewound = ("dropped", None, "rewound")
    expected = {i: rewound if s[0] == "in_flight" else s for i, s in then.items()}
    assert statuses(ledger) == {i: expected.get(i, rewound) for i in statuses(ledger)}
    ledger.check()
    ledger.close()


def test_uncommitted_work_is_lost_whole(tmp_path):
    ledger = Ledger(tmp_path / FILE)
    fill(ledger)
    ledger.flush()
    ledger.train(3, step=3)
    dispatch(ledger, 6, 7, group_id=2)
    ledger._connection.close()  # what a killed process leaves behind
    reopened = Ledger(tmp_path / FILE)
    reopened.check()
    assert reopened.account().dispatched == 6
    assert reopened.account().ready == 1
    assert reopened.next_rollout_id == 6
    reopened.close()


def test_ledger_of_another_run_is_refused(ledger):
    fill(ledger)
    with pytest.raises(LedgerError, match=r"its log ends at 12, the checkpoint was made at 100"):
        ledger.rewind(100)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("DELETE FROM rollouts WHERE rollout_id = 3", "dispatch events without a row"),
        ("DELETE FROM rollouts WHERE rollout_id = 3", "have no row: 1, first rollouts [3]"),
        ("DELETE FROM rollouts WHERE rollout_id = 3", "dispatched=6 is not the sum"),
        ("DELETE FROM rollouts WHERE rollout_id = 0", "have no row: 1, first rollouts [0]"),
        ("UPDATE rollouts SET status = 'trained', step = 4 WHERE rollout_id = 3", "differs from the last event: 1"),
        ("UPDATE rollouts SET step = 9 WHERE rollout_id = 1", "differs from the last event: 1, first rollouts [1]"),
        ("UPDATE rollouts SET reason = NULL WHERE rollout_id = 2", "without its step or reason: 1"),
        ("UPDATE rollouts SET member = 0 WHERE rollout_id = 1", "trained twice: 1"),
        ("DELETE FROM events WHERE rollout_id = 4", "rows without a dispatch event"),
    ],
)
def test_tampering_is_found(tmp_path, capsys, change, fault):
    ledger = Ledger(tmp_path / FILE)
    fill(ledger)
    ledger._rows(change)
    with pytest.raises(LedgerError) as error:
        ledger.check()
    assert fault in str(error.value)
    ledger.close()
    assert account.main([str(tmp_path)]) == 1
    assert "DOES NOT BALANCE" in capsys.readouterr().out


def test_account_command(tmp_path, capsys):
    ledger = Ledger(tmp_path / FILE)
    fill(ledger)
    ledger.flush()  # a reader may look while the run holds the file open
    assert account.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "balances: every one of 6 rollouts" in text
    assert "steps 1 to 2" in text
    assert "reward_timeout" in text
    assert account.main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dispatched"], found["trained"], found["balances"]) == (6, 2, True)
    ledger.close()


def test_account_command_without_a_ledger(tmp_path, capsys):
    assert account.main([str(tmp_path)]) == 1
    assert "no such file; expected the folder of a run" in capsys.readouterr().err
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    assert account.main([str(tmp_path)]) == 1
    assert "file is not a database" in capsys.readouterr().err
    (tmp_path / FILE).unlink()
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("CREATE TABLE x (y)")
    other.close()
    assert account.main([str(tmp_path)]) == 1
    assert "ledger of version 0: expected 1" in capsys.readouterr().err
