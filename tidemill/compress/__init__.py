"""Smaller models: evaluation, pruning, distillation, conversion."""
