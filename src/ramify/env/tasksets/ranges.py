"""The check of ranges in the config of a taskset."""

from typing import Self

from pydantic import model_validator

import ramify as rf


class RangesConfig(rf.Config):
    """A config in which `min_NAME` must not exceed `max_NAME`, for every such pair of keys."""

    @model_validator(mode="after")
    def _min_must_not_exceed_max(self) -> Self:
        for max_key in type(self).model_fields:
            min_key, high = max_key.replace("max_", "min_", 1), getattr(self, max_key)
            if min_key != max_key and (low := getattr(self, min_key, high)) > high:
                raise ValueError(f"{min_key} is {low}, above {max_key}, which is {high}")
        return self
