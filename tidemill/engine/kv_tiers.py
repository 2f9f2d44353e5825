"""The tiers of an engine: host memory and a file of pages, opened for its runner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from tidemill import events
from tidemill.config import EngineConfig
from tidemill.events import EventSink
from tidemill.kernels import native
from tidemill.kernels.native.sources import source_hash
from tidemill.kv.costs import Costs
from tidemill.kv.tiers import Tiers
from tidemill.runner.base import Runner
from tidemill.runner.make import make_mover
from tidemill.runner.page_file import PageFile, PageFileError
from tidemill.version import __version__


def open_tiers(runner: Runner, config: EngineConfig, weights: bytes, emit: EventSink, now: Callable[[], float]) -> Tiers | None:
    """`weights`: a digest of them and of how positions are rotated. A file that cannot be used is an event, and pages are
    computed again."""
    if not config.host_slots:
        return None
    opened = None
    if config.kv_disk:
        try:
            opened = PageFile.open(Path(config.kv_disk), config.kv_disk_bytes, _digest(config, weights), config.page_bytes)
        except PageFileError as error:
            emit(events.TierNotUsed(now(), "disk", str(error)))
    for reason in opened.ignored if opened else ():
        emit(events.TierNotUsed(now(), "disk", reason))
    runner.mover = make_mover(runner, config, opened.file if opened else None)
    return Tiers(
        config.host_slots,
        opened.file.num_records if opened else 0,
        opened.contents if opened else (),
        Costs(config.token_budget),
        config.page_bytes,
    )


def _digest(config: EngineConfig, weights: bytes) -> bytes:
    """Of all that the bytes of a page depend on, besides its tokens: pages of another one are never read."""
    calibration = b"" if config.kv_calibration is None else Path(config.kv_calibration).expanduser().read_bytes()
    parts = (
        __version__, config.device, config.dtype, config.scheme, config.kv_dtype, config.page_size, config.layout,
        config.fast_math,
        native.lib is not None and source_hash(Path(native.__file__).parent), weights.hex(),
        hashlib.sha256(calibration).hexdigest(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).digest()
