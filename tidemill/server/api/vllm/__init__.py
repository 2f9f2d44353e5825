"""Routes that vLLM has beside OpenAI's."""
