"""The closed-loop simulator of N workers that drives admission, routing and eviction policies."""
