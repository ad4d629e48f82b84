"""Ctrl-C once is a request, twice is KeyboardInterrupt, also where Python would drop it."""

import io
import signal
import time

import pytest
from rich.console import Console

from rl_jax.interrupt import Interrupt
from rl_jax.progress import Dashboard


@pytest.fixture
def dashboard() -> Dashboard:
    return Dashboard(Console(file=io.StringIO()))


class Quiet:
    """Presses Ctrl-C where an exception cannot come out."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_first_is_a_request_and_second_an_exception(dashboard: Dashboard) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt(dashboard) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert (interrupt.is_requested, interrupt.is_forced) == (True, False)
        signal.raise_signal(signal.SIGINT)
    assert interrupt.is_forced
    assert signal.getsignal(signal.SIGINT) is before


def test_first_says_what_it_leads_to_now(dashboard: Dashboard) -> None:
    with Interrupt(dashboard) as interrupt:
        interrupt.promise = "the warm start is not kept"
        signal.raise_signal(signal.SIGINT)
    assert isinstance(dashboard.console.file, io.StringIO)
    assert dashboard.console.file.getvalue() == "stopping: the warm start is not kept; once more stops now\n"


def test_second_is_raised_again_where_it_was_lost(dashboard: Dashboard) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt(dashboard) as interrupt:
        signal.raise_signal(signal.SIGINT)
        Quiet()
        assert interrupt.is_forced
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            pass


def test_what_was_lost_is_not_raised_after_the_end(dashboard: Dashboard) -> None:
    with Interrupt(dashboard):
        signal.raise_signal(signal.SIGINT)
        Quiet()
    time.sleep(0.2)
