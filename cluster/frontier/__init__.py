"""`dspark bench`: tokens/s per user against tokens/s per node, of every policy under the same load (Figures 7, 8)."""
