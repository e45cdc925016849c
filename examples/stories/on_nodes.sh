#!/bin/bash
# Runs a training script on simulated nodes, one rank on each; the last node may send little at a time.
#
#     examples/stories/on_nodes.sh NODES MEGABITS_PER_SECOND examples/stories/pipeline.py --width 65536
#
# Each node is a network namespace with an address and a network card of its own, plugged into one bridge. A limit of 0 is
# none. It needs Linux with unshare, ip and tc, and root or the right to make namespaces (unshare --user); nothing on this
# machine is changed, and all of it ends with the job.
set -euo pipefail

if [ "${INSIDE_NAMESPACE:-}" = "" ]; then
    export INSIDE_NAMESPACE=1
    as_root=$([ "$(id -u)" = 0 ] || echo "--user --map-root-user")
    # shellcheck disable=SC2086
    exec unshare $as_root --net --mount --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi

nodes=$1 limit=$2
shift 2
mount -t tmpfs tmpfs /run # where ip keeps the names of namespaces
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for ((node = 0; node < nodes; node++)); do
    ip netns add "node$node"
    ip link add "port$node" type veth peer name eth0 netns "node$node"
    ip link set "port$node" master bridge up
    ip -n "node$node" address add "10.77.0.$((node + 1))/24" dev eth0
    ip -n "node$node" link set lo up
    ip -n "node$node" link set eth0 up
done
if [ "$limit" != 0 ]; then
    ip netns exec "node$((nodes - 1))" \
        tc qdisc add dev eth0 root tbf rate "${limit}mbit" burst 64kb latency 100ms
fi

# A name for each node, where they have one host name; gloo shall use the card, not the host's name.
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=$nodes LOCAL_RANK=0 GLOO_SOCKET_IFNAME=eth0
for ((node = 0; node < nodes; node++)); do
    RANK=$node COMMTRACE_NODE_ID=node$node ip netns exec "node$node" python "$@" &
done
failed=0
for ((node = 0; node < nodes; node++)); do wait -n || failed=1; done
exit $failed
