"""The choice of a GGUF of a folder or a hub repository: by its quantization, with all the parts of
a split one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tidemill.errors import CheckpointError, ModelNotFound

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|FP16|F32|FP32|[MN]XFP4\w*|NVFP4))$",
    re.IGNORECASE,
)
_NOT_A_MODEL = ("mmproj", "imatrix")  # image encoders and statistics, beside models
# Without a choice, the first of these that is there: four bits first, as Ollama and llama.cpp
# choose.
_PREFERRED = (
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "UD-Q4_K_XL", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL",
    "Q5_K_M", "Q5_K_S", "Q5_0", "Q6_K", "Q8_0",
    "Q3_K_M", "BF16", "F16",
)  # fmt: skip
_MAX_LISTED = 30


@dataclass(frozen=True)
class GGUFSet:
    """A GGUF and, if it is split, its parts in order."""

    stem: str  # without folder, part number and ending
    files: tuple[str, ...]
    num_parts: int

    @property
    def quantization(self) -> str:
        found = _QUANTIZATION.search(self.stem)
        return found[1].upper() if found else ""

    @property
    def model(self) -> str:
        """The name without the quantization: what two files of the same model share."""
        return _QUANTIZATION.sub("", self.stem).lower()

    @property
    def is_complete(self) -> bool:
        return len(self.files) == self.num_parts


def gguf_sets(names: Iterable[str]) -> list[GGUFSet]:
    """The GGUFs among the names (paths with slashes), the parts of split ones together."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix != ".gguf" or any(word in path.name.lower() for word in _NOT_A_MODEL):
            continue
        part = _PART.fullmatch(path.name)
        key = (str(path.parent / part[1]), int(part[3])) if part else (str(path.with_suffix("")), 1)
        found.setdefault(key, []).append(name)
    return [
        GGUFSet(PurePosixPath(stem).name, tuple(files), num) for (stem, num), files in found.items()
    ]


def choose(names: Iterable[str], quantization: str, where: str) -> GGUFSet:
    """The one of this quantization; if it is empty, the preferred one. `where` is named in errors."""
    sets = gguf_sets(names)
    wanted = quantization.upper()
    fits = (
        [each for each in sets if each.quantization == wanted or each.stem.upper() == wanted]
        if wanted
        else sets
    )
    if not wanted and len({each.model for each in sets}) == 1:
        for preferred in _PREFERRED:
            if exact := [each for each in sets if each.quantization == preferred]:
                fits = exact
                break
        else:
            fits = sets[:1]
    if len(fits) == 1:
        return fits[0]
    there = (
        [each.stem for each in fits] if fits else [each.quantization or each.stem for each in sets]
    )
    listed = ", ".join(there[:_MAX_LISTED]) + (", …" if len(there) > _MAX_LISTED else "")
    what = f"{len(fits)} GGUF models" if fits else f"no GGUF of quantization {quantization}"
    raise ModelNotFound(
        f"{where} has {what}.",
        fix=f"It has {listed}. Give one, like {where}:{there[0]}."
        if there
        else "It has no GGUF at all.",
    )


def parts(path: Path) -> list[Path]:
    """All files of a GGUF, which are there, in order."""
    part = _PART.fullmatch(path.name)
    if not part:
        return [path]
    files = [
        path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf")
        for number in range(1, min(int(part[3]), 10_000) + 1)
    ]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{path} is split into {len(files)} files, of which {len(missing)} are missing: {', '.join(missing[:5])}.",
            fix="Put all parts into one folder.",
        )
    return files
