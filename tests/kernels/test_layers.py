"""Listeners hear of a layer when the device is done with it; a step waits for its own listeners, not for later ones."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.cuda.layers import LayerWatcher


class ManualEvent(threading.Event):
    """In the place of a CUDA event: `set` is the device getting there."""

    made: list[ManualEvent]

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def record(self) -> None:
        """Queued."""

    def synchronize(self) -> None:
        assert self.wait(20)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[ManualEvent]:
    made: list[ManualEvent] = []
    monkeypatch.setattr(ManualEvent, "made", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", ManualEvent)
    return made


def test_a_step_waits_for_its_own_layers(events: list[ManualEvent]) -> None:
    watcher, told = LayerWatcher(torch.device("cuda")), list[str]()
    first = watcher.watch(lambda layer: told.append(f"first {layer}"))
    second = watcher.watch(lambda layer: told.append(f"second {layer}"))
    for watch in (first, second):
        assert watch.on_queued is not None
        for layer in range(2):
            watch.on_queued(layer)
    assert told == []
    for event in events[:2]:
        event.set()
    first.finish()
    assert told == ["first 0", "first 1"]
    for event in events[2:]:
        event.set()
    second.finish()
    assert told == ["first 0", "first 1", "second 0", "second 1"]
    watcher.close()


def test_what_a_listener_raises_ends_the_step(events: list[ManualEvent]) -> None:
    def broken(layer: int) -> None:
        raise ValueError(f"layer {layer}")

    watcher = LayerWatcher(torch.device("cuda"))
    watch = watcher.watch(broken)
    assert watch.on_queued is not None
    watch.on_queued(3)
    events[0].set()
    with pytest.raises(ValueError, match="layer 3"):
        watch.finish()
    watcher.close()


def test_nobody_listens(events: list[ManualEvent]) -> None:
    watcher = LayerWatcher(torch.device("cuda"))
    watch = watcher.watch(None)
    watch.finish()
    assert watch.on_queued is None and events == []
    watcher.close()
