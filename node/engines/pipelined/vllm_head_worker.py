"""What runs inside vLLM's workers at stage 0: they compute what they are told, and the first one sends it on.

vLLM imports this module by name (`worker_extension_cls`), as it does vllm_worker.py.
"""

import os
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from ...pipeline.frame import Frame
from ...pipeline.frame_codec import FrameLimits
from ...pipeline.place import Place
from ...pipeline.socket_outlet import SocketOutlet
from ..vllm_worker import WorkerExtension
from .vllm_place import read_place
from .vllm_states import Departure, Ints, gather, leaving, order_of


class HeadExtension(WorkerExtension):
    """As everywhere, but that nothing is drawn here."""

    _primerl_place: Place
    _primerl_handles: Connection
    _primerl_outlet: SocketOutlet | None = None
    """Of the first rank."""

    def primerl_handles(self, handles: Connection) -> None:
        """Be the first rank; sockets come through `handles`."""
        self._primerl_place, self._primerl_handles = read_place(os.environ), handles
        self._primerl_outlet = SocketOutlet(FrameLimits.of(self._primerl_place.shape))

    def primerl_connect(self) -> None:
        """Send through the socket that waits in `handles`."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        with socket.socket(fileno=recv_handle(self._primerl_handles)) as given:
            self._primerl_outlet.connect(given)

    def primerl_finish(self) -> None:
        """End that connection, behind what was computed before."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        self._primerl_outlet.finish()

    def primerl_pass(self, frame: Frame) -> None:
        """Send `frame` as it is, behind what was computed before."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        self._primerl_outlet.put(frame)

    def primerl_compute(
        self, output: Any, frame: Frame | None = None, drawing: Ints | None = None
    ) -> None:
        """This rank's part of a step, of which `frame` is to tell the other stages; None tells nobody.

        The rows `drawing` lead to tokens; None: all.
        """
        began, runner = time.monotonic(), self.model_runner
        with torch.inference_mode():
            found = runner.execute_model(output, None)
            if frame is None or self._primerl_outlet is None:
                return
            counts = output.num_scheduled_tokens
            index = gather(order_of(runner), list(counts), counts)
            stream = leaving(found.tensors, output.total_num_scheduled_tokens, index)
            shape = self._primerl_place.shape
            departure = Departure(stream, drawing, shape.encoding, proven=bool(shape.fingerprint))
        self._primerl_outlet.put(frame, departure.wait, began)
