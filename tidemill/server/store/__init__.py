"""What the server keeps: files, batches, responses and prompt caches."""
