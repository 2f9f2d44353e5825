"""Adapters in the GPU's runner, its kernels interpreted: what it says is what the CPU's engine
says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.engine.test_lora import ask, make_lora, with_loras
from tests.helpers import greedy
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401 - fixtures
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.kernels.cuda import norm as cuda_norm
from tidemill.kernels.cuda.lora import CudaLora
from tidemill.layers import norm


def test_adapters_on_a_gpu(on_gpu, folder, tmp_path, monkeypatch):  # noqa: F811
    """Prompts and single tokens, two adapters and none in one step; a request alone has the same
    bits."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(norm, "add_rms_norm", cuda_norm.add_rms_norm)  # it adds what adapters do
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    paths = [make_lora(tmp_path / f"l{i}", base, i, rank=rank) for i, rank in enumerate((4, 20))]
    requests = {
        "a": (ids(5, 1), greedy(2, logprobs=1, prompt_logprobs=0), 1),
        "b": (ids(20, 2), greedy(2, logprobs=1), 2),
        "none": (ids(7, 3), greedy(2, logprobs=1), 0),
    }
    expected = ask(with_loras(folder, *paths), requests)

    def engine():
        core = on_gpu(max_loras=2, max_lora_rank=32)
        for number, path in enumerate(paths, 1):
            core.part(AdapterStore).load_now(number, f"a{number}", str(path))
        return core

    with mock.patch.object(
        CudaLora, "_add_up", autospec=True, side_effect=CudaLora._add_up
    ) as added_up:
        together = ask(engine(), requests)
    assert added_up.called  # the kernel behind gate and up multiplies for `down`
    for name, answer in together.items():
        assert answer.tokens == expected[name].tokens
        for mine, theirs in zip(answer.logprobs, expected[name].logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    assert ask(engine(), {"x": requests["b"]})["x"] == together["b"]
    plain = on_gpu()
    assert plain.runner.loras is None
    assert ask(plain, {"x": requests["none"]})["x"] == together["none"]
