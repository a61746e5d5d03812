"""Tokens per second of rollout.sample beside transformers' generate and generate_batch, and an Agon step beside TRL's.

Same model, prompts and lengths for all, in one run. Random weights end no completion sensibly, so lengths are imposed.
Runs are paired, and who goes first alternates; a ratio is the median over the pairs.
  even        every row runs to the cap
  ragged      lengths geometric, on average a quarter of the cap; four times as many rows as places
  shared      16 rows of each of --problems long prompts, prefill included
  challenges  16 long prompts of each problem, which begin alike, as those of challenges do
  step        agon_step, 4 problems x 2N rollouts and both updates; TRL's GRPOTrainer makes as many, in groups of 2N
TRL: pip install --no-deps --target /tmp/trl trl==1.16.0, then PYTHONPATH=/tmp/trl; "step" is skipped without it.
Run:  python tests/bench_rollout.py [--json FILE]      20 minutes on 2 cores, 45 with --problems 8
      python tests/bench_rollout.py --quick            in a minute, a rehearsal: its numbers mean nothing
      python tests/bench_rollout.py --device cuda      Qwen3-0.6B's shape in NF4, and its share of the bandwidth
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter as now  # every engine ends with a result on the host, so with a wait for the GPU
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers
from families import make_base
from gpu_check import SHAPES
from peft import LoraConfig
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteriaList

import cascade
from agon import Config, agon_step
from model import ADAPTERS, Pair, load_pair, lora_targets
from reward import Problem
from rollout import Slots, sample

CPU_BASE = dict(vocab_size=16_384, hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
                head_dim=64, intermediate_size=1024, max_position_embeddings=2048)  # fmt: skip
PAD, END, N, PROBLEMS = 1, 2, 8, 4  # two ids of the tokenizer, in no prompt; two sizes of a step
PLAIN = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD)  # how all sample
Case = tuple[list[list[int]], int, list[int], int]  # prompts, rows of each, length of every row, rows at once


def make_cases(args, vocabulary: int) -> dict[str, Case]:
    rng, places, cap, rows = np.random.default_rng(0), args.places, args.cap, 16

    def ids(length: int) -> list[int]:
        return rng.integers(3, vocabulary, length).tolist()

    short = [ids(length) for length in rng.integers(32, 65, 4 * places)]
    problems = [ids(args.prompt) for _ in range(args.problems)]
    challenges = [problem + ids(extra) for problem in problems for extra in rng.integers(16, 65, rows)]
    long = [cap // 2] * len(challenges)
    even, uneven = (short[:places], 1, [cap] * places, places), (short, 1, ragged(rng, cap, len(short)), places)
    same, alike = (problems, rows, long, len(long)), (challenges, 1, long, len(long))
    return {"even": even, "ragged": uneven, "shared": same, "challenges": alike}


def ragged(rng: np.random.Generator, cap: int, rows: int) -> list[int]:
    return rng.geometric(min(1, 4 / cap), rows).clip(1, cap).tolist()


def ours(pair: Pair, adapter: str | None, case: Case) -> tuple[float, list[int]]:
    """As all engines: (seconds, tokens of every row)."""
    (prompts, n, caps, places), started = case, now()
    out = sample(pair, adapter, prompts, n, max_tokens=caps, max_rows=places)
    return now() - started, list(map(len, out.completions))


def ending_at(caps: Sequence[int], width: int, device) -> StoppingCriteriaList:
    """Row r is done after caps[r] tokens; width: columns of the prompts."""
    ends = width + torch.tensor(caps, device=device)  # (B,)

    def done(input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        return input_ids.shape[1] >= ends  # (B,)

    done.eos_token_id = None  # generate looks for this attribute: only where it is, rows that are done are padded
    return StoppingCriteriaList([done])


def generate(pair: Pair, adapter: str | None, case: Case) -> tuple[float, list[int]]:
    """As many rows at once as ours has places; the next batch starts when the longest row of one is done."""
    model, (prompts, n, caps, places) = pair.activate(adapter), case
    rows, made, started = [p for p in prompts for _ in range(n)], [], now()
    for at in range(0, len(rows), places):
        batch, lengths = rows[at : at + places], caps[at : at + places]
        width = max(map(len, batch))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in batch], device=model.device)  # (b, P)
        how = GenerationConfig(max_new_tokens=max(lengths), **PLAIN)
        stop = ending_at(lengths, width, model.device)
        out = model.generate(ids, how, attention_mask=(ids != PAD).long(), stopping_criteria=stop)
        pads, ends = out[:, width:] == PAD, torch.tensor(lengths, device=model.device)[:, None]  # (b, C), (b, 1)
        beyond = torch.arange(pads.shape[1], device=model.device) >= ends  # (b, C) before it, a pad is there by chance
        assert pads[beyond].all() and pads[~beyond].sum() <= 2 + pads.numel() // 100
        made += (~beyond).sum(-1).tolist()
    return now() - started, made


def generate_batch(pair: Pair, adapter: str | None, case: Case) -> tuple[float, list[int]]:
    """transformers' continuous batching, through its manager: generate_batch has one max_new_tokens for all requests.

    By default, on a CPU, its cache would fill most of the memory, which takes half a minute; and every row attends to
    the cache of all rows, under a mask, so that fewer at once are faster: these numbers are the best that were found.
    Setting up is not timed. The manager is a new one each time, or it would know the prompts already.
    """
    model, (prompts, n, caps, places) = pair.activate(adapter), case
    forked = n if len(set(caps)) == 1 else 1  # its own way to prefill a prompt once: sequences of one request
    longest, rows, sizes = max(map(len, prompts)) + max(caps), places, {}
    if pair.device == "cpu":
        rows = min(places, 32 if longest < 256 else 16)
        sizes = dict(page_size=32, max_batch_tokens=256, num_blocks=2 * (rows + n) * (longest // 32 + 2))
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, **sizes)
    how = GenerationConfig(max_new_tokens=max(caps), eos_token_id=-1, num_return_sequences=forked, **PLAIN)
    made: dict[str, int] = {}
    with model.continuous_batching_context_manager(how, continuous_batching_config=config) as manager:
        started = now()
        for r in range(0, len(caps), forked):
            manager.add_request(prompts[r // n], request_id=str(r), max_new_tokens=caps[r])
        while len(made) < len(caps):
            result = manager.get_result(timeout=60)  # one of a request that is done
            if result is None or result.error:
                raise RuntimeError(result.error if result else "no result for 60 seconds")
            made[result.request_id] = len(result.generated_tokens)
        seconds = now() - started
    names = [f"{r - r % forked}__child#{r % forked - 1}" if r % forked else str(r) for r in range(len(caps))]
    return seconds, [made[name] for name in names]


def compare(name: str, pair: Pair, adapter: str | None, case: Case, repeats: int) -> dict:
    (prompts, _, caps, places), engines = case, [ours, generate, generate_batch]
    for engine in tuple(engines):  # the warm-up
        try:
            engine(pair, adapter, (prompts[:16], 1, [2] * len(prompts[:16]), places))
        except Exception as error:  # an engine that does not run here; the others go on
            print(f"{engine.__name__} does not run: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            engines.remove(engine)
    seconds: dict[str, list[float]] = {engine.__name__: [] for engine in engines}
    for k in range(repeats):
        for engine in engines[:: -1 if k % 2 else 1]:
            taken, made = engine(pair, adapter, case)
            assert made == caps, f"{engine.__name__}: rows of other lengths than were asked for"
            seconds[engine.__name__].append(taken)
    return {"case": name, "adapter": adapter, "tokens": sum(caps), "seconds": seconds}


def compare_step(args, folder: Path, pair: Pair) -> dict | None:
    """agon_step runs between TRL's own steps, before or after each in turn. Both make the same lengths, new ones each
    step, from prompts of 64 tokens; every other row is right, so that all are trained on."""
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        return print(f"step: skipped, without TRL ({error})", file=sys.stderr)
    rows, steps, rng = PROBLEMS * 2 * N, args.repeats + 1, np.random.default_rng(0)  # the first step is the warm-up
    lengths = [ragged(rng, args.cap, rows) for _ in range(steps)]
    scored, seconds = [], {"ours": [], "TRL": []}  # tokens of every step that TRL sampled; seconds of every step
    texts = [f"{10 + i}" * 64 for i in range(PROBLEMS)]  # the tokenizer has a token for every two digits
    drafts = {text: pair.tokenizer.encode(text, add_special_tokens=False) for text in texts}
    assert {len(ids) for ids in drafts.values()} == {64}
    config = Config(device=pair.device, group_size=N, problems_per_step=PROBLEMS, max_tokens=args.cap, steps=steps)
    optimizers = {a: torch.optim.AdamW(pair.parameters[a].values(), lr=config.lr, weight_decay=0.0) for a in ADAPTERS}

    def our_step(step: int) -> None:
        left, right = iter(lengths[step]), itertools.cycle([True, False])

        stubs = {  # prompts of 64 tokens; the challenges of a problem end in different ones
            "sample": lambda *of, **how: sample(*of, **how | {"max_tokens": list(itertools.islice(left, rows // 2))}),
            "draft_prompt": lambda _, question: drafts[question],
            "challenge_prompt": lambda _, question, summary: drafts[question][:48] + rng.integers(3, 100, 16).tolist(),
            "is_correct": lambda *_: next(right),
        }
        with patch.multiple(cascade, **stubs):
            started = now()
            metrics, *stages = agon_step(pair, optimizers, [Problem(text) for text in texts], step, config)
            seconds["ours"].append(now() - started)
        assert [len(c) for stage in stages for c in stage.rollouts.completions] == lengths[step]
        assert metrics["draft"]["tokens"] + metrics["challenge"]["tokens"] == sum(lengths[step])  # trained on all

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # before TRL samples
            if state.global_step % 2:
                our_step(state.global_step)
            self.started = now()

        def on_step_end(self, args, state, control, **kwargs):  # global_step counts this step already
            seconds["TRL"].append(now() - self.started)
            if state.global_step % 2:
                our_step(state.global_step - 1)

    def alternating(completion_ids, **kwargs) -> list[float]:
        assert list(map(len, completion_ids)) == lengths[len(scored)]
        scored.append(sum(map(len, completion_ids)))
        return [float(i % 2) for i in range(len(completion_ids))]

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = GRPOTrainer(
        base, alternating, train_dataset=Dataset.from_dict({"prompt": texts * steps}), callbacks=[Clock()],
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
        peft_config=LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=lora_targets(base)),
        args=GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, max_steps=steps, beta=0.0, temperature=1.0,
            top_k=0, num_generations=2 * N, per_device_train_batch_size=rows, max_completion_length=args.cap,
            learning_rate=config.lr, max_grad_norm=config.grad_clip, gradient_checkpointing=False, disable_tqdm=True,
            shuffle_dataset=False, logging_strategy="no", save_strategy="no", report_to="none",
        ),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    plain = trainer.model.generate

    def generate_lengths(input_ids: torch.Tensor, **how) -> torch.Tensor:
        caps, width = lengths[len(scored)], input_ids.shape[1]
        trainer.model.generation_config.eos_token_id = None  # where generate looks next; TRL puts it back
        out = plain(input_ids=input_ids, stopping_criteria=ending_at(caps, width, input_ids.device), **how)
        out[:, width:][out[:, width:] == END] = END + 1  # TRL looks for the end of a row by this id: none by chance,
        return out.scatter_(1, torch.tensor(caps)[:, None] + width - 1, END)  # and one where it ended

    trainer.generation_config.eos_token_id = None
    trainer.model.generate = generate_lengths
    trainer.train()
    timed = {engine: taken[1:] for engine, taken in seconds.items()}
    return {"case": "step", "adapter": "A and B", "tokens": sum(scored[1:]) // args.repeats, "seconds": timed}


def bandwidth_share(pair: Pair, cap: int = 512) -> dict:
    """On CUDA: the bytes that a step of 64 rows must read, over what the card could read in its time: a copy tells,
    which reads and writes. A step's time is that from one harvest to the next, which both wait for the card."""
    prompts, config = torch.randint(3, 10_000, (64, 48)).tolist(), pair.model.config
    looks, plain = [], Slots.harvest

    def harvest(slots: Slots, out) -> None:
        plain(slots, out)
        looks.append(now())

    with patch.object(Slots, "harvest", harvest):
        ours(pair, "B", (prompts, 1, [cap] * 64, 64))
    step = statistics.median(after - before for before, after in itertools.pairwise(looks)) / 16
    source, target = torch.zeros(2, 2**32, dtype=torch.uint8, device=pair.device)
    times = [(now(), target.copy_(source), torch.cuda.synchronize(), now()) for _ in range(5)]
    peak = 2 * source.numel() / min(done - started for started, *_, done in times)
    weights = sum(p.numel() * p.element_size() for key, p in pair.model.named_parameters() if ".A." not in key)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2  # keys, values in bf16
    read = weights + 64 * (48 + cap / 2) * token  # the embedding is the LM head, read whole
    return {"case": "bandwidth", "bytes": read, "step_seconds": step, "peak": peak, "share": read / step / peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(threads=2, repeats=5, places=64, cap=48, prompt=512, problems=4).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", default=["even", "ragged", "shared", "challenges", "step"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    family, sizes = SHAPES["Qwen3-0.6B"] if cuda else ("qwen3", CPU_BASE)
    if args.quick:
        args.repeats, args.places, args.cap, args.prompt, args.problems = 2, 4, 8, 72, 1
        sizes = {**sizes, "vocab_size": 2_000, "num_hidden_layers": 2}
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    about = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    chip = about.partition("model name\t: ")[2].partition("\n")[0] or platform.machine()
    chip = torch.cuda.get_device_name() if cuda else f"{chip}, {args.threads} threads on {os.cpu_count()} cores"
    print(where := f"{chip}; torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    results, started = [], now()
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder), family, dtype=torch.bfloat16 if cuda else torch.float32, **sizes)
        pair = load_pair(folder, device=args.device, four_bit=cuda, b_init_std=0.01)  # B has noise in lora_B
        pair.stop_ids = frozenset()  # no id ends a row
        pair.activate(None).generation_config.eos_token_id = None
        for name, case in make_cases(args, sizes["vocab_size"]).items():
            for adapter in ("B", None) if name in args.cases else ():
                results.append(compare(name, pair, adapter, case, args.repeats))
                print(f"{now() - started:.0f} s: {name}, adapter {adapter}", file=sys.stderr)
        steps = "step" in args.cases and not cuda
        results += filter(None, [bandwidth_share(pair) if cuda else steps and compare_step(args, Path(folder), pair)])

    engines = ["ours", "generate", "generate_batch", "TRL"]
    print("\n| case | adapter | tokens |", " | ".join(engines + [f"ours / {name}" for name in engines[1:]]), "|")
    print("|---|---" + "|--:" * 8 + "|")
    for row in (row for row in results if "seconds" in row):
        seconds = row["seconds"]
        row["tokens_per_second"] = {name: row["tokens"] / statistics.median(taken) for name, taken in seconds.items()}
        pairs = {name: zip(seconds["ours"], seconds[name], strict=True) for name in engines[1:] if name in seconds}
        row["ratio"] = {name: statistics.median(theirs / own for own, theirs in pair) for name, pair in pairs.items()}
        rates = (round(row["tokens_per_second"].get(name, 0)) or "" for name in engines)
        cells = [row["case"], row["adapter"], row["tokens"], *rates]
        cells += [f"{row['ratio'][name]:.2f}" if name in pairs else "" for name in engines[1:]]
        print("|", " | ".join(map(str, cells)), "|")
    if cuda:
        print(f"\ndecoding reads at {results[-1]['share']:.0%} of the {results[-1]['peak'] / 1e9:.0f} GB/s of a copy")
    if args.json:
        args.json.write_text(json.dumps({"machine": where, **vars(args), "results": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
