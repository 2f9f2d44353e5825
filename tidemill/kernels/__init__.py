"""One op a file: a torch reference (semantics, oracle, fallback) and who computes it instead:
`native/` in C, `cuda/` in Triton.

Every op here keeps the bits of a row whatever other rows are computed with it:
docs/how/batch-invariance.md.

Shape letters: T tokens of a step, H hidden, N query heads, G KV heads, R = N / G, D head dim, S
tokens of a page, P pages.
"""
