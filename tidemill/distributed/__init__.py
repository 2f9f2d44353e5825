"""Several processes that compute one model: which part each has, and how they exchange what they
computed."""
