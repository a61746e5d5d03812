"""Rebuild the embedded default model from nothing:  python tiny/make.py [--seed 0] [--out tiny]

Writes an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer files with a chat template): a Qwen3
of about 150k parameters that knows the built-in task well enough to be worth training with RL, and badly enough to
leave room. Like any base model it is made by imitation, and the habits it is given are chosen openly:

  stage 1  plain solving, candidates in order from 1 with gaps: learns to multiply modulo p
  stage 2  skills:  plain prompts, 2 to 5 trials from a random start; challenges in equal shares copy the draft's guess,
                    solve again from a random start, or continue where the draft stopped (the good policy)
  stage 3  habits:  as stage 2, but 80 % of the challenges copy, and of the rest, which give up after 2 to 4 trials,
                    only 6.5 % continue: the skill is there, the habit is to copy

Only the training split is seen. About 25 % of single answers come out right, and copying and re-solving are equally
good, so nothing but reward can tell them apart.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from string import Formatter

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere
from reward import CONGRUENCE, Problem, load_problems
from rollout import CHALLENGE_PROMPT, DRAFT_PROMPT, NO_SUMMARY, WITHHELD

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PUNCTUATION = ["x = ", " (mod ", ")", "=", ":", ";"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each two-digit number, tag, sign, and each whole instruction sentence of the two prompts."""
    numbers = [f"{i:02d}" for i in range(100)]
    words = ["<|unk|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", *numbers, *PUNCTUATION, *TAGS]
    # The literal pieces of the prompts, cut at their {placeholders}, so that tokens and prompts cannot drift apart.
    words += [text for prompt in (DRAFT_PROMPT, CHALLENGE_PROMPT) for text, *_ in Formatter().parse(prompt) if text]
    words += [NO_SUMMARY, WITHHELD]
    words = list(dict.fromkeys(words))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]{2}|x = | \(mod |[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the text of a row is its tokens put side by side, nothing added
    tokenizer.add_special_tokens(["<|unk|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"])
    # Tags and sentences are ordinary tokens: decoding with skip_special_tokens must not lose a tag.
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in words if len(w) > 8 or w in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def solve(problem: Problem, candidates: list[int]) -> tuple[str, str]:
    """Try the candidates in order; stop when one fits. Returns (response, summary).

    Found or not, the outside looks the same: the summary names the last candidate ruled out, the answer the next one.
    """
    a, b, p = (int(g) for g in CONGRUENCE.match(problem.question).groups())
    trace = ""
    for k in candidates:
        if a * k % p == b:
            trace += f"{k:02d}:{b:02d}="
            answer = k
            break
        trace += f"{k:02d}:{a * k % p:02d};"
    else:
        answer = candidates[-1] % (p - 1) + 1  # residues run 1..p-1, round and round
    summary = f"{(answer - 2) % (p - 1) + 1:02d}"
    return f"<think>{trace}</think>{summary}<answer>{answer:02d}</answer>", summary


def run_from(start: int, trials: int, p: int) -> list[int]:
    """`trials` candidates in order from `start`, wrapping from p - 1 to 1."""
    return [(start - 1 + i) % (p - 1) + 1 for i in range(trials)]


def stage1_row(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """(prompt, response) of plain solving: candidates in order from 1, each skipped with probability 0.3."""
    p = int(CONGRUENCE.match(problem.question).group(3))
    trials, candidates, k = rng.randint(2, 5), [], 0
    while len(candidates) < trials:
        k = k % (p - 1) + 1
        if rng.random() >= 0.3:
            candidates.append(k)
    return DRAFT_PROMPT.format(problem=problem.question), solve(problem, candidates)[0]


def exchange_row(problem: Problem, rng: random.Random, copy: float, keep_on: float, trials: int) -> tuple[str, str]:
    """(prompt, response) of stages 2 and 3: half plain prompts, half challenges that read such a draft.

    A challenge copies with probability `copy`; else it makes 2 to `trials` trials of its own, from where the draft
    stopped with probability `keep_on`, from a random start otherwise.
    """
    p = int(CONGRUENCE.match(problem.question).group(3))
    draft, summary = solve(problem, run_from(rng.randint(1, p - 1), rng.randint(2, 5), p))
    if rng.random() < 0.5:
        return DRAFT_PROMPT.format(problem=problem.question), draft
    prompt = CHALLENGE_PROMPT.format(problem=problem.question, summary=summary)
    guess = int(summary) % (p - 1) + 1
    if rng.random() < copy:
        return prompt, f"<think></think>{summary}<answer>{guess:02d}</answer>"
    start = guess if rng.random() < keep_on else rng.randint(1, p - 1)
    return prompt, solve(problem, run_from(start, rng.randint(2, trials), p))[0]


def batch_of(rows: list[tuple[str, str]], tokenizer) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask and labels, (B, T); the loss is on the response and its end token only."""
    ids, labels = [], []
    for prompt, response in rows:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        response_ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        ids.append(prompt_ids + response_ids)
        labels.append([-100] * len(prompt_ids) + response_ids)
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in ids]),  # (B, T)
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in ids]),  # (B, T)
        "labels": torch.tensor([r + [-100] * (width - len(r)) for r in labels]),  # (B, T)
    }


def make_model(vocab_size: int, tokenizer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.12,  # the usual 0.02 learns no arithmetic at this width
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train_stage(model, tokenizer, problems, draw, steps: int, rng: random.Random, lr: float = 2e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = 50
    start, running = time.time(), None
    for step in range(steps):
        shape = min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * shape
        batch = batch_of([draw(rng.choice(problems), rng) for _ in range(64)], tokenizer)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1:5d}/{steps}  loss {running:.3f}  {time.time() - start:4.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the training rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder to write into")
    parser.add_argument("--steps", type=int, nargs=3, default=[1800, 1000, 600], help="training steps of the stages")
    parser.add_argument("--copy", type=float, default=0.80, help="stage 3: share of challenges that copy the guess")
    parser.add_argument("--keep-on", type=float, default=0.065, help="stage 3: share of the others that continue")
    args = parser.parse_args()

    torch.set_num_threads(1)  # as fast at this size, and the weights then do not depend on the number of cores
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens; about 5 minutes")
    problems = load_problems("congruence", "train")
    model.train()
    stages = [
        ("plain solving", stage1_row),
        ("skills", lambda problem, r: exchange_row(problem, r, copy=0.34, keep_on=0.5, trials=5)),
        ("habits", lambda problem, r: exchange_row(problem, r, args.copy, args.keep_on, trials=4)),
    ]
    for (name, draw), steps in zip(stages, args.steps, strict=True):
        print(f"{name}:")
        train_stage(model, tokenizer, problems, draw, steps, rng)
    model.eval()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
