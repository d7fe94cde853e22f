"""Drafters: small models that propose a block of tokens for the target to verify."""
