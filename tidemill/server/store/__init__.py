"""The stores of the server: files, batches, responses and prompt caches."""
