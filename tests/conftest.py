"""Models for tests: tiny random Llamas made with Transformers, and the real default model with its reference."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tests.helpers import byte_tokenizer, make_llama
from tidemill.kernels import machine, native
from tidemill.weights.locate import locate

torch.set_num_threads(2)
machine.settle_vector_math()  # references are made with torch, too
if native.lib:
    native.lib.set_threads(2)


# Beyond what two cores do in a quarter of an hour: `make test-slow` runs these, too.
_ONLY_WHEN_SLOW = (
    *(f"equal_transformers[{family}-torch" for family in ("Qwen2", "Qwen2 with windows", "Mistral", "SmolLM3", "Gemma2")),
    *(f"among_others[{name}-torch" for name in ("BertModel", "RobertaModel", "BertForMaskedLM")),
    "test_scores_of_pairs_equal_transformers[torch-XLM",
    "test_cuda.py::test_a_layer_computes_what_its_spec_says[window",
    "test_cuda.py::test_a_layer_computes_what_its_spec_says[sinks",
    "server/test_agents.py",
    "server/test_chat_url.py",
    "server/test_deploy.py",
    "server/test_listen.py",
)


class InTwo(LoadScopeScheduling):
    """For two workers (`make test`): files are kept whole, and all that start processes stay with one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        _, folder, *_ = file.split("/")
        return "processes" if folder in ("server", "cli", "bench") or file.endswith("test_client.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InTwo:
    return InTwo(config, log)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Invariance without compiled kernels takes minutes: one way of sampling is always tested, all by `make test-slow`."""
    for item in items:
        if "smollm2 torch" in item.nodeid and ("greedy" in item.nodeid or "penalties" in item.nodeid):
            item.add_marker(pytest.mark.slow)
        if any(part in item.nodeid for part in _ONLY_WHEN_SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch) -> str:
    """Every op by the compiled kernels, and by its torch reference."""
    if request.param == "torch":
        monkeypatch.setattr(native, "lib", None)
    elif native.lib is None:
        pytest.skip(native.why)
    return request.param


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return locate("smollm2")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path):
    """The same GGUF through Transformers, in float32. Its conversion takes 20 s, so its safetensors are kept between runs."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    kept = Path(__file__).parent.parent / ".test-cache" / smollm2_path.stem
    if not (kept / "config.json").is_file():
        read = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
        settings = read.config.to_dict()
        settings.pop("quantization_config", None)  # the weights are plain by now, but it would refuse to save them
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        part = kept.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part, max_shard_size="200MB")
        part.rename(kept)
    return AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32).eval(), kept


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A small Llama with a byte-level tokenizer and a chat template: everything a server needs, loaded in no time."""
    path = tmp_path_factory.mktemp("tiny")
    make_llama(path, vocab_size=320, max_position_embeddings=512)
    byte_tokenizer(path)
    return path
