"""Computing: torch engines that know nothing of Ray."""
