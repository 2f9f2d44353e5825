"""Reference pages made from the options table and from the flags of other engines: python -m
tidemill.cli.options_doc FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

from tidemill.capabilities import FEATURES
from tidemill.cli.capabilities import sections
from tidemill.cli.foreign import table
from tidemill.cli.options import ACCESS, CONFIG, LOGGING, OPTIONS, RAY, STORAGE, Option
from tidemill.config.options import ADAPTERS, ENGINE, SERVING

_INTRO = f"""# Options

<!-- Made by `python -m tidemill.cli.options_doc docs/reference`. -->

An option can be given in three ways. The first that is present counts:

1. as a flag: `tidemill serve --max-context 4096`;
2. as an environment variable: `TIDEMILL_MAX_CONTEXT=4096`. An empty variable counts as absent;
3. in a TOML file, named by `--config tidemill.toml` or `{CONFIG.variable}`. Keys are names of flags, with hyphens or underscores.

```toml
model = "smollm2"
port = 8080
max-context = 4096
kv-memory = "2G"
prefix-caching = true
allowed-host = ["llm.example.org"]
```

- Flags of the kind `--x/--no-x` are `true` or `false` in the other two.
- What may be given several times is a TOML list, or a variable with spaces in between. Lists of two sources are not joined.
- Sizes are written like `512M`, `4G` or `1.5GiB` and are powers of 1024. Paths are relative to the current folder.
- A key that is not an option is an error. So is a wrong value; the error names its source. A variable that is no option, but has
  nearly the name of one, is reported and ignored.

`tidemill serve --show-config` prints every value and its source. API keys are never printed.

`tidemill serve --help` shows the basic options, `--help-all` all of them. The tables below begin with the basic ones.

[Flags of vLLM, SGLang and llama.cpp](foreign-flags.md) are understood, too.
"""
_SECTIONS = {
    ENGINE: "Taken by `serve`, `generate`, `chat`, `batch`, `calibrate`, `measure-layers` and `bench latency`, `throughput` "
    "and `policies`. `simulate` takes those that decide who runs when. Other commands take a few of them, as their `--help` "
    "lists.",
    ADAPTERS: "Of `serve`; `generate` and `chat` take one `--lora`, and `--max-lora-rank`. More in [LoRA](../how/lora.md).",
    SERVING: "Of `serve`.",
    RAY: "Of `serve` and `batch`. More in [Ray](../how/ray.md).",
    ACCESS: "Of `serve`. Commands that talk to a server send the first key of `TIDEMILL_API_KEY` unless they are given one.",
    STORAGE: "Of `serve`.",
    LOGGING: "Of `serve`.",
}


_FOREIGN = """# Flags of vLLM, SGLang and llama.cpp

<!-- Made by `python -m tidemill.cli.options_doc docs/reference`. -->

Commands also take these flags. Underscores count as hyphens. They are flags only: variables and config files take
[our names](options.md). Commands side by side: [vLLM](../start/from-vllm.md), [Ollama and llama.cpp](../start/from-ollama.md).

- A flag with a counterpart is translated.
- A flag that changes no answer is accepted with a note.
- Any other flag is an error. The error names all of them at once, and the option with the nearest name if there is one.

"""


_INSTEAD = """
## Others

These are errors. The second column says what there is here.

| flag | here |
|---|---|
| `--speculative-config`, `--speculative-…` (vLLM, SGLang) | `--speculate`, `--draft-model`, `--draft-heads`, `--max-drafts` |
| `--cpu-offload-gb` (vLLM) | `--weight-memory`: how much memory weights may take |
| `--kv-transfer-config` (vLLM), `--disaggregation-mode` (SGLang) | `--prefill`, `--decode`; `--kv-export`, `--kv-import` |
| `--revision`, `--tokenizer` (vLLM) | download with `hf download` and give the folder; the tokenizer is the model's own |
| `--hf-overrides` (vLLM), `--rope-scaling`, `--override-kv` (llama.cpp) | none: the model is what its `config.json` says |
| `--mmproj` (llama.cpp), `--mm-processor-kwargs` (vLLM) | none: a server's models read text |
| `--hf-file`, `--model-url` (llama.cpp) | `org/name:FILE` or `org/name:Q4_K_M`; a downloaded file by its path |
| `--models-dir`, `--models-preset` (llama.cpp) | `NAME=MODEL` for each model, or `[[models]]` of `--config` |
| `--grammar`, `--json-schema`, `--logit-bias`, `--samplers`, `--ignore-eos` (llama.cpp) | fields of a request |
| `--rpc` (llama.cpp) | `--remote-workers`, and `tidemill worker` on the other hosts |
| `--no-cont-batching` (llama.cpp) | `--policy static` |
| `--base-gpu-id` (SGLang), `--device-ids` (vLLM) | the variable `CUDA_VISIBLE_DEVICES` |
| `--allowed-origins` (vLLM) | `--allowed-origin`, once for each |
| `--middleware`, `--logits-processors`, `--worker-cls` (vLLM) | none: code is not loaded into the server |
"""


def _line(option: Option) -> str:
    """A line of a table. The variable is not listed: it follows from the name."""
    more = " May be given several times." if option.is_list else ""
    flag = f"`{option.flag}`" + (" or the first argument" if option.name == "model" else "")
    return f"| {flag} | {option.default_text or '-'} | {option.help}{more} |"


def options_page() -> str:
    parts = [_INTRO]
    for section, words in _SECTIONS.items():
        options = sorted(
            (option for option in OPTIONS if option.section == section),
            key=lambda option: not option.short,
        )
        lines = [_line(option) for option in options]
        parts.append(
            "\n".join(
                [
                    f"## {section}",
                    "",
                    words,
                    "",
                    "| option | default | meaning |",
                    "|---|---|---|",
                    *lines,
                    "",
                ]
            )
        )
    return "\n".join(parts)


def foreign_flags_page() -> str:
    parts = (("Translated", True), ("Without effect", False))
    tables = [f"## {heading}\n\n" + "\n".join(table(kind)) + "\n" for heading, kind in parts]
    return _FOREIGN + "\n".join(tables) + _INSTEAD


_CAPABILITIES = """# Capabilities

<!-- Made by `python -m tidemill.cli.options_doc docs/reference`. -->

Which features can be used together. Two that are not listed here with each other can be: a test draws such
pairs and compares their tokens with those of each alone.

- A combination that is not possible is refused at start, or with status 400 where a request asks for it. The error names both
  features, the reason and what to do.
- What "is left out" does not stop the engine: it goes on without that feature, and gives the reason.
- `tidemill capabilities` prints this table, and `--json` all of it. `tidemill capabilities --with kv-policy` says
  what goes with a feature.

Names like `kv-dtype int8` are options and their values. "Heads" are those of attention; "draft heads" are the drafters of
`--draft-heads`.

## Features

| kind | features |
|---|---|
"""


def capabilities_page() -> str:
    groups: dict[str, list[str]] = {}
    for feature in FEATURES.values():
        groups.setdefault(feature.group, []).append(f"`{feature.name}`")
    parts = [
        _CAPABILITIES
        + "\n".join(f"| {group} | {', '.join(names)} |" for group, names in groups.items())
    ]
    parts.append("\n\n## What cannot be combined")
    for heading, rows in sections():
        parts.append(
            f"\n\n### {heading}\n\n| feature | not with | because | instead |\n|---|---|---|---|"
        )
        parts += [f"\n| {' | '.join(row)} |" for row in rows]
    return "".join(parts) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "capabilities.md").write_text(capabilities_page())
    (folder / "options.md").write_text(options_page())
    (folder / "foreign-flags.md").write_text(foreign_flags_page())
