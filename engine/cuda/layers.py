"""Tells a listener when the device is done with a layer, while it computes the next ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.batch import OnLayer


class LayerWatcher:
    """A thread that waits for an event behind each layer. On the CPU (tests) a layer is done when it is queued."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers") if device.type == "cuda" else None

    def watch(self, on_layer: OnLayer | None) -> Watch:
        """For one step. on_layer None: nobody wants to know."""
        return Watch(self._thread, on_layer)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


class Watch:
    """on_queued: what is to be called when a layer of the step has been queued; None where nobody listens. The listener
    is called in the watcher's thread when the device is done with it."""

    def __init__(self, thread: ThreadPoolExecutor | None, on_layer: OnLayer | None) -> None:
        self._told: list[Future[None]] = []
        self.on_queued = on_layer
        if thread is not None and on_layer is not None:
            self.on_queued = self._through(thread, on_layer)

    def _through(self, thread: ThreadPoolExecutor, on_layer: OnLayer) -> OnLayer:
        def on_queued(layer: int) -> None:
            done = torch.cuda.Event()
            done.record()
            self._told.append(thread.submit(_tell, done, on_layer, layer))

        return on_queued

    def finish(self) -> None:
        """Wait until the listener has been told of every layer of the step. Raises what it raised."""
        for told in self._told:
            told.result()


def _tell(done: torch.cuda.Event, on_layer: OnLayer, layer: int) -> None:
    done.synchronize()
    on_layer(layer)
