"""What the test files share: the embedded pair, with BOTH adapters filled with noise.

A fresh adapter A is the base itself (lora_B = 0), and then a test that mixes up A, B and the base cannot fail. Noise in
both makes the three policies different everywhere.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from model import ADAPTERS, Pair, load_pair

torch.set_num_threads(1)  # the models are tiny: one thread is fastest, and the sums come out the same everywhere


def fill_with_noise(pair: Pair, std: float = 0.03, seed: int = 1) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ADAPTERS:
            for key, p in pair.parameters[name].items():
                if "lora_B" in key:
                    p.copy_(std * torch.randn(p.shape, generator=generator))
    return pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    """Shared by all tests that only read: whoever changes a weight takes `fresh_pair`."""
    return fill_with_noise(load_pair("tiny", b_init_std=0.01, device="cpu"))


@pytest.fixture
def fresh_pair() -> Pair:
    return fill_with_noise(load_pair("tiny", b_init_std=0.01, device="cpu"))
