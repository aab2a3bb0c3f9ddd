"""The cache of vLLM's scheduler where it is kept when the weights change, without vLLM."""

from dataclasses import dataclass, field

from primerl.node.inference.vllm_scheduler import keep_cache
from primerl.protocol.manifests import KV_BLOCK


@dataclass
class Request:
    """Those parts of a request of vLLM that count here; it has `blocks` whole blocks."""

    blocks: int
    num_preemptions: int = 0
    cache_salt: str = "3/0"
    block_hashes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole blocks, and one that is to be computed."""
        return self.blocks * KV_BLOCK + 1

    def update_block_hashes(self) -> None:
        """See vLLM's request."""
        first = len(self.block_hashes)
        self.block_hashes += [f"{self.cache_salt} {number}" for number in range(first, self.blocks)]


@dataclass
class Manager:
    """A KVCacheManager of vLLM: which blocks are in the cache."""

    cached: set[str]
    emptied: int = 0

    def get_computed_blocks(self, request: Request) -> tuple[list[str], int]:
        """Find the first blocks of a request, up to the first that is missing."""
        found: list[str] = []
        for one in request.block_hashes:
            if one not in self.cached:
                break
            found.append(one)
        return found, len(found) * KV_BLOCK

    def reset_prefix_cache(self) -> bool:
        """Empty the cache."""
        self.emptied += 1
        return True


def make(*cached: str) -> Manager:
    manager = Manager(set(cached))
    keep_cache(manager)
    return manager


def test_a_change_of_weights_leaves_the_cache_as_it_is() -> None:
    manager = make("3/0 0")
    assert manager.reset_prefix_cache()
    assert manager.emptied == 0


def test_a_request_goes_on_with_all_its_whole_blocks() -> None:
    manager, request = make("3/0 0", "3/0 1"), Request(2, num_preemptions=1)
    assert manager.get_computed_blocks(request) == (["3/0 0", "3/0 1"], 2 * KV_BLOCK)
    assert request.cache_salt == "3/0"


def test_a_new_request_shares_the_blocks_that_there_are() -> None:
    request = Request(2)
    assert make("3/0 0").get_computed_blocks(request) == (["3/0 0"], KV_BLOCK)
    assert request.cache_salt == "3/0"


def test_a_request_that_lost_a_block_computes_all_anew_and_no_other_finds_it() -> None:
    manager = make("3/0 0")
    first, second = (Request(2, num_preemptions=1) for _ in range(2))
    assert [manager.get_computed_blocks(one) for one in (first, second)] == [([], 0)] * 2
    assert not {*first.block_hashes} & {*second.block_hashes}
    manager.cached |= {*first.block_hashes}
    assert manager.get_computed_blocks(first) == (first.block_hashes, 2 * KV_BLOCK)
    assert manager.get_computed_blocks(Request(2)) == (["3/0 0"], KV_BLOCK)
