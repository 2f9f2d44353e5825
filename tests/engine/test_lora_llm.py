"""Adapters in scripts and on the command line."""

from __future__ import annotations

import signal

import pytest
import torch
from typer.testing import CliRunner

from tests.engine.test_lora import make_lora
from tests.helpers import greedy
from tidemill.cli.main import app
from tidemill.engine.llm import LLM
from tidemill.errors import AdapterError, ConfigError, InvalidRequest


@pytest.fixture(scope="module")
def paths(tiny_folder, tmp_path_factory):
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("loras")
    return [make_lora(folder / f"l{i}", base, i) for i in range(2)]


def test_a_prompt_has_the_adapter_it_names(tiny_folder, paths):
    llm = LLM(str(tiny_folder), progress=False, loras={"a": paths[0]}, max_lora_rank=8)
    llm.load_lora("b", paths[1])
    params = greedy(8, ignore_eos=True)
    outputs = llm.generate(["xyz"] * 3, params, lora=["a", "b", None])
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert len({tuple(one) for one in tokens}) == 3
    assert llm.generate("xyz", params, lora="b")[0].outputs[0].token_ids == tokens[1]
    assert llm.generate("xyz", params)[0].outputs[0].token_ids == tokens[2]
    assert "".join(llm.stream("xyz", params, lora="a")) == outputs[0].text
    messages = [{"role": "user", "content": "x"}]
    assert llm.chat(messages, params, lora="a")[0].text == "".join(
        llm.stream_chat(messages, params, lora="a")
    )
    llm.unload_lora("b")
    with pytest.raises(InvalidRequest, match="There is no adapter 'b'"):
        llm.generate("xyz", params, lora="b")
    with pytest.raises(InvalidRequest, match="for each of 1 prompts"):
        llm.generate("xyz", params, lora=["a", "a"])
    with pytest.raises(AdapterError, match="holds no"):
        llm.load_lora("c", tiny_folder)
    with pytest.raises(ConfigError, match="An adapter is given as 'a'"):
        LLM(str(tiny_folder), progress=False, loras=["a"])
    with pytest.raises(AdapterError, match="ranks are 1 to 4 here"):
        LLM(str(tiny_folder), progress=False, loras={"a": paths[0]}, max_lora_rank=4)
    on_interrupt = signal.getsignal(signal.SIGINT)
    command = [
        "generate",
        "--model",
        str(tiny_folder),
        "--lora",
        f"a={paths[0]}",
        "-n",
        "8",
        "-t",
        "0",
        "xyz",
    ]
    answer = CliRunner().invoke(app, command, catch_exceptions=False)
    signal.signal(signal.SIGINT, on_interrupt)
    assert answer.exit_code == 0
    assert outputs[0].text.split("\n")[0] in answer.output
