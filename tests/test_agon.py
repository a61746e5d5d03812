"""The algorithm, the training loop and the command line.

python -m pytest tests/test_agon.py

Golden numbers: one group of four rows, worked out by hand in float64 (see `golden`). A parity test runs TRL's own loss
where TRL is installed; it is not among the requirements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agon
from agon import (
    Config,
    agon_step,
    group_advantages,
    grpo_loss,
    learning_rate,
    micro_batches,
    parse_config,
    problem_stream,
    train,
    update_policy,
)
from cascade import METHODS, Stage, cascade
from cascade import main as cascade_main
from model import ADAPTERS, EMBEDDED, load_pair, token_logprobs
from reward import Problem, challenge_reward, load_problems
from rollout import Rollouts, draft_prompt, sample, summarize

PROBLEMS = load_problems("congruence", "train", 8)
SMALL = Config(problems_per_step=6, group_size=6, lr=1e-2, b_init_std=0.1)  # b_init_std: two clearly different policies


@pytest.fixture
def pair():
    """A fresh tiny pair on the CPU, where equality tests are exact. Function scope: training changes it."""
    return load_pair("tiny", b_init_std=SMALL.b_init_std, device="cpu")


def adam(pair) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.AdamW(pair.parameters[name].values(), lr=1e-2, weight_decay=0.0) for name in ADAPTERS}


def weights(pair, adapter: str) -> list[torch.Tensor]:
    return [p.detach().clone() for p in pair.parameters[adapter].values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients it is given and moves nothing."""

    def step(self, closure=None):
        self.gradients = [p.grad.detach().clone() for group in self.param_groups for p in group["params"]]


def recorded_gradient(pair, adapter, rollouts, advantages, kept, config) -> torch.Tensor:
    """The gradient that update_policy hands to the optimizer, as one flat vector."""
    optimizer = Recorder(pair.parameters[adapter].values(), lr=1.0)
    update_policy(pair, adapter, optimizer, rollouts, advantages, kept, config)
    return torch.cat([g.flatten() for g in optimizer.gradients])


def naive_logps(pair, adapter: str, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of one row from the full logits, (C,): shares nothing with model.token_logprobs."""
    model = pair.activate(adapter, train=True)
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature  # (C, V)
    return logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]


def made_up_stage(adapter: str, correct: list[int], group: list[int], phi: list[float] | None = None) -> Stage:
    rows = len(correct)
    rollouts = Rollouts([[1]] * rows, [[2, 3]] * rows, [True] * rows, [[0.0, 0.0]] * rows)
    return Stage(adapter, rollouts, [""] * rows, [bool(c) for c in correct], phi or [1.0] * rows, group, [""] * rows)


# ---------------------------------------------------------------------------------------------------------------
# The loss


@pytest.fixture
def golden():
    """One group of 4 with rewards 3.5 2.5 .5 0; rows of 3, 2, 4 and 1 tokens; 10 tokens in all."""
    old = [[0.5, 1.0, 0.2, 0.0], [0.3, 0.7, 0.0, 0.0], [1.2, 0.4, 0.9, 0.1], [2.0, 0.0, 0.0, 0.0]]
    change = [[0.3, -0.3, 0.1, 0.0], [-0.1, 0.05, 0.0, 0.0], [0.4, -0.4, 0.0, 0.2], [-0.25, 0.0, 0.0, 0.0]]
    old, change = -torch.tensor(old, dtype=torch.float64), torch.tensor(change, dtype=torch.float64)  # (B, C)
    return SimpleNamespace(
        old=old,
        new=(old + change).requires_grad_(),
        mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool),
        advantages=torch.tensor(
            [1.1349061645553247, 0.5296228767924849, -0.6809436987331948, -0.9835853426146147], dtype=torch.float64
        ),
    )


@pytest.mark.parametrize(
    ("clip_low", "clip_high", "expected"),
    [(0.2, None, -0.0632789598), (0.2, 0.2, -0.0632789598), (0.2, 0.28, -0.0723582092)],
)
def test_loss_of_a_stale_batch_equals_the_golden_number(golden, clip_low, clip_high, expected):
    loss = grpo_loss(golden.new, golden.old, golden.advantages, golden.mask, 10, clip_low, clip_high)
    assert loss.item() == pytest.approx(expected, abs=1e-9), "clipped token mean: min of the two sides, all 10 tokens"


def test_on_policy_loss_equals_the_golden_number(golden):
    loss = grpo_loss(golden.new, golden.new.detach(), golden.advantages, golden.mask, 10)
    assert loss.item() == pytest.approx(-0.0756604110, abs=1e-9)


def test_on_policy_gradient_is_minus_advantage_over_tokens(golden):
    grpo_loss(golden.new, golden.new.detach(), golden.advantages, golden.mask, 10).backward()
    expected = -golden.advantages[:, None] * golden.mask / 10
    assert torch.allclose(golden.new.grad, expected, rtol=0, atol=1e-12), (
        "the loss value is about 0 on policy, its gradient is not: a ratio cut from the graph learns nothing"
    )
    assert golden.new.grad[0, 0].item() == pytest.approx(-0.11349062, abs=1e-8)


def test_clipped_tokens_carry_no_gradient_and_others_the_golden_one(golden):
    grpo_loss(golden.new, golden.old, golden.advantages, golden.mask, 10, 0.2, 0.28).backward()
    rows = golden.new.grad[[0, 2]].tolist()
    assert rows[0] == pytest.approx([0.0, -0.08407592, -0.12542653, 0.0], abs=1e-8), "row 0: first token clipped high"
    assert rows[1] == pytest.approx([0.10158486, 0.0, 0.06809437, 0.08317065], abs=1e-8), "row 2: second clipped low"


@pytest.mark.parametrize(
    ("advantage", "ratio", "clipped"),
    [(1.0, 1.5, True), (1.0, 0.5, False), (-1.0, 1.5, False), (-1.0, 0.5, True)],
)
def test_the_clip_stops_only_moves_that_went_far_enough_already(advantage, ratio, clipped):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    a, ones = torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1)
    grpo_loss(logp, torch.zeros_like(logp), a, ones, 1).backward()
    expected = 0.0 if clipped else -advantage * ratio
    assert logp.grad.item() == pytest.approx(expected), (
        "a negative advantage must clip below, never above: min() is pessimistic on both signs"
    )


def test_what_stands_in_padded_slots_does_not_matter(golden):
    loss = grpo_loss(golden.new, golden.old, golden.advantages, golden.mask, 10)
    noisy = torch.where(golden.mask, golden.new, torch.full_like(golden.new, 3.0))
    assert grpo_loss(noisy, golden.old, golden.advantages, golden.mask, 10).item() == loss.item()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_loss_and_gradient_do_not_depend_on_the_split(data):
    """Any cut of any stream into micro-batches adds up to the same loss and gradient."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=8))
    rows = len(lengths)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    old, change = torch.randn(2, rows, max(lengths), generator=generator, dtype=torch.float64)  # (B, C) each
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)  # (B,)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, C)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))

    def total(parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        new = (old + 0.3 * change).requires_grad_()
        loss = sum(grpo_loss(new[p], old[p], advantages[p], mask[p], sum(lengths)) for p in parts)
        loss.backward()
        return loss.detach(), new.grad

    loss, gradient = total([list(range(rows))])
    edges = [0, *cuts, rows]
    split_loss, split_gradient = total([list(order[a:b]) for a, b in itertools.pairwise(edges)])
    assert torch.allclose(loss, split_loss, rtol=0, atol=1e-10), "each part must be divided by the WHOLE token count"
    assert torch.allclose(gradient, split_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("on_policy", "clip_high"), [(True, 0.2), (False, 0.2), (False, 0.28)])
def test_loss_and_gradient_equal_those_of_trl(golden, on_policy, clip_high):
    """TRL's own _compute_loss ("dapo", beta 0) on the golden batch. Written for TRL 1.16; private API."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not among the requirements")
    new = golden.new.detach().clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, **k: t),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type="dapo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=clip_high,
        importance_sampling_level="token",
        max_completion_length=4,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.zeros(4, 4, dtype=torch.long),
        "completion_mask": golden.mask.long(),
        "advantages": golden.advantages,
        "old_per_token_logps": None if on_policy else golden.old,
        "num_items_in_batch": torch.tensor(10),
    }
    try:
        theirs = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    except (AttributeError, KeyError, TypeError) as error:
        pytest.skip(f"TRL's private loss has changed: {error!r}")
    theirs.backward()
    old = golden.new.detach() if on_policy else golden.old
    ours = grpo_loss(golden.new, old, golden.advantages, golden.mask, 10, 0.2, clip_high)
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    assert torch.allclose(golden.new.grad, new.grad, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# Advantages


def test_advantages_equal_the_golden_numbers(golden):
    advantages, kept = group_advantages([3.5, 2.5, 0.5, 0.0], [7, 7, 7, 7])
    assert advantages.tolist() == pytest.approx(golden.advantages.tolist(), abs=1e-12), (
        "(R - mean) / (std + 1e-4) with Bessel's correction: std 1.6520, not 1.4307"
    )
    assert kept.tolist() == [True] * 4


def test_advantages_without_the_std_are_only_centred():
    advantages, _ = group_advantages([3.5, 2.5, 0.5, 0.0], [0] * 4, scale_std=False)
    assert advantages.tolist() == [1.875, 0.875, -1.125, -1.625]


def test_rows_are_grouped_by_id_and_not_by_position():
    interleaved, kept = group_advantages([2.0, 0.5, 0.0, 0.0], [1, 2, 1, 2])  # order p1 p2 p1 p2
    one, two = group_advantages([2.0, 0.0], [1, 1])[0], group_advantages([0.5, 0.0], [2, 2])[0]
    assert interleaved.tolist() == [one[0], two[0], one[1], two[1]], "rewards.view(-1, N) would mix the two problems"
    assert kept.all()


def test_rewards_that_differ_by_problem_only_carry_no_signal():
    advantages, kept = group_advantages([3.0, 0.5, 3.0, 0.5], [1, 2, 1, 2])
    assert advantages.tolist() == [0.0] * 4, "an easy problem is not a good answer"
    assert not kept.any()


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.1, 0.3 - 0.2] * 4, torch.full((8,), 0.1).tolist(), [0.0] * 8])
def test_a_group_of_equal_rewards_is_dropped_rounding_or_not(rewards):
    advantages, kept = group_advantages(rewards, [0] * 8)
    assert advantages.tolist() == [0.0] * 8, "rounding noise was divided by its own std"
    assert not kept.any(), "std == 0 misses rewards that are equal but for their last bit"


def test_a_dead_group_does_not_take_a_live_one_with_it():
    advantages, kept = group_advantages([2.0, 2.0, 2.0, 0.0], [0, 0, 1, 1])
    assert kept.tolist() == [False, False, True, True]
    assert advantages[2] == -advantages[3] > 0.7


@pytest.mark.parametrize(
    ("rewards", "groups", "complaint"),
    [
        ([1.0, math.nan, 0.0, 1.0], [0] * 4, "row 1 is not finite"),
        ([1.0, 0.0, math.inf, 1.0], [0] * 4, "row 2 is not finite"),
        ([1.0, 0.0, 0.0, -math.inf], [0] * 4, "row 3 is not finite"),
        ([1.0], [0] * 8, "1 rewards for 8 rows"),
        ([1.0, 0.0, 1.0], [0, 0], "3 rewards for 2 rows"),
        ([1.0, 0.0, 1.0], [0, 0, 1], "group 1 has one row"),
    ],
)
def test_rewards_that_would_poison_a_group_are_refused(rewards, groups, complaint):
    with pytest.raises(ValueError, match=complaint):
        group_advantages(rewards, groups)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_advantages_follow_their_rows_through_every_permutation(data):
    n, groups = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    ids = [g for g in range(groups) for _ in range(n)]
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0, 2.5, 3.0, 3.5]), min_size=len(ids), max_size=len(ids)))
    order = data.draw(st.permutations(range(len(ids))))
    advantages, kept = group_advantages(rewards, ids)
    shuffled, shuffled_kept = group_advantages([rewards[i] for i in order], [ids[i] for i in order])
    assert torch.allclose(shuffled, advantages[list(order)], rtol=0, atol=1e-12)
    assert torch.equal(shuffled_kept, kept[list(order)])


# The conversion bonus, through group normalisation.


def both_methods(challenges: list[int], rivals: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of one challenge group under Agon and under coop; all rows well formed."""
    ids = [0] * len(challenges)
    return tuple(
        group_advantages([challenge_reward(b, a, 1.0, bonus=x) for b, a in zip(challenges, rivals, strict=True)], ids)[
            0
        ]
        for x in (1.0, 0.0)
    )


@pytest.mark.parametrize("rival", [0, 1], ids=["all rivals wrong", "all rivals right"])
@given(challenges=st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=40, deadline=None)
def test_where_all_rivals_agree_the_bonus_changes_nothing(rival, challenges):
    agon_advantages, coop_advantages = both_methods([int(c) for c in challenges], [rival] * 8)
    assert torch.allclose(agon_advantages, coop_advantages, rtol=0, atol=1e-3), "3 against 0 is 2 against 0, z-scored"


@given(others=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=5))
@settings(max_examples=40, deadline=None)
def test_where_rivals_differ_a_conversion_is_worth_more_than_a_kept_answer(others):
    rows = [(True, False), (True, True), (False, False), *others]  # (challenge right, rival right)
    agon_advantages, coop_advantages = both_methods([int(b) for b, _ in rows], [int(a) for _, a in rows])
    assert agon_advantages[0] - agon_advantages[1] > 0.1, "the bonus has no gradient"
    assert coop_advantages[0] == coop_advantages[1], "coop must not tell the two apart"


# ---------------------------------------------------------------------------------------------------------------
# One update of one policy


@pytest.fixture
def stream(pair):
    """A stream of B at temperature 0.6 with made-up advantages: 12 rows, the middle group dropped."""
    prompts = [draft_prompt(pair.tokenizer, p.question) for p in PROBLEMS[:3]]
    rollouts = sample(pair, "B", prompts, 4, max_tokens=36, temperature=0.6, seed=5)
    rows = [0, 1, 2, 3, 8, 9, 10, 11]
    assert len({len(rollouts.completions[r]) for r in rows}) > 2, (
        "a fixture of equal lengths could not show a wrong mean"
    )
    advantages = torch.tensor([1.0, -0.5, 0.25, -0.75, 0.0, 0.0, 0.0, 0.0, 1.2, -1.0, 0.3, -0.5], dtype=torch.float64)
    return SimpleNamespace(
        rollouts=rollouts,
        advantages=advantages,
        kept=torch.isin(torch.arange(12), torch.tensor(rows)),
        rows=rows,
        config=dataclasses.replace(SMALL, temperature=0.6, grad_clip=1e9),
    )


def test_update_is_the_token_mean_policy_gradient_of_the_kept_rows(pair, stream):
    ours = recorded_gradient(pair, "B", stream.rollouts, stream.advantages, stream.kept, stream.config)
    total = sum(len(stream.rollouts.completions[r]) for r in stream.rows)
    for r in stream.rows:  # on policy the gradient is that of -sum(A logp) / tokens
        logps = naive_logps(pair, "B", stream.rollouts.prompts[r], stream.rollouts.completions[r], 0.6)
        (-stream.advantages[r].float() * logps.sum() / total).backward()
    naive = torch.cat([p.grad.flatten() for p in pair.parameters["B"].values()])
    assert (ours - naive).norm() < 1e-5 * naive.norm(), (
        "the gradient belongs to another adapter, temperature, row weight or token count (dropped rows included?)"
    )


def test_update_counts_the_tokens_of_kept_rows_alone(pair, stream):
    optimizer = Recorder(pair.parameters["B"].values(), lr=1.0)
    metrics = update_policy(pair, "B", optimizer, stream.rollouts, stream.advantages, stream.kept, stream.config)
    assert metrics["tokens"] == sum(len(stream.rollouts.completions[r]) for r in stream.rows), (
        "dropped rows must leave the denominator, and end-of-turn tokens must stay in it"
    )


@pytest.mark.parametrize("micro_tokens", [1, 40, 100])
def test_gradient_does_not_depend_on_the_micro_batches(pair, stream, micro_tokens):
    def gradient(budget):
        config = dataclasses.replace(stream.config, micro_tokens=budget)
        return recorded_gradient(pair, "B", stream.rollouts, stream.advantages, stream.kept, config)

    whole, split = gradient(16384), gradient(micro_tokens)
    assert (whole - split).norm() < 1e-5 * whole.norm(), "a denominator was taken per micro-batch"


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = list(micro_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths))), "a row was lost or doubled"
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[r] for r in batch) <= budget


def test_a_micro_batch_of_some_size_is_hardly_padded():
    lengths = torch.randint(10, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = list(micro_batches(lengths, 10**6))
    padded = [len(batch) * max(lengths[r] for r in batch) for batch in batches]
    tokens = [sum(lengths[r] for r in batch) for batch in batches]
    assert sum(padded) < 1.2 * sum(tokens), "in one batch it would be twice as many"
    assert all(p <= 1024 or t >= 7 / 8 * p for p, t in zip(padded, tokens, strict=True))
    assert min(padded[:-1]) > 500, "cut into crumbs"
    assert len(list(micro_batches([300] * 300, 10**6))) == 1, "without pads there is nothing to cut"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_update_moves_its_adapter_and_leaves_the_rival_bit_identical(pair, adapter):
    rival = "B" if adapter == "A" else "A"
    optimizers, config = adam(pair), dataclasses.replace(SMALL, group_size=4)
    for who in (rival, adapter):  # the rival's update first, so that it has momentum to be moved by
        before = {name: weights(pair, name) for name in ADAPTERS}
        rollouts = sample(pair, who, [draft_prompt(pair.tokenizer, PROBLEMS[0].question)], 4, max_tokens=36)
        advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
        update_policy(pair, who, optimizers[who], rollouts, advantages, torch.ones(4, dtype=torch.bool), config)
        other = "B" if who == "A" else "A"
        assert not same(before[who], weights(pair, who)), f"{who} did not learn"
        assert same(before[other], weights(pair, other)), f"updating {who} moved {other}"
    assert all(p.grad is None for tensors in pair.parameters.values() for p in tensors.values()), (
        "gradients were left over"
    )


def test_the_gradient_is_clipped_to_its_largest_norm(pair, stream):
    config = dataclasses.replace(stream.config, grad_clip=0.01)
    free = recorded_gradient(pair, "B", stream.rollouts, stream.advantages, stream.kept, stream.config)
    clipped = recorded_gradient(pair, "B", stream.rollouts, stream.advantages, stream.kept, config)
    assert free.norm() > 0.02
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_refused_before_it_moves_anything(pair, stream):
    before, optimizer = weights(pair, "B"), adam(pair)["B"]
    stream.advantages[0] = math.inf
    with pytest.raises(FloatingPointError, match="adapter B"):
        update_policy(pair, "B", optimizer, stream.rollouts, stream.advantages, stream.kept, stream.config)
    assert same(before, weights(pair, "B")), "NaN reached the weights"


def test_on_policy_the_ratio_is_exactly_one(pair, stream, monkeypatch):
    seen = []

    def spy(logp, old_logp, *rest):
        seen.append((logp.detach(), old_logp))
        return grpo_loss(logp, old_logp, *rest)

    monkeypatch.setattr(agon, "grpo_loss", spy)
    recorded_gradient(pair, "B", stream.rollouts, stream.advantages, stream.kept, stream.config)
    assert seen and all(torch.equal(new, old) and not old.requires_grad for new, old in seen), (
        "with one update per batch old log-probs are the same forward's, detached; the sampler's round differently"
    )


def two_epochs_by_hand(pair, stream, lr: float, stale: bool) -> tuple[list[torch.Tensor], int]:
    """Two SGD updates on one batch, row by row -> (B's weights, tokens outside the clip range in the second one)."""
    total, clipped, old = sum(len(stream.rollouts.completions[r]) for r in stream.rows), 0, {}
    for epoch in range(2):
        for r in stream.rows:
            logps = naive_logps(pair, "B", stream.rollouts.prompts[r], stream.rollouts.completions[r], 0.6)
            if epoch == 0 or not stale:
                old[r] = logps.detach()
            ratio, a = (logps - old[r]).exp(), stream.advantages[r].float()
            (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / total).backward()
            clipped += int(((ratio - 1).abs() > 0.2).sum())
        with torch.no_grad():
            for p in pair.parameters["B"].values():
                p -= lr * p.grad
                p.grad = None
    return weights(pair, "B"), clipped


def test_a_second_inner_epoch_is_clipped_against_the_log_probs_before_the_first(pair, stream):
    lr, start = 0.3, weights(pair, "B")

    def restart():
        with torch.no_grad():
            for p, w in zip(pair.parameters["B"].values(), start, strict=True):
                p.copy_(w)

    expected, clipped = two_epochs_by_hand(pair, stream, lr, stale=True)
    restart()
    fresh, _ = two_epochs_by_hand(pair, stream, lr, stale=False)
    restart()
    optimizer = torch.optim.SGD(pair.parameters["B"].values(), lr=lr)
    config = dataclasses.replace(stream.config, inner_epochs=2, micro_tokens=100)
    update_policy(pair, "B", optimizer, stream.rollouts, stream.advantages, stream.kept, config)
    ours = weights(pair, "B")

    def distance(a, b):
        return math.sqrt(sum((x - y).pow(2).sum().item() for x, y in zip(a, b, strict=True)))

    assert clipped > 5, "the step is too small for this test to mean anything"
    assert distance(expected, fresh) > 0.05 * distance(expected, start), "nor can it tell stale from fresh log-probs"
    assert distance(ours, expected) < 1e-3 * distance(expected, start), "the second epoch must not refresh old_logp"


# ---------------------------------------------------------------------------------------------------------------
# One step of the method


@pytest.fixture
def updates(monkeypatch):
    """Replace update_policy by a recorder: what each stream was about to be trained on."""
    calls = []

    def record(pair, adapter, optimizer, rollouts, advantages, kept, config):
        calls.append(
            SimpleNamespace(adapter=adapter, optimizer=optimizer, rollouts=rollouts, advantages=advantages, kept=kept)
        )
        return {"grad_norm": 0.0, "tokens": 0, "logp_gap": 0.0}

    monkeypatch.setattr(agon, "update_policy", record)
    return calls


def test_roles_alternate_and_each_stream_goes_to_the_policy_that_sampled_it(pair, updates):
    optimizers, seen = {"A": object(), "B": object()}, []
    for step in range(4):
        metrics, drafts, challenges = agon_step(pair, optimizers, PROBLEMS[:2], step, SMALL)
        seen.append((metrics["drafter"], metrics["challenger"]))
        assert (drafts.adapter, challenges.adapter) == seen[-1]
        draft_update, challenge_update = updates[-2:]
        assert draft_update.rollouts == drafts.rollouts
        assert challenge_update.rollouts == challenges.rollouts
        assert (draft_update.adapter, challenge_update.adapter) == seen[-1], "a policy was trained on its rival's rows"
        assert draft_update.optimizer is optimizers[drafts.adapter]
        assert challenge_update.optimizer is optimizers[challenges.adapter]
    assert seen == [("A", "B"), ("B", "A"), ("A", "B"), ("B", "A")], "fixed roles lose most of the gain"


def test_each_stream_is_scored_by_its_own_adapter_on_its_own_prompts(pair, monkeypatch):
    calls = []

    def spy(model, prompts, completions, temperature):
        active = {name for m in model.modules() if hasattr(m, "lora_A") for name in m.active_adapters}
        trained = {n for n in ADAPTERS for p in pair.parameters[n].values() if p.requires_grad}
        calls.append((active, trained, prompts, temperature))
        return token_logprobs(model, prompts, completions, temperature)

    monkeypatch.setattr(agon, "token_logprobs", spy)
    config = dataclasses.replace(SMALL, temperature=0.7)
    _, _, challenges = agon_step(pair, adam(pair), PROBLEMS[:4], 1, config)  # step 1: B drafts
    assert len(calls) == 2, "a batch this small is one micro-batch per stream"
    plain = [draft_prompt(pair.tokenizer, p.question) for p in PROBLEMS]
    (draft_active, draft_trained, draft_prompts, t1), (active, trained, prompts, t2) = calls
    assert draft_active == draft_trained == {"B"}
    assert active == trained == {"A"}
    assert all(p in plain for p in draft_prompts), "the drafter answered the plain problem and must be scored on it"
    assert all(p in challenges.rollouts.prompts and p not in plain for p in prompts), "the challenger read a summary"
    assert t1 == t2 == 0.7, "scored at another temperature than it was sampled at"


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("step", [0, 1])
def test_sampler_and_trainer_agree_on_every_sampled_token(pair, temperature, step):
    config = dataclasses.replace(SMALL, temperature=temperature)
    metrics, *_ = agon_step(pair, adam(pair), PROBLEMS[:6], step, config)
    for name in ("draft", "challenge"):
        assert metrics[name]["tokens"] > 0, "no living group: this batch tests nothing"
        assert metrics[name]["logp_gap"] < 1e-4, "wrong adapter, prompt, temperature or shift in one of the two"


def test_both_policies_move_and_the_base_does_not(pair):
    base = {k: v.detach().clone() for k, v in pair.model.state_dict().items() if "lora_" not in k}
    before, optimizers = {name: weights(pair, name) for name in ADAPTERS}, adam(pair)
    for step in range(2):
        agon_step(pair, optimizers, PROBLEMS[:6], step, SMALL)
    for name in ADAPTERS:
        assert not same(before[name], weights(pair, name)), f"{name} did not learn in two steps"
    after = {k: v for k, v in pair.model.state_dict().items() if "lora_" not in k}
    assert base.keys() == after.keys()
    assert all(torch.equal(base[k], after[k]) for k in base), "the frozen base moved"


def test_the_challenges_of_a_problem_are_one_group_although_their_prompts_differ(pair, updates):
    n = SMALL.group_size
    _, drafts, challenges = agon_step(pair, {"A": None, "B": None}, PROBLEMS[:3], 0, SMALL)
    assert challenges.group == drafts.group == [0] * n + [1] * n + [2] * n
    for g in range(3):
        prompts = {tuple(p) for p, h in zip(challenges.rollouts.prompts, challenges.group, strict=True) if h == g}
        assert len(prompts) > 1, "every challenge of the group read the same summary: the bonus has no spread"
        rows = [i for i, h in enumerate(challenges.group) if h == g]
        assert abs(updates[1].advantages[rows].sum().item()) < 1e-9, "not centred within the problem"


def made_up_step(monkeypatch, pair, config, step=0):
    """agon_step on two problems whose outcomes are given: rivals differ in the first, all are wrong in the second."""
    drafts = made_up_stage("A", [0, 1, 0, 1, 0, 0, 0, 0], [0] * 4 + [1] * 4, [1, 1, 0, 1, 1, 1, 1, 0])
    drafts.rollouts.completions[1] = [2, 3, 3]  # longer than the challenge that reads it
    challenges = made_up_stage("B", [1, 1, 0, 0, 0, 0, 0, 0], [0] * 4 + [1] * 4, [1, 0, 1, 1, 1, 1, 1, 1])

    def both(pair, problems, drafter, challenger, n, shared, **sampling):
        drafts.adapter, challenges.adapter = drafter, challenger
        challenges.reads = [0] * 4 + [4] * 4 if shared else range(8)
        return drafts, challenges

    monkeypatch.setattr(agon, "cascade", both)
    return agon_step(pair, {"A": None, "B": None}, PROBLEMS[:2], step, config)[0]


@pytest.mark.parametrize(
    ("changes", "rewards"),
    [  # of the first group, by hand: c(a) 0 1 0 1, c(b) 1 1 0 0, phi(b) 1 0 1 1; the second is all wrong
        ({"method": "agon"}, [3.5, 2.0, 0.5, 0.5]),
        ({"method": "fixed-roles"}, [3.5, 2.0, 0.5, 0.5]),
        ({"method": "shared-opponent"}, [3.5, 3.0, 0.5, 0.5]),  # all read the first draft, which is wrong
        ({"method": "coop"}, [2.5, 2.0, 0.5, 0.5]),
        ({"method": "margin"}, [2.5, 0.0, 0.5, -1.5]),
        ({"method": "self-refine"}, [2.5, 2.0, 0.5, 0.5]),
        ({"method": "self-refine-bonus"}, [3.5, 2.0, 0.5, 0.5]),
        ({"method": "agon", "length_tiebreak": 0.25}, [3.5, 2.25, 0.5, 0.5]),  # shorter where both are right
    ],
)
def test_each_method_pays_its_own_reward(monkeypatch, updates, changes, rewards):
    config = dataclasses.replace(SMALL, **changes)
    metrics = made_up_step(monkeypatch, None, config)
    rewards = rewards + [0.5] * 4
    expected, kept = group_advantages(rewards, [0] * 4 + [1] * 4)
    advantages, kept_rows = updates[-1].advantages[-8:].tolist(), updates[-1].kept[-8:].tolist()
    assert advantages == pytest.approx(expected.tolist()), "2 c(b) + bonus c(b) (1 - c(a)) - margin c(a) + lambda phi"
    assert kept_rows == kept.tolist() == [True] * 4 + [False] * 4
    assert metrics["challenge"]["reward"] == pytest.approx(sum(rewards) / 8)


def test_a_constant_rival_makes_margin_and_coop_the_same_and_the_bonus_constant():
    """So a shared opponent takes the bonus' gradient away, and the margin differs from coop by its own spread alone."""
    rng = random.Random(0)
    for _ in range(200):
        rival, rows = rng.random() < 0.5, [(rng.random() < 0.5, float(rng.random() < 0.8)) for _ in range(8)]
        coop, margin, agon_ = (
            [challenge_reward(c, rival, phi, **terms) for c, phi in rows]
            for terms in ({"bonus": 0.0}, {"bonus": 0.0, "margin": 2.0}, {})
        )
        ours, theirs = group_advantages(coop, [0] * 8)[0], group_advantages(margin, [0] * 8)[0]
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-12)
        paid = {x - y for x, y, (c, _) in zip(agon_, coop, rows, strict=True) if c}
        assert paid <= {0.0 if rival else 1.0}, "within the group every right row gets the same bonus"


TRAINED = [name for name, method in METHODS.items() if method.policies]


@pytest.mark.parametrize("name", TRAINED)
def test_who_drafts_who_reads_what_and_who_learns(pair, updates, name):
    """Each method on a real batch, at an even and at an odd step."""
    method, n, config = METHODS[name], SMALL.group_size, dataclasses.replace(SMALL, method=name)
    turns = {"agon": "AB BA", "coop": "AB BA", "margin": "AB BA", "shared-opponent": "AB BA", "fixed-roles": "AB AB"}
    expected = turns.get(name, "A- A-" if name == "grpo" else "AA AA").split()
    for step, turn in enumerate(expected):
        updates.clear()
        metrics, drafts, challenges = agon_step(pair, {"A": None, "B": None}, PROBLEMS[:3], step, config)
        assert metrics["drafter"] == drafts.adapter == turn[0]
        assert metrics["rollouts"] == 3 * 2 * n, "every method spends 2N rollouts on a problem"
        assert [u.adapter for u in updates] == list(dict.fromkeys(turn.strip("-"))), "one update of each that sampled"
        learned = [p for u in updates for p in u.rollouts.prompts]
        if name == "grpo":
            assert challenges is metrics["challenger"] is metrics["habits"] is None
            assert learned == drafts.rollouts.prompts and drafts.group == [g for g in range(3) for _ in range(2 * n)]
            continue
        assert metrics["challenger"] == challenges.adapter == turn[1]
        assert learned == drafts.rollouts.prompts + challenges.rollouts.prompts
        reads = [r - r % n for r in range(3 * n)] if method.shared else list(range(3 * n))
        assert list(challenges.reads) == reads
        assert challenges.summaries == [summarize(drafts.texts[a]) for a in reads]
        sizes = [
            len({s for s, g in zip(challenges.summaries, challenges.group, strict=True) if g == h}) for h in range(3)
        ]
        assert sizes == [1, 1, 1] if method.shared else max(sizes) > 1
        assert sum(h["rows"] for h in metrics["habits"].values()) == 3 * n
        for update in updates:
            assert len(update.advantages) == len(update.kept) == len(update.rollouts.prompts)
            for start in range(0, len(update.kept), n):
                assert abs(update.advantages[start : start + n].sum()) < 1e-9, "centred in each stream and problem"


def test_all_methods_see_the_same_problems_in_the_same_order(tmp_path, monkeypatch):
    seen = {}

    def record(pair, optimizers, problems, step, config):
        seen.setdefault(config.method, []).append([p.question for p in problems])
        return agon_step(pair, optimizers, problems[:1], step, config)

    monkeypatch.setattr(agon, "agon_step", record)
    for name in TRAINED:
        trained(tmp_path / name, method=name, steps=2)
    assert len(seen) == len(TRAINED) and all(order == seen["agon"] for order in seen.values())


def test_one_policy_learns_from_both_its_streams_in_one_update(pair):
    """Two updates in turn would train the second on rows of a policy that is gone."""
    config = dataclasses.replace(SMALL, method="self-refine", inner_epochs=1)
    before, optimizers = weights(pair, "B"), adam(pair)
    metrics, *_ = agon_step(pair, optimizers, PROBLEMS[:6], 0, config)
    assert {int(state["step"]) for state in optimizers["A"].state.values()} == {1}
    assert metrics["draft"]["tokens"] == metrics["challenge"]["tokens"] > 0
    assert same(before, weights(pair, "B"))


def test_the_drafter_is_paid_for_its_own_answer_alone(monkeypatch, updates):
    metrics = made_up_step(monkeypatch, None, SMALL)
    draft_rewards = [0.5, 2.5, 0.0, 2.5, 0.5, 0.5, 0.5, 0.0]
    expected, _ = group_advantages(draft_rewards, [0] * 4 + [1] * 4)
    assert updates[0].advantages.tolist() == pytest.approx(expected.tolist()), "2 c(a) + lambda phi, no rival term"
    assert metrics["draft"]["reward"] == pytest.approx(sum(draft_rewards) / 8)


def test_format_weight_and_scale_std_reach_the_advantages(monkeypatch, updates):
    made_up_step(monkeypatch, None, dataclasses.replace(SMALL, format_weight=0.1, scale_std=False))
    assert updates[1].advantages[:4].tolist() == pytest.approx([r - 5.3 / 4 for r in (3.1, 2.0, 0.1, 0.1)])


def test_metrics_count_dead_groups_and_groups_with_nothing_but_format(monkeypatch, updates):
    metrics = made_up_step(monkeypatch, None, SMALL)
    assert (metrics["draft"]["dead_groups"], metrics["draft"]["format_only_groups"]) == (0.0, 0.5)
    assert (metrics["challenge"]["dead_groups"], metrics["challenge"]["format_only_groups"]) == (0.5, 0.0)
    assert metrics["draft"]["accuracy"] == metrics["challenge"]["accuracy"] == 0.25
    assert metrics["rates"]["fix"] == pytest.approx(1 / 6)
    assert metrics["rates"]["keep"] == 0.5


def test_a_batch_without_any_signal_changes_nothing(pair):
    optimizers = adam(pair)
    agon_step(pair, optimizers, PROBLEMS[:6], 0, SMALL)  # both optimizers have momentum now
    before = {name: weights(pair, name) for name in ADAPTERS}
    config = dataclasses.replace(SMALL, max_tokens=2)  # nobody can finish: all wrong, all malformed
    metrics, *_ = agon_step(pair, optimizers, PROBLEMS[:6], 1, config)
    for name in ADAPTERS:
        assert same(before[name], weights(pair, name)), "momentum moved a policy without a gradient"
    for name in ("draft", "challenge"):
        assert metrics[name]["dead_groups"] == metrics[name]["truncated"] == 1.0
        assert metrics[name]["tokens"] == metrics[name]["grad_norm"] == 0


def test_grpo_spends_the_same_rollouts_on_one_policy_and_no_exchange(pair):
    before, config = {name: weights(pair, name) for name in ADAPTERS}, dataclasses.replace(SMALL, method="grpo")
    for step in range(2):
        metrics, drafts, challenges = agon_step(pair, adam(pair), PROBLEMS[:6], step, config)
        assert metrics["drafter"] == drafts.adapter == "A"
        assert metrics["challenger"] is challenges is metrics["rates"] is None
        assert drafts.group == [g for g in range(6) for _ in range(2 * config.group_size)], (
            "the baseline gets 2N rollouts"
        )
    assert not same(before["A"], weights(pair, "A"))
    assert same(before["B"], weights(pair, "B")), "plain GRPO trains one policy"


def test_a_step_samples_what_the_cascade_at_inference_samples(pair, updates):
    config = dataclasses.replace(SMALL, seed=3)
    _, drafts, challenges = agon_step(pair, {"A": None, "B": None}, PROBLEMS[:2], 1, config)
    again = cascade(pair, PROBLEMS[:2], "B", "A", config.group_size, max_tokens=36, seed=3_000_001)
    assert (drafts.texts, challenges.texts) == (again[0].texts, again[1].texts)


def test_every_step_samples_anew(pair, updates):
    config = dataclasses.replace(SMALL, method="grpo")
    first, second = (agon_step(pair, {"A": None}, PROBLEMS[:2], step, config)[1].texts for step in (0, 2))
    assert first != second, "a seed that forgets the step repeats the same noise for the same problem"


# ---------------------------------------------------------------------------------------------------------------
# NF4, the real 4-bit path on the CPU


def test_both_policies_learn_on_a_real_nf4_base():
    pair = load_pair("tiny", four_bit=True, b_init_std=0.1, device="cpu")
    assert any(type(m).__name__ == "Linear4bit" for m in pair.model.modules()), "the base was not quantized at all"
    optimizers, before = adam(pair), {name: weights(pair, name) for name in ADAPTERS}
    for step in range(2):
        metrics, *_ = agon_step(pair, optimizers, PROBLEMS[:6], step, SMALL)
        assert metrics["draft"]["tokens"] > 0 and metrics["challenge"]["tokens"] > 0
    for name in ADAPTERS:
        assert not same(before[name], weights(pair, name)), f"{name} did not learn in two NF4 steps"


def test_sampling_from_an_nf4_base_leaves_its_gradients_alone():
    pair = load_pair("tiny", four_bit=True, b_init_std=0.1, device="cpu")
    prompts = [draft_prompt(pair.tokenizer, PROBLEMS[0].question)]
    completion = sample(load_pair("tiny", device="cpu"), "A", prompts, max_tokens=36).completions[0]

    def gradient():
        logps = token_logprobs(pair.activate("B", train=True), prompts, [completion])
        return torch.cat([g.flatten() for g in torch.autograd.grad(logps.sum(), list(pair.parameters["B"].values()))])

    before = gradient()
    sample(pair, "B", prompts, max_tokens=4)
    after = gradient()
    assert (after - before).norm() < 1e-3 * before.norm(), (
        "bitsandbytes repacks 4-bit weights at the first inference on an AVX512-BF16 CPU, and its kernel for those has "
        "no backward: gradients stop at every frozen layer, without an error"
    )


def test_sampler_and_trainer_agree_on_an_nf4_base():
    pair = load_pair("tiny", four_bit=True, b_init_std=0.1, device="cpu")
    optimizers = adam(pair)
    for step in range(2):
        metrics, *_ = agon_step(pair, optimizers, PROBLEMS[:6], step, SMALL)
        assert max(metrics[name]["logp_gap"] for name in ("draft", "challenge")) < 1e-4


# ---------------------------------------------------------------------------------------------------------------
# The loop


def test_learning_rate_climbs_stays_and_falls_to_its_end():
    config = Config(steps=100, lr=1.0, warmup=0.1, decay_from=0.5, lr_end=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:9] == pytest.approx([0.1 * (i + 1) for i in range(9)]), "linear warm-up; step 0 is not wasted at 0"
    assert rates[9:50] == pytest.approx([1.0] * 41)
    assert rates[50:] == pytest.approx([1 - 0.9 * (i + 1) / 50 for i in range(50)])


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    decay_from=st.floats(0, 1),
    lr_end=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_learning_rate_stays_between_zero_and_its_peak(steps, warmup, decay_from, lr_end):
    config = Config(steps=steps, warmup=warmup, decay_from=decay_from, lr_end=lr_end)
    for step in range(steps):
        assert 0 <= learning_rate(step, config) <= config.lr * (1 + 1e-12)


def test_problem_stream_visits_every_problem_before_it_repeats_one():
    stream = problem_stream(PROBLEMS, 0)
    passes = [[next(stream) for _ in PROBLEMS] for _ in range(3)]
    for one in passes:
        assert {p.question for p in one} == {p.question for p in PROBLEMS}
    assert passes[0] != list(PROBLEMS), "file order biases a short run"
    assert passes[0] != passes[1], "each pass has its own order"


def test_problem_stream_is_a_function_of_its_seed():
    def first(seed):
        stream = problem_stream(PROBLEMS, seed)
        return [next(stream).question for _ in range(12)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def trained(folder: Path, **changes):
    """(pair, history) after a short run of train() in `folder`."""
    folder.mkdir()
    config = dataclasses.replace(SMALL, **{"problems_per_step": 4, "group_size": 4, "steps": 3, "lr": 1e-3, **changes})
    pair = load_pair("tiny", b_init_std=config.b_init_std, device="cpu", seed=config.seed)
    return pair, train(config, folder, pair, PROBLEMS)


def test_the_same_seed_gives_the_same_adapters_bit_for_bit(tmp_path):
    first, second = trained(tmp_path / "1", seed=4)[0], trained(tmp_path / "2", seed=4)[0]
    for name in ADAPTERS:
        assert same(weights(first, name), weights(second, name)), "something draws from an unseeded generator"


def test_another_seed_gives_other_samples(tmp_path):
    first, second = trained(tmp_path / "1", seed=4)[1], trained(tmp_path / "2", seed=5)[1]
    assert [m["draft"]["mean_tokens"] for m in first] != [m["draft"]["mean_tokens"] for m in second]


def test_the_scheduled_learning_rate_reaches_every_optimizer(tmp_path, monkeypatch):
    seen = []

    def spy(pair, optimizers, problems, step, config):
        seen.append([group["lr"] for name in ADAPTERS for group in optimizers[name].param_groups])
        return agon_step(pair, optimizers, problems, step, config)

    monkeypatch.setattr(agon, "agon_step", spy)
    _, history = trained(tmp_path / "run", warmup=0.5, decay_from=0.6)
    config = dataclasses.replace(SMALL, steps=3, lr=1e-3, warmup=0.5, decay_from=0.6)
    expected = [learning_rate(step, config) for step in range(3)]
    assert seen == [[lr, lr] for lr in expected]
    assert [m["lr"] for m in history] == expected


def test_a_policy_without_a_signal_rests_although_its_rival_learns(tmp_path, monkeypatch):
    """In step 1 the challenger's stream is dead. Its optimizer has momentum; it must not move all the same."""
    calls, snapshots = [], []

    def advantages(rewards, groups, *rest):
        calls.append(len(rewards))
        a, kept = group_advantages([1.0 * (i % 2) for i in range(len(rewards))], groups, *rest)
        # Each stream calls twice, for the update and for the count of format-only groups: the seventh call is the
        # update of the fourth stream, the challenger's in step 1, which is A's.
        return a, kept & (len(calls) != 7)

    def spy(pair, *rest):
        snapshots.append({name: weights(pair, name) for name in ADAPTERS})
        return agon_step(pair, *rest)

    monkeypatch.setattr(agon, "group_advantages", advantages)
    monkeypatch.setattr(agon, "agon_step", spy)
    pair, _ = trained(tmp_path / "run", steps=2)
    assert not same(snapshots[0]["A"], snapshots[1]["A"])
    assert same(snapshots[1]["A"], weights(pair, "A")), (
        "A moved without a gradient (shared optimizer, zero-filled grads)"
    )
    assert not same(snapshots[1]["B"], weights(pair, "B"))


def test_each_optimizer_owns_exactly_the_tensors_of_its_adapter(tmp_path, monkeypatch):
    owned = {}

    def spy(pair, optimizers, *rest):
        for name, optimizer in optimizers.items():
            owned[name] = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return agon_step(pair, optimizers, *rest)

    monkeypatch.setattr(agon, "agon_step", spy)
    pair, _ = trained(tmp_path / "run", steps=1)
    assert owned == {name: {id(p) for p in pair.parameters[name].values()} for name in ADAPTERS}, (
        "an optimizer built by filtering on requires_grad misses the adapter that was not active"
    )


# ---------------------------------------------------------------------------------------------------------------
# A whole run


def few_problems(name, split="train", limit=None, seed=0, **given):
    return load_problems(name, split, {"test": 12, "validation": 6}.get(split, limit), seed, **given)


def short_run(folder: Path, *flags: str) -> SimpleNamespace:
    """agon.main on a few test problems -> return code, stdout, folder, and the pair's tensors at the start."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("cascade.load_problems", few_problems)
        code = agon.main(
            ["--steps", "3", "--problems-per-step", "4", "--group-size", "2", "--out", str(folder), *flags]
        )
    return SimpleNamespace(code=code, out=out.getvalue(), folder=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("agon") / "deep" / "run")


def strict(source: Path | str):
    """Parse JSON, refusing NaN and Infinity, which Python writes but no other reader takes."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


def strict_lines(path: Path) -> list[dict]:
    return [strict(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_succeeds_and_leaves_its_files(run):
    assert run.code == 0
    files = {"config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "report.md", "results.json", "A", "B"}
    assert files <= {path.name for path in run.folder.iterdir()}


def test_config_json_restores_the_settings_of_the_run(run):
    saved = json.loads((run.folder / "config.json").read_text(encoding="utf-8"))
    given = Config(steps=3, problems_per_step=4, group_size=2, out=str(run.folder))
    settled = dataclasses.replace(given, device="cpu", four_bit=False, gradient_checkpointing=False)
    assert Config(**saved) == settled, "what the machine decided is part of it"


def test_metrics_are_one_strict_json_line_per_step(run):
    lines = strict_lines(run.folder / "metrics.jsonl")
    assert [m["step"] for m in lines] == [0, 1, 2]
    assert [(m["drafter"], m["challenger"]) for m in lines] == [("A", "B"), ("B", "A"), ("A", "B")]
    for m in lines:
        assert m["lr"] > 0 and m["tokens_per_second"] > 0
        assert {"accuracy", "reward", "format", "dead_groups", "format_only_groups", "grad_norm", "logp_gap"} <= set(
            m["challenge"]
        )


def test_samples_show_one_exchange_per_step(run):
    lines = strict_lines(run.folder / "samples.jsonl")
    assert [record["step"] for record in lines] == [0, 1, 2]
    for record in lines:
        assert {"problem", "draft", "summary", "challenge", "draft_reward", "challenge_reward"} <= set(record)
    assert [record["drafter"] for record in lines] == ["A", "B", "A"]


def test_adapters_load_in_plain_peft(run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, logits = torch.tensor([[10, 20, 30]]), []
    for name in ADAPTERS:
        base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
        logits.append(base(ids).logits)
        logits.append(PeftModel.from_pretrained(base, run.folder / name)(ids).logits)
    plain, a, plain_again, b = logits
    assert torch.equal(plain, plain_again)
    assert not torch.equal(plain, a), "A was saved as it began: lora_B is still 0"
    assert not torch.equal(plain, b) and not torch.equal(a, b), "the two folders hold the same adapter"


def test_curves_are_a_png_picture(run):
    picture = (run.folder / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 5000


ROWS = ["zero-shot", "untrained cascade", "A alone", "B alone", "cascade A>B", "cascade B>A"]


def test_results_hold_the_rows_of_the_table(run):
    result = strict(run.folder / "results.json")
    assert [row["name"] for row in result["rows"]] == ROWS
    assert result["direction"] in ("A>B", "B>A")
    assert [f"cascade {result['direction']}"] == [row["name"] for row in result["rows"] if row.get("picked")]
    assert {row["problems"] for row in result["rows"]} == {12}


@pytest.mark.parametrize("where", ["stdout", "report.md"])
def test_the_table_and_the_exchanges_are_shown(run, where):
    text = run.out if where == "stdout" else (run.folder / "report.md").read_text(encoding="utf-8")
    for name in ROWS:
        assert re.search(rf"^\| {re.escape(name)} ", text, re.MULTILINE), f"no row {name!r} in {where}"
    problems = re.findall(r"^problem +\d\dx = \d\d \(mod \d\d\)", text, re.MULTILINE)
    assert 1 <= len(problems) <= 3, "up to three exchanges, one of each kind that occurred"
    assert len(re.findall(r"^shown ", text, re.MULTILINE)) == len(problems)


def test_the_last_line_says_how_to_use_the_run(run):
    assert run.out.rstrip().splitlines()[-1] == f'try: python cascade.py ask "14x = 9 (mod 19)" --run {run.folder}'


def test_a_grpo_run_reports_one_policy_and_its_two_passes(tmp_path):
    run = short_run(tmp_path / "run", "--method", "grpo", "--steps", "1")
    assert run.code == 0
    rows = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["zero-shot", "untrained cascade", "A alone", "cascade A>A"]
    (metrics,) = strict_lines(run.folder / "metrics.jsonl")
    assert metrics["challenger"] is None and "challenge" not in metrics
    assert (run.folder / "curves.png").stat().st_size > 5000, "no challenger: the picture has one panel"


def test_a_coop_run_samples_the_exchange_without_the_bonus(tmp_path):
    run = short_run(tmp_path / "run", "--method", "coop", "--steps", "1")
    assert run.code == 0
    (record,) = strict_lines(run.folder / "samples.jsonl")
    assert record["challenge_reward"] <= 2.5
    assert "B alone" in run.out


def test_ctrl_c_saves_both_adapters_and_says_so(tmp_path, monkeypatch):
    def interrupted(pair, optimizers, problems, step, config):
        if step == 1:
            raise KeyboardInterrupt
        return agon_step(pair, optimizers, problems, step, config)

    monkeypatch.setattr(agon, "agon_step", interrupted)
    run = short_run(tmp_path / "run")
    assert run.code == 130, "the shell's code for an interrupt"
    assert len(strict_lines(run.folder / "metrics.jsonl")) == 1
    load_pair("tiny", run.folder, device="cpu")
    assert f"python cascade.py eval --run {run.folder}" in run.out


@pytest.mark.parametrize("where", ["agon_step", "evaluate"])
def test_a_diverged_run_ends_in_one_line(tmp_path, monkeypatch, capsys, where):
    def diverge(*_, **__):
        raise FloatingPointError("gradient of adapter A is not finite; lower --lr")

    monkeypatch.setattr(agon, where, diverge)
    flags = ["--steps", "1", "--problems-per-step", "1", "--group-size", "2", "--out", str(tmp_path / "run")]
    assert agon.main(flags) == 2
    err = capsys.readouterr().err  # the progress bar, then the complaint
    assert err.splitlines()[-1] == "agon.py: error: gradient of adapter A is not finite; lower --lr"
    assert "Traceback" not in err


# ---------------------------------------------------------------------------------------------------------------
# The command line


def refused(capsys, argv: list[str]) -> str:
    """Run agon.main, demand exit code 2 and one line on stderr, and return that line."""
    try:
        code = agon.main(argv)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, f"a user's mistake must exit with 2, not {code}"
    assert out == ""
    assert len(err.splitlines()) == 1 and err.startswith("agon.py: error: "), f"not one plain line: {err!r}"
    return err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--nonsense 3", "--nonsense"),
        ("--method foo", "--method foo"),
        ("--method two-pass", "grpo"),
        ("--method self-refine --model-b tiny", "one policy"),
        ("--length-tiebreak -1", "--length-tiebreak"),
        ("--task poetry", "poetry"),
        ("--group-size 1", "--group-size 1"),
        ("--problems-per-step 0", "--problems-per-step 0"),
        ("--lr -1", "--lr -1"),
        ("--lr 0", "--lr 0"),
        ("--lr nan", "--lr nan"),
        ("--lr inf", "--lr inf"),
        ("--steps 0", "--steps 0"),
        ("--steps -3", "--steps -3"),
        ("--steps abc", "--steps"),
        ("--steps 1.5", "--steps"),
        ("--seed -1", "--seed -1"),
        ("--temperature 0", "--temperature 0"),
        ("--temperature nan", "--temperature nan"),
        ("--eval-temperature -0.1", "--eval-temperature -0.1"),
        ("--top-p 0", "--top-p 0"),
        ("--top-p nan", "--top-p nan"),
        ("--eval-top-p 1.1", "--eval-top-p 1.1"),
        ("--format-weight nan", "--format-weight nan"),
        ("--format-weight -1", "--format-weight -1"),
        ("--warmup 2", "--warmup 2"),
        ("--decay-from nan", "--decay-from nan"),
        ("--lr-end -0.1", "--lr-end -0.1"),
        ("--clip 0", "--clip 0"),
        ("--grad-clip nan", "--grad-clip nan"),
        ("--inner-epochs 0", "--inner-epochs 0"),
        ("--micro-tokens -1", "--micro-tokens -1"),
        ("--rollout-rows -1", "--rollout-rows -1"),
        ("--lora-rank 0", "--lora-rank 0"),
        ("--threads 0", "--threads 0"),
        ("--b-init-std nan", "--b-init-std nan"),
        ("--max-tokens", "--max-tokens"),
        ("stray", "stray"),
    ],
)
def test_a_bad_flag_is_refused_in_one_line_that_names_it(capsys, tmp_path, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    assert named in refused(capsys, flags.split())
    assert list(tmp_path.iterdir()) == [], "a refused run must leave nothing behind"


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_question_beyond_the_cache_is_refused_before_training(capsys, tmp_path, monkeypatch, split):
    problems = [Problem(f"{a}x = 1 (mod 19)", f"{a}") for a in range(2, 9)]
    long = Problem("7x = 2 (mod 19)" + "0123456789" * 500, "3")
    monkeypatch.setattr(agon, "load_split", lambda _, name: [*problems, long] if name == split else problems)
    monkeypatch.setattr(agon, "train", lambda *_: pytest.fail("it trained"))
    flags = ["--rollout-rows", "1", "--prompt-tokens", "16", "--out", str(tmp_path / "run")]
    line = refused(capsys, flags)
    assert "'7x = 2 (mod 19)0123" in line and "--prompt-tokens" in line and not (tmp_path / "run").exists()


def test_a_seed_too_large_for_the_generators_is_refused(capsys, tmp_path):
    refused(capsys, ["--seed", str(2**70), "--steps", "1", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "a file"])
def test_a_base_that_is_no_model_is_refused_in_one_line(capsys, tmp_path, kind):
    base = tmp_path / "base"
    if kind == "a file":
        base.write_text("weights")
    elif kind != "missing":
        base.mkdir()
    if kind == "garbage":
        (base / "config.json").write_text("{not json")
    assert str(base) in refused(capsys, ["--base", str(base), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["a full folder", "a file", "below a file"])
def test_an_output_folder_that_holds_anything_is_refused_and_left_alone(capsys, tmp_path, kind):
    folder = tmp_path / "precious"
    if kind == "a full folder":
        folder.mkdir()
        (folder / "thesis.txt").write_text("years of work")
    else:
        folder.write_text("years of work")
    refused(capsys, ["--steps", "1", "--out", str(folder / "run" if kind == "below a file" else folder)])
    holder = folder / "thesis.txt" if kind == "a full folder" else folder
    assert holder.read_text() == "years of work"
    assert [p.name for p in tmp_path.rglob("*")] in (["precious"], ["precious", "thesis.txt"])


def test_as_a_process_a_mistake_is_exit_code_2_and_one_line(tmp_path):
    script = Path(agon.__file__)
    command = [sys.executable, str(script), "--base", str(tmp_path / "nowhere"), "--steps", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""


def test_every_setting_has_a_flag_with_a_line_of_help(capsys):
    with pytest.raises(SystemExit) as stop:
        agon.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for f in dataclasses.fields(Config):
        flag = f"--{f.name.replace('_', '-')}"
        assert re.search(rf"{flag}[ ,]", text), f"{f.name} has no flag"
        described = " ".join(f"{f.metadata['help']} [{f.default}]".split())
        assert described.replace("- ", "-") in text.replace("- ", "-"), f"{flag} does not say what it does"


def test_no_flags_give_the_defaults_and_flags_their_values():
    assert parse_config([]) == Config()
    flags = ["--method", "coop", "--steps", "7", "--lr", "0.5", "--no-scale-std", "--four-bit", "--top-p", "0.9"]
    assert parse_config(flags) == Config("coop", steps=7, lr=0.5, scale_std=False, four_bit=True, top_p=0.9)


def test_defaults_pass_their_own_check():
    Config().check()


# ---------------------------------------------------------------------------------------------------------------
# README and the house

ROOT = Path(agon.__file__).parent


def test_every_name_the_readme_points_to_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:reward|model|rollout|cascade|agon)\.(?!py)\w+)`", text))
    assert len(names) >= 15, "the page of equations is gone"
    for name in names:
        module, attribute = name.split(".")
        assert hasattr(__import__(module), attribute), f"README points to {name}, which is not there"


def test_every_flag_the_readme_shows_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"`python\s+tests/[^`]*`", "", text)  # the checks beside the tests have flags of their own
    parser_help = subprocess.run([sys.executable, "agon.py", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    known = set(re.findall(r"--[a-z0-9][a-z0-9-]*", parser_help)) | {"--run"}
    shown = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]+", text))
    assert shown <= known, f"README shows flags that do not exist: {shown - known}"


@pytest.mark.parametrize(
    ("module", "may_import"),
    [
        ("reward", set()),
        ("model", set()),
        ("rollout", {"reward", "model"}),
        ("cascade", {"reward", "model", "rollout"}),
    ],
)
def test_a_module_imports_only_the_rooms_below_it(module, may_import):
    source = (ROOT / f"{module}.py").read_text(encoding="utf-8")
    ours = set(re.findall(r"^\s*(?:from|import) (reward|model|rollout|cascade|agon)\b", source, flags=re.MULTILINE))
    assert ours <= may_import


# ---------------------------------------------------------------------------------------------------------------
# Methods that train nothing


@pytest.mark.parametrize("method", ["zero-shot", "moa"])
def test_a_method_that_trains_nothing_is_evaluated(tmp_path, capsys, method):
    folder = tmp_path / "run"
    assert agon.main(["--method", method, "--eval-problems", "6", "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "0 steps" in out and "zero-shot" in out and "alone" not in out
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in results["rows"]] == ["zero-shot", "untrained cascade"] and not results["direction"]
    assert not (folder / "curves.png").exists() and (folder / "metrics.jsonl").read_text() == ""
    assert cascade_main(["ask", "14x = 9 (mod 19)", "--run", str(folder)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:5] in ("draft", "chall")] == [
        "-"
    ] * 2
