"""Training a DSpark drafter: on-policy text, losses, the loop, held-out measurements."""
