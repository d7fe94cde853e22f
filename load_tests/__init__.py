"""Load over HTTP: what a client sees. Imports nothing of ours."""
