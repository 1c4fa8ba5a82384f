from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.trajectory import Step, Trajectory


class Scalar:
    """A number of another library."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    step = Step("message", "x", completion_tokens=Scalar(7), log_probability=Fraction(-1, 2), cpu_s=Decimal("0.5"))  # type: ignore[arg-type]
    assert (step.completion_tokens, step.log_probability, step.cpu_s) == (7, -0.5, 0.5)
    assert json.loads(json.dumps(step.to_json(), allow_nan=False))["completion_tokens"] == 7


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_known(odd: float) -> None:
    step = Step("message", "x", log_probability=odd, began_s=odd, prompt_tokens=odd)  # type: ignore[arg-type]
    assert (step.log_probability, step.began_s, step.prompt_tokens) == (None, 0.0, None)


@pytest.mark.parametrize(
    "fields", [{"began_s": "x"}, {"log_probability": [1]}, {"exit_code": "1"}, {"output": 5}, {"action": None}]
)
def test_what_is_none_is_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Step(**{"kind": "note", "action": "x", **fields})
    with pytest.raises(ConfigError):
        Step.from_json({"kind": "note", "action": "x", **fields})


def test_a_trajectory_is_read_as_it_was_written() -> None:
    found = Trajectory((Step("command", "ls", "a", exit_code=0, began_s=1.5),), truncated=True, facts={"model": "m"})
    assert Trajectory.from_json(json.loads(json.dumps(found.to_json()))) == found
