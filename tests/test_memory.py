"""Memory: the estimate against what is measured, the plan made from it, and what happens when it runs out all the same.

Run:  pytest tests/test_memory.py
"""

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_logprobs import bare_model, compare, naive_logprobs
from families import FAMILIES, make_base

import agon
import model as model_module
import rollout
from agon import PRESETS, Config, parse_config, plan, until_it_fits, update_policy
from model import (
    ADAPTERS,
    PeakMemory,
    base_bytes,
    estimate,
    free_memory,
    fused_attention,
    load_pair,
    peak_memory,
    sampling_memory,
    token_logprobs,
    update_memory,
)
from reward import load_problems
from rollout import Slots, draft_prompt, rehearse, sample

ROOT = Path(__file__).resolve().parent.parent
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")


def sampler(*sizes):
    return rehearse(*sizes, temperature=1.0, top_p=1.0)


# ---------------------------------------------------------------------------------------------------------------
# The counter


def test_peak_memory_counts_what_is_made_and_forgets_what_is_freed():
    with PeakMemory([]) as memory:
        a = torch.zeros(100, device="meta")
        b = a + 1
        assert memory.now == memory.peak == 800
        view = b.view(10, 10).t()
        del a, b
        assert memory.now == 400, "a view keeps its storage alive"
        del view
        assert (memory.now, memory.peak) == (0, 800)


def test_peak_memory_does_not_count_what_was_there_before():
    weight = torch.zeros(100, device="meta")
    with PeakMemory([weight]) as memory:
        weight.view(10, 10).t().mul_(2)
        assert memory.peak == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_attention_is_counted_without_its_scores_and_is_put_back(grouped):
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention
    q = torch.zeros(2, 8, 512, 16, device="meta", requires_grad=True)
    k = torch.zeros(2, 2 if grouped else 8, 512, 16, device="meta", requires_grad=True)
    with PeakMemory([q, k]) as memory, fused_attention():
        out = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=grouped)
        assert out.shape == q.shape
        out.sum().backward()
    assert memory.peak < 2 * 8 * 512 * 512 * 4 / 4, "less than a quarter of the scores"
    assert functional.scaled_dot_product_attention is original
    with pytest.raises(KeyError), fused_attention():
        raise KeyError
    assert functional.scaled_dot_product_attention is original


# ---------------------------------------------------------------------------------------------------------------
# The estimate against the real thing


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / request.param, request.param)


@pytest.mark.parametrize("four_bit", [False, True])
def test_weights_and_adapters_are_counted_to_the_byte(base, four_bit):
    planned = load_pair(base, four_bit=four_bit, device="cpu", meta=True)
    real = load_pair(base, four_bit=four_bit, device="cpu")
    for name in ADAPTERS:
        shapes = [{k: p.shape for k, p in pair.parameters[name].items()} for pair in (planned, real)]
        assert shapes[0] == shapes[1]
    size = 0
    for name, p in real.model.named_parameters():
        if ".lora_" not in name:
            size += p.nbytes
            if state := getattr(p, "quant_state", None):
                size += state.absmax.nbytes + state.state2.absmax.nbytes
    # A last block of 64 or of 256 x 64 that is not full has a scale all the same: on layers this small it shows.
    assert base_bytes(planned) == pytest.approx(size, rel=0.005 if four_bit else 0)


def test_kv_cache_is_counted_to_the_byte(base, monkeypatch):
    """Windows, shared keys and values, and states that do not grow: each family has its own cache."""
    rows, prompt, completion = 3, 5, 9
    blueprint = load_pair(base, four_bit=False, device="cpu", meta=True)
    planned, _ = sampling_memory(blueprint, "A", rows, prompt, completion, sampler)
    caches, harvest = [], Slots.harvest
    monkeypatch.setattr(Slots, "harvest", lambda slots, out: (caches.append(slots.cache), harvest(slots, out)))
    pair = load_pair(base, four_bit=False, device="cpu")
    sample(pair, "A", [[3 + i] * prompt for i in range(rows)], max_tokens=completion)
    tensors = [x for layer in caches[-1].layers for x in vars(layer).values()]
    tensors += [x for state in tensors if isinstance(state, dict) for x in state.values()]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)]
    assert planned == sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_checkpointing_is_worth_its_time(base):
    pairs = [load_pair(base, device="cpu", meta=True, checkpointing=c) for c in (True, False)]
    with_it, without = (update_memory(pair, "A", 4, 16, 48)[0] for pair in pairs)
    assert with_it < 0.75 * without


MEASURE = """
import gc, json, re, sys
from pathlib import Path
import torch
import agon
from model import estimate, load_pair, token_logprobs
from rollout import Rollouts, rehearse, sample
folder, four_bit, checkpointing, rows, micro_rows, prompt, completion = json.loads(sys.argv[1])
torch.set_num_threads(1)

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

planned = estimate(
    load_pair(folder, four_bit=four_bit, checkpointing=checkpointing, device="cpu", meta=True),
    rows, micro_rows, prompt, completion, lambda *sizes: rehearse(*sizes, 1.0, 1.0),
)
warm = load_pair("tiny", four_bit=four_bit, device="cpu")  # loads what any run loads once: libraries, kernels
out = sample(warm, "A", [[3, 4, 5]], 2, max_tokens=3)
token_logprobs(warm.activate("A", train=True), out.prompts, out.completions).sum().backward()
del warm, out
gc.collect()
before, files = status("VmRSS"), status("RssFile")
pair = load_pair(folder, four_bit=four_bit, checkpointing=checkpointing, device="cpu")
for p in pair.model.parameters():  # on CPU the weights are pages of the file, which the system may drop: make them ours
    if p.dtype != torch.uint8:
        p.data = p.data.clone()
pair.stop_ids = frozenset({10**9})  # no row stops early
prompts = [[3 + (7 * i + j) % 100 for j in range(prompt)] for i in range(2 * rows)]  # half of the rows wait
Path("/proc/self/clear_refs").write_text("5")  # resets the peak: loading is not part of it
out = sample(pair, "A", prompts, 1, max_tokens=completion, max_rows=rows)
out = Rollouts(*(x[:rows] for x in vars(out).values()))
for name in "AB":
    optimizer = torch.optim.AdamW(pair.parameters[name].values(), lr=1e-3)
    kept = torch.ones(rows, dtype=torch.bool)
    config = agon.Config(micro_tokens=micro_rows * (prompt + completion))
    agon.update_policy(pair, name, optimizer, out, torch.ones(rows), kept, config)
    globals()["optimizer_" + name] = optimizer  # keep its moments
print(json.dumps([planned.total, status("VmHWM") - before - (status("RssFile") - files)]))
"""
MEDIUM = dict(
    vocab_size=16000, hidden_size=384, intermediate_size=1152, num_attention_heads=6, num_key_value_heads=2,
    head_dim=64, num_hidden_layers=4, max_position_embeddings=2048, initializer_range=0.02,
)  # fmt: skip


@LINUX
@pytest.mark.parametrize(
    "family, four_bit, checkpointing, rows, micro_rows, own",
    [
        ("qwen3", True, True, 8, 8, {}),
        ("gemma4", False, False, 8, 2, {"sliding_window": 64, "global_head_dim": 64}),
        ("qwen3_5", False, True, 8, 2, {"linear_key_head_dim": 64, "linear_value_head_dim": 64}),
        ("llama", True, False, 32, 1, {"num_key_value_heads": 6}),  # sampling takes more than the update
    ],
)
def test_estimate_is_within_15_percent_of_the_measured_peak(
    tmp_path, family, four_bit, checkpointing, rows, micro_rows, own
):
    folder = make_base(tmp_path / family, family, **MEDIUM | own)
    arguments = json.dumps([str(folder), four_bit, checkpointing, rows, micro_rows, 80, 40])
    # glibc keeps freed memory for later unless told to map each block by itself: the peak would not be of what is used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MEASURE, arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned, measured = json.loads(done.stdout.splitlines()[-1])
    megabytes = f"{planned / 2**20:.0f} MB planned, {measured / 2**20:.0f} MB measured"
    assert planned == pytest.approx(measured, rel=0.15), megabytes


# ---------------------------------------------------------------------------------------------------------------
# Log-probs at a real vocabulary

V = 151_936


def counted(logprobs, rows: int, tokens: int) -> int:
    model = bare_model(64, V, "meta")
    with PeakMemory([*model.parameters(), *model.buffers()]) as memory, fused_attention():
        logprobs(model, [[1, 2, 3, 4]] * rows, [[5] * tokens] * rows, 0.6).sum().backward()
    return memory.peak


def test_log_probs_of_16_rows_take_a_small_part_of_the_naive_forms_memory():
    assert counted(token_logprobs, 16, 1024) < counted(naive_logprobs, 16, 1024) / 4


@LINUX
def test_log_probs_take_a_quarter_of_the_naive_forms_memory_and_no_more_time_as_measured():
    if free_memory("cpu") < 4 * 2**30:
        pytest.skip("the naive form takes 2 GB here")
    found = compare(rows=1, tokens=1024, width=64, vocabulary=V, device="cpu")
    (naive, slow, _), (ours, fast, _) = found["naive"], found["ours"]
    assert ours <= naive / 4 and fast <= 1.3 * slow, found
    assert found["ours"][2] == pytest.approx(found["naive"][2], rel=1e-3), "not the same gradient"
    for form, measured, logprobs in (("naive", naive, naive_logprobs), ("ours", ours, token_logprobs)):
        assert measured == pytest.approx(counted(logprobs, 1, 1024), rel=0.15), f"{form}: the counter is off"


# ---------------------------------------------------------------------------------------------------------------
# The plan


def settled(**changes) -> Config:
    settings = dict(device="cpu", four_bit=False, gradient_checkpointing=False, prompt_tokens=64, estimate=True)
    return Config(**{**settings, **changes})


def test_plan_takes_the_most_that_fits():
    small, large = (settled(memory=m, micro_tokens=0, rollout_rows=0) for m in (0.02, 0.08))
    for config in (small, large):
        assert plan(config).total <= agon.HEADROOM * config.memory * agon.GIB
        assert config.micro_tokens % (64 + 36) == 0, "whole rows"
    assert 1 <= small.rollout_rows < large.rollout_rows <= 16 * 8
    assert 1 <= small.micro_tokens < large.micro_tokens
    more = dataclasses.replace(small, rollout_rows=small.rollout_rows * 2)
    with pytest.raises(ValueError, match="--rollout-rows 0"):
        plan(more)


def test_plan_keeps_what_is_given_and_refuses_what_cannot_fit():
    given = settled(memory=1.0)
    plan(given)
    assert (given.micro_tokens, given.rollout_rows) == (Config.micro_tokens, Config.rollout_rows)
    with pytest.raises(ValueError, match="smaller --base or --max-tokens") as caught:
        plan(settled(memory=0.003, micro_tokens=0, rollout_rows=0))
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_may_not_plan_with_more_than_the_device_has_free(monkeypatch):
    monkeypatch.setattr(agon, "free_memory", lambda device: 0.02 * agon.GIB)
    config = settled(memory=100.0, micro_tokens=0, rollout_rows=0, estimate=False)
    assert plan(config).total <= agon.HEADROOM * 0.02 * agon.GIB


def test_plan_for_two_bases_counts_the_larger_one(tmp_path):
    large = make_base(tmp_path / "llama", "llama", hidden_size=256, intermediate_size=512)
    card = dict(device="cuda", memory=8.0)
    alone, together = plan(settled(base=str(large), **card)), plan(settled(base="tiny", model_b=str(large), **card))
    assert together.weights == alone.weights and together.kv_cache == alone.kv_cache
    assert together.adapters < alone.adapters, "each base has one adapter"
    on_cpu = plan(settled(base="tiny", model_b=str(large)))
    assert on_cpu.adapters > together.adapters, "there the idle base has nowhere else to go"


def test_estimate_prints_every_part_and_loads_nothing(tmp_path, capsys, monkeypatch):
    folder = make_base(tmp_path / "qwen3", "qwen3")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # the config file alone
    monkeypatch.chdir(tmp_path)
    assert agon.main(["--estimate", "--preset", "8gb", "--base", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "adapters", "optimizer", "KV cache", "logits chunk", "activations", "total", "4-bit NF4"):
        assert part in out
    assert "completions up to 2048" in out and "on cuda" in out
    assert not (tmp_path / "runs").exists()


def test_estimate_of_a_card_too_small_is_one_line(capsys):
    assert agon.main(["--estimate", "--device", "cpu", "--memory", "0.01"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "GiB on cpu" in err


def test_a_preset_sets_and_flags_beside_it_win():
    for name, preset in PRESETS.items():
        config = parse_config(["--preset", name])
        config.check()
        assert {key: getattr(config, key) for key in preset} == preset
        assert config.group_size == 8 and not (config.micro_tokens or config.rollout_rows)
    for flags in (["--preset", "8gb", "--max-tokens", "999"], ["--max-tokens", "999", "--preset", "8gb"]):
        assert (parse_config(flags).max_tokens, parse_config(flags).base) == (999, "Qwen/Qwen3-0.6B")
    assert parse_config(["--max-tokens", "36", "--preset", "24gb"]).max_tokens == 36, "a default, but said"


@LINUX
def test_free_and_peak_memory_on_linux():
    page = torch.ones(25_000_000)  # 100 MB
    assert peak_memory("cpu") > page.nbytes
    assert 2**20 < free_memory("cpu") < 2**50
    with pytest.raises(ValueError, match="--memory"):
        free_memory("tpu")


# ---------------------------------------------------------------------------------------------------------------
# Out of memory all the same


def limited(function, size, limit: int, failures: list):
    """`function`, on a device where more than `limit` (of what size() counts) does not fit."""

    def run(*args, **kwargs):
        if size(*args) > limit:
            failures.append(size(*args))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB.")
        return function(*args, **kwargs)

    return run


def padded(model, prompts, completions, *rest) -> int:
    return len(prompts) * max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))


@pytest.mark.parametrize("inner_epochs", [1, 2])
def test_out_of_memory_in_an_update_halves_the_budget_and_changes_nothing_else(
    fresh_pair, monkeypatch, capsys, inner_epochs
):
    prompts = [draft_prompt(fresh_pair.tokenizer, p.question) for p in load_problems("congruence", "train", 6)]
    rollouts = sample(fresh_pair, "B", prompts, 2, max_tokens=30)
    advantages, kept = torch.tensor([1.0, -0.5] * 6), torch.ones(12, dtype=torch.bool)
    start = [p.detach().clone() for p in fresh_pair.parameters["B"].values()]
    results, failures = [], []
    for limit in (10**9, 200):
        for p, s in zip(fresh_pair.parameters["B"].values(), start, strict=True):
            p.data.copy_(s)
        monkeypatch.setattr(agon, "token_logprobs", limited(token_logprobs, padded, limit, failures))
        config = Config(micro_tokens=1600, inner_epochs=inner_epochs)
        optimizer = torch.optim.SGD(fresh_pair.parameters["B"].values(), lr=1.0)
        metrics = update_policy(fresh_pair, "B", optimizer, rollouts, advantages, kept, config)
        results.append(([p.detach().clone() for p in fresh_pair.parameters["B"].values()], metrics))
    assert failures and config.micro_tokens == 200, "the budget that fits stays"
    assert capsys.readouterr().err.count("out of memory") == 3
    for got, wanted, s in zip(results[1][0], results[0][0], start, strict=True):
        assert (got - wanted).norm() <= 1e-5 * (wanted - s).norm() + 1e-9 * got.numel()  # and fp32's last bit
    assert results[1][1]["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-5)


def test_out_of_memory_while_sampling_gives_the_same_samples(pair, monkeypatch, capsys):
    problems = load_problems("congruence", "train", 4)
    config = Config(group_size=4, rollout_rows=64)

    def step():
        with monkeypatch.context() as patch:
            patch.setattr(agon, "update_policy", lambda *a: {"grad_norm": 0.0, "tokens": 0, "logp_gap": 0.0})
            return agon.agon_step(pair, {"A": None, "B": None}, problems, 3, config)[1:]

    wanted = step()
    monkeypatch.setattr(rollout.Slots, "step", limited(rollout.Slots.step, lambda slots, rows, width: rows, 5, []))
    got = step()
    assert config.rollout_rows == 4
    assert capsys.readouterr().err.count("--rollout-rows") == 4  # 64 -> 32 -> 16 -> 8 -> 4
    for one, other in zip(wanted, got, strict=True):
        assert one.rollouts.completions == other.rollouts.completions and one.correct == other.correct


def test_what_cannot_be_halved_is_raised():
    config, calls = Config(micro_tokens=100), []

    def never():
        calls.append(config.micro_tokens)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        until_it_fits(never, config, "micro_tokens", 30)
    assert calls == [100, 50, 25], "below the shortest row every batch is one row already"


def test_failed_attempts_leave_nothing_behind(pair):
    """A kept traceback would keep the tensors of the attempt, and the next one would fail because of them."""
    alive, config = [], Config(micro_tokens=100)

    class Tensor:
        pass

    def work():
        gc.collect()
        import weakref

        big = Tensor()
        alive.append(weakref.ref(big))
        assert all(ref() is None for ref in alive[:-1])
        if config.micro_tokens > 30:
            raise torch.OutOfMemoryError
        return config.micro_tokens

    assert until_it_fits(work, config, "micro_tokens", 1) == 25


def test_a_run_out_of_memory_saves_both_adapters_and_says_what_to_do(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rollout.Slots, "step", fail)
    folder = tmp_path / "run"
    flags = ["--steps", "2", "--problems-per-step", "2", "--group-size", "2", "--device", "cpu", "--out", str(folder)]
    assert agon.main(flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"out of memory, .*: take a smaller --max-tokens or --base", last)
    load_pair("tiny", folder, device="cpu")


def test_estimate_is_of_the_turn_that_takes_more():
    pair = load_pair("tiny", device="cpu", meta=True)
    memory = estimate(pair, 4, 2, 8, 16, sampler)
    static = memory.weights + memory.adapters + memory.optimizer
    assert memory.total == static + max(memory.kv_cache + memory.decoding, memory.activations + memory.logits)
    assert all(value > 0 for value in dataclasses.asdict(memory).values())
    assert model_module.nbytes([torch.zeros(3, 5)]) == 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_check_skips_in_one_line_without_a_gpu():
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "gpu_check.py")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 1 and "skipped" in done.stdout


def test_rows_halved_in_training_stay_halved_in_the_evaluation_and_in_the_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollout.Slots, "step", limited(rollout.Slots.step, lambda slots, rows, width: rows, 9, []))
    folder = tmp_path / "run"
    flags = [
        "--steps",
        "1",
        "--problems-per-step",
        "4",
        "--group-size",
        "4",
        "--eval-problems",
        "12",
        "--device",
        "cpu",
    ]
    assert agon.main([*flags, "--out", str(folder)]) == 0
    assert (folder / "results.json").exists()
    assert json.loads((folder / "config.json").read_text())["rollout_rows"] == 8, "eval would run out of memory again"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried 1 TB"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_out_of_memory_in_all_its_forms(error):
    assert agon.is_out_of_memory(error)
    assert not agon.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_whatever_ends_a_training_its_adapters_are_saved(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("something nobody thought of")

    monkeypatch.setattr(agon, "token_logprobs", fail)
    flags = ["--steps", "2", "--problems-per-step", "16", "--group-size", "4", "--device", "cpu"]
    with pytest.raises(RuntimeError, match="nobody thought of"):
        agon.main([*flags, "--out", str(tmp_path / "run")])
    load_pair("tiny", tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--method grpo --model-b tiny", "one policy"),
        ("--device tpu", "choose cuda"),
        ("--device cuda:x", "choose cuda"),
        ("--device cpu:1", "choose cuda"),
        ("--memory -1", "--memory -1"),
        ("--memory nan", "--memory nan"),
        ("--memory 0.001 --device cpu", "needs"),
        ("--preset 9gb", "8gb, 12gb, 24gb"),
        ("--prompt-tokens 0", "at least 1"),
        ("--estimate --device cuda --preset 24gb --base nowhere", "no base model folder"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(flags, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert agon.main(flags.split()) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and says in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_preset_without_a_gpu_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert agon.main(["--preset", "8gb"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "CUDA" in err and not list(tmp_path.iterdir())
