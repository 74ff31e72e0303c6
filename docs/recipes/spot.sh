#!/bin/bash
# A group on a spot instance (AWS): spot.sh python train.py
# Two minutes before the instance is taken the group is told, finishes its batch, gives its samples back and leaves.
set -u
metadata=${OMNI_METADATA:-http://169.254.169.254/latest}
"$@" &
group=$!
trap 'kill -TERM "$group" 2> /dev/null' TERM INT
while kill -0 "$group" 2> /dev/null; do
    token=$(curl -sf -m 2 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$metadata/api/token")
    if curl -sf -m 2 -o /dev/null -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/spot/instance-action"; then
        kill -TERM "$group"
        break
    fi
    sleep "${OMNI_EVERY:-5}" &
    wait -n "$group" $! # whichever is over first
done
wait "$group"
