"""The cluster's working parts: decisions (core), computing (engine) and the thin Ray shells around them."""
