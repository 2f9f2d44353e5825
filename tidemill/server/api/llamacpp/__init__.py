"""llama.cpp's API."""
