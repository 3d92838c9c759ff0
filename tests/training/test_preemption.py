"""Signals become requests, and the process gets its own handlers back."""

import signal

import pytest

from nha_jax.training.preemption import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.signal_number == number
        # The scheduler's SIGTERM after Ctrl-C, or a second one, changes nothing.
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_the_second_interrupt_ends_the_process() -> None:
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
