"""Replay: computes a recording again, on any build, device or configuration, and compares every
token."""
