#!/usr/bin/env bash
# Starts a container with Ray on this machine, as a part of a cluster; the same command on each machine, the head first.
#
#   run_cluster.sh [--profile] IMAGE HEAD_ADDRESS --head|--worker HF_HOME [-e VLLM_HOST_IP=ADDRESS] [MORE OF DOCKER ...]
#
#   IMAGE         Weft's image, see docs/containers.md
#   HEAD_ADDRESS  address of the head on the private network that joins the machines
#   HF_HOME       this machine's cache of models, the same models on each machine
#   --profile     lets the container read the GPUs' performance counters (CAP_SYS_ADMIN): only to profile or trace
#
# VLLM_HOST_IP is this machine's own address on that network; it differs on each machine and must be set, in the
# environment or, as vLLM's script of this name has it, by -e among the arguments of docker, which counts more. RUNTIME is
# the program that runs containers: docker unless it is set. Closing the shell ends the container.
set -euo pipefail

usage() {
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

profile=()
if [ "${1-}" = --profile ]; then
    profile=(--cap-add=CAP_SYS_ADMIN)
    shift
fi
[ "$#" -ge 4 ] || usage
image=$1 head=$2 role=$3 cache=$4
shift 4
before=
for word in "$@"; do
    case $before$word in
        --env=VLLM_HOST_IP=* | -eVLLM_HOST_IP=* | --envVLLM_HOST_IP=*) VLLM_HOST_IP=${word#*VLLM_HOST_IP=} ;;
    esac
    before=
    case $word in -e | --env) before=$word ;; esac
done
: "${VLLM_HOST_IP:?set it to the address of this machine on the private network}"

case $role in
    --head) start=(ray start --block --head --node-ip-address="$VLLM_HOST_IP" --port=6379) ;;
    --worker) start=(ray start --block --node-ip-address="$VLLM_HOST_IP" --address="$head:6379") ;;
    *) usage ;;
esac
if [ "$role" = --head ] && [ "$VLLM_HOST_IP" != "$head" ]; then
    echo "this is the head, and VLLM_HOST_IP is $VLLM_HOST_IP, not $head: they must be the same" >&2
    exit 2
fi
[ -d "$cache" ] || {
    echo "there is no directory $cache" >&2
    exit 2
}
cache=$(cd -- "$cache" && pwd) # a relative path would be the name of a volume

name=weft-node-$$
trap 'trap - EXIT; "${RUNTIME:-docker}" rm --force "$name" >/dev/null 2>&1 || true' EXIT INT TERM
gpus=()
if [ -e /dev/nvidiactl ]; then
    gpus=(--gpus all)
fi
# The host's network: Ray, gloo and NCCL choose ports. Its /dev/shm: ranks exchange tensors there.
"${RUNTIME:-docker}" run --name "$name" --network host --ipc host "${gpus[@]}" "${profile[@]}" \
    --entrypoint "${start[0]}" \
    --volume "$cache:/var/lib/weft/.cache/huggingface" \
    --env VLLM_HOST_IP="$VLLM_HOST_IP" --env HF_TOKEN --env RAY_AUTH_MODE --env RAY_AUTH_TOKEN \
    "$@" "$image" "${start[@]:1}"
