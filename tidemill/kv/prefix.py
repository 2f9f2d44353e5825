"""Which page holds which content: chained SHA-256 keys of full pages, salted per tenant."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256


def root_key(salt: str, page_size: int) -> bytes:
    """Where a tenant's chains start. Chains of different salts never meet, so no tenant can find another's pages."""
    return sha256(b"tidemill-prefix\0%d\0" % page_size + salt.encode()).digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full page: its tokens and, through `parent`, all tokens before it."""
    return sha256(parent + array("I", token_ids).tobytes()).digest()


def group_key(group: int, key: bytes) -> bytes:
    """Key of a group's page that ends where `key` does."""
    return key + group.to_bytes(2, "big") if group else key


class PrefixIndex:
    """Content key to page and back. A page here is full and its content final; it may be owned or free (evictable)."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def pages(self) -> Iterable[int]:
        """All cached pages, in no order."""
        return self._key_of

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def put(self, key: bytes, page: int) -> None:
        """Remember the page's content, unless another page already holds the same or this page is known already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> bool:
        """The page's content is about to be overwritten. True if it was cached."""
        key = self._key_of.pop(page, None)
        if key is None:
            return False
        del self._page_of[key]
        return True

    def clear(self) -> int:
        num_forgotten = len(self._page_of)
        self._page_of.clear()
        self._key_of.clear()
        return num_forgotten

    def check_integrity(self) -> None:
        assert len(self._page_of) == len(self._key_of)
        assert all(self._page_of[key] == page for page, key in self._key_of.items())
