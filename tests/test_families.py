"""Every family of base through the real path, from its folder: loading, sampling, both updates, saving, two bases.

Run:  pytest tests/test_families.py

The bases are those of families.py: untrained, four layers, in fp32 and in real NF4 on the CPU.
"""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import bitsandbytes
import pytest
import torch
import transformers
from conftest import fill_with_noise
from families import FAMILIES, WINDOW, make_base
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_model import assert_same_gradient, gradient, naive_logprobs, snapshot
from transformers import AutoModelForCausalLM, DynamicCache

import agon
import cascade
from agon import Config, agon_step, update_policy
from model import ADAPTERS, EMBEDDED, Pair, cache_argument, load_pair, token_logprobs
from reward import load_problems
from rollout import sample

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = (3, 14, 1, 9, 14, 20)  # ragged; most are longer than a sliding window
PROMPTS = [torch.randint(3, 119, (length,), generator=GENERATOR).tolist() for length in LENGTHS]
COMPLETIONS = [torch.randint(0, 119, (length,), generator=GENERATOR).tolist() for length in (11, 3, 8, 1, 5, 9)]
IDS = torch.randint(3, 119, (2, 4 * WINDOW), generator=GENERATOR)  # (B, T)
PROBLEMS = load_problems("congruence", "train", 2)
STEP = Config(group_size=2, max_tokens=6, lr=1e-2, micro_tokens=64)
KINDS = pytest.mark.parametrize("four_bit", [False, True], ids=["fp32", "nf4"])
EACH = pytest.mark.parametrize("family", FAMILIES)
TWO = pytest.mark.parametrize("one, two", [("qwen3", "llama"), ("gemma4", "qwen3_5")])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {family: make_base(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def load(folder: Path, four_bit: bool = False, checkpointing: bool = False) -> Pair:
    return fill_with_noise(load_pair(folder, four_bit=four_bit, checkpointing=checkpointing, device="cpu"))


def logits_of(pair: Pair, adapter: str | None) -> torch.Tensor:
    with torch.no_grad():
        return pair.activate(adapter)(IDS, use_cache=False).logits


def optimizers_of(pair: Pair, kind=torch.optim.AdamW) -> dict[str, torch.optim.Optimizer]:
    return {name: kind(pair.of(name).parameters[name].values(), lr=STEP.lr) for name in ADAPTERS}


def moved(pair: Pair, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, p in pair.model.named_parameters() if not torch.equal(p, before[name])}


def made_up(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages of both signs, all kept): an untrained base earns no rewards."""
    return torch.linspace(-6, 8, rows, dtype=torch.float64), torch.ones(rows, dtype=torch.bool)


# ---------------------------------------------------------------------------------------------------------------
# Loading


@KINDS
@EACH
def test_adapters_sit_on_every_linear_layer_of_the_decoder_and_on_nothing_else(folders, family, four_bit):
    pair = load(folders[family], four_bit)
    model, linear = pair.activate("A"), (torch.nn.Linear, bitsandbytes.nn.Linear4bit)
    names = {"qwen3_5": "Qwen3_5ForCausalLM", "gemma4": "Gemma4ForConditionalGeneration"}
    assert type(model).__name__ == names.get(family, type(model).__name__)
    stored = {key.split(".")[1] for key in load_file(folders[family] / "model.safetensors")}
    towers = {"qwen3_5": {"visual"}, "gemma4": {"vision_tower", "audio_tower"}}.get(family, set())
    assert towers <= stored and towers.isdisjoint(dict(model.model.named_children())), "a tower was loaded"
    decoder = {id(m) for m in model.get_decoder().modules()}
    own = {n: m for n, m in model.named_modules() if isinstance(m, linear) and "lora_" not in n and id(m) in decoder}
    wrapped = {name + ".base_layer" for name, m in model.named_modules() if hasattr(m, "base_layer")}
    assert own.keys() == wrapped and len(wrapped) >= 28
    assert {type(m) for m in own.values()} == {linear[four_bit]}, "a layer is in another precision than was asked for"
    head = model.get_output_embeddings()
    assert type(head) is torch.nn.Linear and head.weight.dtype == torch.float32, "the head is not to be quantized"
    for tensors in pair.parameters.values():
        assert len(tensors) == 2 * len(wrapped) and {p.dtype for p in tensors.values()} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------
# Sampling


def stopping(pair: Pair) -> Pair:  # rows stop at different steps
    return dataclasses.replace(pair, stop_ids=frozenset(range(0, 119, 12)))


def sampled(pair: Pair, adapter: str | None):
    return sample(pair, adapter, PROMPTS, n=2, max_tokens=12, temperature=0.7, seed=3)


@KINDS
@EACH
def test_log_probs_of_the_sampler_are_those_of_a_full_forward(folders, family, four_bit):
    """The model's own forward, whole rows, no cache and no padding: with its own windows, shared layers and caps."""
    pair, lengths, finished = stopping(load(folders[family], four_bit)), set(), set()
    for adapter in ("A", "B", None):
        out = sampled(pair, adapter)
        lengths |= set(map(len, out.completions))
        finished |= set(out.finished)
        with torch.no_grad():
            naive = naive_logprobs(pair.activate(adapter), out.prompts, out.completions, 0.7)  # (B, C)
        for row, logprobs in zip(naive, out.logprobs, strict=True):
            assert logprobs == pytest.approx(row[: len(logprobs)].tolist(), abs=1e-4)
    assert len(lengths) > 4 and finished == {True, False}, "the rows stopped together"


@EACH
def test_a_cache_with_its_rows_reordered_is_the_cache_of_those_rows(folders, family):
    pair = load(folders[family])
    model = pair.activate("B")

    def forward(ids, mask, positions, cache):  # -> (B, T, V)
        how = {"attention_mask": mask, "position_ids": positions, cache_argument(model): cache}
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True, **how).logits

    def prefill(prompts):
        width, cache = max(map(len, prompts)), DynamicCache(config=pair.model.config)
        ids, mask = (  # (B, P) each
            torch.tensor([[0] * (width - len(p)) + row for p, row in zip(prompts, rows, strict=True)])
            for rows in (prompts, [[1] * len(p) for p in prompts])
        )
        forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        return cache, mask

    rows = [3, 1, 1, 5, 3]  # some repeat, some are gone, the order is another; the longest stays: equal padding
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # how transformers says that an argument was renamed
        cache, mask = prefill(PROMPTS)
    cache.reorder_cache(torch.tensor(rows))
    again, mask = prefill([PROMPTS[r] for r in rows])
    for step in range(WINDOW + 2):  # rows of one prompt go different ways: they may not share a buffer
        token = torch.tensor([[10 + 7 * i + step] for i in range(len(rows))])  # (B, 1)
        position = mask.sum(-1, keepdim=True)  # (B, 1)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)  # (B, P + step + 1)
        got, wanted = (forward(token, mask, position, c) for c in (cache, again))
        torch.testing.assert_close(got, wanted, atol=3e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------------------
# Scoring and gradients


@EACH
def test_token_logprobs_and_gradients_equal_a_naive_full_forward(folders, family):
    pair = load(folders[family])
    model = pair.activate("B", train=True)
    fast = token_logprobs(model, PROMPTS, COMPLETIONS, 0.7, logit_budget=5 * 119)  # five tokens a chunk
    slow = naive_logprobs(model, PROMPTS, COMPLETIONS, 0.7)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    assert_same_gradient(gradient(pair, "B", fast), gradient(pair, "B", slow))


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients it is given and moves nothing."""

    def step(self, closure=None):
        self.gradients = [p.grad.detach().clone() for group in self.param_groups for p in group["params"]]


def recorded(pair: Pair, adapter: str, rollouts, micro_tokens: int) -> list[torch.Tensor]:
    """The gradients that update_policy hands to the optimizer."""
    optimizer = optimizers_of(pair, Recorder)[adapter]
    config = dataclasses.replace(STEP, temperature=0.7, grad_clip=1e6, micro_tokens=micro_tokens)
    metrics = update_policy(pair, adapter, optimizer, rollouts, *made_up(len(rollouts.prompts)), config)
    assert metrics["logp_gap"] < 1e-4, "trainer and sampler disagree about the policy"
    return optimizer.gradients


@EACH
def test_the_gradient_is_the_same_however_the_stream_is_split(folders, family):
    pair = stopping(load(folders[family]))
    rollouts = sampled(pair, "A")
    whole, *split = (recorded(pair, "A", rollouts, micro_tokens) for micro_tokens in (10**6, 40, 1))
    for gradients in split:
        assert_same_gradient(gradients, whole)


@KINDS
@EACH
def test_checkpointing_changes_neither_samples_nor_gradients(folders, family, four_bit):
    seen = []
    for on in (False, True):
        pair, widths = stopping(load(folders[family], four_bit, checkpointing=on)), []
        first = pair.model.get_base_model().get_decoder().layers[0].mlp
        first.register_forward_pre_hook(lambda _, args, widths=widths: widths.append(args[0].shape[1]))
        rollouts = sampled(pair, "B")
        assert set(widths) <= {*LENGTHS, 1} and widths.count(1) > len(LENGTHS), "no cache"
        widths.clear()
        gradients = recorded(pair, "B", rollouts, 10**6)
        assert len(widths) == 1 + on, "layers are recomputed if and only if that is asked for"
        widths.clear()
        assert sampled(pair, "B") == rollouts and set(widths) <= {*LENGTHS, 1}, "sampling after an update is another"
        assert not any(m.training for m in pair.model.modules())
        seen.append((rollouts, gradients))
    (plain, wanted), (saving, got) = seen
    assert saving == plain
    assert_same_gradient(got, wanted)


# ---------------------------------------------------------------------------------------------------------------
# Updates


@KINDS
@EACH
def test_an_update_moves_every_tensor_of_its_adapter_and_nothing_else(folders, family, four_bit):
    pair = load(folders[family], four_bit, checkpointing=True)
    base, optimizers = logits_of(pair, None), optimizers_of(pair)
    for adapter in ("A", "B", "A"):  # the last time with momentum in the other one
        before, rollouts = snapshot(pair), sampled(pair, adapter)
        config = dataclasses.replace(STEP, temperature=0.7)
        metrics = update_policy(pair, adapter, optimizers[adapter], rollouts, *made_up(2 * len(PROMPTS)), config)
        assert metrics["logp_gap"] < 1e-4, "trainer and sampler disagree about the policy"
        assert moved(pair, before) == pair.parameters[adapter].keys()
    assert torch.equal(logits_of(pair, None), base), "the base changed, in a buffer"


def give_signal(monkeypatch, *streams: str) -> None:
    """Make agon_step find something to learn in these of its two streams."""
    asked = []

    def advantages(rewards, groups, scale_std=True):
        asked.append("draft" if len(asked) % 4 < 2 else "challenge")  # each stream asks twice, the second for metrics
        return made_up(len(rewards))[0], torch.full((len(rewards),), asked[-1] in streams)

    monkeypatch.setattr(agon, "group_advantages", advantages)


@EACH
def test_a_whole_step_trains_both_policies(folders, family, monkeypatch):
    give_signal(monkeypatch, "draft", "challenge")
    pair = load(folders[family], four_bit=True, checkpointing=True)
    optimizers = optimizers_of(pair)
    for step in (0, 1):
        before = snapshot(pair)
        metrics, *_ = agon_step(pair, optimizers, PROBLEMS, step, STEP)
        assert moved(pair, before) == pair.parameters["A"].keys() | pair.parameters["B"].keys()
        assert max(metrics[stream]["logp_gap"] for stream in ("draft", "challenge")) < 1e-4


# ---------------------------------------------------------------------------------------------------------------
# Saved pairs

FRESH_PROCESS = """
import sys, torch, agon, model
torch.set_num_threads(1)
agon.group_advantages = lambda r, g, s=True: (torch.linspace(-1, 1, len(r)).double(), torch.ones(len(r)).bool())
out, problems = {}, agon.load_split({"task": "congruence", "train_problems": 2}, "train")
jobs, ids = torch.load("jobs.pt")
for family, (folder, run) in jobs.items():
    for four_bit in (False, True):
        print(f"\\n#{family} {four_bit}", file=sys.stderr, flush=True)
        pair = model.load_pair(folder, model.Path(run), four_bit=four_bit, checkpointing=True, device="cpu")
        with torch.no_grad():
            out[family, four_bit] = {n: pair.activate(n)(ids, use_cache=False).logits for n in ("A", "B")}
        optimizers = {n: torch.optim.AdamW(p.values()) for n, p in pair.parameters.items()}
        agon.agon_step(pair, optimizers, problems, 0, agon.Config(group_size=2, max_tokens=4))
torch.save(out, "out.pt")
"""


@pytest.fixture(scope="module")
def fresh(folders, tmp_path_factory):
    """(run folder of each family, then of a fresh process: its logits, what it wrote to standard error)."""
    runs, at = {family: tmp_path_factory.mktemp("run") for family in FAMILIES}, tmp_path_factory.mktemp("fresh")
    for family, run in runs.items():
        load(folders[family]).save(run)
    torch.save(({f: (str(folders[f]), str(runs[f])) for f in FAMILIES}, IDS), at / "jobs.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH_PROCESS]
    done = subprocess.run(command, env=environment, cwd=at, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
    said = dict(part.partition("\n")[::2] for part in done.stderr.split("\n#")[1:])
    return runs, torch.load(at / "out.pt"), said


@KINDS
@EACH
def test_a_fresh_process_loads_the_same_policies_and_nothing_is_said(folders, fresh, family, four_bit):
    _, logits, said = fresh
    assert said[f"{family} {four_bit}"].strip() == "", "a third party spoke up, while loading or in a step"
    pair = load(folders[family], four_bit)
    for name in ADAPTERS:
        torch.testing.assert_close(logits[family, four_bit][name], logits_of(pair, name), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ADAPTERS)
@EACH
def test_each_saved_folder_is_a_plain_peft_adapter_of_the_whole_model(folders, fresh, family, name):
    """For Gemma 4 that is the model with its towers, which no adapter may touch."""
    base = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # how PEFT says that keys are missing
        plain = PeftModel.from_pretrained(base, fresh[0][family] / name).eval()
    towers = [key for key, _ in plain.named_parameters() if "_tower" in key]
    assert bool(towers) == (family == "gemma4") and not any("lora_" in key for key in towers)
    with torch.no_grad():
        logits = plain(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, logits_of(load(folders[family]), name), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------------------
# Two bases


def load_two(one: Path, two: Path, **more) -> Pair:
    pair, generator = load_pair(one, model_b=two, device="cpu", **more), torch.Generator().manual_seed(1)
    for name in ADAPTERS:
        for p in pair.of(name).parameters[name].values():
            p.data.copy_(0.05 * torch.randn(p.shape, generator=generator))
    return pair


@TWO
def test_two_bases_hold_one_policy_each_and_take_turns(folders, one, two):
    a = load_two(folders[one], folders[two])
    b = a.rival
    assert a.of("A") is a.of(None) is b.of("A") is a and a.of("B") is b.of("B") is b.of(None) is b is not a
    assert list(a.parameters) == ["A"] and list(b.parameters) == ["B"]
    for name, half, other in (("A", a, b), ("B", b, a), ("A", a, b)):
        model = a.activate(name, train=True)
        assert model is half.model.get_base_model() is b.activate(name, train=True)
        trained = {key for key, p in half.model.named_parameters() if p.requires_grad}
        assert trained == half.parameters[name].keys() and len(trained) > 50
        assert not any(p.requires_grad for p in other.model.parameters())


@KINDS
@TWO
def test_a_step_of_two_bases_trains_the_policy_with_a_signal_alone(folders, one, two, four_bit, monkeypatch):
    pair = load_two(folders[one], folders[two], four_bit=four_bit, checkpointing=True)
    optimizers = optimizers_of(pair)
    for step, stream, learns in ((0, "draft", "A"), (1, "draft", "B"), (0, "challenge", "B"), (1, "challenge", "A")):
        give_signal(monkeypatch, stream)
        before = {name: snapshot(pair.of(name)) for name in ADAPTERS}
        metrics, *_ = agon_step(pair, optimizers, PROBLEMS, step, STEP)
        assert metrics[stream]["logp_gap"] < 1e-4
        for name in ADAPTERS:
            wanted = pair.of(name).parameters[name].keys() if name == learns else set()
            assert moved(pair.of(name), before[name]) == wanted


def test_two_bases_are_saved_restored_and_evaluated(folders, tmp_path, monkeypatch):
    pair = load_two(folders["qwen3"], folders["llama"])
    pair.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["A", "B"]
    again = load_pair(folders["qwen3"], tmp_path, model_b=folders["llama"], device="cpu", seed=9)
    for name in ADAPTERS:
        assert torch.equal(logits_of(again, name), logits_of(pair, name))
        assert not torch.equal(logits_of(again, name), logits_of(again.of(name), None))
    asked = []  # (on the first base?, adapter)

    def spy(pair, name, *args, **how):
        asked.append((pair.of(name) is again, name))
        return sample(pair, name, *args, **how)

    monkeypatch.setattr(cascade, "sample", spy)
    problems = load_problems("congruence", "test", 3)
    result = cascade.evaluate(again, problems, problems[:2], max_tokens=4, temperature=0.6, seed=1)
    bare = ["zero-shot A", "zero-shot B", "untrained A>B", "untrained B>A"]
    trained = ["A alone", "cascade A>B", "B alone", "cascade B>A"]
    assert sorted(row["name"] for row in result["rows"]) == sorted(bare + trained)
    counts = [asked.count(x) for x in ((True, None), (False, None), (True, "A"), (False, "B"))]
    wanted = [3, 3, 5, 5]  # a base drafts, answers, and answers shuffled; a policy drafts and answers on validation too
    assert counts == wanted and len(asked) == sum(wanted)


# ---------------------------------------------------------------------------------------------------------------
# What cannot be loaded


def refusal(folder: Path, **how) -> str:
    with pytest.raises(ValueError) as caught:
        load_pair(folder, **how)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def a_tensor_short(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def replaced_by(kind: str, **config):
    model = getattr(transformers, kind)
    return lambda folder: model(model.config_class(vocab_size=119, **config)).save_pretrained(folder)


BERT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BART = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64)
UNFIT = {
    "an unknown family": lambda folder: (folder / "config.json").write_text('{"model_type": "nobody"}'),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a tensor is missing": a_tensor_short,
    "an encoder": replaced_by("BertForMaskedLM", **BERT),
    "encoder and decoder": replaced_by("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2),
    "a decoder of an encoder": replaced_by("BartForConditionalGeneration", **BART),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_base_that_is_no_whole_causal_language_model_is_refused_in_one_line(folders, tmp_path, kind):
    """transformers fills missing tensors with noise; an encoder would see the tokens that it is to predict."""
    UNFIT[kind](shutil.copytree(folders["llama"], tmp_path / "base"))
    refusal(tmp_path / "base", device="cpu")


def test_what_this_machine_cannot_do_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "mps" in refusal(EMBEDDED, four_bit=True, device="mps")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert "pip install bitsandbytes" in refusal(EMBEDDED, four_bit=True, device="cpu")
    if not torch.cuda.is_available():
        assert "cuda" in refusal(EMBEDDED, device="cuda")
