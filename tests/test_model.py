"""model.py: the log-probs that the loss needs, the two adapters, their files, 4-bit, and the embedded base.

Run:  pytest tests/test_model.py
"""

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from conftest import fill_with_noise
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from model import ADAPTERS, EMBEDDED, load_pair, stop_ids, token_logprobs
from reward import load_problems
from rollout import CHALLENGE_PROMPT, DRAFT_PROMPT, NO_SUMMARY, WITHHELD, challenge_prompt, draft_prompt, sample

ROOT = Path(__file__).resolve().parent.parent
# Ragged on both sides; 0 is what token_logprobs pads with, 2 is the end-of-turn id and (in some models) the pad too.
PROMPTS = [[3, 15, 105, 9, 4], [4], [3, 0, 2, 4, 0], [3, 30, 31, 32, 33, 34, 35, 36, 2, 4], [3, 20, 4]]
COMPLETIONS = [[111, 12, 2], [111, 8, 109, 9, 110, 112, 40, 113, 41, 114, 2], [0, 0, 2], [2], [30, 31, 32, 33, 0]]
IDS = torch.tensor([[3, 15, 105, 9, 106, 22, 107, 115, 2, 4, 111, 12, 109, 13]])


def naive_logprobs(model, prompts, completions, temperature=1.0):
    """One full forward per row, every logit, log_softmax, and a loop that looks each token up."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0].float() / temperature  # (T, V)
        logp = logits.log_softmax(-1)
        rows.append(torch.stack([logp[len(prompt) + i - 1, token] for i, token in enumerate(completion)]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, C)


def logits_of(pair, adapter, ids=IDS):
    with torch.no_grad():
        return pair.activate(adapter)(ids, use_cache=False).logits


def snapshot(pair):
    return {name: p.detach().clone() for name, p in pair.model.named_parameters()}


def belongs(name: str) -> str:
    """ "A", "B" or "base", from the name of a parameter alone."""
    return next((a for a in ADAPTERS if name.endswith(f".{a}.weight") and ".lora_" in name), "base")


# ---------------------------------------------------------------------------------------------------------------
# token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("adapter", ["A", "B", None])
def test_token_logprobs_equal_a_naive_full_forward(pair, adapter, temperature):
    model = pair.activate(adapter)
    with torch.no_grad():
        fast = token_logprobs(model, PROMPTS, COMPLETIONS, temperature)
        slow = naive_logprobs(model, PROMPTS, COMPLETIONS, temperature)
    assert fast.shape == slow.shape == (5, 11)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_token_logprobs_are_zero_beyond_each_completion_and_only_there(pair):
    with torch.no_grad():
        logp = token_logprobs(pair.activate("A"), PROMPTS, COMPLETIONS)
    for row, completion in zip(logp, COMPLETIONS, strict=True):
        assert (row[len(completion) :] == 0).all(), "padding would enter the loss"
        assert (row[: len(completion)] < 0).all(), "a completion token (the end-of-turn id, or id 0?) is masked"


def gradient(pair, adapter, logprobs):
    """Gradient of a weighted sum, so that swapped rows or tokens cannot cancel out. One flat vector per adapter."""
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    tensors = list(pair.parameters[adapter].values())
    return [g.clone() for g in torch.autograd.grad((weights * logprobs).sum(), tensors)]


def assert_same_gradient(got, wanted, tolerance=1e-5):
    scale = max(w.abs().max().item() for w in wanted)
    assert scale > 0.1, "nothing is compared"
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradients_equal_those_of_a_naive_full_forward(pair, adapter):
    model = pair.activate(adapter, train=True)
    fast = gradient(pair, adapter, token_logprobs(model, PROMPTS, COMPLETIONS, 0.6))
    slow = gradient(pair, adapter, naive_logprobs(model, PROMPTS, COMPLETIONS, 0.6))
    assert_same_gradient(fast, slow)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 22])
def test_chunks_change_neither_values_nor_gradients(pair, tokens_per_chunk):
    model, budget = pair.activate("B", train=True), 119 * tokens_per_chunk
    whole = token_logprobs(model, PROMPTS, COMPLETIONS, 0.6)
    chunked = token_logprobs(model, PROMPTS, COMPLETIONS, 0.6, logit_budget=budget)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=0)
    assert_same_gradient(gradient(pair, "B", chunked), gradient(pair, "B", whole))


def test_logits_alive_at_once_stay_within_the_budget(pair):
    """The full (B, T, V) logits are what fills a small GPU: the head may see completion tokens only, a few at once."""
    model, calls = pair.activate("A"), []
    hook = model.get_output_embeddings().register_forward_hook(lambda module, args, out: calls.append(out.numel()))
    try:
        with torch.no_grad():
            token_logprobs(model, PROMPTS, COMPLETIONS, logit_budget=119 * 4)
    finally:
        hook.remove()
    assert max(calls) <= 119 * 4, "more logits at once than the budget"
    assert sum(calls) == 119 * sum(map(len, COMPLETIONS)), "logits of prompt or pad positions were computed"


def bigram_model(table: torch.Tensor):
    """A causal LM whose logits after token i are table[i]: what its log-probs must be is known without running it."""
    vocabulary = len(table)
    text = SimpleNamespace(vocab_size=vocabulary)
    return SimpleNamespace(
        device=torch.device("cpu"),
        config=SimpleNamespace(get_text_config=lambda: text),
        get_decoder=lambda: (
            lambda input_ids, use_cache: SimpleNamespace(
                last_hidden_state=torch.nn.functional.one_hot(input_ids, vocabulary).float()
            )
        ),
        get_output_embeddings=lambda: lambda hidden: (hidden @ table.float()).to(table.dtype),  # nothing is trained
    )


def test_each_token_is_scored_by_the_logits_one_position_before_it():
    """By hand: after token i come i + 1 (probability .7) and i + 2 (.3), modulo 5."""
    table = torch.full((5, 5), -1e9)
    for i in range(5):
        table[i, (i + 1) % 5], table[i, (i + 2) % 5] = torch.tensor([0.7, 0.3]).log()
    logp = token_logprobs(bigram_model(table), [[4, 4, 0], [3]], [[1, 3, 4], [0, 1]])
    expected = torch.tensor([[0.7, 0.3, 0.7], [0.3, 0.7, 1.0]]).log()
    torch.testing.assert_close(logp, expected)


def test_temperature_divides_the_logits_once():
    table = torch.tensor([[0.0, 1.0, 3.0]] * 3)
    logp = token_logprobs(bigram_model(table), [[0]], [[1, 2]], temperature=0.5)
    torch.testing.assert_close(logp, torch.tensor([[0.0, 2.0, 6.0]]).log_softmax(-1)[:, 1:])


def test_softmax_runs_in_fp32_even_where_the_model_is_bf16():
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    logp = token_logprobs(bigram_model(table), [[7]], [[11, 12, 13]], temperature=0.6)
    expected = (table[[7, 11, 12]].float() / 0.6).log_softmax(-1)[range(3), [11, 12, 13]]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp[0], expected, atol=1e-6, rtol=0)


def test_token_logprobs_bend_the_logits_where_the_model_does():
    """Gemma 2 caps its final logits in its own forward, which token_logprobs goes around."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=119, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, initializer_range=0.5, final_logit_softcapping=2.0, query_pre_attn_scalar=8,
        bos_token_id=None, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        fast, slow = (f(model, PROMPTS, COMPLETIONS, 0.6) for f in (token_logprobs, naive_logprobs))
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------------------
# The two adapters


def test_a_starts_as_the_base_and_b_does_not():
    fresh = load_pair("tiny", device="cpu")
    assert torch.equal(logits_of(fresh, "A"), logits_of(fresh, None)), "lora_B of A must be 0"
    assert not torch.equal(logits_of(fresh, "B"), logits_of(fresh, None)), "B must differ from step 0"


def test_b_is_drawn_with_the_given_spread():
    for std in (1e-3, 0.05):
        fresh = load_pair("tiny", b_init_std=std, device="cpu")
        drawn = torch.cat([p.flatten() for key, p in fresh.parameters["B"].items() if "lora_B" in key])
        assert drawn.std().item() == pytest.approx(std, rel=0.05) and abs(drawn.mean()) < std / 10


def test_seed_decides_every_tensor_of_both_adapters():
    one, same, other = (load_pair("tiny", seed=s, device="cpu").parameters for s in (3, 3, 4))
    for name in ADAPTERS:
        assert all(torch.equal(one[name][key], same[name][key]) for key in one[name]), "drawn before the seed was set"
        assert any(not torch.equal(one[name][key], other[name][key]) for key in one[name])
    lora_a = [torch.cat([p.flatten() for key, p in one[n].items() if "lora_A" in key]) for n in ADAPTERS]
    assert not torch.equal(*lora_a), "the two policies share their random directions"


def test_adapters_sit_on_every_linear_layer_but_the_head(pair):
    linear = {
        n for n, m in AutoModelForCausalLM.from_pretrained(EMBEDDED).named_modules() if type(m) is torch.nn.Linear
    }
    for name in ADAPTERS:
        adapted = {key.split(".lora_")[0].removeprefix("base_model.model.") for key in pair.parameters[name]}
        assert adapted == linear - {"lm_head"}
        assert {p.shape[0] for key, p in pair.parameters[name].items() if "lora_A" in key} == {16}, "rank"


@pytest.mark.parametrize("adapter", ["A", "B", None])
@pytest.mark.parametrize("train", [True, False])
def test_exactly_the_trained_adapter_requires_grad(pair, adapter, train):
    for before in ("A", "B", None):  # whatever was active before
        pair.activate(before, train=True)
        pair.activate(adapter, train=train)
        wanted = {n for n, _ in pair.model.named_parameters() if train and adapter and belongs(n) == adapter}
        assert {n for n, p in pair.model.named_parameters() if p.requires_grad} == wanted
        assert len(wanted) in (0, 42)


def test_parameters_of_a_pair_are_the_adapters_own_tensors(pair):
    for adapter in ADAPTERS:
        wanted = {n: p for n, p in pair.model.named_parameters() if belongs(n) == adapter}
        assert pair.parameters[adapter].keys() == wanted.keys()
        assert all(p is wanted[n] for n, p in pair.parameters[adapter].items())


def test_activate_puts_the_model_in_the_asked_mode(pair):
    assert pair.activate("A", train=True).training
    model = pair.activate("B")
    assert not any(module.training for module in model.modules())


def test_no_adapter_is_the_plain_base_and_adapters_come_back(pair):
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(IDS, use_cache=False).logits
    before = {name: logits_of(pair, name) for name in ADAPTERS}
    torch.testing.assert_close(logits_of(pair, None), expected, atol=1e-6, rtol=0)
    for name in ADAPTERS:
        assert torch.equal(logits_of(pair, name), before[name]), "activate(None) left the adapters off"
        assert (before[name] - expected).abs().max() > 0.1, "the noise is too small to tell the policies apart"
    assert (before["A"] - before["B"]).abs().max() > 0.1


@pytest.mark.parametrize("adapter, other", [("A", "B"), ("B", "A")])
def test_a_step_of_one_policy_moves_all_of_it_and_nothing_else(fresh_pair, adapter, other):
    pair = fresh_pair
    optimizers = {n: torch.optim.AdamW(pair.parameters[n].values(), lr=1e-2, weight_decay=0.1) for n in ADAPTERS}
    for name in (other, adapter):  # the other one has momentum by now, that must not move it
        before = snapshot(pair)
        token_logprobs(pair.activate(name, train=True), PROMPTS, COMPLETIONS).sum().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
    for key, p in pair.model.named_parameters():
        moved = not torch.equal(p, before[key])
        assert moved == (belongs(key) == adapter), (
            f"{key} {'moved' if moved else 'did not move'} in a step of {adapter}"
        )


# ---------------------------------------------------------------------------------------------------------------
# Saved adapters

FRESH_PROCESS = """
import sys, torch
from pathlib import Path
from model import load_pair
pair = load_pair("tiny", Path(sys.argv[1]), device="cpu")
ids = torch.tensor([eval(sys.argv[2])])
with torch.no_grad():
    out = {name: pair.activate(name)(ids, use_cache=False).logits for name in ("A", "B")}
torch.save(out, sys.argv[3])
"""


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pair.save(folder)
    return folder


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def test_a_fresh_process_loads_the_same_two_policies(pair, saved, tmp_path):
    arguments = [str(saved), repr(IDS[0].tolist()), str(tmp_path / "out.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = torch.load(tmp_path / "out.pt")
    for name in ADAPTERS:
        torch.testing.assert_close(loaded[name], logits_of(pair, name), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_folder_is_a_plain_peft_adapter(pair, saved, name):
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, saved / name).eval()
    with torch.no_grad():
        logits = plain(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, logits_of(pair, name), atol=1e-6, rtol=0)


def test_a_loaded_pair_can_be_trained_on(saved):
    """PEFT's own loading defaults to frozen adapters: a resumed run would go on without learning."""
    pair = load_pair("tiny", saved, device="cpu")
    for name in ADAPTERS:
        before = snapshot(pair)
        optimizer = torch.optim.AdamW(pair.parameters[name].values(), lr=1e-3)
        token_logprobs(pair.activate(name, train=True), PROMPTS, COMPLETIONS).sum().backward()
        optimizer.step()
        moved = {n for n, p in pair.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == pair.parameters[name].keys()


def test_a_loaded_pair_keeps_the_rank_and_scale_it_was_saved_with(tmp_path):
    small = fill_with_noise(load_pair("tiny", rank=4, alpha=24, device="cpu"))
    small.save(tmp_path)
    loaded = load_pair("tiny", tmp_path, device="cpu")  # rank 16, alpha 32 by default
    for name in ADAPTERS:
        assert torch.equal(logits_of(loaded, name), logits_of(small, name))


def edit_config(**changes):
    def damage(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def edit_tensors(change):
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors, sorted(tensors)[0])
        save_file(tensors, folder / "adapter_model.safetensors")

    return damage


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DAMAGE = {
    "no folder": shutil.rmtree,
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "weights cut near the end": cut(WEIGHTS, -100),
    "weights cut in the header": cut(WEIGHTS, 100),
    "weights empty": write(WEIGHTS, b""),
    "weights are garbage": write(WEIGHTS, b"\xff" * 1000),
    "config cut": cut(CONFIG, 40),
    "config empty": write(CONFIG, b""),
    "config not unicode": write(CONFIG, b"\xff\xfe\x00"),
    "config is a list": write(CONFIG, b"[]"),
    "config is null": write(CONFIG, b"null"),
    "config of another rank": edit_config(r=8),
    "config with rank 0": edit_config(r=0),
    "config with a rank in words": edit_config(r="sixteen"),
    "config with an alpha in words": edit_config(lora_alpha="x"),
    "config of fewer layers": edit_config(target_modules=["q_proj"]),
    "config of layers that the base lacks": edit_config(target_modules=["nope"]),
    "config of another adapter type": edit_config(peft_type="IA3"),
    "config of an unknown adapter type": edit_config(peft_type="FOO"),
    "a key renamed": edit_tensors(lambda tensors, key: tensors.update({key + "x": tensors.pop(key)})),
    "a key missing": edit_tensors(lambda tensors, key: tensors.pop(key)),
    "a key too many": edit_tensors(lambda tensors, key: tensors.update(more=torch.zeros(2))),
    "a tensor of another shape": edit_tensors(lambda tensors, key: tensors.update({key: tensors[key][:3].clone()})),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")
def test_a_damaged_adapter_is_a_value_error_of_one_line(damaged, kind):
    """Else PEFT ignores what is missing and the "adapter" is the bare base, or the user reads a stack trace."""
    DAMAGE[kind](damaged / "B")
    with pytest.raises(ValueError) as caught:
        load_pair("tiny", damaged, device="cpu")
    assert len(str(caught.value).splitlines()) == 1, caught.value


DAMAGED_BASE = {
    "no folder": shutil.rmtree,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": cut("model.safetensors", 5000),
    "config cut": cut("config.json", 40),
    "config is a list": write("config.json", b"[]"),
    "config without a model type": write("config.json", b"{}"),
    "an architecture nobody knows": write("config.json", b'{"model_type": "foo"}'),
    "not a language model": write("config.json", b'{"model_type": "vit"}'),
    "tokenizer cut": cut("tokenizer.json", 40),
    "tokenizer without content": write("tokenizer.json", b"{}"),
    "no tokenizer": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    "no chat template": lambda folder: (folder / "chat_template.jinja").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGED_BASE)
def test_a_base_that_cannot_be_read_is_a_value_error_of_one_line(tmp_path, kind):
    folder = tmp_path / "base"
    shutil.copytree(EMBEDDED, folder)
    DAMAGED_BASE[kind](folder)
    with pytest.raises(ValueError) as caught:
        load_pair(folder, device="cpu")
    assert len(str(caught.value).splitlines()) == 1, caught.value


# ---------------------------------------------------------------------------------------------------------------
# 4-bit


@pytest.fixture(scope="module")
def four_bit():
    return fill_with_noise(load_pair("tiny", four_bit=True, device="cpu"))


def test_four_bit_layers_are_really_nf4(four_bit):
    base = [m.base_layer for _, m in four_bit.model.named_modules() if hasattr(m, "base_layer")]
    assert len(base) == 21
    assert all(type(layer) is bitsandbytes.nn.Linear4bit for layer in base), "the base was loaded unquantized"
    assert {layer.weight.quant_type for layer in base} == {"nf4"}
    assert all(p.dtype == torch.float32 for tensors in four_bit.parameters.values() for p in tensors.values())


def dequantized(four_bit):
    """The same policies on an ordinary base whose weights are the 4-bit ones, written out."""
    plain = load_pair("tiny", device="cpu")
    layers = dict(plain.model.named_modules())
    with torch.no_grad():
        for name, layer in four_bit.model.named_modules():
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                weight = copy.deepcopy(layer.weight)  # bitsandbytes may have repacked it for the CPU: undo in the copy
                if getattr(weight.quant_state, "packing_format_for_cpu", False):
                    pytest.fail("the weights were repacked for a kernel without a backward")
                layers[name].weight.copy_(bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state))
        for adapter in ADAPTERS:
            for key, p in plain.parameters[adapter].items():
                p.copy_(four_bit.parameters[adapter][key])
    return plain


def test_four_bit_gradients_after_sampling_are_those_of_the_dequantized_base(four_bit):
    """A forward without gradients must leave the layers able to pass gradients.

    On CPUs with AVX512-BF16 bitsandbytes repacks its weights in the first such forward, for a kernel without a
    backward: the loss then gets no gradient through any base layer, and training is silently wrong.
    """
    reference = dequantized(four_bit)
    four_bit.activate("B")
    with torch.no_grad():
        four_bit.model.get_base_model()(IDS, use_cache=False)  # as sampling does
    got, wanted = (
        gradient(p, "B", token_logprobs(p.activate("B", train=True), PROMPTS, COMPLETIONS))
        for p in (four_bit, reference)
    )
    assert_same_gradient(got, wanted, tolerance=1e-4)


def test_four_bit_samples_and_trains_every_tensor(four_bit):
    rollouts = sample(four_bit, "B", PROMPTS, n=2, max_tokens=6)
    logp = token_logprobs(four_bit.activate("B", train=True), rollouts.prompts, rollouts.completions)
    logp.sum().backward()
    for key, p in four_bit.parameters["B"].items():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, f"{key} does not learn"
        p.grad = None
    assert all(p.grad is None for p in four_bit.parameters["A"].values())


# ---------------------------------------------------------------------------------------------------------------
# End-of-turn ids


def stop_source(eos):
    text = SimpleNamespace(eos_token_id=eos)
    return SimpleNamespace(eos_token_id=eos, get_text_config=lambda: text)


def plain_tokenizer(eos, special=()):
    """Ids are characters; a turn ends with "#", which is special or not."""
    template = lambda turns, tokenize, add_generation_prompt=False: "".join(turn["content"] + "#" for turn in turns)  # noqa: E731
    encode = lambda text, add_special_tokens: [ord(c) for c in text]  # noqa: E731
    added = {ord(c): SimpleNamespace(content=c, special=True) for c in special}
    return SimpleNamespace(eos_token_id=eos, apply_chat_template=template, encode=encode, added_tokens_decoder=added)


@pytest.mark.parametrize(
    "tokenizer, config, generation, union",
    [
        (7, 7, 7, {7}),
        (7, 8, 9, {7, 8, 9}),  # each family hides one elsewhere
        (7, None, [8, 9], {7, 8, 9}),
        (None, [0, 3], None, {0, 3}),  # 0 is an id, not "nothing"
        (0, None, None, {0}),
        (5, [5, 6], [6, 5], {5, 6}),
    ],
)
def test_stop_ids_are_the_union_of_all_three_places(tokenizer, config, generation, union):
    model = SimpleNamespace(config=stop_source(config), generation_config=SimpleNamespace(eos_token_id=generation))
    assert stop_ids(model, plain_tokenizer(tokenizer)) == union


def test_stop_ids_hold_those_of_a_nested_text_config():
    """Qwen3.5 and Gemma 4 are multimodal: the language model's config lies inside."""
    config = SimpleNamespace(eos_token_id=None, get_text_config=lambda: SimpleNamespace(eos_token_id=[5, 6]))
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=None))
    assert stop_ids(model, plain_tokenizer(7)) == {5, 6, 7}


def test_stop_ids_hold_the_special_token_that_the_template_ends_a_turn_with():
    """A folder without generation_config.json would let Gemma talk on past <end_of_turn>."""
    model = SimpleNamespace(config=stop_source(1), generation_config=SimpleNamespace(eos_token_id=1))
    assert stop_ids(model, plain_tokenizer(1, special="#")) == {1, ord("#")}
    assert stop_ids(model, plain_tokenizer(1)) == {1}, "an ordinary character is no end of turn"


def test_a_model_that_could_never_stop_is_refused():
    model = SimpleNamespace(config=stop_source(None), generation_config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(ValueError, match="end-of-turn"):
        stop_ids(model, plain_tokenizer(None))


# ---------------------------------------------------------------------------------------------------------------
# The embedded base


def test_embedded_base_is_small():
    files = [f for f in EMBEDDED.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 2_000_000, "it travels inside the repository"


def test_prompts_hold_no_unknown_token(pair):
    tokenizer = pair.tokenizer
    summaries = [f"{i:02d}" for i in range(23)] + [NO_SUMMARY, WITHHELD]
    problems = [p for split in ("train", "validation", "test") for p in load_problems("congruence", split)]
    for i, problem in enumerate(problems):
        assert tokenizer.unk_token_id not in draft_prompt(tokenizer, problem.question), problem
        summary = summaries[i % len(summaries)]
        assert tokenizer.unk_token_id not in challenge_prompt(tokenizer, problem.question, summary), (problem, summary)


def test_a_prompt_is_one_user_turn_with_the_assistant_to_answer(pair):
    ids, tokenizer = draft_prompt(pair.tokenizer, "14x = 09 (mod 19)"), pair.tokenizer
    turn = DRAFT_PROMPT.replace("{problem}", "14x = 09 (mod 19)")
    assert tokenizer.decode(ids) == f"<|user|>{turn}<|end|><|assistant|>"


RESPONSES = [
    "<think>04:06;05:17;06:09;</think>06<answer>07</answer>",
    "<think>12:04;13:17;14:11=</think>13<answer>14</answer>",
    "<think></think>06<answer>07</answer>",
    "11x = 03 (mod 19)",
    NO_SUMMARY,
    WITHHELD,
]


@pytest.mark.parametrize("text", RESPONSES)
def test_tokens_put_side_by_side_give_the_text_back(pair, text):
    ids = pair.tokenizer.encode(text, add_special_tokens=False)
    assert pair.tokenizer.unk_token_id not in ids
    assert pair.tokenizer.decode(ids) == text
    assert "".join(pair.tokenizer.decode([i]) for i in ids) == text
    assert pair.tokenizer.encode(pair.tokenizer.decode(ids), add_special_tokens=False) == ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_tags_survive_decoding(pair, skip_special_tokens):
    """As special tokens they would vanish with skip_special_tokens, and every reward would be 0."""
    ids = pair.tokenizer.encode(RESPONSES[0], add_special_tokens=False)
    assert pair.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) == RESPONSES[0]


def test_every_two_digit_number_tag_and_instruction_is_one_token(pair):
    pieces = [f"{i:02d}" for i in range(100)] + ["<think>", "</think>", "<answer>", "</answer>", NO_SUMMARY, WITHHELD]
    pieces += [DRAFT_PROMPT.removeprefix("{problem}"), CHALLENGE_PROMPT.split("{problem}")[1].split("{summary}")[0]]
    assert all(len(pair.tokenizer.encode(piece, add_special_tokens=False)) == 1 for piece in pieces)


def test_embedded_tokenizer_is_the_one_its_recipe_makes(pair):
    """A word changed in a prompt turns into unknown tokens unless tiny/make.py is run again."""
    spec = importlib.util.spec_from_file_location("make", EMBEDDED / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    made = make.make_tokenizer()
    assert made.get_vocab() == pair.tokenizer.get_vocab(), "run tiny/make.py again: its tokens are out of step"
    assert made.chat_template == pair.tokenizer.chat_template
    assert pair.model.config.vocab_size == len(made)
    prompt = CHALLENGE_PROMPT.replace("{problem}", "14x = 09 (mod 19)").replace("{summary}", "06")
    assert made.encode(prompt) == pair.tokenizer.encode(prompt)
    assert stop_ids(pair.model.get_base_model(), pair.tokenizer) == pair.stop_ids == {made.eos_token_id}


# ---------------------------------------------------------------------------------------------------------------
# Bases that look in order and are not


def write_base(folder: Path, **changes):
    shutil.copytree(EMBEDDED, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def test_dropout_in_the_config_of_a_base_is_left_out(tmp_path):
    """The scorer runs in train mode, the sampler does not: with dropout they would be two policies."""
    pair = fill_with_noise(load_pair(write_base(tmp_path / "base", attention_dropout=0.3), device="cpu"))
    out = sample(pair, "A", PROMPTS, n=2, max_tokens=8)
    scored = token_logprobs(pair.activate("A", train=True), out.prompts, out.completions)
    for row, logprobs in zip(scored, out.logprobs, strict=True):
        assert logprobs == pytest.approx(row[: len(logprobs)].tolist(), abs=5e-5)


def raising_template(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")


def deaf_template(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[0].text }}{% endfor %}<|end|>")


def stray_token(folder):
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 500, "content": "<stray>"})
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")


def drop_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edited(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")

    return edit


@pytest.mark.parametrize(
    "damage, says",
    [
        (raising_template, "no system turn"),
        (deaf_template, "chat template"),
        (stray_token, "no embedding"),
        (drop_tensor, "lacks weights"),
        (edited(intermediate_size=128), "other shapes"),
        (edited(hidden_size="64"), "hidden_size"),
        (edited(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized already"),
    ],
)
def test_a_base_that_is_not_in_order_is_refused_in_one_line(tmp_path, damage, says):
    folder = write_base(tmp_path / "base")
    damage(folder)
    with pytest.raises(ValueError, match=says) as caught:
        load_pair(folder, device="cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_a_family_that_scales_its_logits_is_refused(tmp_path):
    """Its log-probs, taken from the LM head, would not be those of the policy that sampled."""
    folder = write_base(tmp_path / "base")
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=119, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, initializer_range=0.5, logits_scaling=8.0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(ValueError, match="logits"):
        load_pair(folder, device="cpu")


@pytest.mark.parametrize("name", ["./nope", "/nope", "a/b/c", "nope", "../nope"])
def test_a_missing_folder_is_not_taken_for_a_hub_id(name):
    with pytest.raises(ValueError, match="no base model folder"):
        load_pair(name, device="cpu")
