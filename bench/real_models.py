"""Greedy text of a GGUF file beside llama.cpp's, both in float32.

    python -m bench.real_models MODEL.gguf --llama VENV [--prompts 8] [--tokens 48]

llama.cpp rounds activations to 8 bits before it multiplies quantized weights, so the file's values are first written out as
float32 (a file four to eight times as large, in a temporary folder): then both compute the same sums, in other orders. VENV has
llama-cpp-python. Each prompt is tokenized by both; the tokens must be equal. Where the answers part, the difference of
Tidemill's two likeliest log probabilities says whether it was a tie.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "The three primary colours are",
    "import numpy as np\n\nx = np.array([1, 2, 3])\nprint(",
    "Der schnelle braune Fuchs",
    "Q: What is 12 times 12?\nA:",
    "In 1969, the first humans landed on",
    "A list of five fruits:\n1.",
    "SELECT name FROM users WHERE",
    "She opened the door and saw",
]

_LLAMA = """
import json, sys, llama_cpp
path, asked = sys.argv[1], json.loads(sys.argv[2])
model = llama_cpp.Llama(path, n_ctx=1024, n_threads=asked["threads"], verbose=False)
for text in asked["prompts"]:
    prompt = model.tokenize(text.encode(), add_bos=True, special=False)
    model.reset()
    made = []
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        made.append(token)
        if len(made) == asked["tokens"] or token == model.token_eos():
            break
    print(json.dumps([prompt, made]), flush=True)
"""


def write_float32(source: Path, target: Path) -> None:
    """The same file with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ask_llama(python: Path, model: Path, prompts: list[str], num_tokens: int, threads: int) -> list[Any]:
    asked = json.dumps({"prompts": prompts, "tokens": num_tokens, "threads": threads})
    done = subprocess.run([python, "-c", _LLAMA, str(model), asked], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "float32.gguf"
        write_float32(args.model, whole)
        theirs = ask_llama(args.llama / "bin" / "python", whole, prompts, args.tokens, args.threads)
    from tidemill import LLM, SamplingParams

    llm = LLM(str(args.model), dtype="float32", threads=args.threads, max_context=1024)
    num_equal, num_ties = 0, 0
    for text, (prompt, expected) in zip(prompts, theirs, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=len(expected), logprobs=2, ignore_eos=True)
        ids = llm.tokenizer.encode(text)
        if ids != prompt:
            sys.exit(f"{text!r} is tokenized as {ids}; by llama.cpp as {prompt}")
        output = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0]
        made = list(output.token_ids)
        parting = next((i for i, (ours, other) in enumerate(zip(made, expected, strict=True)) if ours != other), None)
        if parting is None:
            num_equal += 1
            print(f"equal, {len(made)} tokens: {text!r} -> {output.text[:60]!r}")
            continue
        assert output.logprobs is not None
        first, second = sorted((value for _, value in output.logprobs[parting].top), reverse=True)[:2]
        num_ties += first - second < 1e-3
        print(f"parts at token {parting}, log probabilities {first:.5f} and {second:.5f}: {text!r}")
    print(f"{args.model.name}: {num_equal} of {len(prompts)} answers of {args.tokens} tokens equal, {num_ties} part at a tie")


if __name__ == "__main__":
    main()
