"""Assembly and ingress: Ray Serve, HTTP, the `dspark` command."""
