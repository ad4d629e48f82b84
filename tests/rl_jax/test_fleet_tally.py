"""rl_jax/rollout/fleet_tally.py: preemptions of a pause are no sign of a full cache; time counts once."""

from rl_jax.rollout.fleet_tally import FleetTally


def test_preemptions_of_a_pause_and_of_an_earlier_life_do_not_count():
    tally = FleetTally()
    looks = [("a", 1, 7), ("a", 1, 9), ("a", 2, 40), ("a", 2, 43), ("b", 0, 5), ("a", 2, 0), ("a", 2, 1), ("b", 0, 6)]
    seen = []
    for name, num_syncs, num_preemptions in looks:
        tally.see_preemptions(name, num_syncs, num_preemptions)
        seen.append(tally.num_preemptions)
    assert seen == [0, 2, 2, 5, 5, 5, 6, 7]


def test_time_with_several_requests_out_counts_once():
    now_s = 10.0
    tally = FleetTally(clock=lambda: now_s)
    with tally.busy():
        now_s += 3
        with tally.busy():
            now_s += 2
        assert tally.busy_s == 5
    now_s += 100
    with tally.busy():
        now_s += 1
    assert tally.busy_s == 6
