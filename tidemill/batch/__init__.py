"""Batch inference over a file of requests: `tidemill batch`."""
