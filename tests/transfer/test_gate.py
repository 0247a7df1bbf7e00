"""The gate in front of the transport: many writers, or one who begins anew."""

from __future__ import annotations

import threading

from transfer.gate import WriteGate


def test_it_closes_only_when_nobody_writes_and_then_nobody_does() -> None:
    gate = WriteGate()
    with gate.writing(), gate.writing():
        assert not gate.close_if_idle()
    assert gate.close_if_idle()
    assert not gate.close_if_idle(), "it is somebody else's"
    written = threading.Event()

    def write() -> None:
        with gate.writing():
            written.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not written.wait(0.1)
    gate.open()
    assert written.wait(5)
    writer.join(5)
    assert gate.close_if_idle()
    gate.open()


def test_a_writer_that_fails_has_left() -> None:
    gate = WriteGate()
    try:
        with gate.writing():
            raise ValueError
    except ValueError:
        assert gate.close_if_idle()
