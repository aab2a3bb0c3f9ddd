"""One stage's share of a micro-batch, whichever stage it is: states in, states or drawn tokens out.

What goes to the next stage is fingerprinted as that one will see it, and what comes is compared with the
fingerprint that came with it: each stage answers for what it sent, and for nothing else.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ....protocol.pipelines import PipelineShape
from ...errors import EngineError, one_line
from ...fingerprints.fingerprint import ProofFailed, signs
from ...fingerprints.fingerprint import pack as pack_projected
from ...pipeline import boundaries
from ...pipeline.frame import Array, Frame, Kind
from ...pipeline.place import Place
from ...tensors import torch_dtype
from ..boundary_states import agrees, crossing, project
from ..sampling import Narrowed, draw
from ..transfers import upload
from .activations import pack, rounded, unpack
from .hf_lanes import Columns, Lane, Lanes
from .lane_step import Answer, LaneStep, pack_answer, read_step
from .slices import Slice


class HfCompute:
    """Computes by what `held` holds. One thread."""

    def __init__(self, place: Place, held: Slice) -> None:
        self._place = place
        self._shape: PipelineShape = place.shape
        self._held = held
        self._lanes = Lanes(place.shape, held.device)
        self._dtype = torch_dtype(place.shape.dtype)

    def reset(self) -> None:
        """Forget all sequences."""
        self._lanes.reset()

    def first(self, step: LaneStep, tokens: list[int]) -> tuple[tuple[Array, ...], bytes]:
        """Stage 0's part: what goes to the next stage for `tokens` [T], and its trail. Raises EngineError."""
        network = self._held.network
        try:
            with torch.inference_mode():
                ids = upload(torch.tensor(tokens, dtype=torch.int64), self._held.device)
                made, _ = self._lanes.step(network, step, network.embedded(ids))
                return self._sent(made, b"", draws=not step.fill)
        except RuntimeError as error:  # torch's own
            raise _failed(error) from error

    def step(self, frame: Frame) -> Frame:
        """A later stage's part, see StageCompute. Raises EngineError."""
        step = read_step(frame.body)
        network = self._held.network
        try:
            with torch.inference_mode():
                x = self._received(frame, draws=not step.fill)
                made, lane = self._lanes.step(network, step, x)
                if not self._place.last:
                    tensors, trail = self._sent(made, frame.trail, draws=not step.fill)
                    return Frame(Kind.STEP, frame.epoch, frame.number, frame.body, tensors, trail)
                answer = Answer() if step.fill else self._drawn(made, lane)
                return Frame(
                    Kind.DRAWN, frame.epoch, frame.number, pack_answer(answer), (), frame.trail
                )
        except RuntimeError as error:  # torch's own
            raise _failed(error) from error

    def _received(self, frame: Frame, *, draws: bool) -> Tensor:
        x = unpack(
            frame.tensors,
            self._shape.encoding,
            dtype=self._dtype,
            device=self._held.device,
            width=self._shape.hidden_size,
        )
        if len(x) > self._shape.max_step_tokens:
            raise EngineError("stage 0 made a micro-batch larger than the plan allows")
        if not self._shape.fingerprint or not draws:
            return x
        rank = self._place.rank
        try:
            claimed = boundaries.latest(frame.trail, len(x), rank)
        except boundaries.BadTrail as error:
            raise EngineError(f"stage {rank - 1} sent no proper fingerprints: {error}") from error
        if not agrees(claimed, project(_finite(x)).cpu().numpy()):
            raise EngineError(f"stage {rank - 1} sent other states than it signed for")
        return x

    def _sent(self, made: Tensor, trail: bytes, *, draws: bool) -> tuple[tuple[Array, ...], bytes]:
        encoding = self._shape.encoding
        if self._shape.fingerprint and draws:
            own = crossing(_finite(rounded(made, encoding)))
            trail = boundaries.append(trail, own)
        return pack(made, encoding), trail

    def _drawn(self, made: Tensor, lane: Lane) -> Answer:
        if lane.columns is None:
            raise EngineError("stage 0 does not say how rows draw")
        device = self._held.device
        found = draw(
            self._held.network.logits(made),
            lane.columns.temperatures,
            lane.columns.seeds,
            upload(torch.tensor(lane.lengths), device),
            _narrowed(lane.columns),
        )
        return Answer(
            found.tokens.to(torch.int32).cpu().numpy().astype("<i4").tobytes(),
            found.logprobs.cpu().numpy().astype("<f4").tobytes(),
            _proofs(made) if self._shape.fingerprint else b"",
        )


def _narrowed(columns: Columns) -> Narrowed | None:
    if not columns.narrow:
        return None
    rows = ((columns.top_ks > 0) | (columns.top_ps < 1)).nonzero()[:, 0]
    return Narrowed(rows, columns.top_ks[rows], columns.top_ps[rows]) if len(rows) else None


def _proofs(hidden: Tensor) -> bytes:
    """8 bytes a row; nothing if none can be made."""
    try:
        projected = hidden.float() @ _signs(hidden.shape[1], hidden.device)
        return pack_projected(projected.cpu().numpy())
    except ProofFailed:
        return b""  # these states are not finite: stage 0 fails their requests, and nobody else's


def _finite(x: Tensor) -> Tensor:
    """`x` as it is fingerprinted: a policy that gives no numbers fails its requests, not the chain."""
    return x.nan_to_num(0.0, 0.0, 0.0)


@lru_cache(4)
def _signs(width: int, device: torch.device) -> Tensor:
    return upload(torch.from_numpy(signs(width)), device)


def _failed(error: RuntimeError) -> EngineError:
    return EngineError(
        f"a micro-batch cannot be computed ({one_line(error)}): check engine.device and free memory"
    )
