"""Examples of docs/extending at work: a dialect that answers, a family that is loaded."""

import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from starlette.testclient import TestClient

from tests.docs.pages import DOCS, blocks
from tests.helpers import LONG_S, byte_tokenizer
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


def tide_folder(path):
    """A folder of a family that Tidemill does not have, and its model by Transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config)
    reference.save_pretrained(path)
    byte_tokenizer(path)
    settings = json.loads((path / "config.json").read_text())
    of_qwen = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    settings = {name: value for name, value in settings.items() if name not in of_qwen}
    settings |= {"architectures": ["TideForCausalLM"], "model_type": "tide"}
    (path / "config.json").write_text(json.dumps(settings))
    return reference


PROMPT = [5, 6, 7, 8]


def expected_of(reference):
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return reference.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def test_a_family_from_outside(tmp_path, monkeypatch):
    """Its tokens are those of Transformers' class with the same layers."""
    reference = tide_folder(tmp_path)
    module = types.ModuleType("mypackage.tide")
    run(0, "model-family.md", module.__dict__)
    monkeypatch.setitem(sys.modules, "mypackage.tide", module)
    monkeypatch.setitem(ARCHITECTURES, ("hf", "TideForCausalLM"), "")
    run(1, "model-family.md", {})

    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), max_context=128, dtype="float32") as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params)
    assert list(output.outputs[0].token_ids) == expected_of(reference)


USE_PACKAGE = """
import sys
from tidemill import LLM, SamplingParams
from tidemill.engine.parts.drafting import Drafting

params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
options = {"max_context": 128, "dtype": "float32", "policy": "halves", "speculate": "repeat"}
with LLM(sys.argv[1], **options) as llm:
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    kinds = type(llm.core.scheduler.policy), type(llm.core.part(Drafting).drafters[0])
print([kind.__module__ for kind in kinds], list(output.outputs[0].token_ids))
"""


def test_a_package_with_entry_points(tmp_path):
    """A family, a policy and a drafter of the page's package, which is installed beside Tidemill."""
    model, site = tmp_path / "model", tmp_path / "site"
    model.mkdir()
    reference = tide_folder(model)
    code, project = blocks(DOCS / "extending" / "packages.md")
    info = site / "tide_extras-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tide_extras.py").write_text(code.text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tide-extras\nVersion: 1.0\n")
    points = re.sub(r'project\.entry-points\."([\w.]+)"', r"\1", project.text).replace('"', "")
    (info / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(site), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}

    def python(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LONG_S
        )

    done = python("-c", USE_PACKAGE, str(model))
    assert done.returncode == 0, done.stderr[-2000:]
    said = f"['tide_extras', 'tide_extras'] {expected_of(reference)}"
    assert done.stdout.splitlines()[-1] == said
    (site / "tide_extras.py").write_text("import nothing_like_this")
    done = python("-m", "tidemill", "generate", "x", "--model", str(model), "--policy", "halves")
    assert done.returncode == 1
    assert "tide-extras" in done.stderr
    assert "Traceback" not in done.stderr
