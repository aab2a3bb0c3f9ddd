"""What people publish as config.json is accepted where it can be computed, and then computed right."""

from pathlib import Path

import pytest
import torch
from support.published_configs import LONGEST, Published, read, table

from primerl.node.models.architectures import ARCHITECTURES, keys_to_compare, keys_without_effect
from primerl.node.training import parity

pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
DOCS = Path(__file__).parents[3] / "docs" / "models.md"
WANTED = 0.97
PUBLISHED = read()
EVERY_TIME = ("gemma2", "gemma3_text", "gpt_oss", "granitemoe", "smollm3")
"""Of these nearly all were refused for keys without effect; the others in CI."""
BARE = [one for one in PUBLISHED if one.kind != "draft" and not one.quantized]


@pytest.fixture(scope="module")
def faults() -> dict[Published, str]:
    """Why each is refused."""
    torch.set_num_threads(1)
    return {one: one.fault() for one in PUBLISHED}


def test_nearly_all_that_makers_publish_of_these_families_is_accepted(
    faults: dict[Published, str],
) -> None:
    hub = [one for one in BARE if one.kind == "hub" and one.text["model_type"] in ARCHITECTURES]
    assert len(hub) > 50
    assert {one.text["model_type"] for one in hub} >= {"gemma2", "gemma3_text", "gpt_oss", "llama"}
    refused = {one.source: faults[one] for one in hub if faults[one]}
    assert len(refused) <= (1 - WANTED) * len(hub), refused


def test_quantized_files_and_drafts_are_refused_as_such(faults: dict[Published, str]) -> None:
    assert {one.kind for one in PUBLISHED} == {"hub", "test", "tool", "draft"}
    for one, fault in faults.items():
        if one.quantized:
            assert fault.startswith("its weights are quantized"), one.source
        elif one.kind == "draft":
            assert "its config.json says that it is a" in fault, one.source


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=() if one.family in EVERY_TIME else pytest.mark.slow) for one in BARE],
    ids=lambda one: f"{one.family}-{one.source.rpartition('/')[2]}",
)
def test_each_accepted_one_is_computed_as_transformers_does(
    one: Published, faults: dict[Published, str]
) -> None:
    if faults[one]:
        pytest.skip(faults[one])
    torch.set_num_threads(1)
    assert parity.difference(one.text) < parity.NATS


def test_the_table_in_the_docs_is_of_these_configs(faults: dict[Published, str]) -> None:
    assert table(faults) in DOCS.read_text(), "print it: python -m support.published_configs"
    unread = {key for one in BARE if not faults[one] for key in keys_without_effect(one.text)}
    assert {"is_llama_config", "cache_implementation", "experts_per_token"} <= unread
    assert any(keys_to_compare(one.text) for one in BARE if not faults[one])
    assert LONGEST < parity.LONGEST
