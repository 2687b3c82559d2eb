#!/bin/sh
set -e
for image in /usr/lib/nodekeel/images/*; do
    ctr --namespace k8s.io images import "$image"
done
