"""The base of every section of a config.

Invariant: a value has the type that was written. pydantic_config turns the strings of a free table into numbers
if all of its values are strings, so that the type of one depends on the others.
"""

import pydantic_config
from pydantic import ConfigDict, model_validator


class BaseConfig(pydantic_config.BaseConfig):
    """A section that forbids unknown keys, and leaves the values of free tables as they are."""

    model_config = ConfigDict(
        defer_build=True
    )  # most programs use few sections: others cost nothing

    @model_validator(mode="before")
    @classmethod
    def _coerce_dict_str_values(cls, data: object) -> object:
        """Replace pydantic_config's validator of this name; loader.py reads flags and variables."""
        return data
