"""Under which names Ray finds the parts of a deployment."""

NAMESPACE = "dspark"
SUPERVISOR = "supervisor"
