//! Per-node volumes for Kubernetes: claim in, directory with a quota and PersistentVolume out, and back.
