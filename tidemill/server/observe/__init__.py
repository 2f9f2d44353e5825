"""Observation of the server: explanations, the live view, traces and recordings."""
