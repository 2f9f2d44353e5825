"""Tidemill: an LLM inference and serving engine."""
