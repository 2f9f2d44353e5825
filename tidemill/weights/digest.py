"""The digest of a model's weights: all bytes of its files."""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidemill.weights.locate import weight_files

_PIECE = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint_of(path: Path) -> bytes:
    """A fingerprint of models that were trained differently, without reading all of them: sizes,
    and bytes from all over the files."""
    files = [path] if path.is_file() else [*weight_files(path), path / "config.json"]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\n{size}\n".encode())
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(size * sample // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


def digest_of(path: Path, num_threads: int = 4) -> bytes:
    """The digest of a GGUF file, or of the safetensors files and the settings in a folder. Reads
    all of it: about a second a gigabyte and core."""
    files = [path] if path.is_file() else sorted([*weight_files(path), *path.glob("*.json")])
    pieces = [
        (file, start) for file in files for start in range(0, max(1, file.stat().st_size), _PIECE)
    ]
    with ThreadPoolExecutor(num_threads) as threads:
        sums = list(threads.map(_sum_of, pieces))
    digest = hashlib.sha256()
    for (file, start), (size, checksum) in zip(pieces, sums, strict=True):
        digest.update(f"{file.name if path.is_dir() else ''}\n{start} {size} {checksum}\n".encode())
    return digest.digest()


def _sum_of(piece: tuple[Path, int]) -> tuple[int, int]:
    """Its bytes are read a little at a time."""
    file, start = piece
    size = checksum = 0
    with file.open("rb") as opened:
        opened.seek(start)
        while size < _PIECE and (part := opened.read(min(2**20, _PIECE - size))):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return size, checksum
