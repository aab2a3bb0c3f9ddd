"""The same scores behind an Env of their own, which takes the long way to them."""

import verifiers.v1 as vf
from several_scores import SeveralTaskset


class SeveralEnv(vf.SingleAgentEnv):
    pass


__all__ = ["SeveralEnv", "SeveralTaskset"]
