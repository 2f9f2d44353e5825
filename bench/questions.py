"""Ordinary questions without parameters: the API, the command line and Python must give the same answers.

    python -m bench.questions              the 12 answers, compared
    python -m bench.questions --measure    right answers with the model's sampling defaults and with others

Sampling draws a new seed for each request, so for the comparison a seed is the one parameter that is given.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from typing import Any
from urllib.error import URLError

from tidemill import LLM, SamplingParams
from tidemill.compress.evaluate_tasks import QUESTIONS as ANSWERS

QUESTIONS = (
    "What is the capital of France?",
    "What is a tide mill?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a haiku about the sea.",
    "What is 7 plus 5?",
    "Translate 'good morning' into Spanish.",
    "Name three planets of the solar system.",
    "Explain in one sentence what a computer does.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Tell me a short story about a dog.",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "neutral (temperature 1)": {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0},
    "llama.cpp's (temperature 0.8, top-k 40, top-p 0.95, min-p 0.05)": {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0,
    },
    "temperature 0.2, top-p 0.9": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.0},
    "the model's defaults": {},
}  # fmt: skip
SEED, NUM_SAMPLES, MAX_TOKENS, PORT = 1, 16, 128, 8231


def by_python(model: str) -> list[str]:
    llm = LLM(model, progress=False)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.text for output in llm.chat(asked, SamplingParams(seed=SEED))]


def by_command(model: str, question: str) -> str:
    command = [sys.executable, "-m", "tidemill", "generate", question, "-m", model, "--chat", "--seed", str(SEED)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.removesuffix("\n")


def by_api(model: str) -> list[str]:
    command = [sys.executable, "-m", "tidemill", "serve", model, "--port", str(PORT), "--served-name", "m", "--no-request-log"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None and not is_up():
            time.sleep(0.2)
        return [ask({"messages": [{"role": "user", "content": question}], "seed": SEED}) for question in QUESTIONS]
    finally:
        server.terminate()
        server.wait()


def is_up() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health"):
            return True
    except URLError:
        return False


def ask(body: dict[str, object]) -> str:
    address, headers = f"http://127.0.0.1:{PORT}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def compare(model: str) -> bool:
    python, api = by_python(model), by_api(model)
    all_same = True
    for question, one, other in zip(QUESTIONS, python, api, strict=True):
        same = one == other == by_command(model, question)
        all_same &= same
        print(f"\n## {question}   [{'the same' if same else 'NOT THE SAME'}]\n{one}", flush=True)
    return all_same


def measure(model: str) -> None:
    llm = LLM(model, progress=False)
    asked = [[{"role": "user", "content": question}] for question in ANSWERS]
    print("| sampling | right | tokens an answer |\n|---|---|---|")
    for name, given in SETTINGS.items():
        outputs = llm.chat(asked, SamplingParams(n=NUM_SAMPLES, seed=SEED, max_tokens=MAX_TOKENS, **given))
        pairs = [(sample, right) for output, right in zip(outputs, ANSWERS.values(), strict=True) for sample in output.outputs]
        num_right = sum(re.search(right, sample.text) is not None for sample, right in pairs)
        mean = sum(len(sample.token_ids) for sample, _ in pairs) / len(pairs)
        print(f"| {name} | {num_right} of {len(pairs)} | {mean:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    if given.measure:
        measure(given.model)
    elif not compare(given.model):
        sys.exit("answers differ")
