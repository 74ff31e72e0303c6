#!/bin/bash
# Groups of a run, as a SLURM array: sbatch --export=ALL,OMNI_SHARED=/shared/run-1 slurm-groups.sh
# Each task is one group of one node. Before its time is up, and when it is preempted, it leaves in good order and is put
# into the queue again; after a failure it joins again.
#SBATCH --job-name=omni-group
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -u
trap 'told=1; kill -TERM "${group:-}" 2> /dev/null' TERM # srun passes it on; torchrun then ends with 1
shared=${OMNI_SHARED:?set it to the directory of the server}
for attempt in $(seq 20); do
    until [ -s "$shared/server" ]; do sleep 5; done
    LIGHTNING_OMNI_SERVER=$(cat "$shared/server") # another one, if the server has moved
    LIGHTNING_OMNI_KEY=$(cat "$shared/key")
    export LIGHTNING_OMNI_SERVER LIGHTNING_OMNI_KEY
    srun torchrun --standalone --nproc-per-node "${OMNI_RANKS:-4}" train.py &
    group=$!
    wait "$group"
    code=$?
    [ -z "${told:-}" ] || wait "$group" # the signal has ended the first wait
    echo "group $SLURM_ARRAY_TASK_ID, attempt $attempt: status $code"
    [ "$code" -eq 0 ] && exit 0
    if [ -n "${told:-}" ] || [ "$code" -ge 128 ]; then # a signal: its time is up
        exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    fi
    sleep "${OMNI_PAUSE:-10}"
done
exit 1
