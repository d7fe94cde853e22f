"""Discrete-event simulation of a cluster with the decisions of `actors.core` (the command is `cluster.simulate`)."""
