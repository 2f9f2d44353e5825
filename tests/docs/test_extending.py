"""Examples of docs/extending at work: a dialect that answers, a family that is loaded."""

import json
import sys
import types

import pytest
import torch
from starlette.testclient import TestClient

from tests.docs.pages import DOCS, blocks
from tests.helpers import byte_tokenizer
from tests.server.scripted_service import ScriptedService, app_of, outputs_of
from tidemill import LLM, SamplingParams
from tidemill.models.registry import ARCHITECTURES


class Service(ScriptedService):
    async def encode(self, text):
        return list(text.encode())


def run(number: int, page: str, names: dict) -> None:
    """Runs a Python block of a page."""
    examples = [block for block in blocks(DOCS / "extending" / page) if block.language == "python"]
    exec(compile(examples[number].text, str(examples[number]), "exec"), names)


@pytest.fixture
def client():
    names: dict = {"__name__": "dialect"}
    run(0, "dialect.md", names)
    texts = ["High ", "water."]
    return TestClient(app_of(names["TideCodec"], "/tide", lambda: Service(outputs_of(texts))))


def test_whole(client):
    answer = client.post("/tide", json={"ask": "What?"})
    assert answer.json() == {"says": "High water.", "tokens": 3, "why": "stop"}


def test_streamed(client):
    answer = client.post("/tide", json={"ask": "What?", "stream": True})
    events = [line for line in answer.text.splitlines() if line]
    assert events == ['data: {"says":"High "}', 'data: {"says":"water."}', 'data: {"tokens":3}']


def test_a_family_from_outside(tmp_path, monkeypatch):
    """Its tokens are those of Transformers' class with the same layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config)
    reference.save_pretrained(tmp_path)
    byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    of_qwen = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    settings = {name: value for name, value in settings.items() if name not in of_qwen}
    settings |= {"architectures": ["TideForCausalLM"], "model_type": "tide"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    module = types.ModuleType("mypackage.tide")
    run(0, "model-family.md", module.__dict__)
    monkeypatch.setitem(sys.modules, "mypackage.tide", module)
    monkeypatch.setitem(ARCHITECTURES, ("hf", "TideForCausalLM"), "")
    run(1, "model-family.md", {})

    prompt = [5, 6, 7, 8]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), max_context=128, dtype="float32") as llm:
        [output] = llm.generate([{"prompt_token_ids": prompt}], params)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(output.outputs[0].token_ids) == expected[0, 4:].tolist()
