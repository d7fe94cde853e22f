"""The Triton kernels. Imported only where they run, so that a machine without Triton never notices them."""
