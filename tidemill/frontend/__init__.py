"""Tokenizer, chat templates, detokenizer, stops. Text lives here; the engine sees ints."""
