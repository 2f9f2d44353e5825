"""Rows, batch, forward, sample: the only room that touches the device during a step."""
