"""Free ports are below the range of outgoing connections; a port in use is not given out."""

from __future__ import annotations

import itertools
import socket

import pytest

from outrider.process.network import ports
from outrider.process.network.ports import check_port, free_port


def test_free_ports_are_different_and_lie_below_linuxs_outgoing_ones() -> None:
    found = {free_port() for _ in range(50)}
    assert len(found) == 50
    assert max(found) < 32_768


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            check_port("127.0.0.1", port)
        free = free_port()
        monkeypatch.setattr(ports, "_candidates", itertools.cycle([port, free]))
        assert free_port() == free
        monkeypatch.setattr(ports, "_candidates", itertools.cycle([port]))
        with pytest.raises(OSError, match="no port of"):
            free_port()


def test_an_address_of_another_machine_has_no_free_port() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
