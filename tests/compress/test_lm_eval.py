"""lm-evaluation-harness against `tidemill serve`: a local task of multiple choice, beside `tidemill
evaluate`."""

import json

import pytest

from tests.server.conftest import Server
from tidemill import LLM
from tidemill.compress.evaluate_tasks import read_choices

pytestmark = pytest.mark.slow
ITEMS = [
    {
        "question": f"Which word begins with {word[0]}?",
        "choices": ["tide", "mill", "water", "wheel house"][: 2 + i % 3],
        "answer": 0,
    }
    for i, word in enumerate(["tide", "tower", "table", "two", "ten", "tree"])
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_a_local_task(tiny_folder, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    path = tmp_path / "choices.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(path=path))
    server = Server(tiny_folder, "--dtype", "float32").wait()
    try:
        how = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={tiny_folder},tokenizer_backend=huggingface"
        made = lm_eval.simple_evaluate(
            "local-completions",
            model_args=how + ",tokenized_requests=True,num_concurrent=4",
            tasks=["local_choices"],
            task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        )
    finally:
        server.stop()
    found = made["results"]["local_choices"]
    llm = LLM(str(tiny_folder), progress=False, dtype="float32", max_requests=8)
    own = read_choices(path).run(llm, lambda _: None)["choices"]
    assert (found["acc,none"], found["acc_norm,none"]) == (
        pytest.approx(own.acc),
        pytest.approx(own.acc_norm),
    )
