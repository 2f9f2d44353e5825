"""Compression: checkpoints in, smaller checkpoints out."""
