"""Tells a listener when the device is done with a layer, while it computes the next ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.batch import OnLayer


class LayerWatcher:
    """A thread that waits for an event behind each layer. On the CPU (tests) a layer is done when it is queued."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers") if device.type == "cuda" else None
        self._told: list[Future[None]] = []

    def watch(self, on_layer: OnLayer) -> OnLayer:
        """What is to be called when a layer has been queued, so that on_layer is called when the device is done with
        it, in the watcher's thread."""
        thread = self._thread
        if thread is None:
            return on_layer

        def queued(layer: int) -> None:
            done = torch.cuda.Event()
            done.record()
            self._told.append(thread.submit(_tell, done, on_layer, layer))

        return queued

    def finish(self) -> None:
        """Wait until every layer queued so far has been told of. Raises what a listener raised."""
        told, self._told = self._told, []
        for each in told:
            each.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def _tell(done: torch.cuda.Event, on_layer: OnLayer, layer: int) -> None:
    done.synchronize()
    on_layer(layer)
