"""A frozen base, in 4-bit on a GPU, two LoRA adapters A and B on it (or each on a base of its own), the
log-probabilities that the loss needs, and what all of it takes of a card's memory, known before anything is loaded.

Shape alphabet of the whole project: B rows, T tokens, P prompt, C longest completion, V vocabulary, N group, D width,
M completion tokens of all rows together; a lower-case letter is one chunk or micro-batch of its upper case.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

# PEFT imports bitsandbytes, which reports at import that an optional CPU kernel is missing; 4-bit works without it.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in record.msg)

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

ADAPTERS = ("A", "B")  # the two policies; also the names of their folders
EMBEDDED = Path(__file__).resolve().parent / "tiny"  # the base called "tiny"
READING_ERRORS = (  # what transformers and PEFT raise where a folder is not in order
    OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, SafetensorError,
    StrictDataclassError, TemplateError, re.error,
)  # fmt: skip
LOGIT_BUDGET = 2**26  # floats of logits alive at once in token_logprobs: 256 MiB in fp32, about 440 tokens at V = 151k


@dataclass(eq=False)
class Pair:
    """The policies that stand on one base. With two bases each is a Pair of one policy, and `rival` is the other.

    `parameters[name]` holds adapter `name`'s tensors by name, fixed at creation: an optimizer must never be built by
    filtering on requires_grad, which changes whenever an adapter is activated.
    """

    model: PeftModel
    tokenizer: object
    stop_ids: frozenset[int]  # every id that ends a turn; a completion keeps the one it stopped at
    parameters: dict[str, dict[str, torch.nn.Parameter]]
    device: str = "cpu"  # where the model computes; of two bases, the one whose turn it is
    rival: Pair | None = field(default=None, repr=False)

    def of(self, adapter: str | None) -> Pair:
        """The Pair on whose base `adapter` stands: its model, tokenizer and stop ids. None is this Pair's bare base."""
        return self if adapter is None or adapter in self.parameters else self.rival

    def activate(self, adapter: str | None, train: bool = False) -> PreTrainedModel:
        """The causal LM with exactly this adapter switched on (None: the bare base), ready to sample or to train.

        PEFT's set_adapter() also flips requires_grad of every adapter, and silently: so it is set by hand, last.
        Train mode switches gradient checkpointing on (and with it the KV cache off), nothing else: there is no dropout.
        """
        pair = self.of(adapter)
        if adapter is None:
            pair.model.base_model.disable_adapter_layers()
        else:
            pair.model.base_model.enable_adapter_layers()
            pair.model.base_model.set_adapter(adapter)
        for half in filter(None, (pair, pair.rival)):
            for name, tensors in half.parameters.items():
                for tensor in tensors.values():
                    tensor.requires_grad_(train and name == adapter)
        if pair.rival and pair.model.device.type != "meta":  # two bases take turns on the card
            pair.rival.model.to("cpu")
            pair.model.to(pair.device)
        pair.model.train(train)
        return pair.model.get_base_model()

    def save(self, folder: Path) -> None:
        """Write folder/A and folder/B, two plain PEFT folders."""
        for half in filter(None, (self, self.rival)):
            half.model.save_pretrained(folder, selected_adapters=list(half.parameters))


# ---------------------------------------------------------------------------------------------------------------
# Loading. The many checks turn what would be a silent fault, or a stack trace, into a ValueError of one line.


def is_embedded(base: str | Path) -> bool:
    return base == "tiny" or Path(base).resolve() == EMBEDDED


def default_device(base: str | Path) -> str:
    """cuda, else Apple's mps, else cpu. The embedded base is too small for mps to pay."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and not is_embedded(base) else "cpu"


def check_device(device: str) -> None:
    """Raise ValueError with one line where PyTorch cannot compute on `device`."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        why = "has no CUDA device that it can use" if torch.version.cuda else "is installed without CUDA"
        raise ValueError(f"--device {device}: PyTorch here {why}; try --device cpu")
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        raise ValueError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # CUDA graphs, for one, are captured on the current device
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: only Apple's processors have it; try --device cpu")


def default_four_bit(base: str | Path, device: str) -> bool:
    """4-bit is what makes a real model fit a consumer card. It saves memory, not time."""
    return device.startswith("cuda") and not is_embedded(base)


def load_pair(
    base: str | Path,
    run: Path | None = None,
    *,
    model_b: str | Path | None = None,
    rank: int = 16,
    alpha: int = 32,
    b_init_std: float = 1e-3,
    four_bit: bool | None = None,
    checkpointing: bool = False,
    device: str | None = None,
    meta: bool = False,
    seed: int = 0,
) -> Pair:
    """Load a base (hub id or folder) with fresh adapters A and B, or those of `run`; with `model_b`, B on that base.

    A starts as PEFT's standard init (lora_B = 0: the base itself), B with lora_B drawn from N(0, b_init_std^2), so
    the two differ from step 0. Adapters are fp32 whatever the base is in; those of `run` keep their rank and alpha.
    device None: `default_device`. four_bit None: `default_four_bit`. checkpointing: recompute each layer in the
    backward pass. meta: from the config file alone, without weights, for `estimate` of that device.
    Raises ValueError with one line for a device that is not there, for a base or an adapter that cannot be read or is
    not what training needs, and for a base that the device cannot hold.
    """
    device = device or default_device(base)
    if not meta:
        check_device(device)
    torch.manual_seed(seed)  # before the adapters exist, or lora_A would differ between runs of one seed
    halves = []
    for half_base, names in [(base, ("A",)), (model_b, ("B",))] if model_b else [(base, ADAPTERS)]:
        quantize = default_four_bit(half_base, device) if four_bit is None else four_bit
        model, tokenizer = load_base(half_base, quantize, device, meta)
        peft_model, parameters = add_adapters(model, names, run, rank, alpha, b_init_std)
        if checkpointing:  # the non-reentrant kind: the reentrant one gives a frozen base's adapters no gradient
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # transformers 5.24 renamed it
        stops = frozenset() if meta else stop_ids(model, tokenizer)
        halves.append(Pair(peft_model, tokenizer, stops, parameters, device))
        if model_b and not meta:
            peft_model.to("cpu")  # until its turn
    if model_b:
        halves[0].rival, halves[1].rival = halves[1], halves[0]
    for name in ADAPTERS:  # what must be true after every load, or a policy would silently never learn
        half = halves[0].of(name)
        half.activate(name, train=True)
        assert all(p.requires_grad and p.dtype == torch.float32 for p in half.parameters[name].values()), name
        assert sum(p.requires_grad for p in half.model.parameters()) == len(half.parameters[name]) > 0, name
    return halves[0]


def load_base(base: str | Path, four_bit: bool, device: str, meta: bool) -> tuple[PreTrainedModel, object]:
    """(causal LM in evaluation mode, its tokenizer); meta: (it without weights, None). ValueError as load_pair."""
    base = str(EMBEDDED if base == "tiny" else base)
    if not Path(base).is_dir() and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", base):
        raise ValueError(f"no base model folder {base!r} (give a folder, a hub id owner/name, or 'tiny')")
    if four_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("4-bit needs the package bitsandbytes: pip install bitsandbytes, or say --no-4bit")
    if four_bit and device == "mps":
        raise ValueError("4-bit does not run on Apple's mps here: say --no-4bit, or --device cpu")
    # fp32 on CPU, where bf16 is slow, and where it makes every equality test meaningful.
    dtype = torch.float32 if device == "cpu" or is_embedded(base) else torch.bfloat16
    quantization = None
    if four_bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,  # bitsandbytes' own default is fp32: slow on a GPU
        )
    silence_third_parties(device)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ValueError("it is quantized already; give the full-precision base, it is quantized while it loads")
        for part in (config, config.get_text_config()):  # with dropout, training would score what nobody sampled
            for key in [k for k, v in vars(part).items() if re.search("drop|jitter", k) and isinstance(v, float)]:
                setattr(part, key, 0.0)
        if config.model_type == "gemma4":  # text alone: its towers for images and sound would fill the card for nothing
            config.vision_config = config.audio_config = None
            config.image_token_id = config.video_token_id = config.audio_token_id = -1  # a text may spell them
            ignored = [r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\."]  # or each tensor is reported
            transformers.Gemma4ForConditionalGeneration._keys_to_ignore_on_load_unexpected = ignored
        if meta:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            for module in model.modules():
                if four_bit and type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
                    module.__class__ = FourBitStandIn
            return model, None
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left", trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            base,
            config=config,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantization,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{base} does not fit this card: choose a smaller base; --estimate says what fits") from error
    except READING_ERRORS as error:
        shapes = "its weights have other shapes than its config.json says"
        why = shapes if "mismatched_sizes" in str(error) else first_line(error)
        raise ValueError(f"cannot load the base model {base!r}: {why}") from error
    if not tokenizer.encode("1", add_special_tokens=False):  # what the loader makes of a folder without tokenizer.json
        raise ValueError(f"the tokenizer of {base!r} knows no tokens; is tokenizer.json missing?")
    if tokenizer.chat_template is None:
        raise ValueError(f"{base!r} has no chat template; Agon's prompts need an instruction-tuned model")
    if max(tokenizer.get_vocab().values()) >= model.get_input_embeddings().num_embeddings:
        raise ValueError(f"the tokenizer of {base!r} has ids that its model has no embedding for")
    if report["missing_keys"]:  # transformers fills them with noise, and only reports it
        raise ValueError(f"{base!r} lacks weights of its model, {min(report['missing_keys'])} among them")
    if not all(getattr(module, "is_causal", True) for module in model.get_decoder().modules()):
        raise ValueError(f"{base!r} is no causal language model: its tokens see those that come after them")
    # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first inference for a kernel that has no
    # backward: after sampling once, gradients would stop at every frozen layer, without an error.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    # Some families do more to their logits than `head_logprobs` knows (Granite and Cohere scale them): compare it with
    # the model's own forward, once, on any three tokens.
    ids = torch.tensor([[0, 1, 2]], device=model.device)  # (1, 3)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()  # (3, V)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]  # (3, D)
    gap = head_logprobs(model, hidden, ids[0], 1.0) - logits.log_softmax(-1).gather(-1, ids.T)[:, 0]  # (3,)
    if gap.abs().max() > 0.5:  # bf16 alone makes 0.1
        raise ValueError(f"{base!r} does more to its logits than is known here; choose another family")
    return model, tokenizer


def silence_third_parties(device: str) -> None:
    """Noise beside our own output, silenced by name."""
    transformers_logging.disable_progress_bar()  # "Loading weights"
    renamed = "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated"  # PEFT uses the old names
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    loader = logging.getLogger("transformers.modeling_utils")  # a table of what fits not; load_base says it in a line
    loader.addFilter(lambda record: "LOAD REPORT" not in record.msg)
    hub = logging.getLogger("huggingface_hub.utils._http")  # without a network: ten lines of retries, then the error
    hub.addFilter(lambda record: "thrown while requesting" not in record.msg and "Retrying in" not in record.msg)
    if not device.startswith("cuda"):  # Qwen3.5's kernels that exist for CUDA alone; there the advice is worth reading
        kernels = logging.getLogger("transformers.integrations.hub_kernels")
        kernels.addFilter(lambda record: "is falling back to its reference" not in record.msg)


def add_adapters(model: PreTrainedModel, names: Sequence[str], run, rank: int, alpha: int, b_init_std: float):
    """Put fresh adapters `names` on the base, then fill them from `run`, if given -> (PeftModel, their tensors).

    PeftModel.from_pretrained would freeze what it loads and ignore missing keys: so the adapters are built first, and
    a saved file must fill exactly the tensors that are there.
    """
    fresh = dict(r=rank, lora_alpha=alpha, target_modules=lora_targets(model), lora_dropout=0.0)
    configs = {name: read_adapter_config(run / name) if run else LoraConfig(**fresh) for name in names}
    try:
        peft_model = get_peft_model(model, configs[names[0]], adapter_name=names[0])
        for name in names[1:]:
            peft_model.add_adapter(name, configs[name])
    except READING_ERRORS as error:
        whose = run or "a new pair"
        raise ValueError(f"cannot put the adapters of {whose} on the base: {first_line(error)}") from error
    parameters = {
        name: {key: p for key, p in peft_model.named_parameters() if f".{name}." in key and "lora_" in key}
        for name in names
    }
    for name in names:
        if run:
            load_adapter(peft_model, name, run / name)
        elif name == "B":
            for key, p in parameters["B"].items():
                if "lora_B" in key:
                    torch.nn.init.normal_(p, 0.0, b_init_std)
    assert len({len(tensors) for tensors in parameters.values()}) == 1
    return peft_model, parameters


def lora_targets(model: PreTrainedModel) -> str:
    """A pattern for every linear layer of the text decoder, for PEFT's target_modules.

    PEFT's own "all-linear" would also adapt the towers for images and sound of a multimodal base, which never see a
    gradient here; and a saved list of bare names would, when the folder is loaded on the whole model.
    """
    decoder = model.get_decoder()
    (prefix,) = [name for name, module in model.named_modules() if module is decoder]
    linear = {name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, torch.nn.Linear)}
    return rf"{re.escape(prefix)}\.(?:.+\.)?(?:{'|'.join(sorted(linear))})"


def stop_ids(model: PreTrainedModel, tokenizer) -> frozenset[int]:
    """Every id that ends a turn: each family hides one elsewhere.

    Gemma's tokenizer names <eos>, its generation config the end of a turn; Qwen3.5's config names <|endoftext|> alone.
    Where no file names it, the chat template shows it: it is the special token after an assistant's words.
    Raises ValueError for a template that fails or leaves the words out, and where there is no such id.
    """
    found: set[int] = set()
    for source in (tokenizer, model.config, model.config.get_text_config(), model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "words"}]
    try:
        asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("words")[2]
    except READING_ERRORS as error:
        raise ValueError(f"the chat template of the base does not work: {first_line(error)}") from error
    if "Hi" not in asked:
        raise ValueError("the chat template of the base leaves the user's words out; prompts here are plain text")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found.update(special & set(tokenizer.encode(tail, add_special_tokens=False)[:1]))
    if not found:
        raise ValueError("the model names no end-of-turn id; its completions would never stop")
    return frozenset(found)


def read_adapter_config(folder: Path) -> LoraConfig:
    """The adapter's saved settings. Raises ValueError where there are none, or others than Agon writes."""
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"no adapter in {folder} (expected adapter_config.json and adapter_model.safetensors)")
    try:
        saved = LoraConfig.from_pretrained(folder)
    except READING_ERRORS as error:
        raise ValueError(f"damaged adapter config in {folder}: {first_line(error)}") from error
    if not isinstance(saved, LoraConfig) or saved.use_rslora or saved.use_dora or saved.init_lora_weights is not True:
        raise ValueError(f"the adapter in {folder} is not the plain LoRA that Agon writes")
    return saved


def load_adapter(peft_model: PeftModel, name: str, folder: Path) -> None:
    """Fill adapter `name` from a PEFT folder. Raises ValueError unless every tensor is there, finite, and none else."""
    expected = {k: v.shape for k, v in get_peft_model_state_dict(peft_model, adapter_name=name).items()}
    try:
        saved = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"damaged or missing adapter weights in {folder}: {first_line(error)}") from error
    if {k: v.shape for k, v in saved.items()} != expected:
        raise ValueError(f"the adapter in {folder} does not fit this base: {len(expected)} tensors expected")
    if not all(tensor.isfinite().all() for tensor in saved.values()):
        raise ValueError(f"the adapter in {folder} holds values that are not finite")
    set_peft_model_state_dict(peft_model, saved, adapter_name=name)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cache_argument(model: PreTrainedModel) -> str:
    """The forward's name for its KV cache: transformers 5.24 renamed past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# ---------------------------------------------------------------------------------------------------------------
# Log-probabilities


def token_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
    logit_budget: int = LOGIT_BUDGET,
) -> torch.Tensor:
    """log pi(token | everything before it) at `temperature`, (B, C) float32, zero beyond each completion's length.

    Ids in, never text: decoding and encoding again may give other ids than those that were sampled. Each row is
    prompt + completion, right-padded: under a causal mask no real token can see a pad that comes after it, so neither
    an attention mask nor shifted positions are needed, and pad = eos cannot matter. The temperature is the sampler's:
    dividing by any other would score a policy that nobody sampled from. top-p is not mirrored (as in TRL).

    The full (B, T, V) logits never exist: only hidden states that predict a completion token reach the LM head, in
    chunks.
    """
    lengths = [len(c) for c in completions]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)  # (B, T)
    predicts = torch.zeros(len(prompts), width, dtype=torch.bool)  # (B, T) does position t predict a completion token?
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(p) + len(c)] = torch.tensor([*p, *c])
        predicts[i, len(p) - 1 : len(p) + len(c) - 1] = True  # logits at t score token t + 1: hence the - 1
    positions = predicts.flatten().nonzero()[:, 0].to(model.device)  # (M,) of B * T, row-major
    targets = torch.cat([torch.tensor(c, dtype=torch.long) for c in completions]).to(model.device)  # (M,) likewise

    hidden = model.get_decoder()(input_ids=ids.to(model.device), use_cache=False).last_hidden_state  # (B, T, D)
    hidden = hidden.flatten(0, 1)[positions]  # (M, D)
    flat = head_logprobs(model, hidden, targets, temperature, logit_budget)  # (M,)
    in_completion = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, C) from lengths alone
    out = flat.new_zeros(in_completion.numel())  # (B * C,)
    return out.index_put((in_completion.flatten().nonzero()[:, 0].to(model.device),), flat).view(in_completion.shape)


def head_logprobs(model: PreTrainedModel, hidden, targets, temperature: float, logit_budget: int = LOGIT_BUDGET):
    """log pi of each target from the decoder's hidden state one position before it, in chunks: (M, D), (M,) -> (M,)."""
    text = model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)  # Gemma bends its logits
    size = max(1, logit_budget // text.vocab_size)  # tokens per chunk
    return HeadLogprobs.apply(hidden, targets, model.get_output_embeddings(), temperature, softcap, size)


def next_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of the next token from the decoder's hidden state, as the sampler needs them: (B, D) -> (B, V) float32."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    logits = model.get_output_embeddings()(hidden).float()  # (B, V)
    return torch.tanh(logits / softcap) * softcap if softcap else logits


class HeadLogprobs(torch.autograd.Function):
    """From hidden states to log-probs through a frozen LM head, one chunk of logits alive at a time.

    z = head(h) / temperature, log pi = z_t - logsumexp(z). One token's log-prob depends on its own hidden state alone,
    so its gradient is one vector of D numbers, W^T (onehot_t - softmax(z)) / temperature. Taken while the logits of the
    chunk are there, it spares the backward pass both keeping them and computing them again.
    """

    @staticmethod
    def forward(ctx, hidden, targets, head, temperature: float, softcap: float | None, size: int):
        logprobs, slopes = [], []
        for h, t in zip(hidden.split(size), targets.split(size), strict=True):  # (m, D), (m,)
            logits = slope = bend = None  # the last chunk's must go before this one's come; the rest works in place
            logits = head(h).float()  # (m, V)
            if softcap:
                logits = logits.div_(softcap).tanh_()
                bend = 1 - logits**2  # (m, V) the cap's derivative
                logits = logits.mul_(softcap)
            logits = logits.div_(temperature)
            logits -= logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, t[:, None])  # (m, 1)
            total = logits.exp_().sum(-1, keepdim=True)  # (m, 1)
            logprobs.append((chosen - total.log())[:, 0])  # (m,)
            if ctx.needs_input_grad[0]:
                slope = logits.div_(-total)  # (m, V) -softmax
                slope.scatter_add_(-1, t[:, None], torch.ones_like(total)).div_(temperature)
                if softcap:
                    slope *= bend
                slopes.append(slope.to(h.dtype) @ head.weight)  # (m, D)
        ctx.save_for_backward(*slopes)
        return torch.cat(logprobs)  # (M,)

    @staticmethod
    def backward(ctx, gradient):  # (M,)
        slope = torch.cat(ctx.saved_tensors)  # (M, D)
        return (gradient[:, None] * slope).to(slope.dtype), None, None, None, None, None


# ---------------------------------------------------------------------------------------------------------------
# Memory, known before the run: the real model code on PyTorch's "meta" device, where tensors have a shape but no data,
# counts what any family keeps for its backward pass without a formula for each. Attention and 4-bit layers would
# take another path there: `fused_attention` and `FourBitStandIn` mend that. Read `estimate` first.


class PeakMemory(TorchDispatchMode):
    """While active: `now`, the bytes of meta tensors made since and still alive, and `peak`, the most there were."""

    def __init__(self, existing: Sequence[torch.Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.known = {t.untyped_storage()._cdata for t in existing}  # counted elsewhere; views of them are free

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:  # "is any token masked?": there is no data to look at
            return True
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@contextmanager
def fused_attention() -> Iterator[None]:
    """On "meta", PyTorch would write the (B, heads, T, T) attention scores out; every real device has a fused kernel.

    A patch, not a TorchFunctionMode: those are not in force while the backward pass recomputes a layer.
    """
    functional, fused = torch.nn.functional, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    original = functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if enable_gqa:
            k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))  # the shape that counts, without a copy
        return fused(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


class WrittenOut(torch.autograd.Function):
    """x @ W^T as bitsandbytes does it: the 4-bit W is dequantised in full for the moment, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ torch.empty_like(weight).t()  # (..., out)

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty_like(ctx.saved_tensors[0]), None  # (..., in)


class FourBitStandIn(torch.nn.Linear):
    """bitsandbytes' Linear4bit as memory sees it: 4 bits a weight, a byte of scale per 64, an fp32 per 256 of those."""

    BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = WrittenOut.apply(x, self.weight).clone()  # PEFT clones here too
        return out if self.bias is None else out + self.bias


@dataclass
class Memory:
    """Bytes of the device that a step takes, from `estimate`. Sampling and update take turns: the larger one counts."""

    weights: int  # the base
    adapters: int
    optimizer: int  # AdamW's two moments of both adapters, and the gradients of one
    kv_cache: int  # of all rows that decode at once, at their full length
    decoding: int  # the rest of sampling: prefill, or one token's activations and probabilities
    activations: int  # of one micro-batch, beside the logits
    logits: int  # one chunk of them, and its gradient

    @property
    def sampling(self) -> int:
        return self.kv_cache + self.decoding

    @property
    def update(self) -> int:
        return self.activations + self.logits

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.optimizer + max(self.sampling, self.update)


def nbytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def base_bytes(pair: Pair) -> int:
    quantized = {m.weight for m in pair.model.modules() if isinstance(m, FourBitStandIn)}
    frozen = [p for name, p in pair.model.named_parameters() if ".lora_" not in name]  # tied weights come once
    return int(sum(p.numel() * (FourBitStandIn.BYTES if p in quantized else p.element_size()) for p in frozen))


@lru_cache  # a plan asks again
def sampling_memory(pair: Pair, adapter: str, rows: int, prompt: int, completion: int, rehearse: Callable):
    """(bytes of the KV cache, bytes beside it) when `rows` rows with different prompts decode their last token."""
    model = pair.activate(adapter)
    with torch.no_grad(), PeakMemory([*model.parameters(), *model.buffers()]) as memory, fused_attention():
        kv_cache = nbytes(rehearse(model, rows, prompt, completion))
    return kv_cache, memory.peak - kv_cache


@lru_cache
def update_memory(pair: Pair, adapter: str, rows: int, prompt: int, completion: int) -> tuple[int, int]:
    """(bytes of activations, bytes of one chunk of logits) of one micro-batch, forward and backward."""
    model, text = pair.activate(adapter, train=True), pair.model.config.get_text_config()
    for p in pair.parameters[adapter].values():
        p.grad = torch.zeros_like(p)  # there from the second micro-batch on; `estimate` counts them with the optimizer
    existing = [*model.parameters(), *model.buffers(), *(p.grad for p in pair.parameters[adapter].values())]
    size = min(rows * completion, max(1, LOGIT_BUDGET // text.vocab_size))  # tokens per chunk
    hidden = torch.zeros(size, text.hidden_size, dtype=model.dtype, device="meta", requires_grad=True)  # (m, D)
    with PeakMemory([*existing, hidden]) as logits:
        head_logprobs(model, hidden, torch.zeros(size, dtype=torch.long, device="meta"), 1.0).sum().backward()
    with PeakMemory(existing) as memory, fused_attention():
        token_logprobs(model, [[0] * prompt] * rows, [[0] * completion] * rows).sum().backward()
    return max(0, memory.peak - logits.peak), logits.peak


def estimate(pair: Pair, rows: int, micro_rows: int, prompt: int, completion: int, rehearse: Callable) -> Memory:
    """Memory of one step of `pair`, which load_pair(..., meta=True) built; with two bases, of the turn that takes more.

    rows decode at once, micro_rows go through one forward and backward; prompt and completion are the tokens of the
    longest row. rehearse(model, rows, prompt, completion) does what the sampler does and returns its cache's tensors.
    Not counted: the driver's own context, some hundred MB on a GPU, what CUDA graphs keep (the tensors of one decode
    step, once more), and the gaps that PyTorch's allocator leaves.
    Raises RuntimeError where the model uses an operation that the meta device lacks.
    """
    moments = 2 * sum(nbytes(pair.of(name).parameters[name].values()) for name in ADAPTERS)
    turns = []
    for name in ADAPTERS if pair.rival else ("A",):
        half = pair.of(name)
        kv_cache, decoding = sampling_memory(half, name, rows, prompt, completion, rehearse)
        activations, logits = update_memory(half, name, micro_rows, prompt, completion)
        there = [half, half.rival] if half.rival and half.device == "cpu" else [half]  # no card: both bases stay there
        adapters = sum(nbytes(tensors.values()) for one in there for tensors in one.parameters.values())
        optimizer = moments + nbytes(half.parameters[name].values())
        turns.append(Memory(sum(map(base_bytes, there)), adapters, optimizer, kv_cache, decoding, activations, logits))
    return max(turns, key=lambda memory: memory.total)


def free_memory(device: str) -> int:
    """Bytes that the device has free. Raises ValueError where PyTorch cannot tell."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0]
    if device == "mps" and torch.backends.mps.is_available():
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device == "cpu" and Path("/proc/meminfo").exists():
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    raise ValueError(f"how much memory {device} has free is not known here: say --memory GB")


def peak_memory(device: str) -> int | None:
    """Most bytes in use so far: on CUDA those of our tensors, on a Linux CPU all of the process; None: not known."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if device == "cpu" and Path("/proc/self/status").exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return None
