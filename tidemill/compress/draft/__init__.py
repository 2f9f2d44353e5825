"""Training of draft heads: text, hidden states, training, measured acceptance. The heads are
runner/spec/heads.py."""
