"""A small swarm in virtual time: how soon it has a version, and what that costs its trainer."""

from support.simulated_swarm import Home

from primerl.scripts.bench.scale import COPIES, TIMES, simulate_spread


def test_a_version_soon_reaches_a_swarm_at_home_and_leaves_its_trainer_at_most_twice() -> None:
    """The same seed gives the same figures: nothing depends on the machine."""
    home = Home(version_bytes=1_000_000, step_s=3.0, seed=3)
    first, again = (simulate_spread(home, 5, versions=1) for _ in range(2))
    assert first.most_s <= TIMES * first.ideal_s
    assert first.copies <= COPIES
    assert first == again
