"""Which tensors of a checkpoint a stage needs, told from their names.

Too much only costs memory, too little is an engine that does not start: what has no place that we know of,
every stage gets.
"""

from collections.abc import Callable, Collection
from itertools import pairwise

from ...protocol.pipelines import PipelinePlan, Stage

STACKS = frozenset({"layers", "h", "blocks"})
"""What the part of a name before a layer's number is called."""
EMBEDDING = frozenset(
    {"embed_tokens", "wte", "wpe", "embed_in", "embed_positions", "word_embeddings"}
)
"""Tables that tokens are looked up in; the first stage's."""
HEAD = frozenset({"lm_head", "embed_out"})
NORM = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
"""Outside layers: the last stage's."""
SENSES = ("vision", "visual", "audio", "image", "multi_modal")
"""In a part of the name of what makes embeddings of something other than text; the first stage's."""


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if it belongs to none that a plan cuts."""
    parts = name.split(".")
    if _sees(parts):
        return None
    for before, number in pairwise(parts):
        if before in STACKS and number.isdecimal():
            return int(number)
    return None


def names_of(
    stage: Stage, layers: int, names: Collection[str], *, tied: bool | None = None
) -> frozenset[str]:
    """Those of `names`, all tensors of a model of so many layers, that `stage` needs.

    A model without a head of its own draws by its embedding, so that first and last stage need that; `tied`
    says so where `names` cannot, as those of adapters.
    """
    if tied is None:
        tied = not any(HEAD.intersection(name.split(".")) for name in names)
    return frozenset(name for name in names if _needs(stage, layers, name, tied))


def share_of(plan: PipelinePlan, rank: int) -> Callable[[Collection[str]], frozenset[str]]:
    """What stage `rank` of `plan` needs of any state: a Share, see node/weights/payload.py."""
    stage = plan.stages[rank]
    return lambda names: names_of(stage, plan.layers, names)


def _needs(stage: Stage, layers: int, name: str, tied: bool) -> bool:
    first, last = stage.first == 0, stage.end == layers
    layer = layer_of(name)
    if layer is not None:
        # layers after those that the plan counts (some models predict further tokens) go with the last one
        return stage.first <= layer < stage.end or (last and layer >= layers)
    parts = name.split(".")
    if _sees(parts):
        return first
    if EMBEDDING.intersection(parts):
        return first or (last and tied)
    if HEAD.intersection(parts) or NORM.intersection(parts):
        return last
    return True


def _sees(parts: Collection[str]) -> bool:
    return any(sense in part for part in parts for sense in SENSES)
