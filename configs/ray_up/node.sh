# Read by every command that the launcher runs on a node: where the software lies, and what Ray's processes there shall know.
export PATH="$HOME/dspark/env/bin:$PATH"
export RAY_AUTH_MODE=token            # every call carries ~/.ray/auth_token, which the launcher has put here
export RAY_USAGE_STATS_ENABLED=0
export RAY_agent_register_timeout_ms=120000   # a busy machine needs longer than Ray's default for its agents to come up
export RAY_worker_niceness=0   # by default Ray's workers yield (nice 15) to any other program on the machine
DSPARK_RAY_OPTIONS=""
# What is special about this one machine, written by whoever looks after it. For example:
#   DSPARK_RAY_OPTIONS="--num-gpus=4 --node-ip-address=10.0.0.7"
#   export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1
if [ -f ~/dspark/local.sh ]; then . ~/dspark/local.sh; fi
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"   # a socket for every stream

# Ray gives up on a node that does not come up within half a minute; one that is busy with something else may need longer.
patiently() {
  for attempt in 1 2 3; do
    "$@" && return
    echo "attempt $attempt to start Ray failed"
    ray stop --force
  done
  return 1
}
