from __future__ import annotations

import pytest

from worldfork.core.errors import VerifierError
from worldfork.reward.rewards_file import MAX_REWARD_BYTES, checked_parts, read_reward


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"1", (1.0, {})),
        (b" 0.25\n", (0.25, {})),
        (b'{"reward": 0.5, "style": 1}', (0.5, {"style": 1.0})),
        (b'{"reward": 0}', (0.0, {})),
    ],
)
def test_rewards(data: bytes, expected: tuple[float, dict[str, float]]) -> None:
    assert read_reward(data, "it") == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"NaN",
        b"Infinity",
        b"-0.1",
        b"1.0000001",
        b"1e300",
        b"1e999",
        b"1" + b"0" * 5000,
        b"true",
        b"null",
        b'"1"',
        b"[1]",
        b"\xff1",
        b"1" + b" " * MAX_REWARD_BYTES,
        b"[" * 60_000,
        b"{}",
        b'{"score": 1}',
        b'{"reward": 1, "reward": 0}',
        b'{"reward": 1, "style": NaN}',
        b'{"reward": 1, "style": 2}',
        b'{"reward": [1]}',
    ],
)
def test_what_is_no_reward(data: bytes) -> None:
    with pytest.raises(VerifierError):
        read_reward(data, "it")


def test_too_many_parts() -> None:
    with pytest.raises(VerifierError):
        checked_parts({str(each): 0.5 for each in range(101)}, "it")
