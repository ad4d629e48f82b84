"""The page pool against a plain model of itself, and the keys of prefixes."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rl_jax.engine.pages import PagePool, prefix_keys


@hypothesis.given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop", "find", "forget"]), st.integers(0, 30))))
def test_pages_are_never_lost_shared_by_accident_or_given_out_while_known(actions):
    pool, held, known = PagePool(8), [], {}
    for action, n in actions:
        if action == "take" and n % 4 <= pool.num_available:
            pages = pool.take(n % 4)
            assert not set(pages) & set(held)
            known = {key: page for key, page in known.items() if page not in pages}
            for page in pages:
                held.append(page)
                if n % 2:
                    known[bytes([n, page])] = page
                    pool.remember(bytes([n, page]), page)
        elif action == "drop" and held:
            pool.release([held.pop(n % len(held))])
        elif action == "hold" and held:
            held.append(held[n % len(held)])
            pool.hold(held[-1:])
        elif action == "find" and known:
            key = sorted(known)[n % len(known)]
            page = pool.find(key)
            assert page == known[key]
            pool.hold([page])
            held.append(page)
        elif action == "forget":
            pool.forget_all()
            known = {}
        assert (pool.num_held, pool.num_available) == (len(set(held)), 7 - len(set(held)))
        assert 0 not in held


def test_the_least_recently_released_prefix_is_evicted_first():
    pool = PagePool(4)
    for key in (b"a", b"b", b"c"):
        (page,) = pool.take(1)
        pool.remember(key, page)
    pages = [pool.find(key) for key in (b"b", b"a", b"c")]
    for page in pages:
        assert page is not None
        pool.release([page])
    pool.take(2)
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [None, None, pages[2]]


def test_a_page_is_never_released_more_often_than_held():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([page])


def test_keys_depend_on_weights_and_on_all_tokens_before():
    tokens_T = np.arange(11, dtype=np.int32)
    keys = prefix_keys(3, tokens_T, 4)
    assert len(keys) == len(set(keys)) == 3
    assert prefix_keys(3, tokens_T[:8], 4) == keys[:2]
    assert prefix_keys(3, tokens_T[:10], 4)[2] != keys[2]
    assert not set(prefix_keys(4, tokens_T, 4)) & set(keys)
    changed = prefix_keys(3, np.where(tokens_T == 1, 9, tokens_T), 4)
    assert not set(changed) & set(keys)
    assert prefix_keys(0, tokens_T[:0], 4) == []
