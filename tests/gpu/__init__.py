"""Tests on a GPU: `make test-gpu` on a machine that has one. Everywhere else they are not collected
(tests/conftest.py)."""
