"""The tiers of an engine: host memory, a file of pages and other engines, opened for its runner."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from tidemill.config import EngineConfig
from tidemill.config.transfer import rank_address
from tidemill.distributed.transfer.base import PROTOCOL, Identity
from tidemill.distributed.transfer.open import open_exporter, open_importer
from tidemill.kernels.machine import arithmetic
from tidemill.kv.costs import Costs
from tidemill.kv.tiers import Tiers
from tidemill.runner.base import Runner
from tidemill.runner.make import make_mover
from tidemill.runner.page_file import Opened, PageFile, PageFileError, records_in
from tidemill.runner.page_moves import Outside
from tidemill.types import events
from tidemill.types.events import EventSink
from tidemill.version import __version__

_log = logging.getLogger("tidemill.engine")
_PATIENCE_S = 2.0  # for an announcement that rank 0 has had


def open_tiers(
    runner: Runner,
    config: EngineConfig,
    weights: bytes,
    emit: EventSink,
    now: Callable[[], float],
    no_disk: str = "",
) -> Tiers | None:
    """`weights`: a digest of them and of how positions are rotated. A file that cannot be used is
    an event, and pages are computed again; other engines that have other pages are an error.
    `no_disk`: why another rank has no file."""
    if not config.has_tiers:
        return None

    def note(why: str) -> None:
        emit(events.TierNotUsed(now(), "disk", why))
        _log.warning("pages of the KV cache on disk are not used: %s", why)

    outside, opened = open_outside(runner, config, weights, 0, note)
    runner.mover = make_mover(runner, config, outside)
    if no_disk:
        note(no_disk)
    num_records = opened.file.num_records if opened and not no_disk else 0
    # each rank's file holds as many pages, also of one whose pages are larger
    if config.num_ranks > 1:
        num_records = min(
            num_records, records_in(config.kv_disk_bytes // config.num_ranks, config.page_bytes)
        )
    return Tiers(
        config.host_slots,
        num_records,
        [(key, record) for key, record in opened.contents if record < num_records]
        if opened
        else (),
        Costs(config.token_budget),
        config.page_bytes,
        config.export_slots,
    )


def open_outside(
    runner: Runner, config: EngineConfig, weights: bytes, rank: int, note: Callable[[str], None]
) -> tuple[Outside, Opened | None]:
    """Opens the places outside host memory that a rank's pages move to and from. `note`: is told
    why a file, or part of one, is not used."""
    identity, page_bytes = _identity(config, weights, rank), runner.cache[0].nbytes
    opened = _open_file(config, identity, page_bytes, rank, note) if config.kv_disk else None
    exporter = importer = None
    identity, key_file = identity | {"protocol": PROTOCOL}, config.kv_key_file
    try:
        if config.export_slots:
            exporter = open_exporter(
                rank_address(config.kv_export, rank),
                config.export_slots,
                page_bytes,
                identity,
                key_file,
            )
        if config.kv_import:
            addresses = [rank_address(address, rank) for address in config.kv_import]
            importer = open_importer(
                addresses, page_bytes, identity, key_file, _PATIENCE_S if rank else 0.0
            )
    except BaseException:
        Outside(opened.file if opened else None, exporter).close()
        raise
    return Outside(opened.file if opened else None, exporter, importer), opened


def _open_file(
    config: EngineConfig,
    identity: Identity,
    page_bytes: int,
    rank: int,
    note: Callable[[str], None],
) -> Opened | None:
    """Opens the page file. Of several ranks, each has a file in a folder of its own, and its share
    of the quota."""
    digest = hashlib.sha256(repr(sorted(identity.items())).encode()).digest()
    folder, num = Path(config.kv_disk), config.num_ranks
    folder = folder if num == 1 else folder / f"rank-{rank}-of-{num}"
    try:
        opened = PageFile.open(folder, config.kv_disk_bytes // num, digest, page_bytes)
    except PageFileError as error:
        note(str(error))
        return None
    for reason in opened.ignored:
        note(reason)
    return opened


def _identity(config: EngineConfig, weights: bytes, rank: int) -> dict[str, str]:
    """All that the bytes of a page depend on, besides its tokens: pages of another one are never
    read."""
    calibration = (
        b""
        if config.kv_calibration is None
        else Path(config.kv_calibration).expanduser().read_bytes()
    )
    parts = {
        "version": __version__,
        "device": config.device,
        "dtype": config.dtype,
        "weight format": config.scheme,
        "KV format": config.kv_dtype,
        "page size": config.page_size,
        "page layout": config.layout,
        "fast math": config.fast_math,
        **arithmetic(config.device),
        "weights": weights.hex(),
        "calibration": hashlib.sha256(calibration).hexdigest(),
    }
    if config.num_ranks > 1:
        # whose pages have the same bits
        layout = "1d" if config.tensor_layout == "phased" else config.tensor_layout
        parts["rank"] = (
            rank,
            config.tensor_parallel,
            config.pipeline_parallel,
            layout,
            config.expert_parallel,
        )
    if config.pipeline_parallel > 1:
        parts["division of layers"] = "+".join(map(str, config.pipeline_layers))
    return {name: str(part) for name, part in parts.items()}
