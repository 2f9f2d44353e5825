"""Ranks of a model as processes that share the GPU at hand: run by themselves, since the
multi-process service must be there before a process uses the GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines import ask, assert_near, random_llama, with_weights
from tests.gpu.ranks import other_host, sharing, small_core, some_requests
from tests.helpers import LONG_S
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types.sampling import SamplingParams

RANKS = 2
PROMPT = list(range(2, 200))


@pytest.fixture(scope="module", autouse=True)
def _service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    assert not torch.cuda.is_initialized(), "run this file by itself"
    with sharing(tmp_path_factory.mktemp("service")):
        yield


def assert_alone_as_among_others(
    core: Any, requests: dict[str, Any], together: dict[str, Any], *names: str
) -> None:
    for name in names:
        assert ask(core, {name: requests[name]})[name] == together[name], (
            f"{name} alone and among others differ"
        )


def test_collectives() -> None:
    """Sums and gathers by CUDA IPC and by NCCL: the reference's bits, eager and captured."""
    command = [sys.executable, "-m", "bench.gpu_group", "--only", "sums", "--ranks", str(RANKS)]
    subprocess.run(command, check=True, timeout=LONG_S)


def test_tensor_parallel(tmp_path: Path) -> None:
    """As near to float32 as one process; the same bits alone, among others and in halves."""
    reference = random_llama(tmp_path)
    options = EngineOptions(
        model=str(tmp_path), kv_memory_bytes=2**28, max_requests=64, tensor_parallel=RANKS
    )
    core, requests = load_core(options), some_requests(12)
    together = ask(core, requests)
    assert_alone_as_among_others(core, requests, together, "r0", "r5", "r10")
    assert_near(reference, core, PROMPT)
    core.close()
    core = load_core(replace(options, nano_batching="on"))
    assert ask(core, requests) == together, "steps in halves differ"
    core.close()


def test_pipeline(tmp_path: Path) -> None:
    """Stages on one GPU: the bits of one process, alone and among others; the last one also as of
    another host."""
    random_llama(tmp_path)
    requests, answers = some_requests(), []
    with contextlib.ExitStack() as workers:
        for stages, is_remote in ((1, False), (RANKS, False), (RANKS, True)):
            given = workers.enter_context(other_host(tmp_path))[0] if is_remote else {}
            core = small_core(tmp_path, pipeline_parallel=stages, **given)
            answers.append(ask(core, requests))
            assert_alone_as_among_others(core, requests, answers[-1], "r3")
            core.close()
            assert answers[0] == answers[-1], "stages and one process differ"


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_hosts(kind: str, tmp_path: Path) -> None:
    """The last rank as of another host, by NCCL: the bits of CUDA IPC, alone and among others."""
    (random_llama if kind == "llama" else random_moe)(tmp_path)
    requests, answers = some_requests(), []
    with contextlib.ExitStack() as workers:
        for is_remote in (False, True):
            given = workers.enter_context(other_host(tmp_path))[0] if is_remote else {}
            # halves are tried before the ranks begin
            given |= {"max_requests": 64, "nano_batching": "auto"}
            core = small_core(
                tmp_path, tensor_parallel=RANKS, expert_parallel=kind == "experts", **given
            )
            answers.append(ask(core, requests))
            assert_alone_as_among_others(core, requests, answers[-1], "r0", "r3")
            core.close()
    assert answers[0] == answers[1], "NCCL and CUDA IPC differ"


def random_moe(folder: Path) -> Any:
    """A small mixture of experts, as Transformers computes it in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, initializer_range=0.05, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    model = with_weights(Qwen3MoeForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)
    return with_weights(model.cuda().eval(), torch.float32)


def test_experts(tmp_path: Path) -> None:
    """Experts divided among ranks: as near to float32 as in one process, the same bits alone and
    among others."""
    assert_as_near(
        random_moe(tmp_path), tmp_path, {}, {"tensor_parallel": RANKS, "expert_parallel": True}
    )


@pytest.mark.parametrize("kind", ["fp8", "int4", "int8"])
def test_quantized(kind: str, tmp_path: Path) -> None:
    """Quantized weights, cut among ranks: as near to float32 as in one process, the same bits alone
    and among others."""
    one = {"quantization": kind}
    assert_as_near(random_llama(tmp_path), tmp_path, one, one | {"tensor_parallel": RANKS})


def assert_as_near(reference: Any, folder: Path, *layouts: dict[str, Any]) -> None:
    exact, errors, requests = exact_scores(reference), list[float](), some_requests()
    for layout in layouts:
        core = small_core(folder, **layout)
        together = ask(core, requests)
        assert_alone_as_among_others(core, requests, together, "r3")
        scored = ask(core, {"x": (PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))})["x"][1]
        error = torch.tensor([entry.logprob for entry in scored]) - exact
        errors.append(float(error.pow(2).mean().sqrt()))
        core.close()
    assert errors[1] < 1.3 * errors[0] + 0.005


def exact_scores(reference: Any) -> torch.Tensor:
    """Log probabilities of the prompt's tokens, in float32."""
    targets = torch.tensor(PROMPT[1:], device="cuda")[:, None]
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT], device="cuda")).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, targets).flatten().cpu()
