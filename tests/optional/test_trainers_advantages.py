"""Our advantages against those that verl and TRL compute with their own code. Needs the extra `trainers`."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import random
import textwrap
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.reward.advantages import (
    clipped_surrogate,
    dr_grpo,
    dynamic_sampling,
    grpo,
    gspo,
    reinforce_baseline,
    rloo,
    sequence_ratios,
)

pytestmark = pytest.mark.timeout(300)
TOKENS = 6


def optional(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other projects, at their import
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} is not here: {error}; pip install 'worldfork[trainers]'")


@pytest.fixture(scope="module")
def torch() -> Any:
    return optional("torch")


@pytest.fixture(scope="module")
def verl() -> Any:
    return optional("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def trl() -> Any:
    return optional("trl.trainer.grpo_trainer")


@pytest.fixture(params=range(8))
def batch(request: pytest.FixtureRequest) -> tuple[list[float], list[str], list[int]]:
    """Rewards of groups of different sizes in a random order, some constant, and the lengths of the rollouts."""
    chance = random.Random(request.param)
    rows = []
    for group in range(5):
        constant = chance.random()
        for _ in range(chance.randint(2, 6)):
            reward = constant if group == 0 else chance.choice([0.0, 1.0, chance.random()])
            rows.append((reward, f"g{group}", chance.randint(1, TOKENS)))
    chance.shuffle(rows)
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def masks(torch: Any, lengths: list[int]) -> Any:
    return torch.tensor([[float(place < length) for place in range(TOKENS)] for length in lengths], dtype=torch.float64)


def by_verl(torch: Any, function: Any, batch: tuple[list[float], list[str], list[int]], **more: Any) -> list[float]:
    """What verl gives the first token of each rollout: all of its tokens have the same."""
    numpy = importlib.import_module("numpy")
    rewards, groups, lengths = batch
    scores = torch.zeros(len(rewards), TOKENS, dtype=torch.float64)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    found, _ = function(scores, masks(torch, lengths), numpy.array(groups, dtype=object), **more)
    return [float(row[0]) for row in found]


def test_verl_grpo(torch: Any, verl: Any, batch: Any) -> None:
    theirs = by_verl(torch, verl.compute_grpo_outcome_advantage, batch)
    ours = grpo(batch[0], batch[1])
    for one, other, group in zip(ours, theirs, batch[1], strict=True):
        if group == "g0":
            # Their mean of equal numbers may be off by a bit, and what is left is divided by 1e-6.
            assert one == 0.0
            assert abs(other) < 1e-9
        else:
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_verl_dr_grpo(torch: Any, verl: Any, batch: Any) -> None:
    theirs = by_verl(torch, verl.compute_grpo_outcome_advantage, batch, norm_adv_by_std_in_grpo=False)
    assert list(dr_grpo(batch[0], batch[1])) == pytest.approx(theirs, abs=1e-12)


def test_verl_rloo(torch: Any, verl: Any, batch: Any) -> None:
    theirs = by_verl(torch, verl.compute_rloo_outcome_advantage, batch)
    assert list(rloo(batch[0], batch[1])) == pytest.approx(theirs, abs=1e-12)


def test_verl_reinforce_plus_plus_baseline(torch: Any, verl: Any, batch: Any) -> None:
    theirs = by_verl(torch, verl.compute_reinforce_plus_plus_baseline_outcome_advantage, batch)
    rewards, groups, lengths = batch
    assert list(reinforce_baseline(rewards, groups, lengths=lengths, shift=True)) == pytest.approx(theirs, abs=1e-9)


def test_verl_gspo(torch: Any, verl: Any, batch: Any) -> None:
    rewards, groups, lengths = batch
    new, old = log_probabilities(lengths)
    config = optional("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=3e-4, clip_ratio_high=4e-4
    )
    advantages = grpo(rewards, groups)
    loss, facts = verl.compute_policy_loss_gspo(
        padded(torch, old),
        padded(torch, new),
        torch.tensor(list(advantages), dtype=torch.float64).unsqueeze(-1).expand(-1, TOKENS),
        masks(torch, lengths),
        config=config,
    )
    found = gspo(rewards, new, old, groups)
    assert -sum(found.objectives) / len(rewards) == pytest.approx(float(loss), abs=1e-9)
    clipped = sum(length for length, one in zip(lengths, found.clipped, strict=True) if one) / sum(lengths)
    assert clipped == pytest.approx(facts["actor/pg_clipfrac"], abs=1e-6)


def test_verl_leaves_the_only_reward_of_a_group_as_it_is_and_we_do_not(torch: Any, verl: Any) -> None:
    lone = ([0.75, 0.0, 1.0], ["lone", "two", "two"], [1, 1, 1])
    assert by_verl(torch, verl.compute_grpo_outcome_advantage, lone)[0] == pytest.approx(0.75, abs=1e-5)
    assert grpo(lone[0], lone[1])[0] == 0.0


def log_probabilities(lengths: list[int]) -> tuple[list[list[float]], list[list[float]]]:
    chance = random.Random(sum(lengths))
    old = [[-3 * chance.random() for _ in range(length)] for length in lengths]
    return [[one + chance.gauss(0, 1e-3) for one in row] for row in old], old


def padded(torch: Any, rows: list[list[float]]) -> Any:
    return torch.tensor([[*row, *[0.0] * (TOKENS - len(row))] for row in rows], dtype=torch.float64)


def run_of_trl(method: Any, marker: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the one branch of a method of TRL's that a text of its condition marks: it has no function for it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If) and marker in ast.unparse(node.test)]
    if not found:
        pytest.skip(f"this version of TRL computes {marker} elsewhere")
    code = ast.fix_missing_locations(ast.Module([found[0]], []))
    exec(compile(code, "trl", "exec"), names)
    return names


def by_trl(torch: Any, trl: Any, rewards: list[float | None], size: int, scale: str) -> list[float]:
    values = torch.tensor([math.nan if one is None else one for one in rewards], dtype=torch.float64)
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.ones(1, dtype=torch.float64),
    )
    names = {
        **vars(trl),
        "self": trainer,
        "rewards_per_func": values.unsqueeze(-1),
        "unscorable_mask": torch.isnan(values),
        "num_generations": size,
        "device": torch.device("cpu"),
    }
    method = trl.GRPOTrainer._generate_and_score_completions
    return [float(one) for one in run_of_trl(method, "'sum_then_normalize'", names)["advantages"]]


@pytest.fixture(params=range(8))
def square(request: pytest.FixtureRequest) -> tuple[list[float | None], list[int]]:
    """Rewards of four groups of five in order, as TRL has them, some of them missing."""
    chance = random.Random(request.param)
    constant = chance.random()
    rewards: list[float | None] = [constant] * 5
    rewards += [None if chance.random() < 0.2 else chance.random() for _ in range(15)]
    rewards[5:7] = [0.0, 1.0]  # their deviation of two or more
    rewards[10:12] = [0.5, 0.75]
    rewards[15:17] = [0.25, 0.125]
    return rewards, [place // 5 for place in range(20)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trl_grpo(torch: Any, trl: Any, square: Any, scale: str) -> None:
    rewards, groups = square
    theirs = by_trl(torch, trl, rewards, 5, scale)
    ours = dr_grpo(rewards, groups) if scale == "none" else grpo(rewards, groups, scale=scale, epsilon=1e-4)
    # Its deviation is a float32 on the way.
    assert list(ours) == pytest.approx(theirs, rel=1e-6, abs=1e-9, nan_ok=True)
    assert list(ours[:5]) == [0.0] * 5


def test_trl_sequence_ratio(torch: Any, trl: Any) -> None:
    lengths = [1, 3, TOKENS]
    new, old = log_probabilities(lengths)
    names = {
        **vars(trl),
        "self": SimpleNamespace(importance_sampling_level="sequence"),
        "log_ratio": padded(torch, new) - padded(torch, old),
        "mask": masks(torch, lengths),
    }
    run_of_trl(trl.GRPOTrainer._compute_loss, "importance_sampling_level == 'token'", names)
    theirs = [float(one) for one in names["log_importance_weights"].exp().squeeze(-1)]
    assert list(sequence_ratios(new, old)) == pytest.approx(theirs, abs=1e-12)
    assert len(clipped_surrogate([1.0] * 3, theirs).objectives) == 3


def test_torch_takes_the_arrays_without_a_copy(torch: Any) -> None:
    found = grpo([0.0, None, 1.0])
    tensor = torch.frombuffer(found, dtype=torch.float64)
    assert torch.isnan(tensor).tolist() == [False, True, False]
    tensor[1] = 0.0
    assert found[1] == 0.0


def test_groups_that_torch_sees_no_deviation_in_are_dropped(torch: Any, square: Any) -> None:
    rewards, groups = square
    kept = dynamic_sampling(rewards, groups)
    for group in range(4):
        own = [one for one in rewards[group * 5 : group * 5 + 5] if one is not None]
        differs = float(torch.tensor(own, dtype=torch.float64).std()) > 1e-12
        assert any(kept[group * 5 : group * 5 + 5]) == differs
