#!/bin/bash
# The server of a run, as a SLURM job: sbatch --export=ALL,OMNI_SHARED=/shared/run-1 slurm-server.sh
# It is put into the queue again when it is preempted or its node fails, and goes on from its state.
#SBATCH --job-name=omni-server
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --time=7-00:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu
shared=${OMNI_SHARED:?set it to a directory that all nodes have and only you may enter}
mkdir -p -m 700 "$shared"
[ -s "$shared/key" ] || (umask 077 && openssl rand -hex 32 > "$shared/key")
host=$(hostname -I | cut -d' ' -f1) # the first address of this node; take that of the fast network
echo "tcp://$host:5555" > "$shared/server.new"
mv "$shared/server.new" "$shared/server" # whole, or not at all
exec lightning-omni serve --host "$host" --port 5555 --data-port 5556 --key-file "$shared/key" \
    --heartbeat-timeout 10s --state "$shared/state" --once
