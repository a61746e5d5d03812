"""A check on a real GPU, of sizes that matter: peak memory beside its estimate, tokens per second, seconds of update.

Bases of the shapes of Qwen3-0.6B, Qwen3-4B, Qwen3.5-2B and Gemma-4-E4B, with random weights, in NF4 and in bf16. For
each an Agon step of N = 8 drafts, 8 challenges and both updates, with completions of 2,048 (and 4,096) tokens: the
last 128 of each are sampled behind the others, so that the cache has its full length; at the end, if the time lasts,
one step samples all of them. Before that, log-probs of 16 rows of 1,024 tokens against the naive form, and two bases
that take turns.

Run:  python tests/gpu_check.py [--minutes 6] [--out results.json]      (one line, and exit code 0, without a GPU)
      python tests/gpu_check.py --small      thin and short versions of all cases, on a CPU too: a rehearsal
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
from bench_logprobs import compare
from families import make_base
from transformers.utils import logging as transformers_logging

from agon import GIB, Config, update_policy
from model import ADAPTERS, estimate, load_pair, peak_memory
from rollout import Rollouts, rehearse, sample

N, FRESH = 8, 128  # group size; tokens sampled at the end of a completion
QWEN3 = dict(num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960)
SHAPES = {  # family and text config, as published
    "Qwen3-0.6B": ("qwen3", QWEN3 | dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    )),
    "Qwen3-4B": ("qwen3", QWEN3 | dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    )),
    "Qwen3.5-2B": ("qwen3_5", dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, vocab_size=248_320, full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=32_768,
    )),
    "Gemma-4-E4B": ("gemma4", dict(
        hidden_size=2560, intermediate_size=10_240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, global_head_dim=512, vocab_size=262_144, full_attention_interval=6, sliding_window=512,
        hidden_size_per_layer_input=256, num_kv_shared_layers=18, use_double_wide_mlp=False,
        final_logit_softcapping=30.0, max_position_embeddings=131_072,
    )),
}  # fmt: skip
THIN = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 2_000}
CASES = [  # in the order of their worth, should the time not last: base, 4-bit, tokens of a completion
    ("Qwen3-0.6B", True, 2048), ("Qwen3-0.6B", False, 2048), ("Qwen3-0.6B", True, 4096), ("Qwen3-4B", True, 2048),
    ("Qwen3.5-2B", True, 2048), ("Gemma-4-E4B", True, 2048), ("Qwen3-4B", True, 4096), ("Qwen3-4B", False, 2048),
    ("Qwen3.5-2B", False, 2048), ("Gemma-4-E4B", False, 2048),
]  # fmt: skip


def sampler(*sizes):
    return rehearse(*sizes, temperature=1.0, top_p=1.0)


class Card:
    """The device under test. On a CPU, for the rehearsal, the peak is the process's and only shows that all runs."""

    def __init__(self, small: bool):
        self.name = "cuda" if torch.cuda.is_available() else "cpu"
        self.shrink = 32 if small else 1  # what lengths are divided by
        self.prompt = 512 // self.shrink  # tokens

    def now(self) -> float:
        if self.name == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def clean(self) -> None:
        gc.collect()
        if self.name == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def one_step(card: Card, pair, written: int, fresh: int, config: Config) -> dict:
    """Two stages and two updates, with made-up advantages, since random weights solve no problem -> measurements.

    Completions are `written` random tokens and `fresh` sampled ones, which no row may stop before.
    """
    generator = torch.Generator().manual_seed(0)
    optimizers = {name: torch.optim.AdamW(pair.of(name).parameters[name].values(), lr=1e-3) for name in ADAPTERS}
    streams, started = {}, card.now()
    for name, distinct in (("A", 1), ("B", N)):  # N drafts of one prompt; N challenges, each of its own prompt
        pair.of(name).stop_ids = frozenset({2**40})
        seen = torch.randint(200, 2_000, (distinct, card.prompt + written), generator=generator).tolist()
        out = sample(pair, name, seen, N // distinct, max_tokens=fresh, max_rows=N)
        prompts = [row[: card.prompt] for row in out.prompts]
        completions = [row[card.prompt :] + tail for row, tail in zip(out.prompts, out.completions, strict=True)]
        padded = [[0.0] * written + logprobs for logprobs in out.logprobs]  # of what was written, none is known
        streams[name] = Rollouts(prompts, completions, out.finished, padded)
    sampled = card.now()
    for name, rollouts in streams.items():
        own = pair.of(name).parameters[name].values()
        before = [p.detach().clone() for p in own]
        advantages, kept = torch.tensor([1.0, -1.0] * (N // 2)), torch.ones(N, dtype=torch.bool)
        metrics = update_policy(pair, name, optimizers[name], rollouts, advantages, kept, config)
        moved = sum(not torch.equal(b, a) for b, a in zip(before, own, strict=True))
        assert metrics["grad_norm"] > 0 and moved >= len(before) / 2, f"policy {name} did not train"
    done = card.now()
    return {
        "peak_gib": peak_memory(card.name) / GIB,
        "tokens_per_second": 2 * N * fresh / (sampled - started),
        "seconds_sampling": sampled - started,
        "seconds_update": done - sampled,
        "logp_gap": metrics["logp_gap"] if not written else None,
    }


def check(card: Card, name: str, four_bit: bool, tokens: int, fresh: int, folder: Path) -> dict:
    """One case: its estimate from the config file, then the measurement. Prints a line."""
    given = dict(four_bit=four_bit, checkpointing=True, device=card.name)
    meta, written = load_pair(folder, meta=True, **given), tokens - fresh
    sampling = estimate(meta, N, 1, card.prompt + written, fresh, sampler)  # the prompts that are really prefilled
    update = estimate(meta, 1, 2, card.prompt, tokens, sampler)
    planned = update.weights + update.adapters + update.optimizer + max(sampling.sampling, update.update)
    pair = load_pair(folder, **given)
    card.clean()  # loading is not part of a step
    config = Config(micro_tokens=2 * (card.prompt + tokens))
    found = one_step(card, pair, written, fresh, config)
    row = {"base": name, "kind": "NF4" if four_bit else "bf16", "tokens": tokens, "sampled": fresh, **found}
    row |= {"estimate_gib": planned / GIB, "off": planned / GIB / found["peak_gib"] - 1}
    gap = "" if found["logp_gap"] is None else f"   log-prob gap {found['logp_gap']:.3f}"
    print(
        f"{name:12} {row['kind']:5} {tokens:6} {fresh:7} {row['peak_gib']:9.2f} {row['estimate_gib']:9.2f} "
        f"{100 * row['off']:+6.1f} {row['tokens_per_second']:6.0f} {row['seconds_update']:9.1f}{gap}",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="start nothing that would likely end later")
    parser.add_argument("--out", type=Path, help="write all numbers here, as JSON")
    parser.add_argument("--small", action="store_true", help="thin, short versions of the cases: a rehearsal")
    args = parser.parse_args()
    card = Card(args.small)
    transformers_logging.disable_progress_bar()
    if card.name == "cpu" and not args.small:
        print("gpu_check: skipped, there is no CUDA device here")
        return 0
    device = torch.cuda.get_device_properties(0).name if card.name == "cuda" else "CPU, a rehearsal"
    shrink = card.shrink
    print(f"{device}; torch {torch.__version__}; N = {N}, prompts of {card.prompt} tokens, checkpointing")
    print("base         kind  tokens sampled  peak GiB  estimate  off %  tok/s  update s")
    started, longest, rows, left_out = time.perf_counter(), 0.0, [], []

    def attempt(label: str, work, seconds: float | None = None) -> None:
        """Run one case; one that fails or does not fit is named, and the others still run."""
        nonlocal longest
        begun = time.perf_counter()
        if begun - started + (longest if seconds is None else seconds) > 60 * args.minutes:
            left_out.append(f"{label}: no time")
            return
        card.clean()
        try:
            rows.append(work())
        except (RuntimeError, ValueError, AssertionError, OSError) as error:  # out of memory is a RuntimeError
            left_out.append(f"{label}: {type(error).__name__} {str(error).splitlines()[0][:200]}")
        longest = max(longest, time.perf_counter() - begun)
        if args.out:
            args.out.write_text(json.dumps({"device": device, "rows": rows, "left_out": left_out}, indent=1))

    with tempfile.TemporaryDirectory() as scratch:

        def base(name: str) -> Path:
            folder, (family, sizes) = Path(scratch) / name, SHAPES[name]
            if args.small:
                sizes = (
                    sizes
                    | THIN
                    | ({"num_kv_shared_layers": 2, "full_attention_interval": 3} if family == "gemma4" else {})
                )
            if not folder.exists():
                make_base(folder, family, dtype=torch.bfloat16, initializer_range=0.02, **sizes)
            return folder

        def one_case(name: str, four_bit: bool, tokens: int, fresh: int):
            return lambda: check(card, name, four_bit, tokens // shrink, fresh // shrink, base(name))

        def log_probs() -> dict:
            rows = 2 if args.small else 16
            found = compare(rows=rows, tokens=1024 // shrink, width=1024, vocabulary=151_936, device=card.name)
            (naive, slow, _), (ours, fast, _) = found["naive"], found["ours"]
            print(f"log-probs + backward: naive {naive / GIB:.2f} GiB, {slow:.2f} s; ours {ours / GIB:.2f}, {fast:.2f}")
            return {"log_probs": found}

        def two_bases() -> dict:
            pair = load_pair(
                base("Qwen3-0.6B"), model_b=base("Qwen3-4B"), four_bit=True, checkpointing=True, device=card.name
            )
            card.clean()
            found = one_step(card, pair, 0, 32 // shrink, Config(micro_tokens=4096))
            print(f"two bases in turn: peak {found['peak_gib']:.2f} GiB")
            return {"two_bases": found}

        attempt("log-probs", log_probs)
        for name, four_bit, tokens in CASES:
            attempt(f"{name} {'NF4' if four_bit else 'bf16'} {tokens}", one_case(name, four_bit, tokens, FRESH))
            if (name, four_bit) == ("Qwen3-4B", True) and tokens == 2048:
                attempt("two bases", two_bases)
        name, four_bit, tokens = CASES[0]
        speed = next((row["tokens_per_second"] for row in rows if row.get("base") == name), 1.0)
        work = one_case(name, four_bit, tokens, tokens)
        attempt(f"{name}, all tokens sampled", work, 2 * N * tokens / shrink / speed)
    for problem in left_out:
        print(f"left out: {problem}")
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 1 if any(not problem.endswith("no time") for problem in left_out) else 0


if __name__ == "__main__":
    sys.exit(main())
