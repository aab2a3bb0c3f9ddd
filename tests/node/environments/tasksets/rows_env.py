"""The same rows behind an Env of their own, which takes the long way to the same end."""

import verifiers.v1 as vf
from rows import RowsTaskset


class RowsEnv(vf.SingleAgentEnv):
    pass


__all__ = ["RowsEnv", "RowsTaskset"]
