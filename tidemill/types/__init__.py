"""Types that all rooms share: models, layers and caches, weights, sampling, requests, messages,
events."""
