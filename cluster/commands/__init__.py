"""One module a command (or a few that belong together); each takes the parsed arguments and returns an exit code."""
