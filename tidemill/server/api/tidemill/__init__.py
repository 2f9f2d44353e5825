"""Tidemill's own API."""
