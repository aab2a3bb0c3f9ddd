"""Cheats that a calibration plays itself: other draws from the right model, and other models.

They are played as well as can be done: a forger of tokens states the logprobs and the proof that the
right model gives to his tokens, so only the seeded sampling is left to tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import RunManifest
from ..inference.fingerprint import Projection
from ..ops.errors import EngineError
from .auditor import AuditItem, SampledSpan
from .checks import CheckedRollout
from .honest import HonestRollout

if TYPE_CHECKING:
    from torch import Tensor

    from ..inference.model import LanguageModel, ModelOutput

CLAIMED = 0
"""The policy version that every forged rollout claims."""
ROWS = 32
"""Rollouts that are forged at once."""
CUT = 20
"""Tokens that a top-k cheat draws from."""
COOL = 0.9
"""What a cheat with another temperature multiplies it by."""


@dataclass(frozen=True)
class ForgedReply:
    """What a reply is forged from."""

    prompt: tuple[int, ...]
    seed: int
    """Of the lease: what the reply should be drawn with."""
    forced: tuple[int, ...] = ()
    """Tokens that the reply begins with, whoever wrote them."""


@dataclass(frozen=True)
class ForgeStep:
    """What is known where B rows need their next tokens."""

    logits: "Tensor"
    """[B, V]"""
    temperature: "Tensor"
    """[B] fp32, the run's."""
    seeds: "Tensor"
    """[B] int64"""
    positions: "Tensor"
    """[B] int64, in the sequence."""


Choose = Callable[[ForgeStep], "Tensor"]
"""How a worker draws: token ids [B]."""


def honestly(step: ForgeStep) -> "Tensor":
    """As the run asks."""
    return _draw(step, step.logits, 1.0)


def cooler(step: ForgeStep) -> "Tensor":
    """At a lower temperature, for better rewards."""
    return _draw(step, step.logits, COOL)


def cut(step: ForgeStep) -> "Tensor":
    """From the most probable tokens only."""
    top = step.logits.topk(min(CUT, step.logits.shape[-1]), -1)
    kept = step.logits.new_full(step.logits.shape, -float("inf"))
    return _draw(step, kept.scatter_(1, top.indices, top.values), 1.0)


def first_replies(
    played: Sequence[HonestRollout], count: int
) -> list[tuple[ForgedReply, tuple[int, ...]]]:
    """(prompt and seed, honest reply) of the first replies of `count` rollouts."""
    found: list[tuple[ForgedReply, tuple[int, ...]]] = []
    for item in (one.items[0] for one in played[:count]):
        first = item.replies[0]
        prompt, reply = item.token_ids[: first.start], item.token_ids[first.start : first.end]
        found.append((ForgedReply(tuple(prompt), first.seed), tuple(reply)))
    return found


def foreign(honest: Sequence[tuple[ForgedReply, tuple[int, ...]]]) -> list[ForgedReply]:
    """Each prompt with the reply to another one: what prefill forgery feeds the right model with."""
    half = len(honest) // 2
    replies = [reply for _, reply in [*honest[half:], *honest[:half]]]
    return [
        ForgedReply(line.prompt, line.seed, reply)
        for (line, _), reply in zip(honest, replies, strict=True)
    ]


def edited(
    honest: Sequence[tuple[ForgedReply, tuple[int, ...]]], stops: Sequence[int]
) -> list[ForgedReply]:
    """Each reply up to its middle, where another token stands that the model is known to say; what follows
    is then drawn as it should be."""
    said = sorted({token for _, reply in honest for token in reply} - set(stops))
    return [ForgedReply(line.prompt, line.seed, _edit(reply, said)) for line, reply in honest]


def device_name(device: str) -> str:
    """A device by the name that its maker gave it."""
    import torch

    from ..inference.model import pick_device

    found = pick_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type


def said_by(item: AuditItem) -> tuple[int, ...]:
    """The tokens of a forged reply."""
    first = item.replies[0]
    return tuple(item.token_ids[first.start : first.end])


def as_played(items: Sequence[AuditItem]) -> list[HonestRollout]:
    """Forged rollouts, ready to be measured."""
    return [
        HonestRollout(CheckedRollout(0, number, [], 0.0), [item])
        for number, item in enumerate(items)
    ]


def forge(
    network: "LanguageModel",
    lines: Sequence[ForgedReply],
    run: RunManifest,
    choose: Choose = honestly,
) -> list[AuditItem]:
    """Rollouts of one reply, with the logprobs and proofs that `network` gives to their tokens.

    All claim policy CLAIMED and the run's sampling, whatever `network` holds and `choose` does.
    """
    import torch

    found: list[AuditItem] = []
    with torch.inference_mode():
        for start in range(0, len(lines), ROWS):
            found += _forge(network, lines[start : start + ROWS], run, choose)
    return found


def _forge(
    network: "LanguageModel", lines: Sequence[ForgedReply], run: RunManifest, choose: Choose
) -> list[AuditItem]:
    import torch

    device = network.device
    lengths = torch.tensor([len(line.prompt) for line in lines], device=device)
    width = int(lengths.max())
    padded = [[*[0] * (width - len(line.prompt)), *line.prompt] for line in lines]
    columns = torch.arange(width, device=device)
    session, output = network.prefill(
        torch.tensor(padded, device=device), columns >= width - lengths[:, None]
    )
    seeds = torch.tensor([line.seed for line in lines], device=device)
    temperature = torch.full((len(lines),), run.sampling.temperature, device=device)
    replies = [_Reply(line, run) for line in lines]
    for step in range(run.sampling.max_tokens):
        logits = output.logits
        tokens = choose(ForgeStep(logits, temperature, seeds, lengths + step))
        forced = torch.tensor([reply.forced(step) for reply in replies], device=device)
        tokens = torch.where(forced >= 0, forced, tokens)
        scaled = torch.log_softmax(logits.float() / temperature[:, None], -1)
        logprobs = scaled.gather(1, tokens[:, None])[:, 0]
        vectors = _hidden(output)
        rows = zip(replies, tokens.tolist(), logprobs.tolist(), vectors, strict=True)
        if not any([reply.grow(*row) for reply, *row in rows]):
            break
        output = session.step(tokens)
    return [reply.item() for reply in replies]


class _Reply:
    """One reply while it grows."""

    def __init__(self, line: ForgedReply, run: RunManifest) -> None:
        self._line = line
        self._run = run
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._hidden: list[NDArray[np.float32]] = []
        self._ended = False

    def forced(self, step: int) -> int:
        """The token that has to come, or -1."""
        return self._line.forced[step] if step < len(self._line.forced) else -1

    def grow(self, token: int, logprob: float, hidden: NDArray[np.float32]) -> bool:
        """Take the next token in, unless the reply has ended; whether it goes on."""
        if self._ended:
            return False
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._hidden.append(hidden)
        full = len(self._line.prompt) + len(self._tokens) >= self._run.limits.max_model_len
        self._ended = full or token in self._run.model.stop_token_ids
        return not self._ended

    def item(self) -> AuditItem:
        """What is submitted of it."""
        start = len(self._line.prompt)
        end = start + len(self._tokens)
        return AuditItem(
            token_ids=[*self._line.prompt, *self._tokens],
            replies=[SampledSpan(start, end, self._line.seed)],
            logprobs=self._logprobs,
            versions=[CLAIMED] * len(self._tokens),
            proof=Projection().make(np.stack(self._hidden)),
        )


def _hidden(output: "ModelOutput") -> NDArray[np.float32]:
    if output.hidden is None:
        raise EngineError("this architecture does not show its hidden states: choose another model")
    return output.hidden.float().cpu().numpy()


def _draw(step: ForgeStep, logits: "Tensor", factor: float) -> "Tensor":
    from ..inference.sampler import draw

    return draw(logits, step.temperature * factor, step.seeds, step.positions).tokens


def _edit(reply: tuple[int, ...], said: Sequence[int]) -> tuple[int, ...]:
    middle = (len(reply) - 1) // 2
    others = [token for token in said if token != reply[middle]] or [0]
    return (*reply[:middle], others[sum(reply) % len(others)])
