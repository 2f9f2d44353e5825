"""The layers that models are made of: linear, norm, rope, attention, mlp, embedding. Each knows how
to load itself."""
