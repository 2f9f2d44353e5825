"""Runs other projects' own server tests, unmodified, against `tidemill serve`: see
bench/foreign_suites.py."""
