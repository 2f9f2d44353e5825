"""LoRA adapters in the engine: each request computes with its own, as if it had been merged into the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run, take
from tidemill import events
from tidemill.engine.core import EngineCore
from tidemill.errors import AdapterError, InvalidRequest
from tidemill.sampling import SamplingParams
from tidemill.wire import Abort, LoadAdapter, Submit

SHAPE = {"hidden_size": 64, "intermediate_size": 92, "vocab_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PARAMS = {"greedy": greedy(8, logprobs=2), "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=8, logprobs=2)}


def make_lora(
    path: Path,
    base: torch.nn.Module,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = ATTENTION + MLP,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> Path:
    """A random adapter as PEFT saves it, large enough to change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = torch.randn(shape, generator=generator) * (0.3 / rank**0.25)
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"} | settings
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return path


def merged(base: torch.nn.Module, path: Path, target: Path) -> Path:
    """The base with the adapter's product added to its weights, saved as a checkpoint of its own."""
    stated, tensors = json.loads((path / "adapter_config.json").read_text()), load_file(path / "adapter_model.safetensors")
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")].double()
            scale = stated["lora_alpha"] / (down.shape[0] ** (0.5 if stated.get("use_rslora") else 1))
            stored = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[stored] = (weights[stored].double() + scale * up @ down.double()).float()
    whole = type(base)(base.config)
    whole.load_state_dict(weights)
    whole.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return make_llama(folder, **SHAPE), folder


def ids(num: int, seed: int) -> list[int]:
    return torch.randint(0, 128, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def with_loras(folder: Path, *paths: Path, **options: object) -> EngineCore:
    core = make_core(load_model(folder), **{"max_loras": max(len(paths), 1)} | options)
    for number, path in enumerate(paths, 1):
        core.adapters.load_now(number, f"a{number}", str(path))
    return core


def ask(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams, int]]) -> dict[str, Answer]:
    answers = {name: Answer() for name in requests}
    for name, (prompt, params, adapter) in requests.items():
        core.submit(Submit(name, prompt, params, adapter=adapter))
    while core.has_work:
        take(core, answers)
    core.scheduler.check_integrity()
    return answers


KINDS = [
    {"rank": 8},
    {"rank": 1, "targets": ("q_proj", "v_proj")},
    {"rank": 64, "targets": MLP, "lora_alpha": 16},
    {"rank": 16, "use_rslora": True, "lora_alpha": 4},
    {"rank": 5, "targets": ("k_proj", "up_proj")},
    {"rank": 24, "targets": ("o_proj",), "dtype": torch.bfloat16},
    {"rank": 256, "lora_alpha": 64, "targets": ("q_proj", "down_proj")},
    {"rank": 12, "targets": ("gate_proj",), "dtype": torch.float16},
]


def test_eight_of_a_hundred_in_one_batch_equal_their_merged_models(base, tmp_path, backend):
    """A hundred are loaded; eight of other ranks and targets answer together, beside a request without one."""
    reference, folder = base
    paths = [make_lora(tmp_path / f"l{i}", reference, 10 + i, **kind) for i, kind in enumerate(KINDS)]
    small = make_lora(tmp_path / "small", reference, 99, rank=2, targets=("v_proj",))
    core = with_loras(folder, *[small] * 92, *paths, max_lora_rank=256, max_loras=100)
    assert sum(adapter.slot >= 0 for adapter in core.adapters) == 100
    requests = {f"r{i}": (ids(20 + 9 * i, i), greedy(10, logprobs=1), 93 + i) for i in range(8)}
    requests["none"] = (ids(30, 50), greedy(10, logprobs=1), 0)
    together = ask(core, requests)
    plain = run(make_core(load_model(folder)), {name: request[:2] for name, request in requests.items()})
    assert together["none"] == plain["none"]
    for i, path in enumerate(paths):
        model = load_model(merged(reference, path, tmp_path / f"m{i}"))
        expected = run(make_core(model), {"x": requests[f"r{i}"][:2]})["x"]
        assert together[f"r{i}"].tokens == expected.tokens, KINDS[i]
        assert together[f"r{i}"].tokens != plain[f"r{i}"].tokens
    for name, request in list(requests.items())[:3]:
        assert ask(core, {"again": request})["again"].tokens == together[name].tokens  # cached
    core = with_loras(folder, *paths, max_lora_rank=256)
    for i in range(8):
        prompt, params, _ = requests[f"r{i}"]
        assert ask(core, {"x": (prompt, params, i + 1)})["x"] == together[f"r{i}"]  # bit for bit
