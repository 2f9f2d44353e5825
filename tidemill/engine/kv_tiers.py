"""The tiers of an engine: host memory, a file of pages and other engines, opened for its runner."""

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
from tidemill.runner.page_file import Opened, PageFile, PageFileError
from tidemill.runner.page_moves import Outside
from tidemill.transfer.base import PROTOCOL, Identity
from tidemill.transfer.open import open_exporter, open_importer
from tidemill.version import __version__


def open_tiers(runner: Runner, config: EngineConfig, weights: bytes, emit: EventSink, now: Callable[[], float]) -> Tiers | None:
    """`weights`: a digest of them and of how positions are rotated. A file that cannot be used is an event, and pages are
    computed again; other engines that have other pages are an error."""
    if not config.has_tiers:
        return None
    identity = _identity(config, weights)
    opened = _open_file(config, identity, emit, now) if config.kv_disk else None
    exporter = importer = None
    try:
        if config.export_slots:
            exporter = open_exporter(
                config.kv_export, config.export_slots, config.page_bytes, identity | {"protocol": PROTOCOL}, config.kv_key_file
            )
        if config.kv_import:
            importer = open_importer(config.kv_import, config.page_bytes, identity | {"protocol": PROTOCOL}, config.kv_key_file)
    except BaseException:
        Outside(opened.file if opened else None, exporter).close()
        raise
    runner.mover = make_mover(runner, config, Outside(opened.file if opened else None, exporter, importer))
    return Tiers(
        config.host_slots,
        opened.file.num_records if opened else 0,
        opened.contents if opened else (),
        Costs(config.token_budget),
        config.page_bytes,
        config.export_slots,
    )


def _open_file(config: EngineConfig, identity: Identity, emit: EventSink, now: Callable[[], float]) -> Opened | None:
    digest = hashlib.sha256(repr(sorted(identity.items())).encode()).digest()
    try:
        opened = PageFile.open(Path(config.kv_disk), config.kv_disk_bytes, digest, config.page_bytes)
    except PageFileError as error:
        emit(events.TierNotUsed(now(), "disk", str(error)))
        return None
    for reason in opened.ignored:
        emit(events.TierNotUsed(now(), "disk", reason))
    return opened


def _identity(config: EngineConfig, weights: bytes) -> dict[str, str]:
    """All that the bytes of a page depend on, besides its tokens: pages of another one are never read."""
    calibration = b"" if config.kv_calibration is None else Path(config.kv_calibration).expanduser().read_bytes()
    parts = {
        "version": __version__,
        "device": config.device,
        "dtype": config.dtype,
        "weight format": config.scheme,
        "KV format": config.kv_dtype,
        "page size": config.page_size,
        "page layout": config.layout,
        "fast math": config.fast_math,
        "build of kernels": native.lib is not None and source_hash(Path(native.__file__).parent),
        "weights": weights.hex(),
        "calibration": hashlib.sha256(calibration).hexdigest(),
    }
    return {name: str(part) for name, part in parts.items()}
