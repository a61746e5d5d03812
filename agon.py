"""Agon: competitive cross-model RL on one machine. Two policies draft, read each other, and are paid to out-solve.

    python agon.py                          train the embedded tiny pair (minutes, no GPU, no download)
    python agon.py --method coop            the same without the conversion bonus: copying ends later, or never
    python agon.py --method grpo            plain GRPO with the same number of rollouts
    python agon.py --preset 8gb             Qwen3-0.6B in 4-bit on DeepMath, sized for an 8 GB card
    python agon.py --preset 8gb --estimate  what that takes of the card's memory; loads and trains nothing

The method is that of V. Beliaev, arXiv 2607.07690. How this departs from GRPO (Shao et al. 2024), all of it:
  1. Two policies, A and B: LoRA adapters on one frozen base, or two, one optimizer each. Roles alternate every step.
  2. Two streams a step. The drafter's rows answer the plain prompt; the challenger's rows answer (problem, summary of
     ONE draft, its final answer withheld). Each stream is scored by the policy and on the prompt that sampled it.
  3. A challenge group is N completions of N prompts: same problem, one summary per draft. Groups go by explicit id.
  4. The challenger's reward adds the conversion bonus c(b) (1 - c(a)): right where the rival was wrong pays 3, not 2.
  5. No reference model and no KL term. (beta = 0 is also TRL's default.)
  6. The loss is a mean over all kept tokens of a stream, not a mean over rows of row means ("dapo" in TRL).
  7. Groups whose rewards are all equal are dropped, and their tokens leave the denominator too.
  8. Advantages divide by (std + 1e-4), std with Bessel's correction; --no-scale-std leaves the division out.
With one update per batch (--inner-epochs 1) the ratio is exactly 1 and the clip never acts; the loss is then
-sum(A_i len_i) / sum(len_i), no measure of progress, so it is not logged: watch the rewards and the gradient norms.

The shape alphabet stands at the head of model.py.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import reward
from cascade import (
    METHODS,
    OneLineParser,
    Stage,
    cascade,
    challenge_rewards,
    complain,
    draft_stage,
    eval_sampling,
    evaluate,
    exchange_rates,
    exchange_records,
    format_exchange,
    format_table,
    habit_advantages,
    load_split,
    rate,
    reward_terms,
    run_main,
    telling_exchanges,
)
from model import (
    Memory,
    Pair,
    check_device,
    default_device,
    default_four_bit,
    estimate,
    first_line,
    free_memory,
    is_embedded,
    load_pair,
    peak_memory,
    token_logprobs,
)
from reward import EVENTS, Problem, draft_reward
from rollout import CacheTooSmall, Rollouts, cache_budget, divide_cache, draft_prompt, rehearse


def knob(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every setting of a run; each is also a flag. Defaults are those of the embedded tiny pair; PRESETS fit cards."""

    method: str = knob("agon", "; ".join(f"{name}: {method.about}" for name, method in METHODS.items()))
    preset: str = knob("", "8gb | 12gb | 24gb: a real model, sized for such a card; flags beside it win")
    base: str = knob("tiny", "base model: 'tiny' (embedded), a local folder or a hub id")
    model_b: str = knob("", "a second base for policy B, taking turns on the card (default: both on one base)")
    device: str = knob("", "cuda | mps | cpu (default: the first that is there; the tiny base skips mps)")
    task: str = knob("congruence", "congruence | deepmath | codecontests | gsm8k | a .jsonl, .json or .parquet file")
    data: str = knob("", "local copy (file or folder) of a task that is otherwise read from the hub")
    question_column: str = knob("", "column of the question in a file of your own (default: the usual names)")
    answer_column: str = knob("", "column of the gold answer in a file of your own (default: the usual names)")
    tests_column: str = knob("", "column of the unit tests in a file of your own (default: tests)")
    train_problems: int = knob(0, "training problems at most; 0: the task's own number")
    eval_problems: int = knob(0, "validation and test problems at most, each; 0: the task's own number")
    allow_unsandboxed_code: bool = knob(False, "run the model's programs without bubblewrap: they can do what you can")
    seed: int = knob(0, "seed of adapters, problem order and sampling")
    steps: int = knob(240, "optimizer steps")
    problems_per_step: int = knob(16, "problems in one step; each costs 2N rollouts")
    group_size: int = knob(8, "N: drafts per problem, and challenges per problem")
    max_tokens: int = knob(36, "completion cap in tokens")
    temperature: float = knob(1.0, "sampling temperature in training, mirrored in the loss")
    top_p: float = knob(1.0, "nucleus sampling in training; below 1 it is NOT mirrored in the loss")
    eval_temperature: float = knob(0.6, "sampling temperature in evaluation")
    eval_top_p: float = knob(1.0, "nucleus sampling in evaluation")
    format_weight: float = knob(0.5, "lambda: weight of the format score phi in both rewards")
    length_tiebreak: float = knob(0.0, "lambda': extra for a right challenge shorter than the right draft that it read")
    scale_std: bool = knob(True, "divide advantages by the group's standard deviation")
    lr: float = knob(1e-3, "peak learning rate of both adapters (about 10x what full fine-tuning takes)")
    warmup: float = knob(0.05, "fraction of the steps in which the learning rate climbs")
    decay_from: float = knob(0.5, "fraction of the steps after which it falls linearly")
    lr_end: float = knob(0.1, "fraction of the peak that it falls to")
    clip: float = knob(0.2, "epsilon of the clipped ratio (acts only with inner-epochs > 1)")
    inner_epochs: int = knob(1, "updates per batch of rollouts")
    grad_clip: float = knob(1.0, "largest gradient norm of one adapter")
    micro_tokens: int = knob(16384, "padded tokens per forward in the update, 0: what fits; no effect on the gradient")
    rollout_rows: int = knob(256, "rows that decode at once, 0: what fits; but for rounding no effect on the samples")
    memory: float = knob(0.0, "GiB of the device that the run may fill (0: what it has free)")
    prompt_tokens: int = knob(
        768, "longest prompt planned for, a challenge's summary included; a longer one costs rows"
    )
    estimate: bool = knob(False, "print what the run would take of the memory, and stop")
    lora_rank: int = knob(16, "rank of both adapters")
    lora_alpha: int = knob(32, "LoRA alpha of both adapters")
    b_init_std: float = knob(0.01, "std of B's initial lora_B; A's is 0")
    four_bit: bool | None = knob(None, "the base in 4-bit NF4 (default: on CUDA, but for the tiny base); also --4bit")
    gradient_checkpointing: bool | None = knob(None, "less memory for more time (default: on, but for the tiny base)")
    threads: int = knob(1, "CPU threads; at this size a second one costs more than it brings")
    out: str = knob("", "run folder (default: runs/<time>-<method>)")

    def check(self) -> None:
        """Raise ValueError with one line (what, why, the mend) before anything is loaded."""
        counts = ("steps", "problems_per_step", "max_tokens", "prompt_tokens", "inner_epochs")
        trained = len(METHODS[self.method].policies) if self.method in METHODS else 0
        rules = [
            (
                ("method",),
                lambda v: v not in ("two-pass", "drafter-alone"),
                "a row of each run's table; train grpo, agon",
            ),
            (("method",), lambda v: v in METHODS, f"choose one of {', '.join(METHODS)}"),
            (("group_size",), lambda v: v >= 2, "a group needs at least 2 rows to compare"),
            (("model_b",), lambda v: not v or trained != 1, f"--method {self.method} trains one policy; leave it out"),
            (("preset",), lambda v: not v or v in PRESETS, f"choose one of {', '.join(PRESETS)}"),
            (("device",), lambda v: re.fullmatch(r"(cuda(:\d+)?|mps|cpu)?", v), "choose cuda, cuda:N, mps or cpu"),
            (counts, lambda v: v >= 1, "must be at least 1"),
            (("micro_tokens", "rollout_rows"), lambda v: v >= 0, "must be 0 (what fits) or more"),
            (("memory",), lambda v: 0 <= v < math.inf, "must be 0 (what is free) or more, in GiB"),
            (("lora_rank", "lora_alpha", "threads"), lambda v: 1 <= v <= 1024, "must lie in 1..1024"),
            (("lr", "grad_clip", "clip"), lambda v: 0 < v < math.inf, "must be above 0"),
            (("temperature",), lambda v: 1e-3 <= v < math.inf, "must be at least 0.001"),
            (("eval_temperature",), lambda v: v == 0 or 1e-3 <= v < math.inf, "must be 0 (greedy) or at least 0.001"),
            (("train_problems", "eval_problems"), lambda v: v >= 0, "must be 0 (the task's own number) or more"),
            (("format_weight", "length_tiebreak", "b_init_std"), lambda v: 0 <= v < math.inf, "must be 0 or more"),
            (("seed",), lambda v: 0 <= v < 2**32, "must be 0 or more, below 2**32"),
            (("decay_from", "lr_end"), lambda v: 0 <= v <= 1, "must lie in 0..1"),
            (("warmup",), lambda v: 0 <= v <= self.decay_from, "must lie in 0..1 and end before --decay-from"),
            (("top_p", "eval_top_p"), lambda v: 0 < v <= 1, "must lie above 0, up to 1"),
        ]
        for names, holds, mend in rules:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: {mend}")


# The paper's recipe for real models, and what a card of each size holds: `--estimate` shows the sums. Its top-p of 0.95
# is kept for the evaluation alone: in training the loss could not mirror it.
REAL = {
    "device": "cuda", "task": "deepmath", "steps": 200, "problems_per_step": 4, "group_size": 8,
    "temperature": 0.6, "eval_temperature": 0.6, "eval_top_p": 0.95, "b_init_std": 1e-3,
    "lr": 5e-5, "warmup": 0.1, "decay_from": 0.1, "lr_end": 0.0, "micro_tokens": 0, "rollout_rows": 0,
}  # fmt: skip
PRESETS = {
    "8gb": {**REAL, "base": "Qwen/Qwen3-0.6B", "max_tokens": 2048, "memory": 8.0},
    "12gb": {**REAL, "base": "Qwen/Qwen3-1.7B", "max_tokens": 4096, "memory": 12.0},
    "24gb": {**REAL, "base": "Qwen/Qwen3-4B", "max_tokens": 8192, "memory": 24.0},
}


# ---------------------------------------------------------------------------------------------------------------
# The algorithm


def group_advantages(rewards: Sequence[float], groups: Sequence[int], scale_std: bool = True):
    """A_i = (R_i - mean) / (std + 1e-4) within each group -> advantages (B,) float64, kept (B,) bool.

    Rows are grouped by id, in any order. A group with max - min < 1e-6 carries no signal: kept = False, A = 0. (A
    tolerance, since rewards that differ by rounding alone are no signal, and dividing by their std would make it one.)
    Raises ValueError for a count mismatch, a non-finite reward, or a group of one.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards for {len(groups)} rows")
    r, g = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)  # (B,), (B,)
    if not torch.isfinite(r).all():
        raise ValueError(f"reward of row {int((~torch.isfinite(r)).nonzero()[0])} is not finite")
    advantages, kept = torch.zeros_like(r), torch.zeros(len(r), dtype=torch.bool)  # (B,), (B,)
    for group in g.unique():
        rows = (g == group).nonzero()[:, 0]  # (N,)
        if len(rows) < 2:
            raise ValueError(f"group {int(group)} has one row; nothing to compare it with")
        x = r[rows]  # (N,)
        if x.max() - x.min() >= 1e-6:
            centred = x - x.mean()  # (N,)
            advantages[rows] = centred / (x.std() + 1e-4) if scale_std else centred
            kept[rows] = True
    return advantages, kept


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    total_tokens: int,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> torch.Tensor:
    """The clipped token-level surrogate, averaged over `total_tokens`. Scalar.

    logp, old_logp, mask (B, C); advantages (B,), one per row for all its tokens. `total_tokens` counts the kept
    tokens of the WHOLE stream, not of this micro-batch: then micro-batch losses add up to the same loss and gradient
    however the stream is split. The min(), per token, takes the pessimistic side, also for negative advantages.
    """
    ratio = (logp - old_logp).exp()  # (B, C)
    clipped = ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))  # (B, C)
    a = advantages[:, None]  # (B, 1)
    surrogate = torch.minimum(ratio * a, clipped * a)  # (B, C)
    return -(surrogate * mask).sum() / total_tokens


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Row indices, sorted by length, cut so that rows x longest stays within `budget` (one row may exceed it alone).

    A batch of some size is also closed before its pads would be more than an eighth of it: they cost as much as tokens.
    """
    batch: list[int] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        padded, tokens = (len(batch) + 1) * lengths[row], tokens + lengths[row]
        if batch and (padded > budget or (padded > 1024 and tokens < 7 / 8 * padded)):
            yield batch
            batch, tokens = [], lengths[row]
        batch.append(row)
    if batch:
        yield batch


def update_policy(
    pair: Pair, adapter: str, optimizer: torch.optim.Optimizer, rollouts: Rollouts, advantages, kept, config: Config
) -> dict:
    """One GRPO update of one adapter on its own stream. advantages, kept (B,). Returns metrics.

    Raises FloatingPointError where the gradient is not finite, before it moves anything.
    """
    rows = kept.nonzero()[:, 0].tolist()  # dropped rows cost no compute and do not dilute the mean
    if not rows:
        return {"grad_norm": 0.0, "tokens": 0, "logp_gap": 0.0}
    model, own = pair.activate(adapter, train=True), pair.of(adapter).parameters[adapter].values()
    prompts, completions = [rollouts.prompts[r] for r in rows], [rollouts.completions[r] for r in rows]
    advantages = advantages[rows].float().to(model.device)  # (B,) from here on B counts kept rows alone
    total_tokens = sum(map(len, completions))  # computed once, before the split; includes each end-of-turn token
    row_lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]

    def score(batch: list[int]) -> torch.Tensor:  # (b, C)
        return token_logprobs(model, [prompts[i] for i in batch], [completions[i] for i in batch], config.temperature)

    @torch.no_grad()
    def score_all() -> dict[int, torch.Tensor]:  # each row's log-probs, (C of the row,)
        scored = {}
        for batch in micro_batches(row_lengths, config.micro_tokens):
            scored.update({i: logp[: len(completions[i])] for i, logp in zip(batch, score(batch), strict=True)})
        return scored

    def accumulate() -> float:  # the gradient of the whole stream; returns the widest gap to the sampler's log-probs
        optimizer.zero_grad(set_to_none=True)  # what an attempt that ran out of memory left behind
        gap = 0.0
        for batch in micro_batches(row_lengths, config.micro_tokens):
            logp = score(batch)  # (b, C)
            lengths = torch.tensor([len(completions[i]) for i in batch])  # (b,)
            mask = (torch.arange(logp.shape[1]) < lengths[:, None]).to(logp.device)  # (b, C) from lengths alone
            old_logp = pad_sequence([old[i] for i in batch], batch_first=True) if old else logp.detach()  # (b, C)
            grpo_loss(logp, old_logp, advantages[batch], mask, total_tokens, config.clip).backward()
            sampled = torch.tensor([lp for i in batch for lp in rollouts.logprobs[rows[i]]])  # (sum of C,)
            gap = max(gap, (logp.detach()[mask].cpu() - sampled).abs().max().item())
        return gap

    # With one update the policy that sampled is the policy that learns: old = logp.detach(), the ratio is exactly 1.
    # With more, old log-probs come from this same forward, not from the sampler, whose kernels round differently.
    old = until_it_fits(score_all, config, "micro_tokens", min(row_lengths)) if config.inner_epochs > 1 else {}
    gaps = []  # between sampler and trainer on the same tokens, before the first update: a bug shows here first
    for _ in range(config.inner_epochs):
        gaps.append(until_it_fits(accumulate, config, "micro_tokens", min(row_lengths)))
        norm = torch.nn.utils.clip_grad_norm_(own, config.grad_clip).item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient of adapter {adapter} is not finite; lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "tokens": total_tokens, "logp_gap": gaps[0]}


def agon_step(
    pair: Pair, optimizers: dict[str, torch.optim.Optimizer], problems: Sequence[Problem], step: int, config: Config
) -> tuple[dict, Stage, Stage | None]:
    """One step of the method on a batch of problems -> (metrics, drafts, challenges; None under grpo).

    Raises FloatingPointError where logits or a gradient are not finite, and what `until_it_fits` cannot mend.
    """
    started, events, lam = time.perf_counter(), EVENTS.copy(), config.format_weight
    # 1. Roles: A drafts at even steps, B at odd ones. With one policy it is both; under grpo nobody challenges it.
    method = METHODS[config.method]
    drafter, challenger = method.policies[0], method.policies[-1] if method.reads else None
    if method.alternate and method.reads and step % 2:
        drafter, challenger = challenger, drafter

    def roll_out() -> tuple[Stage, Stage | None]:
        sampling = dict(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed * 1_000_000 + step,
            max_rows=config.rollout_rows,  # read here: until_it_fits may have halved it
            max_cache_tokens=cache_budget(config.rollout_rows, config.prompt_tokens, config.max_tokens),
        )
        if challenger is None:  # the same 2N rollouts per problem, without an exchange
            return draft_stage(pair, drafter, problems, 2 * config.group_size, **sampling), None
        # 2. N drafts of every problem.  3. ONE challenge for every draft, reading its summary.
        return cascade(pair, problems, drafter, challenger, config.group_size, method.shared, **sampling)

    drafts, challenges = until_it_fits(roll_out, config, "rollout_rows", 1)
    sampled = time.perf_counter()

    rewards = [draft_reward(c_a, phi, lam) for c_a, phi in zip(drafts.correct, drafts.phi, strict=True)]
    streams = [("draft", drafts, rewards)]
    if challenges:
        streams.append(("challenge", challenges, challenge_rewards(drafts, challenges, **reward_terms(vars(config)))))

    metrics: dict = {"step": step, "drafter": drafter, "challenger": challenger}
    learned: dict[str, list] = {}  # by adapter, what it learns from in this step: one stream, or both where it is alone
    for name, stage, rewards in streams:
        # 4. Advantages, within the rows of one problem, in each stream by itself.
        advantages, kept = group_advantages(rewards, stage.group, config.scale_std)
        learned.setdefault(stage.adapter, []).append((name, stage.rollouts, advantages, kept))
        outcomes = [r - lam * phi for r, phi in zip(rewards, stage.phi, strict=True)]
        by_outcome = group_advantages(outcomes, stage.group)[1]  # (B,) signal without the format
        completions = stage.rollouts.completions
        metrics[name] = {
            "accuracy": rate(stage.correct),
            "reward": sum(rewards) / len(rewards),
            "format": sum(stage.phi) / len(stage.phi),
            "dead_groups": 1 - kept.float().mean().item(),  # rows without a signal, so groups: all are of one size
            "format_only_groups": (kept & ~by_outcome).float().mean().item(),  # a signal from the format alone
            "mean_tokens": sum(map(len, completions)) / len(completions),
            "truncated": 1 - sum(stage.rollouts.finished) / len(completions),
        }
    metrics["habits"] = habit_advantages(problems, drafts, challenges, advantages.tolist()) if challenges else None
    # 5. One GRPO update of each policy, on the rows that it sampled.
    for adapter, parts in learned.items():
        names, rollouts, advantages, kept = zip(*parts, strict=True)
        rows = Rollouts(*([row for part in rollouts for row in getattr(part, f.name)] for f in fields(Rollouts)))
        update = update_policy(pair, adapter, optimizers[adapter], rows, torch.cat(advantages), torch.cat(kept), config)
        for name in names:
            metrics[name].update(update)
    metrics["rates"] = exchange_rates(drafts, challenges, problems[0].kind) if challenges else None
    metrics["rollouts"] = sum(len(stage.texts) for _, stage, _ in streams)
    metrics["grader_events"] = dict(EVENTS - events)  # timeouts, memory, errors: counted as wrong
    sampled_tokens = sum(len(c) for _, stage, _ in streams for c in stage.rollouts.completions)
    metrics["seconds_sampling"], metrics["seconds_update"] = sampled - started, time.perf_counter() - sampled
    metrics["tokens_per_second"] = sampled_tokens / metrics["seconds_sampling"]
    return metrics, drafts, challenges


# ---------------------------------------------------------------------------------------------------------------
# The loop


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, flat, then a linear fall to lr_end of the peak."""
    done = (step + 1) / config.steps
    if done < config.warmup:
        return config.lr * done / config.warmup
    fall = max(0.0, done - config.decay_from) / max(1e-9, 1 - config.decay_from)  # decay_from = 1: never falls
    return config.lr * (1 - (1 - config.lr_end) * fall)


def problem_stream(problems: Sequence[Problem], seed: int) -> Iterator[Problem]:
    """Endless passes over the training problems, each in a fresh seeded order: file order would bias a short run."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(problems, len(problems))


def train(
    config: Config,
    folder: Path,
    pair: Pair,
    problems: Sequence[Problem],
    before: int = 0,
    planned: Memory | None = None,
) -> list[dict]:
    """Train the pair (or, under grpo, policy A) into `folder`; returns one metrics dict per step.

    before: bytes in use that are not ours, taken off the measured peak. planned: the estimate to show beside it.
    Whatever agon_step raises, Ctrl-C and a full disk too, passes through, after the adapters were saved as they stand.
    """
    # One optimizer per adapter: a shared AdamW would move the resting policy by its momentum.
    optimizers = {
        name: torch.optim.AdamW(pair.of(name).parameters[name].values(), lr=config.lr, weight_decay=0.0)
        for name in METHODS[config.method].policies
    }
    stream = problem_stream(problems, config.seed)
    history: list[dict] = []
    bar = tqdm(total=config.steps, unit="step", mininterval=0.2 if sys.stderr.isatty() else 15, dynamic_ncols=True)
    with (
        bar,
        open(folder / "metrics.jsonl", "w", encoding="utf-8") as metrics_file,
        open(folder / "samples.jsonl", "w", encoding="utf-8") as samples_file,
    ):
        started = time.perf_counter()
        try:
            for step in range(config.steps if optimizers else 0):  # zero-shot and moa train nothing
                lr = learning_rate(step, config)
                for group in [g for optimizer in optimizers.values() for g in optimizer.param_groups]:
                    group["lr"] = lr
                batch = [next(stream) for _ in range(config.problems_per_step)]
                metrics, drafts, challenges = agon_step(pair, optimizers, batch, step, config)
                peak = peak_memory(pair.device)  # bytes; None: not known
                history.append({**metrics, "lr": lr, "peak_memory": peak and peak - before})
                print(json.dumps(history[-1]), file=metrics_file, flush=True)
                if challenges:
                    records = exchange_records(batch, drafts, challenges, **reward_terms(vars(config)))
                    print(json.dumps({"step": step, **records[0]}), file=samples_file, flush=True)
                bar.set_postfix_str(progress_line(history[-10:]), refresh=False)
                bar.update()
                if step == 2:
                    minutes = (time.perf_counter() - started) / 3 * config.steps / 60
                    said = f"the first steps say: about {minutes:.1f} minutes of training, then the evaluation"
                    bar.write(said, file=sys.stderr)
                    if peak:
                        plan_says = f", {planned.total / GIB:.2f} planned" if planned else ""
                        bar.write(f"peak memory so far: {(peak - before) / GIB:.2f} GiB{plan_says}", file=sys.stderr)
        finally:  # whatever ends it: nothing learned so far is lost
            pair.save(folder)
    return history


def progress_line(recent: list[dict]) -> str:
    """Means over the last steps. Accuracies, not the loss: under GRPO the loss says nothing."""

    def mean(part: str, key: str) -> float:
        values = [m[part][key] for m in recent if m.get(part) and m[part][key] is not None]
        return sum(values) / len(values) if values else math.nan

    line = f"draft {mean('draft', 'accuracy'):.0%}"
    if recent[-1]["challenger"]:
        line += f", challenge {mean('challenge', 'accuracy'):.0%}"
        line += f", convert {mean('rates', 'fix'):.0%}, copy {mean('rates', 'copy'):.0%}"
    speed = sum(m["tokens_per_second"] for m in recent) / len(recent)
    return line + f", dead {mean('draft', 'dead_groups'):.0%}, {speed / 1000:.1f}k tok/s"


# ---------------------------------------------------------------------------------------------------------------
# Memory

GIB = 2**30
HEADROOM = 0.85  # the part of a device's memory that is planned with; the driver and the allocator's gaps get the rest


def new_pair(config: Config, meta: bool = False) -> Pair:
    """The pair of a run, with fresh adapters; meta and exceptions as for load_pair."""
    return load_pair(
        config.base,
        model_b=config.model_b,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        b_init_std=config.b_init_std,
        four_bit=config.four_bit,
        checkpointing=config.gradient_checkpointing,
        device=config.device,
        meta=meta,
        seed=config.seed,
    )


def plan(config: Config) -> Memory:
    """The estimate for this run, from the config file of its base; fills in --rollout-rows and --micro-tokens where 0.

    Each becomes the most that fits. Raises ValueError with one line where not even one row fits, or not the rows that
    are given, and where the base cannot be estimated or free memory is not known.
    """
    room = config.memory * GIB
    # With --estimate, --memory may speak of a device that is not there; else what is free is a limit too.
    if not room or not config.estimate or (config.device.startswith("cuda") and torch.cuda.is_available()):
        room = min(room or math.inf, free_memory(config.device))
    room *= HEADROOM
    pair = new_pair(config, meta=True)
    width = config.prompt_tokens + config.max_tokens

    def sampler(*sizes) -> list[torch.Tensor]:  # (model, rows, prompt, completion)
        return rehearse(*sizes, config.temperature, config.top_p)

    def memory(rows: int, micro_rows: int) -> Memory:
        try:
            return estimate(pair, rows, micro_rows, config.prompt_tokens, config.max_tokens, sampler)
        except RuntimeError as error:  # an operation that the meta device lacks
            raise ValueError(f"the memory of {config.base} cannot be estimated: {first_line(error)}") from error

    def most(total: Callable[[int], int], limit: int) -> int:  # rows; their memory is a straight line, but for rounding
        one = total(1)
        if one >= room or limit == 1:
            return 1
        rows = min(limit, 1 + int((room - one) / ((total(4) - one) / 3 + 1)))
        while rows > 1 and total(rows) > room:
            rows -= 1 + rows // 16
        return rows

    stage = (
        config.problems_per_step * config.group_size * (1 if METHODS[config.method].reads else 2)
    )  # rows of a stream
    rows = config.rollout_rows or most(lambda n: memory(n, 1).total, min(stage, 1024))
    micro_rows = max(1, config.micro_tokens // width)
    if not config.micro_tokens:
        micro_rows = most(lambda n: memory(1, n).total, min(stage, 16))
    result = memory(rows, min(micro_rows, stage))  # the evaluation decodes more rows than a stage has
    if result.total > room:
        raise ValueError(
            f"this run needs {result.total / GIB:.2g} GiB on {config.device}, and {room / GIB:.2g} can be planned "
            f"with: take a smaller --base or --max-tokens{', or --rollout-rows 0 --micro-tokens 0' if rows > 1 else ''}"
        )
    config.rollout_rows, config.micro_tokens = rows, config.micro_tokens or micro_rows * width
    return result


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for it on a GPU; CUDA's libraries and a CPU say it in words, numpy with MemoryError."""
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


def until_it_fits(work: Callable, config: Config, budget: str, least: int):
    """work(); whenever the device runs out of memory, halve config.<budget> and start `work` over, down to `least`.

    Starting over gives the same result, but for rounding: rows draw noise keyed by seed, step and prompt, and nothing
    else is random. What `work` raises otherwise, or at `least`, passes through.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or getattr(config, budget) <= least:
                raise
        # Not inside the except block, where the traceback would keep the failed attempt's tensors alive.
        setattr(config, budget, getattr(config, budget) // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        again = f"that part of the step is done again, and the rest of the run, with --{budget.replace('_', '-')}"
        print(f"\nout of memory: {again} {getattr(config, budget)}", file=sys.stderr)


def give_back_freed_memory() -> None:
    """glibc keeps freed blocks for later, in pieces that fit nothing: the process would grow to several times the plan.
    With each block of 64 KiB or more mapped by itself, what is freed goes back to the system. It costs some time."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


def format_plan(memory: Memory, config: Config) -> str:
    prompt, cap = config.prompt_tokens, config.max_tokens
    parts = [
        ("weights", memory.weights, "the base" + ", 4-bit NF4" * bool(config.four_bit)),
        ("adapters", memory.adapters, f"A and B, rank {config.lora_rank}, fp32"),
        ("optimizer", memory.optimizer, "AdamW's moments of both, the gradients of one"),
        ("KV cache", memory.kv_cache, f"{config.rollout_rows} rows at once (--rollout-rows)"),
        ("decoding", memory.decoding, "the rest of sampling"),
        ("activations", memory.activations, f"{config.micro_tokens} tokens at once (--micro-tokens)"),
        ("logits chunk", memory.logits, "one chunk and its gradient"),
        ("total", memory.total, f"sampling {memory.sampling / GIB:.2f} or update {memory.update / GIB:.2f}, in turn"),
    ]
    whose = f"the larger turn of {config.base} and {config.model_b}" if config.model_b else config.base
    head = f"memory of {whose} on {config.device} in GiB, prompts up to {prompt} tokens, completions up to {cap}"
    return "\n".join([head, *(f"  {name:13} {size / GIB:7.2f}   {note}" for name, size, note in parts)])


# ---------------------------------------------------------------------------------------------------------------
# What a run leaves behind


def draw_curves(history: list[dict], path: Path, title: str) -> None:
    """curves.png: accuracy of both streams, and fix, keep and copy rate of each policy as a challenger."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    def draw(axis, points: list[tuple[int, float | None]], label: str, colour: str) -> None:
        points = [(x, y) for x, y in points if y is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            windows = [ys[max(0, i - 4) : i + 5] for i in range(len(ys))]
            smooth = [sum(window) / len(window) for window in windows]
            axis.plot(xs, ys, color=colour, alpha=0.2, linewidth=0.8)
            axis.plot(xs, smooth, color=colour, label=label)

    policies = sorted({m["challenger"] for m in history if m["challenger"]})
    figure, (axes,) = plt.subplots(1, 1 + len(policies), figsize=(4.6 * (1 + len(policies)), 3.4), squeeze=False)
    for stream, colour in (("draft", "tab:blue"), ("challenge", "tab:red")):
        draw(axes[0], [(m["step"], m[stream]["accuracy"]) for m in history if stream in m], stream, colour)
    axes[0].set_title(f"{title}: accuracy on training problems")
    for axis, policy in zip(axes[1:], policies, strict=True):
        rows = [m for m in history if m["challenger"] == policy]
        for key, colour in (("fix", "tab:green"), ("keep", "tab:purple"), ("copy", "tab:orange")):
            draw(axis, [(m["step"], m["rates"][key]) for m in rows], key, colour)
        axis.set_title(f"{policy} as challenger")
    for axis in axes:
        axis.set(xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(loc="best", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(config: Config, folder: Path, result: dict, exchanges: list[dict]) -> None:
    """report.md: the settings, the table, the curves and a few exchanges, to be read by itself."""
    changed = []
    for f in fields(Config):
        flag, value = f.name.replace("_", "-"), getattr(config, f.name)
        if value != f.default and f.name != "device" and (f.default is not None or value):
            changed.append(
                f"`--{'no-' * (value is False)}{flag}`" if isinstance(value, bool) else f"`--{flag} {value}`"
            )
    policies = METHODS[config.method].policies
    shown = "\n\n".join(f"```\n{format_exchange(record)}\n```" for record in exchanges)
    (folder / "report.md").write_text(
        f"# {config.method} on {config.base}, seed {config.seed}\n\n"
        f"Settings that differ from the defaults: {', '.join(changed) or 'none'}; all of them are in config.json.\n\n"
        f"{format_table(result)}\n\n{'![curves](curves.png)' * bool(policies)}\n\n"
        f"## Exchanges on test problems\n\n{shown}\n",
        encoding="utf-8",
    )


# ---------------------------------------------------------------------------------------------------------------
# Command line


def parse_config(argv: list[str] | None) -> Config:
    """One flag per field of Config, its help and default taken from there. A preset changes the defaults."""
    parser = OneLineParser(prog="agon.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Config):
        flag, text = f"--{f.name.replace('_', '-')}", f"{f.metadata['help']} [{f.default}]"
        if isinstance(f.default, bool) or f.default is None:
            flags = [flag, "--4bit"] if f.name == "four_bit" else [flag]
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            parser.add_argument(flag, type=type(f.default), default=f.default, help=text, metavar=f.name.upper())
    parser.set_defaults(**PRESETS.get(parser.parse_args(argv).preset, {}))
    return Config(**vars(parser.parse_args(argv)))


def check_prompts(pair: Pair, config: Config, problems: Sequence[Problem]) -> None:
    """Raise ValueError for a question too long for the sampler's cache: now, rather than when its turn comes."""
    budget = eval_sampling(vars(config))["max_cache_tokens"]
    for half in filter(None, (pair, pair.rival)):
        prompts = [draft_prompt(half.tokenizer, problem.question) for problem in problems]
        i = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        try:
            divide_cache([prompts[i]], [config.max_tokens], 1, 1, budget)
        except CacheTooSmall as error:
            raise ValueError(f"the question {problems[i].question[:60]!r}: {error}") from error


def make_run_folder(config: Config) -> Path:
    """Create the run folder. Raises ValueError for one that holds anything: nothing the user has may be lost."""
    folder = Path(config.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.method}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {folder} exists and is not an empty folder; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_config(config: Config, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 2 after one line about what is wrong, 130 after Ctrl-C."""
    try:
        config = parse_config(argv)
        config.check()
        torch.set_num_threads(config.threads)
        own_file = Path(config.task).suffix.lower() in reward.ENDINGS
        real = [base for base in (config.base, config.model_b) if base and not is_embedded(base)]
        for name in ("data", "base", "model_b") + ("task",) * own_file:
            value = getattr(config, name)
            if value not in ("", "tiny") and Path(value).exists():  # a path: the run folder must work from anywhere
                setattr(config, name, str(Path(value).resolve()))
        config.device = config.device or default_device(real[0] if real else config.base)
        if config.four_bit is None:
            config.four_bit = any(default_four_bit(base, config.device) for base in real)
        if config.gradient_checkpointing is None:
            config.gradient_checkpointing = bool(real)
        planned = None
        if real or config.estimate or config.memory or not (config.micro_tokens and config.rollout_rows):
            if not config.estimate:
                check_device(config.device)
            planned = plan(config)
            print(format_plan(planned, config), flush=True)
        if config.estimate:
            return 0
        if real and config.device == "cpu" and sys.platform == "linux":
            give_back_freed_memory()
        reward.ALLOW_UNSANDBOXED = config.allow_unsandboxed_code
        train_set, validation, test = (load_split(vars(config), split) for split in ("train", "validation", "test"))
        before = peak_memory("cpu") if config.device == "cpu" else 0
        pair = new_pair(config)
        check_prompts(pair, config, [*train_set, *validation, *test])
        folder = make_run_folder(config)
        write_config(config, folder)
    except (ValueError, OSError) as error:
        return complain("agon.py", error)

    policies = METHODS[config.method].policies
    size = sum(p.numel() for name, p in pair.model.named_parameters() if "lora_" not in name)  # 4-bit: two in a byte
    bases = f"one frozen base ({config.base}, {'4-bit NF4' if config.four_bit else f'{size:,} parameters'}"
    if config.model_b:
        bases = f"two frozen bases ({config.base} and {config.model_b}{', 4-bit NF4' * config.four_bit}"
    print(
        f"Agon, method {config.method}: {'LoRA policies ' + ' and '.join(policies) + ' on ' if policies else ''}"
        f"{bases}, {config.device})\n"
        f"{config.steps if policies else 0} steps, each {config.problems_per_step} problems x "
        f"{2 * config.group_size} rollouts, on {len(train_set)} training problems like {train_set[0].question!r}; "
        f"then the table on {len(test)} test problems.\n"
        f"Run folder: {folder}",
        flush=True,
    )
    try:
        history = train(config, folder, pair, train_set, before, planned)
        if history:
            draw_curves(history, folder / "curves.png", config.method)
        print(f"evaluating on {len(test)} test problems ...", flush=True)
        result = until_it_fits(
            lambda: evaluate(pair, test, validation, policies, **eval_sampling(vars(config))), config, "rollout_rows", 1
        )
        write_config(config, folder)  # with the budgets that the device really has room for
        picked = result["direction"].split(">") if policies else (None, None)
        drafts, challenges = cascade(pair, test[:100], *picked, **eval_sampling(vars(config)))  # as in the table, again
    except KeyboardInterrupt:
        print(f"\ninterrupted; the adapters are saved. Evaluate them: python cascade.py eval --run {folder}")
        return 130
    except (FloatingPointError, CacheTooSmall) as error:  # the run diverged; a prompt far beyond --prompt-tokens
        return complain("agon.py", error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        mend = "take a smaller --max-tokens or --base. The adapters are saved"
        return complain("agon.py", ValueError(f"{config.device} is out of memory, with nothing left to halve: {mend}"))

    (folder / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    records = exchange_records(test, drafts, challenges, **reward_terms(vars(config)))
    exchanges = telling_exchanges(records)
    write_report(config, folder, result, exchanges)
    print("\n" + format_table(result) + "\n")
    for record in exchanges:
        print(format_exchange(record, sys.stdout.isatty()) + "\n")
    if planned and history and history[-1]["peak_memory"] is not None:
        peak = max(m["peak_memory"] for m in history)
        print(f"memory: {planned.total / GIB:.2f} GiB were planned, {peak / GIB:.2f} GiB were the measured peak")
    print(f"curves, report, metrics and adapters: {folder}")
    question = "14x = 9 (mod 19)" if config.task == "congruence" else "..."
    print(f'try: python cascade.py ask "{question}" --run {folder}')
    return 0


if __name__ == "__main__":
    run_main(main)
